"""The metadata of a speculative round, cut out of the traced round: the very operations that it runs for them.

An operation belongs to them if a builder of `jaxspec.metadata` asks for it. Of each phase, whatever its metadata read
that is not made by themselves is an input, and whatever of theirs the rest of the round reads is an output. A slice of
an array is no output of its own: the round reads it where it lies. Packed buffers are written in place, as in the
round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxspec import Params
from jaxspec.benchmarks.launches import phased_round
from jaxspec.benchmarks.timing import Work
from jaxspec.metadata.build import SCOPE
from jaxspec.steps import SpecStep
from jaxspec.steps.state import SpecState
from pallas_kernels import PackedMetadata

VIEWS = ("slice", "reshape", "squeeze")  # primitives that read an array where it lies


@dataclasses.dataclass(frozen=True)
class Cut:
    """The metadata of one phase.

    Attributes:
      phase: its name.
      equations: what is computed, in order.
      reads: the variables that come from elsewhere.
      writes: the variables that others need, or the arrays that those are slices of.
      carried: which of `writes` takes the place of which of `reads`, a packed buffer.
    """

    phase: str
    equations: list
    reads: list
    writes: list
    carried: dict[Any, int]

    def work(self, values: Sequence[np.ndarray], rows: int) -> Work:
        """A chain's work, see `jaxspec.benchmarks.timing`.

        Args:
          values: of each of `reads`.
          rows: B; what has as many integers goes through the touch.
        """
        known = dict(zip(self.reads, values, strict=True))
        vectors = {str(n): v for n, v in enumerate(values) if v.shape == (rows,) and v.dtype == np.int32}
        tables = {n: v for n, v in enumerate(values) if str(n) not in vectors and self.reads[n] not in self.carried}
        before = {place: known[read] for read, place in self.carried.items()}
        out = [before.get(n, np.zeros(var.aval.shape or (1,), np.int32)) for n, var in enumerate(self.writes)]
        whole = evaluate(self.equations, self.reads, self.writes)

        def run(vectors, tables, out):
            def value(number, read):
                if read in self.carried:
                    return out[self.carried[read]]
                return vectors[str(number)] if str(number) in vectors else tables[number]

            made = whole(*map(value, range(len(self.reads)), self.reads))
            return vectors, [jnp.atleast_1d(array).astype(jnp.int32) for array in made]  # what the touch takes

        return Work(run, vectors, tables, out)


def evaluate(equations: Sequence, reads: Sequence, writes: Sequence):
    """The function from the values of some variables to those of others that equations compute."""
    jaxpr = jax.make_jaxpr(lambda: ())().jaxpr.replace(
        constvars=[], invars=list(reads), outvars=list(writes), eqns=list(equations), effects=core.no_effects
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))


def cut(spec: SpecStep, params: Params, state: SpecState) -> tuple[list[Cut], Any]:
    """The metadata of each phase that has any, and a function that runs the round up to what they read.

    Args:
      spec: the step.
      params, state: arrays, or their shapes.

    Returns:
      The cuts, in the order of the round, and `f(params, state) -> [values of the reads of each cut]`.
    """
    traced = jax.make_jaxpr(phased_round, static_argnums=0)(spec, params, state)
    jaxpr = traced.jaxpr
    phases = {}
    for equation in jaxpr.eqns:
        names = [name for name in str(equation.source_info.name_stack).split("/") if name]
        if SCOPE in names:
            phases.setdefault(names[0], []).append(equation)
    cuts = [_cut_out(phase, chosen, jaxpr, _buffers(params, state, jaxpr)) for phase, chosen in phases.items()]
    wanted = list(dict.fromkeys(read for piece in cuts for read in piece.reads))
    known = [*jaxpr.constvars, *jaxpr.invars]
    whole = evaluate(jaxpr.eqns, known, wanted)

    def values(params, state):
        found = dict(zip(wanted, whole(*traced.consts, *jax.tree.leaves((params, state))), strict=True))
        return [[found[read] for read in piece.reads] for piece in cuts]

    return cuts, values


def _cut_out(phase: str, chosen: list, jaxpr, buffers: dict) -> Cut:
    made = {var: equation for equation in chosen for var in equation.outvars}
    reads = [v for e in chosen for v in e.invars if not isinstance(v, core.Literal) and v not in made]
    mine = set(map(id, chosen))
    others = [equation for equation in jaxpr.eqns if id(equation) not in mine]
    taken = [v for e in others for v in e.invars if not isinstance(v, core.Literal) and v in made]
    taken += [v for v in jaxpr.outvars if not isinstance(v, core.Literal) and v in made]

    def source(var):
        """The array that a variable is a slice of, if it is one of these metadata; None if it comes from elsewhere."""
        while var in made and made[var].primitive.name in VIEWS:
            var = made[var].invars[0]
        return var if var in made else None

    writes = list(dict.fromkeys(found for var in taken if (found := source(var)) is not None))
    reads = list(dict.fromkeys(reads))
    carried = {before: writes.index(after) for before, after in buffers.items() if before in reads and after in writes}
    return Cut(phase, chosen, reads, writes, carried)


def _buffers(params: Params, state: SpecState, jaxpr) -> dict:
    """{variable of a packed buffer in the state before the round: the variable of the same buffer after it}."""

    def is_packed(node):
        return isinstance(node, PackedMetadata)

    marks = jax.tree.map(lambda node: jax.tree.map(lambda _: is_packed(node), node), state, is_leaf=is_packed)
    first = len(jax.tree.leaves(params))
    pairs = zip(jaxpr.invars[first:], jaxpr.outvars, jax.tree.leaves(marks), strict=False)
    return {before: after for before, after, packed in pairs if packed}

"""What a piece of a step costs inside a captured program: a chain of steps in one compiled loop.

    for turn in range(turns):                              a loop on the device, on a GPU one command buffer
        for step in range(steps):                          unrolled
            vectors, out = work(vectors, tables, out)      what is timed
            vectors = touch(vectors, out)                  one small kernel

The `touch` kernel takes every output as an operand and gives every vector anew, so to the compiler each step needs all
outputs of the one before: nothing is dropped as dead, moved out of the loop or shared by two steps. It moves the
lengths up by a token in the first half of the steps and down in the second, and leaves the other vectors as they are.

A chain of the touch alone is what the rest is measured against. The chains that are compared are timed in turn, call by
call. What is carried is donated, so within a call every array stays where it is. Before each timed call they all move:
a kernel of dependent loads takes up to 0.4 us more or less by where on the device its few lines lie, so one place
would be a bias of the chain that no number of calls takes away. Two calls that are not timed follow each move: in them
the command buffer is recorded anew, until the program's own buffers, too, have found their places.
"""

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.steps.step import compiler_options
from pallas_kernels import backend as backends

Array = jax.Array
Vectors = dict[str, Array]  # int32[B] each, "seq_lens" among them if lengths are to move
Step = Callable[[Vectors, Any, Any], tuple[Vectors, Any]]

BLOCK = 256  # requests a program of the touch moves
WARM_UP = 2  # calls of a chain after each move that are not timed
COPY_TURNS = 8  # turns a call of the copy
SPACERS, SPACER = 3, 1 << 16  # arrays put between old and new places, and the largest in cells


@dataclasses.dataclass(frozen=True)
class Touch:
    """The kernel that ends a step, an `Operation` of pallas_kernels: `inputs` are the outputs of the step's work.

    Attributes:
      rows: B.
      move: tokens that the first of the vectors gains.
      labels: name of each input.
    """

    rows: int
    move: int
    labels: tuple[str, ...]
    name = "touch"
    reference_is_faster = False

    @property
    def programs(self) -> int:
        return max(-(-self.rows // BLOCK), 1)

    def body(self, lanes, program, ins: tuple, outs: tuple) -> None:
        *vectors, total = outs
        lane = lanes.iota(lanes.width(self.rows, BLOCK)) + program * BLOCK
        live = lane < self.rows
        values = [lanes.load(vector, (lane,), live) for vector in vectors]
        cells = [lanes.load(ref, (0,) * len(ref.shape)) for ref in ins]
        for number, (vector, value) in enumerate(zip(vectors, values, strict=True)):
            lanes.store(vector, (lane,), value if number else value + self.move, live)

        def add():
            lanes.store(total, (0,), sum(cells, start=lanes.load(total, (0,))))

        lanes.when(program == 0, add)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        first, *others, total = outputs
        cells = sum((cells.reshape(-1)[:1] for cells in inputs if cells.size), start=total)
        return (first + self.move, *others, cells)


@dataclasses.dataclass(frozen=True)
class Empty:
    """A kernel that stores one number: what any launch costs. An `Operation` of pallas_kernels."""

    name = "empty"
    programs = 1
    labels = ("seq_lens",)
    reference_is_faster = False

    def body(self, lanes, program, ins: tuple, outs: tuple) -> None:
        lanes.store(outs[0], (0,), lanes.load(ins[0], (0,)))

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        return (outputs[0].at[0].set(inputs[0][0]),)


def touch(vectors: Vectors, total: Array, out: Any, move: int, backend: str | None) -> tuple[Vectors, Array]:
    """The vectors for the next step, "seq_lens" moved, and a sum of one cell of every output.

    Args:
      vectors: int32[B] each, at least one.
      total: int32[1], the sum so far.
      out: int32 arrays, in any tree.
      move: tokens.
      backend: who runs the kernel, see `pallas_kernels`.
    """
    leaves = jax.tree.leaves(out)
    names = sorted(vectors, key=lambda name: (name != "seq_lens", name))
    move = move if "seq_lens" in vectors else 0
    operation = Touch(len(vectors[names[0]]), move, tuple(f"output {n}" for n in range(len(leaves))))
    carried = (*(vectors[name] for name in names), total)
    *moved, total = backends.run(operation, backend, tuple(leaves), carried)
    return dict(zip(names, moved, strict=True)), total


def chained(work: Step, *, steps: int, turns: int, backend: str | None) -> Callable:
    """`f(vectors, total, out, tables) -> (vectors, total, out)`: `turns` times `steps` steps.

    Args:
      work: vectors and `out` after a step, of vectors, tables and `out`. The leaves of `out` are int32 arrays, all that
        the work makes. Vectors come back as they were, or written in place with the same numbers.
      backend: who runs the touch.

    Example:
      >>> import jax.numpy as jnp
      >>> add = chained(lambda vectors, tables, out: (vectors, out + tables), steps=2, turns=3, backend="reference")
      >>> lengths, zero = {"seq_lens": jnp.array([7])}, jnp.zeros(1, jnp.int32)
      >>> vectors, total, out = add(lengths, zero, zero, jnp.ones(1, jnp.int32))
      >>> vectors["seq_lens"].tolist(), total.tolist(), out.tolist()
      ([7], [21], [6])
    """
    half = steps // 2

    def step(carry, number, tables):
        vectors, total, out = carry
        vectors, out = work(vectors, tables, out)
        move = 1 if number < half else -1 if number < 2 * half else 0
        return (*touch(vectors, total, out, move, backend), out)

    def chain(vectors, total, out, tables):
        def turn(_, carry):
            for number in range(steps):
                carry = step(carry, number, tables)
            return carry

        return lax.fori_loop(0, turns, turn, (vectors, total, out))

    return chain


@dataclasses.dataclass
class Chain:
    """A compiled chain, and what it carries from call to call.

    Attributes:
      call: the compiled function of `chained`.
      carried: vectors, total and outputs.
      tables: what is only read.
      steps: steps a call.
      spacers: arrays that lie between the others.
    """

    call: Callable
    carried: tuple[Vectors, Array, Any]
    tables: Any
    steps: int
    spacers: list[Array] = dataclasses.field(default_factory=list)

    def advance(self) -> float:
        """One call: microseconds a step."""
        jax.block_until_ready(self.carried)
        start = time.perf_counter()
        self.carried = jax.block_until_ready(self.call(*self.carried, self.tables))
        return (time.perf_counter() - start) / self.steps * 1e6

    def move(self, rng: np.random.Generator) -> None:
        """Takes all arrays to other places, and calls until the program is at home there."""
        # They stay until the next move: memory that is set free would draw the program's own buffers there.
        self.spacers = jax.device_put([np.zeros(cells, np.int32) for cells in rng.integers(1, SPACER, SPACERS)])
        self.carried, self.tables = jax.block_until_ready(jax.tree.map(jnp.copy, (self.carried, self.tables)))
        for _ in range(WARM_UP):
            self.advance()

    @property
    def out(self) -> Any:
        """What the last step wrote."""
        return self.carried[2]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a chain does in a step, and what it starts from: `run`, see `chained`, and NumPy arrays or trees of them."""

    run: Step
    vectors: dict[str, np.ndarray]
    tables: Any
    out: Any

    def lower(self, *, steps: int, turns: int, backend: str | None):
        """The chain, lowered for this machine, and its arguments."""
        chain = chained(self.run, steps=steps, turns=turns, backend=backend)
        # Copies: `tables` may be shared, what is carried is donated.
        carried = jax.tree.map(jnp.array, (self.vectors, np.zeros(1, np.int32), self.out))
        arguments = (*carried, jax.tree.map(jnp.asarray, self.tables))
        return jit_chain(chain).lower(*arguments), arguments


def jit_chain(chain: Callable, options: dict[str, Any] | None = None):
    """A function of `chained`, compiled as a generation is: what it carries is donated."""
    return jax.jit(chain, donate_argnums=(0, 1, 2), compiler_options=options or compiler_options() or None)


def compile_all(works: Mapping[Any, Work], *, steps: int, turns: int, backend: str | None) -> dict[Any, Chain]:
    """The chains of several works: traced one after the other, compiled side by side meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {}
        for name, work in works.items():
            lowered, arguments = work.lower(steps=steps, turns=turns, backend=backend)
            started[name] = pool.submit(lowered.compile), arguments
        return {
            name: Chain(compiled.result(), arguments[:3], arguments[3], steps * turns)
            for name, (compiled, arguments) in started.items()
        }


def copy_chain(size: int) -> Chain:
    """A loop that reads and writes an array of `size` bytes in each turn."""

    def copying(x, none, nothing, turns):
        # How often is not known to the compiler, so no two turns become one.
        return lax.fori_loop(0, turns, lambda _, x: x + 1, x), none, nothing

    return Chain(jit_chain(copying), (jnp.zeros(size // 4, jnp.float32), (), ()), jnp.int32(COPY_TURNS), COPY_TURNS)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Microseconds a step of every timed call."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def quartiles(self) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.us, n=4, method="inclusive")
        return first, third

    def to_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "least": min(self.us),
            "most": max(self.us),
            "quartiles": self.quartiles,
            "us": list(self.us),
        }


def time_in_turn(chains: Mapping[str, Chain], runs: int) -> dict[str, Samples]:
    """`runs` timed calls of each chain, in turn; the arrays lie elsewhere in each."""
    found, rng = {name: [] for name in chains}, np.random.default_rng(0)
    for _ in range(runs):
        for name, chain in chains.items():
            chain.move(rng)
            found[name].append(chain.advance())
    return {name: Samples(tuple(us)) for name, us in found.items()}


def place_of_touch() -> str:
    """Who runs the touch on a CUDA device: the backend with the shorter launch that there is."""
    return "mosaic" if backends.declined("triton") else "triton"

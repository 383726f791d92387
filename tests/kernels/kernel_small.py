"""Kernels of a few lines, for tests of the executors themselves."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile
from kernel_problems import STALE

from pallas_kernels import checked, mosaic, triton


@dataclasses.dataclass(frozen=True)
class Small:
    """A kernel of a test: one function of (lanes, program, ins, outs)."""

    write: Callable
    programs: int = 1
    labels: tuple[str, ...] = ("x",)
    name = "small"
    reference_is_faster = False

    def body(self, lanes, program, ins, outs):
        self.write(lanes, program, ins, outs)

    def reference(self, inputs, outputs):
        return tuple(x + 1 for x in outputs)


def run_small(operation: Small, executor, inputs, *shapes):
    """The outputs, of STALE before, after a launch."""
    inputs = tuple(jnp.asarray(x, jnp.int32) for x in inputs)
    outputs = tuple(jnp.full(shape, STALE, jnp.int32) for shape in shapes)
    if executor == "checked":
        return [np.asarray(x) for x in checked.launch(operation, inputs, outputs)]
    launch = {
        "interpret": functools.partial(triton.launch, interpret=True),
        "triton": triton.launch,
        "mosaic": mosaic.launch,
    }[executor]
    call = jax.jit(functools.partial(launch, operation), compiler_options=quick_compile.options())
    return [np.asarray(x) for x in call(inputs, outputs)]

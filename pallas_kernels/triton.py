"""The lane language in Pallas Triton: compiled on CUDA, or interpreted on a CPU inside jit."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lanes import Lanes, Operation

try:
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # deprecated since jax 0.11: a later one may have dropped it
    pltriton = None

WARPS = 4  # of each program; the best of 1 to 8 for every shape measured on an H200


class TritonLanes(Lanes):
    """Loads and stores with Triton's masks."""

    def load(self, ref, index, mask=None, other=0):
        if mask is None:
            return ref[index]
        return pltriton.load(ref.at[index], mask=mask, other=ref.dtype.type(other))

    def store(self, ref, index, value, mask=None):
        if mask is None:
            ref[index] = jnp.asarray(value, ref.dtype)
        else:
            pltriton.store(ref.at[index], jnp.broadcast_to(jnp.asarray(value, ref.dtype), mask.shape), mask=mask)

    def prefix_sum(self, vector):
        return lax.cumsum(vector, axis=0)


LANES = TritonLanes()


def unavailable() -> str | None:
    """Why this jax cannot lower Pallas Triton, or None."""
    return "this jax has no Pallas Triton (jax.experimental.pallas.triton)" if pltriton is None else None


def launch(operation: Operation, inputs: tuple, outputs: tuple, *, interpret: bool = False) -> tuple:
    """Run all programs of the operation in one launch; the results alias `outputs`."""

    def kernel(*refs):
        outs = refs[len(inputs) + len(outputs) :]
        operation.body(LANES, pl.program_id(0), refs[: len(inputs)], outs)

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(operation.programs,),
            name=operation.name,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
            input_output_aliases={len(inputs) + i: i for i in range(len(outputs))},
            # Always passed: without them jax 0.10 would lower through Mosaic GPU instead.
            compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpret,
        )(*inputs, *outputs)
    )

"""The lane language in Pallas Triton: compiled on CUDA, or interpreted on a CPU inside jit."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lanes import Lanes, Operation, as_bits, from_bits

try:
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # deprecated since jax 0.11: a later one may have dropped it
    pltriton = None

WARPS = 4  # of each program that says nothing else; the best of 1 to 8 for every shape of metadata on an H200


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
    for x in () if interpret else (*inputs, *outputs):
        # Pallas indexes an array of up to 4 GiB by 32 bits, which Triton reads as signed.
        if x.dtype.itemsize == 1 and 2**31 < x.size <= 2**32:
            raise ValueError(
                f"{operation.name} is given {x.dtype}{list(x.shape)} of more than 2^31 bytes, which Triton cannot "
                "index: use wider elements, or backend='mosaic'"
            )

    def kernel(*refs):
        outs = refs[len(inputs) + len(outputs) :]
        operation.body(LANES, pl.program_id(0), refs[: len(inputs)], outs)

    operands = tuple(map(as_bits, (*inputs, *outputs))) if interpret else (*inputs, *outputs)
    results = pl.pallas_call(
        kernel,
        grid=(operation.programs,),
        name=operation.name,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[len(inputs) :]],
        input_output_aliases={len(inputs) + i: i for i in range(len(outputs))},
        # Always passed: without them jax 0.10 would lower through Mosaic GPU instead.
        compiler_params=pltriton.CompilerParams(num_warps=getattr(operation, "warps", WARPS), num_stages=1),
        interpret=interpret,
    )(*operands)
    return tuple(from_bits(x, out.dtype) for x, out in zip(results, outputs, strict=True))

"""The few operations kernel bodies are made of: vectors of int32 lanes, masked loads and stores.

Kernel bodies use these and `pl.program_id`, `pl.when`, `lax.fori_loop`, so another executor has one module to replace.

Rules that these helpers keep:

* A vector has a power-of-two number of lanes (`width`); spare lanes are masked off.
* A lane whose mask is False touches no memory: a load gives it `other`, a store skips it.
* One index a dimension and access: `ref.at[rows, columns]`, never a slice of a slice.
* Constants are NumPy scalars, so that nothing widens to 64 bits when x64 is on.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as pltriton

WARPS = 4  # of each program; the best of 1 to 8 for every shape measured on an H200


def compiler_params() -> pltriton.CompilerParams:
    """Options of every launch. Always passed: without them jax 0.10 would lower through Mosaic GPU instead."""
    return pltriton.CompilerParams(num_warps=WARPS, num_stages=1)


def width(count: int, most: int) -> int:
    """Lanes for `count` items: the next power of two, at least one warp, at most `most` (itself a power of two)."""
    return min(max(32, 1 << max(0, count - 1).bit_length()), most)


def iota(lanes: int):
    """int32[lanes]: 0, 1, 2, ..."""
    return lax.iota(jnp.int32, lanes)


def load(ref, index, mask, other: int):
    """ref[index] where mask, `other` elsewhere. `index` is a tuple with a scalar or a vector for each dimension."""
    return pltriton.load(ref.at[index], mask=mask, other=np.int32(other))


def load_scalar(ref, index):
    """ref[index] for scalars; the index must be in range."""
    return ref[index]


def store(ref, index, value, mask):
    """ref[index] = value where mask. No two lanes, masked ones included, may share an index."""
    pltriton.store(ref.at[index], value, mask=mask)


def div(a, b: int):
    """a // b for a >= 0 and a constant b > 0; truncating, which is one instruction less than Python's floor."""
    return lax.div(a, np.int32(b))


def cdiv(a, b: int):
    """a / b rounded up, for a > -b; smaller a give a value <= 0 too."""
    return lax.div(a + np.int32(b - 1), np.int32(b))

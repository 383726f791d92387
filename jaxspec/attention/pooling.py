"""The index keys of pooled attention: p tokens become one 8-bit vector, against which queries are scored.

    p keys --softmax over the pool, channel by channel--> one key --Hadamard, bfloat16--> --8 bits and a scale--> index

Each number is computed from its own pool by the same operations in the same order, sums over the p tokens and the
butterflies of the Hadamard transform written out, so that the bits of a key do not depend on which others are computed
beside it. A matrix product would leave that order to the library, which takes another one for another number of rows.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

LARGEST = 448.0  # of float8_e4m3fn
_FINEST = 2.0**-9  # the step of float8_e4m3fn below _NORMAL
_NORMAL = 2.0**-6
_LEAST_PEAK = 1e-4  # stands for a smaller largest entry, so that a row of zeros has a scale too


class IndexRows(NamedTuple):
    """What a model's indexer computes for T rows of each request.

    query   [B, T, HI, X], HI heads
    weight  float32[B, T, HI], of each head in the score of a pool, without any scale
    key     [B, T, X]
    score   [B, T, X], how much of each channel of the pool's key is this token's
    ape     float32[p, X], added to the score by place in the pool; a parameter, the same for all rows
    """

    query: Array
    weight: Array
    key: Array
    score: Array
    ape: Array


def hadamard(x: Array) -> Array:
    """The Hadamard transform over the last axis: (H x) * width ** -0.5, H[i, j] = -1 ** (number of ones in i & j).

    Args:
      x: [..., width], width a power of two, floats. Computed in float32, or in float64 if x is.

    Returns:
      [..., width], in the dtype it was computed in. Applied twice it gives x again.

    Example:
      >>> hadamard(jnp.array([3.0, 1.0, 0.0, 0.0])).tolist()
      [2.0, 1.0, 2.0, 1.0]
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"x has {width} entries in its last axis: a Hadamard transform needs a power of two")
    y = x.astype(_wide(x))
    for stage in range(width.bit_length() - 1):
        # Entries a and b, 2 ** stage apart, become a + b and a - b.
        pairs = y.reshape(*x.shape[:-1], width >> (stage + 1), 2, 1 << stage)
        sign = np.array([[1], [-1]], y.dtype)
        y = (pairs * sign + pairs[..., ::-1, :]).reshape(x.shape)
    return y * np.asarray(width**-0.5, y.dtype)


def quantize(x: Array, pow2: bool = True) -> tuple[Array, Array]:
    """Each row as 8-bit floats and a scale: x is about values * scale.

    The scale brings the row's largest magnitude a (at least 1e-4) to at most 448. With `pow2` it is the smallest power
    of two that does, 2 ** ceil(log2(a / 448)), taken from the bits of a: rows whose a is 448, 224, 112, ... keep it.
    Otherwise it is a / 448. Values are rounded to the nearest, ties to even. A NaN gives NaN.

    Args:
      x: [..., X], floats; computed in float32.
      pow2: whether scales are powers of two (static).

    Returns:
      (float8_e4m3fn[..., X], float32[...])

    Example:
      >>> values, scale = quantize(jnp.array([[448.0, -1.0], [0.0, 449.0]]))
      >>> values.astype(jnp.float32).tolist(), scale.tolist()
      ([[448.0, -1.0], [0.0, 224.0]], [1.0, 2.0])
    """
    x = x.astype(jnp.float32)
    peak = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), np.float32(_LEAST_PEAK))
    if pow2:
        # 448 is 1.75 * 2 ** 8: a mantissa above 1.75, 0x600000 in 23 bits, carries into the exponent, less 8.
        bits = lax.bitcast_convert_type(peak, jnp.int32)
        scale = lax.bitcast_convert_type((((bits + 0x1FFFFF) >> 23) - 8) << 23, jnp.float32)
    else:
        scale = peak / np.float32(LARGEST)
    return _to_float8(x / scale[..., None]), scale


def softmax_pool(keys: Array, scores: Array, ape: Array) -> Array:
    """One key for each pool: in every channel the mean of the p keys, weighted by the softmax of score + ape.

    Args:
      keys, scores: [..., p, X], of the p tokens of a pool in order.
      ape: float32[p, X].

    Returns:
      [..., X], float32, or float64 if an argument is.

    Example:
      >>> softmax_pool(jnp.array([[1.0], [5.0]]), jnp.zeros((2, 1)), jnp.zeros((2, 1))).tolist()
      [3.0]
    """
    dtype = _wide(keys, scores, ape)
    logits = scores.astype(dtype) + ape.astype(dtype)
    weights = jnp.exp(logits - jnp.max(logits, axis=-2, keepdims=True))
    return _sum(weights * keys.astype(dtype)) / _sum(weights)


def compress(keys: Array, scores: Array, ape: Array) -> tuple[Array, Array]:
    """The index key of each pool: `softmax_pool`, Hadamard transform, 8 bits with a power of two as scale.

    What enters the transform and what leaves it is rounded to bfloat16, whatever the dtype of the arguments.

    Args:
      keys, scores: [..., p, X], bfloat16 as the tail ring keeps them, of the p tokens of a pool in order.
      ape: float32[p, X].

    Returns:
      (float8_e4m3fn[..., X], float32[...]): what `cache.write_index` takes.

    Source: the pool compression of SGLang's DSA indexer, its contract restated.

    Example:
      >>> unit = jnp.zeros((4, 128), jnp.bfloat16).at[:, 0].set(1.0)
      >>> key, scale = compress(unit, jnp.zeros_like(unit), jnp.zeros((4, 128)))
      >>> float(key[5]), float(scale) == 2**-12
      (352.0, True)
    """
    return quantize(_rotate(softmax_pool(keys, scores, ape)))


def quantize_query(q: Array) -> tuple[Array, Array]:
    """Index queries as the keys are kept: Hadamard transform in bfloat16, 8 bits with a power of two as scale.

    Args:
      q: [..., HI, X].

    Returns:
      (float8_e4m3fn[..., HI, X], float32[..., HI]). Keys and queries are transformed alike, so that their products are
      those of the untransformed ones.

    Example:
      >>> values, scale = quantize_query(jnp.ones((1, 128)))
      >>> values[0, :2].astype(jnp.float32).tolist(), scale.tolist()
      ([352.0, 0.0], [0.03125])
    """
    return quantize(_rotate(q))


def _rotate(x: Array) -> Array:
    return _to_bfloat16(hadamard(_to_bfloat16(x)))


def _to_bfloat16(x: Array) -> Array:
    """float32 holding what bfloat16 can. A pair of casts would not do: XLA may leave it out."""
    return lax.reduce_precision(x.astype(_wide(x)), exponent_bits=8, mantissa_bits=7).astype(jnp.float32)


def _to_float8(x: Array) -> Array:
    """The nearest float8_e4m3fn, ties to even, 448 or -448 beyond.

    The cast alone would give NaN beyond 464, and some GPUs go through float16, which rounds twice; it is given what
    float8_e4m3fn can hold.
    """
    x = jnp.clip(x, -LARGEST, LARGEST)
    coarse = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    fine = jnp.round(x * np.float32(1 / _FINEST)) * np.float32(_FINEST)
    return jnp.where(jnp.abs(x) < _NORMAL, fine, coarse).astype(jnp.float8_e4m3fn)


def _sum(x: Array) -> Array:
    """Over axis -2, first to last."""
    return functools.reduce(operator.add, (x[..., i, :] for i in range(x.shape[-2])))


def _wide(*arrays: Array):
    return jnp.result_type(jnp.float32, *arrays)

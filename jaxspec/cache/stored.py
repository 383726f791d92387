"""What both cache views do to rows before they are stored: their checks, their bits, and where single words go."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.layers import KPoolSpec, LayerSpec, StatePart

Array = jax.Array
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def check_rows(spec: LayerSpec, k: Array, v: Array | None) -> None:
    """Raises ValueError where rows are not what the layer keeps."""
    parts = [("k", k, spec.key_shape), ("v", v, spec.value_shape)]
    for name, array, shape in parts if spec.value_width else parts[:1]:
        if array.ndim != 4 or array.shape[2:] != shape:
            raise ValueError(f"{name} has shape {array.shape}: the layer keeps [B, D, {shape[0]}, {shape[1]}]")


def bits_as(rows: Array, dtype) -> Array:
    """The bits of [..., n] rows as rows of another dtype."""
    wide, narrow = jnp.dtype(dtype).itemsize, rows.dtype.itemsize
    if wide > narrow:  # the cast makes one element of the last axis
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] * narrow // wide, wide // narrow)
    bits = lax.bitcast_convert_type(rows, dtype)
    return bits.reshape(*bits.shape[:-2], bits.shape[-2] * bits.shape[-1]) if wide < narrow else bits


def to_storage(part: StatePart, values: Array, storage: str) -> Array:
    """[B, elements of the storage dtype], the bits of one part of B states."""
    return bits_as(values.astype(part.dtype).reshape(values.shape[0], math.prod(part.shape)), storage)


def from_storage(part: StatePart, rows: Array) -> Array:
    """The inverse: [B, *shape] in the part's dtype."""
    return bits_as(rows, part.dtype).reshape(len(rows), *part.shape)


def pooled(layers, layer: int) -> KPoolSpec:
    """The specification of a layer with compressed keys."""
    if not isinstance(layers[layer], KPoolSpec):
        raise ValueError(f"layer={layer}: it keeps no compressed keys; only layers with a KPoolSpec do")
    return layers[layer]


def by_row(slots: Array) -> Array:
    """Slots [B] or [B, D] beside columns [B, D]."""
    return slots if slots.ndim == 2 else slots[:, None]


def tail_rows(spec: KPoolSpec, rows: Array) -> Array:
    """bfloat16[B, D, 2, X], rows of a ring."""
    if rows.ndim != 4 or rows.shape[2:] != spec.tail_shape[1:]:
        raise ValueError(f"rows has shape {rows.shape}: the layer keeps [B, D, 2, {spec.index_dim}]")
    return rows.astype(jnp.bfloat16)


# An index key is written word by word, four bytes each, so that keys and scales are windows of one scatter.
WORD = 4


def words_of(spec: KPoolSpec, keys: Array, scales: Array, storage) -> Array:
    """[B, M, X // 4 + 1, elements of the storage dtype], the words of index keys, and of their scales."""
    for name, array, shape in (("keys", keys, (spec.index_dim,)), ("scales", scales, ())):
        if array.shape[2:] != shape or array.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"{name} has shape {array.shape}: the layer keeps keys [B, M, {spec.index_dim}] and scales [B, M]"
            )
    parts = keys.astype(jnp.float8_e4m3fn), scales.astype(jnp.float32)[..., None]
    bits = jnp.concatenate([bits_as(part, storage) for part in parts], axis=-1)
    return bits.reshape(*scales.shape, spec.index_dim // WORD + 1, WORD // bits.dtype.itemsize)


def word_places(spec: KPoolSpec, pools: Array, page_size: int) -> tuple[Array, Array]:
    """For each word of the keys of `pools`, int32[..., 1], its page, int32[..., X // 4 + 1], its first byte there."""
    count = page_size // spec.pool  # a power of two: no division
    page, place = pools[..., None] >> count.bit_length() - 1, pools[..., None] & count - 1
    step = np.full(spec.index_dim // WORD + 1, spec.index_dim, np.int32)
    first = np.arange(len(step), dtype=np.int32) * WORD
    step[-1], first[-1] = WORD, spec.index_dim * count
    return page, place * step + first


def put_words(buffer: Array, row: Array, column: Array, words: Array) -> Array:
    """The 2-D buffer with [..., n] words at these rows and from these columns on."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(words.ndim - 1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    index = jnp.stack(jnp.broadcast_arrays(row, column), axis=-1)
    return lax.scatter(buffer, index, words, dimensions, mode=IN_BOUNDS)

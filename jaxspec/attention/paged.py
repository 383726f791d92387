"""Paged attention in jnp: gather the pages, mask, attend.

Cells that no query of a request may see can hold anything, NaN included (pages are handed out as they are). A weight of
zero does not silence them, 0 * NaN is NaN, so K and V of such cells are replaced by zeros before they meet a sum.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import KVCache, PoolCache
from jaxspec.metadata.ids import unmarked

Array = jax.Array
Cache = KVCache | PoolCache
Reader = Callable[[Array], tuple[Array, Array]]


def _read_array(kv: Array, slots: Array) -> tuple[Array, Array]:
    rows = jnp.asarray(kv).at[slots].get(mode="promise_in_bounds")  # [B, S, 2, kv_heads, head_dim]
    return rows[:, :, 0], rows[:, :, 1]


def paged_attention(
    q: Array,
    kv: Array | Reader,
    page_table: Array,
    positions: Array,
    cache_seqlens: Array,
    *,
    page_size: int,
    window: int | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Array:
    """Attention of each request's query rows over its own pages.

    Row j of request b sees the keys at positions p with p <= positions[b, j], p < cache_seqlens[b] and, with a window,
    p > positions[b, j] - window. Scores and sums are float32. A row that sees no key gives zeros.

    Args:
      q: [B, D, heads, head_dim], the query rows; heads is a multiple of the K/V heads.
      kv: one layer's rows: an array [slots, 2, num_kv_heads, head_dim], or a function that takes int32[B, S] physical
        slots to keys [B, S, num_kv_heads, head_dim] and values [B, S, num_kv_heads, value_dim], such as
        `functools.partial(cache.read, layer)`.
      page_table: int32[B, P], physical page of each column; columns past a row's length may hold any page in range.
      positions: int32[B, D], absolute positions, consecutive: positions[b, j] = positions[b, 0] + j.
      cache_seqlens: int32[B], keys of each request, those of the query rows included.
      page_size: tokens a page.
      window: None, or how many keys a query sees, itself included. Only the columns that can hold visible keys are
        read.
      scale: factor on the scores; head_dim ** -0.5 by default.
      causal: False drops the first condition, so that rows also see the rows after them.

    Returns:
      [B, D, heads, value_dim] in q's dtype; value_dim is head_dim where kv is an array.

    Example:
      >>> kv = jnp.zeros((8, 2, 1, 4)).at[4:6, 1].set(3.0)      # page 1 of size 4 holds two values
      >>> q, table = jnp.ones((1, 1, 2, 4)), jnp.array([[1, 0]])
      >>> out = paged_attention(q, kv, table, jnp.array([[1]]), jnp.array([2]), page_size=4)
      >>> out[0, 0, 0].tolist()
      [3.0, 3.0, 3.0, 3.0]
    """
    B, D, heads, head_dim = q.shape
    P = page_table.shape[1]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    if window is None:
        columns = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
        first_key = jnp.zeros((B,), jnp.int32)
    else:
        # D rows in sequence see window + D - 1 keys, which touch at most this many pages.
        width = min(P, -(-(window + D - 1) // page_size) + 1)
        first_key = jnp.maximum(positions[:, 0] - window + 1, 0)
        columns = jnp.minimum(first_key // page_size, P - width)[:, None] + jnp.arange(width, dtype=jnp.int32)

    pages = jnp.take_along_axis(page_table, columns, axis=1, mode="promise_in_bounds")
    inside = jnp.arange(page_size, dtype=jnp.int32)
    S = columns.shape[1] * page_size
    slots = (pages[:, :, None] * page_size + inside).reshape(B, S)
    key_positions = (columns[:, :, None] * page_size + inside).reshape(B, S)
    readable = (key_positions >= first_key[:, None]) & (key_positions < cache_seqlens[:, None])  # [B, S]

    rows = kv(slots) if callable(kv) else _read_array(kv, slots)
    keys, values = (jnp.where(readable[:, :, None, None], part, 0) for part in rows)
    kv_heads = keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, kv {kv_heads}: the first must be a multiple of the second")
    visible = readable[:, None] & (key_positions[:, None] <= positions[:, :, None] if causal else True)  # [B, D, S]
    if window is not None:
        visible &= key_positions[:, None] > positions[:, :, None] - window

    grouped = q.reshape(B, D, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "bdhgx,bshx->bhgds", grouped, keys.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * (head_dim**-0.5 if scale is None else scale), -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum(
        "bhgds,bshx->bdhgx",
        weights.astype(q.dtype),
        values.astype(q.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(B, D, heads, values.shape[-1]).astype(q.dtype)


def attend(cache: Cache, layer: int, q: Array, k: Array, v: Array, metadata) -> tuple[Array, Cache]:
    """Stores the K and V rows of this forward and attends over the cache: what a model calls once a layer.

    Args:
      cache: the cache view that the step handed to the model.
      layer: index into `cache.layers` (static).
      q: [B, D, heads, head_dim], after rotary embedding.
      k, v: [B, D, num_kv_heads, head_dim]; v's last axis is `value_dim` where the layer has one.
      metadata: `VerifyMetadata`, `DecodeMetadata` or `DraftExtendMetadata` of this forward.

    Returns:
      [B, D, heads, value_dim] and the cache with row (b, j) stored at the slot that `metadata.window` names; rows whose
      slot is the sink (padding, past the context limit) leave every owned slot as it was.
    """
    spec = cache.layers[layer]
    in_swa = spec.storage == "swa"
    slots = unmarked(metadata.window.swa_loc if in_swa else metadata.window.full_loc, spec.storage)
    table = unmarked(metadata.swa_page_table if in_swa else metadata.page_table, spec.storage)
    cache = cache.write(layer, slots, k, v)
    out = paged_attention(
        q,
        functools.partial(cache.read, layer),
        table,
        metadata.window.positions,
        metadata.cache_seqlens,
        page_size=cache.page_size,
        window=spec.window,
    )
    return out, cache

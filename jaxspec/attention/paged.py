"""Attention of D query rows a request over the paged cache, and the storing of their K and V rows before it.

On a CUDA device a kernel reads the pages where they lie (`pallas_kernels.paged_attention`); elsewhere they are
gathered, and XLA attends to what was gathered. Metadata say who does it: `ForwardMetadata.backend`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxspec.attention.heads import Heads
from jaxspec.cache import KVCache, PoolCache
from jaxspec.metadata.ids import unmarked
from pallas_kernels import store_heads
from pallas_kernels.dispatch import supported
from pallas_kernels.paged_rows import attend_rows, readable_slots

Array = jax.Array
Cache = KVCache | PoolCache
SCOPE = "attention"  # the name in traced and compiled programs of what attends
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
      page_table: int32[B, P], physical page of each column; columns past a row's length may hold anything.
      positions: int32[B, D], absolute positions, consecutive: positions[b, j] = positions[b, 0] + j; or -1 in the last
        rows of a request, or all, which are padding and see nothing.
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
    slots, at, readable = readable_slots(
        page_table, positions, cache_seqlens, page_size=page_size, window=window, causal=causal
    )
    rows = kv(slots) if callable(kv) else _read_array(kv, slots)
    return attend_rows(q, *rows, positions, at, readable, window=window, causal=causal, scale=scale)


@jax.named_scope(SCOPE)
def attend_stored(
    cache: Cache,
    layer: int,
    q: Array,
    page_table: Array,
    positions: Array,
    cache_seqlens: Array,
    *,
    causal: bool = True,
    backend: str | None = None,
) -> Array:
    """Attention over rows that are in the cache already.

    Args:
      cache, layer, q: as in `attend`.
      page_table, positions, cache_seqlens, causal: as in `paged_attention`.
      backend: None, 'mosaic': the kernel on a CUDA device, else gathered rows; 'triton' and 'interpret': the kernel;
        'reference': gathered rows (static).

    Returns:
      [B, D, heads, value_dim].
    """
    window = cache.layers[layer].window
    how = dict(window=window, causal=causal, backend=supported(backend))
    return pallas_kernels.paged_attention(q, cache.rows(layer), page_table, positions, cache_seqlens, **how)


def store(
    cache: Cache,
    layer: int,
    slots: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    heads: Heads | None = None,
    backend: str | None = None,
) -> tuple[Array, Cache]:
    """Stores the K and V rows of a forward.

    Args:
      cache, layer, q, k, v, heads: as in `attend`.
      slots: int32[B, D], physical slots of the layer's kind, all different but for those in the sink.
      backend: who stores, see `pallas_kernels` (static).

    Returns:
      q as attention takes it, [B, D, heads, head_dim], and the cache with row (b, j) at slots[b, j].

    Raises:
      ValueError: rows that are not what the layer keeps, or heads that do not fit them; the message names the argument.
    """
    if heads is None:
        return q, cache.write(layer, slots, k, v, backend)
    spec = cache.layers[layer]
    for name, rows, shape in (("k", k, spec.key_shape), ("v", v, spec.value_shape)):
        if shape[1] and (rows.ndim != 3 or rows.shape[1:] != shape):
            raise ValueError(
                f"{name} has shape {rows.shape}: with heads the layer takes rows [B * D, {shape[0]}, {shape[1]}]"
            )
    how = dict(divisor=heads.rows, divisor_eps=heads.rows_eps, backend=supported(backend))
    q, rows = store_heads(cache.rows(layer), slots, q, k, v, **heads.arguments, **how)
    return heads.by_request(q), cache.with_rows(layer, rows)


def attend(
    cache: Cache, layer: int, q: Array, k: Array, v: Array, metadata, *, heads: Heads | None = None
) -> tuple[Array, Cache]:
    """Stores the K and V rows of this forward and attends over the cache: what a model calls once a layer.

    Args:
      cache: the cache view that the step handed to the model.
      layer: index into `cache.layers` (static).
      q: [B, D, heads, head_dim], after rotary embedding unless heads are given.
      k, v: [B, D, num_kv_heads, head_dim]; v's last axis is `value_dim` where the layer has one.
      metadata: `VerifyMetadata`, `DecodeMetadata` or `DraftExtendMetadata` of this forward. Its `backend` says who
        stores and attends.
      heads: how queries and keys are to be normed and rotated, which what stores them then does; q, k and v are as
        projected, [B * D, heads, head_dim], or Views of it. None: queries and keys are as attention takes them.

    Returns:
      [B, D, heads, value_dim] and the cache with row (b, j) stored at the slot that `metadata.window` names; rows whose
      slot is the sink (padding, past the context limit) leave every owned slot as it was. Padding attends to nothing
      and gives zeros.
    """
    spec = cache.layers[layer]
    in_swa = spec.storage == "swa"
    slots = unmarked(metadata.window.swa_loc if in_swa else metadata.window.full_loc, spec.storage)
    table = unmarked(metadata.swa_page_table if in_swa else metadata.page_table, spec.storage)
    q, cache = store(cache, layer, slots, q, k, v, heads=heads, backend=metadata.backend)
    positions = metadata.query_positions
    out = attend_stored(cache, layer, q, table, positions, metadata.cache_seqlens, backend=metadata.backend)
    return out, cache

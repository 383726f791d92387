"""Attention over a selection: what a sparse layer does with its cache in one forward.

Per layer there are K/V rows of every token, an index key of every closed pool, and a ring with the newest tokens' index
rows, of which the next pools will be made. A forward stores its rows, closes pools, scores all closed pools that a row
may see, and attends to the tokens of the best ones and to the live tail:

    rows, ring  ->  index keys of pools that close  ->  scores  ->  best topk / pool of them  ->  tokens  ->  attention

A verify closes pools as if all its drafts were accepted. That is harmless: a pool is visible to rows whose own length
closes it, and a pool with a rejected draft in it is closed again, and rewritten, by the round that fills it.

B requests, D rows a request, X index width, K = topk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention.paged import SCOPE
from jaxspec.attention.pooling import IndexRows, compress, quantize_query
from jaxspec.attention.selection import expand_pools, selected_attention
from jaxspec.cache import KPoolSpec, KVCache, PoolCache
from jaxspec.cache.pages import read_first
from jaxspec.metadata import KPoolMetadata
from jaxspec.metadata.ids import unmarked
from pallas_kernels import PagedRows, paged_attention, pool_scores, top_ids
from pallas_kernels.dispatch import dispatch, supported
from pallas_kernels.paged_attention import backend_for

Array = jax.Array
Cache = KVCache | PoolCache


class Selection(NamedTuple):
    """Tokens that rows attend to, by their position in the request.

    tokens   int32[B, D, K + pool - 1], chosen pools ascending, then the live tail; -1 behind
    count    int32[B, D], how many there are
    """

    tokens: Array
    count: Array


@jax.named_scope(SCOPE)
def attend_pooled(
    cache: Cache,
    layer: int,
    q: Array,
    k: Array,
    v: Array | None,
    index: IndexRows,
    metadata,
    *,
    scale: float | None = None,
) -> tuple[Array, Cache, Selection]:
    """Stores the rows of this forward and attends to a selection: what a model calls once a sparse layer.

    Args:
      cache: the cache view that the step handed to the model.
      layer: index into `cache.layers`, whose `KPoolSpec` says how tokens are pooled (static).
      q: [B, D, heads, head_dim].
      k: [B, D, num_kv_heads, head_dim].
      v: [B, D, num_kv_heads, value_dim]; None where the layer keeps none and its K rows are its V, as in absorbed MLA.
      index: what the layer's indexer says of the rows.
      metadata: `VerifyMetadata` or `DraftExtendMetadata` of this forward, with `kpool`.
      scale: factor on the scores; head_dim ** -0.5 by default.

    Returns:
      [B, D, heads, value_dim or head_dim]; the cache with the rows, the ring and the index keys of pools that may close
      stored; and the selection. A row with nothing to attend to gives zeros.

    Raises:
      TypeError: the layer is of another kind, or the metadata were built for a model without such layers, or for other
        ones.

    Source: the compressed sparse attention of GLM-5.3-Flash (KPool) as served by SGLang 0.5.23.
    """
    spec = cache.layers[layer]
    if not isinstance(spec, KPoolSpec):
        raise TypeError(f"layer {layer} selects nothing: it is a {type(spec).__name__}; call jaxspec.attend")
    if metadata.kpool is None:
        raise TypeError("metadata.kpool is None: they were built for a model without sparse layers")
    kpool, B, D = metadata.kpool, *q.shape[:2]
    if (spec.pool, spec.topk) != (kpool.pool, kpool.topk):
        raise TypeError(
            f"layer {layer} has (pool, topk) = {(spec.pool, spec.topk)}, the metadata were built for "
            f"{(kpool.pool, kpool.topk)}: a forward has one pair"
        )
    if metadata.state_slots is None:
        raise TypeError("metadata.state_slots is None: a sparse layer has a ring a request; give their slots")
    table = unmarked(metadata.page_table, "full")
    v = jnp.zeros((*k.shape[:3], 0), k.dtype) if v is None else v
    cache = cache.write(layer, unmarked(metadata.window.full_loc, "full"), k, v, metadata.backend)
    cache = close_pools(cache, layer, index, metadata)

    queries, factors = quantize_query(index.query)
    weights = (index.weight * factors * spec.index_dim**-0.5).astype(jnp.float32)
    visible, closed = (lengths.reshape(B, D) for lengths in (kpool.seqlens_expanded, kpool.pool_seqlens))
    backend = metadata.backend
    scores = pool_scores(queries, weights, cache.index_pages(layer), table, closed, backend=supported(backend))
    scores = scores.reshape(B * D, scores.shape[-1])
    chosen = top_ids(scores, kpool.pool_seqlens, budget=kpool.topk // kpool.pool, backend=backend)
    tokens, count = expand_pools(chosen.reshape(B, D, -1), visible, kpool.pool)
    slots = slots_of(tokens, table, cache.page_size)
    attended = kpool.dsa_cache_seqlens.reshape(B, D)
    out = attend_selected(cache, layer, q, slots, attended, scale=scale, backend=backend)
    return out, cache, Selection(tokens, count)


@jax.named_scope(SCOPE)
def attend_selected(
    cache: Cache,
    layer: int,
    q: Array,
    slots: Array,
    count: Array,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Array:
    """Attention of each row over slots of its own.

    Args:
      cache, layer, q, scale: as in `attend_pooled`; the rows in question are stored already.
      slots: int32[B, D, M], physical FULL slots, in range everywhere.
      count: int32[B, D], how many of them the row attends to: the first ones. What the others hold does not matter.
      backend: as in `attend_stored` (static).

    Returns:
      [B, D, heads, value_dim or head_dim].
    """
    scale = float(cache.layers[layer].head_dim ** -0.5 if scale is None else scale)
    kernel, gather = (functools.partial(f, scale=scale) for f in (_selected_in_place, _selected_gathered))
    rows = cache.rows(layer)
    backend = backend_for(supported(backend), q, rows)
    return dispatch("attend_selected", backend, kernel, gather, (q, rows, slots, count))


def _selected_in_place(q: Array, rows: PagedRows, slots: Array, count: Array, *, scale: float, interpret: bool):
    """To the kernel each row is a request."""
    B, D, M = slots.shape
    q, slots, count = q.reshape(B * D, 1, *q.shape[2:]), slots.reshape(B * D, M), count.reshape(B * D)
    how = dict(granularity="token", scale=scale, backend="interpret" if interpret else "triton")
    out = paged_attention(q, rows, slots, count[:, None] - 1, count, **how)
    return out.reshape(B, D, *out.shape[2:])


def _selected_gathered(q: Array, rows: PagedRows, slots: Array, count: Array, *, scale: float):
    B, D, M = slots.shape
    keys, values = rows.read(slots.reshape(B, D * M))
    keys = keys.reshape(B, D, M, *keys.shape[2:])
    values = None if rows.place.values_are_keys else values.reshape(B, D, M, *values.shape[2:])
    return selected_attention(q, keys, values, count, scale)


def slots_of(tokens: Array, page_table: Array, page_size: int) -> Array:
    """Physical slots of tokens int32[B, D, M] by their positions in the request; the sink for -1."""
    page = jnp.maximum(tokens, 0) // page_size
    page = jnp.take_along_axis(page_table[:, None], page, axis=2, mode="promise_in_bounds")
    return jnp.where(tokens < 0, 0, page * page_size + tokens % page_size)


def close_pools(cache: Cache, layer: int, index: IndexRows, metadata) -> Cache:
    """Stores index rows in the ring, and the keys of pools that are complete with them.

    The first of these pools may begin before this forward; its older rows come from the ring. Worked example, pool 4,
    rows at positions 6 .. 9: pool 1 is made of 4 and 5 from the ring and 6 and 7 of this forward; 8 and 9 go to the
    ring and close nothing.
    """
    kpool: KPoolMetadata = metadata.kpool
    plan, pool, ring = kpool.write_plan, kpool.pool, cache.layers[layer].ring
    slot = unmarked(metadata.state_slots, "state")
    slot = jnp.where(plan.count > 0, jnp.maximum(slot, 0), 0)
    rows = jnp.stack([index.key, index.score], axis=2).astype(jnp.bfloat16)  # [B, D, 2, X]
    D, C = rows.shape[1], plan.write_loc.shape[1]

    member = jnp.arange(pool, dtype=jnp.int32)
    first = plan.tail_logical_start[:, None]
    older, cache = read_first(cache.read_tail(layer, slot, (first + member) % ring), cache)  # [B, pool, 2, X]
    nth = first + jnp.arange(C * pool, dtype=jnp.int32) - plan.write_start[:, None]  # row of this forward, or before it
    fresh = jnp.take_along_axis(rows, jnp.clip(nth, 0, D - 1)[:, :, None, None], axis=1, mode="promise_in_bounds")
    older = jnp.pad(older, ((0, 0), (0, (C - 1) * pool), (0, 0), (0, 0)))
    members = jnp.where((nth < 0)[:, :, None, None], older, fresh).reshape(-1, C, pool, 2, rows.shape[-1])
    keys, scales = compress(members[..., 0, :], members[..., 1, :], index.ape)

    closed = (plan.write_start + plan.count) // pool - plan.tail_logical_start // pool
    place = jnp.where(jnp.arange(C, dtype=jnp.int32) < closed[:, None], plan.write_loc, 0)
    cache = cache.write_index(layer, place, keys, scales)

    # Of a long run only the newest rows have a place; the others would meet them there.
    row = jnp.arange(D, dtype=jnp.int32)
    kept = (row < plan.count[:, None]) & (row >= plan.count[:, None] - ring)
    column = jnp.where(kept, (plan.write_start[:, None] + row) % ring, 0)
    return cache.write_tail(layer, jnp.where(kept, slot[:, None], 0), column, rows)

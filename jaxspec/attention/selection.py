"""Which tokens a row of pooled attention sees, and attention over them.

    scores of all pools -> the best G, ascending -> their tokens, then the live tail -> attention

The visible length E of a row has E // p whole pools, of which it sees min(E // p, G), and E % p tokens behind them, the
live tail, all of which it sees: `expand_pools` lists that many tokens, no more and no fewer.

What lies behind the live part of an argument may hold anything, NaN included. A row's result depends on nothing but its
own arguments; on a CPU its bits do not either depend on how many rows a request has.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.pool_scores import scores_of_keys

Array = jax.Array

_DEAD = np.int32(-(2**31))  # the rank of a pool that is not there; no number's, and not NaN's


def pool_scores(query: Array, weights: Array, keys: Array, scales: Array) -> Array:
    """Score of each pool for each row: scale * sum over heads of weight * max(query . key, 0).

    Products of 8-bit floats are exact in float32, in which they are summed.

    Args:
      query: float8_e4m3fn[B, D, HI, X], the values of `quantize_query`.
      weights: float32[B, D, HI]: the indexer's weight of the head times the scale of `quantize_query` times X ** -0.5.
      keys: float8_e4m3fn[B, n, X], the pools of each request in order, as of `compress`.
      scales: float32[B, n].

    Returns:
      float32[B, D, n]. Scores of pools that a row does not see are as good as their keys.

    Source: the pool scores of SGLang's DSA indexer, their contract restated.

    Example:
      >>> query, keys = (jnp.asarray(x, jnp.float8_e4m3fn) for x in ([[[[2.0]]]], [[[3.0], [-3.0]]]))
      >>> pool_scores(query, jnp.ones((1, 1, 1)), keys, jnp.array([[0.5, 0.5]])).tolist()
      [[[3.0, 0.0]]]
    """
    return scores_of_keys(query, weights.astype(jnp.float32), keys, scales.astype(jnp.float32))


def select_pools(scores: Array, pool_lens: Array, budget: int) -> Array:
    """The `budget` best pools of each row, or all of them where there are no more.

    Of equal scores (0 and -0 are equal) the pool that comes first is taken. NaN is worse than any number.

    Args:
      scores: float32[B, D, n].
      pool_lens: int32[B, D], pools that the row sees, E // p; scores from there on are not looked at. At most n.
      budget: G, pools a row attends to (static).

    Returns:
      int32[B, D, G]: min(pool_lens, G) pools, ascending, then -1.

    Example:
      >>> select_pools(jnp.array([[[1.0, 5.0, 5.0, 2.0, 9.0]]]), jnp.array([[4]]), 2).tolist()
      [[[1, 2]]]
    """
    n = scores.shape[-1]
    most = min(budget, n)
    live = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1) < pool_lens[..., None]
    _, pools = lax.top_k(jnp.where(live, _rank(scores), _DEAD), most)
    chosen = jnp.arange(most, dtype=jnp.int32) < pool_lens[..., None]
    pools = lax.sort(jnp.where(chosen, pools.astype(jnp.int32), n), is_stable=False)
    pools = jnp.pad(pools, ((0, 0), (0, 0), (0, budget - most)), constant_values=n)
    return jnp.where(pools < n, pools, -1)


def _rank(scores: Array) -> Array:
    """int32 in the order of the numbers, equal for equal ones; that of NaN lies below, and `_DEAD` below that."""
    scores = scores.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), jnp.int32)
    # Among negative floats the larger magnitude has the larger bits: all but the sign are turned over.
    return jnp.where(jnp.isnan(scores), _DEAD + 1, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def expand_pools(pools: Array, seqlens: Array, pool: int) -> tuple[Array, Array]:
    """The tokens of the pools of each row, then its live tail, without gaps.

    Args:
      pools: int32[B, D, G], as `select_pools` gives them for pool_lens = seqlens // pool.
      seqlens: int32[B, D], E, tokens that the row sees.
      pool: p, tokens a pool (static).

    Returns:
      (int32[B, D, G * p + p - 1], int32[B, D]): positions in the request, ascending if the pools are, then -1; and how
      many there are, min(p * (E // p), G * p) + E % p.

    Source: the expansion of pools in SGLang's DSA indexer, its contract restated.

    Example:
      >>> tokens, count = expand_pools(jnp.array([[[1, 3]]]), jnp.array([[18]]), 4)
      >>> tokens.tolist(), count.tolist()
      ([[[4, 5, 6, 7, 12, 13, 14, 15, 16, 17, -1]]], [[10]])
    """
    B, D, G = pools.shape
    seqlens = jnp.maximum(seqlens.astype(jnp.int32), 0)
    whole = seqlens // pool
    history = jnp.minimum(whole, G) * pool
    count = history + seqlens - whole * pool
    tokens = (pools.astype(jnp.int32)[..., None] * pool + jnp.arange(pool, dtype=jnp.int32)).reshape(B, D, G * pool)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, pool - 1)))
    column = jnp.arange(G * pool + pool - 1, dtype=jnp.int32)
    tail = column + (whole * pool - history)[..., None]
    tokens = jnp.where(column < history[..., None], tokens, tail)
    return jnp.where(column < count[..., None], tokens, -1), count


def selected_attention(q: Array, keys: Array, values: Array | None, count: Array, scale: float) -> Array:
    """Attention of each row over keys of its own.

    Scores and sums are float32 (float64 if q is). A row without keys gives zeros.

    Args:
      q: [B, D, heads, W]; heads is a multiple of the K/V heads.
      keys: [B, D, M, kv_heads, W], what was gathered for each row.
      values: [B, D, M, kv_heads, V], or None: the values are the keys, as of latent attention.
      count: int32[B, D]: the row sees the first `count` of its M keys.
      scale: factor on the scores.

    Returns:
      [B, D, heads, V] in q's dtype.

    Example:
      >>> keys = jnp.array([2.0, 4.0, jnp.nan]).reshape(1, 1, 3, 1, 1)
      >>> selected_attention(jnp.zeros((1, 1, 2, 1)), keys, None, jnp.array([[2]]), 1.0).tolist()
      [[[[3.0], [3.0]]]]
    """
    B, D, heads, width = q.shape
    M, kv_heads = keys.shape[2:4]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, keys {kv_heads}: the first must be a multiple of the second")
    dtype = jnp.result_type(jnp.float32, q.dtype)
    precision = lax.Precision.DEFAULT if q.dtype.itemsize < 4 else lax.Precision.HIGHEST
    visible = jnp.arange(M, dtype=jnp.int32) < count[..., None]  # [B, D, M]
    # A weight of zero would not silence them: 0 * NaN is NaN.
    keys = jnp.where(visible[..., None, None], keys, 0).astype(q.dtype)
    values = keys if values is None else jnp.where(visible[..., None, None], values, 0).astype(q.dtype)

    grouped = q.reshape(B, D, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bdhgx,bdmhx->bdhgm", grouped, keys, precision=precision, preferred_element_type=dtype)
    scores = jnp.where(visible[:, :, None, None], scores * scale, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
    out = jnp.einsum("bdhgm,bdmhx->bdhgx", weights, values, precision=precision, preferred_element_type=dtype)
    return out.reshape(B, D, heads, values.shape[-1]).astype(q.dtype)

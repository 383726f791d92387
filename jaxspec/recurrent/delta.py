"""The gated delta rule in closed form: a chunk of rows at once instead of one after the other.

Head by head the rule is, with S float32[V, K],

    S = exp(g_t) S;   u_t = beta_t (v_t - S k_t);   S = S + u_t k_t';   o_t = S q_t

Let D[t, j] = exp(g_{j+1} + ... + g_t), what row t still holds of row j, and d_t = exp(g_0 + ... + g_t). Then with S0
the state before the chunk all u of a chunk solve one unit lower triangular system, and the rest is sums:

    (I + A) U = beta (V - d K S0'),   A[t, j] = beta_t D[t, j] (k_t . k_j)  for j < t
    o_t = d_t S0 q_t + sum_{j <= t} D[t, j] (q_t . k_j) u_j
    S_t = d_t S0     + sum_{j <= t} D[t, j] u_j k_j'

No exponent is ever positive, and each is a sum of its own: the difference of two long prefix sums would lose the digits
of a small decay that follows large ones.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

_ZERO_DECAY = -128.0  # exp of it is 0 in float32; keeps an infinite log_decay out of sums
_UNROLLED = 16  # rows that are eliminated one by one, in one kernel


def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array,
    *,
    real: Array | None = None,
    keep: Literal["last", "rows"] = "last",
    chunk: int = 64,
) -> tuple[Array, Array]:
    """The gated delta rule over T rows of each request, continued from its state.

    Row t of value head h forgets, writes and reads its state S [V, K], with q and k of head h // (HV // HK) brought to
    length 1 (x * rsqrt(sum x^2 + 1e-6)) and q scaled by K ** -0.5:

        S = exp(log_decay) S;  S = S + beta (v - S k) k';  out = S q

    Everything inside is float32 with full-precision products. It can be differentiated.

    Args:
      q, k: [B, T, HK, K], as they come from the projection; T may be 0.
      v: [B, T, HV, V]; HV is a multiple of HK.
      log_decay: [B, T, HV], at most 0; -inf forgets everything.
      beta: [B, T, HV], from 0 (writes nothing) to 1 (replaces what the key held).
      state: float32[B, HV, V, K], the state before row 0; zeros at the start of a text.
      real: bool[B, T], or None where every row is. A row that is not real gives zeros and leaves the state as it was,
        whatever the other arguments hold there, NaN included; such rows may lie anywhere.
      keep: "last" or "rows", which states to return.
      chunk: rows solved at once; longer inputs are a scan over chunks.

    Returns:
      out, [B, T, HV, V] in v's dtype, and the float32 state after the last row, [B, HV, V, K], or with keep="rows" the
      one after each row, [B, T, HV, V, K].

    Example:
      >>> one = jnp.ones((1, 1, 1, 1))
      >>> out, state = gated_delta(one, one, 3 * one, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)), 5 * one)
      >>> print(f"{out.item():.3f} {state.item():.3f}")        # the key held 5, now it holds 3
      3.000 3.000
    """
    _check(q, k, v, log_decay, beta, state, real, keep, chunk)
    B, T, HK, K = k.shape
    HV, V = v.shape[2:]
    R = HV // HK
    if T == 0:
        return jnp.zeros_like(v), state if keep == "last" else jnp.zeros((B, 0, HV, V, K), jnp.float32)

    dtype = v.dtype
    q, k, v, log_decay, beta = (_only_real(x, real).astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    q, k = _unit(q) * K**-0.5, _unit(k)
    log_decay = jnp.maximum(log_decay, _ZERO_DECAY)

    C = min(T, chunk)
    N = -(-T // C)

    def chunks(x, *heads):  # [B, T, heads, ...] -> [N, B, heads, C, ...], zeros behind row T - 1
        x = jnp.pad(x, ((0, 0), (0, N * C - T)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

    q, k = chunks(q, HK), chunks(k, HK)  # [N, B, HK, C, K]
    v, log_decay, beta = (chunks(x, HK, R) for x in (v, log_decay, beta))  # [N, B, HK, R, C, ...]
    state = state.astype(jnp.float32).reshape(B, HK, R, V, K)

    held, since = _decays(log_decay)  # [N, B, HK, R, C, C] and [N, B, HK, R, C]
    strict = np.tri(C, k=-1, dtype=bool)
    system = jnp.where(strict, beta[..., None] * held * _product("...tk,...jk->...tj", k, k)[:, :, :, None], 0)
    weights = held * _product("...tk,...jk->...tj", q, k)[:, :, :, None]
    if N == 1:
        starts = state[None]
        found = _product("nbhtk,nbhrvk->nbhrtv", k, starts)
        writes = _solve(system, beta[..., None] * (v - since[..., None] * found))
    else:
        right = jnp.concatenate([v, since[..., None] * k[:, :, :, None]], axis=-1)
        solved = _solve(system, beta[..., None] * right)
        state, starts, writes = _carry(state, solved[..., :V], solved[..., V:], k, held, since)

    out = since[..., None] * _product("nbhtk,nbhrvk->nbhrtv", q, starts)
    out = out + _product("...tj,...jv->...tv", weights, writes)
    out = jnp.moveaxis(out, (1, 0, 4), (0, 1, 2)).reshape(B, N * C, HV, V)[:, :T].astype(dtype)
    if keep == "rows":
        rows = since[..., None, None] * starts[:, :, :, :, None]
        for j in range(C):
            write = writes[..., j, None, :, None] * k[:, :, :, None, j, None, None, :]
            rows = rows + held[..., j, None, None] * write
        return out, jnp.moveaxis(rows, (1, 0, 4), (0, 1, 2)).reshape(B, N * C, HV, V, K)[:, :T]
    if N == 1:
        write = held[..., -1, :, None] * writes
        state = since[0, ..., -1, None, None] * state + _product("nbhrjv,nbhjk->nbhrvk", write, k)[0]
    return out, state.reshape(B, HV, V, K)


def _check(q, k, v, log_decay, beta, state, real, keep, chunk):
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k have shapes {q.shape} and {k.shape}: both must be [B, T, HK, K]")
    B, T, HK, K = k.shape
    if v.ndim != 4 or v.shape[:2] != (B, T) or v.shape[2] % HK:
        raise ValueError(f"v has shape {v.shape}: it must be [{B}, {T}, HV, V] with HV a multiple of HK = {HK}")
    HV, V = v.shape[2:]
    wanted = {"log_decay": (log_decay, (B, T, HV)), "beta": (beta, (B, T, HV)), "state": (state, (B, HV, V, K))}
    if real is not None:
        wanted["real"] = real, (B, T)
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: beside q {q.shape} and v {v.shape} it must be {shape}")
    if keep not in ("last", "rows"):
        raise ValueError(f"keep is {keep!r}: it must be 'last' or 'rows'")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1")


def _only_real(x, real):
    return x if real is None else jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)


def _unit(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _product(spec, x, y):
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def _decays(log_decay):
    """D [..., C, C], zeros above the diagonal, and d [..., C]."""
    C = log_decay.shape[-1]
    t, i, j = np.ogrid[:C, :C, :C]
    between = ((j < i) & (i <= t)).transpose(1, 0, 2).reshape(C, C * C).astype(np.float32)
    sums = _product("...i,is->...s", log_decay, between).reshape(*log_decay.shape, C)
    since = jnp.exp(sums[..., 0] + log_decay[..., :1])
    return jnp.where(np.tri(C, dtype=bool), jnp.exp(sums), 0), since


def _carry(state, values, keys, k, held, since):
    """The states before each chunk and all u: with (I + A) U = values - keys S0' only S0 is left to a scan."""

    def step(state, chunk):
        values, keys, k, to_end, decay = chunk
        writes = values - _product("bhrjk,bhrvk->bhrjv", keys, state)
        added = _product("bhrjv,bhjk->bhrvk", to_end[..., None] * writes, k)
        return decay[..., None, None] * state + added, (state, writes)

    state, (starts, writes) = lax.scan(step, state, (values, keys, k, held[..., -1, :], since[..., -1]))
    return state, starts, writes


def _solve(system, right):
    """X of (I + system) X = right; system [..., C, C] is strictly lower triangular."""
    if system.shape[-1] <= _UNROLLED:
        return _eliminate(system, right)
    return _product("...tj,...jv->...tv", _inverse(system), right)


def _eliminate(system, right):
    rows = []
    for t in range(system.shape[-1]):
        rows.append(right[..., t, :] - sum(system[..., t, j, None] * rows[j] for j in range(t)))
    return jnp.stack(rows, axis=-2)


@jax.custom_jvp
def _inverse(system):
    """(I + system)^-1: blocks on the diagonal row by row, then twice as large blocks from pairs of them.

    The sum of powers of A would be shorter, but for keys alike its terms grow like binomials and cancel; the inverse of
    every block is as tame as the rule itself.
    """
    C = system.shape[-1]
    size = _UNROLLED
    full = size << max(0, (C - 1) // size).bit_length()
    system = jnp.pad(system, ((0, 0),) * (system.ndim - 2) + ((0, full - C),) * 2)
    count = full // size
    blocks = jnp.stack([system[..., s : s + size, s : s + size] for s in range(0, full, size)], axis=-3)
    blocks = _eliminate(blocks, jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), blocks.shape))
    inverse = (blocks[..., :, :, None, :] * np.eye(count, dtype=np.float32)[:, None, :, None]).reshape(system.shape)
    row, column = np.ogrid[:full, :full]
    while size < full:
        below = (row // size % 2 == 1) & (column // size == row // size - 1)
        left = _product("...tj,...jv->...tv", jnp.where(below, system, 0), inverse)
        inverse = inverse - _product("...tj,...jv->...tv", inverse, left)
        size *= 2
    return inverse[..., :C, :C]


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    inverse = _inverse(*primals)
    moved = _product("...tj,...jv->...tv", tangents[0], inverse)
    return inverse, -_product("...tj,...jv->...tv", inverse, moved)

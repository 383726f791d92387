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

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.recurrent.channel_delta import channel_rule, chunk_size
from jaxspec.recurrent.solve import WHOLE, inverse, matmul, only_real, product, unit
from pallas_kernels.delta_rows import delta_rows

Array = jax.Array

_ZERO_DECAY = -128.0  # exp of it is 0 in float32; keeps an infinite log_decay out of sums


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

        S = S exp(log_decay);  S = S + beta (v - S k) k';  out = S q

    A log_decay for each key channel multiplies the columns of S, each by its own decay (Kimi Delta Attention); one for
    the head multiplies all of them (Gated DeltaNet). Everything inside is float32 with full-precision products. It can
    be differentiated.

    With keep="rows" and a decay for each channel rows are run one after the other: the bits of row t's output and of
    the state after it depend on the state before row 0 and on rows 0 to t alone, neither on later rows nor on T, and
    rows taken in several calls give the bits of one call (of up to 16 rows each on a GPU). Otherwise rows are solved a
    chunk at a time, and other chunks round in other places.

    Args:
      q, k: [B, T, HK, K], as they come from the projection; T may be 0.
      v: [B, T, HV, V]; HV is a multiple of HK.
      log_decay: [B, T, HV] or [B, T, HV, K], at most 0; -inf forgets everything.
      beta: [B, T, HV], from 0 (writes nothing) to 1 (replaces what the key held).
      state: float32[B, HV, V, K], the state before row 0; zeros at the start of a text.
      real: bool[B, T], or None where every row is. A row that is not real gives zeros and leaves the state as it was,
        whatever the other arguments hold there, NaN included; such rows may lie anywhere.
      keep: "last" or "rows", which states to return.
      chunk: rows solved at once, at most; longer inputs are a scan over chunks.

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
    B, T, _, K = k.shape
    HV, V = v.shape[2:]
    if T == 0:
        return jnp.zeros_like(v), state if keep == "last" else jnp.zeros((B, 0, HV, V, K), jnp.float32)

    by_channel = log_decay.ndim == 4
    if keep == "rows" and by_channel:
        out, rows = delta_rows(q, k, v, log_decay, beta, state, real=real)
        return out.astype(v.dtype), rows
    if by_channel:
        rule = functools.partial(channel_rule, C=chunk_size(T, chunk))
    else:
        rule = functools.partial(_rule, C=min(T, chunk), keep=keep)
    if chunk < T:
        # What chunks need to be solved is twenty times their rows. The backward pass computes it again from the rows.
        rule = jax.checkpoint(rule)
    return rule(q, k, v, log_decay, beta, state, real)


def _rule(q, k, v, log_decay, beta, state, real, *, C, keep):
    B, T, HK, K = k.shape
    HV, V = v.shape[2:]
    R, N = HV // HK, -(-T // C)
    dtype = v.dtype
    q, k, v, log_decay, beta = (only_real(x, real).astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    log_decay = jnp.maximum(log_decay, _ZERO_DECAY)

    def chunks(x, *heads):  # [B, T, heads, ...] -> [N, B, heads, C, ...], zeros behind row T - 1
        x = jnp.pad(x, ((0, 0), (0, N * C - T)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

    both = jnp.concatenate([chunks(q, HK), chunks(k, HK)], axis=3)  # [N, B, HK, 2 C, K]
    both = unit(both) * np.repeat(np.float32([K**-0.5, 1]), C)[:, None]
    q, k = both[..., :C, :], both[..., C:, :]
    v, log_decay, beta = (chunks(x, HK, R) for x in (v, log_decay, beta))  # [N, B, HK, R, C, ...]
    state = state.astype(jnp.float32).reshape(B, HK, R, V, K)

    held, since = _decays(log_decay)  # [N, B, HK, R, C, C] and [N, B, HK, R, C]
    if C <= WHOLE:
        alike = jnp.sum(both[..., None, :] * k[..., None, :, :], axis=-1)[:, :, :, None]
    else:
        alike = product("...tk,...jk->...tj", both, k)[:, :, :, None]
    weights = held * alike[..., :C, :]
    system = jnp.where(np.tri(C, k=-1, dtype=bool), beta[..., None] * held * alike[..., C:, :], 0)
    solved = inverse(system)
    if N == 1:
        starts = state[None]
        read, found = jnp.split(product("nbhtk,nbhrvk->nbhrtv", both, starts), 2, axis=4)
        writes = matmul(solved, beta[..., None] * (v - since[..., None] * found))
    else:
        values = matmul(solved, beta[..., None] * v)
        keys = matmul(solved, (beta * since)[..., None] * k[:, :, :, None])
        state, starts, writes = _carry(state, values, keys, k, held, since)
        read = product("nbhtk,nbhrvk->nbhrtv", q, starts)

    out = since[..., None] * read + matmul(weights, writes)
    out = jnp.moveaxis(out, (1, 0, 4), (0, 1, 2)).reshape(B, N * C, HV, V)[:, :T].astype(dtype)
    if keep == "rows":
        held, since = jnp.moveaxis(held, 4, 2), jnp.moveaxis(since, 4, 2)
        rows = since[..., None, None] * starts[:, :, None]  # [N, B, C, HK, R, V, K]
        writes, keys = writes[:, :, None, ..., None], k[:, :, None, :, None, :, None]  # [N, B, 1, HK, R | 1, C, V, K]
        rows = rows + jnp.sum(held[..., None, None] * writes * keys, axis=5)
        return out, jnp.moveaxis(rows, 0, 1).reshape(B, N * C, HV, V, K)[:, :T]
    if N == 1:
        write = held[0, ..., -1, :, None] * writes[0]
        state = since[0, ..., -1, None, None] * state + product("bhrjv,bhjk->bhrvk", write, k[0])
    return out, state.reshape(B, HV, V, K)


def _check(q, k, v, log_decay, beta, state, real, keep, chunk):
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k have shapes {q.shape} and {k.shape}: both must be [B, T, HK, K]")
    B, T, HK, K = k.shape
    if v.ndim != 4 or v.shape[:2] != (B, T) or v.shape[2] % HK:
        raise ValueError(f"v has shape {v.shape}: it must be [{B}, {T}, HV, V] with HV a multiple of HK = {HK}")
    HV, V = v.shape[2:]
    if log_decay.shape not in ((B, T, HV), (B, T, HV, K)):
        raise ValueError(
            f"log_decay has shape {log_decay.shape}: beside q {q.shape} and v {v.shape} it must be {(B, T, HV)}, or "
            f"{(B, T, HV, K)} for a decay of each key channel"
        )
    wanted = {"beta": (beta, (B, T, HV)), "state": (state, (B, HV, V, K))}
    if real is not None:
        wanted["real"] = real, (B, T)
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: beside q {q.shape} and v {v.shape} it must be {shape}")
    if keep not in ("last", "rows"):
        raise ValueError(f"keep is {keep!r}: it must be 'last' or 'rows'")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be at least 1")


def _decays(log_decay):
    """D [..., C, C], zeros above the diagonal, and d [..., C]."""
    C = log_decay.shape[-1]
    t, i, j = np.ogrid[:C, :C, :C]
    between = ((j < i) & (i <= t)).transpose(1, 0, 2).astype(np.float32)
    if C <= WHOLE:
        sums = sum(log_decay[..., i, None, None] * between[i] for i in range(C))
    else:
        sums = product("...i,is->...s", log_decay, between.reshape(C, C * C)).reshape(*log_decay.shape, C)
    since = jnp.exp(sums[..., 0] + log_decay[..., :1])
    return jnp.where(np.tri(C, dtype=bool), jnp.exp(sums), 0), since


def _carry(state, values, keys, k, held, since):
    """The states before each chunk and all u: with (I + A) U = values - keys S0' only S0 is left to a scan."""

    def step(state, chunk):
        values, keys, k, to_end, decay = chunk
        writes = values - product("bhrjk,bhrvk->bhrjv", keys, state)
        added = product("bhrjv,bhjk->bhrvk", to_end[..., None] * writes, k)
        return decay[..., None, None] * state + added, (state, writes)

    state, (starts, writes) = lax.scan(step, state, (values, keys, k, held[..., -1, :], since[..., -1]))
    return state, starts, writes

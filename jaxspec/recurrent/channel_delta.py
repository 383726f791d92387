"""The gated delta rule whose decay is a vector over the key channels (Kimi Delta Attention), in chunks.

The system of `delta` stands, with the decay inside the products of keys:

    A[t, j] = beta_t sum over channels c of k_t[c] D[t, j, c] k_j[c],   D[t, j, c] = exp(g_{j+1}[c] + ... + g_t[c])

D has no product form over a whole chunk whose exponents stay negative. But where a row m lies between j and t, it is
exp(g_{j+1} + ... + g_{m-1}) exp(g_m + ... + g_t), and both are at most 1. So the pairs of a chunk are cut into the
squares below its diagonal: the later half of the rows against the earlier half, then the same in each half, down to
single rows. Every square is one matrix product, every exponent a sum of decays and never a difference of sums.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.recurrent.solve import inverse, matmul, only_real, product, unit

Array = jax.Array


def chunk_size(rows: int, chunk: int) -> int:
    """The power of two of rows to solve at once: the largest that `chunk` allows, or what holds all rows."""
    return min(1 << (chunk.bit_length() - 1), 1 << (rows - 1).bit_length())


def channel_rule(q, k, v, log_decay, beta, state, real, *, C: int) -> tuple[Array, Array]:
    """As `gated_delta` with log_decay [B, T, HV, K] and keep="last"; C rows at once, a power of two."""
    B, T, HK, K = k.shape
    HV, V = v.shape[2:]
    R, N = HV // HK, -(-T // C)
    dtype = v.dtype
    q, k, v, log_decay, beta = (only_real(x, real).astype(jnp.float32) for x in (q, k, v, log_decay, beta))

    def chunks(x, *heads):  # [B, T, heads, ...] -> [N, B, HK, R or 1, C, ...], zeros behind row T - 1
        x = jnp.pad(x, ((0, 0), (0, N * C - T)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B, N, C, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 4)

    q, k = unit(chunks(q, HK, 1)) * K**-0.5, unit(chunks(k, HK, 1))
    v, log_decay, beta = (chunks(x, HK, R) for x in (v, log_decay, beta[..., None]))
    state = state.astype(jnp.float32).reshape(B, HK, R, V, K)

    weights, since, to_end = _decayed_products(jnp.stack([q, k], axis=-3), k, log_decay)
    solved = inverse(beta * jnp.tril(weights[..., 1, :, :], -1))
    reads, finds = since * q, since * k
    if N == 1:
        read, found = jnp.split(product("...tk,...vk->...tv", jnp.concatenate([reads, finds], axis=-2), state), 2, -2)
        writes = matmul(solved, beta * (v - found))
        state = since[0, ..., -1:, :] * state + product("...tv,...tk->...vk", writes[0], (to_end * k)[0])
    else:
        state, read, writes = _carry(
            state, matmul(solved, beta * v), matmul(solved, beta * finds), reads, to_end * k, since
        )
    out = read + matmul(weights[..., 0, :, :], writes)
    out = jnp.moveaxis(out, (1, 0, 4), (0, 1, 2)).reshape(B, N * C, HV, V)[:, :T]
    return out.astype(dtype), state.reshape(B, HV, V, K)


def _decayed_products(rows, keys, log_decay):
    """What row t of a chunk sees of key j, and the decays from the chunk's start and to its end.

    Args:
      rows: [..., M, C, K], M kinds of rows.
      keys: [..., C, K].
      log_decay: [..., C, K].

    Returns:
      sum over K of rows[t] D[t, j] keys[j], [..., M, C, C] with zeros for j > t; and [..., C, K] the decay from before
      row 0 up to each row, and from each row to the last.
    """
    C, K = keys.shape[-2:]
    log_decay = jnp.maximum(log_decay, jnp.finfo(jnp.float32).min / C)  # an infinity has no place in the sums
    rows, keys = rows[..., None, :], keys[..., None, :]  # [..., blocks, rows of a block, K]
    before, after = log_decay[..., None, :], jnp.zeros_like(log_decay)[..., None, :]
    below = jnp.sum(rows * keys[..., None, :, :, :], axis=-1, keepdims=True)
    size = 1
    while size < C:
        corner = product(
            "...tk,...jk->...tj",
            rows[..., 1::2, :, :] * jnp.exp(before[..., None, 1::2, :, :]),
            (keys[..., ::2, :, :] * jnp.exp(after[..., ::2, :, :]))[..., None, :, :, :],
        )
        below = jnp.broadcast_to(below, (*corner.shape[:-3], C // size, size, size))
        first, second = below[..., ::2, :, :], below[..., 1::2, :, :]
        below = jnp.concatenate(
            [jnp.pad(first, ((0, 0),) * (first.ndim - 1) + ((0, size),)), jnp.concatenate([corner, second], axis=-1)],
            axis=-2,
        )
        total = before[..., -1:, :]
        before = jnp.concatenate([before[..., ::2, :, :], before[..., 1::2, :, :] + total[..., ::2, :, :]], axis=-2)
        after = jnp.concatenate([after[..., ::2, :, :] + total[..., 1::2, :, :], after[..., 1::2, :, :]], axis=-2)
        size *= 2
        rows, keys = (x.reshape(*x.shape[:-3], C // size, size, K) for x in (rows, keys))
    below = jnp.broadcast_to(below, (*log_decay.shape[:-2], rows.shape[-4], 1, C, C))
    return below[..., 0, :, :], jnp.exp(before[..., 0, :, :]), jnp.exp(after[..., 0, :, :])


def _carry(state, values, keys, reads, to_end, since):
    """The last state, what each chunk's start gives its rows, and all u: only the states are left to a scan."""

    def step(state, chunk):
        values, keys, to_end, decay = chunk
        writes = values - product("...tk,...vk->...tv", keys, state)
        return decay * state + product("...tv,...tk->...vk", writes, to_end), (state, writes)

    state, (starts, writes) = lax.scan(step, state, (values, keys, to_end, since[..., -1:, :]))
    return state, product("...tk,...vk->...tv", reads, starts), writes

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

    weights, since, to_end = _decayed_products(q, k, log_decay)
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


def _decayed_products(q, k, log_decay):
    """What row t of a chunk sees of key j, and the decays from the chunk's start and to its end.

    Args:
      q, k: [..., C, K], with 1 where value heads share them.
      log_decay: [..., C, K].

    Returns:
      sum over K of q[t] D[t, j] k[j] and of k[t] D[t, j] k[j], [..., 2, C, C] with zeros for j > t; and [..., C, K] the
      decay from before row 0 up to each row, and from each row to the last.
    """
    shape, C = log_decay.shape, log_decay.shape[-2]
    # One axis in front: XLA's CPU code of jax 0.10 crashes on gradients of this many axes.
    q, k, log_decay = (jnp.broadcast_to(x, shape).reshape(-1, *shape[-2:]) for x in (q, k, log_decay))
    log_decay = jnp.maximum(log_decay, jnp.finfo(jnp.float32).min / C)  # an infinity has no place in the sums

    def blocks(x, size):  # [..., C, K] -> [..., blocks, size, K]
        return x.reshape(*x.shape[:-2], C // size, size, x.shape[-1])

    first, second = slice(0, None, 2), slice(1, None, 2)
    before, after = blocks(log_decay, 1), blocks(jnp.zeros_like(log_decay), 1)
    below = jnp.stack([jnp.sum(x * k, axis=-1) for x in (q, k)], axis=-1)[..., None, None]
    below = jnp.broadcast_to(below, (*log_decay.shape[:-2], C, 2, 1, 1))
    size = 1
    while size < C:
        later = [blocks(x, size)[..., second, :, :] * jnp.exp(before[..., second, :, :]) for x in (q, k)]
        earlier = blocks(k, size)[..., first, :, :] * jnp.exp(after[..., first, :, :])
        corner = matmul(jnp.concatenate(later, axis=-2), earlier.mT)
        corner = corner.reshape(*corner.shape[:-2], 2, size, size)
        top = jnp.pad(below[..., first, :, :, :], ((0, 0),) * (below.ndim - 1) + ((0, size),))
        below = jnp.concatenate([top, jnp.concatenate([corner, below[..., second, :, :, :]], axis=-1)], axis=-2)
        of_first, of_second = before[..., first, -1:, :], before[..., second, -1:, :]
        before = jnp.concatenate([before[..., first, :, :], before[..., second, :, :] + of_first], axis=-2)
        after = jnp.concatenate([after[..., first, :, :] + of_second, after[..., second, :, :]], axis=-2)
        size *= 2
    found = below, jnp.exp(before), jnp.exp(after)
    return tuple(x.reshape(*shape[:-2], *x.shape[2:]) for x in found)


def _carry(state, values, keys, reads, to_end, since):
    """The last state, what each chunk's start gives its rows, and all u: only the states are left to a scan."""

    def step(state, chunk):
        values, keys, to_end, decay = chunk
        writes = values - product("...tk,...vk->...tv", keys, state)
        return decay * state + product("...tv,...tk->...vk", writes, to_end), (state, writes)

    state, (starts, writes) = lax.scan(step, state, (values, keys, to_end, since[..., -1:, :]))
    return state, product("...tk,...vk->...tv", reads, starts), writes

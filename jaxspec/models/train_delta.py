"""The gated delta rule for training: whole texts, differentiable, in the products that the device is fastest at.

The mathematics is that of `jaxspec.recurrent.gated_delta`. That one serves: full precision, rows that are no text,
states after every row. Here float32 products may be rounded as the backend's default says (TF32 on a GPU), and the
triangular system is solved by matrix products alone, which differentiate and compile in a fraction of the time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.hybrid import Update

Array = jax.Array

_CHUNK = 64
_BLOCK = 8  # rows whose decays are split around a middle one
_LEAST = -16.0  # e^-16 is what float32 resolves of the rows around it, and four of them stay in its range


def training_recur(layer: int, update: Update, cache: None) -> tuple[Array, None]:
    """The `recur` argument of `Hybrid` for training: whole texts from a state of zeros, by `chunked_delta`."""
    out, _ = update(None, None, "last", delta=chunked_delta)
    return out, cache


def chunked_delta(q, k, v, log_decay, beta, state, *, real=None, keep="last"):
    """`gated_delta` where every row is real and the last state is kept; no other call is accepted.

    Rows are taken 64 at a time. With S0 [V, K] the state before a chunk, d_t its decay up to row t and D[t, j] the one
    from row j to row t, the writes U = T (beta V) - T (beta d K) S0', T = (I + tril(beta D K K', -1))^-1, need S0 in
    one product; only that and the next state are left to a scan.

    With a decay for each key channel, log_decay [B, T, HV, K], d and D stand inside the products of q, k and S0. Its
    backward pass computes the chunks' matrices again. Decays below e^-16 count as e^-16 among the rows of a chunk.
    """
    if real is not None or keep != "last":
        raise ValueError(f"real={real!r}, keep={keep!r}: training takes whole texts and keeps the last state")
    batch, rows, heads, value_dim = v.shape
    shared = heads // k.shape[2]

    def chunks(x):  # [B, T, heads, ...] -> float32 [N, B, heads, 64, ...]; rows of zeros at the end change nothing
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -rows % _CHUNK)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, -1, _CHUNK, *x.shape[2:])
        return jnp.moveaxis(jnp.swapaxes(x, 0, 1), 2, 3)

    def unit(x):
        x = jnp.repeat(chunks(x), shared, axis=2)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    q, k = unit(q) * k.shape[3] ** -0.5, unit(k)
    values, log_decay, beta = chunks(v), chunks(log_decay), chunks(beta)[..., None]
    rule = _scalar if log_decay.ndim == 4 else jax.checkpoint(_by_channel)
    solved, weights, reads, k_to_end, decay = rule(q, k, values, log_decay, beta)

    def step(state, chunk):
        values, keys, k_to_end, decay = chunk
        writes = values - keys @ state.mT
        return decay * state + writes.mT @ k_to_end, (state, writes)

    chunk = solved[..., :value_dim], solved[..., value_dim:], k_to_end, decay
    state, (starts, writes) = jax.lax.scan(step, state, chunk)
    out = reads @ starts.mT + weights @ writes
    out = jnp.swapaxes(jnp.moveaxis(out, 3, 2), 0, 1).reshape(batch, -1, heads, value_dim)
    return out[:, :rows].astype(v.dtype), state


def _scalar(q, k, values, log_decay, beta):
    """Of every chunk what the scan and the outputs need; log_decay [..., 64], the others [..., 64, K], V or 1.

    Returns:
      T (beta V) beside T (beta d K), [..., 64, V + K]; D (q . k), [..., 64, 64]; d q, [..., 64, K]; k and its decay to
      the last row, [..., 64, K]; and the decay of the whole chunk, [..., 1, K] or [..., 1, 1].
    """
    total = jnp.cumsum(log_decay, axis=-1)
    # Masked before exp: above the diagonal the exponents are positive, and infinity times 0 has no gradient.
    apart = total[..., :, None] - total[..., None, :]
    held = jnp.exp(jnp.where(np.tri(_CHUNK, dtype=bool), apart, -jnp.inf))
    since, to_end = jnp.exp(total)[..., None], held[..., -1, :, None]
    system = jnp.where(np.tri(_CHUNK, k=-1, dtype=bool), beta * held * (k @ k.mT), 0)
    solved = _inverse(system) @ (beta * jnp.concatenate([values, since * k], axis=-1))
    return solved, held * (q @ k.mT), since * q, to_end * k, since[..., -1:, :]


def _by_channel(q, k, values, log_decay, beta):
    """As `_scalar`, log_decay [..., 64, K].

    The pairs of 8 neighbouring rows are one product, with exponents relative to a row in their midst. All others are
    split at a row between them, where neither exponent is positive: the second half of 16 rows against the first, of 32
    and of 64.
    """

    def blocks(x, size):  # [..., 64, K] -> [..., blocks, size, K]
        return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])

    def products(size, rows, columns, of_rows, of_columns):
        """Rows of some blocks, of q and of k, with the rows of others, each times its decay: [..., blocks, 2, t, j]."""
        both = jnp.concatenate([blocks(x, size)[..., rows, :, :] * of_rows for x in (q, k)], axis=-2)
        found = both @ (blocks(k, size)[..., columns, :, :] * of_columns).mT
        return found.reshape(*found.shape[:-2], 2, size, size)

    every, first, second = slice(None), slice(0, None, 2), slice(1, None, 2)
    size = _BLOCK
    # The exponents from a block's start to each of its rows, and from each to its end.
    before = jnp.cumsum(blocks(jnp.maximum(log_decay, _LEAST), size), axis=-2)
    after = before[..., -1:, :] - before
    apart = before - before[..., size // 2 - 1, None, :]
    below = products(size, every, every, jnp.exp(apart), jnp.exp(-apart))
    below = jnp.where(np.tri(size, dtype=bool), below, 0)
    while size < _CHUNK:
        corner = products(size, second, first, jnp.exp(before[..., second, :, :]), jnp.exp(after[..., first, :, :]))
        top = jnp.pad(below[..., first, :, :, :], ((0, 0),) * (below.ndim - 1) + ((0, size),))
        below = jnp.concatenate([top, jnp.concatenate([corner, below[..., second, :, :, :]], axis=-1)], axis=-2)
        of_first, of_second = before[..., first, -1:, :], before[..., second, -1:, :]
        before = jnp.concatenate([before[..., first, :, :], before[..., second, :, :] + of_first], axis=-2)
        after = jnp.concatenate([after[..., first, :, :] + of_second, after[..., second, :, :]], axis=-2)
        size *= 2
    weights, alike = below[..., 0, 0, :, :], below[..., 0, 1, :, :]
    since, to_end = jnp.exp(before[..., 0, :, :]), jnp.exp(after[..., 0, :, :])
    system = jnp.where(np.tri(_CHUNK, k=-1, dtype=bool), beta * alike, 0)
    solved = _inverse(system) @ (beta * jnp.concatenate([values, since * k], axis=-1))
    return solved, weights, since * q, to_end * k, since[..., -1:, :]


@jax.custom_vjp
def _inverse(system: Array) -> Array:
    """(I + system)^-1 of strictly lower triangular [..., 64, 64]: blocks on the diagonal, doubled in size.

    With P and Q the inverses of two neighbours on the diagonal and R what stands below the first, the pair's inverse is
    [[P, 0], [-Q R P, Q]]. A sum of powers would cancel terms as large as binomials where keys are alike.
    """
    row, column = np.ogrid[:_CHUNK, :_CHUNK]
    inverse, size = jnp.eye(_CHUNK, dtype=system.dtype), 1
    while size < _CHUNK:
        below = (row // size % 2 == 1) & (column // size == row // size - 1)
        left = jnp.where(below, system, 0)
        inverse = inverse - (left if size == 1 else inverse @ left @ inverse)
        size *= 2
    return inverse


def _inverse_forward(system):
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse, gradient):
    return (-(inverse.mT @ gradient @ inverse.mT),)


_inverse.defvjp(_inverse_forward, _inverse_backward)

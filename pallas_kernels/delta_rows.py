"""The gated delta rule over a few rows, one after the other: the rows that a verify looks at.

A row's output and the state after it are made of that row and the state before it alone, by the same operations in the
same order wherever the row stands. So their bits depend neither on the rows behind it nor on the number of rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_UNROLLED = 16  # rows up to which a GPU does better without a loop


def delta_rows(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, *, real: Array | None = None
) -> tuple[Array, Array]:
    """Outputs and states of T rows of each request.

    Args:
      q, k: [B, T, HK, K].
      v: [B, T, HV, V]; HV is a multiple of HK.
      log_decay: [B, T, HV], or [B, T, HV, K] for a decay of each key channel; at most 0, -inf included.
      beta: [B, T, HV].
      state: float32[B, HV, V, K], before row 0.
      real: bool[B, T], or None; a row that is not real gives zeros and the state before it.

    Returns:
      float32 [B, T, HV, V], and the states after each row, float32 [B, T, HV, V, K].
    """
    B, T = k.shape[:2]
    if real is not None:
        rows = (q, k, v, log_decay, beta)
        q, k, v, log_decay, beta = (jnp.where(real.reshape(B, T, *[1] * (x.ndim - 2)), x, 0) for x in rows)
    q, k, v, log_decay, beta, state = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta, state))
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]

    rows = q, k, v, log_decay, beta
    if T > _UNROLLED:
        return _loop(rows, state)
    return lax.platform_dependent(rows, state, cuda=_unrolled, default=_loop)


def _loop(rows, state):
    """The code of a row is compiled by itself, the same for any number of rows: but not a loop of one turn."""
    T = rows[0].shape[1]

    def step(state, row):
        out, state = _row(*row, state)
        return state, (out, state)

    padding = ((0, 0), (0, 1 if T == 1 else 0))
    rows = tuple(jnp.pad(x, padding + ((0, 0),) * (x.ndim - 2)).swapaxes(0, 1) for x in rows)
    _, (out, states) = lax.scan(step, state, rows)
    return out.swapaxes(0, 1)[:, :T], states.swapaxes(0, 1)[:, :T]


def _unrolled(rows, state):
    """Two launches a row: without barriers XLA would join rows, in one way or another by how many there are."""
    outs, states = [], []
    for t in range(rows[0].shape[1]):
        row = lax.optimization_barrier(tuple(x[:, t] for x in rows))
        out, state = lax.optimization_barrier(_row(*row, state))
        outs.append(out)
        states.append(state)
    return jnp.stack(outs, axis=1), jnp.stack(states, axis=1)


def _row(q, k, v, log_decay, beta, state):
    """One row: [B, heads, ...] each, the state [B, HV, V, K] before it."""
    HK, K = k.shape[1:]
    q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, v.shape[1] // HK, axis=1)[:, :, None] for x in (q * K**-0.5, k))
    held = jnp.exp(log_decay)[:, :, None] * state
    write = beta[..., None] * (v - jnp.sum(held * k, axis=-1))
    state = held + write[..., None] * k
    return jnp.sum(state * q, axis=-1), state

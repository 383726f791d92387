"""Where a run of new tokens ends: stop ids and length limits, applied inside the step."""

import jax
import jax.numpy as jnp

Array = jax.Array


def trim_run(run: Array, count: Array, stop_ids: Array, budget: Array) -> tuple[Array, Array]:
    """How much of a run survives the request's limits.

    The run is cut to the budget first; within what is left the earliest stop id ends it and is kept. A stop id beyond
    the budget has no effect.

    Args:
      run: int32[B, D], new tokens of each request.
      count: int32[B], how many of them are real, 0 .. D.
      stop_ids: int32[B, S], ids that end a request; -1 fills unused places.
      budget: int32[B], tokens the request may still emit; values below 0 count as 0.

    Returns:
      keep int32[B], tokens that survive, and stopped bool[B], whether the last of them is a stop id.

    Example:
      >>> run = jnp.array([[10, 11, 2, 20], [10, 11, 2, 20]])
      >>> keep, stopped = trim_run(run, jnp.array([4, 4]), jnp.array([[2], [2]]), jnp.array([5, 2]))
      >>> keep.tolist(), stopped.tolist()
      ([3, 2], [True, False])
    """
    D = run.shape[1]
    within = jnp.minimum(count, jnp.maximum(budget, 0))
    column = jnp.arange(D, dtype=jnp.int32)
    is_stop = (run[:, :, None] == stop_ids[:, None, :]).any(-1) & (column < within[:, None])
    first = jnp.where(is_stop, column, D).min(axis=1)
    stopped = first < D
    return jnp.where(stopped, first + 1, within).astype(jnp.int32), stopped

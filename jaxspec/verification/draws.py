"""A token from a row of weights and a coin, in one pass over the row and without an array of its size.

    weights -> sums of tiles of 512 -> the tile in which the running sum passes coin * total -> the token in that tile

Rounding never chooses a token of weight 0: a token is taken only where its own weight is above 0, and a coin that
passes nothing takes the last such token.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

_TILE = 512


def inverse_cdf(weights: Array, coin: Array) -> Array:
    """The first index at which the running sum of a row exceeds coin * its sum.

    Args:
      weights: float32[..., V], at least 0; they need not sum to 1.
      coin: float32[...], in [0, 1).

    Returns:
      int32[...]: an index whose weight is above 0; 0 where no weight is.

    Example:
      >>> weights = jnp.array([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
      >>> inverse_cdf(weights, jnp.array([0.0, 0.5, 1 - 2.0**-24])).tolist()
      [1, 3, 3]
    """

    def part(index):
        return weights if index is None else jnp.take_along_axis(weights, index, axis=-1)

    return first_above(part, weights.shape[-1], coin)


def first_above(part: Callable, size: int, coin: Array, goal: Array | None = None) -> Array:
    """`inverse_cdf` of weights that are computed as they are needed.

    Args:
      part: `part(None)` gives the weights float32[..., V], to be summed where they are computed; `part(index)` those at
        index int32[..., n], all in range.
      size: V (static).
      coin: float32[...], in [0, 1).
      goal: float32[...], what the running sum must exceed, in place of coin * total.

    Returns:
      int32[...].
    """
    tile = min(_TILE, size)
    num_tiles = -(-size // tile)
    weights = part(None)
    fill = [(0, 0)] * (weights.ndim - 1) + [(0, num_tiles * tile - size)]
    sums = jnp.pad(weights, fill).reshape(*weights.shape[:-1], num_tiles, tile).sum(axis=-1)
    running = jnp.cumsum(sums, axis=-1)
    if goal is None:
        goal = coin * running[..., -1]
    chosen = _first(sums, running, goal)
    before = jnp.take_along_axis(running, jnp.maximum(chosen - 1, 0)[..., None], axis=-1)[..., 0]
    goal = goal - jnp.where(chosen > 0, before, 0)

    index = chosen[..., None] * tile + jnp.arange(tile, dtype=jnp.int32)
    within = jnp.where(index < size, part(jnp.minimum(index, size - 1)), 0)
    return chosen * tile + _first(within, jnp.cumsum(within, axis=-1), goal)


def _first(weights: Array, running: Array, goal: Array) -> Array:
    """int32[...]: the first index of positive weight whose running sum exceeds the goal, else the last of positive
    weight, else 0."""
    positive = weights > 0
    passed = positive & (running > goal[..., None])
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.where(positive, index, 0).max(axis=-1)
    return jnp.where(passed.any(axis=-1), jnp.argmax(passed, axis=-1).astype(jnp.int32), last)

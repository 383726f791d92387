"""Greedy chain acceptance: keep drafts while they are what the target would have said."""

import jax
import jax.numpy as jnp

Array = jax.Array


def greedy_token(logits: Array) -> Array:
    """The most likely token of each row, the lowest id among equals: float[..., V] -> int32[...]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def greedy_accept(drafts: Array, num_drafts: Array, targets: Array) -> Array:
    """Number of leading drafts that equal the target's own choice.

    Args:
      drafts: int32[B, D - 1], proposed tokens.
      num_drafts: int32[B], how many of them are real, 0 .. D - 1; the rest can never be accepted.
      targets: int32[B, D], the target's choice after each row (the anchor, then each draft).

    Returns:
      int32[B], a in 0 .. num_drafts. The round's run is `targets[:, : a + 1]`: accepted drafts equal the target's
      choices, and the choice after the last of them comes free.

    Source: greedy case of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).

    Example:
      >>> drafts, targets = jnp.array([[7, 8, 9], [1, 4, 0]]), jnp.array([[7, 8, 5, 0], [3, 4, 0, 0]])
      >>> greedy_accept(drafts, jnp.array([3, 2]), targets).tolist()
      [2, 0]
    """
    column = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    agree = (drafts == targets[:, :-1]) & (column < num_drafts[:, None])
    return jnp.cumprod(agree.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

"""Uniform draws that depend on the request and on nothing around it.

A coin is a function of (seed, stream, position, column) alone: not of the lane, of the bucket or of batch mates. What
is drawn to propose and what is drawn to verify come from different streams.

Which (position, column) a rule reads. A coin that has had a say in what was emitted must not be read again. A round at
committed length L verifies rows L .. L + D - 1, and the next one starts behind the last row that emitted.

    column 0, position L + j         the draw of the token behind row j; plain decoding is its case D = 1
    column 1, position L + j         chain rejection: is the draft behind row j accepted? It looks at no row behind the
                                     first rejected one, so rows that come again were not looked at.
    column 1 + j, position L         block verification: is the prefix that ends with draft j accepted? It looks at all
                                     rows in every round, so the round, known by its L, is part of the key.

Drafts are drawn with noise of a stream of their own, `draft_noise`, whose key names the round as well.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

VERIFY, DRAFT = 0, 1  # streams
DRAW, ACCEPT = 0, 1  # columns; a block's are ACCEPT, ACCEPT + 1, ...

# Threefry-2x32: the rotation of each round, in turn; a key word is added after every fourth.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_STREAM_SALT = 0x5DEECE66


class Coins(NamedTuple):
    """The coins of one round.

    Attributes:
      accept: float32[B, D - 1], one for each draft.
      draw: float32[B, D], one for each row; a rule that draws one token of a run reads that of the row it draws from.
    """

    accept: Array
    draw: Array


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds: two uint32 words of key and two of counter, elementwise, to two words.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def uniform(seed: Array, position: Array, column: Array | int, stream: int) -> Array:
    """Uniform draws in [0, 1 - 2**-24], multiples of 2**-24.

    Args:
      seed: uint32, the request's.
      position: int32.
      column: int32.
      stream: VERIFY or DRAFT (static).

    Returns:
      float32 of the arguments' common shape. The largest draw is below 1, so it never falls off the end of a cumulative
      sum; the smallest is 0, so it must be compared strictly: `u < p` is false for p = 0.

    Example:
      >>> seed, position = jnp.uint32(7), jnp.arange(3)
      >>> together = uniform(seed, position, DRAW, VERIFY)
      >>> bool(together[2] == uniform(seed, jnp.int32(2), DRAW, VERIFY))
      True
      >>> bool((together == uniform(seed, position, DRAW, DRAFT)).any())
      False
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (seed, position, column)))
    seed, position, column = (
        jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), shape) for x in (seed, position, column)
    )
    word, _ = threefry((seed, jnp.full(shape, _STREAM_SALT + stream, jnp.uint32)), (position, column))
    return lax.shift_right_logical(word, jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def chain_coins(seed: Array, seq_lens: Array, num_rows: int) -> Coins:
    """Coins of a round of chain rejection or of sample-then-match.

    Args:
      seed: uint32[B].
      seq_lens: int32[B], committed lengths, the position of the first row.
      num_rows: D (static).
    """
    position = seq_lens[:, None] + jnp.arange(num_rows, dtype=jnp.int32)
    return Coins(
        accept=uniform(seed[:, None], position[:, :-1], ACCEPT, VERIFY),
        draw=uniform(seed[:, None], position, DRAW, VERIFY),
    )


def block_coins(seed: Array, seq_lens: Array, num_rows: int) -> Coins:
    """Coins of a round of block verification; arguments as in `chain_coins`."""
    column = jnp.arange(num_rows, dtype=jnp.int32)
    return Coins(
        accept=uniform(seed[:, None], seq_lens[:, None], ACCEPT + column[:-1], VERIFY),
        draw=uniform(seed[:, None], seq_lens[:, None] + column, DRAW, VERIFY),
    )


def draft_noise(seed: Array, seq_lens: Array, index: Array | int, size: int) -> Array:
    """Exponential noise that a draft is drawn with: the token of the largest p / noise has law p.

    A function of (seed, L, index, token). A block's verdict looks at every draft, also at those it rejects, so the
    round, known by its L, is part of the key. Tiny values, which decide the draw, are as finely resolved as large ones.

    Args:
      seed: uint32[B].
      seq_lens: int32[B], L of the round that verifies the draft.
      index: int32[], number of the draft in its round, from 0.
      size: V (static).

    Returns:
      float32[B, V], above 0 and finite.
    """
    column = jnp.broadcast_to(jnp.asarray(index), seed.shape).astype(jnp.uint32)
    stream = jnp.full(seed.shape, _STREAM_SALT + DRAFT, jnp.uint32)
    key = threefry((seed.astype(jnp.uint32), stream), (seq_lens.astype(jnp.uint32), column))
    token = jnp.broadcast_to(jnp.arange(size, dtype=jnp.uint32), (*seed.shape, size))
    key = tuple(jnp.broadcast_to(word[:, None], token.shape) for word in key)
    high, low = (word.astype(jnp.float32) for word in threefry(key, (token, jnp.zeros_like(token))))
    u = high * jnp.float32(2.0**-32) + low * jnp.float32(2.0**-64)
    return -jnp.log1p(-jnp.clip(u, 2.0**-64, 1 - 2.0**-24))

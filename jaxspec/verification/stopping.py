"""Where a run of new tokens ends: an id outside the vocabulary, stop strings, stop ids, and a budget.

A request ends at the earliest token that is a reason to, whoever else would have ended it later; so it does not matter
how its tokens fall into runs, and plain decoding, whose runs are of one token, ends where a speculative run does. Of
several reasons at one token the first of the list above is told.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array

# Why a request has ended. Stored in `Requests.finish_reason`.
UNFINISHED, STOP, LENGTH, CONTEXT, STOP_STRING, INVALID = range(6)
_REASONS = 8  # more than there are


@flax.struct.dataclass
class StopMatcher:
    """An automaton over tokens that finds stop strings, also those that span tokens.

    Tokens that act alike in every state share a column of the table. The strings of a request are known by the state
    that it starts in: what the requests of a batch look for may differ, and a change of strings compiles nothing while
    the table keeps its shape, which is rounded up.

    Attributes:
      column: int32[V], of each token.
      table: uint16[S, K], the next state by state and column; an entry S + i says that string i is complete. State 0
        looks for nothing and stays.
      state: int32[R], of each request row, or int32[B], of each lane.

    Example:
      >>> ends_in_11 = jnp.array([[0, 0], [1, 2], [1, 4 + 0], [0, 0]], jnp.uint16)  # started in state 1, and S = 4
      >>> matcher = StopMatcher(jnp.arange(2), ends_in_11, jnp.array([1, 1, 0]))
      >>> matcher.walk(jnp.array([[0, 1, 1], [1, 0, 1], [1, 1, 1]])).tolist()
      [[1, 2, 4], [2, 1, 2], [0, 0, 0]]
    """

    column: Array
    table: Array
    state: Array

    @property
    def size(self) -> int:
        """S, states, some of which are nobody's."""
        return self.table.shape[0]

    def walk(self, run: Array) -> Array:
        """State after each token of a run: int32[B, D], ids in range, to int32[B, D], from `state` of B lanes.

        Behind the token that completes a string the states mean nothing.
        """
        state, states = self.state, []
        for token in self.column[run].T:
            state = self.table[jnp.where(state < self.size, state, 0), token].astype(jnp.int32)
            states.append(state)
        return jnp.stack(states, axis=1)


class Ending(NamedTuple):
    """How much of a run survives.

    Attributes:
      tokens: int32[B, D], the run, ids in range everywhere.
      keep: int32[B], tokens that survive, 0 .. D.
      reason: int32[B], INVALID, STOP_STRING or STOP for what the last of them is, else UNFINISHED.
      state: int32[B], of the matcher behind the last of them, None without one.
    """

    tokens: Array
    keep: Array
    reason: Array
    state: Array | None


def end_run(
    run: Array, count: Array, stop_ids: Array, budget: Array, *, vocab_size: int, stops: StopMatcher | None = None
) -> Ending:
    """Where a run ends.

    It is cut to the budget; within what is left the earliest token that ends it is the last one kept. What would have
    ended it beyond the budget has no effect.

    Args:
      run: int32[B, D], new tokens of each request. One that is no id is replaced by the request's first stop id, or by
        0 if it has none, and ends the run.
      count: int32[B], how many of them are real, 0 .. D.
      stop_ids: int32[B, S], ids that end a request; -1 fills unused places.
      budget: int32[B], tokens the request may still emit; values below 0 count as 0.
      vocab_size: V; ids are 0 .. V - 1 (static).
      stops: finds stop strings, with the states of the B lanes; None where there are none.

    Returns:
      `Ending`.

    Example:
      >>> run = jnp.array([[10, 11, 2, 20], [10, 11, 2, 20], [10, 50, 2, 20]])
      >>> ending = end_run(run, jnp.array([4, 4, 4]), jnp.array([[2]] * 3), jnp.array([5, 2, 5]), vocab_size=50)
      >>> ending.keep.tolist(), ending.reason.tolist(), ending.tokens[2].tolist()
      ([3, 2, 2], [1, 0, 5], [10, 2, 2, 20])
    """
    D = run.shape[1]
    valid = (run >= 0) & (run < vocab_size)
    tokens = jnp.where(valid, run, jnp.maximum(stop_ids[:, :1], 0)).astype(jnp.int32)
    reason = jnp.where((run[:, :, None] == stop_ids[:, None, :]).any(-1) & valid, STOP, UNFINISHED)
    if stops is not None:
        states = stops.walk(tokens)
        reason = jnp.where(states >= stops.size, STOP_STRING, reason)
    reason = jnp.where(valid, reason, INVALID)

    within = jnp.minimum(count, jnp.maximum(budget, 0))
    column = jnp.arange(D, dtype=jnp.int32)
    # Place and reason in one number, so that one reduction finds both.
    ends = (reason != UNFINISHED) & (column < within[:, None])
    first = jnp.where(ends, _REASONS * column + reason, _REASONS * D).min(axis=1).astype(jnp.int32)
    keep = jnp.where(first < _REASONS * D, first // _REASONS + 1, within).astype(jnp.int32)
    state = None
    if stops is not None:
        behind = jnp.where(column == keep[:, None] - 1, states, 0).sum(axis=1, dtype=jnp.int32)
        state = jnp.where(keep > 0, behind, stops.state)
    return Ending(tokens, keep, first % _REASONS, state)

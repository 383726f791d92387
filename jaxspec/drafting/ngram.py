"""Prompt lookup: what followed the last time these tokens were seen."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.drafting.base import DraftContext, Drafts
from jaxspec.errors import InputError

_LONGEST = 64  # every length is one more comparison in the compiled program


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Proposes the continuation of the longest, then latest, earlier occurrence of the sequence's own ending.

    Runs on the device as a few comparisons over the token history; it has no weights and no state. A request whose
    ending occurs nowhere else proposes nothing. A match closer than D - 1 tokens to the end repeats with its own
    period: after `a b a b` it proposes `a b a b ...`.

    Attributes:
      max_ngram: longest ending that is looked up, in tokens.
      min_ngram: shortest ending that counts as a match.

    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    max_ngram: int = 4
    min_ngram: int = 1
    algorithm: ClassVar[str] = "ngram"

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram <= _LONGEST:
            raise InputError(
                f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: "
                f"need 1 <= min_ngram <= max_ngram <= {_LONGEST}"
            )

    def init(self, config):
        return ()

    def prefill(self, params, state, tokens, metadata):
        return state

    def propose(self, params, state, context: DraftContext, num_drafts: int):
        T = context.tokens.shape[1]
        history = context.tokens[context.req_rows]  # [B, T]
        end = context.seq_lens[:, None]  # position of the anchor
        position = jnp.arange(T, dtype=jnp.int32)

        # same[b, i]: how many tokens that end at i equal those that end at the anchor, counted up to max_ngram.
        same = jnp.zeros(history.shape, jnp.int32)
        running = jnp.ones(history.shape, bool)
        for back in range(min(self.max_ngram, T)):
            suffix = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
            earlier = jnp.pad(history, ((0, 0), (back, 0)))[:, :T]  # token at i - back
            running &= (earlier == suffix) & (position >= back) & (end >= back)
            same += running
        same = jnp.where((position < end) & (same >= self.min_ngram), same, 0)

        best = jnp.argmax(same * T + position * (same > 0), axis=1).astype(jnp.int32)[:, None]
        found = jnp.take_along_axis(same, best, axis=1)[:, 0] > 0
        period = jnp.maximum(end - best, 1)
        step = jnp.arange(num_drafts, dtype=jnp.int32)
        source = jnp.where(found[:, None], best + 1 + step % period, 0)
        tokens = jnp.take_along_axis(history, source, axis=1)
        return state, Drafts(tokens=tokens, count=jnp.where(found, num_drafts, 0).astype(jnp.int32))

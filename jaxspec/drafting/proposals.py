"""How a drafter that has a distribution draws tokens from it, and collects those of a round."""

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.verification import Sampling, draft_noise, greedy_token, target_probs

Array = jax.Array


def propose_token(
    logits: Array, sampling: Sampling | None, seq_lens: Array, index: Array | int
) -> tuple[Array, Array | None]:
    """One draft of each request, and what it was drawn from: the draft's own distribution under the request's settings.

    A draft is a function of its logits, of the request's seed and of (L, index), not of lane, bucket or batch mates.

    Args:
      logits: float[B, V], the draft's, over the target's vocabulary; -inf for a token that it cannot say.
      sampling: `Sampling` of the B requests, as a context brings it, or None where all drafts are greedy.
      seq_lens: int32[B], L of the round that verifies the draft.
      index: int32[], number of the draft in its round, from 0; may be traced.

    Returns:
      int32[B], and float32[B, V], all mass on the token for greedy requests. Without sampling the most likely token,
      and None.

    Source: the exponential race, which is the Gumbel-max trick without its logarithms.

    Example:
      >>> logits, lens = jnp.array([[0.0, 3.0, 1.0]] * 2), jnp.array([5, 5])
      >>> token, probs = propose_token(logits, Sampling.of(2, temperature=[0.0, 1.0], seed=7), lens, 0)
      >>> int(token[0]), [f"{p:.2f}" for p in probs[1].tolist()]
      (1, ['0.04', '0.84', '0.11'])
      >>> propose_token(logits, None, lens, 0)[0].tolist()
      [1, 1]
    """
    if sampling is None:
        return greedy_token(logits), None
    probs = target_probs(logits, sampling)
    noise = draft_noise(sampling.seed, seq_lens, index, logits.shape[-1])
    return jnp.argmax(probs / noise, axis=-1).astype(jnp.int32), probs


@flax.struct.dataclass
class Chain:
    """Drafts of a round as they are drawn, one after the other, in a device loop.

    Attributes:
      last: int32[B], the newest draft.
      tokens: int32[B, D - 1], 0 where none is drawn yet.
      probs: float32[B, D - 1, V], what each was drawn from, or None.
    """

    last: Array
    tokens: Array
    probs: Array | None

    @classmethod
    def start(cls, token: Array, probs: Array | None, num_drafts: int) -> "Chain":
        """The chain with draft 0: token int32[B] and probs float32[B, V] or None, as `propose_token` gives them."""
        empty = jnp.zeros((token.shape[0], num_drafts), jnp.int32)
        table = None if probs is None else jnp.zeros((*empty.shape, probs.shape[-1]), probs.dtype)
        return cls(token, empty, table).add(token, probs, 0)

    def add(self, token: Array, probs: Array | None, index: Array | int) -> "Chain":
        """The chain with draft number index int32[] behind the others."""
        column = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        tokens = jnp.where(column == index, token[:, None], self.tokens)
        table = self.probs
        if table is not None:
            table = jax.lax.dynamic_update_index_in_dim(table, probs, index, 1)
        return Chain(token, tokens, table)

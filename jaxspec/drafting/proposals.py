"""How a drafter that has a distribution draws a token from it."""

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

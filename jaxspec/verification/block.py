"""Block verification: the drafts of a chain are judged together, which accepts at least as many as one by one.

With q what a draft was drawn from, p the target's distribution in its place, and h = 1 for the empty prefix,

    h_i = min(h_{i-1} * p(d_i) / q(d_i), 1)
    r_i = R_i / (R_i + 1 - h_i) with R_i = sum over tokens of max(h_i * p - q, 0) behind draft i;  h_i for the last one

the longest prefix i whose coin is below r_i is kept, and behind it a token is drawn from max(h_i * p - q, 0), or from
p behind the last draft.
"""

import jax
import jax.numpy as jnp

from jaxspec.verification.chain import check_draft_probs, drafted, draw_rest, sane
from jaxspec.verification.coins import Coins, block_coins
from jaxspec.verification.nodes import BLOCK, GREEDY, Nodes, Verified, chain_run
from jaxspec.verification.sampling import Sampling, each_row, rows_of

Array = jax.Array


@jax.jit
def verify_block(
    nodes: Nodes,
    logits: Array,
    sampling: Sampling,
    seq_lens: Array,
    draft_probs: Array,
    mask: Array | None = None,
    coins: Coins | None = None,
) -> Verified:
    """Keeps the longest prefix of the drafts that its coin lets pass.

    Args:
      nodes: `Nodes` with a chain of D - 1 drafts.
      logits: float[B, D, V], the target's, behind each node.
      sampling: `Sampling` of the B requests.
      seq_lens: int32[B], committed lengths, the position of node 0.
      draft_probs: float32[B, D - 1, V], q: what each draft was really drawn from. A draft whose q is not in (0, 1] is
        rejected. Not looked at for greedy requests, whose drafts are kept while they are the most likely token.
      mask: bool[B, V] or [B, D, V], the tokens that may be said; None for all of them.
      coins: `Coins` in place of the request's own; those of `chain_coins` are read again by later rounds, which biases
        this rule.

    Returns:
      `Verified`; the rule is BLOCK, or GREEDY for greedy requests.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2.
    """
    check_draft_probs(draft_probs, logits)
    rows = rows_of(logits, mask)
    coins = block_coins(sampling.seed, seq_lens, logits.shape[1]) if coins is None else coins
    law, p, q = drafted(nodes, rows, sampling, draft_probs)
    # A ratio that overflows is cut to a finite number, because behind a draft with h = 0 it is multiplied by 0.
    ratio = jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1), jnp.finfo(jnp.float32).max), 0)
    h = [jnp.ones(nodes.count.shape, jnp.float32)]
    for i in range(p.shape[1]):
        h.append(jnp.minimum(h[-1] * ratio[:, i], 1))
    h = jnp.stack(h, axis=1)

    def left(rows, law, h, q):
        return jnp.maximum(h[:, None] * law.probs(*rows.all()) - sane(q), 0).sum(axis=-1)

    # That of the last draft is not looked at: no draft follows it, so there is no q behind it.
    rest = each_row(left, rows, law, h, draft_probs)[:, 1:] if p.shape[1] else p

    draft = jnp.arange(1, h.shape[1], dtype=jnp.int32)
    length, reach = nodes.chain_len[:, None], h[:, 1:]
    whole = (draft == length) | (reach <= 0) | (reach >= 1)
    pass_rate = jnp.where(whole, reach, rest / jnp.where(whole, 1, rest + 1 - reach))
    passes = (coins.accept < pass_rate) & (draft <= length)
    accepted = jnp.where(passes, draft, 0).max(axis=1, initial=0)
    share = jnp.take_along_axis(h, accepted[:, None], axis=1)[:, 0]
    final = draw_rest(nodes, rows, law, sampling, draft_probs, accepted, share, coins)
    return chain_run(nodes, accepted, final, jnp.where(sampling.greedy, GREEDY, BLOCK))

"""Rules for chains of drafts that decide one draft at a time: greedy, rejection, sample-then-match.

Each keeps the target's distribution exactly. A draft counts only if all drafts before it are accepted; the run ends
with a token of the target's own, drawn where the first draft failed or behind the last one.
"""

import jax
import jax.numpy as jnp

from jaxspec.verification.coins import DRAW, VERIFY, Coins, chain_coins, uniform
from jaxspec.verification.draws import inverse_cdf
from jaxspec.verification.greedy import greedy_token
from jaxspec.verification.nodes import GREEDY, MATCH, REJECTION, Nodes, Verified, chain_run
from jaxspec.verification.sampling import Law, Rows, Sampling, draw, each_row, law_of, pick_row, rows_of

Array = jax.Array


def sample_token(logits: Array, sampling: Sampling, position: Array, mask: Array | None = None) -> Array:
    """The token behind one row of each request: what plain decoding says, with the coin that every rule draws with.

    Args:
      logits: float[B, V].
      sampling: `Sampling` of the B requests.
      position: int32[B], of the row; the token's own is one further.
      mask: bool[B, V], the tokens that may be said; None for all of them.

    Returns:
      int32[B], the most likely token for greedy requests.
    """
    rows = rows_of(logits, mask)
    return draw(rows, law_of(rows, sampling), uniform(sampling.seed, position, DRAW, VERIFY))


@jax.jit
def verify_greedy(nodes: Nodes, logits: Array, mask: Array | None = None) -> Verified:
    """Keeps drafts while they are the target's most likely token.

    Args:
      nodes: `Nodes` with a chain of D - 1 drafts.
      logits: float[B, D, V], the target's, behind each node.
      mask: bool[B, V] or [B, D, V], the tokens that may be said; None for all of them.

    Returns:
      `Verified`; the rule of every lane that takes part is GREEDY.

    Example:
      >>> from jaxspec.verification import chain_nodes
      >>> logits = jnp.eye(4)[jnp.array([[2, 3, 1]])]
      >>> verify_greedy(chain_nodes(jnp.array([0]), jnp.array([[2, 1]]), jnp.array([2])), logits).tokens.tolist()
      [[2, 3, 0]]
    """
    choice = each_row(lambda rows: greedy_token(rows.all()[0]), rows_of(logits, mask))
    return _follow(nodes, choice, jnp.int32(GREEDY))


@jax.jit
def verify_match(
    nodes: Nodes,
    logits: Array,
    sampling: Sampling,
    seq_lens: Array,
    mask: Array | None = None,
    coins: Coins | None = None,
) -> Verified:
    """Draws the target's token behind every node and keeps drafts while they are what was drawn.

    For drafts without a distribution. The run is what plain decoding with the same seed draws, token by token: drafts
    change how many rounds it takes, not what it says.

    Args:
      nodes, logits, mask: as in `verify_greedy`.
      sampling: `Sampling` of the B requests.
      seq_lens: int32[B], committed lengths, the position of node 0.
      coins: `Coins` in place of the request's own; its `draw` is read.

    Returns:
      `Verified`; the rule is MATCH, or GREEDY for greedy requests.

    Source: the greedy walk of Leviathan et al. (2023) over sampled choices.
    """
    coins = chain_coins(sampling.seed, seq_lens, logits.shape[1]) if coins is None else coins
    choice = each_row(lambda rows, coin: draw(rows, law_of(rows, sampling), coin), rows_of(logits, mask), coins.draw)
    return _follow(nodes, choice, jnp.where(sampling.greedy, GREEDY, MATCH))


@jax.jit
def verify_rejection(
    nodes: Nodes,
    logits: Array,
    sampling: Sampling,
    seq_lens: Array,
    draft_probs: Array,
    mask: Array | None = None,
    coins: Coins | None = None,
) -> Verified:
    """Accepts draft d with probability min(p(d) / q(d), 1); behind the first one that fails draws from max(p - q, 0).

    Args:
      nodes, logits, sampling, seq_lens, mask: as in `verify_match`.
      draft_probs: float32[B, D - 1, V], q: what each draft was really drawn from, `target_probs` of the draft's logits
        for instance. A draft whose q is not in (0, 1] is rejected. Not looked at for greedy requests, whose drafts are
        kept while they are the most likely token.
      coins: `Coins` in place of the request's own.

    Returns:
      `Verified`; the rule is REJECTION, or GREEDY for greedy requests.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1.
    """
    check_draft_probs(draft_probs, logits)
    rows = rows_of(logits, mask)
    coins = chain_coins(sampling.seed, seq_lens, logits.shape[1]) if coins is None else coins
    law, p, q = drafted(nodes, rows, sampling, draft_probs)
    column = jnp.arange(p.shape[1], dtype=jnp.int32)
    # Strict: a coin of 0 does not accept what the target never says.
    keep = (q > 0) & (coins.accept * q < p) & (column < nodes.chain_len[:, None])
    accepted = jnp.cumprod(keep.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    final = draw_rest(nodes, rows, law, sampling, draft_probs, accepted, jnp.ones_like(accepted, jnp.float32), coins)
    return chain_run(nodes, accepted, final, jnp.where(sampling.greedy, GREEDY, REJECTION))


def _follow(nodes: Nodes, choice: Array, rule: Array) -> Verified:
    """Keeps drafts while they are the choice int32[B, D] behind the node before."""
    column = jnp.arange(choice.shape[1] - 1, dtype=jnp.int32)
    agree = (nodes.token[:, 1:] == choice[:, :-1]) & (column < nodes.chain_len[:, None])
    accepted = jnp.cumprod(agree.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return chain_run(nodes, accepted, jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0], rule)


def check_draft_probs(draft_probs: Array, logits: Array) -> None:
    """Raises ValueError unless the drafts' distributions are over the target's vocabulary, one for each draft."""
    B, D, V = logits.shape
    if draft_probs.shape != (B, D - 1, V):
        raise ValueError(
            f"draft_probs has shape {draft_probs.shape}: it must be {(B, D - 1, V)}, one distribution over the "
            f"target's vocabulary for each draft; spread a smaller one out, or use verify_match, which needs none"
        )


def drafted(nodes: Nodes, rows: Rows, sampling: Sampling, draft_probs: Array) -> tuple[Law, Array, Array]:
    """The law of each row, and what target and draft give each draft.

    Returns:
      `Law` with fields [B, D]; p and q float32[B, D - 1]. q is 1 for greedy requests, and 0 where it is no probability.
    """
    token = jnp.concatenate([nodes.token[:, 1:], nodes.token[:, :1]], axis=1)[..., None]

    def row(rows, token):
        law = law_of(rows, sampling)
        return law, law.probs(*rows.at(token))[:, 0]

    law, p = each_row(row, rows, token)
    q = sane(jnp.take_along_axis(draft_probs, token[:, :-1], axis=-1)[..., 0])
    return law, p[:, :-1], jnp.where(sampling.greedy[:, None], 1, q)


def sane(q: Array) -> Array:
    """Draft probabilities, 0 where they are none."""
    return jnp.where((q >= 0) & (q <= 1), q, 0)


def draw_rest(
    nodes: Nodes,
    rows: Rows,
    law: Law,
    sampling: Sampling,
    draft_probs: Array,
    accepted: Array,
    share: Array,
    coins: Coins,
) -> Array:
    """The token behind the accepted drafts: from max(share * p - q, 0), or from p behind the last draft.

    Only the one row of each request is looked at, [B, V].

    Args:
      nodes, rows, law, sampling, draft_probs, coins: of the round.
      accepted: int32[B].
      share: float32[B], in (0, 1].

    Returns:
      int32[B].
    """
    rows, law, coin = pick_row((rows, law, coins.draw), accepted)
    p = law.probs(*rows.all())
    if draft_probs.shape[1] == 0:
        return inverse_cdf(p, coin)
    q = sane(pick_row(draft_probs, accepted))
    failed = (accepted < nodes.chain_len) & ~sampling.greedy
    rest = jnp.where(failed[:, None], jnp.maximum(share[:, None] * p - q, 0), p)
    # Rounding may leave nothing of two equal distributions; what is left of them has measure 0, so p does as well.
    return inverse_cdf(jnp.where((rest > 0).any(axis=1)[:, None], rest, p), coin)

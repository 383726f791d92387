"""What a verifier is asked and what it answers, the same for every rule."""

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array

# What decided a request's run. Stored in `Verified.rule`.
NO_RULE, GREEDY, REJECTION, BLOCK, MATCH = range(5)
RULE_NAMES = ("none", "greedy", "rejection", "block", "match")


@flax.struct.dataclass
class Nodes:
    """The tokens that a round puts before the target, as a tree rooted in the anchor; a chain is a tree.

    Attributes:
      token: int32[B, D], ids in range everywhere; node 0 is the anchor.
      parent: int32[B, D], the node before each one, with a smaller number; 0 for node 0.
      count: int32[B], how many nodes are real, the first ones: 1 .. D, or 0 for a lane that takes no part.
    """

    token: Array
    parent: Array
    count: Array

    @property
    def chain_len(self) -> Array:
        """int32[B], leading drafts that form a chain: draft j hangs on node j - 1. Rules for chains see no others.

        Example:
          >>> token, parent = jnp.zeros((2, 4), jnp.int32), jnp.array([[0, 0, 1, 2], [0, 0, 0, 1]])
          >>> Nodes(token, parent, jnp.array([3, 4])).chain_len.tolist()
          [2, 1]
        """
        node = jnp.arange(1, self.token.shape[1], dtype=jnp.int32)
        linked = (self.parent[:, 1:] == node - 1) & (node < self.count[:, None])
        return jnp.cumprod(linked.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def chain_nodes(anchor: Array, drafts: Array, num_drafts: Array, active: Array | None = None) -> Nodes:
    """The nodes of a chain.

    Args:
      anchor: int32[B].
      drafts: int32[B, D - 1].
      num_drafts: int32[B], how many drafts are real, 0 .. D - 1.
      active: bool[B], lanes that take part; None for all of them.

    Returns:
      `Nodes`.

    Example:
      >>> nodes = chain_nodes(jnp.array([5]), jnp.array([[7, 8]]), jnp.array([1]))
      >>> nodes.token.tolist(), nodes.parent.tolist(), nodes.count.tolist()
      ([[5, 7, 8]], [[0, 0, 1]], [2])
    """
    token = jnp.concatenate([anchor[:, None], drafts], axis=1).astype(jnp.int32)
    before = jnp.maximum(jnp.arange(token.shape[1], dtype=jnp.int32) - 1, 0)
    count = jnp.asarray(num_drafts, jnp.int32) + 1
    if active is not None:
        count = jnp.where(active, count, 0)
    return Nodes(token=token, parent=jnp.broadcast_to(before, token.shape), count=count)


@flax.struct.dataclass
class Verified:
    """What a round emits.

    Attributes:
      accepted: int32[B], drafts that are kept, 0 .. D - 1.
      count: int32[B], tokens of the run: accepted + 1, or 0 for a lane that takes no part.
      tokens: int32[B, D], the run: the accepted drafts, then one token of the target's own; 0 from `count` on.
      nodes: int32[B, D], the node behind which each token of the run stands, so the ones whose cache rows stay; node 0
        first, 0 from `count` on. The last of them is where recurrent states stop.
      rule: int32[B], what decided: GREEDY, REJECTION, BLOCK or MATCH; NO_RULE for a lane that takes no part.
    """

    accepted: Array
    count: Array
    tokens: Array
    nodes: Array
    rule: Array


def chain_run(nodes: Nodes, accepted: Array, final: Array, rule: Array) -> Verified:
    """The answer of a rule for chains.

    Args:
      nodes: `Nodes`.
      accepted: int32[B], drafts that are kept.
      final: int32[B], the token behind the last of them.
      rule: int32[B] or int32[], what decided.

    Returns:
      `Verified`.
    """
    active = nodes.count > 0
    accepted = jnp.where(active, accepted, 0)
    count = jnp.where(active, accepted + 1, 0)
    column = jnp.arange(nodes.token.shape[1], dtype=jnp.int32)
    behind = jnp.concatenate([nodes.token[:, 1:], nodes.token[:, :1]], axis=1)
    tokens = jnp.where(column == accepted[:, None], final[:, None], behind)
    live = column < count[:, None]
    return Verified(
        accepted=accepted,
        count=count,
        tokens=jnp.where(live, tokens, 0),
        nodes=jnp.where(live, column, 0),
        rule=jnp.where(active, rule, NO_RULE).astype(jnp.int32),
    )

"""What the training of every kind of draft shares: settings, a batch of the frozen target's rows, and how the progress
of drafts is counted.

A kind of draft is trained through a `Learner`, whatever its network is. The training loop draws texts, runs the frozen
target over them once, and hands tokens, features and logits to the learner's loss; it never looks inside. The module
of a kind has `make_learner(kind, target, shape, num_drafts, taps, attention) -> Learner`: `target` is a `Checkpoint`,
`shape` a dict of sizes from `SHAPES`, `taps` the layers that the user named or None, `attention` the kernels' names.

Positions: with the text up to token L committed, L is the anchor's position. Draft j (1 .. gamma) stands for token
L + j, which the target's row L + j - 1 predicts.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.drafting.base import Drafter
from jaxspec.models.checkpoint import Checkpoint

Array = jax.Array
Params = Any  # a pytree of float32 arrays: what is trained


# Sizes of the drafts' own layers. Their rows are as wide as the target's.
SHAPES = {
    "small": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 224,
        "markov_rank": 64,
    },
    "tiny": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "markov_rank": 16,
    },
}


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """What a run does: static, hashable.

    Fields:
      length: T, tokens of a training sequence.
      batch: sequences a step.
      anchors: A, places of a sequence from which drafts are learned.
      own_share: share of the sequences that the target has written itself.
      hard_share: share of the loss that follows the target's most likely id; the rest follows its distribution.
      position_decay: the loss of draft j weighs exp(-(j - 1) / position_decay).
      reach_share: share of the position weights that follow from the draft itself: how much the expected run of
        accepted drafts would gain at this place.
      steps_a_dispatch: optimiser steps between two looks of the host.
      warmup: steps in which the learning rate rises.
      muon_rate, adam_rate: peak learning rates of the matrices and of everything else.
      weight_decay: of the matrices; a step shrinks them by this times the learning rate.
      clip: largest global norm of the gradient.
      seed: of weights, of the order of the text and of the target's own text.
    """

    length: int = 1024
    batch: int = 32
    anchors: int = 128
    own_share: float = 0.25
    hard_share: float = 0.5
    position_decay: float = 4.0
    reach_share: float = 0.5
    steps_a_dispatch: int = 20
    warmup: int = 100
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.02
    clip: float = 1.0
    seed: int = 0


@flax.struct.dataclass
class Batch:
    """Texts and what the frozen target makes of them; nothing in it has a gradient.

    Attributes:
      tokens: int32[B, T].
      features: [B, T, m * H], the streams after the learner's `taps` side by side, in the compute dtype; without taps
        the final normed rows, [B, T, H].
      logits: float32[B, T, V]; row p speaks of token p + 1.
      shared: arrays of the target that the draft computes with: `embed_tokens` [V, H], and `lm_head` [V, H] where the
        target has one of its own.
    """

    tokens: Array
    features: Array
    logits: Array
    shared: dict[str, Array]


class Learner(Protocol):
    """A kind of draft under training: static and hashable; its arrays are in `params`.

    Attributes:
      kind: "dspark", "dflash", "mtp" or "eagle3".
      taps: layers of the target whose streams are the features; () for the final normed rows.
      num_drafts: gamma, drafts that are learned from each anchor.
    """

    kind: str
    taps: tuple[int, ...]
    num_drafts: int

    def init(self, key: Array, target: Checkpoint, scales: Array) -> Params:
        """Fresh float32 weights; `scales` float32[m] is the root mean square of each feature in front of the
        network."""

    def loss(self, params: Params, batch: Batch, key: Array, settings: DraftSettings) -> tuple[Array, dict[str, Array]]:
        """The loss, float32[], and figures: `nats`, float32[], the mean cross-entropy with the target's most likely
        ids; `agree` and `accept`, float32[gamma], from `count_agreement`. Differentiated in `params`."""

    def same(self, params: Params, batch: Batch, anchors: Array) -> Array:
        """bool[B, A, gamma]: whether draft j from anchor int32[B, A] is the target's most likely id, all tokens before
        it being those of the text (teacher-forced)."""

    def drafter(self) -> Drafter:
        """What `jaxspec.make_spec_step` takes."""

    def decode_params(self, params: Params, shared: dict[str, Array], dtype: Any) -> Any:
        """What that drafter's `Params.draft` is: the weights as they are stored, in `dtype`."""

    def save(self, folder: pathlib.Path, params: Params, target: Checkpoint) -> None:
        """Writes the draft's folder in its public format, bfloat16; `target` is what it was trained for."""

    def restore(self, folder: pathlib.Path, target: Checkpoint) -> Params:
        """The weights of a written folder, as this learner holds them: what is stored is what is measured."""


def draw_anchors(key: Array, batch: int, length: int, count: int, num_drafts: int) -> Array:
    """Random anchors int32[B, A] in ascending order, one in each of A equal parts of a text of `length` tokens.

    An anchor has at least one token before it, and `num_drafts` rows of the target from it on.

    Example:
      >>> anchors = draw_anchors(jax.random.key(0), batch=2, length=40, count=8, num_drafts=7)
      >>> anchors.shape, bool((anchors >= 1).all()), bool((anchors + 7 <= 40).all())
      ((2, 8), True, True)
    """
    places = length - num_drafts  # 1 .. places
    edges = jnp.arange(count + 1) * places // count
    width = jnp.maximum(edges[1:] - edges[:-1], 1)
    offset = jax.random.uniform(key, (batch, count)) * width
    return jnp.minimum(1 + edges[:-1] + offset.astype(jnp.int32), places).astype(jnp.int32)


def rows_after(rows: Array, anchors: Array, count: int) -> Array:
    """[B, A, count, ...]: of rows [B, T, ...] the `count` ones from each anchor int32[B, A] on."""
    places = anchors[:, :, None] + jnp.arange(count, dtype=jnp.int32)
    flat = places.reshape(places.shape[0], -1)
    index = flat.reshape(*flat.shape, *[1] * (rows.ndim - 2))
    taken = jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")
    return taken.reshape(*places.shape, *rows.shape[2:])


def count_agreement(same: Array) -> dict[str, Array]:
    """Means over anchors of bool[..., gamma]: `agree`, how often draft j is right; `accept`, how often drafts 1 .. j
    all are. 1 + the sum of the latter is the tokens of a step.

    Example:
      >>> figures = count_agreement(jnp.array([[True, False, True], [True, True, False]]))
      >>> figures["agree"].tolist(), figures["accept"].tolist()
      ([1.0, 0.5, 0.5], [1.0, 0.5, 0.0])
    """
    right = same.astype(jnp.float32).reshape(-1, same.shape[-1])
    return {"agree": right.mean(axis=0), "accept": jnp.cumprod(right, axis=1).mean(axis=0)}


def follow_target(scores: Array, wanted: Array, settings: DraftSettings) -> tuple[Array, dict[str, Array]]:
    """The loss of drafts, and its figures.

    Args:
      scores: float32[..., gamma, V], the draft's logits.
      wanted: float32[..., gamma, V], the target's of the same tokens.

    Returns:
      The cross-entropy with the target's distribution and with its most likely id, mixed by `hard_share`, averaged with
      the weights of `position_weights`; and `nats`, `agree` and `accept`.
    """
    wanted = jax.lax.stop_gradient(wanted)
    best = jnp.argmax(wanted, axis=-1)
    total = jax.nn.logsumexp(scores, axis=-1)
    hard = total - jnp.take_along_axis(scores, best[..., None], axis=-1)[..., 0]
    soft = total - jnp.sum(jax.nn.softmax(wanted, axis=-1) * scores, axis=-1)
    mixed = settings.hard_share * hard + (1 - settings.hard_share) * soft
    weight = position_weights(jnp.exp(-hard), settings)
    figures = {"nats": hard.mean(), **count_agreement(jnp.argmax(scores, axis=-1) == best)}
    return jnp.mean(weight * mixed), figures


def position_weights(chance: Array, settings: DraftSettings) -> Array:
    """Weights of drafts, float32[..., gamma], mean 1 over everything.

    `chance` float32[..., gamma] is the chance that the draft gives to the target's most likely id. If drafts were
    accepted with it, the expected run would be sum_k prod_{i <= k} chance_i, and what one chance adds to it is
    sum_{k >= j} of the product without factor j: drafts behind a hopeless one count little.
    """
    gamma = chance.shape[-1]
    plain = jnp.exp(-jnp.arange(gamma, dtype=jnp.float32) / settings.position_decay)
    chance = jax.lax.stop_gradient(chance)
    before = jnp.concatenate([jnp.ones_like(chance[..., :1]), jnp.cumprod(chance, axis=-1)[..., :-1]], axis=-1)
    after = [jnp.ones_like(chance[..., 0])]  # 1 + chance_{j + 1} (1 + chance_{j + 2} (...)), from the last one back
    for j in range(gamma - 1, 0, -1):
        after.insert(0, 1 + chance[..., j] * after[0])
    gain = before * jnp.stack(after, axis=-1)
    plain = jnp.broadcast_to(plain / plain.mean(), gain.shape)
    share = settings.reach_share
    return (1 - share) * plain + share * gain / jnp.maximum(gain.mean(), 1e-6)

"""The training of EAGLE-3 drafts: its chains are those of the network, and a fresh draft is the target's last row."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import TARGETS, Oracle
from tiny_models import FAST_COMPILE, VOCAB

from jaxspec.drafting.train_common import SHAPES, Batch, DraftSettings
from jaxspec.drafting.train_eagle import make_learner
from jaxspec.models import Checkpoint, dense_attend

T, GAMMA = 24, 4
ANCHORS = np.array([[1, 2, 9, 15, 20], [1, 5, 6, 7, 20]], np.int32)


@functools.cache
def learner_of(name):
    """A learner, and a target with it."""
    _, module, params = TARGETS[name]
    target = Checkpoint(module, params(), module.config, Path("tiny"))
    return make_learner("eagle3", target, SHAPES["tiny"], GAMMA, None, {"full": "blocks"}), target


@functools.cache
def batch_of(name):
    """What a target makes of two texts, and its normed rows."""
    learner, target = learner_of(name)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, T)).astype(np.int32)
    positions, attend = np.broadcast_to(np.arange(T), tokens.shape), dense_attend(target.config.windows)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(params):
        of_target = functools.partial(target.module.apply, params, tokens, positions, attend)
        return *of_target(taps=learner.taps)[:2], of_target()[1]

    logits, features, normed = run(target.params)
    shared = {k: v for k, v in target.params["params"].items() if k in ("embed_tokens", "lm_head")}
    return Batch(jnp.asarray(tokens), features, logits, shared), normed


@pytest.mark.parametrize("name", ["swa", "hybrid"])
def test_a_fresh_draft_starts_from_the_last_normed_row(name):
    learner, _ = learner_of(name)
    batch, normed = batch_of(name)
    tree = learner.init(jax.random.key(0), batch.shared, jnp.ones(len(learner.taps)))
    fused = learner.draft.fuse({"draft": tree, **batch.shared}, batch.features)
    # The other taps say a little.
    assert np.corrcoef(fused.ravel(), normed.ravel())[0, 1] > 0.95


def test_chains_are_those_of_the_network():
    learner, _ = learner_of("swa")
    batch, _ = batch_of("swa")
    tree = learner.init(jax.random.key(0), batch.shared, None)
    tree = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), tree)
    scores = jax.jit(learner.ahead, compiler_options=FAST_COMPILE)(tree, batch, ANCHORS)
    params = {"draft": tree, **batch.shared}
    for row, anchors in enumerate(ANCHORS):
        text = np.asarray(batch.tokens[row]).tolist()
        for column, anchor in enumerate(anchors):
            features, given = np.asarray(batch.features[row, :anchor]), text[anchor + 1 : anchor + GAMMA]
            _, told = Oracle(learner.draft.config, params).chain(features, text[: anchor + 1], GAMMA, given)
            np.testing.assert_allclose(scores[row, column], told, rtol=1e-3, atol=1e-3)


def test_learning():
    """A few steps: the loss falls and more drafts are the target's own ids. None of the target's arrays is donated."""
    learner, target = learner_of("swa")
    batch, _ = batch_of("swa")
    tree = learner.init(jax.random.key(0), batch.shared, None)
    settings = DraftSettings(length=T, batch=2, anchors=16)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE, donate_argnums=0)
    def step(tree, number):
        key = jax.random.fold_in(jax.random.key(1), number)
        (loss, figures), gradient = jax.value_and_grad(learner.loss, has_aux=True)(tree, batch, key, settings)
        return jax.tree.map(lambda leaf, slope: leaf - 0.02 * jnp.sign(slope), tree, gradient), loss, figures

    seen = []
    for number in range(30):
        tree, loss, figures = step(tree, number)
        seen.append((float(loss), float(figures["accept"].sum())))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((target.params, learner.last_norm)))
    assert seen[-1][0] < seen[0][0] / 2 and seen[-1][1] > seen[0][1] + 1, seen[:: len(seen) - 1]


def test_a_folder_and_back(tmp_path):
    learner, target = learner_of("hybrid")
    batch, _ = batch_of("hybrid")
    tree = learner.init(jax.random.key(0), batch.shared, None)
    learner.save(tmp_path, tree, target)
    for before, after in zip(*map(jax.tree.leaves, (tree, learner.restore(tmp_path, target))), strict=True):
        np.testing.assert_array_equal(before.astype(jnp.bfloat16).astype(jnp.float32), after)
    params = learner.decode_params(tree, batch.shared, jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params["draft"])} == {"bfloat16"}
    assert params["embed_tokens"] is batch.shared["embed_tokens"]
    assert learner.drafter().draft == dataclasses.replace(learner.draft)

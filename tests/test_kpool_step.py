"""Sparse layers under the step: the text of plain decoding whatever the drafts, the memory and who builds the metadata.

The prompts of a batch end around the edges of pools, topk, chunks and pages; the drafter is right as often as told.
"""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from hybrid_cases import move_pages, run_by_rounds, token_ids
from kpool_cases import (
    NEW,
    POOL,
    PROMPTS,
    TOPK,
    plain_texts,
    poison,
    script_params,
    scripted_step,
    settings,
    sparse_model,
)
from tiny_models import TARGET, VOCAB
from unified_cases import initial, run

import jaxspec
from jaxspec.attention import attend_pooled
from jaxspec.cache import KPoolSpec
from jaxspec.steps.fusion import decide_fusion

LATENT = sparse_model()
FUSED = {"kpool_metadata_fusion": True, "kernel_backend": "reference", "page": 64 * POOL}
ARMS = {
    "static": {},
    "unified": {"memory": "unified"},
    "static, fused": FUSED,
    "unified, fused": FUSED | {"memory": "unified"},
}


def results(rows, model=LATENT, **others):
    step = scripted_step(model, rows, **others)
    found = run(step, script_params(model, rows), PROMPTS)
    return [result.token_ids for result in found], [result.verify_count for result in found]


def test_texts_are_worth_comparing():
    """Selection bites, and a text of one repeated token would hide most errors."""
    assert max(map(len, PROMPTS)) > TOPK + POOL
    assert sorted(len(set(text)) for text in plain_texts(LATENT))[len(PROMPTS) // 2] >= 6


@pytest.mark.parametrize("rows", [POOL - 1, POOL + 2, pytest.param(POOL, marks=pytest.mark.slow),
                                  pytest.param(POOL + 1, marks=pytest.mark.slow),
                                  *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7, 8, 9, 13))])  # fmt: skip
def test_the_text_is_that_of_plain_decoding(rows):
    """A window may be shorter than a pool, as long, or longer, and rejected drafts close pools that do not stay."""
    text, counts = results(rows)
    assert text == plain_texts(LATENT)
    assert any(count < NEW - 1 for count in counts), "no draft was accepted"


@pytest.mark.parametrize("arm", list(ARMS)[1:])
def test_neither_memory_nor_fusion_changes_text_or_verify_counts(arm):
    assert results(POOL + 2, **ARMS[arm]) == results(POOL + 2)


@pytest.mark.parametrize("model", [sparse_model(latent=False), sparse_model(pool=1)], ids=["grouped heads", "topk"])
def test_other_forms_of_the_layer(model):
    """K and V of grouped heads instead of latent rows; pools of one token, which is plain top-k without a tail."""
    text, _ = results(POOL + 2, model)
    assert text == plain_texts(model)


@pytest.mark.parametrize("memory", ["static", "unified"])
def test_nothing_but_what_was_committed_is_read(memory):
    step, params = scripted_step(LATENT, POOL + 2, memory=memory), script_params(LATENT, POOL + 2)
    state = run_by_rounds(step, params, initial(step, PROMPTS), meddle=poison)
    assert token_ids(state, PROMPTS) == plain_texts(LATENT)


def test_pages_may_lie_and_move_anywhere():
    """Index keys and rings go with their pages."""
    step, params = scripted_step(LATENT, POOL + 2, memory="unified"), script_params(LATENT, POOL + 2)
    rng = np.random.default_rng(0)
    state = run_by_rounds(step, params, initial(step, PROMPTS, seed=3), meddle=lambda state: move_pages(state, rng))
    assert token_ids(state, PROMPTS) == plain_texts(LATENT)


def test_lanes_do_not_know_of_each_other():
    step, params = scripted_step(LATENT, POOL + 2), script_params(LATENT, POOL + 2)
    order = np.random.default_rng(1).permutation(len(PROMPTS))
    text, right = params.draft
    shuffled = jaxspec.Params(params.target, (text[order], right[order]))
    found = run(step, shuffled, [PROMPTS[lane] for lane in order])
    assert [result.token_ids for result in found] == [plain_texts(LATENT)[lane] for lane in order]


def test_the_metadata_count_what_is_selected():
    """dsa_cache_seqlens of every row, in every round, is the number of tokens its layer selects."""
    step, params = scripted_step(LATENT, POOL + 2), script_params(LATENT, POOL + 2)

    @jax.jit
    def counted(state):
        state, plan = jaxspec.prepare(step, state)
        found = []

        def noting(*arguments):
            out, cache, selection = attend_pooled(*arguments)
            found.append(selection)
            return out, cache, selection

        metadata = plan.metadata
        LATENT.apply.run(noting, params.target, metadata.ids, metadata.window.positions, state.cache, metadata)
        kpool = plan.metadata.kpool
        return found[0], found[1], kpool.dsa_cache_seqlens, kpool.seqlens_expanded

    def check(state):
        *selections, attended, visible = counted(state)
        for tokens, count in selections:
            tokens, visible_rows = np.asarray(tokens), np.asarray(visible).reshape(tokens.shape[:2])
            np.testing.assert_array_equal(np.asarray(count).reshape(-1), attended)
            np.testing.assert_array_equal((tokens >= 0).sum(axis=-1), count)
            assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in tokens.reshape(-1, tokens.shape[-1]))
            assert (tokens.max(axis=-1) < visible_rows).all()
        np.testing.assert_array_equal(
            attended, np.minimum(np.asarray(visible) // POOL * POOL, TOPK) + np.asarray(visible) % POOL
        )

    run_by_rounds(step, params, initial(step, PROMPTS), watch=check)


# Whether metadata are fused


@pytest.mark.parametrize(
    ("wanted", "spec", "others", "fused", "level"),
    [
        (True, {}, FUSED, True, logging.INFO),
        (True, {}, FUSED | {"kernel_backend": None}, False, logging.WARNING),  # the default device is a CPU
        (True, {}, FUSED | {"page": 128}, False, logging.WARNING),
        (True, {"pool": 1}, FUSED, False, None),
        (False, {}, FUSED, False, None),
    ],
)
def test_fusion_is_decided_once_and_never_an_error(caplog, wanted, spec, others, fused, level):
    model, others = sparse_model(**spec), others | {"kpool_metadata_fusion": wanted}
    with caplog.at_level(logging.DEBUG, "jaxspec"):
        step = jaxspec.make_spec_step(model, None, settings(model, 2, **others))
    assert step.config.kpool_metadata_fusion is fused
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level == logging.INFO:
        assert f"{POOL} tokens a pool" in caplog.text
    if level == logging.WARNING:
        assert "not used" in caplog.text and "same values" in caplog.text


def test_a_model_without_sparse_layers_is_never_fused(caplog):
    config = jaxspec.SpecConfig(1, 2, 16, 4, kpool_metadata_fusion=True)
    with caplog.at_level(logging.DEBUG, "jaxspec"):
        assert not decide_fusion(TARGET, config)
    assert not caplog.records


@pytest.mark.parametrize(
    ("target", "vocab_size", "words"),
    [
        (TARGET, VOCAB, r"\(pool, topk\) = \[\(4, 16\)\], and of the target it has no sparse layer"),
        (sparse_model(pool=2, topk=18), VOCAB, r"its layers have \(2, 18\)"),
        (LATENT, VOCAB + 1, f"{VOCAB + 1} tokens, the target {VOCAB}"),
    ],
)
def test_prediction_blocks_must_be_the_target_s(target, vocab_size, words):
    blocks = jaxspec.MTPBlocks(None, LATENT.layers[:1], 32, vocab_size)
    with pytest.raises(jaxspec.InputError, match=words):
        jaxspec.make_spec_step(target, jaxspec.MTPDrafter(blocks), settings(target, 3))


def test_pages_hold_whole_pools():
    config = dataclasses.replace(settings(LATENT, 2), page_size=2)
    with pytest.raises(jaxspec.InputError, match=f"page_size=2.*multiple of {POOL}"):
        jaxspec.make_spec_step(LATENT, None, config)


def test_a_model_has_one_way_to_select():
    layers = (KPoolSpec(1, 16, pool=4, topk=16), KPoolSpec(1, 16, pool=4, topk=32))
    with pytest.raises(ValueError, match=r"\(4, 16\), \(4, 32\)"):
        dataclasses.replace(LATENT, layers=layers)

"""The MTP drafter: greedy text, and, as that hides what a drafter gets wrong, its proposals in every round."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from mtp_cases import ALL, END, FUSED, NEW, around, generate, make_step, poison, reference, target
from tiny_models import prompt

import jaxspec
from jaxspec.cache import LayerSpec
from jaxspec.errors import InputError
from jaxspec.models.contract import blocks_of_glm

FIRST = around(16)
OTHERS = {**FUSED, "memory": "unified", "prefill_chunk": 5}  # all that must not matter


@functools.cache
def generated(prompts, how, meddle):
    how = dict(how)
    spec, params = make_step(**how)
    texts = reference(how.get("topk", 8)).texts
    return generate(spec, params, prompts, texts, **({} if meddle is None else {"meddle": meddle}))


def run(prompts, meddle=None, **how):
    """`generate` with a step of these settings; each run is made once."""
    return generated(tuple(prompts), tuple(sorted(how.items())), meddle)


def check(prompts, meddle=None, **how):
    """The texts are greedy, and all proposals of all rounds are those of the reference after the same text."""
    (results, seen), expected = run(prompts, meddle, **how), reference(how.get("topk", 8))
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == expected.texts[ids][len(ids) :], f"after a prompt of {len(ids)}"
    told = expected.chains([expected.texts[ids][: length + 1] for ids, length, *_ in seen])
    for (ids, length, drafts, _), chain in zip(seen, told, strict=True):
        assert drafts == chain[: len(drafts)], f"prompt of {len(ids)}, {length} tokens committed"
    return results, seen


# Texts and proposals


def test_texts_are_greedy_and_drafts_those_of_the_blocks():
    """Rows and chains see the best pools only; rounds accept none, some and all of the drafts."""
    _, seen = check(FIRST)
    assert {accepted for *_, accepted in seen} == {0, 1, 2, 3}


def test_the_end_of_the_context():
    """The last rounds have room for two drafts, or for one."""
    results, seen = check(END)
    assert {len(drafts) for *_, drafts, _ in seen} == {1, 2, 3}
    assert [len(result.token_ids) for result in results] == [NEW, 5, 2, 1]


@pytest.mark.parametrize(
    "how",
    [OTHERS, *(pytest.param({name: value}, marks=pytest.mark.slow) for name, value in OTHERS.items())],
    ids=",".join,
)
def test_neither_memory_nor_fusion_nor_chunks_change_anything(how):
    """Nor the number of rounds."""
    assert run(FIRST, **how) == run(FIRST)


def test_chunks_of_five():
    check(around(5), **OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"memory": "unified", "page_size": 4}], ids=["static", "unified"])
@pytest.mark.parametrize("chunk", [5, 16, 32])
def test_a_budget_for_all_tokens(chunk, how):
    """No row drops any token: a chain is the block's dense recursion over its own hidden rows."""
    check(around(chunk), prefill_chunk=chunk, topk=ALL, **how)
    check(END, prefill_chunk=chunk, topk=ALL, **how)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["static", "unified"])
def test_fused_metadata_of_several_pages(memory):
    prompts = [prompt(n) for n in (250, 255, 256, 257)]

    def generated(fused):
        spec, params = make_step(**{**FUSED, "kpool_metadata_fusion": fused}, context_len=400, memory=memory)
        return generate(spec, params, prompts)

    assert generated(True) == generated(False)


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 2, 6])
def test_numbers_of_drafts(D):
    results, seen = run(FIRST, D=D)
    texts = reference().texts
    assert [result.token_ids for result in results] == [texts[ids][len(ids) :] for ids in FIRST]
    told = reference().chains([texts[ids][: length + 1] for ids, length, *_ in seen])
    assert [drafts[:3] for *_, drafts, _ in seen] == [chain[: D - 1] for chain in told]
    assert all(len(drafts) == D - 1 for *_, drafts, _ in seen)


def test_requests_in_another_order():
    (results, seen), (others, those) = run(FIRST), run(FIRST[::-1])
    assert results == others[::-1]
    assert sorted(seen) == sorted(those)


@pytest.mark.parametrize("how", [{}, OTHERS], ids=["static", "unified"])
@pytest.mark.parametrize("prompts", [FIRST, END], ids=["first", "end"])
def test_nothing_else_in_memory_matters(how, prompts):
    """NaN in free pages, sinks, rings, index keys of open pools, and garbage in scratch, before every round."""
    assert run(prompts, poison, **how) == run(prompts, **how)


@pytest.mark.parametrize("part", ["rows", "index", "tail"])
def test_damage_in_the_blocks_memory_shows(part):
    """The tests above can fail: what the blocks keep of committed tokens matters, each part of it."""

    def damage(state):
        cache = state.draft.cache
        (buffer,) = cache.buffers
        value = getattr(buffer, part)
        noise = np.random.default_rng(0).standard_normal(value.shape)
        value = jnp.asarray(noise * 127).astype(value.dtype) if part == "index" else jnp.asarray(noise, value.dtype)
        cache = cache.replace(buffers=(buffer._replace(**{part: value}),))
        return state.replace(draft=state.draft.replace(cache=cache))

    (results, seen), (others, those) = run(FIRST, damage), run(FIRST)
    assert [result.token_ids for result in results] == [result.token_ids for result in others]
    assert [drafts for *_, drafts, _ in seen] != [drafts for *_, drafts, _ in those]


# A block for each depth


@pytest.mark.parametrize(
    ("blocks", "how"),
    [
        (2, {"D": 3, "prefill_chunk": 5}),
        pytest.param(3, {"D": 4}, marks=pytest.mark.slow),
        pytest.param(3, {"D": 3, "memory": "unified"}, marks=pytest.mark.slow),
    ],
)
def test_a_block_for_each_depth(blocks, how):
    """Block s sees tokens shifted by s more. Rows whose token was not known yet have seen the draft in its place."""
    results, seen = run(FIRST, blocks=blocks, **how)
    expected, chunk = reference(blocks=blocks), how.get("prefill_chunk", 16)
    for ids, result in zip(FIRST, results, strict=True):
        text = reference().texts[ids]
        assert result.token_ids == text[len(ids) :]
        rounds = [(length, drafts) for prompt, length, drafts, _ in seen if prompt == ids]
        before = [*range(chunk, len(ids), chunk)]
        told = expected.depths(text, before + [length for length, _ in rounds])[len(before) :]
        assert [drafts for _, drafts in rounds] == [drafts[: how["D"] - 1] for drafts in told], f"prompt of {len(ids)}"


def test_more_drafts_than_blocks():
    for blocks, D in ((2, 4), (3, 5)):
        spec, _ = make_step(blocks=blocks, D=D)
        with pytest.raises(InputError, match=f"num_draft_tokens={D}: {blocks} blocks.* at most {blocks + 1}"):
            jaxspec.init_state(spec.target, spec.drafter, spec.config, FIRST)


def test_blocks_that_select_nothing():
    blocks = blocks_of_glm(target()[0])
    for layers in ((), (LayerSpec(1, 16),)):
        with pytest.raises(ValueError, match="KPoolSpec"):
            jaxspec.MTPDrafter(dataclasses.replace(blocks, layers=layers))

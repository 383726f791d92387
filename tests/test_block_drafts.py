"""DSPARK and DFLASH drafters. A wrong draft never shows in greedy text, so what is compared is, in every round, what it
proposes, and, after every commit, what it remembers, with the same in float64 from the text alone.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from block_cases import (
    BATCH,
    END,
    FIRST,
    GAMMA,
    NEW,
    T,
    context_rows,
    draft,
    generate,
    make_step,
    oracle,
    schedule,
    target,
    texts,
    upset,
)
from mtp_cases import round_by_phases

import jaxspec
from jaxspec import InputError
from jaxspec.benchmarks import launches
from jaxspec.drafting import propose_token
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.models.block_draft import BlockDraft, rounded
from jaxspec.steps.step import jit_with_state
from jaxspec.verification import Sampling

OWN = np.full((BATCH, 1), -1)  # acceptance is left to the draft


def tolerance(how):
    return 0.05 if dict(how).get("dtype") == "bfloat16" else 2e-4


@functools.cache
def run(prompts, kind, how, meddle=None, seed=None):
    """`generate` with forced acceptance, and the step; the context rows are checked after prefill and every round."""
    spec, params = make_step(*kind, **dict(how))
    expected, lanes = oracle(*kind), dict(enumerate(prompts, start=1))

    def watch(spec, state):
        for row, layers in context_rows(spec, state).items():
            for layer, (position, rows) in enumerate(layers):
                parts = [part[position].reshape(len(position), -1) for part in expected.context[lanes[row]][layer]]
                np.testing.assert_allclose(rows, np.concatenate(parts, axis=1), rtol=0, atol=tolerance(how))

    how_to = {"meddle": meddle} if meddle else {}
    right = schedule(spec.config.num_draft_tokens)
    return spec, generate(spec, params, prompts, texts(kind[1]).of, right, watch=watch, seed=seed, **how_to)


def check_texts(name, prompts, results):
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == texts(name).of[ids][len(ids) :], f"after a prompt of {len(ids)}"


def check_proposals(kind, num_drafts, seen):
    for ids, length, drafts, _ in seen:
        told = oracle(*kind).proposals(ids, length, num_drafts)
        assert drafts == told[: len(drafts)], f"prompt of {len(ids)}, {length} tokens committed"


def check(prompts, kind, how, *, meddle=None, seed=None):
    """Texts are greedy; proposals and context are those of the draft's formulas. Returns the step and what happened."""
    spec, (results, seen) = run(prompts, kind, tuple(sorted(how.items())), meddle, seed)
    check_texts(kind[1], prompts, results)
    if how.get("dtype") != "bfloat16":
        check_proposals(kind, spec.config.num_draft_tokens - 1, seen)
    return spec, (results, seen)


# Every algorithm, target, memory and placement

BOTH = ("dspark", "windows", "both")
INTERPRETED = {"memory": "unified", "kernel_backend": "interpret"}
CASES = {
    "own": (BOTH, {}),
    "fused": (BOTH, INTERPRETED),
    "folded": (("dspark", "windows", "far"), {"memory": "unified", "D": GAMMA + 1}),
    "private": (("dflash", "windows", "slim"), {"memory": "unified", "D": 2}),
    "states": (("dspark", "hybrid", "late"), {"memory": "unified"}),
}
WHERE = {"own": "own", "private": "private"}


@pytest.mark.parametrize("case", CASES)
def test_texts_proposals_and_context(case):
    """Rounds accept none, some and all of the drafts, every number of them."""
    kind, how = CASES[case]
    spec, (_, seen) = check(FIRST, kind, how)
    assert spec.drafter.placement.where == WHERE.get(case, "fused")
    assert {accepted for *_, accepted in seen} == set(range(how.get("D", 4)))


@pytest.mark.parametrize("case", CASES)
def test_the_end_of_the_context(case):
    """The last rounds have room for fewer drafts, or for none."""
    kind, how = CASES[case]
    _, (results, seen) = check(END, kind, how)
    assert {len(drafts) for *_, drafts, _ in seen} >= {1, min(2, how.get("D", 4) - 1), how.get("D", 4) - 1}
    assert [len(result.token_ids) for result in results] == [1, 2, 9, 30]


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_in_memory_matters(case):
    """NaN in free pages, sinks and the noise of rejected drafts, garbage in scratch, and all pages elsewhere, before
    every round."""
    kind, how = CASES[case]
    assert check(FIRST, kind, how, meddle=upset, seed=5)[1] == check(FIRST, kind, how)[1]


def test_neither_memory_nor_kernels_change_anything():
    """Nor the number of rounds."""
    assert check(FIRST, BOTH, INTERPRETED)[1] == check(FIRST, BOTH, {})[1]


def test_requests_in_another_order():
    """And other mates: a request's rounds are its own."""
    (spec, (results, seen)), few = check(FIRST, BOTH, {}), FIRST[:0:-2]
    _, params = make_step(*BOTH)
    right = schedule(4)[[FIRST.index(ids) for ids in few] + [0] * (spec.config.batch_size - len(few))]
    others, those = generate(spec, params, few, texts("windows").of, right)
    assert others == [results[FIRST.index(ids)] for ids in few]
    assert sorted(those) == sorted(entry for entry in seen if entry[0] in few)


def test_damage_in_the_context_shows():
    """The tests above can fail: what the draft remembers of committed tokens matters, in each layer."""
    spec, (results, seen) = check(FIRST, BOTH, {})
    _, params = make_step(*BOTH)
    for layer in range(2):

        def damage(spec, state, layer=layer):
            buffers = [*state.draft.cache.buffers]
            buffers[layer] = -buffers[layer]
            cache = state.draft.cache.replace(buffers=tuple(buffers))
            return state.replace(draft=state.draft.replace(cache=cache))

        others, those = generate(spec, params, FIRST, texts("windows").of, schedule(4), meddle=damage)
        assert others == results
        assert [drafts for *_, drafts, _ in those] != [drafts for *_, drafts, _ in seen]


# Acceptance, left to the draft


@pytest.mark.parametrize("shape", ["both", "table"])
def test_accepted_are_the_drafts_that_are_the_text(shape):
    """Of random weights hardly any, of a draft that knows pairs of the texts' tokens more. Both run one program."""
    kind = ("dspark", "windows", shape)
    spec, params = make_step(*kind)
    of = texts("windows").of
    results, seen = generate(spec, params, FIRST, of, OWN)
    check_texts("windows", FIRST, results)
    check_proposals(kind, 3, seen)
    for ids, length, drafts, accepted in seen:
        known = of[ids][length + 1 :][: len(drafts)]
        right = [draft == token for draft, token in zip(drafts, known, strict=False)]
        right = right.index(False) if False in right else len(right)
        assert accepted == right or accepted > right == len(known), f"{length} tokens committed"
    accepted = [accepted for *_, accepted in seen]
    assert np.mean(accepted) < 0.15 if shape == "both" else np.mean(accepted) > 0.3 and set(accepted) == {0, 1, 2, 3}


def test_the_right_drafts_are_all_accepted():
    spec, params = make_step(*BOTH)
    results, seen = generate(spec, params, FIRST, texts("windows").of, np.full((BATCH, 1), 3))
    check_texts("windows", FIRST, results)
    assert {accepted for *_, accepted in seen} == {3}
    assert {result.verify_count for result in results} == {-(-(NEW - 1) // 4)}


def test_an_empty_batch():
    spec, params = make_step(*BOTH)
    state, status = spec.prefill(params, jaxspec.init_state(spec.target, spec.drafter, spec.config, []))
    nothing = np.zeros((BATCH, T), np.int32), np.zeros(BATCH, np.int32)
    state, (rows, _, drafts, output) = round_by_phases(spec, params, state, *nothing)
    assert status == output.status == 0 and not output.unfinished
    assert not rows.any() and not drafts.count.any() and not output.num_tokens.any()


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_what_drafts_are_drawn_from(algorithm):
    """Each from its own row of rounded logits, with a bias of the draft before it where there is a Markov head; greedy
    requests beside others."""
    config, params = draft(algorithm, "windows", "both")
    drafter = {"dspark": jaxspec.DSparkDrafter, "dflash": jaxspec.DFlashDrafter}[algorithm](
        BlockDraft(config, "bfloat16")
    )
    logits = rounded(jax.random.normal(jax.random.key(0), (4, 3, config.vocab_size)), "bfloat16")
    sampling = Sampling.of(
        4, temperature=[0.0, 0.7, 1.5, 1.0], top_k=[0, 0, 5, 0], top_p=[1, 1, 1, 0.5], seed=[0, 1, 2, 3]
    )
    anchor, lengths = np.array([3, 1, 4, 1], np.int32), np.array([9, 2, 6, 5], np.int32)
    choose, draw = jax.jit(drafter.choose), jax.jit(propose_token)
    tokens, probs = choose(params, logits, anchor, sampling, lengths)
    for index, before in enumerate([anchor, *tokens.T[:2]]):
        row = logits[:, index]
        if algorithm == "dspark":
            row = (row + drafter.draft.markov(params, before)).astype("bfloat16").astype("float32")
        token, chances = draw(row, sampling, lengths, index)
        np.testing.assert_array_equal(tokens[:, index], token)
        np.testing.assert_array_equal(probs[:, index], chances)
    greedy, nothing = choose(params, logits, anchor, None, lengths)
    assert nothing is None and (greedy[0] == tokens[0]).all() and tokens.dtype == greedy.dtype == np.int32


# What is refused


def test_more_drafts_than_a_block_has():
    for algorithm in ("dspark", "dflash"):
        with pytest.raises(
            InputError, match=f"^num_draft_tokens=17: a block of the draft proposes {GAMMA} tokens; use"
        ):
            make_step(algorithm, D=GAMMA + 2)
    assert make_step("dspark", D=GAMMA + 1)[0].config.num_draft_tokens == GAMMA + 1


def test_a_draft_of_another_target():
    config, _ = draft("dspark", "windows", "both")
    model, *_ = target("windows")
    sizes = {"batch_size": 1, "num_draft_tokens": 4, "context_len": T, "max_new_tokens": 4}
    for change, words in (
        ({"vocab_size": 99}, "the draft has 99 tokens, the target 61"),
        ({"max_position_embeddings": T - 1}, f"the draft's context of {T - 1} is below context_len={T}"),
        ({"target_layer_ids": (0, 2)}, r"layers=\(0, 2\): the target has 2"),
    ):
        drafter = jaxspec.DSparkDrafter(BlockDraft(dataclasses.replace(config, **change)))
        with pytest.raises(InputError, match=words):
            jaxspec.make_spec_step(model, drafter, jaxspec.SpecConfig(**sizes))


def test_each_drafter_runs_its_own_algorithm():
    for algorithm, other in (("dspark", jaxspec.DFlashDrafter), ("dflash", jaxspec.DSparkDrafter)):
        config, _ = draft(algorithm, "windows", "both")
        with pytest.raises(ValueError, match=f"algorithm='{algorithm}': a {other.__name__} runs drafts of"):
            other(BlockDraft(config))


def test_dflash_fuses_where_the_target_has_states():
    """DSPARK keeps a private pool there."""
    with pytest.raises(
        InputError, match=r"algorithm='dflash' .* of a target with states.* \(K of draft layer 0 has rows"
    ):
        make_step("dflash", "hybrid", "slim", memory="unified")
    assert make_step("dflash", "hybrid", "slim")[0].drafter.placement.where == "own"
    assert make_step("dspark", "hybrid", "slim", memory="unified")[0].drafter.placement.where == "private"


def test_a_step_is_the_same_for_equal_arguments():
    """So that they share a compiled program; the drafter of a step may be bound again."""
    spec, _ = make_step(*BOTH, memory="unified")
    assert spec == make_step(*BOTH, memory="unified")[0]
    again = jaxspec.make_spec_step(spec.target, spec.drafter, spec.config, options=dict(spec.options))
    assert again.drafter == spec.drafter and again == spec


# What it costs


@pytest.mark.parametrize("memory", ["static", "unified"])
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_launches_of_a_round(algorithm, memory):
    """Metadata of the verify and nothing else for them; a launch a layer norms, rotates and stores; one kernel commits
    all layers."""
    spec, params = make_step(algorithm, memory=memory, kernel_backend=None)
    found = launches.trace(launches.Arm("", "", "", spec, params))
    metadata, others = found["metadata"], found["other_kernels"]
    assert metadata["verify"] == {"forward_metadata": 1}
    assert not metadata["draft"] and not metadata["extend"]
    assert others["draft"] == {"store_heads": len(spec.drafter.draft.layers)}
    assert others["extend"] == {"commit_context_rows": 1} and others["prefill chunk"]["commit_context_rows"] == 1
    assert found["open_loops"] == 0


def test_one_program_serves_all_batches_and_never_asks_the_host():
    spec, params = make_step(*BOTH)

    def rounds(state, *arguments):
        state, _ = spec.prefill(params, state)
        for _ in range(2):
            state, _ = round_by_phases(spec, params, state, *arguments)
        return jax.block_until_ready(state)

    first, second = (jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts) for prompts in (FIRST, END))
    arguments = jax.device_put((np.zeros((BATCH, T), np.int32), np.full(BATCH, -1, np.int32)))
    rounds(first, *arguments)
    programs = round_by_phases._cache_size()
    with jax.transfer_guard("disallow"):
        rounds(second, *arguments)
    assert round_by_phases._cache_size() == programs


# More of everything, and other numbers


@pytest.mark.slow
@pytest.mark.parametrize("D", range(2, GAMMA + 2))
@pytest.mark.parametrize("kind", [BOTH, ("dflash", "hybrid", "both")], ids="-".join)
def test_numbers_of_drafts(kind, D):
    """Static and unified memory run the same rounds."""
    outcomes = []
    for memory in ("static", "unified"):
        for prompts in (FIRST, END):
            outcomes.append(check(prompts, kind, {"memory": memory, "D": D})[1])
    assert outcomes[:2] == outcomes[2:]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"page_size": 4}, {"page_size": 64}, {"prefill_chunk": 5}, INTERPRETED], ids=str)
@pytest.mark.parametrize("shape", ["both", "far", "slim", "causal", "late"])
@pytest.mark.parametrize("name", ["windows", "hybrid", "kpool"])
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_every_combination(algorithm, name, shape, how):
    """Also with the rest of the memory poisoned."""
    kind = algorithm, name, shape
    outcomes = []
    for memory in ("static", "unified"):
        if memory == "unified" and algorithm == "dflash" and shape == "slim" and name != "windows":
            continue  # refused, see above
        for prompts in (FIRST, END):
            settings = {**how, "memory": memory}
            outcomes.append(check(prompts, kind, settings)[1])
            assert check(prompts, kind, settings, meddle=upset, seed=3)[1] == outcomes[-1]
    assert outcomes[:2] == outcomes[2:] or len(outcomes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_a_draft_of_another_dtype(algorithm):
    """Its pool is private on unified memory, and of its own dtype; the text is the target's."""
    for memory, where in (("static", "own"), ("unified", "private")):
        spec, _ = check(FIRST, (algorithm, "windows", "both"), {"memory": memory, "dtype": "bfloat16"})
        assert spec.drafter.placement.where == where


def run_to_the_end(spec, params, prompts, **settings):
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts, **settings)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    return read_requests(state, prompts, spec.config.sampling)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_sampled_requests(algorithm, verifier):
    """Seeded texts do not depend on memory or batch mates; greedy requests among them say the greedy text."""
    settings = {"temperature": [0.0, 0.8, 1.3, 0.8, 0.0], "top_k": [0, 0, 9, 0, 0], "seed": [1, 2, 3, 4, 5]}
    static, unified = (make_step(algorithm, memory=memory, sampling=verifier) for memory in ("static", "unified"))
    results = run_to_the_end(*static, FIRST, **settings)
    assert results == run_to_the_end(*unified, FIRST, **settings)
    check_texts("windows", [FIRST[0], FIRST[4]], [results[0], results[4]])
    for lane in (1, 3):
        alone = {name: values[lane] for name, values in settings.items()}
        assert run_to_the_end(*static, [FIRST[lane]], **alone) == [results[lane]]
    if verifier == "match":
        plain = make_step(algorithm, sampling=verifier, D=1)
        told = run_to_the_end(*plain, FIRST, **settings)
        assert [result.token_ids for result in results] == [result.token_ids for result in told]

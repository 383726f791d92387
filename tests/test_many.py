"""`generate_many`: every prompt gets what it gets alone, whatever its neighbours, slots and pages are."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_models
from many_cases import BLOCKS, LIMITS, NEW, PROMPTS, alone, drafter_of, make_config, one_by_one, run_many
from tiny_models import FAST_COMPILE, HYBRID_TARGET, TARGET, drafter_and_params, prompt

import jaxspec
from jaxspec import models
from jaxspec.drafting import Drafts
from jaxspec.generation import scheduler
from jaxspec.generation import slots as slots_module
from jaxspec.models.contract import blocks_of_glm
from jaxspec.models.eagle import Eagle3
from jaxspec.steps.refill import HEAD, RefillPlan, Window, empty_slots
from jaxspec.steps.step import compiler_options

sys.path.append(str(Path(__file__).parent / "kernels"))


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
    """Programs of these tests run a few milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
        yield


def orders(count, number=3):
    """The given order, the reverse, and others at random."""
    rng = np.random.default_rng(count)
    return [list(range(count)), list(range(count))[::-1], *(rng.permutation(count).tolist() for _ in range(number - 2))]


# (slots, page, pages but the sink, how it is dispatched, whether pages must run out)
SHAPES = [
    (1, 16, None, {}, False),
    (2, 4, None, {"chunks_per_dispatch": 1, "rounds_per_dispatch": 3}, False),
    (3, 4, 22, {"rounds_per_dispatch": 2}, True),
    (5, 16, 8, {"newcomers_per_dispatch": 2, "chunks_per_dispatch": 1, "rounds_per_dispatch": 1}, True),
    (5, 4, 26, {"newcomers_per_dispatch": 5, "rounds_per_dispatch": 1}, True),
]


@pytest.mark.parametrize(("slots", "page", "pages", "how", "short"), SHAPES)
def test_equals_one_by_one(slots, page, pages, how, short):
    """Tokens, rounds, accepted drafts and reasons to end; also if requests have to leave and begin again."""
    config = make_config(slots, page_size=page, num_pages=pages and pages + 1, prefill_chunk=7 if page == 16 else 20)
    retractions = 0
    for order in orders(len(PROMPTS)):
        results, progress = run_many(config, order, **how)
        assert results == alone()
        assert progress.finished == progress.prompts == len(PROMPTS) and progress.running == 0
        assert progress.tokens == sum(len(result.token_ids) for result in results)
        assert progress.verify_count == sum(result.verify_count for result in results)
        retractions += progress.retractions
    assert (retractions > 0) == short


@pytest.mark.parametrize("slots", [2, 5])
def test_unified_memory(slots):
    """One pool for all kinds of page, too small for all slots."""
    config = make_config(slots, memory="unified", num_pages=26, num_swa_pages=12)
    for order in orders(len(PROMPTS), 2):
        assert run_many(config, order, rounds_per_dispatch=4)[0] == alone()


@pytest.mark.parametrize("drafter", ["plain", "ngram"])
def test_other_drafters(drafter):
    config = make_config(3, D=1 if drafter == "plain" else 4)
    for order in orders(len(PROMPTS), 2):
        assert run_many(config, order, drafter=drafter)[0] == alone(drafter)


def test_scarce_pages():
    """Prompts of many lengths where pages suffice for hardly more than one: all end, none is lost."""
    rng = np.random.default_rng(0)
    config = make_config(4, num_pages=1 + 22, prefill_chunk=6)
    retractions = 0
    for _ in range(4):
        chosen = rng.integers(0, len(PROMPTS), 14)
        prompts, limits = [PROMPTS[i] for i in chosen], [LIMITS[i] for i in chosen]
        how = {"chunks_per_dispatch": 1, "rounds_per_dispatch": 1}
        results, progress = run_many(config, prompts=prompts, limits=limits, **how)
        assert results == [alone()[i] for i in chosen]
        retractions += progress.retractions
    assert retractions > 0


def test_pages_that_run_out_within_a_prompt():
    """A long prompt is read beside a request that grows, with pages for hardly both: at any length of the latter no
    chunk is read without pages for it."""
    config = make_config(2, D=1, num_pages=1 + 16, prefill_chunk=3)
    params, prompts = drafter_and_params("plain")[1], [prompt(8), prompt(44)]
    want = one_by_one(TARGET, params, prompts, [NEW, 4], make_config(D=1))
    how = {"drafter": "plain", "prompts": prompts, "chunks_per_dispatch": 1, "rounds_per_dispatch": 1}
    retractions = []
    for limit in range(4, NEW + 1):
        (first, second), progress = run_many(config, limits=[limit, 4], **how)
        assert (first.token_ids, second.token_ids) == (want[0].token_ids[:limit], want[1].token_ids)
        retractions.append(progress.retractions)
    assert {0, 1} <= set(retractions)


def sampled(count):
    """Settings of each prompt: some greedy, some not."""
    return {
        "temperature": [(0.8, 0.0, 1.3)[i % 3] for i in range(count)],
        "top_k": [(0, 5)[i % 2] for i in range(count)],
        "top_p": [(1.0, 0.9)[i % 2] for i in range(count)],
    }


@pytest.mark.parametrize(
    ("verifier", "memory"), [("block", "unified"), pytest.param("rejection", "static", marks=pytest.mark.slow)]
)
def test_sampled(verifier, memory):
    """Each prompt has the seed of its place; who is turned out draws the same again."""
    who, params = drafter_and_params("draft_lm")
    config = make_config(3, num_pages=23, num_swa_pages=16, sampling=verifier, memory=memory, logprobs=True)
    settings, count = sampled(len(PROMPTS)), len(PROMPTS)
    seeds = [(2**32 - 3 + i) % 2**32 for i in range(count)]
    want = one_by_one(TARGET, params, PROMPTS, LIMITS, config, drafter=who, seed=seeds, **settings)
    results, progress = run_many(config, seed=2**32 - 3, rounds_per_dispatch=4, **settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in want]
    for got, expected in zip(results, want, strict=True):
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=2e-5)
        assert dataclasses.replace(got, logprobs=None) == dataclasses.replace(expected, logprobs=None)
    assert {r.rule for r in results} == {"greedy", verifier} and progress.retractions > 0
    order = orders(count)[2]
    moved = {name: [values[i] for i in order] for name, values in {**settings, "seed": seeds}.items()}
    again, _ = run_many(config, order, rounds_per_dispatch=4, **moved)
    assert [r.token_ids for r in again] == [r.token_ids for r in results]


@pytest.mark.parametrize("memory", ["static", "unified"])
def test_states_begin_anew(memory):
    """A slot's next request sees nothing of the state that the last one left."""
    drafter, params = drafter_and_params("ngram", HYBRID_TARGET)
    config = make_config(2, memory=memory, num_pages=1 + 28)
    want = one_by_one(HYBRID_TARGET, params, PROMPTS, LIMITS, config, drafter=drafter)
    for order in orders(len(PROMPTS), 2):
        run = jaxspec.generate_many(
            HYBRID_TARGET,
            params,
            [PROMPTS[i] for i in order],
            max_new_tokens=[LIMITS[i] for i in order],
            drafter=drafter,
            config=config,
        )
        assert {order[done.index]: done.result for done in run} == dict(enumerate(want))


def glm():
    """A model with sparse layers and the blocks that draft for it."""
    config = tiny_models.GLM_CONFIG
    tree = jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, models.random_params(config, seed=0))
    shared = {name: tree["params"][name] for name in ("embed_tokens", "lm_head")}
    module = models.Glm(config)
    params = jaxspec.Params({"params": tree["params"]}, {"blocks": tree["mtp"], **shared})
    return models.from_glm(module), params, jaxspec.MTPDrafter(blocks_of_glm(module))


def eagle():
    """The tiny target with an EAGLE-3 draft."""
    from eagle_cases import draft_params

    config = tiny_models.trained_draft("eagle3")
    weights = tiny_models.target_params()
    shared = {key: weights["params"][key] for key in ("embed_tokens", "lm_head") if key in weights["params"]}
    params = jaxspec.Params(weights, {"draft": draft_params(config), **shared})
    return TARGET, params, jaxspec.Eagle3Drafter(Eagle3(config))


@pytest.mark.parametrize(("make", "newcomers"), [(glm, 1), (eagle, 2)])
def test_drafts_of_hidden_rows(make, newcomers):
    """What such a drafter keeps is by lane, and newcomers are read in a forward that has fewer lanes."""
    target, params, drafter = make()
    prompts, limits = [ids[:30] for ids in PROMPTS[:7]], LIMITS[:7]
    config = make_config(3, context_len=64, page_size=8, prefill_chunk=12, sampling="rejection", num_pages=11)
    settings = sampled(len(prompts))
    want = one_by_one(target, params, prompts, limits, config, drafter=drafter, seed=range(7), **settings)
    how = {"newcomers_per_dispatch": newcomers, "chunks_per_dispatch": 1, "rounds_per_dispatch": 1, **settings}
    run = jaxspec.generate_many(target, params, prompts, max_new_tokens=limits, drafter=drafter, config=config, **how)
    assert run.results() == want
    assert run.progress.retractions > 0


TIGHT = {"num_pages": 1 + 22, "num_swa_pages": 1 + 8}  # hardly more than the longest prompt takes


@pytest.mark.parametrize(("slots", "pages"), [(1, {}), (3, TIGHT)])
@pytest.mark.parametrize("memory", ["static", "unified"])
@pytest.mark.parametrize("drafter", BLOCKS)
def test_block_drafts(drafter, memory, slots, pages):
    """Such a draft sees the text by the rows that it keeps of it alone, and never those of a slot's last request, or of
    one that was turned out: else it would be right in other rounds."""
    config, retractions = make_config(slots, memory=memory, **pages), 0
    for order in orders(len(PROMPTS), 2):
        results, progress = run_many(config, order, drafter=drafter, rounds_per_dispatch=1)
        assert results == alone(drafter)
        retractions += progress.retractions
    assert (retractions > 0) == bool(pages)
    if drafter == "dspark":
        assert {count for result in results for count in result.accepted_drafts} == {0, 1, 2, 3}


@pytest.mark.parametrize("drafter", [pytest.param("dspark", marks=pytest.mark.slow), "dflash"])
def test_block_drafts_that_are_drawn(drafter):
    """What is kept of a draft hangs on its probability, and so on all that the draft has seen."""
    who, params = drafter_of(drafter)
    config = make_config(3, memory="unified", sampling={"dspark": "block", "dflash": "rejection"}[drafter], **TIGHT)
    settings, seeds = sampled(len(PROMPTS)), range(5, 5 + len(PROMPTS))
    want = one_by_one(TARGET, params, PROMPTS, LIMITS, config, drafter=who, seed=seeds, **settings)
    results, progress = run_many(config, drafter=drafter, seed=5, rounds_per_dispatch=1, **settings)
    assert results == want
    assert {result.rule for result in results} == {"greedy", config.sampling} and progress.retractions > 0


@dataclasses.dataclass(frozen=True)
class Undeclared:
    """A drafter with an `extend` that does not say what of its state is by lane: the newest token, told back."""

    def init(self, config):
        return jax.numpy.zeros((config.batch_size,), jax.numpy.int32)

    def extend(self, params, state, context):
        last = jax.numpy.maximum(context.count - 1, 0)[:, None]
        newest = jax.numpy.take_along_axis(context.tokens, last, axis=1)[:, 0]
        return jax.numpy.where(context.count > 0, newest, state)

    def propose(self, params, state, context, num_drafts):
        tokens = jax.numpy.broadcast_to(state[:, None], (state.size, num_drafts))
        return state, Drafts(tokens, jax.numpy.full(state.shape, num_drafts, jax.numpy.int32))


def test_a_drafter_that_says_nothing_of_lanes():
    """It is shown all lanes at once."""
    params, config = drafter_and_params("ngram")[1], make_config(3)
    want = one_by_one(TARGET, params, PROMPTS, LIMITS, config, drafter=Undeclared())
    run = jaxspec.generate_many(TARGET, params, PROMPTS, max_new_tokens=LIMITS, drafter=Undeclared(), config=config)
    assert run.results() == want


def test_stops():
    """Stop ids and, for each prompt its own, stop strings."""
    target = jaxspec.load_model("target")
    texts = ["import os\nimport sys\nimport", "def main(argv):\n    return", "for i in range(", "class A:\n"]
    prompts = [target.encode(text) for text in texts]
    strings = jaxspec.StopStrings(target.tokenizer, [["import"], [], ["\n"], [":", "\n\n"]])
    params, stop = jaxspec.Params(target.params), target.config.eos_token_ids
    how = {"max_new_tokens": 16, "drafter": jaxspec.NgramDrafter(), "stop_ids": stop, "stop_strings": strings}
    want = jaxspec.generate(target.model, params, prompts, **how, num_draft_tokens=4).requests
    run = jaxspec.generate_many(target.model, params, prompts, **how, num_draft_tokens=4, slots=2)
    assert run.results() == want
    assert {"stop_string", "length"} <= {result.finish_reason for result in want}


# How it is done


def test_slots_are_kept_full():
    """Requests of as many rounds each: no slot is ever idle but while the last ones run, and the figures say so."""
    limits = [9] * 7  # eight rounds of one token behind the first one
    results, progress = run_many(make_config(2, D=1), drafter="plain", prompts=PROMPTS[:7], limits=limits)
    assert [len(result.token_ids) for result in results] == limits
    assert progress.busy_slot_rounds == progress.verify_count == 7 * 8
    assert progress.queued_slot_utilization == 1
    assert progress.rounds == 4 * 8 and progress.slot_utilization == 7 / 8
    assert progress.accept_length == 9 / 8 and progress.retractions == 0


def test_long_ones_first():
    """A run does not end with one slot that works on a long request."""
    limits = [3] * 6 + [24]
    _, progress = run_many(make_config(2, D=1), drafter="plain", prompts=PROMPTS[:7], limits=limits)
    assert progress.rounds == 23


def test_reports_are_read_a_dispatch_late(monkeypatch):
    events = []
    compiled, read = scheduler.compiled_dispatch, scheduler.read_report

    class Noted:
        def __init__(self, options):
            self._step = compiled(options)

        def lower(self, *arguments):
            return self._step.lower(*arguments)

        def __call__(self, *arguments):
            events.append("issue")
            return self._step(*arguments)

    monkeypatch.setattr(scheduler, "compiled_dispatch", Noted)
    monkeypatch.setattr(scheduler, "read_report", lambda *arguments: (events.append("read"), read(*arguments))[1])
    assert run_many(make_config(2, D=1), drafter="plain")[0] == alone("plain")
    assert events[0] == "issue" and events[1:] == ["issue", "read"] * (len(events) // 2)


def test_one_program_for_all():
    """Nothing is traced while slots are refilled, nor for other prompts of the same shapes."""
    calls = []

    def apply(*arguments):
        calls.append(1)
        return TARGET.apply(*arguments)

    target, (_, params) = dataclasses.replace(TARGET, apply=apply), drafter_and_params("ngram")
    config = make_config(2, num_pages=23)

    def run(count):
        return jaxspec.generate_many(
            target,
            params,
            PROMPTS[:count],
            max_new_tokens=LIMITS[:count],
            drafter=jaxspec.NgramDrafter(),
            config=config,
            progress=lambda progress: traced.append(len(calls)),
        ).results()

    traced = []
    run(len(PROMPTS))
    assert len(set(traced)) == 1 and traced[0] > 0
    run(3)
    assert len(set(traced)) == 1


def lowered(config, drafter, params, options, lower=lambda program, *arguments: program.lower(*arguments)):
    """A dispatch for lowering, and its slots."""
    spec = jaxspec.make_spec_step(TARGET, drafter, config, options=options)
    plan = RefillPlan(rounds=4, newcomers=1, chunks=4)
    slots = empty_slots(spec, jaxspec.init_state(spec.target, spec.drafter, config, []), plan)
    entries = np.zeros((plan.window, HEAD + config.context_len), np.int32)
    window = Window(*map(jax.numpy.asarray, (entries, np.zeros(2, np.int32))))
    return lower(slots_module.compiled_dispatch(spec.options), spec, params, slots, window, plan), slots


@pytest.mark.parametrize("memory", ["static", pytest.param("unified", marks=pytest.mark.slow)])
def test_the_slots_stay_in_place(memory):
    """No dispatch copies the memory of K and V, or keeps a second state."""
    how = {"memory": memory, "num_pages": 2000, "num_swa_pages": 1900}
    program, slots = lowered(make_config(3, **how), *drafter_and_params("draft_lm"), FAST_COMPILE)
    compiled = program.compile()
    check_in_place(compiled, slots)


def check_in_place(compiled, slots):
    bytes_of_all = sum(leaf.nbytes for leaf in jax.tree.leaves(slots))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * bytes_of_all
    assert memory.temp_size_in_bytes < bytes_of_all / 16


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["static", "unified"])
def test_a_dispatch_is_one_command_buffer(memory, tmp_path):
    """Compiled for an H200: the host starts it once, and its state stays where it is."""
    aot = pytest.importorskip("kernel_aot")
    if reason := aot.missing():
        pytest.skip(reason)
    how = {"memory": memory, "num_pages": 2000, "num_swa_pages": 1900, "page_size": 8}
    drafter, params = drafter_and_params("draft_lm")
    program, slots = lowered(make_config(3, **how), drafter, params, compiler_options("cuda"), aot.lower_for_h200)
    quick = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
    check_in_place(aot.compile_lowered(program, dump=tmp_path, **quick), slots)
    assert aot.thunks(tmp_path) == ["kCommandBuffer"]


def test_results_come_as_they_are_done():
    """The iterator hands out a short request while a long one runs, and tells how far it is."""
    seen = []
    who, params = drafter_and_params("plain")
    run = jaxspec.generate_many(
        TARGET,
        params,
        PROMPTS[:3],
        max_new_tokens=[24, 2, 5],
        drafter=who,
        config=make_config(2, D=1),
        rounds_per_dispatch=2,
        ids=["a", "b", "c"],
        progress=seen.append,
    )
    done = list(run)
    assert [each.question_id for each in done] == ["c", "b", "a"]
    assert all(each.wall_time > 0 and not each.resumed for each in done)
    assert [p.finished for p in seen] == sorted(p.finished for p in seen) and seen[-1] == run.progress
    assert any(p.running == 2 and p.accept_length for p in seen)


def test_nothing_to_do():
    results, progress = run_many(make_config(2), prompts=[], limits=[])
    assert results == [] and progress.slot_utilization is None and progress.accept_length is None


REFUSED = [
    ({"slots": 0}, "slots=0"),
    ({"slots": 3}, "batch_size=2"),
    ({"rounds_per_dispatch": 0}, "rounds_per_dispatch=0"),
    ({"chunks_per_dispatch": 0}, "chunks_per_dispatch=0"),
    ({"newcomers_per_dispatch": 0}, "newcomers_per_dispatch=0"),
    ({"prompts": [[1], []]}, "prompt 1 is empty"),
    ({"prompts": [[1], [tiny_models.VOCAB]]}, "prompt 1 holds token id"),
    ({"prompts": [[1], prompt(44)]}, "raise num_pages"),
    ({"prompts": [[1], [2]], "max_new_tokens": [1]}, "1 values of max_new_tokens for 2 prompts"),
    ({"prompts": [[1], [2]], "max_new_tokens": NEW + 1}, "max_new_tokens=25"),
    ({"stop_ids": [tiny_models.VOCAB]}, "stop id"),
    ({"temperature": 0.5}, "sampling=None"),
    ({"seed": -1}, "seed=-1"),
    ({"ids": [1]}, "ids: there are 1 for 2 prompts"),
    ({"ids": ["a", "a"]}, "'a' is there twice"),
    ({"ids": [1.5, 2]}, "neither an integer nor a text"),
    ({"categories": ["a"]}, "categories: there are 1"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_bad_input_is_refused_before_anything_runs(wrong, message, tmp_path):
    arguments = {"prompts": [[1, 2], [3]], "config": make_config(2, num_pages=10), "out": tmp_path / "out"} | wrong
    with pytest.raises(jaxspec.InputError, match=message):
        jaxspec.generate_many(TARGET, drafter_and_params("plain")[1], **arguments)
    assert not (tmp_path / "out").exists()

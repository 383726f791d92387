"""The step's edges: where requests end, what happens when pages run out, which input is refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    CONTEXT,
    HYBRID_TARGET,
    MODULE,
    TARGET,
    VOCAB,
    WINDOW,
    make_step,
    prompt,
    round_in_phases,
    target_params,
)

import jaxspec
from jaxspec import models
from jaxspec.cache import PoolLayout
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.metadata import verify_layout, verify_metadata
from jaxspec.steps.round import Verdict
from jaxspec.steps.state import FINISHED
from jaxspec.steps.step import jit_with_state
from pallas_kernels import PackedMetadata

NEW = 40


@pytest.fixture(scope="module")
def self_step():
    """Three lanes, pages of 4, D = 4, and the target as its own draft: all drafts are accepted, runs are of 4."""
    return make_step("self", batch=3, page=4, D=4, new=NEW)


def generate(spec, params, prompts, **settings):
    """The end state of one generation, and its results."""
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts, **settings)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    return state, read_requests(state, prompts)


def all_free(state):
    """Whether the stacks hold every page once and no row owns any."""
    pages = jax.device_get(state.pages)
    swa, full = (buffer.shape[0] // state.cache.page_size for buffer in state.cache.buffers)
    stacks = [sorted(pages.free[kind, 1 : 1 + int(pages.free_count[kind])].tolist()) for kind in range(3)]
    return not pages.num_pages.any() and stacks == [list(range(1, n)) for n in (full, full, swa)]


# Where a request ends


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 4, CONTEXT - 5, CONTEXT - 6])
def test_context_limit(self_step, greedy, length):
    """Runs of 4 after the first token: the limit falls on the first token, inside a run, at its end and behind it."""
    _, results = generate(*self_step, [prompt(length)])
    assert results[0].token_ids == greedy(prompt(length), NEW)
    assert len(results[0].token_ids) == CONTEXT - length
    assert sum(results[0].accept_lengths) == CONTEXT - length - 1
    assert results[0].finish_reason == "context"


def test_limit_and_context_at_the_same_token(self_step):
    """Whoever asked for no more than fits has what was asked for."""
    _, results = generate(*self_step, [prompt(CONTEXT - 5)] * 2, max_new_tokens=[5, 6])
    assert [r.finish_reason for r in results] == ["length", "context"]
    assert [len(r.token_ids) for r in results] == [5, 5]


@pytest.mark.parametrize("limits", [(0, 1, 2), (4, 5, 6), (NEW, 0, 9)])
def test_max_new_tokens(self_step, greedy, limits):
    """Runs end at 1, 5, 9, .. tokens: limits before, at and after those."""
    prompts = [prompt(n) for n in (9, 16, 21)]
    state, results = generate(*self_step, prompts, max_new_tokens=limits)
    for ids, limit, result in zip(prompts, limits, results, strict=True):
        assert result.token_ids == greedy(ids, limit)
        assert result.finish_reason == "length"
        assert result.verify_count == -(-max(limit - 1, 0) // 4)
    assert all_free(state)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 5])
def test_stop_id(self_step, greedy, index):
    """The stop id as first token, inside a run, at its end, and in the next run; it is kept, what follows is not."""
    text = greedy(prompt(16), NEW)
    assert len(set(text[:6])) == 6  # each of them occurs there for the first time
    state, results = generate(*self_step, [prompt(16)], stop_ids=[text[index]])
    assert results[0].token_ids == text[: index + 1]
    assert results[0].finish_reason == "stop"
    assert all_free(state)


@pytest.mark.parametrize(("limit", "reason", "kept"), [(3, "stop", 3), (2, "length", 2), (4, "stop", 3)])
def test_stop_id_around_the_limit(self_step, greedy, limit, reason, kept):
    text = greedy(prompt(16), NEW)
    _, results = generate(*self_step, [prompt(16)], stop_ids=[text[2]], max_new_tokens=limit)
    assert (results[0].token_ids, results[0].finish_reason) == (text[:kept], reason)


def test_requests_end_apart(self_step, greedy):
    """One lane ends early, one is padding, one goes on as if alone."""
    first, second = prompt(9), prompt(21)
    stop = greedy(first, NEW)[1]
    cut = greedy(second, NEW)
    cut = cut[: cut.index(stop) + 1] if stop in cut else cut
    _, results = generate(*self_step, [first, second], stop_ids=[stop])
    assert [r.token_ids for r in results] == [greedy(first, 2), cut]


# Recorded cases


def test_padded_lane_commits_nothing(self_step):
    """Lengths [7, 0], accepted [2, 0]: the new lengths are [10, 0]."""
    spec, params = self_step
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(7)])
    state, _ = spec.prefill(params, state)
    state, plan = jax.jit(jaxspec.prepare, static_argnums=0)(spec, state)
    assert plan.seq_lens.tolist() == [7, 0, 0]
    drafts = jaxspec.Drafts(tokens=jnp.zeros((3, 3), jnp.int32), count=jnp.array([3, 0, 0]))
    verdict = Verdict(targets=jnp.full((3, 4), 5, jnp.int32), accepted=jnp.array([2, 0, 0]))
    state, output = jax.jit(jaxspec.commit, static_argnums=0)(spec, state, plan, drafts, verdict)
    requests = jaxspec.requests_of(state)
    assert requests.seq_len[1:].tolist() == [10, 0, 0]
    assert requests.num_output[1:].tolist() == [4, 0, 0]
    assert requests.verify_count[1:].tolist() == [1, 0, 0]
    assert output.num_tokens.tolist() == [3, 0, 0]
    assert output.tokens.tolist() == [[5, 5, 5, 0], [0] * 4, [0] * 4]
    assert state.tokens[1, 8:12].tolist() == [5, 5, 5, 0]


def metadata_for(table, committed, *, page_size, D, limit):
    """Verify metadata of one request whose virtual pages are also its physical ones."""
    table = jnp.asarray([[0] * len(table), table], jnp.int32)
    v2p = jnp.repeat(jnp.arange(64, dtype=jnp.int32)[:, None], 2, axis=1)
    layout = verify_layout(batch_size=1, num_rows=D, pages_per_row=table.shape[1], swa=True)
    metadata, _ = verify_metadata(
        jnp.array([committed]),
        jnp.array([1]),
        table,
        v2p,
        jnp.array([3]),
        PackedMetadata.zeros(layout),
        page_size=page_size,
        limit=limit,
    )
    return metadata


def test_rows_cross_into_the_next_page():
    """Page size 16, pages [5, 9, 2], 30 tokens committed."""
    metadata = metadata_for([5, 9, 2], 30, page_size=16, D=4, limit=48)
    assert metadata.window.full_loc.tolist() == [[158, 159, 32, 33]]
    assert metadata.window.swa_loc.tolist() == [[158, 159, 32, 33]]
    assert metadata.window.positions.tolist() == [[30, 31, 32, 33]]
    assert metadata.page_table[0, :3].tolist() == [5, 9, 2]
    assert metadata.cache_seqlens.tolist() == [34]


def test_rows_that_cross_get_their_page():
    spec, params = make_step("plain", page=16, D=4, context_len=48, new=8)
    state = jaxspec.init_state(TARGET, None, spec.config, [prompt(30)])
    state, _ = spec.prefill(params, state)
    assert state.pages.num_pages[1] == 2
    state, _ = jax.jit(jaxspec.prepare, static_argnums=0)(spec, state)
    assert state.pages.num_pages[1] == 3


def test_rows_past_the_context_limit():
    """Limit 2048, 2047 tokens committed: one row has a place; the others write to the sink and are nobody's keys."""
    pages = [1 + i for i in range(32)]
    metadata = metadata_for(pages, 2047, page_size=64, D=4, limit=2048)
    assert metadata.window.full_loc.tolist() == [[32 * 64 + 63, 0, 0, 0]]
    assert metadata.window.swa_loc.tolist() == [[32 * 64 + 63, 0, 0, 0]]
    assert metadata.cache_seqlens.tolist() == [2048]
    assert metadata.cu_seqlens_k.tolist() == [0, 2048]


# Pages


def leaves_outside_the_sink(state):
    """Every leaf but the metadata scratch, without what belongs to the sink: page 0, row 0."""
    page = state.cache.page_size
    buffers = [*state.cache.buffers, *(state.draft.cache.buffers if state.draft != () else ())]
    rows = [state.tokens, state.stop_ids, state.round_log, state.pages.page_table]
    requests, pages = dataclasses.asdict(jaxspec.requests_of(state)), state.pages
    rows += [*requests.values(), pages.num_pages, pages.swa_start]
    return jax.device_get(
        [b[page:] for b in buffers] + [r[1:] for r in rows] + [pages.free, pages.free_count, pages.v2p]
    )


def test_out_of_pages_in_a_round(greedy):
    """Two requests that fit one by one: when the pool is empty the step says so and leaves all as it was."""
    spec, params = make_step("self", batch=2, page=4, D=4, new=NEW, num_pages=17, num_swa_pages=17)
    prompts = [prompt(9), prompt(16)]
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts, max_new_tokens=[30, 30])
    state, status = spec.prefill(params, state)
    assert status == 0
    for _ in range(NEW):
        before = leaves_outside_the_sink(state)
        state, output = spec(params, state)
        if output.status:
            break
    assert output.status == 1 and output.unfinished
    assert output.num_tokens.tolist() == [0, 0]
    for was, is_now in zip(before, leaves_outside_the_sink(state), strict=True):
        np.testing.assert_array_equal(is_now, was)

    _, results = generate(spec, params, prompts, max_new_tokens=[30, 30])
    for ids, result in zip(prompts, results, strict=True):
        assert result.finish_reason == "out_of_pages"
        assert 1 < len(result.token_ids) < 30
        assert result.token_ids == greedy(ids, len(result.token_ids))


def test_out_of_pages_in_prefill():
    spec, params = make_step("self", batch=2, page=4, D=4, new=NEW, num_pages=17, num_swa_pages=17)
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(40), prompt(30)], max_new_tokens=2)
    before = jax.device_get(state)
    state, status = spec.prefill(params, state)
    assert status == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_sliding_pages_are_retired(greedy):
    """A request never holds more of them than its window and its new rows touch, and all come back at its end."""
    spec, params = make_step("self", batch=3, page=4, D=4, new=NEW)
    prompts = [prompt(n) for n in (9, 21, 64)]
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
    state, _ = spec.prefill(params, state)
    most = -(-(WINDOW - 1) // 4) + 1
    for _ in range(NEW):
        pages, requests = jax.device_get((state.pages, jaxspec.requests_of(state)))
        for row in (1, 2, 3):
            owned = pages.page_table[row, : pages.num_pages[row]]
            bound = pages.v2p[owned, 1] > 0
            assert (
                bound.sum() <= most + 1
            )  # one page more: the last round's rejected rows may lie in a page of their own
            needed = max(requests.seq_len[row] - WINDOW + 1, 0) // 4
            assert bound[needed:].all() and not bound[:needed].any()
            assert (pages.v2p[owned, 0] > 0).all()
        if not (requests.status != FINISHED)[1:].any():
            break
        state, _ = spec(params, state)
    assert all_free(state)
    assert [r.token_ids for r in read_requests(state, prompts)] == [greedy(ids, NEW) for ids in prompts]


# Phases


def test_phases_make_a_step(self_step):
    """Called one by one they do what the step does, to every integer; K and V agree to rounding."""
    spec, params = self_step
    prompts = [prompt(9), prompt(21)]
    states = []
    for advance in (spec, lambda params, state: round_in_phases(spec, params, state)):
        state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
        state, _ = spec.prefill(params, state)
        for _ in range(3):
            state, _ = advance(params, state)
        states.append(jax.device_get(state))

    def equal(a, b):
        if np.issubdtype(a.dtype, np.integer):
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    jax.tree.map(equal, *states)


def test_output_of_a_round(self_step, greedy):
    """What a step reports is what it appended."""
    spec, params = self_step
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(9), prompt(21)], max_new_tokens=[7, NEW])
    state, _ = spec.prefill(params, state)
    texts = [[], []]
    for done in range(1, 4):
        state, output = spec(params, state)
        for lane in (0, 1):
            texts[lane] += output.tokens[lane, : int(output.num_tokens[lane])].tolist()
        assert output.finish_reason.tolist() == [0 if done < 2 else 2, 0, 0]
        assert output.num_drafts.tolist() == [3 if done < 3 else 0, 3, 0]
        assert bool(output.unfinished)
    assert texts == [greedy(prompt(9), 7)[1:], greedy(prompt(21), 13)[1:]]


# Bad input


def config(**changes):
    settings = {"batch_size": 2, "num_draft_tokens": 4, "context_len": 64, "max_new_tokens": 8, "page_size": 4}
    return jaxspec.SpecConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"num_draft_tokens": 65}, "num_draft_tokens=65.*context_len=64"),
        ({"context_len": 0}, "context_len=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"page_size": 0}, "page_size=0"),
        ({"page_size": 12}, "page_size=12.*power of two"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"kernel_backend": "cuda"}, "kernel_backend='cuda': must be None or one of 'reference', 'interpret'"),
        ({"kernel_backend": "checked"}, "kernel_backend='checked'"),
        ({"memory": "half"}, "memory='half': must be one of 'static', 'unified'"),
        ({"pool_bytes": 1000}, "pool_bytes=1000: it sizes the pool of memory='unified'"),
        ({"pool_bytes": 0, "memory": "unified"}, "pool_bytes=0"),
    ],
)
def test_impossible_shapes(changes, words):
    with pytest.raises(jaxspec.InputError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("prompts", "settings", "changes", "words"),
    [
        ([[]], {}, {}, "prompt 0 is empty"),
        ([[1], []], {}, {}, "prompt 1 is empty"),
        ([list(range(60)) + [1] * 4], {}, {}, "prompt 0 has 64 tokens.*63"),
        ([[1, VOCAB]], {}, {}, rf"token id {VOCAB}, outside 0 \.\. {VOCAB - 1}"),
        ([[-1]], {}, {}, "token id -1"),
        ([[1.5]], {}, {}, "float64"),
        ([[[1], [2]]], {}, {}, r"shape \(2, 1\)"),
        ([[1]] * 3, {}, {}, "3 prompts.*batch_size=2"),
        ([[1]], {"max_new_tokens": 9}, {}, r"max_new_tokens=9, outside 0 \.\. 8"),
        ([[1]], {"max_new_tokens": -1}, {}, "max_new_tokens=-1"),
        ([[1]], {"max_new_tokens": [1, 2]}, {}, "2 values of max_new_tokens for 1 prompts"),
        ([[1]], {"stop_ids": [VOCAB]}, {}, f"stop id {VOCAB}"),
        ([[1]], {"stop_ids": [-1]}, {}, "stop id -1"),
        ([[1] * 20], {}, {"num_pages": 8}, "needs 8 pages of 4.*has 7.*num_pages"),
        ([[1] * 20], {}, {"num_swa_pages": 3}, "sliding-window pages.*num_swa_pages"),
        ([[1]], {}, {"context_len": 512}, "context_len=512.*256"),
        ([[1]], {}, {"memory": "unified", "pool_bytes": 1000}, r"pool_bytes=1000: .* take \d+ bytes"),
        ([[1]], {}, {"memory": "unified", "num_pages": 1}, "num_pages=1: .* at least 2"),
        (
            [[1] * 20],
            {},
            {"memory": "unified", "num_pages": 3, "num_swa_pages": 3},
            "needs 8 FULL and .* raise num_pages and num_swa_pages",
        ),
    ],
)
def test_impossible_requests(prompts, settings, changes, words):
    with pytest.raises(jaxspec.InputError, match=words):
        jaxspec.init_state(TARGET, None, config(**changes), prompts, **settings)


def test_a_pool_without_room_for_the_state_is_refused():
    """The least that the message names is accepted, and a page's worth less is not."""
    settings = {"memory": "unified", "batch_size": 1}
    fields = {"layers": HYBRID_TARGET.layers, "page_size": 4}
    small = PoolLayout.for_pages(**fields, full=8, swa=6).nbytes
    with pytest.raises(jaxspec.InputError, match="pages of 4 tokens and a state to reach length 30") as refusal:
        jaxspec.init_state(HYBRID_TARGET, None, config(**settings, pool_bytes=small), [[1] * 20])
    least = int(str(refusal.value).rpartition(" ")[2])
    assert least > small
    jaxspec.init_state(HYBRID_TARGET, None, config(**settings, pool_bytes=least), [[1] * 20])
    with pytest.raises(jaxspec.InputError, match=f"to at least {least}"):
        jaxspec.init_state(HYBRID_TARGET, None, config(**settings, pool_bytes=least - 1), [[1] * 20])


def test_the_smallest_pool_that_is_accepted_works(greedy):
    """20 tokens of prompt, 8 new ones and 4 rows: 8 pages, and the sink."""
    spec, params = make_step("self", batch=1, page=4, D=4, new=8, num_pages=9)
    _, results = generate(spec, params, [prompt(20)])
    assert results[0].token_ids == greedy(prompt(20), 8)


def test_draft_model_of_another_kind():
    other = models.Qwen3(dataclasses.replace(MODULE.config, vocab_size=VOCAB + 1))
    with pytest.raises(jaxspec.InputError, match=f"{VOCAB + 1} tokens, the target {VOCAB}"):
        jaxspec.make_spec_step(TARGET, jaxspec.DraftLM(jaxspec.from_qwen3(other, swa_pages=False)), config())
    short = models.Qwen3(dataclasses.replace(MODULE.config, max_position_embeddings=32))
    with pytest.raises(jaxspec.InputError, match="context of 32 is below context_len=64"):
        jaxspec.make_spec_step(TARGET, jaxspec.DraftLM(jaxspec.from_qwen3(short, swa_pages=False)), config())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loop": "gpu"}, "loop='gpu'.*device, chunked, python"),
        ({"on_tokens": print}, "on_tokens needs"),
        ({"rounds_per_dispatch": 0, "loop": "chunked"}, "rounds_per_dispatch=0"),
        ({"num_draft_tokens": 0, "drafter": jaxspec.NgramDrafter()}, "num_draft_tokens=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
    ],
)
def test_impossible_calls(settings, words):
    settings = {"prompts": [[1, 2]], "max_new_tokens": 4, **settings}
    with pytest.raises(jaxspec.InputError, match=words):
        jaxspec.generate(TARGET, jaxspec.Params(target_params()), settings.pop("prompts"), **settings)


def test_no_prompts():
    result = jaxspec.generate(TARGET, jaxspec.Params(target_params()), [])
    assert (result.requests, result.token_ids, result.dispatches, result.accept_length) == ([], [], 0, None)
    assert result.to_json()["requests"] == []


def test_a_pool_of_the_bytes_that_the_errors_ask_for_is_accepted():
    """First for one page of each kind, then for the prompt; not a byte less."""

    def make(pool_bytes):
        return jaxspec.init_state(TARGET, None, config(memory="unified", pool_bytes=pool_bytes), [[1] * 40])

    with pytest.raises(jaxspec.InputError, match=r"take \d+ bytes") as error:
        make(1000)
    least = int(re.search(r"take (\d+) bytes", str(error.value))[1])
    with pytest.raises(jaxspec.InputError, match=r"raise pool_bytes to at least \d+$") as error:
        make(least)
    enough = int(str(error.value).rpartition(" ")[2])
    make(enough)
    with pytest.raises(jaxspec.InputError, match=f"raise pool_bytes to at least {enough}"):
        make(enough - 1)


def test_generate_refuses_what_its_configuration_contradicts():
    call = {"config": config(), "max_new_tokens": 2}
    for name, value in (("memory", "unified"), ("logprobs", True)):
        with pytest.raises(jaxspec.InputError, match=f"{name}={value!r}: the configuration says"):
            jaxspec.generate(TARGET, jaxspec.Params({}), [[1]], **call, **{name: value})
    if jax.default_backend() == "cpu":
        with pytest.raises(jaxspec.InputError, match="kernel_backend='triton': it runs on arrays on a CUDA device"):
            jaxspec.generate(TARGET, jaxspec.Params({}), [[1]], config=config(kernel_backend="triton"))

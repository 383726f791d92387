"""Greedy speculative decoding emits the tokens of plain decoding, whatever the shapes, the pages and the batch."""

import itertools
import json

import jax
import numpy as np
import pytest
from tiny_models import CONTEXT, DRAFTERS, FAST_COMPILE, TARGET, WINDOW, drafter_and_params, make_step, prompt

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.steps.step import jit_with_state

NEW, CHUNK = 40, 20
BATCHES, PAGES, DRAFTS = (1, 3, 8), (1, 4, 16, 64, 128), (1, 2, 4, 8)

# Every pair of values of two parameters occurs in one of these rows: for a fixed page size or D the other two run
# through all their values, and (i + j, i + 2 j) modulo 3 takes all nine values.
PAIRWISE = [
    (DRAFTERS[(i + j) % 3], BATCHES[(i + 2 * j) % 3], page, D)
    for i, page in enumerate(PAGES)
    for j, D in enumerate(DRAFTS)
]
FULL = list(itertools.product(DRAFTERS, BATCHES, PAGES, DRAFTS))


def prompts_for(batch, page, D):
    """Prompts around the edges of the page, the window, the prefill chunk and the context; which ones depends on D."""
    edges = [
        page + 1,
        WINDOW,
        CONTEXT - 6,
        page,
        1,
        WINDOW + 1,
        CHUNK,
        CONTEXT - 1,
        page - 1,
        CHUNK + 1,
        WINDOW - 1,
        CONTEXT - 2,
    ]
    lengths = [edges[(3 * D + k) % len(edges)] for k in range(batch)]
    return [prompt(min(max(length, 1), CONTEXT - 1)) for length in lengths]


def run(spec, params, prompts, *, pool_seed=None):
    """One generation by the device loop. The seed only changes the state, so all of a step's runs share one program."""
    config = jaxspec.SpecConfig(**{**vars(spec.config), "pool_seed": pool_seed})
    state = jaxspec.init_state(spec.target, spec.drafter, config, prompts)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    return read_requests(state, prompts)


def texts(greedy, prompts, count=NEW):
    greedy.prepare(prompts)
    return [greedy(ids, count) for ids in prompts]


def check_combination(greedy, drafter, batch, page, D):
    spec, params = make_step(drafter, batch=batch, page=page, D=D, new=NEW, prefill_chunk=CHUNK)
    prompts = prompts_for(batch, page, D)
    results = run(spec, params, prompts)
    assert [r.token_ids for r in results] == texts(greedy, prompts)
    for ids, r in zip(prompts, results, strict=True):
        assert r.finish_reason == ("length" if len(ids) + NEW <= CONTEXT else "context")
        assert r.verify_count == len(r.accept_lengths) and 1 + sum(r.accept_lengths) == len(r.token_ids)
        assert all(1 <= n <= D for n in r.accept_lengths)
        if drafter == "self":  # every draft is what the target says, so only the last round may be short
            assert r.accept_lengths[:-1] == [D] * (r.verify_count - 1)

    order = np.random.default_rng(D).permutation(batch)
    assert run(spec, params, [prompts[i] for i in order]) == [results[i] for i in order]
    for seed in (1, 2):
        assert run(spec, params, prompts, pool_seed=seed) == results
    for present in {1, batch - 1} - {0}:  # the other lanes are padding
        assert run(spec, params, prompts[:present]) == results[:present]
    return results


def test_interpreted_kernels_decode_the_same_text(greedy):
    """The kernels themselves instead of their references, in prefill, verify and the draft model's window."""
    spec, params = make_step("draft_lm", batch=3, page=4, D=4, new=12, kernel_backend="interpret")
    prompts = prompts_for(3, 4, 4)
    assert [r.token_ids for r in run(spec, params, prompts)] == texts(greedy, prompts, 12)


@pytest.mark.parametrize(("drafter", "batch", "page", "D"), PAIRWISE)
def test_equals_plain_decoding(greedy, drafter, batch, page, D):
    """Also with the batch permuted, pages handed out in another order, or padded lanes: the same rounds."""
    check_combination(greedy, drafter, batch, page, D)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "batch", "page", "D"), [row for row in FULL if row not in PAIRWISE])
def test_equals_plain_decoding_full_sweep(greedy, drafter, batch, page, D):
    check_combination(greedy, drafter, batch, page, D)


def test_texts_are_worth_comparing(greedy):
    """A text of one repeated token would hide most errors."""
    prompts = [prompt(n) for n in (1, 7, 8, 9, 16, 21, 64, 65)]
    for text in texts(greedy, prompts):
        assert len(set(text)) >= 10


@pytest.mark.parametrize(("drafter", "batch", "page", "D"), [("ngram", 8, 4, 4), ("draft_lm", 3, 4, 8)])
def test_tokens_are_accepted(drafter, batch, page, D):
    """The imperfect drafters save rounds and also fail: both branches of acceptance are in play above."""
    spec, params = make_step(drafter, batch=batch, page=page, D=D, new=NEW, prefill_chunk=CHUNK)
    prompts = [prompt(n) for n in (21, 64, 65, 20, 127, 16, 8, 9)][:batch]
    accepted = [n for r in run(spec, params, prompts) for n in r.accepted_drafts]
    assert {0, 1, 2, 3} <= set(accepted)
    assert np.mean(accepted) > 0.1


# Round by round, with the host meddling in between


def kv_caches(state):
    """The target's cache, and the draft model's if there is one."""
    return [state.cache, *([state.draft.cache] if hasattr(state.draft, "cache") else [])]


def with_buffers(state, target, draft=None):
    state = state.replace(cache=state.cache.replace(buffers=tuple(target)))
    if draft is not None:
        state = state.replace(draft=state.draft.replace(cache=state.draft.cache.replace(buffers=tuple(draft))))
    return state


def unreadable_slots(state, spec, draft):
    """bool[slots] of each layer of a cache: all but what the next round may read, by position, row and page.

    The target's next queries start at position L and read rows up to L - 1. The draft's start at L - 1 and write that
    row first.
    """
    requests, pages = jax.device_get((jaxspec.requests_of(state), state.pages))
    page = spec.config.page_size
    cache = kv_caches(state)[1 if draft else 0]
    masks = []
    for layer, buffer in zip(cache.layers, cache.buffers, strict=True):
        mask = np.ones(buffer.shape[0], bool)
        for row in range(1, spec.config.rows):
            first_query = int(requests.seq_len[row]) - (1 if draft else 0)
            first_key = 0 if layer.window is None else max(first_query - layer.window + 1, 0)
            if pages.num_pages[row] == 0:
                continue
            for position in range(first_key, first_query):
                physical = pages.v2p[pages.page_table[row, position // page], int(layer.storage == "swa")]
                assert physical > 0, f"row {row} still needs position {position}, whose page is gone"
                mask[physical * page + position % page] = False
        masks.append(mask)
    return masks


def poison(state, spec):
    """The state with NaN where the next forward has no business: free pages, the sink, rejected and stale rows."""
    buffers = []
    for i, cache in enumerate(kv_caches(state)):
        masks = unreadable_slots(state, spec, draft=i == 1)
        buffers.append(
            [
                np.where(m[:, None], np.nan, b).astype(b.dtype)
                for m, b in zip(masks, jax.device_get(cache.buffers), strict=True)
            ]
        )
    return with_buffers(state, *[[jax.numpy.asarray(b) for b in group] for group in buffers])


def shuffle_pages(state, spec, rng):
    """The state with all physical pages moved to other places, tables and free stacks following."""
    pages = jax.device_get(state.pages)
    page = spec.config.page_size
    v2p, free = pages.v2p.copy(), pages.free.copy()
    moves = []
    for column in (0, 1):
        storage = "swa" if column else "full"
        slots = next(
            b.shape[0] for s, b in zip(state.cache.layers, state.cache.buffers, strict=True) if s.storage == storage
        )
        to = np.concatenate([[0], 1 + rng.permutation(slots // page - 1)])  # page p moves to to[p]; the sink stays
        v2p[:, column] = np.where(v2p[:, column] >= 0, to[np.maximum(v2p[:, column], 0)], -1)
        live = slice(1, 1 + int(pages.free_count[1 + column]))
        free[1 + column, live] = to[free[1 + column, live]]
        moves.append(np.argsort(to))  # the page that lands at place p
    groups = []
    for cache in kv_caches(state):
        group = []
        for layer, buffer in zip(cache.layers, jax.device_get(cache.buffers), strict=True):
            source = moves[int(layer.storage == "swa")]
            group.append(jax.numpy.asarray(buffer.reshape(-1, page, *buffer.shape[1:])[source].reshape(buffer.shape)))
        groups.append(group)
    state = with_buffers(state, *groups)
    return state.replace(pages=state.pages.replace(v2p=jax.numpy.asarray(v2p), free=jax.numpy.asarray(free)))


def run_by_rounds(spec, params, prompts, meddle):
    """Prefill and single steps, with `meddle(state)` before each of them."""
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
    state, status = spec.prefill(params, meddle(state))
    assert int(status) == 0
    for _ in range(spec.config.max_new_tokens):
        state, out = spec(params, meddle(state))
        if not out.unfinished:
            return read_requests(state, prompts)
    raise AssertionError("a request did not end")


MEDDLED = [("ngram", 3, 1, 4), ("draft_lm", 3, 4, 8), ("draft_lm", 8, 16, 2), ("self", 3, 64, 4)]


@pytest.mark.parametrize(("drafter", "batch", "page", "D"), MEDDLED)
def test_nothing_but_live_rows_is_read(greedy, drafter, batch, page, D):
    """NaN in every other slot before each round, and pages that move between rounds, change nothing."""
    spec, params = make_step(drafter, batch=batch, page=page, D=D, new=NEW, prefill_chunk=CHUNK)
    prompts = prompts_for(batch, page, D)
    results = run_by_rounds(spec, params, prompts, lambda state: state)
    assert [r.token_ids for r in results] == texts(greedy, prompts)
    assert run_by_rounds(spec, params, prompts, lambda state: poison(state, spec)) == results
    rng = np.random.default_rng(0)
    assert run_by_rounds(spec, params, prompts, lambda state: shuffle_pages(state, spec, rng)) == results


# Whole calls


@pytest.fixture
def fast_compile(monkeypatch):
    """`jaxspec.generate` compiles with the options of the sweep."""
    monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)


@pytest.mark.usefixtures("fast_compile")
def test_loops_are_equal(greedy):
    drafter, params = drafter_and_params("draft_lm")
    prompts, limits = [prompt(n) for n in (9, 21, 64)], (33, 1, 40)
    config = jaxspec.SpecConfig(
        batch_size=3, num_draft_tokens=4, context_len=CONTEXT, max_new_tokens=NEW, page_size=16, prefill_chunk=CHUNK
    )
    results, streamed = {}, {}
    for loop in ("device", "chunked", "python"):
        arrived = streamed[loop] = [[], [], []]
        listen = None if loop == "device" else (lambda i, ids, finished, arrived=arrived: arrived[i].extend(ids))
        results[loop] = jaxspec.generate(
            TARGET,
            params,
            prompts,
            drafter=drafter,
            config=config,
            max_new_tokens=limits,
            loop=loop,
            rounds_per_dispatch=3,
            on_tokens=listen,
        )
    want = [greedy(ids, n) for ids, n in zip(prompts, limits, strict=True)]
    for loop, result in results.items():
        assert result.requests == results["device"].requests, loop
        assert result.token_ids == want, loop
    assert streamed["chunked"] == streamed["python"] == want
    assert results["device"].dispatches == 1


@pytest.mark.usefixtures("fast_compile")
def test_plain_decoding(greedy):
    """`drafter=None` is one token a round, and the same text."""
    prompts = [prompt(n) for n in (1, WINDOW, CHUNK + 1)]
    result = jaxspec.generate(TARGET, drafter_and_params("plain")[1], prompts, max_new_tokens=NEW)
    assert result.token_ids == texts(greedy, prompts)
    assert [r.accept_lengths for r in result.requests] == [[1] * (NEW - 1)] * 3
    assert result.accept_length == NEW / (NEW - 1)


# The embedded models


@pytest.mark.parametrize(
    ("drafter", "batch", "page", "D", "repeats", "quick"),
    [
        ("ngram", 1, 64, 8, 1, True),
        ("draft_lm", 3, 16, 4, 1, False),
        pytest.param("draft_lm", 1, 128, 8, 40, True, marks=pytest.mark.slow),
    ],
)
def test_embedded_models(request, drafter, batch, page, D, repeats, quick):
    """One of them as users compile it."""
    if quick:
        request.getfixturevalue("fast_compile")
    target = jaxspec.load_model("target")
    params, which = jaxspec.Params(target.params), jaxspec.NgramDrafter()
    if drafter == "draft_lm":
        draft = jaxspec.load_model("draft")
        params, which = jaxspec.Params(target.params, draft.params), jaxspec.DraftLM(draft.draft_model)
    codes = [
        "import os\nimport sys\n\n\ndef main(argv):\n",
        "class Queue:\n    def __init__(self, maxsize=0):\n",
        "for i in ",
    ]
    prompts = [target.encode(code * repeats) for code in codes[:batch]]
    config = jaxspec.SpecConfig(
        batch_size=batch, num_draft_tokens=D, context_len=1024, max_new_tokens=32, page_size=page
    )
    result = jaxspec.generate(target.model, params, prompts, drafter=which, config=config, max_new_tokens=32)
    plain = jaxspec.generate(target.model, params, prompts, max_new_tokens=32)
    assert result.token_ids == plain.token_ids
    assert result.accept_length > 1.2
    assert json.loads(json.dumps(result.to_json()))["aggregate"]["accept_length"] == result.accept_length

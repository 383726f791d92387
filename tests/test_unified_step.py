"""The step with unified memory: the same results as with split pools, from pages that lie anywhere and move.

Most tests share one shape and so three compiled programs: prefill, a round that also shows its page tables, a whole
generation. Its pool is too small to hold the most pages of both kinds at once.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import GreedyOracle
from tiny_models import (
    CONTEXT,
    DRAFTERS,
    FAST_COMPILE,
    FULL_MODULE,
    FULL_TARGET,
    MODULE,
    TARGET,
    WINDOW,
    drafter_and_params,
    make_step,
    prompt,
    target_params,
)
from unified_cases import BATCH, CHUNK, NEW, PAGE, PROMPTS, D, initial, observed_round, prompts_for, run

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.metadata import verify_layout, verify_metadata
from jaxspec.models import dense_attend
from jaxspec.steps import prefill
from jaxspec.steps.memory import pool_layout
from jaxspec.steps.rounds import _stretch, run_rounds
from jaxspec.steps.state import EMPTY, FINISHED, RUNNING
from jaxspec.steps.step import jit_with_state
from pallas_kernels import PackedMetadata

# Equal to plain decoding and to split pools


def check_combination(greedy, drafter, batch, page, D, *, target=TARGET, twin=True):
    shape = {"target": target, "batch": batch, "page": page, "D": D, "new": NEW, "logprobs": True}
    spec, params = make_step(drafter, memory="unified", **shape)
    prompts = prompts_for(batch, page)
    results = run(spec, params, prompts)
    greedy.prepare(prompts)
    assert [r.token_ids for r in results] == [greedy(ids, NEW) for ids in prompts]
    for ids, r in zip(prompts, results, strict=True):
        assert r.finish_reason == ("length" if len(ids) + NEW <= CONTEXT else "context")
        assert len(r.logprobs) == len(r.token_ids) and max(r.logprobs) <= 0
    if twin:
        assert results == run(make_step(drafter, **shape)[0], params, prompts)  # every field, to the last bit
    order = np.random.default_rng(D).permutation(batch)
    assert run(spec, params, [prompts[i] for i in order]) == [results[i] for i in order]
    for seed in (1, 2):
        assert run(spec, params, prompts, seed=seed) == results


SWEEP = [("ngram", 3, 1, 8), ("wide", 3, 16, 2), ("ngram", 8, 64, 1)]
FULL = list(itertools.product(DRAFTERS, (1, 3, 8), (1, 4, 16, 64, 128, 256), (1, 2, 4, 8)))


@pytest.mark.parametrize(("drafter", "batch", "page", "D"), SWEEP)
def test_equals_plain_decoding_and_split_pools(greedy, drafter, batch, page, D):
    """Also with the batch permuted and the pool's pages scattered. The draft "wide" looks back further than the
    target's sliding-window pages last."""
    check_combination(greedy, drafter, batch, page, D, twin=D > 1)


def test_a_model_without_sliding_windows():
    """One kind of page; the draft's windowed layer lies there, too."""
    greedy = GreedyOracle(FULL_MODULE, target_params(), CONTEXT)
    check_combination(greedy, "draft_lm", 2, 128, 4, target=FULL_TARGET, twin=False)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "batch", "page", "D"), FULL)
def test_equals_plain_decoding_full_sweep(greedy, drafter, batch, page, D):
    check_combination(greedy, drafter, batch, page, D)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "batch", "page", "D"), [("draft_lm", 3, 4, 8), ("self", 2, 128, 4)])
def test_a_model_without_sliding_windows_full_sweep(drafter, batch, page, D):
    greedy = GreedyOracle(FULL_MODULE, target_params(), CONTEXT)
    check_combination(greedy, drafter, batch, page, D, target=FULL_TARGET)


@pytest.mark.parametrize(("drafter", "limits"), [("draft_lm", (NEW, NEW, NEW)), ("self", (9, NEW, 30))])
def test_tight_pool_equals_split_pools(tight, greedy, drafter, limits):
    """One program serves both drafts. A request that ends makes room for the others."""
    spec, params = tight[0], drafter_and_params(drafter)[1]
    results = run(spec, params, PROMPTS, max_new_tokens=limits)
    split, _ = make_step("draft_lm", batch=BATCH, page=PAGE, D=D, new=NEW, logprobs=True)
    assert results == run(split, params, PROMPTS, max_new_tokens=limits)
    assert [r.token_ids for r in results] == [greedy(ids, n) for ids, n in zip(PROMPTS, limits, strict=True)]
    accepted = {n for r in results for n in r.accepted_drafts}
    assert accepted == ({0, 1, 2, 3} if drafter == "draft_lm" else {3})


def test_logprobs_are_those_of_the_text(tight):
    """Against a forward over the whole text without a cache."""
    results = run(*tight, PROMPTS)
    tokens = np.zeros((BATCH, CONTEXT), np.int32)
    for row, (ids, result) in enumerate(zip(PROMPTS, results, strict=True)):
        tokens[row, : len(ids) + NEW] = [*ids, *result.token_ids]
    positions = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), tokens.shape)
    attend = dense_attend(MODULE.config.windows)
    logits = jax.jit(MODULE.apply, static_argnums=3)(target_params(), tokens, positions, attend)[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for row, (ids, result) in enumerate(zip(PROMPTS, results, strict=True)):
        places = np.arange(len(ids), len(ids) + NEW)
        np.testing.assert_allclose(result.logprobs, logprobs[row, places - 1, tokens[row, places]], atol=2e-4)


# Round by round, with the host meddling in between


def run_by_rounds(spec, params, state, meddle=lambda state: state, watch=lambda before, pages, plan: None):
    """Prefill and single rounds, with `meddle(state)` before each of them; `watch` sees the pages before, the pages in
    use and the plan."""
    state, status = spec.prefill(params, meddle(state))
    assert status == 0
    for _ in range(NEW):
        state = meddle(state)
        before = jax.device_get(state.pages)
        state, (plan, pages, output) = observed_round(spec, params, state)
        assert output.status == 0
        watch(before, jax.device_get(pages), plan)
        if not output.unfinished:
            return state
    raise AssertionError("a request did not end")


def live_units(state):
    """bool[units]: what the next round may read, by position, row and page.

    The target's next queries start at position L and read rows up to L - 1. The draft's start at L - 1 and write that
    row first.
    """
    requests, pages = jax.device_get((jaxspec.requests_of(state), state.pages))
    layout = state.cache.layout
    live = np.zeros(layout.units, bool)
    for draft, layers in ((False, layout.layers), (True, layout.draft_layers)):
        for index, layer in enumerate(layers):
            where = layout.row(index, draft)
            units = where.key_units + where.value_units
            for row in np.flatnonzero(pages.num_pages):
                end = int(requests.seq_len[row]) - draft
                first = 0 if layer.window is None else max(end - layer.window + 1, 0)
                position = np.arange(first, max(end, first))
                virtual = pages.page_table[row, position // layout.page_size]
                physical = pages.v2p[virtual, layout.kinds.index(where.kind)]
                assert (physical > 0).all(), f"row {row} still needs positions whose pages are gone"
                slots = physical * layout.page_size + position % layout.page_size
                live[(slots * layout.entry_units(where.kind) + where.key)[:, None] + np.arange(units)] = True
    return live


def poison(state):
    """The state with NaN where the next forward has no business: free memory, sinks, padding, stale rows."""
    live = live_units(state)
    buffer = np.where(live[:, None], np.asarray(state.cache.buffer), np.float32(np.nan))
    return state.replace(cache=state.cache.replace(buffer=jnp.asarray(buffer)))


def move_pages(state, rng):
    """The state with all pages of each kind elsewhere in the memory that the kind holds, tables following."""
    pages, layout, buffer = jax.device_get(state.pages), state.cache.layout, np.array(state.cache.buffer)
    v2p, physical = pages.v2p.copy(), pages.physical.copy()
    column = 0
    for index, kind in enumerate(layout.kinds):
        count, span, holes = layout.num_pages(kind), pages.span[index], pages.holes[index]
        first = {"full": count - span, "swa": pages.swa_low, "state": layout.min_page(kind)}[kind]
        to = np.arange(count)  # page p moves to to[p]
        to[first : first + span] = first + rng.permutation(span)
        owner, hole, place = (physical[i, column : column + count] for i in range(3))
        owner[to], place[to] = owner.copy(), place.copy()
        hole[1 : 1 + holes] = to[hole[1 : 1 + holes]]
        v2p[:, index] = np.where(v2p[:, index] > 0, to[np.maximum(v2p[:, index], 0)], v2p[:, index])
        content = buffer[: count * layout.page_units(kind)].reshape(count, -1)
        content[to] = content.copy()
        column += count
    return state.replace(
        cache=state.cache.replace(buffer=jnp.asarray(buffer)),
        pages=state.pages.replace(v2p=jnp.asarray(v2p), physical=jnp.asarray(physical)),
    )


@pytest.fixture(scope="module")
def by_rounds(tight):
    """Results of the shared step and prompts, round by round."""
    return read_requests(run_by_rounds(*tight, initial(tight[0], PROMPTS)), PROMPTS)


def test_nothing_but_live_rows_is_read(tight, greedy, by_rounds):
    """NaN in all the rest of the pool, whatever lanes it belongs to."""
    spec, params = tight
    assert [r.token_ids for r in by_rounds] == [greedy(ids, NEW) for ids in PROMPTS]
    shares = []

    def meddle(state):
        shares.append(live_units(state).mean())
        return poison(state)

    for seed in (None, 5):
        state = run_by_rounds(spec, params, initial(spec, PROMPTS, seed=seed), meddle)
        assert read_requests(state, PROMPTS) == by_rounds
    assert min(shares) == 0 and 0.3 < max(shares) < 1


def test_poison_in_a_live_row_would_be_seen(tight, by_rounds):
    spec, params = tight

    def meddle(state):
        first = np.flatnonzero(live_units(state))[:1]
        return state.replace(cache=state.cache.replace(buffer=state.cache.buffer.at[first].set(np.nan)))

    state = run_by_rounds(spec, params, initial(spec, PROMPTS), meddle)
    assert read_requests(state, PROMPTS) != by_rounds


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_pages_may_move_between_rounds(tight, by_rounds, seed):
    spec, params = tight
    rng, moved = np.random.default_rng(0), []

    def meddle(state):
        after = move_pages(state, rng)
        moved.append(int((after.pages.v2p != state.pages.v2p).sum()))
        return after

    state = run_by_rounds(spec, params, initial(spec, PROMPTS, seed=seed), meddle)
    assert read_requests(state, PROMPTS) == by_rounds
    assert max(moved) > 40


@pytest.mark.parametrize("seed", [None, 3])
def test_batch_rows_may_be_permuted(tight, by_rounds, seed):
    spec, params = tight
    for order in ([2, 0, 1], [1, 0, 2]):
        prompts = [PROMPTS[i] for i in order]
        state = run_by_rounds(spec, params, initial(spec, prompts, seed=seed))
        assert read_requests(state, prompts) == [by_rounds[i] for i in order]


# One kind's memory becomes the other's


def prefill_peak(lengths):
    """SWA pages alive at once when prompts enter in chunks, pages being retired after each chunk."""
    most = 0
    for start in range(0, max(lengths), CHUNK):
        alive = 0
        for length in lengths:
            before, after = min(start, length), min(start + CHUNK, length)
            alive += -(-after // PAGE) - max(before - WINDOW, 0) // PAGE
        most = max(most, alive)
    return most


def test_memory_goes_from_kind_to_kind_and_pages_move(tight, by_rounds):
    """The most pages of each kind do not fit together: prefill's windows lie where FULL pages will, and the other way
    round when the pool is used again. Windows alive at the frontier make way for FULL pages."""
    spec, params = tight
    layout = pool_layout(spec.target, spec.drafter, spec.config)
    alive, moves = {"full": [], "swa": []}, {"full": 0, "swa": 0}

    def watch(before, pages, plan):
        for column, kind in enumerate(layout.kinds):
            was, now = before.v2p[1:, column], pages.v2p[1:, column]
            moves[kind] += int(((was > 0) & (now > 0) & (was != now)).sum())
            alive[kind].append(int((now > 0).sum()))

    state = initial(spec, PROMPTS)
    for _ in range(2):
        state = run_by_rounds(spec, params, state, watch=watch)
        assert read_requests(state, PROMPTS) == by_rounds
        state = initial(spec, PROMPTS).replace(pages=state.pages, cache=state.cache, draft=state.draft)
    full, windows = max(alive["full"]), prefill_peak([len(ids) for ids in PROMPTS])
    assert layout.holds(full=full, swa=max(alive["swa"])) and not layout.holds(full=full, swa=windows)
    assert moves["swa"] > 0
    # In units: windows reach up to here at the least, and FULL pages down to here.
    top = (layout.min_page("swa") + windows) * layout.page_units("swa")
    assert top > (layout.num_pages("full") - full) * layout.page_units("full")


def test_pages_move_inside_a_generation(tight, by_rounds, monkeypatch):
    """`jaxspec.generate` in one dispatch: the same rounds, and pages that end where stretch after stretch puts them."""
    spec, params = tight
    monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
    result = jaxspec.generate(spec.target, params, PROMPTS, drafter=spec.drafter, config=spec.config)
    assert [r.token_ids for r in result.requests] == [r.token_ids for r in by_rounds]
    assert [r.accept_lengths for r in result.requests] == [r.accept_lengths for r in by_rounds]
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, initial(spec, PROMPTS))

    stretch = functools.partial(jax.jit(one_stretch, static_argnums=0, compiler_options=FAST_COMPILE), spec, params)
    stretches, moves = [jit_with_state(prefill, spec.options)(spec, params, initial(spec, PROMPTS))[0]], 0
    while running(stretches[-1]).any():
        before = jax.device_get(stretches[-1].pages.v2p)
        after, status, rounds = stretch(stretches[-1])
        assert status == 0 and rounds > 0
        if running(stretches[-1]).all():  # nothing was released, so a page bound before and after is the same one
            now = jax.device_get(after.pages.v2p)
            moves += ((before > 0) & (now > 0) & (before != now))[1:].sum()
        stretches.append(after)
    assert moves > 0 and len(stretches) > 3
    # The stacks of holes tell the whole history of hand-outs, moves and frees.
    after, _, rounds = stretch(stretches[-1])
    assert rounds == 0
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state.pages, after.pages)))


def running(state):
    return np.asarray(jaxspec.requests_of(state).status)[1:] == RUNNING


def one_stretch(spec, params, state):
    """What a generation does between two hand-outs of pages; once all has ended, its last taking back."""
    return _stretch(spec, params, (state, jnp.int32(0), jnp.int32(0)), up_to(NEW))


def up_to(count):
    """The condition of so many rounds, or of fewer if all requests end."""
    return lambda state, rounds: (jaxspec.requests_of(state).status == RUNNING).any() & (rounds < count)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILE)
def rounds_on(spec, params, state, count):
    """Up to so many rounds in one call."""
    return run_rounds(spec, params, state, jnp.int32(0), up_to(count))


def check_bound_pages(spec, state):
    """What is bound in the pool is what requests own: pages from their first, and of windows from their first seen."""
    pages = jax.device_get(state.pages)
    windows = pages.num_pages - pages.swa_start
    assert [(kind > 0).sum() for kind in pages.v2p[1:].T] == [pages.num_pages.sum(), windows.sum()]
    assert windows.max() <= spec.config.swa_pages_per_row(WINDOW)


@pytest.mark.parametrize("count", [0, 1, 2, 7, NEW])
def test_rounds_of_a_stretch_are_rounds(tight, count):
    """So many rounds in one call leave the requests where as many single calls do, and no page with what has ended."""
    spec, params = tight
    limits = [9, NEW, 23]  # two end inside a stretch
    state, _ = spec.prefill(params, initial(spec, PROMPTS, max_new_tokens=limits))
    found, status, ran = rounds_on(spec, params, state, count)
    single, _ = spec.prefill(params, initial(spec, PROMPTS, max_new_tokens=limits))
    turns = 0
    while turns < count and running(single).any():
        single, output = spec(params, single)
        assert output.status == 0
        turns += 1
    assert status == 0 and ran == turns
    same = [(s.tokens, s.round_log, s.logprobs, jaxspec.requests_of(s)) for s in (found, single)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:], b[1:]), *jax.device_get(same))
    ended = np.asarray(jaxspec.requests_of(found).status) == FINISHED
    assert not np.asarray(found.pages.num_pages)[ended].any()
    check_bound_pages(spec, found)
    if count == NEW:
        assert ended[1:].all() and found.pages.counters[0] == len(found.pages.free_virtual) - 1


@functools.cache
def fast_step(pool="roomy"):
    """One whose drafts are all right, so that a round goes two pages further."""
    pages = {} if pool == "roomy" else {"num_pages": 44, "num_swa_pages": 12}
    spec, params = make_step("self", batch=2, page=4, D=8, new=NEW, memory="unified", logprobs=True, **pages)
    return spec, jax.device_put(params)


def test_pages_are_handed_out_where_some_are_short_alone():
    """Nobody is short in the second of two rounds, although every request has come nearer to its last page."""
    spec, params = fast_step()
    state, _ = spec.prefill(params, initial(spec, PROMPTS[:2]))
    owned = []
    for _ in range(2):
        state, _, ran = rounds_on(spec, params, state, 1)
        owned.append(np.asarray(state.pages.num_pages))
        assert ran == 1
    np.testing.assert_array_equal(*owned)


@pytest.mark.parametrize("pool", ["roomy", "tight"])
def test_windows_leave_no_page_behind_a_call(pool):
    """However far the rounds of a stretch have gone."""
    spec, params = fast_step(pool)
    state, _ = spec.prefill(params, initial(spec, PROMPTS[:2]))
    while running(state).any():
        state, status, _ = rounds_on(spec, params, state, 2)  # a stretch, where pages are handed out ahead
        assert status == 0
        check_bound_pages(spec, state)
        length = np.asarray(jaxspec.requests_of(state).seq_len)[1:]
        gone = np.maximum(length - WINDOW + 1, 0) // spec.config.page_size
        start = np.asarray(state.pages.swa_start)[1:]
        np.testing.assert_array_equal(start, np.where(running(state), gone, 0))


# Out of pages


@dataclasses.dataclass(frozen=True)
class Uneven(jaxspec.DraftLM):
    """A draft that proposes nothing to the first request."""

    def propose(self, *args):
        state, drafts = super().propose(*args)
        return state, drafts.replace(count=drafts.count.at[0].set(0))


@pytest.mark.parametrize(
    ("D", "pages", "lengths", "limits"),
    [(4, 13, (7, 9), (37, 22)), (4, 11, (17, 8), (17, 13)), (8, 15, (7, 6), (11, 29)), (8, 20, (14, 9), (39, 38))],
)
def test_pages_that_are_enough_without_pages_ahead_are_enough(D, pages, lengths, limits):
    """One request goes on a token a round, the other D. Of a page handed out ahead to either the other would be short
    in the end."""
    found = {}
    for memory in ("static", "unified"):
        spec, params = make_step("self", target=FULL_TARGET, batch=2, D=D, memory=memory, num_pages=1 + pages)
        spec = dataclasses.replace(spec, drafter=Uneven(FULL_TARGET))
        found[memory] = run(spec, params, [prompt(n) for n in lengths], max_new_tokens=list(limits))
    assert [r.finish_reason for r in found["static"]] == ["length"] * 2
    assert found["unified"] == found["static"]
    slow, quick = (len(r.token_ids) / r.verify_count for r in found["unified"])
    assert slow < 1.2 and quick > D / 2


def leaves_outside_the_sink(state):
    """Every leaf but the metadata scratch, without what belongs to the sinks: units below all pages, row 0, cell 0."""
    layout, pages = state.cache.layout, state.pages
    sinks = max(map(layout.page_units, layout.kinds))
    rows = [state.tokens, state.stop_ids, state.round_log, state.logprobs, pages.page_table]
    rows += [*dataclasses.asdict(jaxspec.requests_of(state)).values(), *pages.rows]
    leaves = [state.cache.buffer[sinks:], *(row[1:] for row in rows)]
    return jax.device_get([*leaves, pages.v2p, pages.free_virtual[1:], pages.physical[:, 1:], pages.counters])


LONG = [prompt(n) for n in (60, 64, 65)]


def test_out_of_pages_in_a_round(tight, greedy):
    """The refused round changes no byte; once a request has gone the next round is granted."""
    spec, params = tight
    state, status = spec.prefill(params, initial(spec, LONG))
    assert status == 0
    for _ in range(NEW):
        before = leaves_outside_the_sink(state)
        state, (_, _, output) = observed_round(spec, params, state)
        if output.status:
            break
    assert output.status == 1 and output.unfinished
    assert output.num_tokens.tolist() == [0, 0, 0]
    for was, is_now in zip(before, leaves_outside_the_sink(state), strict=True):
        np.testing.assert_array_equal(is_now, was)

    state = without_row(state, 2)
    while output.unfinished:
        state, (_, _, output) = observed_round(spec, params, state)
        assert output.status == 0
    results = read_requests(state, LONG)
    for lane in (0, 2):
        assert results[lane].token_ids == greedy(LONG[lane], NEW)

    for ids, result in zip(LONG, run(spec, params, LONG), strict=True):
        assert result.finish_reason == "out_of_pages"
        assert 1 < len(result.token_ids) < NEW
        assert result.token_ids == greedy(ids, len(result.token_ids))


def test_out_of_pages_ends_a_stretch_before_a_round(tight, greedy):
    """The rounds before it count, nothing of a request is lost, and with pages it goes on as if nothing had been."""
    spec, params = tight
    many = functools.partial(rounds_on, spec, params, count=NEW)
    state, _ = spec.prefill(params, initial(spec, LONG))
    state, status, ran = many(state)
    assert status == 1 and 0 < ran < NEW and running(state).all()
    assert ran == jaxspec.requests_of(state).verify_count.max()
    again, status, ran = many(state)
    assert status == 1 and ran == 0
    same = [(s.tokens, jaxspec.requests_of(s)) for s in (state, again)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(same))

    state, status, _ = many(without_row(again, 2))
    assert status == 0 and not running(state).any()
    results = read_requests(state, LONG)
    assert [results[i].token_ids for i in (0, 2)] == [greedy(LONG[i], NEW) for i in (0, 2)]


def test_out_of_pages_in_prefill(tight):
    spec, params = tight
    state = initial(spec, [prompt(120), prompt(121), prompt(122)], max_new_tokens=2)
    before = jax.device_get(state)
    state, status = spec.prefill(params, state)
    assert status == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


# One program, whatever the tables say


def without_row(state, row):
    """The state as if a request had left: its lane is padding."""
    requests = jaxspec.requests_of(state)
    ended = jnp.arange(state.tokens.shape[0]) == row
    return state.with_(
        requests=requests.replace(status=requests.status.at[row].set(EMPTY), seq_len=requests.seq_len.at[row].set(0)),
        pages=state.pages.release(ended),
    )


def with_lengths(state, change):
    """The state with committed lengths changed by so much in each row; K and V stay what they were."""
    requests = jaxspec.requests_of(state)
    return state.with_(requests=requests.replace(seq_len=requests.seq_len + jnp.asarray([0, *change])))


def with_rows_permuted(state, order):
    """The state with row order[i - 1] as row i."""
    order = np.array([0, *order])
    pages = state.pages.replace(page_table=state.pages.page_table[order], rows=state.pages.rows[:, order])
    by_row = {name: getattr(state, name)[order] for name in ("tokens", "stop_ids", "round_log", "logprobs")}
    return state.replace(packed=state.packed[:, order], pages=pages, **by_row)


def with_stale_metadata(state):
    """The state with garbage where the round will write its metadata."""
    return state.replace(metadata=jax.tree.map(lambda leaf: jnp.full_like(leaf, 777_777), state.metadata))


def check_metadata(spec, requests, pages, plan):
    """The plan of a round against tables built in numpy from live mappings, and against a fresh eager build."""
    plan, pages = jax.device_get((plan, pages))
    running = requests.status[1:] == 2
    rows = np.where(running, np.arange(1, BATCH + 1), 0)
    lengths = np.where(running, requests.seq_len[1:], 0)
    np.testing.assert_array_equal(plan.req_rows, rows)
    np.testing.assert_array_equal(plan.seq_lens, lengths)
    metadata = plan.metadata
    np.testing.assert_array_equal(metadata.cache_seqlens, np.minimum(lengths + D, CONTEXT))
    for lane, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row == 0:
            assert not metadata.page_table[lane].any() and not metadata.swa_page_table[lane].any()
            continue
        used = -(-(length + D) // PAGE)
        bound = pages.v2p[pages.page_table[row, :used]]
        assert (bound[:, 0] > 0).all() and (bound[-3:, 1] > 0).all()
        for table, column in ((metadata.page_table, 0), (metadata.swa_page_table, 1)):
            np.testing.assert_array_equal(table[lane, :used], np.maximum(bound[:, column], 0))
            assert not table[lane, used:].any()
        position = length + np.arange(D)
        virtual, inside = pages.page_table[row, position // PAGE], position % PAGE
        np.testing.assert_array_equal(metadata.window.positions[lane], position)
        np.testing.assert_array_equal(metadata.window.virtual_loc[lane], virtual * PAGE + inside)
        np.testing.assert_array_equal(metadata.window.full_loc[lane], pages.v2p[virtual, 0] * PAGE + inside)
        np.testing.assert_array_equal(metadata.window.swa_loc[lane], pages.v2p[virtual, 1] * PAGE + inside)
    layout = verify_layout(batch_size=BATCH, num_rows=D, pages_per_row=spec.config.pages_per_row, swa=True)
    fresh, _ = verify_metadata(
        *map(jnp.asarray, (plan.seq_lens, plan.req_rows, pages.page_table, pages.v2p, plan.anchor)),
        PackedMetadata.zeros(layout),
        page_size=PAGE,
        limit=CONTEXT,
        backend="reference",
    )
    fresh = fresh.replace(backend=metadata.backend)  # who attends is no part of what was written
    jax.tree.map(np.testing.assert_array_equal, metadata, jax.device_get(fresh))


TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


@contextlib.contextmanager
def traces():
    """Counts the functions that JAX traces while the block runs."""
    counts, live = [], True

    def listen(name, duration, **_):
        if live and name == TRACE_EVENT:
            counts.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        live = False


def test_traces_are_counted():
    with traces() as counts:
        jax.jit(lambda x: x * 5 - 1)(np.arange(9))
    assert counts


def guarded_round(spec, params, state):
    """A round on arrays that are on the device already: no transfer, nothing traced."""
    with jax.transfer_guard("disallow"), traces() as counts:
        state, shown = observed_round(spec, params, state)
        jax.block_until_ready(state)
    assert not counts
    return state, shown


def test_replay(tight):
    """Five calls of one compiled round, each with other tables, and garbage where its metadata will be."""
    spec, params = tight
    rng = np.random.default_rng(4)
    state, _ = spec.prefill(params, initial(spec, [prompt(21), prompt(64), prompt(33)], seed=3))
    observed_round(spec, params, jax.tree.map(jnp.copy, state))
    rows = jnp.arange(1, BATCH + 1, dtype=jnp.int32)

    def retired(state):
        """A length that the step itself would not reach at once, and the pages behind its window gone."""
        state = with_lengths(state, [5, 3, 4])
        lengths = jaxspec.requests_of(state).seq_len[1:]
        return state.replace(pages=state.pages.retire(rows, lengths, WINDOW, max_retired=8))

    tables = []
    for change in (
        lambda state: move_pages(state, rng),
        retired,
        lambda state: with_lengths(state, [-6, 1, -3]),
        lambda state: with_rows_permuted(state, [3, 1, 2]),
        lambda state: move_pages(without_row(state, 2), rng),
    ):
        state = with_stale_metadata(change(state))
        requests = jax.device_get(jaxspec.requests_of(state))
        state, (plan, pages, _) = guarded_round(spec, params, state)
        check_metadata(spec, requests, pages, plan)
        tables.append(np.asarray(plan.metadata.page_table))
    assert all((a != b).any() for a, b in itertools.combinations(tables, 2))


def test_twenty_mappings_one_program(tight):
    """Other lengths, other numbers of requests, pages elsewhere."""
    spec, params = tight
    rng = np.random.default_rng(8)
    for turn in range(21):
        lengths = [*map(int, rng.integers(1, 66, turn % (BATCH + 1)))]
        state, status = spec.prefill(params, initial(spec, [prompt(n) for n in lengths], seed=turn))
        assert status == 0
        state = with_stale_metadata(move_pages(state, rng))
        requests = jax.device_get(jaxspec.requests_of(state))
        state, (plan, pages, _) = (observed_round if turn == 0 else guarded_round)(spec, params, state)
        check_metadata(spec, requests, pages, plan)

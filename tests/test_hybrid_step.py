"""A hybrid under the step: the text of plain decoding, and states that only committed tokens have gone into.

Most tests share one shape and so two compiled programs for each kind of memory, prefill and a round, driven by a
drafter that is right as often as they want.
"""

import itertools

import hybrid_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_cases import (
    BATCH,
    CHUNK,
    DEEP_TARGET,
    NEW,
    D,
    Scripted,
    deep_params,
    deep_step,
    move_pages,
    poison,
    read_states,
    run_by_rounds,
    run_on,
    running_rows,
    scripts,
    state_places,
    token_ids,
    weights,
    with_cell_of_a_state,
)
from tiny_models import CONTEXT, FAST_COMPILE, WINDOW, drafter_and_params, prompt
from unified_cases import initial, run

import jaxspec
from jaxspec.generation.results import read_requests
from jaxspec.metadata import Ids, verify_layout
from jaxspec.steps.state import FINISHED, RUNNING, WAITING
from pallas_kernels import PackedMetadata

TAPS = hybrid_cases.DEEP_MODULE.config.linear_conv_kernel_dim
MEMORIES = ("static", "unified")
PROMPTS = [prompt(n) for n in (41, TAPS - 1, CHUNK + 1)]
SCRIPT = scripts(D - 1, BATCH)


CUT = [prompt(n) for n in (71, TAPS - 1, 2 * CHUNK)]
NEXT = [PROMPTS[0], prompt(TAPS + 1), PROMPTS[2]]


@pytest.fixture(scope="module")
def oracle():
    oracle = hybrid_cases.Oracle()
    shapes = [(batch, page, chunk, num_draft_tokens) for _, _, batch, page, num_draft_tokens, chunk in SWEEP]
    oracle.prepare([*PROMPTS, *CUT, *NEXT, *itertools.chain(*itertools.starmap(prompts_for, shapes))])
    return oracle


@pytest.fixture(scope="module")
def plain(oracle):
    """Plain decoding of the prompts of most tests."""
    return [oracle(ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def scripted(oracle):
    """Weights of the step for those prompts."""
    return weights(deep_params(), oracle, PROMPTS, SCRIPT)


def test_texts_are_worth_comparing(plain):
    """A text of one repeated token would hide most errors."""
    assert all(len(set(text)) >= 10 for text in plain)


# Equal to plain decoding


def prompts_for(batch, page, chunk, num_draft_tokens):
    """Prompts around the edges of page, window, convolution, prefill chunk and context; which ones depends on D."""
    edges = [1, TAPS - 1, CHUNK, CONTEXT - 2, page, WINDOW, chunk, page + 1, TAPS, chunk + 1, CONTEXT - 1, WINDOW + 1]
    lengths = [edges[(5 * num_draft_tokens + k) % len(edges)] for k in range(batch)]
    return [prompt(min(length, CONTEXT - 1)) for length in lengths]


def check_combination(oracle, memory, drafter, batch, page, num_draft_tokens, chunk=CHUNK, backend=None):
    """Also with the batch permuted, pages scattered, and padded lanes: the same rounds."""
    config = jaxspec.SpecConfig(
        batch_size=batch,
        num_draft_tokens=num_draft_tokens,
        context_len=CONTEXT,
        max_new_tokens=NEW,
        page_size=page,
        prefill_chunk=chunk,
        memory=memory,
        kernel_backend=backend,
    )
    which, others = (Scripted(), None) if drafter == "scripted" else drafter_and_params(drafter)
    spec = jaxspec.make_spec_step(DEEP_TARGET, which, config, options=FAST_COMPILE)
    right = scripts(num_draft_tokens - 1, batch)

    def results_of(lanes, **settings):
        params = jaxspec.Params(deep_params(), others.draft if others else ())
        if drafter == "scripted":
            params = weights(deep_params(), oracle, [prompts[i] for i in lanes], right[[*lanes, *rest(lanes)]])
        return run(spec, params, [prompts[i] for i in lanes], **settings)

    def rest(lanes):
        return [i for i in range(batch) if i not in lanes]

    prompts = prompts_for(batch, page, chunk, num_draft_tokens)
    results = results_of(range(batch))
    oracle.prepare(prompts)
    assert [r.token_ids for r in results] == [oracle(ids) for ids in prompts]
    for lane, (ids, r) in enumerate(zip(prompts, results, strict=True)):
        assert r.finish_reason == ("length" if len(ids) + NEW <= CONTEXT else "context")
        if drafter == "scripted":  # what is left of the context, or of the text, may cut the last round
            assert r.accepted_drafts[:-1] == right[lane, : max(r.verify_count - 1, 0)].tolist()
    order = np.random.default_rng(num_draft_tokens).permutation(batch)
    assert results_of(order, seed=1) == [results[i] for i in order]
    for present in {1, batch - 1} - {0, batch}:  # the other lanes are padding
        assert results_of(range(present)) == results[:present]
    return results


SWEEP = [("static", "ngram", 3, 16, 9, 70), ("unified", "draft_lm", 3, 8, 3, CHUNK)]
FULL = [
    *itertools.product(MEMORIES, ["scripted"], [3], [4], range(2, 10), [2, CHUNK, 70]),
    *itertools.product(MEMORIES, ["ngram", "draft_lm"], [1, 3], [1, 16, 64, 128], [1, 4], [CHUNK]),
]


@pytest.mark.parametrize(("memory", "drafter", "batch", "page", "num_draft_tokens", "chunk"), SWEEP)
def test_equals_plain_decoding(oracle, memory, drafter, batch, page, num_draft_tokens, chunk):
    check_combination(oracle, memory, drafter, batch, page, num_draft_tokens, chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "drafter", "batch", "page", "num_draft_tokens", "chunk"), FULL)
def test_equals_plain_decoding_full_sweep(oracle, memory, drafter, batch, page, num_draft_tokens, chunk):
    check_combination(oracle, memory, drafter, batch, page, num_draft_tokens, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_interpreted_kernels_decode_the_same_text(oracle, memory):
    check_combination(oracle, memory, "scripted", 2, 4, 3, backend="interpret")


# States


def check_states(oracle, prompts):
    """A watcher for `run_by_rounds`: states are what the recurrence row by row makes of the committed tokens. It
    returns what it has checked: rows and lengths."""
    oracle.prepare(prompts)
    expected = oracle.states([[*ids, *oracle(ids)] for ids in prompts])
    checked = []

    def watch(state):
        lengths = np.asarray(jaxspec.requests_of(state).seq_len)
        for (row, layer), parts in read_states(state).items():
            checked.append((int(row), int(lengths[row])))
            for got, rows in zip(parts, expected[layer], strict=True):
                want = rows[row - 1, lengths[row] - 1]
                assert got.dtype == np.float32 and np.abs(got - want).max() <= 1e-5 * np.abs(want).max()

    watch.checked = checked
    return watch


@pytest.mark.parametrize("memory", MEMORIES)
def test_states_are_those_of_the_committed_tokens(oracle, scripted, plain, memory):
    """After prefill and after each round, whether it accepts everything, something or nothing."""
    watch = check_states(oracle, PROMPTS)
    state = run_by_rounds(deep_step(memory), scripted, initial(deep_step(memory), PROMPTS), watch=watch)
    assert token_ids(state, PROMPTS) == plain
    for row, (ids, result) in enumerate(zip(PROMPTS, read_requests(state, PROMPTS), strict=True), start=1):
        assert result.accepted_drafts[:-1] == SCRIPT[row - 1, : result.verify_count - 1].tolist()
        lengths = np.cumsum([len(ids), *result.accept_lengths[:-1]])
        assert [length for r, length in watch.checked if r == row] == np.repeat(lengths, 2).tolist()
    assert read_requests(state, PROMPTS)[0].accepted_drafts[:5] == [3, 0, 3, 0, 0]


def test_a_wrong_state_would_be_seen(oracle, scripted):
    """By the comparison above, and in the text."""
    spec = deep_step("static")
    state, _ = spec.prefill(scripted, initial(spec, PROMPTS))
    watch = check_states(oracle, PROMPTS)
    watch(state)
    first = next(iter(read_states(state).values()))[-1]
    with pytest.raises(AssertionError):
        watch(with_cell_of_a_state(state, first[0, 0, 0] + 2e-5 * np.abs(first).max()))


def other_shape(state, spec):
    """The state with room for the metadata of another step's round."""
    config = spec.config
    layout = verify_layout(
        batch_size=config.batch_size,
        num_rows=config.num_draft_tokens,
        pages_per_row=config.pages_per_row,
        swa=True,
        states=True,
    )
    return state.replace(metadata=PackedMetadata.zeros(layout))


@pytest.mark.parametrize("memory", ["unified", pytest.param("static", marks=pytest.mark.slow)])
def test_rounds_of_one_and_of_four_rows_in_turn(oracle, scripted, plain, memory):
    """Decoding and verifying hand the states to each other."""
    verify, decode = deep_step(memory), deep_step(memory, num_drafts=0)
    watch = check_states(oracle, PROMPTS)
    state, _ = verify.prefill(scripted, initial(verify, PROMPTS))
    for turn in range(2 * NEW):
        spec = (decode, verify)[turn % 3 > 0]
        state, output = spec(scripted, other_shape(state, spec))
        watch(state)
        if not output.unfinished:
            break
    assert token_ids(state, PROMPTS) == plain


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [TAPS - 1, 70])
def test_a_state_does_not_depend_on_how_the_prompt_was_cut(oracle, scripted, chunk):
    """Chunks as long as the convolution's window, and longer than those the rule is solved in; the other tests have
    them of 2 and 20. A round of the usual step goes on from there."""
    watch = check_states(oracle, CUT)
    spec = deep_step("static", chunk=chunk)
    state, _ = spec.prefill(scripted, initial(spec, CUT))
    watch(state)
    assert len(watch.checked) == 2 * BATCH
    state = run_on(deep_step("static"), weights(deep_params(), oracle, CUT, SCRIPT), state)
    assert token_ids(state, CUT) == [oracle(ids) for ids in CUT]


def test_a_request_may_stop_inside_a_run(oracle, scripted, plain):
    """A stop id among accepted drafts ends its request; the others' states are no worse for it."""
    stop = plain[1][7]
    for memory in MEMORIES:
        spec = deep_step(memory)
        watch = check_states(oracle, PROMPTS)
        results = read_requests(
            run_by_rounds(spec, scripted, initial(spec, PROMPTS, stop_ids=[stop]), watch=watch), PROMPTS
        )
        ends = [text.index(stop) + 1 if stop in text else NEW for text in plain]
        assert [r.token_ids for r in results] == [text[:end] for text, end in zip(plain, ends, strict=True)]
        assert results[1].finish_reason == "stop" and len({*ends}) > 1


# Slots


def request_arrives(state, row, ids):
    """The state with a new request in a row whose last one has ended."""
    requests = jaxspec.requests_of(state)
    assert requests.status[row] == FINISHED

    def put(field, value):
        return getattr(requests, field).at[row].set(value)

    fresh = {"status": WAITING, "prompt_len": len(ids)}
    fresh |= dict.fromkeys(("finish_reason", "seq_len", "num_output", "verify_count"), 0)
    return state.with_(
        requests=requests.replace(**{field: put(field, value) for field, value in fresh.items()}),
        tokens=state.tokens.at[row, : len(ids)].set(jnp.asarray(ids)),
        draft=state.draft.at[row - 1].set(0),
    )


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("spoiled", [False, True], ids=["as it was left", "NaN"])
def test_a_slot_is_reused(oracle, memory, spoiled):
    """A request that comes when another has ended, while the rest is running, starts from zeros: in a row, and in a
    place, that hold what the other has left, or NaN. Its prefill leaves the running requests' states alone."""
    spec = deep_step(memory)
    before, after = (weights(deep_params(), oracle, prompts, SCRIPT) for prompts in (PROMPTS, NEXT))
    state, _ = spec.prefill(before, initial(spec, PROMPTS, max_new_tokens=[NEW, 5, NEW]))
    place = state_places(state)[2]
    while jaxspec.requests_of(state).status[2] == RUNNING:
        state, _ = spec(before, state)
    assert token_ids(state, PROMPTS)[1] == oracle(PROMPTS[1], 5)
    assert running_rows(state).tolist() == [1, 3]

    states = read_states(state)
    state = request_arrives(state, 2, NEXT[1])
    state, status = spec.prefill(after, poison(state) if spoiled else state)
    assert status == 0 and state_places(state)[2] == place
    check_states(oracle, NEXT)(state)
    for which, parts in states.items():
        jax.tree.map(np.testing.assert_array_equal, read_states(state)[which], parts)
    requests = jaxspec.requests_of(state)
    state = state.with_(requests=requests.replace(max_new_tokens=requests.max_new_tokens.at[2].set(NEW)))
    state = run_on(spec, after, state, watch=check_states(oracle, NEXT))
    assert token_ids(state, NEXT) == [oracle(ids) for ids in NEXT]


@pytest.mark.parametrize("memory", MEMORIES)
def test_padded_lanes_share_the_sink_and_change_nothing(oracle, scripted, plain, memory):
    """Two lanes of three are padding in prefill and in every round, and their states are NaN. No state but the
    request's and the sink is ever written."""
    spec = deep_step(memory)

    def others(state):
        """What lies in the other places for states."""
        if memory == "static":
            return [part[2:] for buffer in state.cache.buffers if isinstance(buffer, tuple) for part in buffer]
        layout, pages = state.cache.layout, state.pages
        entries = np.asarray(state.cache.buffer).reshape(-1)[
            : layout.num_pages("state") * layout.page_units("state") * layout.unit
        ]
        first = layout.min_page("state")
        free = {*range(first, first + int(pages.span[-1]))} - {*state_places(state).values()}
        assert len(free) > 1
        return [entries.reshape(layout.num_pages("state"), -1)[page] for page in free]

    state, _ = spec.prefill(scripted, poison(initial(spec, PROMPTS[:1], seed=1)))
    for _ in range(6):
        assert all(np.isnan(array).all() for array in others(state))
        state, _ = spec(scripted, state)
        check_states(oracle, PROMPTS[:1])(state)
    state = run_on(spec, scripted, state)
    assert token_ids(state, PROMPTS[:1]) == plain[:1]


# Memory that is nobody's, and memory that moves


@pytest.mark.parametrize(("memory", "seed"), [("static", None), ("unified", None), ("unified", 5)])
def test_nothing_but_live_rows_and_states_is_read(scripted, plain, memory, seed):
    """NaN in all the rest before prefill and before each round."""
    spec = deep_step(memory)
    calm = run_by_rounds(spec, scripted, initial(spec, PROMPTS))
    state = run_by_rounds(spec, scripted, initial(spec, PROMPTS, seed=seed), meddle=poison)
    assert token_ids(state, PROMPTS) == plain
    assert read_requests(state, PROMPTS) == read_requests(calm, PROMPTS)


@pytest.mark.parametrize("memory", MEMORIES)
def test_poison_in_a_live_state_would_be_seen(scripted, plain, memory):
    spec = deep_step(memory)
    state, _ = spec.prefill(scripted, initial(spec, PROMPTS))
    state = run_on(spec, scripted, with_cell_of_a_state(state, np.nan))
    got = token_ids(state, PROMPTS)
    assert got[0] != plain[0] and got[1:] == plain[1:]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_pages_and_states_may_move_between_rounds(oracle, scripted, plain, seed):
    spec, rng, moved = deep_step("unified"), np.random.default_rng(0), []
    calm = run_by_rounds(spec, scripted, initial(spec, PROMPTS))

    def meddle(state):
        after = move_pages(state, rng)
        moved.append(state_places(after) != state_places(state))
        return after

    watch = check_states(oracle, PROMPTS)
    state = run_by_rounds(spec, scripted, initial(spec, PROMPTS, seed=seed), meddle=meddle, watch=watch)
    assert token_ids(state, PROMPTS) == plain
    assert read_requests(state, PROMPTS) == read_requests(calm, PROMPTS)
    assert sum(moved) > 5


# One program


@pytest.mark.parametrize("memory", MEMORIES)
def test_one_program(oracle, memory):
    """Other lengths, other numbers of requests, other scripts, other places: nothing is traced again, nothing crosses
    from the host."""
    spec, rng = deep_step(memory), np.random.default_rng(3)
    params = weights(deep_params(), oracle, PROMPTS, SCRIPT)
    state, _ = spec.prefill(params, initial(spec, PROMPTS))
    state, _ = spec(params, state)
    calls = len(hybrid_cases.CALLS)
    for turn in range(5):
        prompts = PROMPTS[turn % BATCH :]
        params = weights(deep_params(), oracle, prompts, scripts(D - 1, BATCH + turn)[turn:])
        state, _ = spec.prefill(params, initial(spec, prompts, seed=turn))
        for _ in range(turn):
            state, _ = spec(params, state)
        if memory == "unified":
            state = move_pages(state, rng)
        with jax.transfer_guard("disallow"):
            state, _ = spec(params, state)
            jax.block_until_ready(state)
        assert token_ids(run_on(spec, params, state), prompts) == [oracle(ids) for ids in prompts]
    assert len(hybrid_cases.CALLS) == calls


# Marks on ids


@pytest.mark.parametrize("memory", MEMORIES)
def test_ids_of_states_have_a_space_of_their_own(scripted, memory):
    spec = deep_step(memory)
    assert spec.config.check_ids
    state, plan = jax.eval_shape(lambda: jaxspec.prepare(spec, initial(spec, PROMPTS)))
    assert plan.metadata.state_slots.space == "state"
    state, drafts = jax.eval_shape(lambda *rest: jaxspec.draft(spec, *rest), scripted, state, plan)
    for space in ("virtual", "full", "swa"):
        wrong = plan.metadata.replace(state_slots=Ids(plan.metadata.state_slots.value, space))
        with pytest.raises(TypeError, match=f"ids are '{space}' where 'state' ones are needed"):
            jax.eval_shape(
                lambda *rest: jaxspec.verify(spec, *rest), scripted, state, plan.replace(metadata=wrong), drafts
            )

"""Which drafts are kept, and where a run ends: recorded cases and plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.verification import end_run, greedy_accept, greedy_token
from jaxspec.verification.stopping import INVALID, UNFINISHED
from jaxspec.verification.stopping import STOP as STOPPED

STOP, VOCAB = 99, 100
BIT = st.integers(0, 1)


def accept(drafts, num_drafts, targets):
    return np.asarray(greedy_accept(*(jnp.asarray(x, jnp.int32) for x in (drafts, num_drafts, targets)))).tolist()


def trim(run, count, budget, stops=(STOP,)):
    """One request through a batch of one, as (kept tokens, stopped)."""
    ending = end_run(
        jnp.asarray([run], jnp.int32),
        jnp.asarray([count]),
        jnp.asarray([stops], jnp.int32),
        jnp.asarray([budget]),
        vocab_size=VOCAB,
    )
    assert ending.keep.dtype == ending.reason.dtype == ending.tokens.dtype == jnp.int32
    assert ending.reason[0] in (UNFINISHED, STOPPED) and ending.state is None
    assert ending.tokens.tolist() == [list(run)]
    return run[: int(ending.keep[0])], bool(ending.reason[0] == STOPPED)


def test_ragged_bonus():
    """Two requests in a batch padded to 4: the first loses both drafts, the second keeps both and gets its bonus."""
    drafts = [[1, 4], [5, 6], [0, 0], [0, 0]]
    targets = np.array([[3, 4, 8], [5, 6, 9], [0, 0, 0], [0, 0, 0]])
    accepted = accept(drafts, [2, 2, 0, 0], targets)
    assert accepted == [0, 2, 0, 0]
    assert [targets[b, : accepted[b] + 1].tolist() for b in (0, 1)] == [[3], [5, 6, 9]]


def test_a_draft_after_a_rejected_one_is_never_kept():
    assert accept([[1, 2, 3]], [3], [[9, 2, 3, 4]]) == [0]
    assert accept([[1, 2, 3]], [3], [[1, 9, 3, 4]]) == [1]


def test_drafts_that_were_not_proposed_are_never_kept():
    """Their cells hold 0, which a target may well say."""
    assert accept([[0, 0, 0]] * 4, [0, 1, 2, 3], [[0, 0, 0, 0]] * 4) == [0, 1, 2, 3]


def test_no_drafts_at_all():
    assert accept(np.zeros((2, 0)), [0, 0], [[4], [5]]) == [0, 0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 1)] * 3, st.integers(0, 3), *[st.integers(0, 1)] * 4), min_size=4, max_size=4)
)
def test_accept_equals_a_loop(rows):
    want = []
    for *drafts, count, t0, t1, t2, _ in rows:
        kept = 0
        while kept < count and drafts[kept] == (t0, t1, t2)[kept]:
            kept += 1
        want.append(kept)
    assert accept([r[:3] for r in rows], [r[3] for r in rows], [r[4:] for r in rows]) == want


def test_lowest_id_wins_a_tie():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -1.0, -1.0]])
    tokens = greedy_token(logits)
    assert tokens.tolist() == [1, 0, 2]
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("run", "budget", "kept", "stopped"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, [10, 11, STOP], True),
        ([10, 11, STOP, 20], 2, [10, 11], False),  # the stop id lies beyond the budget
        ([10, 11, 12, 13], 0, [], False),
        ([STOP, 11, 12, 13], 0, [], False),
        ([10, 11, 12, 13], -3, [], False),
        ([10, STOP, 12], 2, [10, STOP], True),  # the last token that fits: a stop, not the limit
        ([10, 11, STOP], 2, [10, 11], False),  # one too late: the limit, not a stop
        ([STOP, 11, 12], 9, [STOP], True),
        ([10, 11, STOP], 9, [10, 11, STOP], True),
        ([10, STOP, STOP], 9, [10, STOP], True),
        ([10, 11, 12], 3, [10, 11, 12], False),
        ([10, 11, 12], 2, [10, 11], False),
    ],
)
def test_runs_end(run, budget, kept, stopped):
    assert trim(run, len(run), budget) == (kept, stopped)


def test_tokens_past_the_count_do_not_stop():
    assert trim([10, 11, STOP, STOP], 2, 9) == ([10, 11], False)
    assert trim([10, 11, STOP, STOP], 3, 9) == ([10, 11, STOP], True)
    assert trim([STOP, STOP], 0, 9) == ([], False)


def test_earliest_of_several_stop_ids():
    assert trim([10, 7, 99, 8], 4, 9, stops=(99, 7, -1)) == ([10, 7], True)


def test_unused_places_stop_nothing():
    assert trim([0, 1, 2], 3, 9, stops=(-1, -1)) == ([0, 1, 2], False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(0, 5), st.integers(-1, 7)),
        min_size=3,
        max_size=3,
    ),
    st.lists(st.integers(-1, 4), min_size=2, max_size=2),
)
def test_trim_equals_a_loop(requests, stops):
    runs, counts, budgets = zip(*requests, strict=True)
    ending = end_run(*(jnp.asarray(x, jnp.int32) for x in (runs, counts, [stops] * 3, budgets)), vocab_size=VOCAB)
    for b, (run, count, budget) in enumerate(requests):
        kept, hit = 0, False
        while kept < min(count, budget) and not hit:
            hit = run[kept] in stops and run[kept] >= 0
            kept += 1
        assert (int(ending.keep[b]), bool(ending.reason[b] == STOPPED)) == (kept, hit)


@pytest.mark.parametrize("bad", [-1, VOCAB, -(2**31), 2**31 - 1])
def test_an_id_outside_the_vocabulary_ends_the_run_as_a_stop_id(bad):
    """The first stop id takes its place, 0 where a request has none; behind a stop and beyond the budget it is
    nothing."""
    run = [[10, bad, 12, 13]] * 5 + [[bad, STOP, bad, bad]]
    ending = end_run(
        jnp.asarray([*run, [10, STOP, bad, 11]], jnp.int32),
        jnp.array([4, 4, 1, 4, 4, 4, 4]),
        jnp.array([[STOP, 7], [-1, -1], [STOP, 7], [STOP, 7], [STOP, 7], [7, 8], [STOP, -1]]),
        jnp.array([9, 9, 9, 1, 2, 9, 9]),
        vocab_size=VOCAB,
    )
    kept = [row[:keep] for row, keep in zip(ending.tokens.tolist(), ending.keep.tolist(), strict=True)]
    assert kept == [[10, STOP], [10, 0], [10], [10], [10, STOP], [7], [10, STOP]]
    wrong, going = INVALID, UNFINISHED
    assert ending.reason.tolist() == [wrong, wrong, going, going, wrong, wrong, STOPPED]
    assert ((ending.tokens >= 0) & (ending.tokens < VOCAB)).all()

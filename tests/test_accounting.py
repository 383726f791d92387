"""What a round keeps of a run, and what is counted of it: commits of planted verdicts against a loop over tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stops import SPECIAL, TOKENIZER
from tiny_models import CONTEXT, FULL_TARGET, VOCAB, make_step, prompt

import jaxspec
from jaxspec.drafting import Drafts
from jaxspec.generation.accounting import Acceptance
from jaxspec.generation.results import read_requests
from jaxspec.steps.round import Verdict
from jaxspec.steps.state import RUNNING, WAITING

B, D, NEW = 3, 4, 24


@functools.cache
def step(**changes):
    """Three lanes; rounds are planted, so no model runs."""
    spec, _ = make_step("plain", target=FULL_TARGET, batch=B, D=D, new=NEW, logprobs=True, **changes)
    return spec


@functools.partial(jax.jit, static_argnums=0)
def planted_round(spec, state, targets, accepted, logits):
    """A round in which the target said `targets`, all drafts were proposed and `accepted` of them were kept."""
    state, plan = jaxspec.prepare(spec, state)
    count = jnp.where(plan.req_rows > 0, D - 1, 0)
    drafts = Drafts(tokens=jnp.maximum(targets[:, :-1], 0), count=count)
    state, output = jaxspec.commit(spec, state, plan, drafts, Verdict(targets, accepted, logits=logits))
    return state, output, plan


@functools.partial(jax.jit, static_argnums=0)
def behind_prefill(spec, state, firsts):
    """The state after a prefill that said `firsts`, int32[R]."""
    requests = jaxspec.requests_of(state)
    present, end = requests.status == WAITING, requests.prompt_len
    pages, cache, _ = state.pages.allocate(
        state.cache, jnp.where(present, jnp.arange(B + 1), 0)[1:], end[1:], max_new=spec.config.pages_per_row
    )
    return state.with_(
        requests=requests.replace(
            status=jnp.where(present, RUNNING, requests.status),
            seq_len=jnp.where(present, end, 0),
            num_output=present.astype(jnp.int32),
        ),
        tokens=state.tokens.at[jnp.arange(B + 1), end].set(firsts),
        pages=pages,
        cache=cache,
    )


def running(spec, prompts, firsts, **settings):
    state = jaxspec.init_state(spec.target, None, spec.config, prompts, **settings)
    return behind_prefill(spec, state, np.asarray([0, *firsts, *[0] * (B - len(firsts))], np.int32))


class Book:
    """A request token by token: why it ends, and what its rounds come to."""

    def __init__(self, ids, first, limit, stop_ids, strings):
        self.prompt, self.tokens, self.limit, self.stop_ids, self.strings = len(ids), [first], limit, stop_ids, strings
        self.emitted, self.accepted, self.reason = [], [], None

    def round(self, run):
        before = len(self.tokens)
        for token in run:
            if self.reason is None:
                self._say(token)
        self.emitted.append(len(self.tokens) - before)
        self.accepted.append(len(run) - 1)

    def _say(self, token):
        valid = 0 <= token < VOCAB
        self.tokens.append(token if valid else [*self.stop_ids, 0][0])
        # What is found is in the run of this completion; its first token, which prefill said, is not part of the test.
        text = TOKENIZER.decode(self.tokens[1:], skip_special_tokens=True)
        if not valid:
            self.reason = "invalid_token"
        elif any(string in text for string in self.strings):
            self.reason = "stop_string"
        elif token in self.stop_ids:
            self.reason = "stop"
        elif len(self.tokens) == self.limit:
            self.reason = "length"
        elif self.prompt + len(self.tokens) == CONTEXT:
            self.reason = "context"


TOKEN = st.integers(-1, 16).map(lambda i: VOCAB + 5 if i == 16 else i)  # mostly ids with a text
SAID = st.lists(
    st.tuples(st.lists(st.one_of(TOKEN, st.integers(1, 15)), min_size=D, max_size=D), st.integers(0, D - 1)),
    min_size=NEW,
    max_size=NEW,
)


@settings(max_examples=10, deadline=None)
@given(
    said=st.tuples(SAID, SAID),
    lengths=st.tuples(st.integers(1, 30), st.integers(CONTEXT - 9, CONTEXT - 2)),
    limits=st.tuples(st.integers(2, NEW), st.integers(2, NEW)),
    stop_ids=st.lists(st.integers(0, 20), max_size=2, unique=True),
    strings=st.lists(st.text("abc\n", min_size=1, max_size=3), max_size=2),
)
def test_rounds_are_what_a_loop_over_tokens_makes_of_them(said, lengths, limits, stop_ids, strings):
    """Order of the reasons, earliest token, one length for ids, log-probabilities and counts; the third lane is
    padding. Sums of what was accepted: 1 + sum(accepted + 1) is what was emitted and what was trimmed."""
    spec, prompts = step(), [prompt(n) for n in lengths]
    stops = jaxspec.StopStrings(TOKENIZER, [strings, ["aab"]])
    state = running(spec, prompts, [5, 6], max_new_tokens=limits, stop_ids=stop_ids, stop_strings=stops)
    books = [Book(*b, stop_ids, s) for b, s in zip(zip(prompts, (5, 6), limits), (strings, ["aab"]))]  # noqa: B905
    logits = jax.random.normal(jax.random.key(0), (B, D, VOCAB))
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    wanted_logs = [[0.0], [0.0]]
    for turn in range(NEW):
        targets = np.asarray([said[0][turn][0], said[1][turn][0], [1, 2, 3, 4]], np.int32)
        accepted = np.asarray([said[0][turn][1], said[1][turn][1], 2], np.int32)
        going = [book.reason is None for book in books]
        if not any(going):
            break
        for lane in np.flatnonzero(going):
            book = books[lane]
            book.round(targets[lane, : accepted[lane] + 1].tolist())
            kept = book.tokens[-book.emitted[-1] :]
            wanted_logs[lane] += log_probs[lane, range(len(kept)), kept].tolist()
        state, output, plan = planted_round(spec, state, targets, accepted, logits)
        assert output.num_tokens.tolist() == [b.emitted[-1] if g else 0 for b, g in zip(books, going, strict=True)] + [
            0
        ]
        assert bool(output.unfinished) == any(book.reason is None for book in books)
        assert plan.seq_lens[2] == 0

    assert all(book.reason for book in books)
    results = read_requests(state, prompts, stop_strings=stops)
    requests = jax.device_get(jaxspec.requests_of(state))
    for lane, (book, result) in enumerate(zip(books, results, strict=True)):
        count = len(book.tokens)
        assert (result.token_ids, result.finish_reason) == (book.tokens, book.reason)
        assert (result.accept_lengths, result.accepted_drafts) == (book.emitted, book.accepted)
        assert result.verify_count == len(book.emitted)
        assert (result.stop_string is not None) == (book.reason == "stop_string")
        np.testing.assert_allclose(result.logprobs, wanted_logs[lane], atol=1e-5)
        assert not np.asarray(state.logprobs[lane + 1, book.prompt + count :]).any()
        acceptance = result.acceptance(D)
        assert 1 + sum(a + 1 for a in book.accepted) == count + acceptance.trimmed_tokens
        assert requests.seq_len[lane + 1] == book.prompt + sum(book.emitted) == book.prompt + count - 1
    assert (requests.seq_len[3], requests.num_output[3], requests.verify_count[3]) == (0, 0, 0)
    assert not state.pages.num_pages.any()


@pytest.mark.parametrize(
    ("run", "left", "want"),
    [
        ([10, 11, SPECIAL, 20], 5, [10, 11, SPECIAL]),
        ([10, 11, SPECIAL, 20], 2, [10, 11]),
        ([10, 11, SPECIAL, 20], 3, [10, 11, SPECIAL]),
        ([10, 11, 12, 13], 1, [10]),
    ],
)
def test_text_behind_a_stop_and_beyond_the_limit_is_gone(run, left, want):
    """A run that holds a stop id, with so many tokens left."""
    spec, ids = step(), prompt(9)
    state = running(spec, [ids], [5], max_new_tokens=1 + left, stop_ids=[SPECIAL])
    targets = np.asarray([run] * B, np.int32)
    state, output, _ = planted_round(spec, state, targets, np.full(B, D - 1, np.int32), jnp.zeros((B, D, VOCAB)))
    assert output.tokens[0, : int(output.num_tokens[0])].tolist() == want
    result = read_requests(state, [ids])[0]
    assert result.token_ids == [5, *want]
    assert result.finish_reason == ("stop" if want[-1] == SPECIAL else "length")
    acceptance = result.acceptance(D)
    assert (acceptance.completion_tokens, acceptance.accepted_drafts) == (1 + len(want), min(len(want), D - 1))
    assert acceptance.trimmed_tokens == D - len(want)


def test_one_token_below_the_context_limit_one_token_commits():
    """Limit 2048, 2047 tokens held and a run of four: one token is emitted, and no row past the end has a place."""
    target = dataclasses.replace(FULL_TARGET, context_len=2048)
    config = dataclasses.replace(step().config, context_len=2048, page_size=64)
    spec = jaxspec.make_spec_step(target, None, config)
    ids = [1] * 2046
    state = running(spec, [ids], [5])
    targets = np.asarray([[7, 8, 9, 10]] * B, np.int32)
    state, output, plan = planted_round(spec, state, targets, np.full(B, D - 1, np.int32), jnp.zeros((B, D, VOCAB)))
    assert plan.metadata.window.full_loc[0].tolist()[2:] == [0, 0]
    assert output.num_tokens.tolist() == [1, 0, 0] and output.finish_reason[0] == 3
    assert read_requests(state, [ids])[0].token_ids == [5, 7]
    assert jaxspec.requests_of(state).seq_len.tolist() == [0, 2047, 0, 0]


@pytest.mark.parametrize("lengths", [(10, 11), (1, 1), (10,)])
def test_sums_of_lengths_do_not_see_padding(lengths):
    """Lengths [10, 11] in a padded batch: the sum of lengths is 21, and that of the metadata is the sum of its own
    column, whatever the third lane is filled with."""
    spec = step()
    state = running(spec, [prompt(n) for n in lengths], [5] * len(lengths))
    _, plan = jax.jit(jaxspec.prepare, static_argnums=0)(spec, state)
    assert int(plan.seq_lens.sum()) == sum(lengths)
    assert plan.metadata.cache_seqlens[: len(lengths)].tolist() == [n + D for n in lengths]
    assert int(plan.metadata.cu_seqlens_k[-1]) == int(plan.metadata.cache_seqlens.sum())


# The figures


@dataclasses.dataclass
class Rounds:
    """What `Acceptance.of` reads of a result."""

    token_ids: list
    accepted_drafts: list
    accept_lengths: list

    @property
    def verify_count(self):
        return len(self.accept_lengths)


def rounds_of(*pairs, first=1):
    """A request whose rounds accepted and emitted so many."""
    return Rounds([0] * (first + sum(e for _, e in pairs)), [a for a, _ in pairs], [e for _, e in pairs])


def test_the_worked_example():
    acceptance = Acceptance.of([rounds_of((3, 4), (3, 2))], 4)
    assert acceptance.to_json() == {
        "accept_length": 3.5,
        "accept_length_without_bonus": 2.5,
        "accept_rate": 5 / 6,
        "acceptance_per_position": [1, 1, 0.5],
        "acceptance_per_position_conditional": [1, 1, 0.5],
        "accepted_drafts_histogram": [0, 0, 1, 1],
        "trimmed_tokens": 2,
    }


def test_figures_of_many_requests_are_sums_over_sums():
    """Not means of means; and rounds without any draft leave positions behind them undefined."""
    requests = [rounds_of((0, 1)), rounds_of((2, 3), (1, 2), (0, 1))]
    assert Acceptance.of(requests, 3).accept_length == (2 + 7) / 4
    together = Acceptance.of(requests, 3)
    assert together.per_position == [0.5, 0.25]
    assert together.per_position_conditional == [0.5, 0.5]
    assert Acceptance.of(requests[:1], 3).per_position_conditional == [0, None]
    assert together.accept_rate == 3 / 8
    assert together.accept_length_without_bonus == 3 / 4


def test_nothing_to_count():
    """No round, and rounds without drafts."""
    none = Acceptance.of([rounds_of()], 4)
    assert (none.accept_length, none.accept_rate, none.accept_length_without_bonus) == (None, None, None)
    assert (none.per_position, none.per_position_conditional) == ([0, 0, 0], [None, None, None])
    plain = Acceptance.of([rounds_of((0, 1), (0, 1))], 1)
    assert (plain.accept_length, plain.accept_rate, plain.per_position, plain.histogram) == (1.5, None, [], (2,))
    assert Acceptance.of([], 4).accept_length is None


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda p: (p[0], min(p[1], p[0] + 1))), max_size=6
        ),
        min_size=1,
        max_size=4,
    )
)
def test_figures_by_counting_tokens(requests):
    """Every emitted token is the first, a draft at a position, or a bonus token."""
    positions, bonus, rounds = [0] * 5, 0, 0
    for pairs in requests:
        for accepted, emitted in pairs:
            rounds += 1
            for j in range(1, emitted + 1):
                if j <= accepted:
                    positions[j] += 1
                else:
                    bonus += 1
    acceptance = Acceptance.of([rounds_of(*pairs) for pairs in requests], 4)
    assert acceptance.completion_tokens == len(requests) + sum(positions) + bonus
    assert acceptance.accepted_drafts == sum(positions)
    assert sum(acceptance.histogram) == acceptance.verify_count == rounds
    if rounds:
        assert acceptance.accept_length == acceptance.completion_tokens / rounds
        assert acceptance.accept_length_without_bonus == sum(positions) / rounds
        assert acceptance.accept_rate == sum(positions) / (rounds * 3)
        assert acceptance.per_position == [positions[j] / rounds for j in (1, 2, 3)]
        shares = [positions[j] / before if (before := [rounds, *positions[1:]][j - 1]) else None for j in (1, 2, 3)]
        assert acceptance.per_position_conditional == shares

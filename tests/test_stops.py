"""Stop strings: found on the device wherever the tokens break, told apart, and everything that belongs to a run is cut.

The oracle decodes text with the tokenizers package and looks for strings in it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TARGET, VOCAB, drafter_and_params, make_step, prompt

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.steps.round import run_round
from jaxspec.steps.state import FINISHED
from jaxspec.steps.step import jit_with_state
from jaxspec.verification import end_run
from jaxspec.verification import stop_strings as building
from jaxspec.verification.stopping import STOP, STOP_STRING, UNFINISHED

B, D, NEW = 3, 4, 40
SPECIAL = 0


def spelled(text):
    """A text in the letters of byte-level vocabularies, one a byte."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def tokenizer_of(tokens, added=()):
    """A byte-level tokenizer with these tokens, spelled, as ids 1, 2, .., and a special token as id 0."""
    vocabulary = {"<end>": SPECIAL, **{token: i for i, token in enumerate(tokens, start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(list(added))
    return tokenizer


# Tokens of one letter and of several, and parts of characters of 2, 3 and 4 bytes.
_WIDE = [spelled(c) for c in "é汉🙂"]
_PARTS = [w[:i] for w in _WIDE for i in range(1, len(w) + 1)] + [w[i:] for w in _WIDE for i in range(1, len(w))]
_WORDS = ["a", "b", "c", "ab", "ba", "aab", "abc", " ", "\n", "\n\n", "b\n", " a", "é a"]
_FIRST = list(dict.fromkeys([*map(spelled, _WORDS), *_PARTS]))
TOKENS = [*_FIRST, *(f"x{i:02}" for i in range(VOCAB - 1 - len(_FIRST)))]
TOKENIZER = tokenizer_of(TOKENS)
LIVELY = st.sampled_from(range(len(_FIRST) + 1))  # ids of all tokens but the fillers


def ids_of(*tokens):
    return [1 + TOKENS.index(token) for token in tokens]


def oracle(tokenizer, ids, strings):
    """(tokens that are kept, string that ends them); None if no string does."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        ends = [(text.index(s) + len(s), -len(s), s) for s in strings if s in text]
        if ends:
            return count, min(ends)[2]
    return len(ids), None


@functools.partial(jax.jit, static_argnums=3)
def cut(matcher, run, count, vocab_size, stop_id=-1, budget=NEW):
    stop_ids, budget = jnp.full((B, 1), stop_id), jnp.full(B, budget)
    return end_run(run, count, stop_ids, budget, vocab_size=vocab_size, stops=matcher)


def decoded_in_runs(stops, ids, lengths=(D,), lane=0, vocab_size=VOCAB):
    """(tokens kept, string that ends them) of a request that gets its ids in runs of these lengths, over and over,
    beside lanes that take no part."""
    matcher = stops.matcher(B, B + 1, vocab_size)
    matcher = matcher.replace(state=matcher.state[1:])
    before, kept, turn = np.asarray(matcher.state), 0, 0
    while kept < len(ids):
        part = ids[kept : kept + lengths[turn % len(lengths)]]
        run, count = np.zeros((B, D), np.int32), np.zeros(B, np.int32)
        run[lane, : len(part)], count[lane] = part, len(part)
        ending = cut(matcher, run, count, vocab_size)
        assert np.delete(ending.keep, lane).tolist() == [0] * (B - 1)
        assert np.delete(ending.state, lane).tolist() == np.delete(before, lane).tolist()
        kept, turn = kept + int(ending.keep[lane]), turn + 1
        matcher = matcher.replace(state=ending.state)
        if ending.reason[lane] != UNFINISHED:
            assert ending.reason[lane] == STOP_STRING
            return kept, stops.found(int(ending.state[lane]))
    assert stops.found(int(matcher.state[lane])) is None
    return kept, None


HAN, SMILE = _WIDE[1:]


@pytest.mark.parametrize(
    ("tokens", "strings", "want"),
    [
        (["c", "abc", "c"], ["b"], (2, "b")),  # inside one token
        (["c", "aab", "ba"], ["abba"], (3, "abba")),  # across two, and begun inside one
        (["aab", "c", "ab", "c"], ["bcab"], (3, "bcab")),  # across three
        (["a", "a", "b", "c"], ["ab"], (3, "ab")),  # a false start
        (["a", "ab", "ab", "a", "c"], ["ababa", "bac"], (4, "ababa")),  # two that overlap
        (["ab", "abc"], ["abc", "bab"], (2, "bab")),  # both within one token: the one that ends first
        (["b", "abc"], ["c", "abc", "bc"], (2, "abc")),  # they end together: the longest
        (["abc", "ab"], ["abc", "ab"], (1, "ab")),  # one begins with the other
        (["aab", "a", "b"], ["aabb", "abab", "b"], (1, "b")),  # a string inside the one that is being read
        (["aab", "a", "b"], ["aabb", "abab"], (3, "abab")),  # what fails leaves its suffix
        ([spelled("\n"), spelled("\n")], ["\n\n"], (2, "\n\n")),
        ([spelled("\n\n")], ["\n"], (1, "\n")),
        ([HAN[:1], HAN[1:]], ["汉"], (2, "汉")),  # a character in two tokens
        ([SMILE[:2], "a", SMILE[:2], SMILE[2:], "a"], ["🙂a"], (5, "🙂a")),  # bytes that never become a character
        ([HAN[:1], HAN[1:2] + HAN[2:]], ["汉", "字"], (2, "汉")),
        ([spelled("é a")], ["é"], (1, "é")),
        (["<end>", "a", "<end>", "b"], ["ab"], (4, "ab")),  # special tokens have no text
        (["a", "b"], ["abc"], (2, None)),
        (["x00", "x01"], ["x01x"], (2, None)),
        ([], ["a"], (0, None)),
    ],
)
@pytest.mark.parametrize("lengths", [(1,), (D,)], ids=["plain", "runs"])
def test_strings_are_found_wherever_the_tokens_break(tokens, strings, want, lengths):
    ids = [SPECIAL if token == "<end>" else ids_of(token)[0] for token in tokens]
    assert oracle(TOKENIZER, ids, strings) == want
    assert decoded_in_runs(jaxspec.StopStrings(TOKENIZER, strings), ids, lengths) == want


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(LIVELY, max_size=14),
    strings=st.lists(st.text("abcé汉🙂\n ", min_size=1, max_size=4), min_size=1, max_size=4),
    place=st.tuples(st.integers(0, 13), st.integers(1, 6)),
    lengths=st.lists(st.integers(1, D), min_size=1, max_size=3),
    lane=st.integers(0, B - 1),
)
def test_any_strings_in_any_runs(ids, strings, place, lengths, lane):
    text = TOKENIZER.decode(ids).replace("\ufffd", "")
    strings += [text[place[0] : sum(place)]] if text[place[0] :] else []  # one that is often there
    want = oracle(TOKENIZER, ids, strings)
    assert decoded_in_runs(jaxspec.StopStrings(TOKENIZER, strings), ids, lengths, lane) == want


def test_texts_of_an_embedded_model():
    target, rng = jaxspec.load_model("target"), np.random.default_rng(0)
    text = "import os\n\n\ndef main(naïve='汉字 🙂'):\n    return [é for é in range(1)]\n"
    ids = target.encode(text)
    assert target.decode(ids) == text
    for _ in range(8):
        start = int(rng.integers(len(text) - 4))
        string = text[start : start + int(rng.integers(1, 9))]
        stops = jaxspec.StopStrings(target.tokenizer, [string, "nowhere"])
        want = oracle(target.tokenizer, ids, [string])
        assert decoded_in_runs(stops, ids, vocab_size=target.config.vocab_size) == want


def test_bytes_of_a_vocabulary_are_those_that_the_tokenizer_decodes():
    added = ["<think>", "two words", "汉 x", "<|é|>", "ü"]
    tokenizer = tokenizer_of(TOKENS, added)
    tokens = building._token_bytes(tokenizer)
    texts = {i: b"" for i in range(len(tokens.order))}
    for column in tokens.columns:
        for i, byte in zip(tokens.order, column, strict=False):
            texts[int(i)] += bytes([byte])
    assert len(texts) == VOCAB + len(added) + 1
    for i, text in texts.items():
        assert text.decode(errors="replace") == tokenizer.decode([i], skip_special_tokens=True), i
    for word in added[:3]:  # the others hold letters of the vocabulary's own alphabet, which stand for bytes
        assert decoded_in_runs(
            jaxspec.StopStrings(tokenizer, [word]), [1, tokenizer.token_to_id(word)], vocab_size=VOCAB + 9
        ) == (2, word)


def test_requests_look_for_their_own_strings():
    """The same ids in all lanes; a set may be empty, and two prompts may share one."""
    ids = ids_of("a", "b", "c", "ab")
    stops = jaxspec.StopStrings(TOKENIZER, [["bc", "zz"], [], ["ba", "ab"]])
    assert stops.strings == ("bc", "zz", "ba", "ab")
    assert [decoded_in_runs(stops, ids, (3,), lane) for lane in range(B)] == [(3, "bc"), (4, None), (2, "ab")]
    assert set(jaxspec.StopStrings(TOKENIZER, [["a", "b"], ["c"], ["b", "a"]])._starts) == {1, 2}


def test_other_strings_of_the_same_size_run_in_the_same_program():
    cut.clear_cache()
    for strings in (["ab"], ["abc", "\n\n", "汉"], [["a"], [], ["bcd"]]):
        decoded_in_runs(jaxspec.StopStrings(TOKENIZER, strings), ids_of("c", "a"))
    assert cut._cache_size() == 1


@pytest.mark.parametrize(
    ("stop_id", "budget", "want"),
    [
        ("x09", 3, (3, STOP_STRING)),  # the last token that fits
        ("b", 9, (3, STOP_STRING)),  # a stop id at the same token
        ("a", 9, (2, STOP)),
        ("x01", 9, (3, STOP_STRING)),
        ("x09", 2, (2, UNFINISHED)),  # one token too late
        ("x09", 0, (0, UNFINISHED)),
        ("x00", 0, (0, UNFINISHED)),
    ],
)
def test_a_stop_string_comes_before_a_stop_id_and_both_before_the_limit(stop_id, budget, want):
    """At the same token; at different ones the earlier counts."""
    matcher = jaxspec.StopStrings(TOKENIZER, "ab").matcher(B, B + 1, VOCAB)
    matcher = matcher.replace(state=matcher.state[1:])
    run = np.tile(np.asarray(ids_of("x00", "a", "b", "x01"), np.int32), (B, 1))
    ending = cut(matcher, run, np.full(B, D, np.int32), VOCAB, ids_of(stop_id)[0], budget)
    assert list(zip(ending.keep.tolist(), ending.reason.tolist(), strict=True)) == [want] * B
    if not budget:
        assert ending.state.tolist() == matcher.state.tolist()


@pytest.mark.parametrize(
    ("strings", "words"),
    [
        ([""], "a stop string is empty"),
        (["a", 3], "stop string 3 is a int"),
        ([["a"], [3]], "stop string 3 is a int"),
        (["a\ud800"], "half a character"),
        (["<end>"], "is a special token, which has no text: stop at its id 0"),
        (["ab" * 1024], "stop strings of 2049 bytes .*at most 2048"),
        ([["a" * 1000], ["a" * 1000 + "b"], ["c" * 60]], "stop strings of 2062 bytes"),
    ],
)
def test_strings_that_cannot_be(strings, words):
    with pytest.raises(jaxspec.InputError, match=words):
        jaxspec.StopStrings(TOKENIZER, strings)


def test_a_table_that_would_be_too_large(monkeypatch):
    monkeypatch.setattr(building, "_MOST_CELLS", 1000)
    with pytest.raises(jaxspec.InputError, match="16 states and 64 kinds of token, more than 1000 entries"):
        jaxspec.StopStrings(TOKENIZER, ["a"])


def test_tokenizers_that_do_not_fit():
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(jaxspec.InputError, match="need a byte-level tokenizer; this one decodes by None"):
        jaxspec.StopStrings(other, ["a"])
    other.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    with pytest.raises(jaxspec.InputError, match="this one decodes by ByteFallback, Fuse"):
        jaxspec.StopStrings(other, ["a"])
    with pytest.raises(jaxspec.InputError, match=f"tokenizer has {VOCAB} ids but the target 60"):
        jaxspec.StopStrings(TOKENIZER, ["a"]).matcher(1, 2, 60)
    with pytest.raises(jaxspec.InputError, match="stop strings for 2 prompts, but there are 3"):
        jaxspec.StopStrings(TOKENIZER, [["a"], ["b"]]).matcher(3, 4, VOCAB)


@pytest.mark.parametrize("x64", [False, True])
def test_types_do_not_depend_on_x64(x64):
    with jax.enable_x64(x64):
        matcher = jaxspec.StopStrings(TOKENIZER, "ab").matcher(B, B + 1, VOCAB)
        types = [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(matcher)]
        assert types == [(jnp.int32, False), (jnp.uint16, False), (jnp.int32, False)]
        run, count = np.zeros((B, D), np.int32), np.zeros(B, np.int32)
        ending = jax.eval_shape(lambda *a: cut(*a, VOCAB), matcher.replace(state=matcher.state[1:]), run, count)
        assert [leaf.dtype for leaf in ending] == [jnp.int32] * 4


# In the step


@pytest.fixture(scope="module")
def self_step():
    """Every draft is accepted: runs of 4 behind the first token. Log-probabilities are kept."""
    return make_step("self", batch=B, D=D, new=NEW, logprobs=True)


def run(step, prompts, stop_strings, **limits):
    """End state and results of a generation."""
    spec, params = step
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts, stop_strings=stop_strings, **limits)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    return state, read_requests(state, prompts, stop_strings=stop_strings)


def check_cut(state, results, prompts):
    """What is kept of a request has one length everywhere, and what was cut is nowhere."""
    requests = jax.device_get(jaxspec.requests_of(state))
    for row, (ids, result) in enumerate(zip(prompts, results, strict=True), start=1):
        count, rounds = len(result.token_ids), result.verify_count
        assert requests.num_output[row] == len(result.logprobs) == count
        assert requests.status[row] == FINISHED
        assert len(result.accept_lengths) == len(result.accepted_drafts) == rounds
        assert 1 + sum(result.accept_lengths) == count
        # Every emitted token but the newest is in the cache.
        assert requests.seq_len[row] == len(ids) + count - 1
        acceptance = result.acceptance(D)
        assert sum(a + 1 for a in result.accepted_drafts) + 1 == count + acceptance.trimmed_tokens
        assert not np.asarray(state.logprobs[row, len(ids) + count :]).any()
        assert not np.asarray(state.tokens[row, len(ids) + count :]).any()
    assert not state.pages.num_pages.any()


def test_a_generation_ends_at_a_string(self_step, greedy):
    """The string begins inside the first of up to three tokens and ends in the last: within runs, across them, and in
    the token that prefill gives."""
    ids, seen = prompt(16), set()
    text = greedy(ids, NEW)
    prompts = [ids, ids, prompt(21)]
    for first, span in [(i, n) for i in range(9) for n in (1, 2, 3)]:
        pieces = [TOKENIZER.decode([i]) for i in text[first : first + span]]
        string = "".join(pieces)[len(pieces[0]) // 2 :]
        if not all(pieces) or "\ufffd" in string:
            continue
        want = oracle(TOKENIZER, text, [string])
        seen.add((want[0], span))
        stops = jaxspec.StopStrings(TOKENIZER, [[string], [], ["nowhere"]])
        state, results = run(self_step, prompts, stops, max_new_tokens=[NEW, 9, 5])
        assert (results[0].token_ids, results[0].stop_string) == (text[: want[0]], want[1])
        assert [r.finish_reason for r in results] == ["stop_string", "length", "length"]
        assert [r.token_ids for r in results[1:]] == [text[:9], greedy(prompt(21), 5)]
        generation = jaxspec.Generation(results, D, seconds=1.0, dispatches=1)
        assert [r["stop_string"] for r in generation.to_json()["requests"]] == [want[1], None, None]
        check_cut(state, results, prompts)
    # In prefill's token, inside a run, at its end and in the next; over one, two and three tokens.
    assert {count for count, _ in seen} >= {1, 4, 5, 6} and {span for _, span in seen} == {1, 2, 3}


def test_strings_and_limits(self_step, greedy):
    """The token that completes a string is the last one that fits, or one too late."""
    ids = prompt(16)
    text = greedy(ids, NEW)
    at, string = next(
        oracle(TOKENIZER, text, [s]) for i in text[2:9] if (s := TOKENIZER.decode([i])) and "\ufffd" not in s
    )
    prompts = [ids] * 3
    stops = jaxspec.StopStrings(TOKENIZER, string)
    state, results = run(self_step, prompts, stops, max_new_tokens=[at, at - 1, at + 1])
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [
        (at, "stop_string"), (at - 1, "length"), (at, "stop_string"),
    ]  # fmt: skip
    check_cut(state, results, prompts)


def test_the_end_of_the_prompt_is_not_looked_at(self_step, greedy):
    """A string that begins in the prompt is none; it is one when the completion holds it as a whole."""
    ids = prompt(16)
    text = greedy(ids, NEW)
    whole, _ = ids, TOKENIZER.decode(ids)
    tail, head = TOKENIZER.decode(whole[-1:]), TOKENIZER.decode(text[:1])
    assert tail and head
    want = oracle(TOKENIZER, text, [tail + head])
    _, results = run(self_step, [ids], jaxspec.StopStrings(TOKENIZER, [tail + head]), max_new_tokens=12)
    assert want[0] != 1 and len(results[0].token_ids) == min(want[0], 12)


def test_without_strings_the_state_and_the_program_know_nothing_of_them(self_step):
    spec, params = self_step
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(9)])
    assert state.stops is None
    with_strings = jaxspec.init_state(
        spec.target, spec.drafter, spec.config, [prompt(9)], stop_strings=jaxspec.StopStrings(TOKENIZER, "a")
    )
    assert len(jax.tree.leaves(with_strings)) == len(jax.tree.leaves(state)) + 3
    after, _ = jax.eval_shape(lambda p, s: run_round(spec, p, s), params, with_strings)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), with_strings
    )


@pytest.mark.gpu
def test_strings_are_found_on_the_gpu_without_a_host_read(greedy):
    """A generation that ends at strings, from its dispatch to its end, with the options that users get."""
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU")
    config = jaxspec.SpecConfig(batch_size=B, num_draft_tokens=D, context_len=160, max_new_tokens=NEW, page_size=16)
    drafter, params = drafter_and_params("self")
    spec = jaxspec.make_spec_step(TARGET, drafter, config)
    prompts = [prompt(n) for n in (16, 9, 21)]
    texts = [greedy(ids, NEW) for ids in prompts]
    strings = [[s for i in text[5:] if (s := TOKENIZER.decode([i])) and "\ufffd" not in s][:1] for text in texts]
    stops = jaxspec.StopStrings(TOKENIZER, strings)
    wants = [oracle(TOKENIZER, text, group) for text, group in zip(texts, strings, strict=True)]
    loop, params = jit_with_state(run_to_end, spec.options), jax.device_put(params)
    for guard in ("allow", "disallow"):  # the first call compiles
        state = jaxspec.init_state(spec.target, drafter, config, prompts, stop_strings=stops)
        state = jax.block_until_ready(state)
        with jax.transfer_guard(guard):
            state, status = jax.block_until_ready(loop(spec, params, state))
    results = read_requests(state, prompts, stop_strings=stops)
    assert [(len(r.token_ids), r.stop_string) for r in results] == wants
    assert [r.token_ids for r in results] == [text[:n] for text, (n, _) in zip(texts, wants, strict=True)]
    assert status == 0

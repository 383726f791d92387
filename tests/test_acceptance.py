"""What the drafts that ship are worth: a broken draft never shows in greedy text, only in what is accepted of it.

tests/data/acceptance.json was written by `python tests/test_acceptance.py`.
"""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from tiny_models import FAST_COMPILE

import jaxspec
from jaxspec import cli, models
from jaxspec.benchmarks import acceptance
from jaxspec.drafting.choose import TRAINED, make_drafter
from jaxspec.models.draft_checkpoint import embedded_draft
from jaxspec.models.qwen3 import dense_attend

DATA = pathlib.Path(__file__).parent / "data"
SHAPES = {"num_draft_tokens": 8, "prompt_len": 64, "rounds": 32, "batch_size": 8}
GREEDY_TOKENS = 64
# How far acceptance may fall, at any position and in tokens a step for each draft.
MARGIN = 0.01
# What was trained, and what it is measured against.
BESIDE = [("target", "ngram"), ("target", "draft_lm"), ("hybrid", "ngram")]
TRAINED_PAIRS = [(t, k) for t in models.embedded_names() if t != "draft" for k in TRAINED if embedded_draft(k, t)]
PAIRS = BESIDE + TRAINED_PAIRS


def excerpts(target, name):
    """A loaded target, a drafter, the weights of both, and the excerpts."""
    loaded = jaxspec.load_model(target)
    drafter, params = make_drafter(name, loaded)
    texts = acceptance.read_texts(loaded, str(DATA / "heldout.jsonl"))[: SHAPES["batch_size"]]
    return loaded, drafter, jaxspec.Params(loaded.params, params), texts


@functools.cache
def measured(target, name):
    """Figures of a drafter along the excerpts."""
    return acceptance.measure(*excerpts(target, name), **SHAPES, options=FAST_COMPILE)


def completed(target, name):
    """Acceptance per position and tokens a round of greedy completions of the excerpts' beginnings."""
    loaded, drafter, params, texts = excerpts(target, name)
    prompts = [text[: SHAPES["prompt_len"]] for text in texts]
    D = SHAPES["num_draft_tokens"]
    with mock.patch("jaxspec.steps.step.compiler_options", return_value=FAST_COMPILE):
        found = jaxspec.generate(
            loaded.model, params, prompts, drafter=drafter, num_draft_tokens=D, max_new_tokens=GREEDY_TOKENS
        )
    return {"acceptance": found.acceptance_per_position, "accept_length": found.accept_length}


def recorded():
    return json.loads((DATA / "acceptance.json").read_text())


@pytest.mark.parametrize(
    ("target", "name"), [*TRAINED_PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in BESIDE)]
)
def test_the_drafts_that_ship_are_accepted_as_often_as_they_were(target, name):
    """Along held-out text, at every position of a round."""
    record = recorded()
    assert record["shapes"] == SHAPES
    want, found = record["along"][f"{target} {name}"], measured(target, name)
    assert found.rounds == want["rounds"] == SHAPES["batch_size"] * SHAPES["rounds"]
    assert np.all(np.array(found.acceptance) >= np.array(want["acceptance"]) - MARGIN)
    assert found.tokens_per_step >= want["tokens_per_step"] - MARGIN


@pytest.mark.parametrize(
    ("target", "name"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (pair != ("target", "eagle3"))) for pair in TRAINED_PAIRS],
)
def test_greedy_completions_accept_as_many_as_they_did(target, name):
    want, found = recorded()["greedy"][f"{target} {name}"], completed(target, name)
    assert np.all(np.array(found["acceptance"]) >= np.array(want["acceptance"]) - MARGIN)
    assert found["accept_length"] >= want["accept_length"] - MARGIN


def test_every_draft_that_ships_is_recorded():
    record = recorded()
    assert sorted(record["along"]) == sorted(" ".join(pair) for pair in PAIRS)
    assert sorted(record["greedy"]) == sorted(" ".join(pair) for pair in TRAINED_PAIRS)


# How it is measured

TEXT = tiny_models.prompt(100)


@pytest.fixture(scope="module")
def tiny():
    """A target as if it were loaded."""

    @dataclasses.dataclass
    class Loaded:
        model: jaxspec.Model

    return Loaded(tiny_models.TARGET)


def along(tiny, name, texts, **changes):
    shapes = {"num_draft_tokens": 3, "prompt_len": 9, "rounds": 6, "batch_size": 2} | changes
    drafter, params = tiny_models.drafter_and_params(name)
    return acceptance.measure(tiny, drafter, params, texts, **shapes, options=FAST_COMPILE)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def choices(params, tokens):
    """What a tiny model says after each token of int32[T], without a cache."""
    attend = dense_attend(tiny_models.CONFIG.windows)
    logits, *_ = tiny_models.MODULE.apply(params, tokens[None], jnp.arange(tokens.shape[0])[None], attend)
    return jnp.argmax(logits[0], axis=-1)


def said(params, text, count):
    """Its tokens behind a text, greedily."""
    ids = list(text)
    for _ in range(count):
        ids.append(int(choices(params, np.array(ids + [0] * (32 - len(ids)), np.int32))[len(ids) - 1]))
    return ids[len(text) :]


def accepted_one_by_one(texts, *, prompt_len, rounds, D):
    """How often 0, 1, .. D - 1 drafts agree with what the target says."""
    counts = []
    for text in texts:
        for length in range(prompt_len, prompt_len + rounds * D, D):
            context = text[: length + 1]
            own, drafts = (said(p, context, D - 1) for p in (tiny_models.target_params(), tiny_models.draft_params()))
            counts.append(next((k for k in range(D - 1) if drafts[k] != own[k]), D - 1))
    return np.bincount(counts, minlength=D).tolist()


def test_a_draft_model_along_a_text_equals_rounds_one_by_one(tiny):
    """Nor does a drafter see what comes: it proposes what the draft says after the text so far."""
    texts = [TEXT[:28], TEXT[30:58], TEXT[60:88]]  # three stretches in batches of two
    want = accepted_one_by_one(texts, prompt_len=9, rounds=6, D=3)
    found = along(tiny, "draft_lm", texts)
    assert list(found.histogram) == want and all(want)
    assert (found.rounds, found.proposed) == (18, 36)


def test_a_target_that_drafts_for_itself_is_always_right(tiny):
    found = along(tiny, "self", [TEXT])  # 100 tokens are three stretches of 28
    assert found.histogram == (0, 0, 18)
    assert found.acceptance == [1, 1] and found.tokens_per_step == 3


def test_a_text_that_is_too_short_is_refused(tiny):
    with pytest.raises(jaxspec.InputError, match="28 tokens, the longest text 27"):
        along(tiny, "ngram", [TEXT[:27]])


def test_the_figures():
    found = acceptance.Along(num_draft_tokens=4, rounds=10, proposed=25, histogram=(4, 3, 2, 1))
    assert found.acceptance == [0.6, 0.3, 0.1]
    assert found.tokens_per_step == pytest.approx((4 * 1 + 3 * 2 + 2 * 3 + 1 * 4) / 10)


def planted(monkeypatch, ids):
    """Runs of no model: along the text the first drafter is right less often; greedy ids as given, by drafter."""

    def measure(target, drafter, params, texts, *, num_draft_tokens, **_):
        wrong = 3 if isinstance(drafter, jaxspec.NgramDrafter) else 1
        return acceptance.Along(num_draft_tokens, 4, 4, (wrong, *[0] * (num_draft_tokens - 2), 4 - wrong))

    def generate(target, params, prompts, *, drafter, **_):
        found = ids["ngram" if isinstance(drafter, jaxspec.NgramDrafter) else "draft_lm"]
        requests = [jaxspec.RequestResult(found, "length", 2, [2, 2], [1, 1])] * len(prompts)
        return jaxspec.Generation(requests, 3, 1.0, 1)

    monkeypatch.setattr(acceptance, "measure", measure)
    monkeypatch.setattr(acceptance, "generate", generate)


def test_the_report_compares_and_names_what_is_missing(monkeypatch, capsys):
    planted(monkeypatch, {"ngram": [1, 2, 3, 4, 5], "draft_lm": [1, 2, 3, 4, 5]})
    assert cli.main(["bench", "acceptance", "--num_draft_tokens=3", "--json=-"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["drafters"]["ngram"]["along"]["tokens_per_step"] == 1.5
    assert result["drafters"]["draft_lm"]["along"]["tokens_per_step"] == 2.5
    assert result["drafters"]["ngram"]["over_best_baseline"] == 0.6
    assert result["drafters"]["ngram"]["greedy"]["distinct_4gram_ratio"] == 1
    assert result["drafters"]["ngram"]["greedy"]["accept_length"] == 2.5
    assert "no MTP block" in result["missing"]["mtp"]
    assert "4.4347" in err and "other models" in err


def test_greedy_ids_that_depend_on_the_drafter_are_a_failure(monkeypatch, capsys):
    planted(monkeypatch, {"ngram": [1, 2, 3, 4, 5], "draft_lm": [1, 2, 3, 4, 6]})
    assert cli.main(["bench", "acceptance", "--num_draft_tokens=3"]) == 1
    assert "error: greedy: the ids with " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--text=/nowhere/text.jsonl"], "/nowhere/text.jsonl"),
        (["--draft_model=draft"], "name the drafter"),
        (["--drafter=mtp"], "no MTP block"),
        (["--drafter=ngram", "--rounds=4000"], "ask for fewer rounds"),
        (["--drafter=magic"], "magic"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, words, part):
    assert cli.main(["bench", "acceptance", *words]) == 2
    *_, message = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and part in message


def test_a_line_that_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"prompt": 3}\n')
    assert cli.main(["bench", "acceptance", "--drafter=ngram", f"--text={tmp_path / 'text.jsonl'}"]) == 2
    assert "must be an object" in capsys.readouterr().err


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    figures = {f"{target} {name}": measured(target, name).to_json() for target, name in PAIRS}
    greedy = {f"{target} {name}": completed(target, name) for target, name in TRAINED_PAIRS}
    record = {"shapes": SHAPES, "along": figures, "greedy": greedy}
    (DATA / "acceptance.json").write_text(json.dumps(record, indent=1) + "\n")

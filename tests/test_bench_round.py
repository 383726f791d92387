"""`python -m jaxspec bench round`: that every call does the same rounds, what is counted, and that nothing made up can
be taken for measured."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import bench_cases
import jax
import numpy as np
import pytest
import tiny_models

import jaxspec
from jaxspec import InputError, Params, cli, models
from jaxspec.benchmarks import generations, rounds, shapes, traces
from jaxspec.benchmarks import round_problem as problem
from jaxspec.models import Checkpoint
from jaxspec.steps import step
from jaxspec.steps.step import compiler_options

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

FULL_CONFIG = dataclasses.replace(tiny_models.CONFIG, windows=(None, None))
TIED_CONFIG = dataclasses.replace(FULL_CONFIG, tie_word_embeddings=True)
SMALL = ["bench", "round", "--config=1b", "--batch=2 3", "--context=40", "--rounds=3", "--num_draft_tokens=4"]
SMALL += ["--runs=2", "--copy_mb=1", "--page_size=16"]


@pytest.fixture
def tiny(monkeypatch):
    """Public shapes made small, compiled soon."""
    monkeypatch.setitem(shapes.SHAPES, "1b", FULL_CONFIG)
    monkeypatch.setitem(shapes.SHAPES, "8b", FULL_CONFIG)
    monkeypatch.setattr(shapes, "DRAFT_SHAPE", TIED_CONFIG)
    monkeypatch.setattr(step, "compiler_options", lambda: tiny_models.FAST_COMPILE)


def command(capsys, *words):
    """Exit status, JSON (None without), messages of a run with --json=-."""
    status = cli.main([*words, "--json=-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


# Rounds


def windowed(B, D, context, count):
    """The tiny target with a window and a draft that is right in part of the rounds: (step, models, prompts)."""
    checkpoint = Checkpoint(tiny_models.MODULE, tiny_models.target_params(), tiny_models.CONFIG, Path("embedded"))
    draft = dataclasses.replace(checkpoint, params=tiny_models.draft_params())
    drafter = jaxspec.DraftLM(tiny_models.DRAFT)
    config = problem.make_config(B, D, context, count, 4)
    spec = jaxspec.make_spec_step(checkpoint.model, drafter, config, options=tiny_models.FAST_COMPILE)
    prompts = [tiny_models.prompt(context + b)[b:] for b in range(B)]
    return spec, problem.Models("embedded", checkpoint, draft, drafter), prompts


def test_every_call_does_the_rounds_of_a_generation():
    """Also where sliding-window pages are handed from place to place meanwhile: 4 tokens a page, a window of 8."""
    B, D, context, count = 2, 4, 30, 6
    spec, tiny, prompts = windowed(B, D, context, count)
    wanted = jaxspec.generate(spec.target, tiny.params, prompts, drafter=spec.drafter, config=spec.config)
    state = problem.make_state(spec, tiny, prompts, seed=0)
    kept = jax.tree.map(np.array, {name: getattr(state, name) for name in ("tokens", "pages", "packed", "round_log")})
    assert tiny.target.model.layers[0].storage == "swa"
    windows = np.array(state.cache.buffers[0])
    call = problem.rounds_of(spec, count, None)
    for _ in range(3):
        state, told = call(tiny.params, state)
        assert (int(told.status), int(told.rounds)) == (0, count) and int(told.emitted.max()) > 1
        for request, emitted in zip(wanted.requests, np.asarray(told.emitted), strict=True):
            assert emitted.tolist() == request.accept_lengths[:count]
        jax.tree.map(np.testing.assert_array_equal, {name: getattr(state, name) for name in kept}, kept)
        np.testing.assert_array_equal(state.cache.buffers[0], windows)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("drafter", ["ngram", "draft_lm"])
def test_simulated_acceptance_is_the_table(drafter):
    """Whatever the target says; a drafter that proposes nothing included."""
    B, D, context, count = 2, 4, 20, 5
    tiny = problem.make_models("1b", drafter, "float32", 0)
    spec = jaxspec.make_spec_step(tiny.target.model, tiny.drafter, problem.make_config(B, D, context, count, 16))
    state = problem.make_state(spec, tiny, [[*range(1, context + 1)]] * B, seed=0)
    table = problem.simulate(0.5, count, B, D - 1, seed=3)
    assert 0 < table.mean() < D - 1 and table.shape == (count, B)
    call = problem.rounds_of(spec, count, table)
    for _ in range(2):
        state, told = call(tiny.params, state)
        np.testing.assert_array_equal(told.emitted, table.T + 1)


def test_simulated_acceptance_keeps_the_rate():
    """The first draft at the rate, the second at its square; another seed, other numbers."""
    table = problem.simulate(0.7, 5000, 4, 3, seed=0)
    assert abs((table >= 1).mean() - 0.7) < 0.02 and abs((table >= 2).mean() - 0.49) < 0.02
    assert (table == problem.simulate(0.7, 5000, 4, 3, seed=0)).all()
    assert (table != problem.simulate(0.7, 5000, 4, 3, seed=1)).any()


def test_an_overruled_verdict_keeps_drafts_and_then_the_targets_token():
    targets, drafts = jax.numpy.array([[7, 8, 9], [4, 5, 6]]), jax.numpy.array([[1, 2], [3, 4]])
    verdict = problem.Verdict(targets=targets, accepted=jax.numpy.array([0, 0]))
    drafts = problem.Drafts(tokens=drafts, count=jax.numpy.array([2, 0]))
    got = problem.overrule(verdict, drafts, jax.numpy.array([2, 0]))
    assert got.accepted.tolist() == [2, 0]
    assert got.targets[0].tolist() == [1, 2, 9] and got.targets[1, 0] == 4


@pytest.mark.parametrize(("window", "draft_lm"), [(None, True), (8, False)])
def test_a_call_is_one_command_buffer(window, draft_lm, tmp_path):
    """On a GPU, and the state stays where it is."""
    if reason := aot.missing():
        pytest.skip(reason)
    module = models.Qwen3(dataclasses.replace(tiny_models.CONFIG, num_hidden_layers=1, windows=(window,)))
    weights = models.random_params(module.config, seed=0)
    drafter = jaxspec.DraftLM(jaxspec.from_qwen3(module, swa_pages=False)) if draft_lm else jaxspec.NgramDrafter()
    config = problem.make_config(2, 3, 20, 4, 8)
    spec = jaxspec.make_spec_step(jaxspec.from_qwen3(module), drafter, config, options=compiler_options("cuda"))
    state = jaxspec.init_state(spec.target, drafter, config, [tiny_models.prompt(18)] * 2)
    call = problem.rounds_of(spec, 4, problem.simulate(0.5, 4, 2, 2, seed=0))
    lowered = aot.lower_for_h200(call, Params(weights, weights if draft_lm else ()), state)
    fast = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
    compiled = aot.compile_lowered(lowered, dump=tmp_path, **fast)
    assert aot.thunks(tmp_path) == ["kCommandBuffer"]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# Shapes and bytes


def test_public_shapes_have_the_public_numbers_of_weights():
    for config, billions in ((shapes.SHAPES["8b"], 8.19), (shapes.SHAPES["1b"], 1.72), (shapes.DRAFT_SHAPE, 0.596)):
        tree = shapes.weight_shapes(config, "bfloat16")
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jax.numpy.dtype("bfloat16")}
        assert round(sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e9, 3) == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("config", [FULL_CONFIG, TIED_CONFIG])
def test_random_weights_have_the_shapes_of_a_checkpoint(config):
    ours, theirs = shapes.random_weights(config, "bfloat16", 0), models.random_params(config, 0, "bfloat16")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), ours) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), theirs
    )
    for leaf in jax.tree.leaves(ours):
        assert 0 < float(abs(leaf).max()) < 10
    head = ours["params"]["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    assert float(head.std()) == pytest.approx(config.hidden_size**-0.5, rel=0.1)


def test_the_weights_that_a_round_reads():
    """All of them once, of an embedding that is no head the rows of the tokens; a draft model's D - 1 times."""
    V, H, rest = FULL_CONFIG.vocab_size, FULL_CONFIG.hidden_size, 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    rest += 2 * (2 * 32 + 2 * 8) + 32
    tied, untied = (shapes.weight_shapes(config, "bfloat16") for config in (TIED_CONFIG, FULL_CONFIG))
    assert shapes.bytes_read(tied, TIED_CONFIG, 6) == 2 * (rest + V * H)
    assert shapes.bytes_read(untied, FULL_CONFIG, 6) == 2 * (rest + V * H + 6 * H)
    target = Checkpoint(models.Qwen3(FULL_CONFIG), untied, FULL_CONFIG, Path("a"))
    draft = Checkpoint(models.Qwen3(TIED_CONFIG), tied, TIED_CONFIG, Path("b"))
    drafter = jaxspec.DraftLM(draft.draft_model)
    both = problem.Models("1b", target, draft, drafter)
    alone = problem.Models("1b", target, None, None)
    assert problem.weight_bytes(alone, 2, 3) == 2 * (rest + V * H + 6 * H)
    assert problem.weight_bytes(both, 2, 3) - problem.weight_bytes(alone, 2, 3) == 2 * 2 * (rest + V * H)


def test_the_keys_that_a_round_reads():
    """Counted one by one: each key that some row sees, and each row written; lengths grow by what was emitted."""
    D, context, emitted = 3, 10, np.array([[2, 1], [3, 3]])
    target = Checkpoint(tiny_models.MODULE, {}, tiny_models.CONFIG, Path("a"))
    draft = Checkpoint(tiny_models.MODULE, {}, FULL_CONFIG, Path("b"))
    draft = dataclasses.replace(draft, module=models.Qwen3(FULL_CONFIG))
    token = 2 * 2 * 8 * 4
    mine = drafts = 0
    for request in emitted:
        length = context
        for tokens in request:
            for window in tiny_models.CONFIG.windows:
                rows = range(length, length + D)
                seen = {k for p in rows for k in range(p + 1) if window is None or k > p - window}
                mine += len(seen) + D
            # Of two layers: rows L - 1 and L, then row L + 1.
            drafts += 2 * ((length + 1 + 2) + (length + 2 + 1))
            length += int(tokens)
    alone = problem.Models("a", target, None, None)
    assert problem.kv_bytes(alone, emitted, context, D) == token * mine / 2
    both = problem.Models("a", target, draft, None)
    assert problem.kv_bytes(both, emitted, context, D) == token * (mine + drafts) / 2


# The command


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run of the embedded target in which everything is real."""
    words = ["bench", "round", "--config=embedded", "--batch=1", "--context=128", "--rounds=2", "--copy_mb=1"]
    return bench_cases.run_for_real([*words, "--runs=2"], tmp_path_factory.mktemp("out") / "out.json")


def test_a_run_of_the_embedded_target(real):
    status, out, err, result = real
    assert status == 0 and "error" not in err
    (row,) = result["rows"]
    assert row["rounds_a_call"] == 2 and row["host_transfers"] == 0 and row["dispatches_a_call"] == 1
    assert row["state_leaves"] <= row["state_leaves_allowed"] == 24
    assert len(row["us_a_round"]["us"]) == len(row["host_us_a_call"]["us"]) == len(row["copy_gb_per_s"]) == 2
    moved = (row["weight_bytes"] + row["kv_bytes"]) / row["us_a_round"]["median"] / 1e3
    assert row["of_copy"] == pytest.approx(moved / np.median(row["copy_gb_per_s"]))
    assert row["tokens_a_round"] == np.mean(row["emitted"]) > 1  # it knows code, and code repeats itself
    assert result["weights"] == "own" and not result["acceptance_is_simulated"]
    assert "SIMULATED" not in out and "its own weights" in out and "these times mean nothing" in out


@pytest.mark.usefixtures("tiny")
def test_what_is_simulated_is_named_everywhere(capsys, tmp_path):
    """In the title, the columns, the notes, the results and the environment; and the trace is there."""
    folder = tmp_path / "new" / "trace"
    words = [*SMALL, "--drafter=draft_lm", "--simulated_acceptance=0.7", f"--profile={folder}"]
    status, result, err = command(capsys, *words)
    assert status == 0
    assert result["title"].endswith("acceptance SIMULATED at 0.7, not measured") and result["title"] in err
    for place in (result, result["environment"]):
        assert place["acceptance_is_simulated"] and "SIMULATED at 0.7" in place["acceptance"]
        assert place["weights"] == "random"
    for column in ("round, SIMULATED acceptance", "SIMULATED tokens a round", "SIMULATED tokens/s"):
        assert column in err
    assert any("SIMULATED" in line for line in result["notes"])
    assert [row["batch"] for row in result["rows"]] == [2, 3]
    assert all(goal["met"] for goal in result["goals"])
    assert list(folder.rglob("*.xplane.pb")) and list(folder.parent.iterdir()) == [folder]


@pytest.mark.usefixtures("tiny")
def test_random_weights_are_named(capsys):
    status, result, err = command(capsys, *SMALL, "--drafter=none", "--batch=1")
    assert status == 0
    assert result["title"].startswith("1b, random weights") and result["acceptance"] == "the target's"
    assert result["rows"][0]["emitted"] == [[1, 1, 1]] and "SIMULATED" not in err


@pytest.mark.usefixtures("tiny")
def test_a_round_that_does_not_run_is_no_figure(capsys, monkeypatch):
    """Exit status 1 and a line: a call stopped early, or moved something."""

    def stopped(call, params, state, told):
        return state, told.replace(status=jax.numpy.int32(1)), "a transfer was tried"

    monkeypatch.setattr(rounds, "guarded", stopped)
    status, result, err = command(capsys, *SMALL, "--batch=1")
    assert status == 1
    early, moved = result["failures"]
    assert "0 of 3 rounds" in early and "a transfer was tried" in moved and f"error: {early}" in err
    assert result["rows"][0]["host_transfers"] is None and result["goals"][0]["met"] is False


def test_a_transfer_is_told():
    """A host array among the arguments would be moved at every call."""
    _, _, said = rounds.guarded(jax.jit(lambda params, state: (state + params, state)), np.ones(3), np.ones(3), None)
    assert "transfer" in said.lower()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--batch=0"], ["batch", "'0'"]),
        (["--batch=one"], ["'one'"]),
        (["--batch="], ["batch=''", "nothing to time"]),
        (["--simulated_acceptance=much"], ["'much'", "0 to 1"]),
        (["--simulated_acceptance=1.5"], ["'1.5'", "0 to 1"]),
        (["--simulated_acceptance=nan"], ["'nan'", "0 to 1"]),
        (["--simulated_acceptance=0.5", "--drafter=none"], ["drafter=none", "no drafts"]),
        (["--simulated_acceptance=0.5", "--num_draft_tokens=1"], ["num_draft_tokens=1", "no drafts"]),
        (["--page_size=12"], ["page_size=12", "power of two"]),
        (["--context=300"], ["context_len=", "256"]),
        (["--config=3b"], ["3b"]),
        (["--drafter=mtp"], ["mtp"]),
        (["--runs=1"], ["runs=1"]),
        (["--profile=tests"], ["profile=tests", "not empty"]),
        (["--profile=README.md"], ["profile=README.md", "no folder"]),
        (["--profile=README.md/trace"], ["profile=README.md/trace", "nothing can be written"]),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_bad_input_is_one_line_and_exit_status_2(capsys, monkeypatch, words, parts):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(rounds, "measure", None)  # nothing may run
    status, result, err = command(capsys, *SMALL, *words)
    assert (status, result) == (2, None)
    *_, message = err.splitlines()
    assert message.startswith("error: ") and all(part in message for part in parts), message


def test_what_does_not_fit_is_refused_before_anything_is_made(capsys, monkeypatch):
    """By the bytes that it would take: 16.4 GB of weights, and the K and V of 16 requests."""
    monkeypatch.setattr(rounds, "memory_there", lambda: 2e10)
    status, result, err = command(capsys, "bench", "round")
    assert (status, result) == (2, None)
    (line,) = err.splitlines()
    assert "config=8b" in line and "needs 22.2 GB in bfloat16" in line and "20.0" in line and "embedded" in line


def test_memory_that_nobody_tells_is_infinite_or_known():
    assert shapes.memory_there() > 1e6


# Goals


def row(**changes):
    samples = rounds.Samples((4000.0, 4000.0))
    values = {"B": 1, "us": samples, "host_us": samples, "copied": rounds.Samples((4e6, 4e6)), "weights": 14 * 10**9}
    values |= {"kv": 4e8, "emitted": np.ones((1, 3), int), "proposed": 0, "rounds": 3, "leaves": 50, "layers": 36}
    return rounds.Row(**values | {"transfers": ""} | changes)


def test_the_share_is_judged_on_a_gpu_at_its_shape_alone():
    settings = rounds.Settings()
    assert row().of_copy == pytest.approx(14.4 / 16)

    def share(settings, row, judged=True):
        found = [goal for goal in rounds.goals(settings, [row], judged) if "share" in goal["goal"]]
        return found[0]["met"] if found else "left out"

    assert share(settings, row()) is True and share(settings, row(weights=13 * 10**9)) is False
    assert share(settings, row(), judged=False) is None
    assert share(settings, row(B=16)) == "left out"
    for change in ({"config": "1b"}, {"context": 1024}, {"num_draft_tokens": 4}, {"dtype": "float32"}):
        assert share(dataclasses.replace(settings, **change), row()) == "left out"


def test_leaves_are_judged_by_the_number_of_layers():
    met = [rounds.goals(rounds.Settings(), [row(leaves=leaves)], True)[1]["met"] for leaves in (80, 81)]
    assert met == [True, False]
    assert row(layers=2).leaves_allowed == 24


# Traces


def test_a_trace_that_ends_early_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), traces.traced(str(tmp_path / "trace")):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_takes_a_trace_and_a_full_one_does_not(tmp_path):
    traces.check_folder(None)
    traces.check_folder(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not empty"):
        traces.check_folder(str(tmp_path))


# Whole generations

GENERATE = ["bench", "generate", "--num_requests=2", "--prompt_len=24", "--max_new_tokens=16", "--num_draft_tokens=4"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    root = tmp_path_factory.mktemp("out")
    words = [*GENERATE, "--drafter=ngram", "--runs=2", f"--profile={root / 'trace'}"]
    return bench_cases.run_for_real(words, root / "out.json"), root / "trace"


def test_generations_with_a_drafter_are_those_without(generated):
    (status, out, err, result), trace = generated
    assert status == 0 and "error" not in err
    plain, ngram = result["arms"]
    assert (plain["drafter"], ngram["drafter"]) == ("none", "ngram")
    assert plain["ids"] == ngram["ids"] and ngram["equal"] == 2 and {len(ids) for ids in plain["ids"]} == {16}
    assert plain["accept_length"] == pytest.approx(16 / 15) and ngram["accept_length"] > 16 / 15
    for arm in result["arms"]:
        assert arm["dispatches"] == [1, 1] and len(arm["tokens_per_second"]) == 2
    assert result["goals"][0]["met"] and "ids equal" in out and list(trace.rglob("*.xplane.pb"))


def planted(monkeypatch, dispatches=1):
    """Generations in which the drafter's second request differs."""

    def generate(target, params, prompts, *, drafter=None, **settings):
        ids = [[1, 2], [3, 4 if drafter is None else 5]]
        requests = [jaxspec.RequestResult(each, "length", 1, [1], [0]) for each in ids]
        return jaxspec.Generation(requests, 4, 0.5, dispatches)

    monkeypatch.setattr(generations, "generate", generate)


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_ids_that_differ(capsys, monkeypatch, dtype, status):
    """In float32 that is an error; in bfloat16 products of other shapes round otherwise, so it is told."""
    planted(monkeypatch)
    found, result, err = command(capsys, *GENERATE, "--drafter=ngram", f"--dtype={dtype}")
    assert found == status and "1/2" in err
    assert len(result["failures"]) == status and all("ngram" in line for line in result["failures"])


def test_more_than_one_dispatch_is_told(capsys, monkeypatch):
    planted(monkeypatch, dispatches=2)
    _, result, err = command(capsys, *GENERATE, "--drafter=ngram", "--dtype=bfloat16")
    assert result["goals"][0]["met"] is False and "MISSED" in err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--max_new_tokens=5000"], ["4096"]),
        (["--drafter=mtp"], ["MTP"]),
        (["--page_size=12"], ["page_size=12"]),
        (["--profile=tests"], ["not empty"]),
    ],
)
def test_generations_that_cannot_be_are_exit_status_2(capsys, monkeypatch, words, parts):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(generations, "execute", None)  # nothing may run
    status, result, err = command(capsys, *GENERATE, *words)
    assert (status, result) == (2, None)
    *_, message = err.splitlines()
    assert message.startswith("error: ") and all(part in message for part in parts), message


def test_generations_of_a_model_that_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(generations, "memory_there", lambda: 1e10)
    status, _, err = command(capsys, "bench", "generate", "--config=8b")
    assert status == 2 and "config=8b" in err and "needs 34.6 GB in float32" in err

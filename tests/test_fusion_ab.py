"""`python -m jaxspec bench fusion-ab`: that the arms are compared first, and that a round runs what is timed."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_models
from bench_cases import rows_of, run_for_real

import jaxspec
from jaxspec import Generation, RequestResult, cli, models
from jaxspec.benchmarks import fusion_ab, launches, metadata_cut, timing
from jaxspec.drafting.choose import make_drafter

REQUESTS, TOKENS, D = 2, 8, 4
SIZES = [f"--num_requests={REQUESTS}", "--prompt_len=30", f"--max_new_tokens={TOKENS}", f"--num_draft_tokens={D}"]
SIZES += ["--chain_runs=10", "--steps=2", "--turns=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders with random models, one of them with sparse layers."""
    root = tmp_path_factory.mktemp("models")
    for name, config in (("glm", tiny_models.GLM_CONFIG), ("qwen", tiny_models.CONFIG)):
        models.save(root / name, config, models.random_params(config, 0), dtype="float32")
    return root


@pytest.fixture(scope="module")
def words(folder):
    # The kernels' references: which operations a round has does not depend on who runs them.
    return ["bench", "fusion-ab", f"--model={folder / 'glm'}", "--kernel_backend=reference", *SIZES]


@pytest.fixture(scope="module")
def real(words, tmp_path_factory):
    """Exit status, output, messages and JSON of a run in which everything is real."""
    return run_for_real(words, tmp_path_factory.mktemp("out") / "out.json")


def test_the_arms_agree(real):
    status, out, err, result = real
    assert status == 0 and "error" not in err and result["failures"] == []
    rows, all_equal = rows_of(out), f"{REQUESTS}/{REQUESTS}"
    assert rows["ids"] == [str(REQUESTS * TOKENS)] * 2 + [all_equal]
    assert rows["verify counts"][-1] == rows["log-probabilities"][-1] == all_equal
    off, on, verdict = rows["accept length"]
    assert off == on and verdict == "yes"
    for arm in fusion_ab.ARMS:
        requests = result["exact"][arm]["requests"]
        assert all(len(request["logprobs"]) == TOKENS for request in requests)
    configs = result["configs"]
    different = {key for key in configs["on"] if configs["on"][key] != configs["off"][key]}
    assert different == {"kpool_metadata_fusion"}


def test_medians_of_alternating_runs(real):
    _, out, err, result = real
    for arm in fusion_ab.ARMS:
        told = result["arms"][arm]
        assert len(told["seconds"]) == len(told["prefill_seconds"]) == len(told["all_tokens_per_second"]) == 10
        rate = told["tokens_per_second"]
        assert rate["median"] == np.median(told["all_tokens_per_second"]) and rate["least"] <= rate["most"]
        rounds = max(request["verify_count"] for request in result["exact"][arm]["requests"])
        assert told["rounds"] == rounds
        assert told["metadata_us"] == pytest.approx(sum(part["us"] for part in result["metadata"][arm].values()))
    order = [line for line in err.splitlines() if "throughput" in line]
    assert order[:3] == [f"fusion {arm}: throughput {n} of 10 ..." for arm, n in (("off", 1), ("on", 1), ("off", 2))]
    rows = rows_of(out)
    assert set(rows) >= {"verify", "draft", "extend", "of a round", "a round, all in all", "share of the round"}
    assert "say nothing of a GPU" in out


def planted(monkeypatch, *, kind=fusion_ab.EXACT, **changes):
    """Replaces decoding: all runs give the same, but one request of the fused arm's runs of a kind is changed."""
    calls = []

    def generate(target, params, prompts, *, config, max_new_tokens, **settings):
        rounds = max_new_tokens // 2
        right = RequestResult(
            token_ids=list(range(max_new_tokens)),
            finish_reason="length",
            verify_count=rounds,
            accept_lengths=[2] * rounds,
            accepted_drafts=[1] * rounds,
            logprobs=[-0.5] * max_new_tokens if config.logprobs else None,
        )
        requests = [right] * len(prompts)
        is_kind = config.logprobs == (kind == fusion_ab.EXACT) and max_new_tokens == TOKENS
        calls.append((config.kpool_metadata_fusion, is_kind))
        warm_up = kind == fusion_ab.THROUGHPUT and calls.count((True, True)) == 1
        if config.kpool_metadata_fusion and is_kind and not warm_up:
            requests[1] = RequestResult(**(vars(right) | changes))
        return Generation(requests, config.num_draft_tokens, 0.25 if max_new_tokens > 1 else 0.05, 1)

    monkeypatch.setattr(fusion_ab, "generate", generate)


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        ({"token_ids": [*range(7), 99]}, "exact: ids differ in 1 of 2 requests, request 1 first"),
        (
            {"token_ids": [*range(7), 99], "kind": "throughput"},
            "throughput 1: ids differ in 1 of 2 requests, request 1 first",
        ),
        ({"verify_count": 5}, "exact: verify counts differ in 1 of 2 requests, request 1 first"),
        (
            {"logprobs": [-0.5] * 7 + [float(np.nextafter(-0.5, 0))]},
            "exact: log-probabilities differ in 1 of 2 requests, request 1 first",
        ),
        ({"finish_reason": "out_of_pages"}, "fusion on, exact: 1 requests ended early, out_of_pages"),
    ],
)
def test_no_ratio_where_outputs_differ(monkeypatch, capsys, words, plant, line):
    planted(monkeypatch, **plant)
    monkeypatch.setattr(fusion_ab, "time_metadata", lambda *_: pytest.fail("timed"))
    assert cli.main([*words, "--json=-"]) == 1
    out, err = capsys.readouterr()
    assert f"error: {line}" in err.splitlines()
    result = json.loads(out)
    assert line in result["failures"] and "on_over_off" not in result and "arms" not in result
    assert "tokens/s" not in err and "Outputs differ" in err


def test_the_ratios(monkeypatch, capsys, words):
    planted(monkeypatch)

    def parts(*_):
        def part(us):
            return fusion_ab.Part(timing.Samples((us + 1.0,) * 10), timing.Samples((1.0,) * 10))

        return {"off": {"verify": part(30), "extend": part(20)}, "on": {"verify": part(3), "extend": part(2)}}

    monkeypatch.setattr(fusion_ab, "time_metadata", parts)
    assert cli.main([*words, "--json=-"]) == 0
    out, err = capsys.readouterr()
    result, rows = json.loads(out), rows_of(err)
    # 8 tokens in 4 rounds take 0.2 s more than the prefill.
    assert result["arms"]["off"]["round_us"] == pytest.approx(50_000)
    assert rows["verify"] == ["30.00", "3.00", "0.1000"] and rows["of a round"] == ["50.00", "5.00", "0.1000"]
    assert rows["share of the round"] == ["0.10%", "0.01%", "0.1000"]
    assert rows["median"] == ["64.0", "64.0", "1.0000"]
    assert result["on_over_off"] == pytest.approx({"tokens_per_second": 1, "round": 1, "metadata": 0.1})


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model=qwen"], ["no sparse layers"]),
        (["--model=glm"], ["page_size=256", "cannot be fused", "--kernel_backend=interpret"]),
        (["--model=glm", "--kernel_backend=reference", "--page_size=64"], ["page_size=64", "256 tokens a page"]),
        (["--model=glm", "--runs=9"], ["runs=9", "10"]),
        (["--model=glm", "--drafter=none"], ["none"]),
        (["--model=glm", "--kernel_backend=checked"], ["checked"]),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, folder, words, parts):
    words = [word.replace("--model=", f"--model={folder}/") for word in words]
    assert cli.main(["bench", "fusion-ab", *SIZES, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *_, message = err.splitlines()
    assert message.startswith("error: ") and all(part in message for part in parts), message


# The metadata of a round


def bound(folder, fused, rows=D, **others):
    """A step, its weights and its state, as shapes unless they are asked for."""
    target = models.load(folder / "glm", "float32")
    drafter, draft_params = make_drafter("mtp", target)
    shape = {"batch_size": 2, "num_draft_tokens": rows, "context_len": 300, "max_new_tokens": 8, "page_size": 256}
    config = jaxspec.SpecConfig(**shape, kernel_backend="reference", kpool_metadata_fusion=fused, **others)
    spec = jaxspec.make_spec_step(target.model, drafter, config, options=tiny_models.FAST_COMPILE)
    return spec, jaxspec.Params(target.params, draft_params)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("rows", "phases"), [(2, ["verify", "extend"]), (4, ["verify", "draft", "extend"])])
def test_the_cut_has_the_launches_of_the_round(folder, fused, rows, phases):
    spec, params = bound(folder, fused, rows)
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, kernel_backend=None))
    state = launches.initial_state(spec)
    shapes = jax.tree.map(launches._shape, params)
    whole = jax.make_jaxpr(launches.phased_round, static_argnums=0)(spec, shapes, state)
    expected = {}
    for (path, name), times in launches.kernels(whole.jaxpr)[0].items():
        if launches.metadata.SCOPE in path:
            expected.setdefault(path[0], {})[name] = times
    cuts, _ = metadata_cut.cut(spec, shapes, state)
    assert [piece.phase for piece in cuts] == phases
    for piece in cuts:
        work = piece.work([np.zeros(v.aval.shape, v.aval.dtype) for v in piece.reads], 2)
        traced = jax.make_jaxpr(work.run)(work.vectors, work.tables, work.out)
        found = {name: times for (_, name), times in launches.kernels(traced.jaxpr)[0].items()}
        assert found == expected[piece.phase]
        assert len(piece.carried) == 1  # the packed buffer, written in place
        if fused:
            assert found == {"forward_metadata": 1}


@pytest.fixture(scope="module")
def prefilled(folder):
    """A state behind the prefill of two prompts; which arm's does not matter."""
    spec, params = bound(folder, fused=False)
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [list(range(1, 20)), list(range(3, 40))])
    return spec.prefill(params, state)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_the_cut_computes_what_the_round_does(folder, prefilled, fused):
    spec, params = bound(folder, fused)
    cuts, values = metadata_cut.cut(spec, params, prefilled)
    (number,) = (number for number, piece in enumerate(cuts) if piece.phase == "verify")

    def both(params, state):  # of the verify alone, which needs no model
        return values(params, state)[number], jaxspec.prepare(spec, state)[0].metadata.buffer

    reads, expected = jax.device_get(jax.jit(both, compiler_options=tiny_models.FAST_COMPILE)(params, prefilled))
    work = cuts[number].work(reads, 2)
    assert any(vector.tolist() == [19, 37] for vector in work.vectors.values())
    run = jax.jit(work.run, compiler_options=tiny_models.FAST_COMPILE)
    _, made = run(work.vectors, work.tables, work.out)
    (place,) = cuts[number].carried.values()
    np.testing.assert_array_equal(made[place], expected)

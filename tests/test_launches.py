"""`python -m jaxspec bench launches`: what is counted, by phase, and that the counting counts."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import pytest
import tiny_models
from jax import lax
from jax.experimental import pallas as pl

from jaxspec import cli, models
from jaxspec.benchmarks import launches
from jaxspec.models import draft_checkpoint
from jaxspec.steps import run_round
from pallas_kernels import aot

SIZES = ["--num_requests=2", "--num_draft_tokens=4", "--context_len=256", "--compiled=no", "--json=-"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders with random models over one vocabulary."""
    root = tmp_path_factory.mktemp("models")
    for name, config in (
        ("qwen", tiny_models.CONFIG),
        ("hybrid", tiny_models.HYBRID_CONFIG),
        ("glm", tiny_models.GLM_CONFIG),
    ):
        models.save(root / name, config, models.random_params(config, 0), dtype="float32")
    for kind in ("dspark", "dflash", "eagle3"):
        config = tiny_models.trained_draft(kind)
        draft_checkpoint.save_draft(root / kind, config, draft_checkpoint.random_draft_params(config, 0))
    return root


def run(capsys, *words):
    """Exit status, parsed JSON or None, and standard error of a command line."""
    status = cli.main(["bench", "launches", *map(str, words)])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def sums(count, side="metadata"):
    """Launches by phase, those without any left out."""
    return {phase: sum(found.values()) for phase, found in count["traced"][side].items() if found}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--drafter=none"], {"verify": 1, "prefill chunk": 1}),
        (["--drafter=ngram"], {"verify": 1, "prefill chunk": 1}),
        (["--drafter=draft_lm"], {"draft": 1, "verify": 1, "prefill chunk": 1}),
        (["--drafter=draft_lm", "--memory=unified"], {"draft": 1, "verify": 1, "prefill chunk": 1}),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_dense_round(capsys, folder, words, expected):
    draft = [f"--draft_model={folder / 'qwen'}"] if "--drafter=draft_lm" in words else []
    status, result, _ = run(capsys, f"--model={folder / 'qwen'}", *words, *draft, *SIZES)
    assert status == 0
    (arm,) = result["arms"]
    assert arm["metadata_path"] == "fused"
    assert sums(arm) == expected
    assert arm["traced"]["metadata_a_round"] == sum(expected.values()) - expected["prefill chunk"]
    assert arm["traced"]["metadata"]["verify"] == {"forward_metadata": 1}
    assert arm["traced"]["attention"]["verify"]["paged_attention"] == tiny_models.CONFIG.num_hidden_layers
    assert arm["traced"]["open_loops"] == 0


@pytest.mark.parametrize("memory", ["static", "unified"])
@pytest.mark.parametrize("drafter", ["dspark", "dflash", "eagle3"])
def test_a_trained_draft_lives_on_the_metadata_of_the_verify(capsys, folder, drafter, memory):
    """A block's layers norm, rotate and store in a launch each; its context rows of all layers are committed by one."""
    words = [f"--model={folder / 'qwen'}", f"--drafter={drafter}", f"--draft_model={folder / drafter}"]
    status, result, _ = run(capsys, *words, f"--memory={memory}", *SIZES)
    assert status == 0
    (arm,) = result["arms"]
    assert sums(arm) == {"verify": 1, "prefill chunk": 1}
    assert arm["traced"]["metadata"]["verify"] == {"forward_metadata": 1}
    others = {phase: arm["traced"]["other_kernels"][phase] for phase in ("draft", "extend")}
    if drafter == "eagle3":
        assert others == {"draft": {}, "extend": {}}
    else:
        layers = tiny_models.trained_draft(drafter).num_hidden_layers
        assert others == {"draft": {"store_heads": layers}, "extend": {"commit_context_rows": 1}}
    assert arm["traced"]["open_loops"] == 0


@pytest.mark.parametrize(("requests", "few"), [(16, True), (17, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_layer_of_a_qwen3_starts_for_its_rows(capsys, folder, dtype, requests, few):
    """Heads turned and stored in a launch; in bfloat16 and up to 64 rows two of products, one that adds up parts."""
    words = [f"--dtype={dtype}", "--drafter=draft_lm", f"--draft_model={folder / 'qwen'}"]
    status, result, _ = run(capsys, f"--model={folder / 'qwen'}", *words, *SIZES, f"--num_requests={requests}")
    assert status == 0
    (arm,) = result["arms"]
    layers, others = tiny_models.CONFIG.num_hidden_layers, arm["traced"]["other_kernels"]

    def kernels(forwards, few):
        count = layers * forwards
        few = few and dtype == "bfloat16"
        return {"store_heads": count} | ({"row_products": 2 * count, "row_sums": count} if few else {})

    assert others["verify"] == kernels(1, few)  # 4 rows a request
    assert others["draft"] == kernels(3, True)  # one
    assert others["extend"] == others["commit"] == {}
    assert others["prefill chunk"] == kernels(2, False)  # of the target and of the draft


def test_a_hybrids_states_are_no_metadata(capsys, folder):
    status, result, _ = run(capsys, f"--model={folder / 'hybrid'}", "--drafter=ngram", *SIZES)
    assert status == 0
    (arm,) = result["arms"]
    assert sums(arm) == {"verify": 1, "prefill chunk": 1}
    assert set(arm["traced"]["other_kernels"]["commit"]) == {"state_scatter"}


def test_fused_metadata_are_one_launch_a_forward(capsys, folder):
    """Three a round: the draft's chain, the verify, the extend behind it."""
    status, result, err = run(capsys, f"--model={folder / 'glm'}", *SIZES)
    assert status == 0
    ordinary, fused = result["arms"]
    assert [arm["metadata_path"] for arm in result["arms"]] == ["ordinary", "fused"]
    assert {arm["drafter"] for arm in result["arms"]} == {"mtp"}
    assert sums(ordinary) == {"draft": 2, "verify": 2, "extend": 2, "prefill chunk": 2}
    assert ordinary["traced"]["metadata_a_round"] == 6
    assert all(fused["traced"]["metadata"][phase] == {"forward_metadata": 1} for phase in sums(ordinary))
    assert fused["traced"]["metadata_a_round"] == 3
    assert fused["config"]["page_size"] == 256 and fused["config"]["kpool_metadata_fusion"]
    row = next(line for line in err.splitlines() if line.startswith("glm + mtp, fused") and "tracing" not in line)
    assert row.split()[4:] == ["1", "1", "1", "0", "3", "1"]
    assert "lowered for CUDA" in result["basis"]["traced"] and result["basis"]["compiled"] is None
    assert "Not compiled" in err


def test_a_single_draft_has_no_chain(folder):
    settings = launches.Settings(model=str(folder / "glm"), num_requests=2, num_draft_tokens=2, context_len=256)
    _, fused = launches.prepare_arms(settings)
    traced = jax.make_jaxpr(launches.phased_round, static_argnums=0)
    found, _ = launches.kernels(traced(fused.step, fused.params, launches.initial_state(fused.step)).jaxpr)
    metadata = {(path[0], name): times for (path, name), times in found.items() if "metadata" in path}
    assert metadata == {("verify", "forward_metadata"): 1, ("extend", "forward_metadata"): 1}


def test_pages_of_another_size_are_not_fused(capsys, folder):
    status, result, _ = run(capsys, f"--model={folder / 'glm'}", "--drafter=ngram", "--page_size=64", *SIZES)
    assert status == 0
    assert [arm["metadata_path"] for arm in result["arms"]] == ["ordinary"]


def test_every_embedded_target_is_counted_by_default(capsys, monkeypatch, folder):
    monkeypatch.setattr(launches, "embedded_names", lambda: ("draft", "glm", "qwen"))
    load = launches.load_model
    monkeypatch.setattr(launches, "load_model", lambda name, dtype: load(folder / name, dtype))
    nothing = {phase: {} for phase in launches.PHASES}
    monkeypatch.setattr(launches, "trace", lambda arm: dict.fromkeys(launches.SIDES, nothing) | {"open_loops": 0})
    status, result, _ = run(capsys, *SIZES)
    assert status == 0
    arms = [(arm["model"], arm["drafter"], arm["metadata_path"]) for arm in result["arms"]]
    assert arms == [("glm", "mtp", "ordinary"), ("glm", "mtp", "fused"), ("qwen", "ngram", "fused")]


def test_the_phases_make_the_round(folder):
    """The round that is counted holds the kernels of the one that runs, and gives the same."""
    settings = launches.Settings(model=str(folder / "qwen"), drafter="ngram", num_requests=2, context_len=128)
    (arm,) = launches.prepare_arms(settings)
    state = launches.initial_state(arm.step)
    both = [
        jax.make_jaxpr(f, static_argnums=0, return_shape=True)(arm.step, arm.params, state)
        for f in (launches.phased_round, run_round)
    ]
    counts = [launches.kernels(jaxpr.jaxpr)[0] for jaxpr, _ in both]
    totals = [{name: n for (_, name), n in found.items()} for found in counts]
    assert totals[0] == totals[1] and totals[0]["forward_metadata"] == 1 and totals[0]["paged_attention"] > 0
    (counted, shapes), (run, shapes_run) = both
    assert len(counted.jaxpr.eqns) == len(run.jaxpr.eqns)
    assert shapes == shapes_run


# Counting what is traced


def launch(x):
    def body(x, out):
        out[...] = x[...] + 1

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="add_one")(x)


def counted(function):
    found, loops = launches.kernels(jax.make_jaxpr(function)(jnp.zeros(8)).jaxpr)
    assert all(name == "add_one" for _, name in found)
    return found.total(), loops


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + 1, (0, 0)),
        (jax.jit(lambda x: launch(launch(x))), (2, 0)),
        (lambda x: lax.fori_loop(0, 5, lambda i, x: launch(x), launch(x)), (6, 0)),
        (lambda x: lax.fori_loop(0, x.sum().astype(int), lambda i, x: launch(x), x), (1, 1)),
        (lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), (0, 0)),
        (lambda x: lax.cond(x[0] > 0, launch, lambda x: launch(launch(x)), x), (2, 0)),
        (lambda x: lax.platform_dependent(x, cuda=launch, default=lambda x: x), (1, 0)),
        (lambda x: lax.platform_dependent(x, cpu=launch, default=lambda x: x), (0, 0)),
    ],
    ids=["none", "twice", "loop", "open loop", "open loop without", "branches", "for CUDA", "not for CUDA"],
)
def test_kernels_are_counted(function, expected):
    assert counted(function) == expected


def test_kernels_have_the_names_of_their_scopes():
    @jax.jit
    def inner(x):
        with jax.named_scope("metadata"):
            return launch(x)

    def outer(x):
        with jax.named_scope("draft"):
            return inner(x)

    found, _ = launches.kernels(jax.make_jaxpr(outer)(jnp.zeros(8)).jaxpr)
    ((path, name),) = found
    assert (*path[:2], name) == ("draft", "metadata", "add_one")


# Counting what is compiled

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(f32[8]{0} %p, f32[8]{0} %p), metadata={op_name="jit(f)/inside"}
}

%turn (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element((s32[], f32[8]{0}) %t), index=1
  %k = f32[8]{0} custom-call(f32[8]{0} %x), custom_call_target="x", metadata={op_name="jit(f)/draft/metadata/add_one"}
  ROOT %r = (s32[], f32[8]{0}) tuple(%i, f32[8]{0} %k)
}

%goes_on (t.1: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] fusion((s32[], f32[8]{0}) %t.1), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/while/cond"}
}

%few (p.1: f32[8]) -> f32[8] {
  ROOT %p.1 = f32[8]{0} parameter(0)
}

%many (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(f32[8]{0} %p.2)
}

%called (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(f32[8]{0} %p.3), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/verify/add"}
}

ENTRY %main (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %t0 = (s32[], f32[8]{0}) tuple(%zero, f32[8]{0} %q)
  %w = (s32[], f32[8]{0}) while(%t0), condition=%goes_on, body=%turn, backend_config={"known_trip_count":{"n":"3"}}
  %w.1 = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %w), condition=%goes_on, body=%turn
  %d = f32[8]{0} conditional(s32[] %j, f32[8]{0} %q, f32[8]{0} %q), branch_computations={%few, %many}
  ROOT %z = f32[8]{0} call(f32[8]{0} %d), to_apply=%called
}
"""


def test_loops_branches_and_calls_of_a_compiled_program_are_opened():
    program = aot.read_program(types.SimpleNamespace(as_text=lambda: PROGRAM))
    kernel = "jit(f)/draft/metadata/add_one"
    assert [tuple(launch) for launch in program.launches] == [
        ("custom-call", kernel, 3),
        ("custom-call", kernel, 1),
        ("fusion", "jit(f)/while/cond", 1),
        ("copy", "", 1),
        ("fusion", "jit(f)/verify/add", 1),
    ]
    assert program.open_loops == 1


def test_a_program_of_this_jax_is_read():
    def function(x):
        with jax.named_scope("scope"):
            return lax.fori_loop(0, 7, lambda i, x: jnp.sin(x) @ x, x)

    program = aot.read_program(jax.jit(function).lower(jnp.ones((64, 64))).compile())
    assert 7 in {launch.times for launch in program.launches if "scope" in launch.name.split("/")}
    assert program.open_loops == 0


def test_a_round_compiled_for_sm_90(capsys, monkeypatch, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    quick = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
    monkeypatch.setattr(aot, "compile_lowered", functools.partial(aot.compile_lowered, **quick))
    config = dataclasses.replace(tiny_models.CONFIG, num_hidden_layers=1, windows=(None,))
    models.save(tmp_path / "small", config, models.random_params(config, 0))
    words = [f"--model={tmp_path / 'small'}", "--drafter=ngram", *SIZES]
    status, result, err = run(capsys, *words, "--compiled=yes")  # the last word on it counts
    assert status == 0
    (arm,) = result["arms"]
    found = arm["compiled"]
    assert found["metadata"]["verify"] >= arm["traced"]["metadata_a_round"] == 1
    assert found["metadata"]["draft"] == found["metadata"]["extend"] == 0
    assert found["all"]["verify"] > found["metadata"]["verify"]
    assert found["all_a_round"] == sum(found["all"].values()) == sum(found["kinds"].values())
    assert found["open_loops"] == 0
    assert "H200" in result["basis"]["compiled"] and "compiled for NVIDIA H200" in err


def test_a_fused_round_compiled_for_sm_90(capsys, monkeypatch, folder):
    """The compiled program has one metadata kernel a forward, and what is left around it is less than without."""
    if reason := aot.missing():
        pytest.skip(reason)
    quick = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
    monkeypatch.setattr(aot, "compile_lowered", functools.partial(aot.compile_lowered, **quick))
    status, result, _ = run(capsys, f"--model={folder / 'glm'}", *SIZES, "--compiled=yes")
    assert status == 0
    ordinary, fused = (arm["compiled"]["metadata"] for arm in result["arms"])
    assert all(fused[phase] >= 1 for phase in ("draft", "verify", "extend"))
    assert sum(fused.values()) < sum(ordinary.values())


@pytest.mark.parametrize(
    ("model", "drafter", "phases"),
    [
        ("target", "draft_lm", ["draft", "verify"]),
        ("target", "dspark", ["verify"]),
        ("target", "eagle3", ["verify"]),
        ("hybrid", "dspark", ["verify"]),
        ("kpool", "mtp", ["draft", "verify", "extend"]),
    ],
)
def test_rounds_of_the_embedded_models_compiled_for_sm_90(monkeypatch, model, drafter, phases):
    """One metadata kernel a forward that has metadata of its own; the state stays where it is; hardly a copy."""
    if reason := aot.missing():
        pytest.skip(reason)
    quick = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
    monkeypatch.setattr(aot, "compile_lowered", functools.partial(aot.compile_lowered, **quick))
    arms = launches.prepare_arms(launches.Settings(model=model, drafter=drafter))
    (arm,) = (arm for arm in arms if arm.metadata == launches.FUSED)
    traced = launches.trace(arm)["metadata"]
    assert {phase: sum(found.values()) for phase, found in traced.items() if found and phase in launches.ROUND} == (
        dict.fromkeys(phases, 1)
    )
    compiled = launches.compile_round(arm)
    assert compiled["open_loops"] == 0
    assert compiled["bytes_in_place"] == compiled["state_bytes"]
    assert compiled["kinds"].get("copy", 0) <= 7  # small arrays that say who has which page


# What is refused


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model=nobody"], ["nobody"]),
        (["--drafter=mtp"], ["no MTP block"]),
        (["--drafter=magic"], ["magic", "mtp"]),
        (["--drafter=ngram", "--draft_model=draft"], ["draft_model=draft", "ngram"]),
        (["--drafter=ngram", "--context_len=9999"], ["context_len=9999", "256"]),
        (["--drafter=ngram", "--page_size=12"], ["page_size=12", "power of two"]),
        (["--drafter=ngram", "--compiled=yes"], ["compiled=yes", "no CUDA device", "planted"]),
        (["--drafter=ngram", "--json=/nowhere/out.json"], ["/nowhere/out.json"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, monkeypatch, folder, words, parts):
    monkeypatch.setattr(aot, "missing", lambda: "planted")
    monkeypatch.setattr(launches.jax, "default_backend", lambda: "cpu")
    status, out, err = run(capsys, f"--model={folder / 'qwen'}", *words)
    assert (status, out) == (2, None)
    *_, message = err.splitlines()
    assert message.startswith("error: ")
    assert all(part in message for part in parts), message

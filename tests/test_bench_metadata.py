"""`python -m jaxspec bench metadata`: that the chains keep everything alive, that a wrong output is never timed, and
what is told."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile

from jaxspec import InputError, cli
from jaxspec.benchmarks import launches, metadata, timing
from jaxspec.benchmarks import metadata_problem as problems
from jaxspec.benchmarks.metadata_problem import FULL_SWA, KINDS, KPOOL, Problem
from jaxspec.benchmarks.timing import Samples, Work, chained
from jaxspec.steps.step import compiler_options

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

SMALL = ["--backend=interpret", "--runs=10", "--steps=1", "--turns=2", "--widths="]


@pytest.fixture(autouse=True)
def quickly_compiled(monkeypatch):
    monkeypatch.setattr(timing, "compiler_options", quick_compile.options)


def arguments(work):
    return work.vectors, np.zeros(1, np.int32), work.out, work.tables


def equations(jaxpr, kind):
    """All equations of a kind, those inside others included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == kind:
            yield equation
        for part in launches.branches(equation):
            yield from equations(part, kind)


def counting(vectors, tables, out):
    """A work that writes the lengths that it sees, and how often it was done."""
    return vectors, {"seen": vectors["seq_lens"], "times": out["times"] + 1}


COUNTING = Work(
    counting,
    {"seq_lens": np.array([5, 9], np.int32), "other": np.array([1, 2], np.int32)},
    {},
    {"seen": np.zeros(2, np.int32), "times": np.zeros((1, 1), np.int32)},
)


# The chain


@pytest.mark.parametrize(("steps", "seen"), [(1, 0), (2, 1), (3, 0), (4, 1), (6, 1)])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_lengths_go_up_and_come_back(backend, steps, seen):
    vectors, total, out = jax.jit(chained(COUNTING.run, steps=steps, turns=3, backend=backend))(*arguments(COUNTING))
    assert vectors["seq_lens"].tolist() == [5, 9] and vectors["other"].tolist() == [1, 2]
    assert out["seen"].tolist() == [5 + seen, 9 + seen] and out["times"].tolist() == [[3 * steps]]
    rounds = sum(range(3 * steps + 1))
    assert total.tolist() == [rounds + 3 * sum([5, *range(6, 6 + steps // 2), *range(4 + steps // 2, 4, -1)][:steps])]


def test_more_requests_than_a_program_of_the_touch_moves():
    rows = timing.BLOCK + 3
    vectors = {"seq_lens": jnp.arange(rows, dtype=jnp.int32), "other": jnp.arange(rows, dtype=jnp.int32)}
    moved, total = timing.touch(vectors, jnp.ones(1, jnp.int32), [jnp.full((2, 3), 7, jnp.int32)], 1, "interpret")
    assert moved["seq_lens"].tolist() == list(range(1, rows + 1)) and moved["other"].tolist() == list(range(rows))
    assert total.tolist() == [8]


def test_a_chain_moves_and_goes_on():
    """Every array lies elsewhere, and what is carried is what it was."""
    chain = timing.compile_all({"": COUNTING}, steps=2, turns=1, backend="reference")[""]
    chain.tables = {"table": jnp.arange(5)}
    chain.call = lambda vectors, total, out, tables: (vectors, total, out | {"times": out["times"] + 2})
    chain.advance()
    before = jax.tree.leaves((chain.carried, chain.tables))
    places = [leaf.unsafe_buffer_pointer() for leaf in before]
    chain.move(np.random.default_rng(0))
    after = jax.tree.leaves((chain.carried, chain.tables))
    assert not set(places) & {leaf.unsafe_buffer_pointer() for leaf in after}
    assert chain.out["times"].tolist() == [[2 + 2 * timing.WARM_UP]]
    assert chain.carried[0]["seq_lens"].tolist() == [5, 9] and chain.tables["table"].tolist() == [*range(5)]


def test_chains_are_timed_in_turn_and_elsewhere_each_time():
    done = []

    class Planted:
        def __init__(self, name):
            self.name = name

        def move(self, rng):
            done.append(f"{self.name} moves")

        def advance(self):
            done.append(self.name)
            return float(len(done))

    found = timing.time_in_turn({name: Planted(name) for name in "ab"}, 2)
    assert done == ["a moves", "a", "b moves", "b"] * 2
    assert found["a"].us == (2.0, 6.0) and found["b"].us == (4.0, 8.0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_of_every_step_is_an_operand_of_the_touch(kind):
    problem = Problem(kind, 2, 70, 3)
    for name, work in problems.arms_of(problem, ["interpret"]).items():
        traced = jax.make_jaxpr(chained(work.run, steps=3, turns=5, backend="interpret"))(*arguments(work))
        found, open_loops = launches.kernels(traced.jaxpr)
        times = {kernel: 0 for _, kernel in found} | {"touch": 0}
        for (_, kernel), count in found.items():
            times[kernel] += count
        expected = {"touch": 15}
        if name.startswith("empty"):
            expected |= {"empty": 15}
        if name.startswith("fused"):
            expected |= {"forward_metadata": 15}
        if name.startswith("separate"):
            expected |= {"decode_metadata": 15, "draft_write_window": 15, "replay_state_indices": 15}
        assert times == expected and open_loops == 0, name
        touches = [e for e in equations(traced.jaxpr, "pallas_call") if launches.kernel_name(e) == "touch"]
        leaves = sorted(x.shape for x in jax.tree.leaves(work.out))
        for touch in touches:
            shapes = [v.aval.shape for v in touch.invars]
            carried = [(2,)] * len(work.vectors) + [(1,)]
            assert sorted(shapes) == sorted([*leaves, *carried]), name


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_for_an_h200_a_chain_is_one_command_buffer(kind, tmp_path):
    """And holds what it should: nothing dropped, moved out of the loop or copied."""
    if reason := aot.missing():
        pytest.skip(reason)
    problem, steps = Problem(kind, 8, 300, 4), 4
    arms = problems.arms_of(problem, ["triton"])
    for number, (name, kernels) in enumerate({"touch": 1, "empty, triton": 2, "fused, triton": 2}.items()):
        work, dump = arms[name], tmp_path / str(number)
        chain = chained(work.run, steps=steps, turns=5, backend="triton")
        lowered = aot.lower_for_h200(timing.jit_chain(chain, compiler_options("cuda")), *arguments(work))
        compiled = aot.compile_lowered(lowered, dump=dump)
        assert aot.thunks(dump) == ["kCommandBuffer"]
        program = aot.aot.read_program(compiled)
        assert program.open_loops == 0
        times = {}
        for launch in program.launches:
            times[launch.kind] = times.get(launch.kind, 0) + launch.times
        assert times["custom-call"] == kernels * steps * 5, name
        assert times.get("copy", 0) <= 2, name  # at the loop's ends, none a step
        assert compiled.memory_analysis().alias_size_in_bytes >= problem.layout.size * 4


# The problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("B", "live", "D", "width"), [(1, 5, 1, 0), (9, 300, 5, 0), (2, 100, 2, 2048)])
def test_the_arms_agree(kind, B, live, D, width):
    problem = Problem(kind, B, live, D, width)
    works = {
        "reference": problem.work(functools.partial(problems.fused, backend="reference"), problem.packed()),
        "separate": problem.work(
            functools.partial(problems.separate, backend="reference"), problems.separate_out(problem)
        ),
        "apart": problem.work(problems.apart, problems.apart_out(problem)),
    }
    outs = {
        name: problems.read(
            problem, jax.jit(work.run, compiler_options=quick_compile.options())(work.vectors, work.tables, work.out)[1]
        )
        for name, work in works.items()
    }
    assert set(outs["reference"]) == set(outs["separate"]) == set(outs["apart"]) == set(problem.names)
    assert all(array.min(initial=0) > problems.POISON for array in outs["reference"].values())
    for name, out in outs.items():
        assert problems.difference(outs["reference"], out) is None, name


def test_a_problem_is_made_of_live_pages():
    problem = Problem(FULL_SWA, 9, 300, 5)
    vectors, tables = problem.arrays
    source, v2p = tables["source"], tables["v2p"]
    assert vectors["req_rows"].tolist().count(0) == 1 and vectors["seq_lens"][-1] == 0  # one lane is padding
    assert source[1:].min() > 0 and source.max() < len(v2p) and not source[0].any()
    assert v2p[1:, 0].min() > 0 and (v2p[:, 1] == -1).any() and not v2p[0].any()
    assert (300 - vectors["seq_lens"][:-1] < 8).all()


def test_a_difference_is_named():
    array = np.arange(6).reshape(2, 3)
    wrong = array.copy()
    wrong[1, 1:] = 9
    difference = functools.partial(problems.difference, {"a": array})
    assert difference({"a": array, "more": wrong}) is None
    assert difference({"a": wrong}) == "a[1, 1] is 9, not 4; 2 cells differ"
    assert difference({"a": array[:1]}) == "a has shape (1, 3), not (2, 3)"
    assert difference({}) == "a is not there"


# The command


def jnp_arms(problem, names, spoil=None):
    """All arms in plain jnp, which compiles quickly; one of them spoiled."""
    works = problems.launch_arms_of(problem, names)
    plain = works["reference"]
    for name in [n for n in works if n.startswith("fused")]:
        works[name] = plain
    works[f"separate, {names[0]}"] = plain
    works["reference apart"] = plain
    if spoil:
        place = problem.layout.sections["page_table"].offset

        def wrong(vectors, tables, out):
            vectors, out = plain.run(vectors, tables, out)
            return vectors, dataclasses.replace(out, buffer=out.buffer.at[place].add(1))

        works[spoil] = dataclasses.replace(plain, run=wrong)
    return works


def command(capsys, *words):
    """Exit status, parsed JSON or None, and standard error."""
    status = cli.main(["bench", "metadata", *map(str, words), "--json=-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_a_small_run_on_a_cpu(capsys):
    """Real kernels, interpreted."""
    status, result, err = command(capsys, *SMALL, "--shapes=2,70,3", f"--kinds={FULL_SWA}")
    assert status == 0 and result["failures"] == [] and result["widths"] == []
    (row,) = result["rows"]
    assert (row["kind"], row["B"], row["live"], row["D"]) == (FULL_SWA, 2, 70, 3)
    names = ["touch", "empty, interpret", "fused, interpret", "reference", "separate, interpret", "reference apart"]
    assert list(row["arms"]) == names
    for arm in row["arms"].values():
        assert len(arm["us"]) == 10 and 0 < arm["least"] <= arm["quartiles"][0] <= arm["median"] <= arm["most"]
    medians = {name: arm["median"] for name, arm in row["arms"].items()}
    figures = row["figures"]["interpret"]
    assert figures["cost"] == medians["fused, interpret"] - medians["touch"]
    assert figures["over_empty"] == medians["fused, interpret"] - medians["empty, interpret"]
    assert {goal["met"] for goal in result["goals"]} == {None}  # there is no GPU to judge by
    assert "No GPU" in err and "not judged" in err and "MISSED" not in err
    assert result["environment"]["versions"]["jax"] and result["environment"]["devices"]
    assert result["settings"]["turns"] == 2


def test_tables_of_several_widths(capsys, monkeypatch):
    def arms(problem, names):
        works = problems.launch_arms_of(problem, names)
        return works | {f"fused, {names[0]}": works["reference"]}

    monkeypatch.setattr(metadata, "launch_arms_of", arms)
    words = [*SMALL[:-1], "--shapes=", "--widths=512", "--width_shape=2,70,3"]
    status, result, err = command(capsys, *words)
    assert status == 0 and result["rows"] == []
    assert [(row["columns"], row["zero_tail"]) for row in result["widths"]] == [(8, False), (8, True)]
    assert "columns behind cleared" in err and "columns behind left alone" in err and "512 tokens interpret" in err


@pytest.mark.parametrize(
    ("spoil", "missing", "there"),
    [
        ("fused, interpret", ["cost", "over_empty", "over_separate", "over_reference"], []),
        ("separate, interpret", ["over_separate"], ["over_reference", "over_empty"]),
        ("reference apart", [], ["over_reference"]),
    ],
)
def test_what_differs_is_not_timed(capsys, monkeypatch, spoil, missing, there):
    """It is exit status 1, a line that names it, and no figure that would need it."""
    monkeypatch.setattr(metadata, "arms_of", functools.partial(jnp_arms, spoil=spoil))
    status, result, err = command(capsys, *SMALL, "--shapes=2,70,3", f"--kinds={KPOOL}")
    assert status == 1
    (row,) = result["rows"]
    assert spoil not in row["arms"] and "page_table[0, 0]" in row["differences"][spoil]
    line = f"{KPOOL} 2,70,3, {spoil}: outputs differ from the reference"
    assert any(line in failure for failure in result["failures"]) and f"error: {line}" in err
    figures = row["figures"]["interpret"]
    assert all(figures[key] is None for key in missing) and all(key in figures for key in there)
    assert "differs" in next(text for text in err.splitlines() if text.startswith("2,70,3 interpret"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["no GPU", "--backend=interpret"]),
        (["--backend=mosaic"], ["no GPU"]),
        ([*SMALL, "--shapes=2,70"], ["'2,70'", "B,live,D"]),
        ([*SMALL, "--shapes=0,70,3"], ["'0,70,3'", "at least 1"]),
        ([*SMALL, "--shapes="], ["nothing to time"]),
        ([*SMALL, "--widths=8192 wide"], ["'wide'"]),
        ([*SMALL, "--widths=256", "--width_shape=1,250,2"], ["width 256", "506"]),
        ([*SMALL, "--runs=9"], ["runs=9", "10"]),
        ([*SMALL, "--kinds=swa"], ["swa", "kpool"]),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, monkeypatch, words, parts):
    monkeypatch.setattr(metadata.jax, "default_backend", lambda: "cpu")
    status, result, err = command(capsys, *words)
    assert (status, result) == (2, None)
    *_, message = err.splitlines()
    assert message.startswith("error: ") and all(part in message for part in parts), message


def test_backends_that_decline_are_left_out(monkeypatch):
    monkeypatch.setattr(metadata.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(metadata.backends, "declined", lambda name: "too old" if name == "mosaic" else None)
    assert metadata.choose_backends("compiled") == ["triton"]
    with pytest.raises(InputError, match="backend=mosaic: too old"):
        metadata.choose_backends("mosaic")


# Figures and goals


def row(problem, **us):
    """A row with these medians; arms by the first letters of their names."""
    names = {"touch": "touch", "empty": "empty, triton", "fused": "fused, triton", "separate": "separate, triton"}
    names |= {"reference": "reference", "apart": "reference apart"}
    return metadata.Row(problem, {names[key]: Samples((value,) * 10) for key, value in us.items()}, {})


def test_figures():
    found = row(Problem(FULL_SWA, 1, 9, 1), touch=1, empty=1.5, fused=2, separate=6, reference=11, apart=5)
    assert found.figures("triton") == {"cost": 1, "over_empty": 0.5, "over_separate": 0.2, "over_reference": 0.25}
    found = row(Problem(FULL_SWA, 1, 9, 1), touch=1, fused=2, reference=1)  # a reference that costs nothing
    assert found.figures("triton") == {"cost": 1, "over_empty": None, "over_separate": None, "over_reference": None}


def judged(rows, series=(), there=True):
    return {goal["goal"]: goal for goal in metadata.goals(["triton"], rows, series, there)}


ONE, EVERY = "us over an empty kernel, one request", "us over an empty kernel, every shape"
SHARE = "fused / reference, every shape"
LEFT, CLEARED = (f"growth of the cost with the width, columns {name}" for name in ("left alone", "cleared"))


def test_goals():
    arms = {"touch": 1, "empty": 1.5, "separate": 9, "reference": 6, "apart": 9}
    one, many = Problem(FULL_SWA, 1, 9, 1), Problem(FULL_SWA, 8, 9, 1)
    rows = [row(one, **arms, fused=1.75), row(many, **arms, fused=2.625), row(Problem(KPOOL, 1, 9, 1), **arms, fused=3)]
    wide = [
        row(dataclasses.replace(many, width=width, zero_tail=cleared), touch=1, fused=cost)
        for width, cleared, cost in ((512, False, 2), (1024, False, 2.0625), (512, True, 2), (1024, True, 2.03125))
    ]
    found = judged(rows, wide)
    assert {name: goal["met"] for name, goal in found.items()} == {
        ONE: True,
        EVERY: False,
        SHARE: False,
        LEFT: False,
        CLEARED: True,
    }
    assert (found[EVERY]["worst"], found[EVERY]["at"]) == (1.125, "full+swa 8,9,1")  # of kpool nothing was asked
    assert (found[SHARE]["worst"], found[SHARE]["at"]) == (0.4, "kpool 1,9,1")
    assert (found[LEFT]["worst"], found[CLEARED]["worst"]) == (0.0625, 0.03125)


def test_what_is_not_there_or_not_of_a_gpu_is_not_judged():
    whole = row(Problem(FULL_SWA, 8, 9, 1), touch=1, empty=1, fused=1.1, reference=9)
    part = row(Problem(FULL_SWA, 9, 9, 1), touch=1, empty=1)  # whose fused launch differs
    assert judged([whole])[EVERY]["met"] and judged([whole])[ONE]["met"] is None
    assert judged([whole, part])[EVERY]["met"] is None
    assert {goal["met"] for goal in judged([whole], there=False).values()} == {None}

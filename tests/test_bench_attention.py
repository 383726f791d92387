"""`python -m jaxspec bench attention`: that a loop reads what it should, that a wrong output is never timed, and what
is told."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import bench_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile

from jaxspec import cli
from jaxspec.benchmarks import attention, base, timing
from jaxspec.benchmarks import attention_problem as problems
from jaxspec.benchmarks.attention_problem import FLOOR, KERNEL, XLA, Problem
from jaxspec.benchmarks.timing import Samples
from jaxspec.steps.step import compiler_options

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

SIZES = {"dtype": "float32", "page_size": 4, "kv_heads": 2, "group": 2, "head_dim": 8}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]
SMALL = ["--backend=interpret", *TINY, "--turns=2", "--copy_mb=1", "--spread_mb=0"]


@pytest.fixture(autouse=True)
def quickly_compiled(monkeypatch):
    monkeypatch.setattr(timing, "compiler_options", quick_compile.options)


def tiny(B, context, D, **more):
    return Problem(B, context, D, **SIZES | more)


def pool_of(problem, spread=0):
    shape = problem.cache(problem.pages(spread))
    return problems.random_pool(shape.shape, problem.dtype)


def state_of(problem, pool, regions=1):
    """(q, place, out) of one call of XLA's path."""
    q, (table, region), _ = problems.carried(problem, regions)
    out = jax.jit(problems.by_xla(problem))(q, pool, table, problem.positions, problem.lengths)
    return q, (table, region), out


# The problem

SHAPES = [
    tiny(1, 1, 1),
    tiny(3, 17, 4),
    tiny(4, 23, 3, ragged=True),
    tiny(2, 40, 1, window=5),
    tiny(4, 40, 3, window=6, ragged=True),
    tiny(2, 8, 2, window=100),
]


@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: problem.label)
def test_live_keys_are_those_that_a_row_sees(problem):
    live, pages = 0, 0
    assert problem.lengths.max() <= problem.context and problem.lengths.min() >= problem.D
    for length, first, of_pages in zip(problem.lengths, problem.first, problem.live, strict=True):
        last = range(length - problem.D, length)
        seen = {k for p in last for k in range(p + 1) if problem.window is None or k > p - problem.window}
        assert seen == set(range(first, length))
        assert {k // problem.page_size for k in seen} == set(np.flatnonzero(of_pages))
        live, pages = live + len(seen), pages + of_pages.sum()
    assert problem.live_tokens == live and problem.live_bytes == live * 2 * 2 * 8 * 4
    assert problem.pages(0) == 1 + pages


@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: problem.label)
@pytest.mark.parametrize("spread", [0, 100_000])
def test_regions_share_no_page(problem, spread):
    regions, pages = problem.regions(spread), problem.pages(spread)
    assert regions * problem.live_bytes >= spread
    base = problem.table(regions)
    assert base.shape == (problem.B, problem.P)
    live = np.concatenate([(base + region)[problem.live] for region in range(regions)])
    assert sorted(live) == list(range(1, pages))  # each page but the sink, once
    assert base.min() >= 1 and (base + regions - 1).max() < pages


def test_a_turn_goes_to_the_next_region():
    """And the output is that of the queries and the table that it comes with."""
    problem, regions = tiny(2, 9, 2), 3
    pool = pool_of(problem, problem.live_bytes * regions)
    start = problems.carried(problem, regions)
    fixed = problems.fixed(problem, regions, pool)
    for turns, expected in ((1, 1), (2, 2), (3, 0), (4, 1)):
        chain = jax.jit(problems.chained(problems.by_xla(problem), turns), compiler_options=quick_compile.options())
        q, (table, region), out = chain(*start, fixed)
        assert int(region) == expected and (np.asarray(table) == problem.table(regions) + expected).all()
        assert np.abs(q - start[0]).max() < 1e-6
        again = jax.jit(problems.by_xla(problem))(q, pool, table, problem.positions, problem.lengths)
        assert np.allclose(out, again, rtol=0, atol=1e-6)
        assert problems.relative_error(problem, (q, (table, region), out), pool) < 1e-6


def test_a_pool_is_random_to_its_last_row(monkeypatch):
    monkeypatch.setattr(problems, "PIECE", 64)
    for rows in (7, 8, 9, 19):  # 8 a piece
        pool = np.asarray(problems.random_pool((rows, 8), "bfloat16"), np.float32)
        assert pool.shape == (rows, 8) and 0.5 < pool.std() < 1.5
        assert len({row.tobytes() for row in pool}) == rows


# What is right


@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: problem.label)
def test_float64_agrees_with_the_reference(problem):
    pool = pool_of(problem)
    assert problems.relative_error(problem, state_of(problem, pool), pool) < 1e-6


def test_an_error_is_seen():
    problem = tiny(4, 23, 3, ragged=True)
    pool = pool_of(problem)
    q, place, out = state_of(problem, pool)
    assert problem.lengths[1] != problem.lengths[2]
    longest = 1 + int(problem.lengths[1:3].argmax())
    for cell in ((0, 2, 0, 3), (3, 0, 3, 7), (longest, 1, 2, 0)):
        found = problems.relative_error(problem, (q, place, out.at[cell].add(0.5)), pool)
        assert 0.1 < found < 10, cell
    nothing = out.at[3 - longest, 0, 0, 0].set(jnp.nan)  # of a request that is not compared
    assert problems.relative_error(problem, (q, place, nothing), pool) == float("inf")
    for wrong in (dataclasses.replace(problem, window=4), dataclasses.replace(problem, head_dim=8, page_size=8)):
        _, _, other = state_of(wrong, pool)
        assert problems.relative_error(problem, (q, place, other), pool) > 0.01


# The loops, compiled for a GPU


@pytest.mark.parametrize("window", [None, 512])
def test_compiled_for_an_h200_a_loop_is_one_command_buffer(window, tmp_path):
    """That attends in every turn, and copies no pool."""
    if reason := aot.missing():
        pytest.skip(reason)
    problem, turns = Problem(2, 4096, 4, window=window), 5
    pages = problem.pages(1 << 30)
    for name, attend in problems.arms(problem, "triton").items():
        chain = timing.jit_chain(problems.chained(attend, turns), compiler_options("cuda"))
        lowered = aot.lower_for_h200(chain, *attention.arguments(problem, pages))
        compiled = aot.compile_lowered(lowered, dump=tmp_path / name)
        assert aot.thunks(tmp_path / name) == ["kCommandBuffer"]
        program = aot.aot.read_program(compiled)
        assert program.open_loops == 0
        kernels = [launch.times for launch in program.launches if launch.kind == "custom-call"]
        assert kernels == ([turns, turns] if name == KERNEL else []), name
        if name == XLA:
            products = [launch.times for launch in program.launches if "dot_general" in launch.name]
            assert products == [turns, turns]
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * problem.gathered_bytes < 1 << 29, name


# The command


def command(capsys, *words):
    """Exit status, parsed JSON or None, and standard error."""
    status = cli.main(["bench", "attention", *map(str, words), "--json=-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def jnp_arms(problem, backend, limit=np.inf, spoil=None):
    """All arms in plain jnp, which compiles quickly; one of them spoiled."""
    works = problems.arms(problem, backend, limit)
    works[KERNEL] = problems.by_xla(problem)
    if spoil:
        right = works[spoil]
        works[spoil] = lambda *operands: right(*operands).at[-1, -1, -1, -1].add(0.01)
    return works


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Real kernels, interpreted."""
    words = ["bench", "attention", *SMALL, "--shapes=2,24 3,25,ragged", "--rows=2", "--windows=none 3", "--runs=4"]
    return bench_cases.run_for_real(words, tmp_path_factory.mktemp("attention") / "found.json")


def test_a_small_run_on_a_cpu(small_run):
    status, _, _, result = small_run
    assert status == 0 and result["failures"] == []
    found = [(row["B"], row["context"], row["ragged"], row["D"], row["window"]) for row in result["rows"]]
    assert found == [(2, 24, False, 2, None), (3, 25, True, 2, None), (2, 24, False, 2, 3), (3, 25, True, 2, 3)]
    copied = result["copy"]["gb_per_s"]["median"]
    assert len(result["copy"]["all_gb_per_s"]) == 4 * len(found) and result["copy"]["bytes"] == 1 << 20
    for row in result["rows"]:
        assert list(row["arms"]) == [FLOOR, KERNEL, XLA] and row["turns"] == 2 and row["wrong"] == []
        assert all(len(arm["us"]) == 4 for arm in row["arms"].values())
        assert all(error < 1e-5 for error in row["errors"].values()) and set(row["errors"]) == {KERNEL, XLA}
        medians, figures = {name: arm["median"] for name, arm in row["arms"].items()}, row["figures"]
        us = medians[KERNEL] - medians[FLOOR]
        assert figures["us"] == pytest.approx(us)
        assert figures["of_copy"] == pytest.approx(row["live_bytes"] / us / 1e3 / copied)
        if figures["us_xla"] is not None:
            assert figures["over_xla"] == pytest.approx(us / (medians[XLA] - medians[FLOOR]))
    assert result["rows"][0]["live_bytes"] == 2 * 24 * 2 * 2 * 8 * 4
    assert result["rows"][2]["live_bytes"] == 2 * 4 * 2 * 2 * 8 * 4
    assert result["settings"]["kv_heads"] == 2 and result["environment"]["versions"]["jax"]


def test_what_a_small_run_prints(small_run):
    _, out, _, result = small_run
    rows = bench_cases.rows_of(out)
    assert "window none" in rows and "window 3" in rows
    D, us, spread, _, _, live, *_ = rows["2,24"]
    figures = result["rows"][2]["figures"]  # the later table counts
    assert (D, us, live) == ("2", f"{figures['us']:.1f}", "0.000") and " to " in spread
    assert [goal["met"] for goal in result["goals"]] == [None, None, None, True]  # there is no GPU to judge times by
    assert rows["relative error in float32"][-1] == "met" and "MISSED" not in out
    assert rows["kernel / xla, every shape"][-1] == "not judged" and "not compiled" in out


@pytest.mark.parametrize("spoil", [KERNEL, XLA])
def test_what_is_wrong_is_not_timed(capsys, monkeypatch, spoil):
    """It is exit status 1, a line that names it, and no figure that would need it."""
    monkeypatch.setattr(attention, "arms", functools.partial(jnp_arms, spoil=spoil))
    words = [*SMALL, "--shapes=2,9", "--rows=2", "--windows=none", "--runs=2"]
    status, result, err = command(capsys, *words)
    assert status == 1
    (row,) = result["rows"]
    assert spoil not in row["arms"] and row["wrong"] == [spoil] and row["errors"][spoil] > 1e-5
    line = f"2,9 D=2 window none, {spoil}: relative error {row['errors'][spoil]:.1e} against float64, at most 1e-05"
    assert result["failures"] == [line] and f"error: {line}" in err
    assert row["figures"]["over_xla"] is None and "wrong" in bench_cases.rows_of(err)["2,9"]
    assert (row["figures"]["us"] is None) == (spoil == KERNEL)
    assert result["goals"][-1]["met"] == (spoil != KERNEL) and len(result["copy"]["all_gb_per_s"]) == 2


def test_xla_is_left_out_where_it_would_gather_too_much(capsys, monkeypatch):
    monkeypatch.setattr(attention, "arms", jnp_arms)
    words = [*SMALL, "--shapes=2,9 2,40", "--rows=1", "--windows=none", "--runs=2", "--gather_limit_gb=1e-5"]
    status, result, err = command(capsys, *words)
    assert status == 0
    one, other = result["rows"]
    assert (one["gathered_bytes"], other["gathered_bytes"]) == (2 * 12 * 128, 2 * 40 * 128)
    assert XLA in one["arms"] and list(other["arms"]) == [FLOOR, KERNEL] and list(other["errors"]) == [KERNEL]
    assert "too large" in bench_cases.rows_of(err)["2,40"] and "Too large: 1 shapes" in err


def test_a_loop_that_fails_among_others_is_compiled_by_itself(monkeypatch):
    """And if it fails again, that is told."""
    problem, tried = tiny(2, 9, 1), []

    class Lowered:
        def __init__(self, name):
            self.name = name

        def compile(self):
            tried.append(self.name)
            if self.name == XLA and tried.count(XLA) < 1 + failures:
                raise RuntimeError("out of memory")
            return self.name

    named = dict.fromkeys([FLOOR, KERNEL, XLA])
    monkeypatch.setattr(attention, "arms", lambda *settings: {name: name for name in named})
    monkeypatch.setattr(attention, "lower", lambda problem, attend, turns, pages: Lowered(attend))
    failures, settings = 1, attention.Settings()
    found = attention.compile_arms([problem], settings, base.quiet)
    assert found == {problem: {name: name for name in named}} and sorted(tried) == [FLOOR, KERNEL, XLA, XLA]
    tried.clear()
    failures = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        attention.compile_arms([problem], settings, base.quiet)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["backend=triton", "--backend=interpret"]),
        ([*SMALL, "--shapes=2"], ["'2'", "B,context"]),
        ([*SMALL, "--shapes=0,70"], ["'0,70'", "at least 1"]),
        ([*SMALL, "--shapes=2,70,even"], ["'2,70,even'", "ragged"]),
        ([*SMALL, "--shapes="], ["nothing to time"]),
        ([*SMALL, "--shapes=2,79", "--windows=10"], ["nothing to time", "8 times"]),
        ([*SMALL, "--shapes=2,70", "--rows=1 x"], ["rows", "'x'"]),
        ([*SMALL, "--shapes=2,70", "--rows=0"], ["rows", "'0'"]),
        ([*SMALL, "--shapes=2,70", "--windows=all"], ["windows", "'all'"]),
        ([*SMALL, "--shapes=2,3", "--rows=4"], ["2,3", "4 rows"]),
        ([*SMALL, "--page_size=12"], ["page_size=12", "power of two"]),
        ([*SMALL, "--runs=1"], ["runs=1", "2"]),
        ([*SMALL, "--dtype=float16"], ["float16", "bfloat16"]),
        ([*SMALL, "--backend=mosaic"], ["mosaic", "triton"]),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, monkeypatch, words, parts):
    monkeypatch.setattr(attention.backends, "declined", lambda name: "there is no GPU")
    status, result, err = command(capsys, *words)
    assert (status, result) == (2, None)
    *_, message = err.splitlines()
    assert message.startswith("error: ") and all(part in message for part in parts), message


def test_a_pool_that_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(attention, "memory", lambda: 10_000.0)
    status, _, err = command(capsys, *SMALL, "--shapes=2,9 2,70", "--rows=1", "--windows=none")
    assert status == 2 and "'2,9 2,70'" in err and "jax has 0.0; leave it out" in err


def test_what_is_timed_by_default():
    """Every shape, few rows and many; windows in long contexts; as many turns as move some GB."""
    settings = attention.Settings()
    found = attention.problems(settings)
    whole = [problem for problem in found if problem.window is None]
    assert len(whole) == 2 * len(settings.shapes.split()) and {problem.D for problem in found} == {1, 8}
    assert {problem.context for problem in found if problem.window} == {32768, 131072}
    assert max(problem.pages(10**9) * problem.page_size * problem.token_bytes for problem in found) < 35e9
    turns = {str(problem): attention.turns_of(problem, settings) for problem in whole}
    assert (turns["1,1024"], turns["8,32768"], turns["64,131072"]) == (200, 14, 4)
    assert attention.turns_of(whole[0], dataclasses.replace(settings, turns=7)) == 7


# Figures and goals


def row(problem, error=1e-3, **us):
    samples = {arm: Samples((value,) * 4) for arm, value in us.items()}
    arms = [arm for arm in (KERNEL, XLA) if arm in us]
    return attention.Row(problem, 4, samples, dict.fromkeys(arms, error))


def test_figures():
    problem = Problem(1, 1000, 1)  # 4,096,000 bytes
    found = row(problem, floor=2.0, kernel=12.0, xla=52.0).figures(819_200.0)
    assert found == {"us": 10.0, "us_xla": 50.0, "of_copy": 0.5, "over_xla": 0.2}
    found = row(problem, floor=2.0, xla=1.0).figures(819_200.0)  # the kernel is wrong, xla no longer than the floor
    assert found == {"us": None, "us_xla": None, "of_copy": None, "over_xla": None}


COPIED = 4_096_000.0  # bytes a microsecond: a thousand tokens


def judged(rows, there=True):
    """Share, ratio, growth and error."""
    return attention.goals(rows, COPIED, there)


def test_goals():
    long, short = Problem(8, 32768, 1), Problem(1, 1024, 1)
    rows = [
        row(short, floor=1.0, kernel=11.0, xla=10.0),  # few tokens: its share is not asked for
        row(long, floor=1.0, kernel=301.0, xla=901.0),
        row(dataclasses.replace(long, D=8), floor=1.0, kernel=331.0, xla=901.0, error=2e-2),
        row(dataclasses.replace(long, D=8, window=1024), floor=1.0, kernel=101.0, xla=201.0),
    ]
    share, against, growth, error = judged(rows)
    assert share["worst"] == pytest.approx(262.144 / 330) and share["met"] is False
    assert share["at"] == "8,32768 D=8 window none"
    assert against["worst"] == pytest.approx(10 / 9) and against["met"] is False and against["at"].startswith("1,1024")
    assert growth["worst"] == pytest.approx(1.1) and growth["met"] is True
    assert error["worst"] == 2e-2 and error["met"] is False and error["limit"] == 1e-2
    assert judged(rows[1:2])[0]["met"] is True and judged(rows[1:])[1]["met"] is True


def test_what_is_not_there_or_not_of_a_gpu_is_not_judged():
    long = Problem(8, 32768, 1)
    one, more = row(long, floor=1.0, kernel=201.0, xla=301.0), dataclasses.replace(long, D=8)
    large = row(more, floor=1.0, kernel=201.0)  # XLA's path was left out: the others are judged
    assert [goal["met"] for goal in judged([one, large])] == [True] * 4
    wrong = attention.Row(more, 4, {FLOOR: Samples((1.0,) * 4)}, {KERNEL: 0.5, XLA: 1e-3})
    assert [goal["met"] for goal in judged([one, wrong])] == [None, None, None, False]
    assert [goal["met"] for goal in judged([one])] == [True, True, None, True]
    assert [goal["met"] for goal in judged([one, large], there=False)] == [None, None, None, True]
    short = row(Problem(1, 1024, 1), floor=1.0, kernel=2.0)
    assert [goal["met"] for goal in judged([short])] == [None, None, None, True]

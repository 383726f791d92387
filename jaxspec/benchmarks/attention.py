"""What attention over a paged cache costs on a GPU: the kernel, which reads K and V where they lie, and XLA's gather.

    floor     a turn without attention: the next page table, and queries that depend on the last output
    kernel    and pallas_kernels.paged_attention
    xla       and what a step does without it: K and V gathered from the cache, then attended to
    copy      x + 1 of a large array, in place: bytes read and written over time are the bandwidth that there is

All of them run in loops on the device, on a GPU one command buffer a call, and are timed in turn. The pool is only
read, and a loop goes through so much of it that no turn finds its K and V in the device's cache (see
`jaxspec.benchmarks.attention_problem`). First each loop runs once, and what its last turn wrote is compared with
attention in float64; an arm that is wrong is not timed. A shape is called "B,context", with ",ragged" for lengths drawn
evenly up to the context; D rows of each request are new, and their keys are counted in the context.

    us         of a turn less those of the floor, medians
    live       bytes of K and V that some row sees, each counted once
    of copy    live bytes over the bandwidth of the copy, over the time of the kernel

Masks that depend on lengths alone are the same in every turn; XLA may keep them, as it may from layer to layer. Its
path is left out where it would gather more than `gather_limit_gb`.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.benchmarks.attention_problem import (
    FLOOR,
    KERNEL,
    LIMITS,
    XLA,
    Attend,
    Problem,
    arms,
    carried,
    chained,
    fixed,
    random_pool,
    relative_error,
)
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.benchmarks.timing import COPY_TURNS, Chain, Samples, copy_chain, jit_chain
from jaxspec.errors import InputError
from pallas_kernels import backend as backends

SUMMARY = "Times paged attention on a GPU: the kernel against the measured copy bandwidth, and XLA's gather beside it."

CONTEXTS = (1024, 4096, 32768, 131072)
SHAPES = " ".join([*(f"{B},{context}" for B in (1, 8, 64) for context in CONTEXTS), "64,32768,ragged"])
SHARE = 0.80  # of the copy bandwidth, at
MANY = 1 << 18  # live tokens or more
SLOWEST = 1.0  # of the time of XLA's path
GROWTH = 1.15  # of the time from the fewest rows to the most, at
LONG = 32768  # tokens of context or more
WINDOWS = 8  # windows or more are in a context where one is timed
CALL_BYTES, LEAST_TURNS, MOST_TURNS = 16e9, 4, 200  # live bytes that a call goes through, and bounds of its turns


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    shapes: str = setting(SHAPES, "Shapes, B,context or B,context,ragged each: requests, keys of each.")
    rows: str = setting("1 8", "D, new rows a request.")
    windows: str = setting("none 1024", f"Windows; one is timed in contexts of at least {WINDOWS} times as many keys.")
    dtype: str = setting("bfloat16", "Of queries, keys and values.", choices=tuple(LIMITS))
    backend: str = setting(
        "triton", "Who runs the kernel; interpret runs anywhere, slowly.", choices=("triton", "interpret")
    )
    page_size: int = setting(64, "Tokens a page, a power of two.", least=1)
    kv_heads: int = setting(8, "K/V heads.", least=1)
    group: int = setting(4, "Query heads a K/V head.", least=1)
    head_dim: int = setting(128, "Elements of a head.", least=1)
    runs: int = setting(10, "Timed calls of each loop, in turn.", least=2)
    turns: int = setting(0, "Turns of a loop a call; 0: by bytes, 4 to 200.", least=0)
    spread_mb: int = setting(1024, "MB of different K and V that the turns of a loop go through.", least=0)
    copy_mb: int = setting(1024, "MiB of the array that is copied.", least=1)
    gather_limit_gb: float = setting(
        12.0, "GB that XLA's path may gather; it is left out where it takes more.", least=0
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem, timed.

    Attributes:
      turns: of a call.
      samples: of each arm that is right, and of the floor: microseconds a turn.
      errors: of each arm but the floor, against float64.
    """

    problem: Problem
    turns: int
    samples: dict[str, Samples]
    errors: dict[str, float]

    @property
    def wrong(self) -> dict[str, float]:
        """The errors that are too large."""
        return {arm: error for arm, error in self.errors.items() if not error <= LIMITS[self.problem.dtype]}

    def us(self, arm: str) -> float | None:
        """Of a turn less the floor; None where the arm was not timed, or took no longer than the floor."""
        if arm not in self.samples or FLOOR not in self.samples:
            return None
        over = self.samples[arm].median - self.samples[FLOOR].median
        return over if over > 0 else None

    def figures(self, copied: float) -> dict[str, float | None]:
        """What is said of a row, at `copied` bytes a microsecond."""
        mine, other = self.us(KERNEL), self.us(XLA)
        return {
            "us": mine,
            "us_xla": other,
            "of_copy": None if mine is None else self.problem.live_bytes / copied / mine,
            "over_xla": None if mine is None or other is None else mine / other,
        }


def run(settings: Settings, task: Task = quiet) -> Report:
    """Compares, then times.

    Raises:
      InputError: no such shapes, or no GPU.
    """
    if settings.backend == "triton" and (reason := backends.declined("triton")):
        raise InputError(
            f"backend=triton: {reason}; --backend=interpret --shapes=2,100 --windows=none --turns=2 --copy_mb=1 "
            "--spread_mb=0 --kv_heads=2 --head_dim=16 runs it small on a CPU"
        )
    found, spread = problems(settings), int(settings.spread_mb * 1e6)
    shape = found[0].cache(max(problem.pages(spread) for problem in found))
    size = shape.size * shape.dtype.itemsize
    if size > memory():
        raise InputError(
            f"shapes={settings.shapes!r}: the largest needs {size / 1e9:.1f} GB of K and V, and jax has "
            f"{memory() / 1e9:.1f}; leave it out"
        )
    compiled = compile_arms(found, settings, task)
    copy = copy_chain(settings.copy_mb << 20)
    with task("pool", f"drawing {size / 1e9:.2f} GB"):
        pool = jax.block_until_ready(random_pool(shape.shape, settings.dtype))
    rows, copies = [], []
    for problem, calls in compiled.items():
        with task(problem.label, f"timing {len(calls)} loops"):
            row, copied = measure(problem, calls, pool, copy, spread, turns_of(problem, settings), settings.runs)
        rows.append(row)
        copies += copied
    return report(settings, rows, Samples(tuple(copies)))


def memory() -> float:
    """Bytes that jax may use of the device; infinite where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))


def problems(settings: Settings) -> list[Problem]:
    """All that is timed, window by window."""
    if settings.page_size & (settings.page_size - 1):
        raise InputError(f"page_size={settings.page_size}: must be a power of two")
    names = ("dtype", "page_size", "kv_heads", "group", "head_dim")
    sizes = {name: getattr(settings, name) for name in names}
    shapes = [parse_shape(word) for word in settings.shapes.split()]
    found = {}
    for window in parse_windows(settings.windows):
        for B, context, ragged in shapes:
            for D in parse_rows(settings.rows):
                if window is None or context >= WINDOWS * window:
                    found[Problem(B, context, D, ragged, window, **sizes)] = None
    if not found:
        raise InputError(
            f"shapes={settings.shapes!r}, rows={settings.rows!r}, windows={settings.windows!r}: there is nothing to "
            f"time; a window needs a context of {WINDOWS} times as many keys"
        )
    return list(found)


def parse_shape(word: str) -> tuple[int, int, bool]:
    """B, context, and whether lengths differ.

    Example:
      >>> parse_shape("8,4096"), parse_shape("64,32768,ragged")
      ((8, 4096, False), (64, 32768, True))
    """
    parts = word.split(",")
    ragged = parts[2:] == ["ragged"]
    if len(parts) != 2 + ragged or not all(part.isdecimal() and int(part) > 0 for part in parts[:2]):
        raise InputError(f"shape {word!r}: give two numbers, B,context, each at least 1, or B,context,ragged")
    return int(parts[0]), int(parts[1]), ragged


def parse_rows(words: str) -> list[int]:
    """Numbers of rows, in the order given."""
    if wrong := [word for word in words.split() if not word.isdecimal() or int(word) < 1]:
        raise InputError(f"rows: {wrong[0]!r} is no number of rows, which is at least 1")
    return [int(word) for word in words.split()]


def parse_windows(words: str) -> list[int | None]:
    """Windows, in the order given."""
    if wrong := [word for word in words.split() if word != "none" and (not word.isdecimal() or int(word) < 1)]:
        raise InputError(f"windows: {wrong[0]!r} is neither none nor a number of keys, which is at least 1")
    return [None if word == "none" else int(word) for word in words.split()]


def turns_of(problem: Problem, settings: Settings) -> int:
    """Turns of a call."""
    return settings.turns or int(min(max(CALL_BYTES // problem.live_bytes, LEAST_TURNS), MOST_TURNS))


# What is compiled and timed


def compile_arms(found: Sequence[Problem], settings: Settings, task: Task) -> dict[Problem, dict[str, Callable]]:
    """The loops of all arms of all problems, traced one after the other and compiled side by side meanwhile. No array
    is made: the pool would take the memory in which XLA tries its matrix products."""
    spread, limit = int(settings.spread_mb * 1e6), settings.gather_limit_gb * 1e9
    pages = max(problem.pages(spread) for problem in found)
    works = {problem: arms(problem, settings.backend, limit) for problem in found}
    count = sum(map(len, works.values()))
    with task("loops", f"compiling {count}"), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {}
        for problem, attends in works.items():
            for arm, attend in attends.items():
                lowered = lower(problem, attend, turns_of(problem, settings), pages)
                started[problem, arm] = lowered, pool.submit(lowered.compile)
        concurrent.futures.wait([compiling for _, compiling in started.values()])
    compiled = {problem: {} for problem in works}
    for (problem, arm), (lowered, compiling) in started.items():
        # One that failed gets a second chance by itself: many large products tried at a time may not fit.
        compiled[problem][arm] = lowered.compile() if compiling.exception() else compiling.result()
    return compiled


def arguments(problem: Problem, pages: int) -> tuple:
    """Shapes of what a loop takes."""
    B, integers = problem.B, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    number, table, positions, lengths = map(integers, ((), (B, problem.P), (B, problem.D), (B,)))
    q = jax.ShapeDtypeStruct((B, problem.D, problem.H, problem.head_dim), problem.dtype)
    return q, (table, number), q, (number, problem.cache(pages), positions, lengths)


def lower(problem: Problem, attend: Attend | None, turns: int, pages: int) -> jax.stages.Lowered:
    """The loop of an arm, lowered for this machine; the pool has so many pages."""
    return jit_chain(chained(attend, turns)).lower(*arguments(problem, pages))


def measure(
    problem: Problem,
    calls: Mapping[str, Callable],
    pool: jax.Array,
    copy: Chain,
    spread: int,
    turns: int,
    runs: int,
) -> tuple[Row, list[float]]:
    """Compares what the arms give, and times those that are right.

    Args:
      calls: the compiled loop of each arm.
      pool: K and V.
      copy: what `copy_chain` makes.
      spread: bytes of K and V that the turns go through.
      turns: of a call.
      runs: timed calls of each arm, in turn; an untimed one comes before each.

    Returns:
      The row, and bytes a microsecond of the copy, run by run.
    """
    regions = problem.regions(spread)
    read_only = fixed(problem, regions, pool)
    chains = {arm: Chain(call, carried(problem, regions), read_only, turns) for arm, call in calls.items()}
    errors = {}
    for arm, chain in chains.items():
        chain.advance()
        if arm != FLOOR:
            errors[arm] = relative_error(problem, chain.carried, pool)
    row = Row(problem, turns, {}, errors)
    timed = {"copy": copy} | {arm: chain for arm, chain in chains.items() if arm not in row.wrong}
    us = {arm: [] for arm in timed}
    for _ in range(runs):
        for arm, chain in timed.items():
            chain.advance()
            us[arm].append(chain.advance())
    moved = 2 * copy.carried[0].nbytes
    copied = [moved / each for each in us.pop("copy")]
    return dataclasses.replace(row, samples={arm: Samples(tuple(each)) for arm, each in us.items()}), copied


# What is told


def goals(rows: Sequence[Row], copied: float, judged: bool) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was; `met` is None where there is nothing to judge by.

    Args:
      copied: bytes a microsecond of the copy.
      judged: whether times mean anything.
    """
    figures = [(row.figures(copied), row) for row in rows]
    whole = [(told, row) for told, row in figures if row.problem.window is None]
    share = [(told["of_copy"], row) for told, row in figures if row.problem.live_tokens >= MANY]
    against = [(told["over_xla"], row) for told, row in figures if XLA in row.errors]
    by_shape = {}
    for told, row in whole:
        if row.problem.context >= LONG:
            by_shape.setdefault(dataclasses.replace(row.problem, D=1), []).append((told["us"], row))
    growth = []
    for pairs in by_shape.values():
        (few, one), (more, most) = (pick(pairs, key=lambda pair: pair[1].problem.D) for pick in (min, max))
        if one is not most:
            growth.append((None if few is None or more is None else more / few, most))
    dtype = rows[0].problem.dtype
    errors = [(row.errors.get(KERNEL), row) for row in rows]
    return [
        _judge(f"share of the copy bandwidth, from {MANY} live tokens on", "at least", SHARE, share, judged),
        _judge("kernel / xla, every shape", "at most", SLOWEST, against, judged),
        _judge(f"most rows / fewest, from {LONG} tokens on", "at most", GROWTH, growth, judged),
        _judge(f"relative error in {dtype}", "at most", LIMITS[dtype], errors, True),
    ]


def _judge(
    goal: str, bound: str, limit: float, values: Sequence[tuple[float | None, Row]], judged: bool
) -> dict[str, Any]:
    known = [(value, row) for value, row in values if value is not None]
    pick = min if bound == "at least" else max
    worst, row = pick(known, key=lambda pair: pair[0], default=(None, None))
    at, met = None if row is None else row.problem.label, None
    if judged and known and len(known) == len(values):
        met = worst >= limit if bound == "at least" else worst <= limit
    return {"goal": goal, "bound": bound, "limit": limit, "worst": worst, "at": at, "met": met}


def report(settings: Settings, rows: Sequence[Row], copies: Samples) -> Report:
    """Tables, samples, goals, and what is wrong. `copies`: bytes a microsecond."""
    compiled, copied = settings.backend == "triton", copies.median
    reached = goals(rows, copied, compiled)
    windows = dict.fromkeys(row.problem.window for row in rows)
    tables = [_table([row for row in rows if row.problem.window == window], copied) for window in windows]
    failures = [
        f"{row.problem.label}, {arm}: relative error {error:.1e} against float64, at most {LIMITS[settings.dtype]:g}"
        for row in rows
        for arm, error in row.wrong.items()
    ]
    lines = _notes(settings, rows, copies)
    results = {
        "rows": [_entry(row, copied) for row in rows],
        "copy": {
            "bytes": settings.copy_mb << 20,
            "gb_per_s": {"median": copied / 1e3, "quartiles": [each / 1e3 for each in copies.quartiles]},
            "all_gb_per_s": [each / 1e3 for each in copies.us],
        },
        "goals": reached,
        "notes": lines,
    }
    return Report([*tables, _goal_table(reached), [(line,) for line in lines]], results, failures)


def _entry(row: Row, copied: float) -> dict[str, Any]:
    problem = row.problem
    return {
        **dataclasses.asdict(problem),
        "live_tokens": problem.live_tokens,
        "live_bytes": problem.live_bytes,
        "gathered_bytes": problem.gathered_bytes,
        "turns": row.turns,
        "arms": {arm: samples.to_json() for arm, samples in row.samples.items()},
        "errors": row.errors,
        "wrong": list(row.wrong),
        "figures": row.figures(copied),
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(rows: Sequence[Row], copied: float) -> list[Sequence[str]]:
    head = (f"window {rows[0].problem.window or 'none'}", "D", "us kernel", "quartiles", "us xla", "us floor")
    table = [(*head, "GB live", "of copy", "kernel / xla", "error", "error xla")]
    for row in rows:
        told, floor = row.figures(copied), row.samples[FLOOR].median
        spread = "-"
        if KERNEL in row.samples:
            spread = " to ".join(f"{each - floor:.1f}" for each in row.samples[KERNEL].quartiles)

        def us(arm, row=row):
            return (
                "wrong" if arm in row.wrong else "too large" if arm not in row.errors else _number(row.us(arm), ".1f")
            )

        table.append(
            (
                str(row.problem),
                str(row.problem.D),
                us(KERNEL),
                spread,
                us(XLA),
                f"{floor:.1f}",
                f"{row.problem.live_bytes / 1e9:.3f}",
                _number(told["of_copy"], ".3f"),
                _number(told["over_xla"], ".3f"),
                *(_number(row.errors.get(arm), ".1e") for arm in (KERNEL, XLA)),
            )
        )
    return table


def _goal_table(found: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    said = {True: "met", False: "MISSED", None: "not judged"}
    table = [("goal", "limit", "worst", "at", "")]
    for goal in found:
        worst = _number(goal["worst"], ".1e" if goal["limit"] < 0.1 else ".3f")
        limit = f"{goal['bound']} {goal['limit']:g}"
        table.append((goal["goal"], limit, worst, goal["at"] or "-", said[goal["met"]]))
    return table


def _notes(settings: Settings, rows: Sequence[Row], copies: Samples) -> list[str]:
    found = []
    if settings.backend != "triton":
        found.append(f"Kernel: {settings.backend}, not compiled. These times mean nothing; errors alone are judged.")
    low, high = (each / 1e3 for each in copies.quartiles)
    found += [
        f"Copy: {copies.median / 1e3:.1f} GB/s read and written, quartiles {low:.1f} to {high:.1f}, {len(copies.us)} "
        f"calls of {COPY_TURNS} x {settings.copy_mb} MiB.",
        f"Medians of {settings.runs} calls, loops in turn, less the floor. The turns of a loop go through K and V "
        f"of at least {settings.spread_mb} MB.",
        "Before: what the last turn of each loop wrote was compared with float64; what is wrong is not timed.",
    ]
    left = sum(XLA not in row.errors for row in rows)
    if left:
        found.append(f"Too large: {left} shapes of which XLA's path would gather over {settings.gather_limit_gb:g} GB.")
    return found

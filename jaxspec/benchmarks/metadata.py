"""What the metadata of a verify cost on a GPU: one launch, against nothing, separate launches and XLA's own fusion.

    touch            the kernel that ends every step, alone
    empty            and a kernel that stores one number
    fused            and forward_metadata, all in one launch
    separate         and the single operations, a launch each
    reference        and the values in plain jnp, written to the packed buffer by what XLA makes of it
    reference apart  the same with an array for each section, which XLA fuses better

All of them run in chains (see `jaxspec.benchmarks.timing`): steps unrolled in a loop, on a GPU one command buffer, each
step ended by a small kernel that takes every output. First each chain runs once, and what its last step wrote is
compared with the reference, bit for bit; a chain that differs is not timed. Then the chains of a shape are timed in
turn. A row in `live` tokens, D rows a request, of B requests is called "B,live,D".

    cost          us a step less those of the touch alone: what the launches add to a step
    over empty    us a step less those with the empty kernel: what the work adds to a launch
    ratios        of costs; the reference is the faster one of its two forms

Two more tables have a fixed number of live tokens in tables of growing width, with columns behind the live ones left
alone, and cleared.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.benchmarks.metadata_problem import (
    APART,
    EMPTY,
    FULL_SWA,
    FUSED,
    KINDS,
    REFERENCE,
    SEPARATE,
    TOUCH,
    Problem,
    arms_of,
    difference,
    launch_arms_of,
    read,
)
from jaxspec.benchmarks.timing import Chain, Samples, Work, compile_all, place_of_touch, time_in_turn
from jaxspec.errors import InputError
from pallas_kernels import backend as backends

SUMMARY = "Times the metadata of a verify on a GPU: one launch, separate launches, XLA's fusion, an empty kernel."

SHAPES = "1,2048,4 8,8192,4 48,2560,8 64,32768,4 256,8192,4 16,131072,6"
WIDTHS = "8192 32768 131072 524288 1048576"
ONE, MANY = 0.4, 1.0  # us over an empty kernel: of one request, at every shape
SHARE = 0.35  # of the cost of XLA's fusion
FLAT = 0.05  # of the least cost over all widths


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    shapes: str = setting(SHAPES, "Shapes, B,live,D each: requests, live tokens, rows a request.")
    kinds: str = setting("both", "FULL and sliding-window pages, pooled attention, or both.", choices=("both", *KINDS))
    widths: str = setting(WIDTHS, "Widths in tokens of the tables of width_shape; empty for none.")
    width_shape: str = setting("8,4096,4", "The shape, B,live,D, that is timed in tables of several widths.")
    backend: str = setting(
        "compiled",
        "Who runs the kernels: each compiled backend that there is, or one of them; interpret runs anywhere, slowly.",
        choices=("compiled", "triton", "mosaic", "interpret"),
    )
    runs: int = setting(20, "Timed calls of each chain, in turn.", least=10)
    steps: int = setting(32, "Steps that a turn of the loop unrolls.", least=1)
    turns: int = setting(20, "Turns of the loop a call.", least=1)


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem, timed.

    Attributes:
      samples: of each arm; none of those that differ.
      differences: of the arms that differ from the reference, where they do first.
    """

    problem: Problem
    samples: dict[str, Samples]
    differences: dict[str, str]

    def median(self, arm: str) -> float | None:
        return self.samples[arm].median if arm in self.samples else None

    def over(self, arm: str, base: str) -> float | None:
        """Microseconds a step more than those of another arm; None where one of them was not timed."""
        one, other = self.median(arm), self.median(base)
        return None if one is None or other is None else one - other

    def cost(self, arm: str) -> float | None:
        return self.over(arm, TOUCH)

    def figures(self, backend: str) -> dict[str, float | None]:
        """What is said of the fused launch by a backend. None stands for what was not timed, or differs."""
        mine = self.cost(f"{FUSED}, {backend}")
        references = [cost for arm in (REFERENCE, APART) if (cost := self.cost(arm)) is not None]
        return {
            "cost": mine,
            "over_empty": self.over(f"{FUSED}, {backend}", f"{EMPTY}, {backend}"),
            "over_separate": _ratio(mine, self.cost(f"{SEPARATE}, {backend}")),
            "over_reference": _ratio(mine, min(references, default=None)),
        }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0 else part / whole


def run(settings: Settings, task: Task = quiet) -> Report:
    """Compares, then times.

    Raises:
      InputError: no such shapes; or no such backend here, a GPU above all.
    """
    names = choose_backends(settings.backend)
    kinds = KINDS if settings.kinds == "both" else (settings.kinds,)
    shapes = [parse_shape(word) for word in settings.shapes.split()]
    problems = dict.fromkeys(Problem(kind, *shape) for kind in kinds for shape in shapes)
    wide = dict.fromkeys(
        Problem(FULL_SWA, *parse_shape(settings.width_shape), width=width, zero_tail=cleared)
        for cleared in (False, True)
        for width in parse_widths(settings.widths)
    )
    if not problems and not wide:
        raise InputError("shapes and widths are empty: there is nothing to time")
    works = {problem: arms_of(problem, names) for problem in problems}
    works |= {problem: launch_arms_of(problem, names) for problem in wide}
    rows = []
    for problem, chains in compile_chains(works, settings, task).items():
        with task(problem.label, f"timing {len(chains)} chains"):
            rows.append(measure(problem, chains, settings.runs))
    return report(settings, names, rows[: len(problems)], rows[len(problems) :])


def choose_backends(asked: str) -> list[str]:
    """Who is timed, the one with the shorter launch first."""
    if asked == "interpret":
        return [asked]
    if jax.default_backend() != "gpu":
        raise InputError(
            f"backend={asked}: it times CUDA kernels, and jax finds no GPU; "
            "--backend=interpret --shapes=2,100,3 --widths= --steps=2 --turns=1 runs it small on a CPU"
        )
    found = {name: backends.declined(name) for name in ("triton", "mosaic") if asked in (name, "compiled")}
    there = [name for name, reason in found.items() if reason is None]
    if not there:
        raise InputError("; ".join(f"backend={name}: {reason}" for name, reason in found.items()))
    return there


def parse_shape(word: str) -> tuple[int, int, int]:
    """B, live and D.

    Example:
      >>> parse_shape("16,131072,6")
      (16, 131072, 6)
    """
    parts = word.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"shape {word!r}: give three numbers, B,live,D, each at least 1")
    B, live, D = map(int, parts)
    return B, live, D


def parse_widths(words: str) -> list[int]:
    """Numbers of tokens, in the order given."""
    if wrong := [word for word in words.split() if not word.isdecimal()]:
        raise InputError(f"widths: {wrong[0]!r} is no number of tokens")
    return [int(word) for word in words.split()]


def compile_chains(
    works: Mapping[Problem, Mapping[str, Work]], settings: Settings, task: Task
) -> dict[Problem, dict[str, Chain]]:
    """The chains of all arms of all problems."""
    flat = {(problem, arm): work for problem, arms in works.items() for arm, work in arms.items()}
    touch = settings.backend if settings.backend == "interpret" else place_of_touch()
    with task("chains", f"compiling {len(flat)}"):
        compiled = compile_all(flat, steps=settings.steps, turns=settings.turns, backend=touch)
    return {problem: {arm: compiled[problem, arm] for arm in arms} for problem, arms in works.items()}


def measure(problem: Problem, chains: Mapping[str, Chain], runs: int) -> Row:
    """Compares what the arms write, and times those that agree."""
    for chain in chains.values():
        chain.advance()
    expected = read(problem, chains[REFERENCE].out)
    compared = {name: chain for name, chain in chains.items() if not name.startswith((TOUCH, EMPTY))}
    found = {name: difference(expected, read(problem, chain.out)) for name, chain in compared.items()}
    differences = {name: text for name, text in found.items() if text}
    samples = time_in_turn({name: chain for name, chain in chains.items() if name not in differences}, runs)
    return Row(problem, samples, differences)


# What is told


def goals(names: Sequence[str], rows: Sequence[Row], series: Sequence[Row], judged: bool) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was; `met` is None where there is nothing to judge by."""
    found = []
    for name in names:

        def figures(key, rows, name=name):
            return [(row.figures(name)[key], row) for row in rows]

        plain = [row for row in rows if row.problem.kind == FULL_SWA]
        ones = [row for row in plain if row.problem.B == 1]
        for text, limit, values in (
            ("us over an empty kernel, one request", ONE, figures("over_empty", ones)),
            ("us over an empty kernel, every shape", MANY, figures("over_empty", plain)),
            ("fused / reference, every shape", SHARE, figures("over_reference", rows)),
        ):
            found.append(_judge(text, limit, name, values, judged))
        for cleared in (False, True):
            told = f"growth of the cost with the width, columns {'cleared' if cleared else 'left alone'}"
            costs = figures("cost", [row for row in series if row.problem.zero_tail == cleared])
            least = min((cost for cost, _ in costs if cost is not None), default=None)
            growth = [(None if cost is None or least <= 0 else cost / least - 1, row) for cost, row in costs]
            found.append(_judge(told, FLAT, name, growth, judged))
    return found


def _judge(
    goal: str, limit: float, backend: str, values: Sequence[tuple[float | None, Row]], judged: bool
) -> dict[str, Any]:
    known = [(value, row) for value, row in values if value is not None]
    worst, row = max(known, key=lambda pair: pair[0], default=(None, None))
    whole = judged and bool(known) and len(known) == len(values)
    at = None if row is None else row.problem.label
    met = worst <= limit if whole else None
    return {"goal": goal, "limit": limit, "backend": backend, "worst": worst, "at": at, "met": met}


def report(settings: Settings, names: Sequence[str], rows: Sequence[Row], series: Sequence[Row]) -> Report:
    """Tables, samples, goals, and what differs."""
    on_gpu = settings.backend != "interpret"
    reached = goals(names, rows, series, on_gpu)
    tables = [_table(kind, names, found) for kind in KINDS if (found := [r for r in rows if r.problem.kind == kind])]
    tables += [
        _wide_table(cleared, names, found)
        for cleared in (False, True)
        if (found := [row for row in series if row.problem.zero_tail == cleared])
    ]
    failures = [
        f"{row.problem.label}, {arm}: outputs differ from the reference, {text}"
        for row in (*rows, *series)
        for arm, text in row.differences.items()
    ]
    lines = list(_notes(settings, on_gpu))
    results = {
        "rows": [_entry(row, names) for row in rows],
        "widths": [_entry(row, names) for row in series],
        "goals": reached,
        "notes": lines,
    }
    return Report([*tables, _goal_table(reached), [(line,) for line in lines]], results, failures)


def _entry(row: Row, names: Sequence[str]) -> dict[str, Any]:
    problem = row.problem
    shape = {"kind": problem.kind, "B": problem.B, "live": problem.live, "D": problem.D, "page_size": problem.page}
    width = {"columns": problem.columns, "zero_tail": problem.zero_tail}
    return {
        **shape,
        **width,
        "arms": {name: samples.to_json() for name, samples in row.samples.items()},
        "differences": row.differences,
        "figures": {name: row.figures(name) for name in names},
    }


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _cells(row: Row, name: str) -> Iterator[str]:
    """Medians, spread and figures of a row by a backend; "differs" in place of what is not as it must be."""

    def of(arm):
        return "differs" if arm in row.differences else _number(row.median(arm))

    mine, figures = f"{FUSED}, {name}", row.figures(name)
    yield from (of(TOUCH), of(f"{EMPTY}, {name}"), of(mine))
    samples = row.samples.get(mine)
    yield "-" if samples is None else f"{min(samples.us):.2f} to {max(samples.us):.2f}"
    yield _number(figures["over_empty"])
    yield from (of(arm) for arm in (f"{SEPARATE}, {name}", REFERENCE, APART))
    yield from (_number(figures[key], ".3f") for key in ("over_separate", "over_reference"))


def _table(kind: str, names: Sequence[str], rows: Sequence[Row]) -> list[Sequence[str]]:
    spread = ("least to most", "over empty")
    ratios = ("/ separate", "/ reference")
    head = (f"us a step, {kind}", TOUCH, EMPTY, FUSED, *spread, SEPARATE, REFERENCE, "apart", *ratios)
    return [head, *((f"{row.problem} {name}", *_cells(row, name)) for row in rows for name in names)]


def _wide_table(cleared: bool, names: Sequence[str], rows: Sequence[Row]) -> list[Sequence[str]]:
    first = rows[0].problem
    told = f"us a step, {first.kind} {first}, columns behind {'cleared' if cleared else 'left alone'}"
    table = [(told, TOUCH, EMPTY, FUSED, "least to most", "over empty", REFERENCE)]
    for row in rows:
        for name in names:
            touch, none, mine, spread, over, _, reference, *_ = _cells(row, name)
            table.append((f"{row.problem.width} tokens {name}", touch, none, mine, spread, over, reference))
    return table


def _goal_table(found: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    said = {True: "met", False: "MISSED", None: "not judged"}
    table = [("goal", "at most", "worst", "at", "")]
    for goal in found:
        cells = (f"{goal['limit']:g}", _number(goal["worst"], ".3f"), goal["at"] or "-", said[goal["met"]])
        table.append((f"{goal['goal']}, {goal['backend']}", *cells))
    return table


def _notes(settings: Settings, on_gpu: bool) -> Iterator[str]:
    if not on_gpu:
        yield "No GPU: interpreted kernels, not compiled ones. These times mean nothing, and no goal is judged by them."
    yield (
        f"Medians of {settings.runs} calls of {settings.turns} x {settings.steps} steps, chains in turn, each call "
        "with the arrays at other places; the touch takes all outputs of a step."
    )
    yield "Ratios: us a step less the touch, fused / the other; the reference is the faster of its two forms."
    yield "Before: what the last step of each chain wrote was compared with the reference; what differs is not timed."

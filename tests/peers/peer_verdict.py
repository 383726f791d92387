"""Ours over theirs: what the outputs differ in, what each side costs over its floor, and the goal."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
from peer_job import OUTPUTS, Arrays, Job, Samples, Shape, Side, of_work

WORKS = {"step": "FULL+SWA verify with state slots", "kpool": "KPool verify"}
PARTS = {"step": ("window", "tables", "state"), "kpool": ()}  # what the peer's program consists of, timed as well


def goal(work: str, shape: Shape) -> float | None:
    """The most that ours may cost over theirs; None where nothing was promised."""
    if work == "step":
        return 0.1 if shape.B == 256 else 0.25
    if shape == Shape(16, 131072, 6):
        return 0.06
    return 0.6 if shape.B == 1 else None


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of work at one shape. All `differences` in the outputs make what is measured worthless.

    Attributes:
      work: of WORKS.
      shape: of the job.
      differences: what the sides wrote differently, a line an array.
      theirs, ours: the samples of each program; empty if nothing was timed.
    """

    work: str
    shape: Shape
    differences: list[str]
    theirs: Samples
    ours: Samples

    @property
    def timed(self) -> bool:
        """Whether there is anything to measure by."""
        return bool(self.theirs and self.ours) and not self.differences

    @property
    def goal(self) -> float | None:
        """See `goal`."""
        return goal(self.work, self.shape)

    @property
    def their_margin(self) -> float:
        """What the peer's work costs over one launch that does next to nothing."""
        return statistics.median(self.theirs["all"]) - statistics.median(self.theirs["tiny op"])

    @property
    def our_margin(self) -> float:
        """The same of ours, over an empty kernel in the same chain."""
        return statistics.median(self.ours["all"]) - statistics.median(self.ours["empty"])

    @property
    def ratio(self) -> float | None:
        """Our margin over theirs; None where the outputs differ, nothing was timed or theirs does not stand out."""
        return self.our_margin / self.their_margin if self.timed and self.their_margin > 0 else None

    @property
    def launched_ratio(self) -> float | None:
        """The same with the launches: ours over a chain without it, by all that the peer's work costs in its chain."""
        if not self.timed:
            return None
        ours = statistics.median(self.ours["all"]) - statistics.median(self.ours["touch"])
        return ours / statistics.median(self.theirs["all"])

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a ratio."""
        return None if self.goal is None or self.ratio is None else self.ratio <= self.goal


def judge(job: Job, inputs: Sequence[Arrays], theirs: Side, ours: Side) -> list[Row]:
    """A row for each kind of work and shape, of the inputs and both sides of a job."""
    rows = []
    for work in WORKS:
        for number, shape in enumerate(job.shapes):
            given, a, b = (of_work(arrays[number], work) for arrays in (inputs, theirs.outputs, ours.outputs))
            live = -(-(given["seq_lens"] + shape.D) // job.page)
            found = differences(OUTPUTS[work], live, shape.D, a, b)
            rows.append(
                Row(work, shape, found, theirs.samples[number].get(work, {}), ours.samples[number].get(work, {}))
            )
    return rows


def differences(names: Sequence[str], live: np.ndarray, D: int, theirs: Arrays, ours: Arrays) -> list[str]:
    """What the sides wrote differently, a line an array. All of it counts where the contracts agree, but

    of real_page_table the live pages of each request: ours clears the columns behind them, theirs leaves them. Theirs
    has a row for each of the D rows of a request, ours one. And of the rows' token ids column 0, the anchors.
    """
    found = []
    for name in names:
        if missing := [who for who, side in (("theirs", theirs), ("ours", ours)) if name not in side]:
            found.append(f"{name}: not among {' or '.join(missing)}")
            continue
        a, b = theirs[name], ours[name]
        if name == "anchor_ids":
            a, b = a[:, :1], b[:, :1]
        if name == "real_page_table":
            b = np.repeat(b, D, axis=0)
            mask = np.arange(a.shape[1]) < np.repeat(live, D)[:, None]
            a, b = (np.where(mask, side, 0) if side.shape == mask.shape else side for side in (a, b))
        if a.shape != b.shape:
            found.append(f"{name}: theirs is {list(a.shape)}, ours {list(b.shape)}")
        elif count := int((a != b).sum()):
            where = tuple(np.argwhere(a != b)[0].tolist())
            found.append(f"{name}: {count} of {a.size} differ, the first at {list(where)}: {a[where]} != {b[where]}")
    return found


def tables(rows: Sequence[Row]) -> list[list[Sequence[str]]]:
    """What is told: a table for each kind of work, its first row the head; no times where the outputs differ."""
    found = []
    for work, title in WORKS.items():
        of_work = [row for row in rows if row.work == work]
        head = [title, "outputs"]
        if any(row.timed for row in of_work):
            head += [*PARTS[work], "theirs", "tiny op", "ours", "empty", "spread"]
            head += ["theirs, net", "ours, net", "ratio", "goal", "with launches"]
        table = [head]
        for row in of_work:
            cells = [*_times(row), *_verdict(row)] if row.timed else []
            table.append([str(row.shape), "differ" if row.differences else "equal", *cells])
        found.append(table)
    return found


def _times(row: Row) -> list[str]:
    theirs = [row.theirs[name] for name in (*PARTS[row.work], "all", "tiny op")]
    ours = [row.ours[name] for name in ("all", "empty")]
    spread = max(_spread(side["all"]) for side in (row.theirs, row.ours))
    return [*(f"{statistics.median(samples):.2f}" for samples in theirs + ours), f"{spread:.0%}"]


def _verdict(row: Row) -> list[str]:
    ratio, launched = (
        "-" if number is None else f"{number:.3f}" + mark
        for number, mark in ((row.ratio, {False: " missed"}.get(row.met, "")), (row.launched_ratio, ""))
    )
    goal = "-" if row.goal is None else str(row.goal)
    return [f"{row.their_margin:.2f}", f"{row.our_margin:.2f}", ratio, goal, launched]


def _spread(samples: list[float]) -> float:
    """(Largest - smallest) / median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def results(rows: Sequence[Row]) -> list[dict]:
    """The same and the samples, ready for JSON."""
    entries = []
    for row in rows:
        entry = {"work": row.work, "shape": dataclasses.asdict(row.shape), "differences": row.differences}
        entry |= {"samples_us": {"theirs": row.theirs, "ours": row.ours}}
        if row.timed:
            entry |= {"net_us": {"theirs": row.their_margin, "ours": row.our_margin}, "ratio": row.ratio}
            entry |= {"goal": row.goal, "met": row.met, "ratio_with_launches": row.launched_ratio}
        entries.append(entry)
    return entries

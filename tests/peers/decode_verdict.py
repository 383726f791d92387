"""Ours over theirs in tokens a second: what the ids differ in, the rates, and the goal."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from decode_job import FLOAT32, PLAIN, THEIRS, Arm, Job, Side

GOALS = {"plain": 1.0, "speculative": 1.5}  # the least that ours over theirs may be


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our arms beside theirs, at one batch.

    Attributes:
      batch, dtype: what was timed; the dtype is float32 where nothing was.
      ours, theirs: the arms in that dtype.
      difference: where their float32 ids differ first, None if they are equal. It makes what is measured worthless.
      others: requests whose ids differ in `dtype`; in bfloat16 a near-tie may fall either way.
    """

    batch: int
    dtype: str
    ours: Arm
    theirs: Arm
    difference: str | None
    others: int

    @property
    def timed(self) -> bool:
        """Whether there are times."""
        return bool(self.ours.whole and self.theirs.whole)

    @property
    def goal(self) -> float:
        """The least ratio that was promised."""
        return GOALS["plain" if self.ours.name == PLAIN else "speculative"]

    @property
    def ratio(self) -> float | None:
        """Our tokens a second over theirs, of decoding; None where float32 ids differ or nothing was timed."""
        if self.difference or not self.timed:
            return None
        return statistics.median(rates(self.ours)) / statistics.median(rates(self.theirs))

    @property
    def whole_ratio(self) -> float | None:
        """The same, prefill included on both sides."""
        if self.difference or not self.timed:
            return None
        return statistics.median(whole_rates(self.ours)) / statistics.median(whole_rates(self.theirs))

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a ratio."""
        return None if self.ratio is None else self.ratio >= self.goal


def rates(arm: Arm) -> list[float]:
    """Tokens a second of decoding, a sample each: without prefill, and without the token of each request it gives."""
    tokens = sum(len(ids) - 1 for ids in arm.ids)
    return [tokens / (whole - prefill) for whole, prefill in zip(arm.whole, arm.prefill, strict=True)]


def whole_rates(arm: Arm) -> list[float]:
    """Tokens a second with prefill, a sample each."""
    return [sum(map(len, arm.ids)) / whole for whole in arm.whole]


def judge(job: Job, theirs: Side, ours: Side) -> list[Row]:
    """A row for each batch and arm of ours."""
    rows = []
    for batch in job.batches:
        for name in job.arms:
            pairs = {dtype: (theirs.arm(THEIRS, dtype, batch), ours.arm(name, dtype, batch)) for dtype in job.dtypes}
            a, b = pairs[FLOAT32]
            last = job.dtypes[-1]
            differing = sum(x != y for x, y in zip(*(arm.ids for arm in pairs[last]), strict=True))
            rows.append(Row(batch, last, pairs[last][1], pairs[last][0], first_difference(a.ids, b.ids), differing))
    return rows


def first_difference(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> str | None:
    """Where the ids of two arms differ first, None if they are equal.

    >>> first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    '1 of 2 requests, the first at request 1, token 1: 4 != 5'
    """
    differing = [number for number, (a, b) in enumerate(zip(theirs, ours, strict=True)) if list(a) != list(b)]
    if not differing:
        return None
    number = differing[0]
    a, b = theirs[number], ours[number]
    where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    values = f"{a[where]} != {b[where]}" if where < min(len(a), len(b)) else f"lengths {len(a)} != {len(b)}"
    return f"{len(differing)} of {len(theirs)} requests, the first at request {number}, token {where}: {values}"


def table(rows: Sequence[Row]) -> list[Sequence[str]]:
    """What is told, the first row being the head; no ratio where float32 ids differ."""
    timed = any(row.timed for row in rows)
    dtype = rows[0].dtype
    head = ["batch, arm", "float32 ids"]
    if timed:
        head += [f"{dtype} texts differ"] if dtype != FLOAT32 else []
        head += ["accept length", "theirs, tokens/s", "ours, tokens/s", "spread", "ratio", "goal", "", "with prefill"]
    return [head, *(_cells(row) for row in rows)]


def _cells(row: Row) -> list[str]:
    cells = [f"{row.batch}, {row.ours.name}", "differ" if row.difference else "equal"]
    if not row.timed:
        return cells
    if row.dtype != FLOAT32:
        cells.append(f"{row.others} of {row.batch}")
    length = row.ours.about.get("accept_length")
    cells.append("-" if row.ours.name == PLAIN or length is None else f"{length:.2f}")
    theirs, ours = rates(row.theirs), rates(row.ours)
    cells += [f"{statistics.median(side):.0f}" for side in (theirs, ours)]
    cells.append(f"{max(_spread(theirs), _spread(ours)):.0%}")
    if row.ratio is None:
        return [*cells, "-", f"{row.goal}", "ids differ", "-"]
    return [*cells, f"{row.ratio:.2f}", f"{row.goal}", "met" if row.met else "missed", f"{row.whole_ratio:.2f}"]


def _spread(samples: Sequence[float]) -> float:
    """(Largest - smallest) / median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no place for, a line each."""
    found = []
    for batch in dict.fromkeys(row.batch for row in rows):
        row = next(row for row in rows if row.batch == batch)
        line = f"batch {batch}: theirs attends by {row.theirs.about.get('attention')}"
        if (share := row.ours.about.get("distinct_4grams")) is not None:
            line += f"; {share:.0%} of our text's runs of four tokens are distinct, and what repeats is easy to draft"
        found.append(line)
    return found


def results(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same and the samples, ready for JSON."""
    entries = []
    for row in rows:
        entry = {"batch": row.batch, "arm": row.ours.name, "dtype": row.dtype, "difference": row.difference}
        entry |= {"texts_differ": row.others, "about": {"theirs": row.theirs.about, "ours": row.ours.about}}
        if row.timed:
            sides = {"theirs": row.theirs, "ours": row.ours}
            entry |= {"tokens_per_second": {side: statistics.median(rates(arm)) for side, arm in sides.items()}}
            entry |= {"seconds": {side: {"whole": arm.whole, "prefill": arm.prefill} for side, arm in sides.items()}}
            entry |= {"ratio": row.ratio, "ratio_with_prefill": row.whole_ratio, "goal": row.goal, "met": row.met}
        entries.append(entry)
    return entries

"""Requests whose verify metadata `bench metadata` builds, and the ways to build them.

A problem has two kinds: a model with FULL and sliding-window pages, and one with pooled attention (KPool); both keep a
state a request. Of every kind there is

    fused       forward_metadata: one launch
    separate    decode_metadata, draft_write_window and what else there is, launches of their own; of KPool what has no
                launch of its own is left to XLA, as a step without fusion leaves it
    reference   the same values in plain jnp, which XLA fuses as it likes: written to the same packed buffer, or to
                arrays of their own (apart)

Page ids are drawn at random, so that tables are read as in a pool that has lived for a while. A page that the map says
is unbound is one of sliding windows: that of a token of the request is never so in FULL.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.benchmarks.timing import Empty, Work
from jaxspec.errors import InputError
from jaxspec.metadata.kpool import KPool, ordinary_metadata
from pallas_kernels import (
    DecodeTables,
    KPoolShape,
    MetadataLayout,
    PackedMetadata,
    View,
    WindowBuffers,
    decode_metadata,
    draft_write_window,
    forward_metadata,
    replay_state_indices,
)
from pallas_kernels import backend as backends

FULL_SWA, KPOOL = "full+swa", "kpool"
KINDS = (FULL_SWA, KPOOL)
PAGE, POOL, TOPK = 64, 4, 2048  # tokens of an attention page, of a pool, and of closed pools that a row attends to
SPARE = 256  # tokens behind the live ones that the tables have room for
TOUCH, EMPTY, FUSED, SEPARATE = "touch", "empty", "fused", "separate"
REFERENCE, APART = "reference", "reference apart"

POISON = -7  # in every cell that the metadata must write
UNSPOILED = "anchor_ids"  # separate launches write column 0 of it alone and leave zeros


@dataclasses.dataclass(frozen=True)
class Problem:
    """A verify of D rows for each of B requests of about `live` tokens; of more than 7 requests the last is padding.

    Attributes:
      kind: one of KINDS.
      B, live, D: requests, committed tokens of the longest, rows a request.
      width: tokens that the tables have room for; 0: a few more than are needed.
      zero_tail: whether columns behind a request's tokens are cleared.
    """

    kind: str
    B: int
    live: int
    D: int
    width: int = 0
    zero_tail: bool = True

    def __post_init__(self):
        if self.width and self.width < self.live + SPARE:
            raise InputError(f"width {self.width}: tables of {self.live} tokens need at least {self.live + SPARE}")

    @property
    def page(self) -> int:
        """Tokens an allocator page."""
        return PAGE * POOL if self.kind == KPOOL else PAGE

    @property
    def columns(self) -> int:
        """P."""
        unit = PAGE * POOL
        return -(-(self.width or self.live + SPARE) // unit) * unit // self.page

    @property
    def real(self) -> int:
        """Requests that are no padding; they come first."""
        return self.B - (self.B > 7)

    @property
    def layout(self) -> MetadataLayout:
        kpool = KPoolShape(pool=POOL, rows=self.D) if self.kind == KPOOL else None
        return MetadataLayout(self.B, self.D, self.columns, self.kind == FULL_SWA, kpool, has_state=True)

    def __str__(self) -> str:
        return f"{self.B},{self.live},{self.D}"

    @property
    def label(self) -> str:
        """What tells it from the others of a run."""
        width = f" in {self.width}, {'cleared' if self.zero_tail else 'left'}" if self.width else ""
        return f"{self.kind} {self}{width}"

    @functools.cached_property
    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Vectors and tables: what changes from step to step, and what does not."""
        rng = np.random.default_rng(0)
        rows, used = self.B + 2, min(-(-(self.live + SPARE) // self.page), self.columns)
        pages = 1 + rows * used
        source = rng.integers(1, pages, (rows, self.columns), dtype=np.int32)  # stale behind a request's pages
        source[1:, :used] = 1 + rng.permutation(pages - 1)[: (rows - 1) * used].reshape(rows - 1, used)
        source[0] = 0
        full, swa = np.zeros((2, pages), np.int32)
        full[1:], swa[1:] = 1 + rng.permutation(pages - 1), 1 + rng.permutation(pages - 1)
        swa[1:][rng.random(pages - 1) < 0.3] = -1
        req = (1 + rng.permutation(rows - 1)[: self.B]).astype(np.int32)
        lengths = (self.live - rng.integers(0, min(8, self.live), self.B)).astype(np.int32)
        req[self.real :] = lengths[self.real :] = 0
        slots, states = np.zeros((2, rows), np.int32)
        slots[1:], states[1:] = 1 + rng.permutation(rows - 1), 1 + rng.permutation(rows - 1)
        anchor = rng.integers(0, 1000, self.B, dtype=np.int32)
        tables = {"source": source, "v2p": np.stack([full, swa], axis=1), "slot_of_req": slots, "state_v2p": states}
        return {"seq_lens": lengths, "req_rows": req, "anchor": anchor}, tables

    def packed(self) -> PackedMetadata:
        """A buffer in which nothing is written yet."""
        buffer = np.full(self.layout.size, POISON, np.int32)
        place = self.layout.sections[UNSPOILED]
        buffer[place.offset : place.offset + self.B * self.D] = 0
        return PackedMetadata(buffer, self.layout)

    @property
    def names(self) -> list[str]:
        """The sections that a verify writes."""
        return [name for name in self.layout.sections if name != "cu_seqlens_q"]

    def work(self, run, out) -> Work:
        """A chain's work: `run(problem, vectors, tables, out)` as in `timing.chained`."""
        return Work(functools.partial(run, self), *self.arrays, out)


def fused(problem: Problem, vectors, tables, out: PackedMetadata, *, backend: str):
    """One launch, or with backend="reference" what XLA makes of it."""
    kpool = {"pool": POOL, "topk": TOPK} if problem.kind == KPOOL else {}
    return vectors, forward_metadata(
        vectors["seq_lens"],
        vectors["req_rows"],
        tables["source"],
        out,
        mode="verify",
        page_size=problem.page,
        anchor=vectors["anchor"],
        v2p=tables["v2p"],
        zero_tail=problem.zero_tail,
        slot_of_req=tables["slot_of_req"],
        state_v2p=tables["state_v2p"],
        backend=backend,
        **kpool,
    )


def separate(problem: Problem, vectors, tables, out: dict[str, Any], *, backend: str):
    """The same by single operations; `out` is what `separate_out` makes."""
    lengths, of, maps = _single(problem, vectors, tables, backend)
    packed = decode_metadata(*lengths, *of, out["packed"], **_tail(problem), **maps)
    packed = draft_write_window(*lengths, *of, packed, anchor=vectors["anchor"], **maps)
    place = problem.layout.sections["state_slots"]
    slots = View(packed.buffer, place.offset, place.shape)
    vectors, slots = _states(problem, vectors, tables, slots, backend)
    packed = dataclasses.replace(packed, buffer=slots.buffer)
    return vectors, {"packed": packed, **_pooled(problem, vectors, packed.decode_tables().page_table)}


def apart(problem: Problem, vectors, tables, out: dict[str, Any]):
    """The same in plain jnp, each section an array; `out` is what `apart_out` makes."""
    lengths, of, maps = _single(problem, vectors, tables, "reference")
    first, window = (kind(**{name: out.get(name) for name in kind._fields}) for kind in (DecodeTables, WindowBuffers))
    first = decode_metadata(*lengths, *of, first, **_tail(problem), **maps)
    window = draft_write_window(*lengths, *of, window, anchor=vectors["anchor"], **maps)
    vectors, slots = _states(problem, vectors, tables, out["state_slots"], "reference")
    made = _pooled(problem, vectors, first.page_table)
    arrays = {**first._asdict(), **window._asdict(), "state_slots": slots, **made}
    return vectors, {name: arrays[name] for name in out}


def _single(problem: Problem, vectors, tables, backend: str):
    """What the single operations take: lengths; rows and source; pages and maps."""
    maps = {"page_size": problem.page, "v2p": tables["v2p"], "backend": backend}
    return (vectors["seq_lens"],), (vectors["req_rows"], tables["source"]), maps


def _tail(problem: Problem) -> dict[str, Any]:
    return {"seq_len_delta": problem.D, "zero_tail": problem.zero_tail}


def _states(problem: Problem, vectors, tables, out, backend: str):
    """The vectors after, and state slots in `out`. The rows of padding are cleared, which are clear already."""
    how = {"valid": problem.real, "v2p": tables["state_v2p"], "backend": backend}
    slots, rows = replay_state_indices(vectors["req_rows"], tables["slot_of_req"], out, **how)
    return vectors | {"req_rows": rows}, slots


def _pooled(problem: Problem, vectors, page_table) -> dict[str, Any]:
    """What pooled attention needs besides, by plain operations; nothing for a model without."""
    if problem.kind != KPOOL:
        return {}
    lengths = vectors["seq_lens"]
    found = ordinary_metadata(
        KPool(POOL, TOPK),
        page_table,
        vectors["req_rows"],
        lengths,
        visible=lengths[:, None] + 1 + jnp.arange(problem.D, dtype=jnp.int32),
        start=lengths,
        end=lengths + problem.D,
        page_size=problem.page,
    )
    made = {name: getattr(found, name) for name in ("real_page_table", *_OF_ROWS, "schedule")}
    return made | {name: getattr(found.write_plan, name) for name in _OF_PLAN}


_OF_ROWS = ("seqlens_expanded", "dsa_cache_seqlens", "dsa_cu_seqlens_k", "pool_seqlens")
_OF_PLAN = ("write_start", "tail_logical_start", "write_loc")


def separate_out(problem: Problem) -> dict[str, Any]:
    """Where `separate` writes: the packed buffer, and an array for each section that no launch writes."""
    made = set() if problem.kind != KPOOL else {"real_page_table", *_OF_ROWS, *_OF_PLAN, "schedule"}
    return {"packed": problem.packed(), **_arrays(problem, [name for name in problem.names if name in made])}


def apart_out(problem: Problem) -> dict[str, Any]:
    """Where `apart` writes: an array for each section."""
    return _arrays(problem, problem.names)


def _arrays(problem: Problem, names: list[str]) -> dict[str, np.ndarray]:
    fill = {name: 0 if name == UNSPOILED else POISON for name in names}
    return {name: np.full(problem.layout.sections[name].shape, value, np.int32) for name, value in fill.items()}


def read(problem: Problem, out: Any) -> dict[str, np.ndarray]:
    """The sections that an arm has written, by name."""
    out = {"packed": out} if isinstance(out, PackedMetadata) else dict(out)
    found = {}
    if "packed" in out:
        buffer = np.asarray(out.pop("packed").buffer)
        for name in problem.names:
            found[name] = problem.layout.sections[name].read((buffer,))
    return found | {name: np.asarray(array) for name, array in out.items()}


def difference(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str | None:
    """Where two sets of sections differ first, or None. Every bit counts."""
    for name, array in expected.items():
        other = found.get(name)
        if other is None or other.shape != array.shape:
            return f"{name} is not there" if other is None else f"{name} has shape {other.shape}, not {array.shape}"
        if wrong := np.argwhere(other != array).tolist():
            place = ", ".join(map(str, wrong[0]))
            return f"{name}[{place}] is {other[*wrong[0]]}, not {array[*wrong[0]]}; {len(wrong)} cells differ"
    return None


# The arms


def nothing(problem: Problem, vectors, tables, out):
    """A step without work."""
    return vectors, out


def empty(problem: Problem, vectors, tables, out, *, backend: str):
    """A launch without work."""
    (buffer,) = backends.run(Empty(), backend, (vectors["seq_lens"],), (out.buffer,))
    return vectors, dataclasses.replace(out, buffer=buffer)


def arms_of(problem: Problem, names: Sequence[str]) -> dict[str, Work]:
    """All arms of a problem by name: those of `launch_arms_of`, and the single operations."""
    works = launch_arms_of(problem, names)
    for name in names:
        by_this = functools.partial(separate, backend=name)
        works[f"{SEPARATE}, {name}"] = problem.work(by_this, separate_out(problem))
    return works | {APART: problem.work(apart, apart_out(problem))}


def launch_arms_of(problem: Problem, names: Sequence[str]) -> dict[str, Work]:
    """Nothing, an empty launch, the fused launch, and the reference."""
    works = {TOUCH: problem.work(nothing, problem.packed())}
    for name in names:
        works[f"{EMPTY}, {name}"] = problem.work(functools.partial(empty, backend=name), problem.packed())
        works[f"{FUSED}, {name}"] = problem.work(functools.partial(fused, backend=name), problem.packed())
    return works | {REFERENCE: problem.work(functools.partial(fused, backend="reference"), problem.packed())}

"""One launch: its operands, the pieces that can be made of them, and checks of arguments of pooled attention."""

import dataclasses

from pallas_kernels import backend as backends
from pallas_kernels import buffers, kpool_lengths, kpool_places, kpool_tables, operands
from pallas_kernels.buffers import Destination, KPoolTables
from pallas_kernels.fused import Fused
from pallas_kernels.kpool_lengths import RowLengths, Schedule
from pallas_kernels.kpool_places import WritePlan
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.kpool_tables import PageTables
from pallas_kernels.operands import Inputs, PageMap
from pallas_kernels.span import Span
from pallas_kernels.tables import Count, Tables
from pallas_kernels.views import Section
from pallas_kernels.window import Window, named_maps


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch in the making. Each method gives a piece, or None where `destination` has nothing of it."""

    name: str
    inputs: Inputs
    destination: Destination
    span: Span
    slots: Slots

    def has(self, *names: str) -> bool:
        """Whether there is a destination of one of the names."""
        return any(name in self.destination for name in names)

    def counts(self) -> Tables | None:
        names = (name if self.has(name) else None for name in ("cache_seqlens", "cu_seqlens_k"))
        counts = [Count.cached(self.span, *names)]
        if self.has("cu_seqlens_q"):
            counts.append(Count(self.span.new, 0, None, "cu_seqlens_q"))
        piece = Tables(self.name, self.span.B, (), self.destination, tuple(counts))
        return piece if piece.has_head else None

    def lengths(self, topk: int, packed: bool = False) -> RowLengths | None:
        piece = RowLengths(self.destination, self.span, self.slots.pool, topk, packed)
        return piece if self.has(*kpool_lengths.OUTPUTS) else None

    def schedule(self, packed: bool = False) -> Schedule | None:
        piece = Schedule(self.destination, self.span, self.slots.pool, packed)
        return piece if self.has("schedule") else None

    def window(self, anchor: Section | None, swa: PageMap | None) -> Window:
        maps = named_maps(self.slots.page_map, swa)
        return Window(self.destination, self.span, self.slots.req_rows, self.slots.source, maps, anchor, fill=True)

    def plan(self, reached: bool = False) -> WritePlan | None:
        piece = WritePlan(self.destination, self.span, self.slots, reached)
        return piece if self.has(*kpool_places.PLAN) else None

    def tables(self, copies: int | None, zero_tail: bool) -> PageTables | None:
        piece = PageTables(self.destination, self.span, self.slots, copies, bool(zero_tail))
        return piece if self.has(*kpool_tables.TABLES) and piece.columns else None

    def run(self, pieces: list, backend: str | None, flat: tuple) -> tuple:
        """The operands `flat` of the destination after one launch of the pieces that are not None."""
        operation = Fused(self.name, tuple(self.inputs.labels), tuple(piece for piece in pieces if piece is not None))
        return backends.run(operation, backend, self.inputs.arrays, flat)


def kpool_metadata_fusion_supported(pool: int, page_size: int, topk: int) -> bool:
    """Whether all metadata of a forward over pooled attention can come from one launch.

    Args:
      pool: tokens a pool.
      page_size: tokens an attention page.
      topk: tokens in closed pools that a row attends to at most.

    Source: the eligibility rule of SGLang's fused KPool metadata.

    >>> kpool_metadata_fusion_supported(4, 64, 2048), kpool_metadata_fusion_supported(1, 64, 2048)
    (True, False)
    """
    return pool > 1 and page_size == 64 and page_size % pool == 0 and topk % pool == 0


def check_rows(rows: int) -> int:
    """Rows a request, or raise ValueError."""
    rows = operands.check_static("rows", rows)
    if rows < 0:
        raise ValueError(f"rows={rows}: it must be >= 0")
    return rows


def check_pool(pool: int) -> int:
    """log2 of the tokens of a pool, or raise ValueError."""
    size = operands.check_static("pool", pool)
    if size < 1 or size & (size - 1):
        raise ValueError(f"pool={size}: it must be a power of two, such as 1, 2 or 4")
    return size.bit_length() - 1


def check_out(
    out: KPoolTables, batch: int, rows: int, pool: int, *, packed: bool, allowed: tuple[str, ...], name="seq_lens"
) -> int | None:
    """Rows a request of the page tables (None when packed), or raise ValueError for a destination of another shape."""
    if not isinstance(out, KPoolTables):
        raise ValueError(f"out is a {type(out).__name__}: give a KPoolTables")
    given = {field: array for field, array in out._asdict().items() if array is not None}
    if extra := given.keys() - set(allowed):
        raise ValueError(f"out.{min(extra)} is not written by this call: leave it None")

    def size(field: str, dimension: int, otherwise):
        shape = getattr(given.get(field), "shape", ())
        return shape[dimension] if len(shape) > dimension else otherwise

    lengths = [f for f in ("seqlens_expanded", "dsa_cache_seqlens", "pool_seqlens") if f in given]
    total = batch * rows
    if packed:
        total = size(lengths[0], 0, total) if lengths else size("dsa_cu_seqlens_k", 0, total + 1) - 1
    tables = [field for field in kpool_tables.TABLES if field in given]
    height = size(tables[0], 0, total) if tables else total
    if not packed and height not in (batch, total):
        wanted = f"{batch}, one a request" + (f", or {total}" if total != batch else "")
        raise ValueError(f"out.{tables[0]} has {height} rows for a batch of {batch}: give it {wanted}")
    shapes = {
        "cache_seqlens": (batch,),
        "cu_seqlens_k": (batch + 1,),
        "dsa_cu_seqlens_k": (total + 1,),
        "paged_mqa_ctx_lens_2d": (batch, rows),
        "req_rows": (batch,),
        "write_start": (batch,),
        "tail_logical_start": (batch,),
        "write_loc": (batch, -(-rows // pool)),
        "schedule": (max(size("schedule", 0, 2), 2), 2),
    }
    shapes |= dict.fromkeys(lengths, (total,))
    shapes |= {field: (height, size(field, 1, "columns")) for field in tables}
    for field, array in given.items():
        buffers.check_array(f"out.{field}", array, shapes[field])
    if packed:
        return None
    return 1 if height == batch else rows

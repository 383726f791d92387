"""Destination buffers of the metadata kernels: a few named arrays, or one packed int32 array.

Both kinds are written in place: the result aliases the destination when the surrounding `jax.jit` donates it.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.views import Array, Section, View, row_major, section

ALIGNMENT = 32  # int32 cells: sections start on 128 bytes, one coalesced transaction


class DecodeTables(NamedTuple):
    """What attention reads for a batch of B requests. Each field is an array or a View.

    cache_seqlens    int32[B]     keys each request attends to, in tokens
    cu_seqlens_k     int32[B + 1] exclusive prefix sums of cache_seqlens, its total last
    page_table       int32[B, P]  physical FULL page of each page of the sequence; None where only lengths are wanted
    swa_page_table   int32[B, P]  the same in the sliding-window pool, or None for a model without one
    cu_seqlens_q     int32[B + 1] exclusive prefix sums of the rows each request computes; of a draft extend only
    """

    cache_seqlens: Array
    cu_seqlens_k: Array
    page_table: Array | None = None
    swa_page_table: Array | None = None
    cu_seqlens_q: Array | None = None


class WindowBuffers(NamedTuple):
    """Where the D rows of each of B requests are written in one forward. Locations are token slots.

    Each field is an array or a View.

    virtual_loc   int32[B, D]  virtual token id
    full_loc      int32[B, D]  slot in the FULL pool
    swa_loc       int32[B, D]  slot in the sliding-window pool, or None
    positions     int32[B, D]  position in the sequence
    anchor_ids    int32[B, D]  token ids of the rows, of which column 0 is the anchor token, or None
    """

    virtual_loc: Array
    full_loc: Array
    swa_loc: Array | None
    positions: Array
    anchor_ids: Array | None = None


class KPoolTables(NamedTuple):
    """What attention over selected pools reads and writes: B requests, n rows a request, pools of `pool` tokens.

    Every field may be None: only what is there is written. Each is an array or a View. A row sees a prefix of its
    request's tokens; it attends to `topk` of those in closed pools at most, and to all behind them.

    cache_seqlens          int32[B]             keys in each request's cache, in tokens
    cu_seqlens_k           int32[B + 1]         exclusive prefix sums of cache_seqlens, its total last
    seqlens_expanded       int32[B * n]         tokens that each row sees
    dsa_cache_seqlens      int32[B * n]         tokens that each row attends to
    dsa_cu_seqlens_k       int32[B * n + 1]     exclusive prefix sums of dsa_cache_seqlens
    pool_seqlens           int32[B * n]         closed pools that each row sees
    page_table_1           int32[B * n, tokens] slot of each token
    real_page_table        int32[., columns]    attention page of each page of the sequence
    page_table             int32[., columns]    index page (an allocator page) of each run of index-page pools
    paged_mqa_ctx_lens_2d  int32[B, n]          cache_seqlens in every column
    req_rows               int32[B]             the request rows
    write_start            int32[B]             position of each request's first new token
    tail_logical_start     int32[B]             the first token of the pool it falls into
    write_loc              int32[B, pools]      where the keys of the pools go that the new tokens may close
    schedule               int32[sms + 1, 2]    row and block where each processor's share of the scoring starts
    """

    cache_seqlens: Array | None = None
    cu_seqlens_k: Array | None = None
    seqlens_expanded: Array | None = None
    dsa_cache_seqlens: Array | None = None
    dsa_cu_seqlens_k: Array | None = None
    pool_seqlens: Array | None = None
    page_table_1: Array | None = None
    real_page_table: Array | None = None
    page_table: Array | None = None
    paged_mqa_ctx_lens_2d: Array | None = None
    req_rows: Array | None = None
    write_start: Array | None = None
    tail_logical_start: Array | None = None
    write_loc: Array | None = None
    schedule: Array | None = None


@dataclasses.dataclass(frozen=True)
class KPoolShape:
    """The sections that a model with pooled attention adds to a packed buffer (see KPoolTables).

    pool   tokens a pool
    rows   rows a request that have lengths of their own: D to verify and to extend, 1 to decode
    sms    processors that the scoring is shared out to
    """

    pool: int
    rows: int
    sms: int = 132

    def __post_init__(self):
        for name, least in (("pool", 1), ("rows", 0), ("sms", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"KPoolShape {name}={value!r}: it must be a Python integer >= {least}")


@dataclasses.dataclass(frozen=True)
class MetadataLayout:
    """Sections of a packed metadata buffer: B requests, D rows a request, P pages a row, with or without SWA.

    `kpool` adds the sections of pooled attention. Their tables have one row a request, whatever `kpool.rows` is: the
    pooled one is page_table itself, and real_page_table has P * pool columns. `has_state` adds state_slots, int32[B]:
    the state slot of each request.

    >>> layout = MetadataLayout(B=2, D=4, P=8, has_swa=False)
    >>> layout.sections["page_table"]
    Section(buffer=0, offset=64, shape=(2, 8), strides=(8, 1), columns=None)
    >>> layout.size
    256
    """

    B: int
    D: int
    P: int
    has_swa: bool
    kpool: KPoolShape | None = None
    has_state: bool = False

    def __post_init__(self):
        for name in ("B", "D", "P"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"MetadataLayout {name}={value!r}: sizes are Python integers >= 0")
        if self.size > 2**31 - 1:
            raise ValueError(
                f"{self} takes {self.size} cells, more than an int32 can index: use fewer requests or pages a buffer"
            )

    @property
    def sections(self) -> dict[str, Section]:
        """Section of each array, by its field name in the named tuples above, and state_slots; no swa_* without SWA."""
        return dict(_sections(self)[0])

    @property
    def size(self) -> int:
        """Cells of the whole buffer."""
        return _sections(self)[1]


@functools.cache
def _sections(layout: MetadataLayout) -> tuple[dict[str, Section], int]:
    row, table, window = (layout.B,), (layout.B, layout.P), (layout.B, layout.D)
    shapes = {
        "cache_seqlens": row,
        "cu_seqlens_k": (layout.B + 1,),
        "page_table": table,
        "swa_page_table": table,
        "cu_seqlens_q": (layout.B + 1,),
        "virtual_loc": window,
        "full_loc": window,
        "swa_loc": window,
        "positions": window,
        "anchor_ids": window,
    }
    if layout.kpool is not None:
        pool, rows, sms = dataclasses.astuple(layout.kpool)
        shapes |= {
            "seqlens_expanded": (layout.B * rows,),
            "dsa_cache_seqlens": (layout.B * rows,),
            "dsa_cu_seqlens_k": (layout.B * rows + 1,),
            "pool_seqlens": (layout.B * rows,),
            "real_page_table": (layout.B, layout.P * pool),
            "write_start": row,
            "tail_logical_start": row,
            "write_loc": (layout.B, -(-rows // pool)),
            "schedule": (sms + 1, 2),
        }
    if layout.has_state:
        shapes["state_slots"] = row
    sections, end = {}, 0
    for name, shape in shapes.items():
        if layout.has_swa or not name.startswith("swa_"):
            sections[name] = Section(0, end, shape, row_major(shape))
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return sections, end


@functools.partial(jax.tree_util.register_dataclass, data_fields=["buffer"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PackedMetadata:
    """All metadata of one forward in one int32 buffer: one leaf to dispatch, one aliased operand a kernel.

    buffer   int32[layout.size]
    layout   MetadataLayout (static)

    >>> packed = PackedMetadata.zeros(MetadataLayout(B=2, D=4, P=8, has_swa=True))
    >>> packed.decode_tables().page_table.shape, packed.window().positions.shape
    ((2, 8), (2, 4))
    """

    buffer: jax.Array
    layout: MetadataLayout

    @classmethod
    def zeros(cls, layout: MetadataLayout) -> "PackedMetadata":
        """A buffer of zeros: every table entry and every location is the sink."""
        return cls(jnp.zeros(layout.size, jnp.int32), layout)

    def decode_tables(self) -> DecodeTables:
        """The decode sections as arrays.

        Slices: XLA fuses them into its own operations, but a custom kernel that takes one copies it first; such a
        kernel should take `buffer` whole and add the section's offset.
        """
        return DecodeTables(*map(self._view, DecodeTables._fields))

    def window(self) -> WindowBuffers:
        """The write-window sections as arrays (slices, as in decode_tables)."""
        return WindowBuffers(*map(self._view, WindowBuffers._fields))

    def kpool(self) -> KPoolTables:
        """The sections of pooled attention as arrays (slices, as in decode_tables); None for what has no section.

        >>> layout = MetadataLayout(B=2, D=4, P=8, has_swa=False, kpool=KPoolShape(pool=4, rows=4))
        >>> tables = PackedMetadata.zeros(layout).kpool()
        >>> tables.seqlens_expanded.shape, tables.page_table.shape, tables.real_page_table.shape
        ((8,), (2, 8), (2, 32))
        """
        if self.layout.kpool is None:
            raise ValueError(f"{self.layout} has no sections of pooled attention: give it kpool=KPoolShape(...)")
        return KPoolTables(*map(self._view, KPoolTables._fields))

    def state_slots(self) -> jax.Array | None:
        """int32[B], the state slot of each request, -1 for padding (a slice); None without has_state."""
        return self._view("state_slots")

    def _view(self, name: str) -> jax.Array | None:
        section = self.layout.sections.get(name)
        return None if section is None else section.read((self.buffer,))


Out = DecodeTables | WindowBuffers | KPoolTables | PackedMetadata
OPTIONAL = {"page_table", "swa_page_table", "cu_seqlens_q", "swa_loc", "anchor_ids"}


@dataclasses.dataclass(frozen=True)
class Destination:
    """Static description of where a kernel writes: the section of each name, over a tuple of int32 operands."""

    sections: tuple[tuple[str, Section], ...]

    def __getitem__(self, name: str) -> Section:
        return dict(self.sections)[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.sections)

    def read(self, buffers: tuple, name: str) -> jax.Array:
        """The section as an array of its own, in jnp."""
        return self[name].read(buffers)

    def write(self, buffers: tuple, values: dict[str, jax.Array]) -> tuple:
        """The buffers with whole sections replaced, in jnp: the counterpart of a kernel's stores."""
        for name, value in values.items():
            buffers = self[name].write(buffers, value)
        return buffers


def flatten(out: Out | dict[str, Array | None], names: tuple[str, ...]) -> tuple[tuple[jax.Array, ...], Destination]:
    """The operands that hold the named fields of `out`, and where in them: the packed buffer alone, or one operand for
    each array that is there and each distinct buffer of a View."""
    if isinstance(out, PackedMetadata):
        return (out.buffer,), Destination(tuple((n, s) for n, s in out.layout.sections.items() if n in names))
    operands, sections = {}, []
    for name, array in _fields(out).items():
        if name in names and array is not None:
            holder = array.buffer if isinstance(array, View) else array
            number = list(operands).index(id(holder)) if id(holder) in operands else len(operands)
            operands[id(holder)] = holder
            sections.append((name, section(f"out.{name}" if len(names) > 1 else name, array, number, written=True)))
    check_disjoint(tuple((f"out.{n}", s) for n, s in sections), tuple(holder.size for holder in operands.values()))
    return tuple(operands.values()), Destination(tuple(sections))


@functools.lru_cache(maxsize=1024)
def check_disjoint(sections: tuple[tuple[str, Section], ...], sizes: tuple[int, ...]) -> None:
    """Raise ValueError if two sections share a cell: exact, by marking cells, so very large buffers are passed over."""
    for buffer, size in enumerate(sizes):
        here = [(name, place) for name, place in sections if place.buffer == buffer]
        if len(here) < 2 or size > 2**26:
            continue
        owner = np.full(size, -1, np.int16)
        for number, (name, place) in enumerate(here):
            steps = [np.arange(n) * stride for n, stride in zip(place.shape, place.strides, strict=True)]
            cells = place.offset + sum(np.meshgrid(*steps, indexing="ij", sparse=True))
            if (owner[cells] >= 0).any():
                other = here[owner[cells].max()][0]
                raise ValueError(f"{name} and {other} share cells of their buffer: give Views that do not overlap")
            owner[cells] = number


def unflatten(out: Out | dict[str, Array | None], buffers: tuple, destination: Destination):
    """`out` with its operands replaced; the inverse of `flatten`."""
    if isinstance(out, PackedMetadata):
        return dataclasses.replace(out, buffer=buffers[0])
    fields = _fields(out)
    holder = lambda array: array.buffer if isinstance(array, View) else array  # noqa: E731
    replaced = {id(holder(fields[name])): buffers[place.buffer] for name, place in destination.sections}
    new = {}
    for name, old in fields.items():  # a View of a buffer that was written through another one changes with it
        buffer = replaced.get(id(holder(old)))
        if old is not None and buffer is not None:
            new[name] = dataclasses.replace(old, buffer=buffer) if isinstance(old, View) else buffer
    return {**out, **new} if isinstance(out, dict) else out._replace(**new)


def _fields(out) -> dict[str, Array | None]:
    return out if isinstance(out, dict) else out._asdict()


def check(out: Out, kind: type, batch: int, name: str = "seq_lens") -> None:
    """Raise ValueError unless `out` is a `kind` with int32 arrays of its own shapes for `batch` rows, or packed.

    `name`: the argument that the batch is the length of.
    """
    if isinstance(out, PackedMetadata):
        size = (out.layout.size,)
        if out.buffer.shape != size or out.buffer.dtype != jnp.int32:
            raise ValueError(f"out.buffer is {describe(out.buffer)}: {out.layout} needs int32{list(size)}")
        if batch != out.layout.B:
            raise ValueError(f"out.layout.B={out.layout.B}, but {name} has {batch} rows: make them equal")
        return
    if not isinstance(out, kind):
        raise ValueError(f"out is a {type(out).__name__}: give a {kind.__name__} or a PackedMetadata")
    rows = {"cache_seqlens": (batch,), "cu_seqlens_k": (batch + 1,), "cu_seqlens_q": (batch + 1,)}
    matrix = out.page_table if kind is DecodeTables else out.virtual_loc
    columns = matrix.shape[1] if getattr(matrix, "ndim", 0) == 2 else "columns"
    for field, array in zip(out._fields, out, strict=True):
        if array is not None or field not in OPTIONAL:
            check_array(f"out.{field}", array, rows.get(field, (batch, columns)))


def check_array(name: str, array: Array, shape: tuple) -> None:
    """Raise ValueError unless `array` is an int32 array or View of exactly `shape`."""
    if getattr(array, "shape", None) != shape or array.dtype != jnp.int32:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} is {describe(array)}: a destination must be int32[{wanted}]")


def describe(array) -> str:
    """An array in words: dtype and shape, or what else it is."""
    if not hasattr(array, "dtype"):
        return type(array).__name__
    return f"{'a View of ' if isinstance(array, View) else ''}{array.dtype}{list(array.shape)}"

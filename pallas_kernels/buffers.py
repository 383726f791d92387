"""Destination buffers of the metadata kernels: a few named arrays, or one packed int32 array.

Both kinds are written in place: the result aliases the destination when the surrounding `jax.jit` donates it.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

ALIGNMENT = 32  # int32 cells: sections start on 128 bytes, one coalesced transaction


class DecodeTables(NamedTuple):
    """What attention reads for a batch of B requests.

    cache_seqlens    int32[B]     keys each request attends to, in tokens
    cu_seqlens_k     int32[B + 1] exclusive prefix sums of cache_seqlens, its total last
    page_table       int32[B, P]  physical FULL page of each page of the sequence
    swa_page_table   int32[B, P]  the same in the sliding-window pool, or None for a model without one
    """

    cache_seqlens: jax.Array
    cu_seqlens_k: jax.Array
    page_table: jax.Array
    swa_page_table: jax.Array | None = None


class WindowBuffers(NamedTuple):
    """Where the D rows of each of B requests are written in one forward. Locations are token slots.

    virtual_loc   int32[B, D]  virtual token id
    full_loc      int32[B, D]  slot in the FULL pool
    swa_loc       int32[B, D]  slot in the sliding-window pool, or None
    positions     int32[B, D]  position in the sequence
    anchor_ids    int32[B, D]  token ids of the rows, of which column 0 is the anchor token, or None
    """

    virtual_loc: jax.Array
    full_loc: jax.Array
    swa_loc: jax.Array | None
    positions: jax.Array
    anchor_ids: jax.Array | None = None


class Section(NamedTuple):
    """Place of one named array: cells [offset, offset + prod(shape)) of flat buffer number `buffer`, row-major."""

    buffer: int
    offset: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MetadataLayout:
    """Sections of a packed metadata buffer: B requests, D rows a request, P pages a row, with or without SWA.

    >>> layout = MetadataLayout(B=2, D=4, P=8, has_swa=False)
    >>> layout.sections["page_table"]
    Section(buffer=0, offset=64, shape=(2, 8))
    >>> layout.size
    224
    """

    B: int
    D: int
    P: int
    has_swa: bool

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
        """Section of each array, by its field name in DecodeTables and WindowBuffers; no swa_* without SWA."""
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
        "virtual_loc": window,
        "full_loc": window,
        "swa_loc": window,
        "positions": window,
        "anchor_ids": window,
    }
    sections, end = {}, 0
    for name, shape in shapes.items():
        if layout.has_swa or not name.startswith("swa_"):
            sections[name] = Section(0, end, shape)
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

    def _view(self, name: str) -> jax.Array | None:
        section = self.layout.sections.get(name)
        return None if section is None else read(self.buffer, section)


Out = DecodeTables | WindowBuffers | PackedMetadata


@dataclasses.dataclass(frozen=True)
class Destination:
    """Static description of where a kernel writes: the section of each name, over a tuple of flat int32 buffers."""

    sections: tuple[tuple[str, Section], ...]

    def __getitem__(self, name: str) -> Section:
        return dict(self.sections)[name]

    def __contains__(self, name: str) -> bool:
        return name in dict(self.sections)

    def write(self, buffers: tuple, values: dict) -> tuple:
        """The buffers with whole sections replaced by `values` (name to array); the jnp counterpart of the stores."""
        buffers = list(buffers)
        for name, value in values.items():
            section, flat = self[name], value.reshape(-1)
            old = buffers[section.buffer]
            whole = flat.size == old.size
            end = section.offset + flat.size
            buffers[section.buffer] = flat if whole else old.at[section.offset : end].set(flat)
        return tuple(buffers)


def read(buffer: jax.Array, section: Section) -> jax.Array:
    """The section of a flat buffer in its own shape."""
    end = section.offset + math.prod(section.shape)
    return buffer[section.offset : end].reshape(section.shape)


def flatten(out: Out, names: tuple[str, ...]) -> tuple[tuple[jax.Array, ...], Destination]:
    """Flat buffers and their description: one of each named array that is not None, or the packed buffer alone."""
    if isinstance(out, PackedMetadata):
        return (out.buffer,), Destination(tuple((n, s) for n, s in out.layout.sections.items() if n in names))
    arrays = [(name, getattr(out, name)) for name in names if getattr(out, name) is not None]
    sections = tuple((name, Section(i, 0, array.shape)) for i, (name, array) in enumerate(arrays))
    return tuple(array.reshape(-1) for _, array in arrays), Destination(sections)


def unflatten(out: Out, buffers: tuple, destination: Destination):
    """`out` with its buffers replaced; the inverse of `flatten`."""
    if isinstance(out, PackedMetadata):
        return dataclasses.replace(out, buffer=buffers[0])
    return out._replace(**{name: buffers[s.buffer].reshape(s.shape) for name, s in destination.sections})


def check(out: Out, kind: type, batch: int) -> None:
    """Raise ValueError unless `out` is a `kind` with int32 arrays of its own shapes for `batch` rows, or packed."""
    if isinstance(out, PackedMetadata):
        size = (out.layout.size,)
        if out.buffer.shape != size or out.buffer.dtype != jnp.int32:
            raise ValueError(f"out.buffer is {_describe(out.buffer)}: {out.layout} needs int32{list(size)}")
        if batch != out.layout.B:
            raise ValueError(f"out.layout.B={out.layout.B}, but seq_lens or start has {batch} rows: make them equal")
        return
    if not isinstance(out, kind):
        raise ValueError(f"out is a {type(out).__name__}: give a {kind.__name__} or a PackedMetadata")
    rows = {"cache_seqlens": (batch,), "cu_seqlens_k": (batch + 1,)}
    matrix = out.page_table if kind is DecodeTables else out.virtual_loc
    columns = matrix.shape[1] if getattr(matrix, "ndim", 0) == 2 else "columns"
    optional = {"swa_page_table", "swa_loc", "anchor_ids"}
    for name, array in zip(out._fields, out, strict=True):
        if array is None and name in optional:
            continue
        check_array(f"out.{name}", array, rows.get(name, (batch, columns)))


def check_array(name: str, array: jax.Array, shape: tuple) -> None:
    """Raise ValueError unless `array` is int32 of exactly `shape`."""
    if getattr(array, "shape", None) != shape or array.dtype != jnp.int32:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} is {_describe(array)}: a destination must be int32[{wanted}]")


def _describe(array) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__

"""What the metadata kernels read: the request table and the maps from virtual to physical pages.

Each is described by a small static value, so one kernel body serves page- and token-granular tables, separate and
interleaved maps. Numbers here are pages unless they are called tokens; `page_size == 1 << shift`.
"""

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import lanes

GRANULARITIES = ("page", "token")


@dataclasses.dataclass(frozen=True)
class Source:
    """A request table [rows, columns] whose entries are virtual pages ('page') or virtual token ids ('token')."""

    granularity: str
    shift: int
    rows: int
    columns: int

    def column(self, position):
        """Column that holds the token at `position`; negative or >= columns when the table does not reach it."""
        return position if self.granularity == "token" else position >> self.shift

    def split(self, entry, position):
        """(page, offset in the page) of an entry read for `position`. A negative entry gives a negative page.

        The shift is arithmetic, so -1 >> shift is -1 for every page size: no division has to be guarded.
        """
        if self.granularity == "token":
            return entry >> self.shift, entry & ((1 << self.shift) - 1)
        return entry, position & ((1 << self.shift) - 1)

    def virtual(self, entry, offset):
        """Virtual token id of an entry. A negative page has no tokens, so the entry itself is kept."""
        if self.granularity == "token":
            return entry
        return jnp.where(entry < 0, entry, (entry << self.shift) + offset)

    def row(self, row):
        """The row itself, or row 0, the sink row, for a row outside the table."""
        return jnp.where((row >= 0) & (row < self.rows), row, 0)


@dataclasses.dataclass(frozen=True)
class PageMap:
    """How a virtual page becomes a physical one.

    style     'identity': they are equal; 'pages': table[page]; 'pair': table[page, column];
              'tokens': table[virtual token] is a physical token, which is divided afterwards
    operand   index of the table among the map operands
    rows      rows of the table: ids from here on are out of range
    """

    style: str
    operand: int = 0
    column: int = 0
    rows: int = 0

    def key(self, page, offset, shift: int):
        """(index into the table, True where it is in range)."""
        if self.style == "identity":
            return page, page >= 0
        if self.style != "tokens":
            return page, (page >= 0) & (page < self.rows)
        # Pages first: page << shift of an id far past the table could wrap around to a valid token.
        token = (page << shift) + offset
        return token, (page >= 0) & (page < -(-self.rows >> shift)) & (token < self.rows)

    def page(self, value, shift: int):
        """Physical page of a table value."""
        return value >> shift if self.style == "tokens" else value

    def lookup(self, tables: Sequence, page, offset, shift: int, mask):
        """Physical page in a kernel; -1 for unbound, negative and out-of-range ids and for masked lanes."""
        index, inside = self.key(page, offset, shift)
        inside &= mask
        if self.style == "identity":
            return jnp.where(inside, page, -1)
        at = (index, self.column) if self.style == "pair" else (index,)
        return self.page(lanes.load(tables[self.operand], at, inside, -1), shift)


def make_source(source, granularity: str, page_size: int) -> Source:
    """Describe `source`, or raise ValueError."""
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity={granularity!r} is unknown: use 'page' (a virtual page a column) or "
            "'token' (a virtual token id a column)"
        )
    check_integers("source", source, 2)
    if 0 in source.shape:
        raise ValueError(f"source has shape {source.shape}: it needs a row 0, the sink row, and one column or more")
    return Source(granularity, page_shift(page_size), *source.shape)


def make_maps(
    v2p, full_v2p, swa_v2p, full_to_swa, has_swa: bool
) -> tuple[tuple[jax.Array, ...], PageMap, PageMap | None]:
    """(map operands, FULL map, SWA map or None) of the maps a caller gave, or raise ValueError."""
    separate = {"full_v2p": full_v2p, "swa_v2p": swa_v2p, "full_to_swa": full_to_swa}
    separate = {name: table for name, table in separate.items() if table is not None}
    if v2p is not None:
        if separate:
            raise ValueError(
                f"v2p and {', '.join(separate)} were given: v2p[:, 0] and v2p[:, 1] already hold both maps; "
                "give either v2p or the separate tables"
            )
        _check_table("v2p", v2p, 2)
        if v2p.shape[1] != 2:
            raise ValueError(f"v2p has shape {v2p.shape}: it needs two columns, FULL and SWA")
        full, swa = (PageMap("pair", 0, column, v2p.shape[0]) for column in (0, 1))
        return (v2p,), full, swa if has_swa else None
    if swa_v2p is not None and full_to_swa is not None:
        raise ValueError("swa_v2p and full_to_swa were given: the SWA table needs exactly one of them")
    by_page = swa_v2p is not None
    if has_swa and not by_page and full_to_swa is None:
        raise ValueError("out has a SWA section but no SWA map was given: give v2p, swa_v2p or full_to_swa")
    if not has_swa and (by_page or full_to_swa is not None):
        name = "swa_v2p" if by_page else "full_to_swa"
        raise ValueError(f"{name} was given but out has no SWA section to write: add one or leave {name} out")
    for name, table in separate.items():
        _check_table(name, table, 1)
    operands = tuple(separate.values())
    full = PageMap("identity") if full_v2p is None else PageMap("pages", 0, 0, full_v2p.shape[0])
    if not has_swa:
        return operands, full, None
    return operands, full, PageMap("pages" if by_page else "tokens", len(operands) - 1, 0, operands[-1].shape[0])


def page_shift(page_size: int) -> int:
    """log2 of the page size, or raise ValueError."""
    size = check_static("page_size", page_size)
    if size < 1 or size & (size - 1):
        raise ValueError(f"page_size={size}: it must be a power of two, such as 1, 16 or 64")
    return size.bit_length() - 1


def check_static(name: str, value) -> int:
    """The Python integer of a value that must be known while tracing, or raise ValueError."""
    try:
        return operator.index(value)
    except TypeError as error:  # a float, None or a traced array
        raise ValueError(f"{name}={value!r}: it must be an integer known at compile time") from error


def check_integers(name: str, array, rank: int, length: int | None = None) -> None:
    """Raise ValueError unless `array` holds integers, has `rank` dimensions and, if given, `length` rows."""
    if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} is {kind}: it must be an array of integers")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}: it must have {rank} dimension{'s'[: rank > 1]}")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} rows for a batch of {length}: make them equal")


def as_int32(array) -> jax.Array:
    """The array on the device as int32; 64-bit ids are narrowed, since every id here fits."""
    return jnp.asarray(array).astype(jnp.int32)


def _check_table(name: str, table, rank: int) -> None:
    check_integers(name, table, rank)
    if table.shape[0] == 0:
        raise ValueError(f"{name} has no rows: it needs at least row 0, the sink")

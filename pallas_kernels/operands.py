"""What the metadata kernels read: vectors, the request table, and the maps from virtual to physical pages.

Each is described by a small static value, so one kernel body serves page- and token-granular tables, separate and
interleaved maps, arrays and views. Numbers here are pages unless they are called tokens; `page_size == 1 << shift`.
Methods that take `xp` compute with `xp.where`: a kernel passes its lanes, a reference jnp.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.buffers import describe
from pallas_kernels.views import Array, Section, View, section

GRANULARITIES = ("page", "token")


class Inputs:
    """The operands of one call, in the order in which they were added, and their names for error messages."""

    def __init__(self):
        self.arrays: list[jax.Array] = []
        self.labels: list[str] = []

    def add(self, name: str, array: Array, rank: int, length: int | None = None) -> Section:
        """Check that `array` holds integers in `rank` dimensions, `length` of them in the first, and place it."""
        check_integers(name, array, rank, length)
        place = section(name, array, len(self.arrays))
        self.arrays.append(as_int32(array.buffer if isinstance(array, View) else array))
        self.labels.append(name)
        return place

    def scalar(self, name: str, value, least: int | None = None) -> "int | Section":
        """A number that may change between calls: a Python integer, or an array of one integer as an operand."""
        if not hasattr(value, "dtype"):
            try:
                number = operator.index(value)
            except TypeError as error:
                raise ValueError(f"{name}={value!r}: it must be an integer or an array of one integer") from error
            if least is not None and number < least:
                raise ValueError(f"{name}={number}: it must be >= {least}")
            return min(max(number, -(2**31)), 2**31 - 1)
        if value.size != 1 or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} is {describe(value)}: it must be one integer")
        return self.add(name, jnp.asarray(value).reshape(1), 1)


def scalar_value(scalar: "int | Section", lanes, ins: tuple):
    """The number in a kernel body."""
    return scalar if isinstance(scalar, int) else scalar.load(lanes, ins, (0,))


def scalar_array(scalar: "int | Section", inputs: tuple):
    """The number in jnp."""
    return scalar if isinstance(scalar, int) else scalar.read(inputs)[0]


@dataclasses.dataclass(frozen=True)
class Source:
    """A request table [rows, columns] whose entries are virtual pages ('page') or virtual token ids ('token')."""

    granularity: str
    shift: int
    place: Section

    @property
    def columns(self) -> int:
        return self.place.shape[1]

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

    def virtual(self, xp, entry, offset):
        """Virtual token id of an entry. A negative page has no tokens, so the entry itself is kept."""
        if self.granularity == "token":
            return entry
        return xp.where(entry < 0, entry, (entry << self.shift) + offset)

    def row(self, xp, row):
        """The row itself, or row 0, the sink row, for a row outside the table."""
        return xp.where((row >= 0) & (row < self.place.shape[0]), row, 0)

    def load(self, lanes, ins: tuple, row, position, live):
        """(entry, live) in a kernel body: the entry for `position` of a valid row, -1 where not live or not reached."""
        column = self.column(position)
        live = live & (column >= 0) & (column < self.columns)
        return self.place.load(lanes, ins, (row, column), live, -1), live

    def gather(self, inputs: tuple, row, position, live):
        """The same in jnp, for any row."""
        column = self.column(position)
        live = live & (column >= 0) & (column < self.columns)
        index = self.place.index(self.row(jnp, row), jnp.where(live, column, 0))
        return jnp.where(live, inputs[self.place.buffer][index], -1), live


@dataclasses.dataclass(frozen=True)
class PageMap:
    """How a virtual page becomes a physical one.

    style    'identity': they are equal; 'pages': table[page]; 'pair': table[page, column]; 'tokens': table[virtual
             token] is a physical token, which is divided afterwards
    place    the table; an id from its length on is out of range. None for 'identity'
    column   of a 'pair'
    """

    style: str
    place: Section | None = None
    column: int = 0

    def load(self, lanes, ins: tuple, page, offset, shift: int, live):
        """Physical page in a kernel body; -1 for unbound, negative and out-of-range ids and for lanes not live."""
        key, inside = self._key(page, offset, shift)
        inside = inside & live
        if self.place is None:
            return lanes.where(inside, page, -1)
        return self._page(self.place.load(lanes, ins, self._coordinates(key), inside, -1), shift)

    def gather(self, inputs: tuple, page, offset, shift: int):
        """The same in jnp, for all lanes."""
        key, inside = self._key(page, offset, shift)
        if self.place is None:
            return jnp.where(inside, page, -1)
        index = self.place.index(*self._coordinates(jnp.where(inside, key, 0)))
        return jnp.where(inside, self._page(inputs[self.place.buffer][index], shift), -1)

    def _key(self, page, offset, shift: int):
        """(row of the table, True where it is in range)."""
        if self.place is None:
            return page, page >= 0
        rows = self.place.shape[0]
        if self.style != "tokens":
            return page, (page >= 0) & (page < rows)
        # Pages first: page << shift of an id far past the table could wrap around to a valid token.
        token = (page << shift) + offset
        return token, (page >= 0) & (page < -(-rows >> shift)) & (token < rows)

    def _coordinates(self, key) -> tuple:
        return (key, self.column) if self.style == "pair" else (key,)

    def _page(self, value, shift: int):
        return value >> shift if self.style == "tokens" else value


def make_source(inputs: Inputs, source: Array, granularity: str, page_size: int) -> Source:
    """Place `source`, or raise ValueError."""
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity={granularity!r} is unknown: use 'page' (a virtual page a column) or "
            "'token' (a virtual token id a column)"
        )
    shift = page_shift(page_size)
    place = inputs.add("source", source, 2)
    if 0 in place.shape:
        raise ValueError(f"source has shape {place.shape}: it needs a row 0, the sink row, and one column or more")
    return Source(granularity, shift, place)


def make_map(inputs: Inputs, v2p: Array | None, full_to_swa: Array | None, name: str = "v2p") -> PageMap:
    """Place the map of a single table, by page or by token, or raise ValueError."""
    if v2p is not None and full_to_swa is not None:
        raise ValueError("v2p and full_to_swa were given: a table is translated by one of them at most")
    if full_to_swa is not None:
        return PageMap("tokens", _table(inputs, "full_to_swa", full_to_swa, 1))
    if getattr(v2p, "ndim", 1) == 2:
        raise ValueError(
            f"{name} has shape {v2p.shape}: one table takes one map; give a View of the column of an interleaved one"
        )
    return PageMap("identity") if v2p is None else PageMap("pages", _table(inputs, name, v2p, 1))


def make_maps(inputs: Inputs, v2p, full_v2p, swa_v2p, full_to_swa, has_swa: bool) -> tuple[PageMap, PageMap | None]:
    """Place the maps a caller gave: (FULL map, SWA map or None), or raise ValueError."""
    separate = {"full_v2p": full_v2p, "swa_v2p": swa_v2p, "full_to_swa": full_to_swa}
    separate = {name: table for name, table in separate.items() if table is not None}
    if v2p is not None:
        if separate:
            raise ValueError(
                f"v2p and {', '.join(separate)} were given: v2p[:, 0] and v2p[:, 1] already hold both maps; "
                "give either v2p or the separate tables"
            )
        place = _table(inputs, "v2p", v2p, 2)
        if place.shape[1] != 2:
            raise ValueError(f"v2p has shape {place.shape}: it needs two columns, FULL and SWA")
        full, swa = (PageMap("pair", place, column) for column in (0, 1))
        return full, swa if has_swa else None
    if swa_v2p is not None and full_to_swa is not None:
        raise ValueError("swa_v2p and full_to_swa were given: the SWA table needs exactly one of them")
    by_page = swa_v2p is not None
    if has_swa and not by_page and full_to_swa is None:
        raise ValueError("out has a SWA section but no SWA map was given: give v2p, swa_v2p or full_to_swa")
    if not has_swa and (by_page or full_to_swa is not None):
        name = "swa_v2p" if by_page else "full_to_swa"
        raise ValueError(f"{name} was given but out has no SWA section to write: add one or leave {name} out")
    places = {name: _table(inputs, name, table, 1) for name, table in separate.items()}
    full = PageMap("pages", places["full_v2p"]) if "full_v2p" in places else PageMap("identity")
    if not has_swa:
        return full, None
    return full, PageMap("pages", places["swa_v2p"]) if by_page else PageMap("tokens", places["full_to_swa"])


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


def check_max_pages(value: int | None, columns: int) -> int:
    """How many columns of a table may be written, or raise ValueError."""
    pages = columns if value is None else check_static("max_pages", value)
    if not 0 <= pages <= columns:
        raise ValueError(f"max_pages={pages}: it must be between 0 and the width of the page table, {columns}")
    return pages


def check_integers(name: str, array: Array, rank: int, length: int | None = None) -> None:
    """Raise ValueError unless `array` holds integers, has `rank` dimensions and, if given, `length` rows."""
    if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} is {kind}: it must be an array of integers")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}: it must have {rank} dimension{'s'[: rank > 1]}")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} rows for a batch of {length}: make them equal")


def as_int32(array) -> jax.Array:
    """The array on the device as int32. An id that does not fit becomes the nearest that does: out of range still."""
    limits = np.iinfo(np.int32)
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        xp = np if isinstance(array, np.ndarray) else jnp
        array = xp.clip(array, None if array.dtype.kind == "u" else limits.min, limits.max)
    return jnp.asarray(array.astype(np.int32))


def _table(inputs: Inputs, name: str, table: Array, rank: int) -> Section:
    place = inputs.add(name, table, rank)
    if place.shape[0] == 0:
        raise ValueError(f"{name} has no rows: it needs at least row 0, the sink")
    return place

"""Where every row of K and V and every state lies in one pool that all kinds of page share: static numbers, no arrays.

A *kind* of page is an allocation class: "full" pages live as long as their request, "swa" pages until every window has
passed them, a "state" page is what one request has of all recurrent layers and of all rings. The *entry* of a kind is
all that one token (one request, for states) owns there, so that a page is one piece of memory whatever the number of
layers, and the draft's rows live and move with the target's:

    [K_0|V_0|K_1|V_1|... | pad to 16 bytes | dK_0|dV_0|... | pad to 32 bytes]     full, swa: token-major
     layers of the kind                      draft lanes
    [conv_0|conv_1|... |temporal_0|temporal_1|... |tail_0|... | pad to 32 bytes]  state: part by part

A page is `page_size` entries, of states one. Where layers have compressed keys (`KPoolSpec`) a FULL page ends with a
*section*, for each of them the keys of its pools, then their scales:

    [entry 0|entry 1|... |index_0 | pad to 32 bytes|index_1 | pad|... |dindex_0 | pad|...]

The pool is an array [units, unit]. Pages of every kind count from unit 0
of the same memory: page p of a kind fills units p * page_units to (p + 1) * page_units. Which pages are alive, and that
no two that are overlap, is the allocator's affair. Page 0 of every kind is its sink; pages before `min_page` overlap
some kind's sink and are never handed out.

Worked row: bfloat16, 3 layers of 2 heads, 64 wide in K and 32 in V. K rows are 256 bytes, V rows 128, the entry
3 * 384 = 1152. V of layer 2 of slot 5 lies at byte 5 * 1152 + 2 * 384 + 256 = 6784. A unit is 64 elements, 128 bytes:
the entry is 9 units, and the row starts at unit 53.

Another: one layer of MLA, a latent row of 1152 bytes, pages of 256 tokens in pools of 4, index keys of 128 bytes. An
index is 64 * 128 + 64 * 4 = 8448 bytes, a page 256 * 9 + 66 = 2370 units. Slot 517 is the sixth of page 2: its row
starts at unit 2 * 2370 + 5 * 9 = 517 * 9 + 2 * 66 = 4785. The key of pool 1 of that page is unit 2 * 2370 + 2304 + 1.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.cache.layers import ACCUMULATED, POSITION, KPoolSpec, LayerSpec, StateSpec, check_pools

ROW_BYTES, ENTRY_BYTES = 16, 32  # what rows and entries are multiples of
UNIT = 64  # most elements a unit
INDEX_LIMIT = 2**31  # slots and units are int32 on the device
KINDS = ("full", "swa", "state")


class Span(NamedTuple):
    """A row inside an entry: whose it is, and its first byte and size in bytes.

    `owner` is the name and index of a layer list's element, as ("layers", 2), `part` what of it, as "K" or "conv".
    """

    owner: tuple[str, int]
    part: str
    start: int
    size: int

    def __str__(self):
        return f"{self.part} of {self.owner[0]}[{self.owner[1]}], bytes {self.start} to {self.start + self.size}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one slot of a kind of page holds. Any set of rows will do: K and V of tokens, or the parts of a state.

    Attributes:
      kind: the kind's name.
      per_page: entries a page.
      size: bytes of the entry, a multiple of 32.
      spans: its rows. Each is a multiple of 16 bytes at a multiple of 16 bytes, inside the entry, clear of the others.
        Anything else is a ValueError that names the kind and the row.
      section: bytes behind a page's last entry that are the whole page's, a multiple of 32.
      section_spans: what lies there, their first bytes those in the section, by the rules of `spans`.
    """

    kind: str
    per_page: int
    size: int
    spans: tuple[Span, ...]
    section: int = 0
    section_spans: tuple[Span, ...] = ()

    def __post_init__(self):
        if self.size < ENTRY_BYTES:
            raise ValueError(f"kind {self.kind!r}: an entry of {self.size} bytes is not a multiple of {ENTRY_BYTES}")
        self._check("an entry", self.size, self.spans)
        self._check("a section", self.section, self.section_spans)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: its entries and its section."""
        return self.per_page * self.size + self.section

    def _check(self, what: str, size: int, spans: tuple[Span, ...]):
        if size % ENTRY_BYTES:
            raise ValueError(f"kind {self.kind!r}: {what} of {size} bytes is not a multiple of {ENTRY_BYTES}")
        end, last = 0, None
        for span in sorted(spans, key=lambda span: span.start):
            if span.size < 1 or span.size % ROW_BYTES or span.start % ROW_BYTES:
                raise ValueError(
                    f"kind {self.kind!r}: {span}, a row of {span.size} bytes: rows start at multiples of {ROW_BYTES} "
                    f"bytes and are that long; choose heads * width * bytes an element as a multiple of {ROW_BYTES}"
                )
            if span.start < end:
                raise ValueError(f"kind {self.kind!r}: {span}, overlaps {last}; rows of an entry are disjoint")
            end, last = span.start + span.size, span
        if end > size:
            raise ValueError(f"kind {self.kind!r}: {last}, ends outside the {what.split()[-1]} of {size} bytes")


class Row(NamedTuple):
    """K and V of one layer in an entry, in units: V follows K. V is of 0 units where the layer keeps none.

    `kind` is the kind of page; `key` and `value` are first units inside the entry, `key_units` and `value_units` sizes.
    """

    kind: str
    key: int
    value: int
    key_units: int
    value_units: int


class StateRow(NamedTuple):
    """A part of a layer's state or its ring in the entry of kind "state", or its index keys in a FULL page, in units:
    the first one in the entry or the page, and how many it fills."""

    start: int
    units: int


def _ceil_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _token_entry(kind: str, page_size: int, itemsize: int, lists: dict[str, tuple[LayerSpec, ...]]) -> Entry:
    """The entry of a kind whose slots are tokens: K and V of its layers, list after list."""
    section = _section(page_size, lists) if kind == "full" else ()
    spans, end = [], 0
    for name, layers in lists.items():
        end = _ceil_to(end, ROW_BYTES)
        for index, spec in enumerate(layers):
            if spec.carries == POSITION and spec.storage == kind:
                for part, width in (("K", spec.key_width), ("V", spec.value_width)):
                    if width:
                        spans.append(Span((name, index), part, end, width * itemsize))
                    end += width * itemsize
    # FULL exists, as it mints the virtual ids, even if no layer lives there.
    return Entry(kind, page_size, max(_ceil_to(end, ENTRY_BYTES), ENTRY_BYTES), tuple(spans), *section)


def _pooled(lists) -> list[tuple[tuple[str, int], KPoolSpec]]:
    """The layers with compressed keys, with their owners' names, list after list."""
    layers = [((name, index), spec) for name, layers in lists.items() for index, spec in enumerate(layers)]
    return [(owner, spec) for owner, spec in layers if isinstance(spec, KPoolSpec)]


def _section(page_size: int, lists) -> tuple[int, tuple[Span, ...]]:
    """Size and content of a FULL page's section: the index keys of every layer that has some."""
    spans, end = [], 0
    for owner, spec in _pooled(lists):
        size = _ceil_to(spec.index_bytes(page_size), ENTRY_BYTES)
        spans.append(Span(owner, "index", end, size))
        end += size
    return end, tuple(spans)


def _state_entry(lists) -> Entry | None:
    """The entry of kind "state": the first part of every recurrent layer, then the second of every one, and so on; then
    the rings. None if no request has any."""
    states = [(index, spec) for index, spec in enumerate(lists["layers"]) if spec.carries == ACCUMULATED]
    spans, end = [], 0
    for nth in range(max((len(spec.parts) for _, spec in states), default=0)):
        for index, spec in states:
            for part in spec.parts[nth : nth + 1]:
                spans.append(Span(("layers", index), part.name, end, part.nbytes))
                end += part.nbytes
    for owner, spec in _pooled(lists):
        size = math.prod(spec.tail_shape) * jnp.dtype(jnp.bfloat16).itemsize
        spans.append(Span(owner, "tail", end, size))
        end += size
    return Entry("state", 1, _ceil_to(end, ENTRY_BYTES), tuple(spans)) if spans else None


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The static description of a pool: hashable, equal for equal arguments.

    Attributes:
      page_size: tokens a page, a power of two.
      dtype: dtype of K and V, as a string.
      layers: what each of the model's layers carries.
      draft_layers: those of a draft that follows the same page tables: its lanes. A windowed one stored in "full" lies
        in FULL entries and still clips its reads; stored in "swa" it may look back no further than the model's own.
      units: size of the pool.

    Raises ValueError where a row does not fit the alignment, an index would not fit int32, or the pool has room for the
    sinks alone.

    Example:
      >>> layout = PoolLayout.for_pages([LayerSpec(2, 64, value_dim=32)] * 3, full=20, page_size=4, dtype="bfloat16")
      >>> layout.row(2)
      Row(kind='full', key=6, value=8, key_units=2, value_units=1)
      >>> layout.unit, layout.entry_units("full"), layout.num_pages("full"), layout.nbytes
      (64, 9, 21, 96768)
    """

    page_size: int
    dtype: str
    layers: tuple[LayerSpec | StateSpec, ...]
    draft_layers: tuple[LayerSpec, ...]
    units: int

    def __post_init__(self):
        for name, value in (
            ("dtype", jnp.dtype(self.dtype).name),
            ("layers", tuple(self.layers)),
            ("draft_layers", tuple(self.draft_layers)),
        ):
            object.__setattr__(self, name, value)
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size}: must be a power of two")
        for name in ("layers", "draft_layers"):
            check_pools(name, getattr(self, name), self.page_size)
        if self._pooled and jnp.dtype(self.dtype).itemsize > 4:
            raise ValueError(
                f"dtype={self.dtype!r}: an index key's scale is 4 bytes in a pool of wider elements; choose a dtype of "
                "4 bytes or less"
            )
        windows = [spec.window for spec in self.layers if spec.carries == POSITION and spec.storage == "swa"]
        reach = max(windows, default=0)
        for index, spec in enumerate(self.draft_layers):
            if spec.carries == ACCUMULATED:
                raise ValueError(f"draft_layers[{index}]: a recurrent layer; a draft's lanes hold K and V only")
            if spec.storage == "swa" and spec.window > reach:
                raise ValueError(
                    f"draft_layers[{index}]: its window of {spec.window} reaches behind the model's SWA pages, which "
                    f"are freed {reach} tokens back; store the layer in 'full'"
                )
        if self.units >= INDEX_LIMIT:
            raise ValueError(
                f"units={self.units}: a pool of {self.nbytes} bytes has more than 2**31 - 1 units of {self.unit_bytes} "
                "bytes, which int32 indices cannot reach; make the pool smaller, or rows multiples of more elements"
            )
        for kind in self.kinds:
            if self.num_pages(kind) <= self.min_page(kind):
                least = (self.min_page(kind) + 1) * self.page_units(kind) * self.unit_bytes
                raise ValueError(
                    f"units={self.units}: a pool of {self.nbytes} bytes has no page of kind {kind!r} besides the "
                    f"sinks; it takes {least} bytes to have one"
                )

    @classmethod
    def _unlimited(cls, layers, page_size, dtype, draft_layers) -> "PoolLayout":
        return cls(page_size, dtype, layers, draft_layers, units=INDEX_LIMIT - 1)

    @classmethod
    def for_budget(cls, layers, *, budget: int, page_size: int, dtype="float32", draft_layers=()) -> "PoolLayout":
        """The largest pool of at most `budget` bytes."""
        layout = cls._unlimited(layers, page_size, dtype, draft_layers)
        return dataclasses.replace(layout, units=budget // layout.unit_bytes)

    @classmethod
    def for_pages(
        cls, layers, *, full: int, swa: int = 0, state: int = 0, page_size: int, dtype="float32", draft_layers=()
    ) -> "PoolLayout":
        """The smallest pool in which so many pages of each kind, sinks not counted, can be alive at once. `swa` and
        `state` are unused when no layer is stored there."""
        layout = cls._unlimited(layers, page_size, dtype, draft_layers)
        below, page = layout.above_states(state), layout.page_units("full")
        if "swa" in layout.kinds:
            below = (-(-below // layout.page_units("swa")) + swa) * layout.page_units("swa")
        return dataclasses.replace(layout, units=(-(-below // page) + full) * page)

    @property
    def _lists(self) -> dict[str, tuple[LayerSpec | StateSpec, ...]]:
        return {"layers": self.layers, "draft_layers": self.draft_layers}

    @property
    def _pooled(self) -> list[KPoolSpec]:
        """The layers with compressed keys."""
        return [spec for spec in (*self.layers, *self.draft_layers) if isinstance(spec, KPoolSpec)]

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """The entry of each kind of page in use, FULL first."""
        lists, specs = self._lists, (*self.layers, *self.draft_layers)
        itemsize = jnp.dtype(self.dtype).itemsize
        entries = {"full": _token_entry("full", self.page_size, itemsize, lists)}
        if any(spec.carries == POSITION and spec.storage == "swa" for spec in specs):
            entries["swa"] = _token_entry("swa", self.page_size, itemsize, lists)
        if state := _state_entry(lists):
            entries["state"] = state
        return entries

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of page in use, of `KINDS` and in that order; "full" always is."""
        return tuple(self.entries)

    @functools.cached_property
    def storage(self) -> str:
        """The dtype of the pool's elements: `dtype`, or unsigned integers of its size where elements are narrower than
        32 bits or hold something of another dtype: a part of a state, index keys and rings. Bits then change their
        meaning and not their place; floats of 16 bits some versions of XLA would convert on a CPU, the whole pool of
        them."""
        dtypes = {part.dtype for spec in self.layers if spec.carries == ACCUMULATED for part in spec.parts}
        size = jnp.dtype(self.dtype).itemsize
        same = dtypes <= {self.dtype} and not self._pooled
        return self.dtype if same and size >= 4 else f"uint{8 * size}"

    @functools.cached_property
    def unit(self) -> int:
        """Elements a unit: the largest power of two up to 64 that divides every entry, every section, every row in them
        and every index key."""
        entries = self.entries.values()
        sizes = [size for entry in entries for size in (entry.size, entry.section)]
        spans = [span for entry in entries for span in (*entry.spans, *entry.section_spans)]
        sizes += [size for span in spans for size in (span.start, span.size)]
        sizes += [spec.index_dim for spec in self._pooled]  # and so a ring's rows, four times as long
        itemsize = jnp.dtype(self.dtype).itemsize
        return math.gcd(UNIT * itemsize, *sizes) // itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes a unit."""
        return self.unit * jnp.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.units * self.unit_bytes

    def entry_units(self, kind: str) -> int:
        """Units from one slot of the kind to the next."""
        return self.entries[kind].size // self.unit_bytes

    def page_units(self, kind: str) -> int:
        """Units a page of the kind, its section included."""
        return self.entries[kind].page_bytes // self.unit_bytes

    def slot_units(self, kind: str, slots):
        """The unit at which each slot's entry starts: `slots` are those of the kind, an int or an int32 array."""
        start, entry = slots * self.entry_units(kind), self.entries[kind]
        if entry.section:  # every page before the slot's has one; pages are powers of two
            start += (slots >> entry.per_page.bit_length() - 1) * (entry.section // self.unit_bytes)
        return start

    @property
    def ring_bytes(self) -> int:
        """Bytes that a request's rings take of its page of kind "state"."""
        spans = self.entries["state"].spans if self._pooled else ()
        return sum(span.size for span in spans if isinstance(self._lists[span.owner[0]][span.owner[1]], KPoolSpec))

    def num_pages(self, kind: str) -> int:
        """Pages of the kind that the pool has addresses for, sinks counted."""
        return self.units // self.page_units(kind)

    def min_page(self, kind: str) -> int:
        """First page of the kind that overlaps no sink: the least that may be handed out."""
        floor = max(map(self.page_units, self.kinds))
        return -(-floor // self.page_units(kind))

    def above_states(self, count):
        """The unit at which `count` states packed at the bottom of the pool end; the sinks, if no layer has a state."""
        if "state" in self.kinds:
            return (self.min_page("state") + count) * self.page_units("state")
        return max(map(self.page_units, self.kinds))

    def holds(self, *, full, swa=0, state=0):
        """Whether so many pages of each kind can be alive at once: FULL packed from the top, states from the bottom,
        SWA above them. Exact, as pages can be moved. Numbers, or int32 arrays of at most `num_pages` of each kind."""
        left, below = self.num_pages("full") - full, self.above_states(state)
        room = left * self.page_units("full")
        if "swa" in self.kinds:  # in pages: units of a demand that does not fit may not fit int32 either
            below, room = -(-below // self.page_units("swa")) + swa, room // self.page_units("swa")
        return (left >= self.min_page("full")) & (below <= room)

    def row(self, layer: int, draft: bool = False) -> Row:
        """Where K and V of a layer lie in the entry of its kind: `layer` indexes `layers`, or `draft_layers`."""
        owner = ("draft_layers", self.draft_layers) if draft else ("layers", self.layers)
        if not 0 <= layer < len(owner[1]):
            raise ValueError(f"layer={layer}: {owner[0]} has {len(owner[1])} elements")
        if owner[1][layer].carries != POSITION:
            raise ValueError(f"layer={layer}: a recurrent layer has a state and no rows; see `state_rows`")
        kind = owner[1][layer].storage
        key, *value = (span for span in self.entries[kind].spans if span.owner == (owner[0], layer))
        end = key.start + key.size
        sizes = key.start, end, key.size, sum(span.size for span in value)
        return Row(kind, *(size // self.unit_bytes for size in sizes))

    def state_rows(self, layer: int) -> tuple[StateRow, ...]:
        """Where the parts of a recurrent layer lie in the entry of kind "state", in the order of its `parts`."""
        if not 0 <= layer < len(self.layers) or self.layers[layer].carries != ACCUMULATED:
            raise ValueError(f"layer={layer}: no recurrent layer; see `row`")
        spans = (span for span in self.entries["state"].spans if span.owner == ("layers", layer))
        return tuple(StateRow(span.start // self.unit_bytes, span.size // self.unit_bytes) for span in spans)

    def index_row(self, layer: int, draft: bool = False) -> StateRow:
        """Where the index keys of a layer lie in a FULL page, the first unit counted from the page's: for each pool of
        the page X bytes, then for each a scale of 4 bytes."""
        entry = self.entries["full"]
        start, units = self._pooled_row(entry.section_spans, layer, draft)
        return StateRow(start + entry.per_page * self.entry_units("full"), units)

    def ring_row(self, layer: int, draft: bool = False) -> StateRow:
        """Where the ring of a layer lies in the entry of kind "state"."""
        return self._pooled_row(getattr(self.entries.get("state"), "spans", ()), layer, draft)

    def _pooled_row(self, spans: tuple[Span, ...], layer: int, draft: bool) -> StateRow:
        name = "draft_layers" if draft else "layers"
        layers = self._lists[name]
        if not 0 <= layer < len(layers) or not isinstance(layers[layer], KPoolSpec):
            raise ValueError(f"layer={layer}: no element of {name} with compressed keys; see `row` and `state_rows`")
        span = next(span for span in spans if span.owner == (name, layer))
        return StateRow(span.start // self.unit_bytes, span.size // self.unit_bytes)

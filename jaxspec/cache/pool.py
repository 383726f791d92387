"""All layers and kinds of page in one buffer: the cache view of unified memory. See `jaxspec.cache.kv`."""

import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.layers import LayerSpec, StateSpec
from jaxspec.cache.layout import PoolLayout
from jaxspec.cache.stored import (
    IN_BOUNDS,
    bits_as,
    by_row,
    check_rows,
    from_storage,
    pooled,
    put_words,
    tail_rows,
    to_storage,
    word_places,
    words_of,
)
from pallas_kernels import PagedIndex, PagedRows, RowPlace, View, state_scatter, store_rows
from pallas_kernels.dispatch import supported

Array = jax.Array


@flax.struct.dataclass
class PoolCache:
    """All layers and kinds of page in one buffer; the interface of `KVCache`.

    A model and its draft see the same pool through different lanes: `cache.replace(lanes="draft")`.

    Attributes:
      buffer: [layout.units, layout.unit] in `layout.storage`.
      layout: where the rows are (static).
      lanes: "host" or "draft", whose layers `layers`, `write` and `read` mean (static).
      pending: as in `KVCache`.

    Example:
      >>> cache = init_pool(PoolLayout.for_pages([LayerSpec(1, 4)], full=3, page_size=2))
      >>> slots = jnp.array([[3]])
      >>> cache = cache.write(0, slots, jnp.ones((1, 1, 1, 4)), jnp.full((1, 1, 1, 4), 2.0))
      >>> [rows.tolist() for rows in cache.read(0, slots)]
      [[[[[1.0, 1.0, 1.0, 1.0]]]], [[[[2.0, 2.0, 2.0, 2.0]]]]]
    """

    buffer: Array
    layout: PoolLayout = flax.struct.field(pytree_node=False)
    lanes: str = flax.struct.field(pytree_node=False, default="host")
    pending: dict[int, tuple[Array, ...]] = flax.struct.field(default_factory=dict)

    @property
    def layers(self) -> tuple[LayerSpec | StateSpec, ...]:
        """The specification of each layer that the lanes hold."""
        return self.layout.draft_layers if self.lanes == "draft" else self.layout.layers

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    def write(self, layer: int, slots: Array, k: Array, v: Array | None, backend: str | None = None) -> "PoolCache":
        """Stores rows of one layer; see `KVCache.write`."""
        check_rows(self.layers[layer], k, v)
        return self.with_rows(layer, store_rows(self.rows(layer), slots, k, v, backend=supported(backend)))

    def with_rows(self, layer: int, rows: PagedRows) -> "PoolCache":
        """The cache with rows of one layer in place of its own; see `KVCache.with_rows`."""
        return self.replace(buffer=rows.buffer)

    def read(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Rows of one layer; see `KVCache.read`."""
        return self.rows(layer).read(slots)

    def rows(self, layer: int) -> PagedRows:
        """Where the rows of one layer lie; see `KVCache.rows`."""
        spec, layout = self.layers[layer], self.layout
        row = layout.row(layer, self.lanes == "draft")
        place = RowPlace(
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_shape[1],
            page_size=self.page_size,
            page_rows=layout.page_units(row.kind),
            entry_rows=layout.entry_units(row.kind),
            key=row.key * layout.unit,
            value=row.value * layout.unit,
            dtype=layout.dtype,
        )
        return PagedRows(self.buffer, place)

    def write_state(self, layer: int, slots: Array, parts: tuple[Array, ...]) -> "PoolCache":
        """Stores states of one recurrent layer; see `KVCache.write_state`."""
        cache = self
        places = zip(self._state_places(layer, slots), self.layers[layer].parts, parts, strict=True)
        # The last part first: where it is made of what was read of all parts, no read can come after a write. A version
        # of XLA copied the pool for one that could.
        for (start, units), part, values in reversed([*places]):
            cache = cache._put(start, units, to_storage(part, values, self.layout.storage))
        return cache

    def read_state(self, layer: int, slots: Array) -> tuple[Array, ...]:
        """States of one recurrent layer; see `KVCache.read_state`."""
        places = zip(self._state_places(layer, slots), self.layers[layer].parts, strict=True)
        return tuple(from_storage(part, self._get(*place)) for place, part in places)

    def commit_state(
        self, layer: int, slots: Array, row: Array, parts: tuple[Array, ...], backend: str | None = None
    ) -> "PoolCache":
        """Stores one of the states that each request has in `pending`; see `KVCache.commit_state`."""
        layout, buffer = self.layout, self.buffer
        entry = layout.entry_units("state") * layout.unit
        places = zip(layout.state_rows(layer), self.layers[layer].parts, parts, strict=True)
        for place, part, values in places:
            B, D = values.shape[:2]
            states = to_storage(part, values.reshape(B * D, *part.shape), layout.storage)
            shape = (1, layout.num_pages("state"), place.units, layout.unit)
            view = View(buffer, place.start * layout.unit, shape, (0, entry, layout.unit, 1))
            buffer = state_scatter(states.reshape(1, B, D, -1), row, slots, view, backend=backend).buffer
        return self.replace(buffer=buffer)

    def write_index(self, layer: int, pools: Array, keys: Array, scales: Array) -> "PoolCache":
        """Stores index keys of one layer; see `KVCache.write_index`."""
        spec, layout = pooled(self.layers, layer), self.layout
        words, size = words_of(spec, keys, scales, self.buffer.dtype), self.buffer.dtype.itemsize
        page, first = word_places(spec, pools, self.page_size)
        unit, column = first >> layout.unit_bytes.bit_length() - 1, (first & layout.unit_bytes - 1) >> size // 2
        row = page * layout.page_units("full") + layout.index_row(layer, self.lanes == "draft").start + unit
        return self.replace(buffer=put_words(self.buffer, row, column, words))

    def read_index(self, layer: int, pages: Array) -> tuple[Array, Array]:
        """Index keys of one layer; see `KVCache.read_index`."""
        return self.index_pages(layer).read(pages)

    def index_pages(self, layer: int) -> PagedIndex:
        """Where the index keys of one layer lie; see `KVCache.index_pages`."""
        spec, layout = pooled(self.layers, layer), self.layout
        start = layout.index_row(layer, self.lanes == "draft").start
        return PagedIndex(self.buffer, layout.page_units("full"), start, self.page_size // spec.pool, spec.index_dim)

    def write_tail(self, layer: int, slots: Array, columns: Array, rows: Array) -> "PoolCache":
        """Stores rows of one layer's rings; see `KVCache.write_tail`."""
        rows = tail_rows(pooled(self.layers, layer), rows)
        bits = bits_as(rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:])), self.buffer.dtype)
        return self._put(*self._tail_places(layer, slots, columns), bits)

    def read_tail(self, layer: int, slots: Array, columns: Array) -> Array:
        """Rows of one layer's rings; see `KVCache.read_tail`."""
        spec = pooled(self.layers, layer)
        bits = self._get(*self._tail_places(layer, slots, columns))
        return bits_as(bits, jnp.bfloat16).reshape(*columns.shape, *spec.tail_shape[1:])

    def _tail_places(self, layer: int, slots: Array, columns: Array) -> tuple[Array, int]:
        """First unit of rows of the layer's rings, [B, D, 1], and how many units a row fills."""
        ring = self.layout.ring_row(layer, self.lanes == "draft")
        units = ring.units // self.layers[layer].ring
        start = by_row(slots) * self.layout.entry_units("state") + ring.start + columns * units
        return start[..., None], units

    def _state_places(self, layer: int, slots: Array) -> list[tuple[Array, int]]:
        """For each part of the layer's state, its first unit in each slot, [B, 1], and how many units it fills."""
        entry = slots * self.layout.entry_units("state")
        return [((entry + row.start)[:, None], row.units) for row in self.layout.state_rows(layer)]

    def _put(self, start: Array, units: int, rows: Array) -> "PoolCache":
        """The pool with [..., units * unit] rows at the units `start`, [..., 1]."""
        batch = start.ndim - 1
        dimensions = lax.ScatterDimensionNumbers(
            update_window_dims=(batch, batch + 1), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
        )
        rows = rows.reshape(*start.shape[:-1], units, self.layout.unit)
        return self.replace(buffer=lax.scatter(self.buffer, start, rows, dimensions, mode=IN_BOUNDS))

    def _get(self, start: Array, units: int) -> Array:
        """The inverse: [..., units * unit]."""
        batch = start.ndim - 1
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(batch, batch + 1), collapsed_slice_dims=(), start_index_map=(0,)
        )
        rows = lax.gather(self.buffer, start, dimensions, (units, self.layout.unit), mode=IN_BOUNDS)
        return rows.reshape(*start.shape[:-1], units * self.layout.unit)


def init_pool(layout: PoolLayout) -> PoolCache:
    """A zero-filled pool, seen through the model's own lanes."""
    return PoolCache(buffer=jnp.zeros((layout.units, layout.unit), layout.storage), layout=layout)

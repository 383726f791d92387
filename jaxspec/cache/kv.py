"""Cache views: the arrays that hold K, V and states, and how a layer's rows get into and out of them.

A *slot* holds the K and V rows of one token; a *page* is `page_size` consecutive slots. Rows are addressed by physical
slot of the layer's kind: `slot = physical_page * page_size + position % page_size`. Physical page 0 of every kind is
the *sink*: it belongs to nobody, rows that must not land anywhere write there, and nothing may depend on what it holds.

A recurrent layer has a *state* a request instead, addressed by its slot: the request row in separate buffers, the page
of kind "state" in a pool; slot 0 is the sink.

A layer with compressed keys (`KPoolSpec`) has an index key for each few tokens: `pool = slot // pool tokens`, so that
those of a page are addressed like its slots. Its ring is addressed like a state.

Two views with one interface, `write` and `read`, `write_state`, `read_state` and `commit_state`, `write_index`,
`read_index`, `index_pages`, `write_tail` and `read_tail`: `KVCache` keeps an array a layer, `PoolCache` all of them in
one pool. In both, K and V of a layer and slot are neighbours, K first, so that each call is one scatter or one gather.

Inside a device loop XLA copies a slice of an array that is also updated, in every turn. Layers of a `KVCache` therefore
stay separate arrays, and nothing ever slices, reshapes, converts or bitcasts a pool.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.layers import ACCUMULATED, KPoolSpec, LayerSpec, StatePart, StateSpec, check_pools
from jaxspec.cache.layout import PoolLayout
from pallas_kernels import PagedIndex, PagedRows, RowPlace, View, state_scatter, store_rows
from pallas_kernels.dispatch import supported

Array = jax.Array
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _check_rows(spec: LayerSpec, k: Array, v: Array | None) -> None:
    """Raises ValueError where rows are not what the layer keeps."""
    parts = [("k", k, spec.key_shape), ("v", v, spec.value_shape)]
    for name, array, shape in parts if spec.value_width else parts[:1]:
        if array.ndim != 4 or array.shape[2:] != shape:
            raise ValueError(f"{name} has shape {array.shape}: the layer keeps [B, D, {shape[0]}, {shape[1]}]")


def _bits_as(rows: Array, dtype) -> Array:
    """The bits of [..., n] rows as rows of another dtype."""
    wide, narrow = jnp.dtype(dtype).itemsize, rows.dtype.itemsize
    if wide > narrow:  # the cast makes one element of the last axis
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] * narrow // wide, wide // narrow)
    bits = lax.bitcast_convert_type(rows, dtype)
    return bits.reshape(*bits.shape[:-2], bits.shape[-2] * bits.shape[-1]) if wide < narrow else bits


def _to_storage(part: StatePart, values: Array, storage: str) -> Array:
    """[B, elements of the storage dtype], the bits of one part of B states."""
    return _bits_as(values.astype(part.dtype).reshape(values.shape[0], math.prod(part.shape)), storage)


def _from_storage(part: StatePart, rows: Array) -> Array:
    """The inverse: [B, *shape] in the part's dtype."""
    return _bits_as(rows, part.dtype).reshape(len(rows), *part.shape)


def _pooled(layers, layer: int) -> KPoolSpec:
    """The specification of a layer with compressed keys."""
    if not isinstance(layers[layer], KPoolSpec):
        raise ValueError(f"layer={layer}: it keeps no compressed keys; only layers with a KPoolSpec do")
    return layers[layer]


def _by_row(slots: Array) -> Array:
    """Slots [B] or [B, D] beside columns [B, D]."""
    return slots if slots.ndim == 2 else slots[:, None]


def _tail_rows(spec: KPoolSpec, rows: Array) -> Array:
    """bfloat16[B, D, 2, X], rows of a ring."""
    if rows.ndim != 4 or rows.shape[2:] != spec.tail_shape[1:]:
        raise ValueError(f"rows has shape {rows.shape}: the layer keeps [B, D, 2, {spec.index_dim}]")
    return rows.astype(jnp.bfloat16)


# An index key is written word by word, four bytes each, so that keys and scales are windows of one scatter.
WORD = 4


def _words(spec: KPoolSpec, keys: Array, scales: Array, storage) -> Array:
    """[B, M, X // 4 + 1, elements of the storage dtype], the words of index keys, and of their scales."""
    for name, array, shape in (("keys", keys, (spec.index_dim,)), ("scales", scales, ())):
        if array.shape[2:] != shape or array.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"{name} has shape {array.shape}: the layer keeps keys [B, M, {spec.index_dim}] and scales [B, M]"
            )
    parts = keys.astype(jnp.float8_e4m3fn), scales.astype(jnp.float32)[..., None]
    bits = jnp.concatenate([_bits_as(part, storage) for part in parts], axis=-1)
    return bits.reshape(*scales.shape, spec.index_dim // WORD + 1, WORD // bits.dtype.itemsize)


def _word_places(spec: KPoolSpec, pools: Array, page_size: int) -> tuple[Array, Array]:
    """For each word of the keys of `pools`, int32[..., 1], its page, int32[..., X // 4 + 1], its first byte there."""
    count = page_size // spec.pool  # a power of two: no division
    page, place = pools[..., None] >> count.bit_length() - 1, pools[..., None] & count - 1
    step = np.full(spec.index_dim // WORD + 1, spec.index_dim, np.int32)
    first = np.arange(len(step), dtype=np.int32) * WORD
    step[-1], first[-1] = WORD, spec.index_dim * count
    return page, place * step + first


def _put_words(buffer: Array, row: Array, column: Array, words: Array) -> Array:
    """The 2-D buffer with [..., n] words at these rows and from these columns on."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(words.ndim - 1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    index = jnp.stack(jnp.broadcast_arrays(row, column), axis=-1)
    return lax.scatter(buffer, index, words, dimensions, mode=IN_BOUNDS)


class KPoolBuffers(NamedTuple):
    """What a `KVCache` keeps of a layer with compressed keys: rows as of any attention layer; the index keys of each
    page, uint8[pages, bytes]; the rings, bfloat16[states, *tail_shape]."""

    rows: Array
    index: Array
    tail: Array


@flax.struct.dataclass
class KVCache:
    """One buffer a layer: what a model writes and reads through `jaxspec.attend` and `jaxspec.recur`.

    Attributes:
      buffers: one array an attention layer, [slots, key_width + value_width] in the cache dtype: the K row of all
        heads, then the V row. `slots` = pages of the layer's storage kind * page_size. A recurrent layer has a tuple of
        arrays, one a part of its state, [states, *shape]; one with compressed keys a `KPoolBuffers`.
      layers: the specification of each layer (static).
      page_size: tokens a page (static).
      pending: during a verify, for each recurrent layer what its state would be after each row: {layer: parts}, a part
        [B, D, *shape]. Otherwise empty.
    """

    buffers: tuple[Array | tuple[Array, ...] | KPoolBuffers, ...]
    layers: tuple[LayerSpec | StateSpec, ...] = flax.struct.field(pytree_node=False)
    page_size: int = flax.struct.field(pytree_node=False)
    pending: dict[int, tuple[Array, ...]] = flax.struct.field(default_factory=dict)

    def write(self, layer: int, slots: Array, k: Array, v: Array | None, backend: str | None = None) -> "KVCache":
        """Stores rows of one layer.

        Args:
          layer: index into `layers` (static).
          slots: int32[B, D], physical slots of the layer's kind, all different but for those in the sink.
          k: [B, D, num_kv_heads, head_dim].
          v: [B, D, num_kv_heads, value_dim]; anything, None say, if the layer keeps no V.
          backend: who stores them, see `pallas_kernels.store_rows` (static).

        Returns:
          The cache with row (b, j) at slots[b, j], in the cache dtype; what the sink holds may be anything, and all
          else is as it was. In place where the buffers are donated.
        """
        _check_rows(self.layers[layer], k, v)
        buffer = store_rows(self.rows(layer), slots, k, v, backend=supported(backend)).buffer
        pooled = isinstance(self.layers[layer], KPoolSpec)
        return self._with_buffer(layer, self.buffers[layer]._replace(rows=buffer) if pooled else buffer)

    def read(self, layer: int, slots: Array) -> tuple[Array, Array]:
        """Rows of one layer: int32[B, S] slots give keys [B, S, num_kv_heads, head_dim] and values
        [B, S, num_kv_heads, value_dim], in the cache dtype."""
        return self.rows(layer).read(slots)

    def rows(self, layer: int) -> PagedRows:
        """Where the rows of one layer lie: what attention reads them by."""
        spec = self.layers[layer]
        shape = dict(kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, value_dim=spec.value_shape[1])
        return PagedRows.of(self._rows(layer), **shape, page_size=self.page_size)

    def write_state(self, layer: int, slots: Array, parts: tuple[Array, ...]) -> "KVCache":
        """Stores states of one recurrent layer.

        Args:
          layer: index into `layers` (static).
          slots: int32[B], all different but for those in the sink.
          parts: [B, *shape] each, in the order of the layer's `parts`.

        Returns:
          The cache with the states in their slots; all else is as it was. In place where the buffers are donated.
        """
        buffers = zip(self.buffers[layer], parts, strict=True)
        written = (buffer.at[slots].set(part.astype(buffer.dtype), mode=IN_BOUNDS) for buffer, part in buffers)
        return self._with_buffer(layer, tuple(written))

    def read_state(self, layer: int, slots: Array) -> tuple[Array, ...]:
        """States of one recurrent layer: int32[B] slots give a [B, *shape] array a part."""
        return tuple(buffer.at[slots].get(mode=IN_BOUNDS) for buffer in self.buffers[layer])

    def commit_state(
        self, layer: int, slots: Array, row: Array, parts: tuple[Array, ...], backend: str | None = None
    ) -> "KVCache":
        """Stores one of the states that each request has in `pending`.

        Args:
          layer: index into `layers` (static).
          slots: int32[B], different ones; -1 skips a request.
          row: int32[B], which of its D states; -1 skips the request.
          parts: [B, D, *shape] each, in the order of the layer's `parts`.
          backend: who runs the kernel, see `pallas_kernels` (static).

        Returns:
          The cache with the chosen states in their slots; all else is as it was.
        """
        buffers = zip(self.buffers[layer], parts, strict=True)
        after = (
            state_scatter(part.astype(buffer.dtype)[None], row, slots, buffer[None], backend=backend)[0]
            for buffer, part in buffers
        )
        return self._with_buffer(layer, tuple(after))

    def write_index(self, layer: int, pools: Array, keys: Array, scales: Array) -> "KVCache":
        """Stores index keys of one layer.

        Args:
          layer: index into `layers` (static), one with compressed keys.
          pools: int32[B, M], physical page * (page_size // pool) + place in the page, all different but for those in
            page 0.
          keys: float8_e4m3fn[B, M, X].
          scales: float32[B, M].

        Returns:
          The cache with the keys and scales in their places; all else is as it was. In place where the buffers are
          donated.
        """
        spec, buffers = _pooled(self.layers, layer), self.buffers[layer]
        page, place = _word_places(spec, pools, self.page_size)
        index = _put_words(buffers.index, page, place, _words(spec, keys, scales, buffers.index.dtype))
        return self._with_buffer(layer, buffers._replace(index=index))

    def read_index(self, layer: int, pages: Array) -> tuple[Array, Array]:
        """Index keys of one layer: int32[B, P] physical pages give all theirs in their order, float8_e4m3fn[B, n, X],
        and their scales, float32[B, n], n = P * page_size // pool."""
        return self.index_pages(layer).read(pages)

    def index_pages(self, layer: int) -> PagedIndex:
        """Where the index keys of one layer lie, for kernels that read them page by page."""
        spec = _pooled(self.layers, layer)
        return PagedIndex(self.buffers[layer].index, 1, 0, self.page_size // spec.pool, spec.index_dim)

    def write_tail(self, layer: int, slots: Array, columns: Array, rows: Array) -> "KVCache":
        """Stores rows of one layer's rings.

        Args:
          layer: index into `layers` (static), one with compressed keys.
          slots: int32[B], whose ring: the slot of the request's state, all different but for the sink's, 0; or
            int32[B, D], so that single rows may go to the sink.
          columns: int32[B, D], rows of the ring, 0 .. ring - 1, all different in a ring but the sink's.
          rows: bfloat16[B, D, 2, X], keys and scores.

        Returns:
          The cache with rows[b, j] at row columns[b, j]; all else is as it was. In place where the buffers are donated.
        """
        buffers, rows = self.buffers[layer], _tail_rows(_pooled(self.layers, layer), rows)
        tail = buffers.tail.at[_by_row(slots), columns].set(rows, mode=IN_BOUNDS)
        return self._with_buffer(layer, buffers._replace(tail=tail))

    def read_tail(self, layer: int, slots: Array, columns: Array) -> Array:
        """Rows of one layer's rings: int32[B] slots and int32[B, M] columns give bfloat16[B, M, 2, X]."""
        _pooled(self.layers, layer)
        return self.buffers[layer].tail.at[slots[:, None], columns].get(mode=IN_BOUNDS)

    def _rows(self, layer: int) -> Array:
        """The buffer of the layer's K and V."""
        buffer = self.buffers[layer]
        return buffer.rows if isinstance(buffer, KPoolBuffers) else buffer

    def _with_buffer(self, layer: int, buffer) -> "KVCache":
        return self.replace(buffers=(*self.buffers[:layer], buffer, *self.buffers[layer + 1 :]))


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
        _check_rows(self.layers[layer], k, v)
        return self.replace(buffer=store_rows(self.rows(layer), slots, k, v, backend=supported(backend)).buffer)

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
            cache = cache._put(start, units, _to_storage(part, values, self.layout.storage))
        return cache

    def read_state(self, layer: int, slots: Array) -> tuple[Array, ...]:
        """States of one recurrent layer; see `KVCache.read_state`."""
        places = zip(self._state_places(layer, slots), self.layers[layer].parts, strict=True)
        return tuple(_from_storage(part, self._get(*place)) for place, part in places)

    def commit_state(
        self, layer: int, slots: Array, row: Array, parts: tuple[Array, ...], backend: str | None = None
    ) -> "PoolCache":
        """Stores one of the states that each request has in `pending`; see `KVCache.commit_state`."""
        layout, buffer = self.layout, self.buffer
        entry = layout.entry_units("state") * layout.unit
        places = zip(layout.state_rows(layer), self.layers[layer].parts, parts, strict=True)
        for place, part, values in places:
            B, D = values.shape[:2]
            states = _to_storage(part, values.reshape(B * D, *part.shape), layout.storage)
            shape = (1, layout.num_pages("state"), place.units, layout.unit)
            view = View(buffer, place.start * layout.unit, shape, (0, entry, layout.unit, 1))
            buffer = state_scatter(states.reshape(1, B, D, -1), row, slots, view, backend=backend).buffer
        return self.replace(buffer=buffer)

    def write_index(self, layer: int, pools: Array, keys: Array, scales: Array) -> "PoolCache":
        """Stores index keys of one layer; see `KVCache.write_index`."""
        spec, layout = _pooled(self.layers, layer), self.layout
        words, size = _words(spec, keys, scales, self.buffer.dtype), self.buffer.dtype.itemsize
        page, first = _word_places(spec, pools, self.page_size)
        unit, column = first >> layout.unit_bytes.bit_length() - 1, (first & layout.unit_bytes - 1) >> size // 2
        row = page * layout.page_units("full") + layout.index_row(layer, self.lanes == "draft").start + unit
        return self.replace(buffer=_put_words(self.buffer, row, column, words))

    def read_index(self, layer: int, pages: Array) -> tuple[Array, Array]:
        """Index keys of one layer; see `KVCache.read_index`."""
        return self.index_pages(layer).read(pages)

    def index_pages(self, layer: int) -> PagedIndex:
        """Where the index keys of one layer lie; see `KVCache.index_pages`."""
        spec, layout = _pooled(self.layers, layer), self.layout
        start = layout.index_row(layer, self.lanes == "draft").start
        return PagedIndex(self.buffer, layout.page_units("full"), start, self.page_size // spec.pool, spec.index_dim)

    def write_tail(self, layer: int, slots: Array, columns: Array, rows: Array) -> "PoolCache":
        """Stores rows of one layer's rings; see `KVCache.write_tail`."""
        rows = _tail_rows(_pooled(self.layers, layer), rows)
        bits = _bits_as(rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:])), self.buffer.dtype)
        return self._put(*self._tail_places(layer, slots, columns), bits)

    def read_tail(self, layer: int, slots: Array, columns: Array) -> Array:
        """Rows of one layer's rings; see `KVCache.read_tail`."""
        spec = _pooled(self.layers, layer)
        bits = self._get(*self._tail_places(layer, slots, columns))
        return _bits_as(bits, jnp.bfloat16).reshape(*columns.shape, *spec.tail_shape[1:])

    def _tail_places(self, layer: int, slots: Array, columns: Array) -> tuple[Array, int]:
        """First unit of rows of the layer's rings, [B, D, 1], and how many units a row fills."""
        ring = self.layout.ring_row(layer, self.lanes == "draft")
        units = ring.units // self.layers[layer].ring
        start = _by_row(slots) * self.layout.entry_units("state") + ring.start + columns * units
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


def init_cache(
    layers: Iterable[LayerSpec | StateSpec],
    *,
    page_size: int,
    num_pages: int,
    num_swa_pages: int,
    num_states: int = 1,
    dtype=jnp.float32,
) -> KVCache:
    """Zero-filled buffers for `layers`.

    Args:
      layers: one specification a layer.
      page_size: tokens a page, a power of two.
      num_pages: pages of kind "full", the sink included.
      num_swa_pages: pages of kind "swa", the sink included; unused when no layer is stored there.
      num_states: states and rings, the sink included; unused when no layer has one.
      dtype: storage dtype of K and V.

    Raises:
      ValueError: a page is no whole number of a layer's pools, or its ring has no size.

    Example:
      >>> cache = init_cache((LayerSpec(2, 64), LayerSpec(2, 64, 16, "swa")), page_size=4, num_pages=9, num_swa_pages=5)
      >>> [b.shape for b in cache.buffers]
      [(36, 256), (20, 256)]
    """
    layers = tuple(layers)
    check_pools("layers", layers, page_size)

    def buffer(spec):
        if spec.carries == ACCUMULATED:
            return tuple(jnp.zeros((num_states, *part.shape), part.dtype) for part in spec.parts)
        pages = num_swa_pages if spec.storage == "swa" else num_pages
        rows = jnp.zeros((pages * page_size, spec.key_width + spec.value_width), dtype)
        if not isinstance(spec, KPoolSpec):
            return rows
        index = jnp.zeros((pages, spec.index_bytes(page_size)), jnp.uint8)
        return KPoolBuffers(rows, index, jnp.zeros((num_states, *spec.tail_shape), jnp.bfloat16))

    return KVCache(buffers=tuple(map(buffer, layers)), layers=layers, page_size=page_size)


def init_pool(layout: PoolLayout) -> PoolCache:
    """A zero-filled pool, seen through the model's own lanes."""
    return PoolCache(buffer=jnp.zeros((layout.units, layout.unit), layout.storage), layout=layout)

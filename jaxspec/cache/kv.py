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
one pool. In both, K and V of a layer and slot are neighbours, K first, so that each call is one scatter, gather or
launch.

Inside a device loop XLA copies a slice of an array that is also updated, in every turn. Layers of a `KVCache` therefore
stay separate arrays, and nothing ever slices, reshapes, converts or bitcasts a pool.
"""

from collections.abc import Iterable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.cache.layers import ACCUMULATED, KPoolSpec, LayerSpec, StateSpec, check_pools
from jaxspec.cache.stored import IN_BOUNDS, by_row, check_rows, pooled, put_words, tail_rows, word_places, words_of
from pallas_kernels import PagedIndex, PagedRows, state_scatter, store_rows
from pallas_kernels.dispatch import supported

Array = jax.Array


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
        check_rows(self.layers[layer], k, v)
        return self.with_rows(layer, store_rows(self.rows(layer), slots, k, v, backend=supported(backend)))

    def with_rows(self, layer: int, rows: PagedRows) -> "KVCache":
        """The cache with rows of one layer in place of its own, as a kernel that was given them left them."""
        sparse = isinstance(self.layers[layer], KPoolSpec)
        return self._with_buffer(layer, self.buffers[layer]._replace(rows=rows.buffer) if sparse else rows.buffer)

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
        spec, buffers = pooled(self.layers, layer), self.buffers[layer]
        page, place = word_places(spec, pools, self.page_size)
        index = put_words(buffers.index, page, place, words_of(spec, keys, scales, buffers.index.dtype))
        return self._with_buffer(layer, buffers._replace(index=index))

    def read_index(self, layer: int, pages: Array) -> tuple[Array, Array]:
        """Index keys of one layer: int32[B, P] physical pages give all theirs in their order, float8_e4m3fn[B, n, X],
        and their scales, float32[B, n], n = P * page_size // pool."""
        return self.index_pages(layer).read(pages)

    def index_pages(self, layer: int) -> PagedIndex:
        """Where the index keys of one layer lie, for kernels that read them page by page."""
        spec = pooled(self.layers, layer)
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
        buffers, rows = self.buffers[layer], tail_rows(pooled(self.layers, layer), rows)
        tail = buffers.tail.at[by_row(slots), columns].set(rows, mode=IN_BOUNDS)
        return self._with_buffer(layer, buffers._replace(tail=tail))

    def read_tail(self, layer: int, slots: Array, columns: Array) -> Array:
        """Rows of one layer's rings: int32[B] slots and int32[B, M] columns give bfloat16[B, M, 2, X]."""
        pooled(self.layers, layer)
        return self.buffers[layer].tail.at[slots[:, None], columns].get(mode=IN_BOUNDS)

    def _rows(self, layer: int) -> Array:
        """The buffer of the layer's K and V."""
        buffer = self.buffers[layer]
        return buffer.rows if isinstance(buffer, KPoolBuffers) else buffer

    def _with_buffer(self, layer: int, buffer) -> "KVCache":
        return self.replace(buffers=(*self.buffers[:layer], buffer, *self.buffers[layer + 1 :]))


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

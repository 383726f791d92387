"""K and V rows of a paged cache: where they lie in a flat buffer, how they are read, and attention over them in jnp.

B requests, D query rows a request, H query heads, P pages a row of the table, S keys that a reading takes.

Cells that no query of a request may see can hold anything, NaN included (pages are handed out as they are). A weight of
zero does not silence them, 0 * NaN is NaN, so K and V of such cells are replaced by zeros before they meet a sum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RowPlace:
    """Where the K and V rows of a layer lie in a buffer [R, W] that other layers and kinds of page may share.

    Slot s, token s % page_size of page s // page_size, has an entry, and in it the K rows of all heads side by side,
    and the V rows. Element x of head h of K is

        buffer[row + c // W, c % W]   row = s // page_size * page_rows + s % page_size * entry_rows
                                      c = key + h * head_dim + x

    and of V the same with `value` and `value_dim`; V follows K. So an index is one of rows, int32, however large the
    buffer is.

    Attributes:
      kv_heads, head_dim: K/V heads, and elements of one of K.
      value_dim: elements of a head of V; 0 where the K rows are the V rows too, as of latent attention.
      page_size: tokens a page.
      page_rows, entry_rows: rows of the buffer from page to page, and from slot to slot in a page.
      key, value: elements of an entry before the first head of K, and of V.
      dtype: of K and V, as a string; the buffer may hold their bits as unsigned integers of the size.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    page_rows: int
    entry_rows: int
    key: int
    value: int
    dtype: str

    @property
    def values_are_keys(self) -> bool:
        """Whether there are no V rows besides the K rows."""
        return self.value_dim == 0

    @property
    def out_dim(self) -> int:
        """Elements of a head of what attention gives."""
        return self.value_dim or self.head_dim

    def row(self, slots: Array) -> Array:
        """Row of the buffer at which each slot's entry starts."""
        if self.page_rows == self.page_size * self.entry_rows:
            return slots * self.entry_rows
        return slots // self.page_size * self.page_rows + slots % self.page_size * self.entry_rows

    @property
    def end(self) -> int:
        """Elements of an entry up to the last one that is read."""
        return max(self.key + self.kv_heads * self.head_dim, self.value + self.kv_heads * self.value_dim)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("buffer",), meta_fields=("place",))
@dataclasses.dataclass(frozen=True)
class PagedRows:
    """K and V of one layer: a buffer, and where in it they lie.

    Attributes:
      buffer: [R, W].
      place: see `RowPlace` (static).

    Example: two slots a page, one head, K rows of 2 and V rows of 2 elements.
      >>> rows = PagedRows.of(jnp.arange(16.0).reshape(4, 4), kv_heads=1, head_dim=2, value_dim=2, page_size=2)
      >>> [part.tolist() for part in rows.read(jnp.array([[3]]))]
      [[[[[12.0, 13.0]]]], [[[[14.0, 15.0]]]]]
    """

    buffer: Array
    place: RowPlace

    @classmethod
    def of(cls, buffer: Array, *, kv_heads: int, head_dim: int, value_dim: int, page_size: int) -> "PagedRows":
        """Rows in a buffer of their own, [slots, kv_heads * (head_dim + value_dim)]: a slot a row, K before V."""
        sizes = dict(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, page_size=page_size)
        places = dict(page_rows=page_size, entry_rows=1, key=0, value=kv_heads * head_dim)
        return cls(buffer, RowPlace(**sizes, **places, dtype=jnp.dtype(buffer.dtype).name))

    def read(self, slots: Array) -> tuple[Array, Array]:
        """Keys [B, S, kv_heads, head_dim] and values [B, S, kv_heads, value_dim] of int32[B, S] slots.

        K and V of a slot are neighbours, so that this is one gather.
        """
        place, W = self.place, self.buffer.shape[1]
        first, last = min(place.key, place.value) // W, -(-place.end // W)
        window = last - first, W
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(slots.ndim, slots.ndim + 1), collapsed_slice_dims=(), start_index_map=(0,)
        )
        row = (place.row(slots) + first)[..., None]
        found = lax.gather(self.buffer, row, dimensions, window, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        cells = as_dtype(found.reshape(*slots.shape, window[0] * W), place.dtype)
        key, value = place.key - first * W, place.value - first * W
        sizes = place.kv_heads * place.head_dim, place.kv_heads * place.value_dim
        if sizes[0] == sizes[1] and value == key + sizes[0]:
            # An axis for K and V: where rows are cut instead, XLA transposes both and computes the mask in one more
            # kernel.
            both = cells[..., key : value + sizes[1]].reshape(*slots.shape, 2, place.kv_heads, place.head_dim)
            return both[..., 0, :, :], both[..., 1, :, :]
        keys, values = cells[..., key : key + sizes[0]], cells[..., value : value + sizes[1]]
        return (
            keys.reshape(*slots.shape, place.kv_heads, place.head_dim),
            values.reshape(*slots.shape, place.kv_heads, place.value_dim),
        )


def as_dtype(bits: Array, dtype: str) -> Array:
    """Cells of a buffer as numbers: their bits stay what they are."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def readable_slots(
    page_table: Array, positions: Array, cache_seqlens: Array, *, page_size: int, window: int | None, causal: bool
) -> tuple[Array, Array, Array]:
    """The slots that hold what the rows of each request may see, and perhaps more of the same pages.

    Args:
      page_table: int32[B, P]; columns of pages that no row sees may hold anything.
      positions: int32[B, D], consecutive; -1 in rows that are padding.
      cache_seqlens: int32[B].

    Returns:
      int32[B, S] slots, in range everywhere; int32[B, S], the position of each; bool[B, S], whether some row of the
      request may see it.
    """
    (B, P), D = page_table.shape, positions.shape[1]
    first_key, newest = jnp.zeros((B,), jnp.int32), jnp.max(positions, axis=1)
    end = jnp.minimum(cache_seqlens, newest + 1) if causal else jnp.where(newest < 0, 0, cache_seqlens)
    columns = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    if window is not None:
        first_key = jnp.maximum(positions[:, 0] - window + 1, 0)
        if causal:
            # D rows in sequence see window + D - 1 keys, which touch at most this many pages.
            width = min(P, -(-(window + D - 1) // page_size) + 1)
            columns = jnp.minimum(first_key // page_size, P - width)[:, None] + jnp.arange(width, dtype=jnp.int32)
    pages = jnp.take_along_axis(page_table, columns, axis=1, mode="promise_in_bounds")
    needed = (columns * page_size < end[:, None]) & ((columns + 1) * page_size > first_key[:, None])
    pages = jnp.where(needed, pages, 0)
    inside = jnp.arange(page_size, dtype=jnp.int32)
    S = columns.shape[1] * page_size
    slots = (pages[:, :, None] * page_size + inside).reshape(B, S)
    key_positions = (columns[:, :, None] * page_size + inside).reshape(B, S)
    readable = (key_positions >= first_key[:, None]) & (key_positions < end[:, None])
    return slots, key_positions, readable


def attend_rows(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    key_positions: Array,
    readable: Array,
    *,
    window: int | None,
    causal: bool,
    scale: float | None,
) -> Array:
    """Attention over rows that were read.

    Args:
      q: [B, D, H, head_dim].
      keys: [B, S, kv_heads, head_dim].
      values: [B, S, kv_heads, value_dim].
      positions: int32[B, D]; a row at -1 sees nothing.
      key_positions, readable: [B, S], see `readable_slots`.
      window, causal, scale: as in `paged_attention`.

    Returns:
      [B, D, H, value_dim] in q's dtype. Scores and sums are float32.

    Raises:
      ValueError: H is no multiple of kv_heads.
    """
    B, D, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    check_heads(heads, kv_heads)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    keys, values = (jnp.where(readable[:, :, None, None], part, 0) for part in (keys, values))
    at = positions[:, :, None]
    visible = readable[:, None] & (key_positions[:, None] <= at if causal else at >= 0)  # [B, D, S]
    if window is not None:
        visible &= key_positions[:, None] > at - window

    grouped = q.reshape(B, D, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "bdhgx,bshx->bhgds", grouped, keys.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * (head_dim**-0.5 if scale is None else scale), -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum(
        "bhgds,bshx->bdhgx",
        weights.astype(q.dtype),
        values.astype(q.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(B, D, heads, values.shape[-1]).astype(q.dtype)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every K/V head has as many query heads."""
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, kv {kv_heads}: the first must be a multiple of the second")

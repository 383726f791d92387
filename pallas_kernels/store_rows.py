"""store_rows: the K and V rows of a forward, each where its slot lies.

A program stores the K or the V row of one token. Rows of padding go to slots of the sink page, as everywhere, and are
left out. Where no backend is named XLA's scatter runs: alone it takes longer, but XLA joins it with what makes rows and
slots, and a round of sparse layers has eight launches less with it. (Those of a Qwen3 are stored by `store_heads`.)
For the scatter rows of padding are spread over the slots of the sink page: on a GPU it stores elements of 16 bits by
compare and exchange, one row after the other where they meet in one slot (11.6 ms for 2,048 rows on an H200, most of
them padding).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.lanes import as_bits, from_bits, power
from pallas_kernels.paged_kernel import cells_of
from pallas_kernels.paged_plan import LEAST
from pallas_kernels.paged_rows import PagedRows, RowPlace
from pallas_kernels.triton import pltriton

Array = jax.Array
LANES = 512  # of a row a warp
MOST_WARPS = 8
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def store_rows(
    rows: PagedRows, slots: Array, k: Array, v: Array | None = None, *, backend: str | None = None
) -> PagedRows:
    """Stores K and V rows of tokens in a paged cache.

    Args:
      rows: the buffer, and where K and V lie in it. An entry's K and V fill whole rows of the buffer.
      slots: int32[B, D], physical slots, all different but for those of the sink, page 0.
      k: [B, D, kv_heads, head_dim], any float.
      v: [B, D, kv_heads, value_dim]; ignored where the K rows are the V rows.
      backend: 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`; None takes the reference, which
        alone has a derivative.

    Returns:
      The rows with those of token (b, j) at slots[b, j], cast to the dtype of the cache; what the sink holds afterwards
      may be anything, and all else is as it was. In place where the buffer is donated.

    Raises:
      ValueError: shapes that do not fit, entries that do not fill whole rows, or a backend that cannot run it.

    Source: the K/V write of PagedAttention (arXiv 2309.06180); the design is ours.

    >>> import jax.numpy as jnp
    >>> rows = PagedRows.of(jnp.zeros((4, 4)), kv_heads=1, head_dim=2, value_dim=2, page_size=2)
    >>> k = jnp.array([[[[1.0, 2.0]]]])
    >>> store_rows(rows, jnp.array([[3]]), k, 2 * k).buffer.tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 4.0]]
    """
    place = rows.place
    backends.check(backend)
    v = None if place.values_are_keys else v
    check_rows(rows, slots, k, v)
    if 0 in (k.size, rows.buffer.size):
        return rows
    buffer = dispatch("store_rows", backend or "reference", _kernel, stored, (rows, slots, k, v))
    return PagedRows(buffer, place)


def check_rows(rows: PagedRows, slots, k, v) -> None:
    """Raises ValueError for arguments against the rules of `store_rows`."""
    place, W = rows.place, rows.buffer.shape[1]
    if getattr(slots, "ndim", None) != 2 or slots.dtype != jnp.int32:
        raise ValueError(f"slots is {describe(slots)}: give int32[B, D]")
    for name, array, width in (("k", k, place.head_dim), ("v", v, place.value_dim)):
        wanted = (*slots.shape, place.kv_heads, width)
        if not width or (getattr(array, "shape", None) == wanted and jnp.issubdtype(array.dtype, jnp.floating)):
            continue
        found = None if array is None else describe(array)
        raise ValueError(f"{name} is {found}: with slots {describe(slots)} give floats {list(wanted)}")
    keys, values = place.kv_heads * place.head_dim, place.kv_heads * place.value_dim
    # The reference stores K and V by one scatter of whole rows of the buffer.
    if W and (place.key % W or (keys + values) % W or (values and place.value != place.key + keys)):
        raise ValueError(
            f"rows has K of {keys} elements from element {place.key} of an entry on, V of {values} from {place.value} "
            f"on, in rows of {W}: V must follow K at once, and both together fill whole rows; choose such a RowPlace, "
            "or a buffer of narrower rows"
        )


def stored(rows: PagedRows, slots, k, v):
    """The buffer, by one scatter of whole rows of it."""
    place, W = rows.place, rows.buffer.shape[1]
    parts = [part.reshape(*slots.shape, -1).astype(place.dtype) for part in (k, v) if part is not None]
    entry = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    if rows.buffer.dtype != place.dtype:
        entry = lax.bitcast_convert_type(entry, rows.buffer.dtype)
    units = entry.shape[-1] // W
    spread = jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape) % place.page_size
    start = place.row(jnp.where(slots < place.page_size, spread, slots)) + place.key // W
    if units == 1:
        return rows.buffer.at[start].set(entry, mode=IN_BOUNDS)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    entry = entry.reshape(*slots.shape, units, W)
    return lax.scatter(rows.buffer, start[..., None], entry, dimensions, mode=IN_BOUNDS)


def _kernel(rows: PagedRows, slots, k, v, *, interpret: bool):
    place = rows.place
    firsts = [place.key] if v is None else [place.key, place.value]
    sources = [part.reshape(slots.size, -1) for part in (k, v) if part is not None]
    lanes = power(max(source.shape[1] for source in sources), LEAST)
    cells = as_bits(rows.buffer) if interpret else rows.buffer  # of a pool on a device nothing makes another array

    def body(before, slots, *refs):
        del before
        *sources, buffer = refs
        program, count = pl.program_id(0), np.int32(len(sources))
        token, side = lax.div(program, count), lax.rem(program, count)
        slot = slots[token]
        for number, (source, first) in enumerate(zip(sources, firsts, strict=True)):
            store = functools.partial(_store, place, source, buffer, token, slot, first, lanes)
            pl.when((side == number) & (slot >= place.page_size))(store)

    after = pl.pallas_call(
        body,
        grid=(slots.size * len(sources),),
        name="store_rows",
        out_shape=jax.ShapeDtypeStruct(cells.shape, cells.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=max(1, min(MOST_WARPS, lanes // LANES)), num_stages=1),
        interpret=interpret,
    )(cells, slots.reshape(-1), *sources)
    return from_bits(after, rows.buffer.dtype)


def _store(place: RowPlace, source, buffer, token, slot, first: int, lanes: int) -> None:
    """A token's row of K or V, to its cells."""
    width, W = source.shape[1], buffer.shape[1]
    lane = lax.iota(jnp.int32, lanes)
    mask = None if width == lanes else lane < width
    index = jnp.full_like(lane, 0) + token, lane
    found = pltriton.load(source.at[index], mask=mask, other=None if mask is None else source.dtype.type(0))
    found = found.astype(place.dtype)
    if buffer.dtype != place.dtype:
        found = lax.bitcast_convert_type(found, buffer.dtype)
    row, column = jnp.full_like(lane, 0) + place.row(slot), lane + first
    if place.end > W:
        more, column = cells_of(np.int32(first), lane, width, W, first)
        row += more
    pltriton.store(buffer.at[row, column], found, mask=mask)

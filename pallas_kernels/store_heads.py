"""store_heads: queries and keys normed and rotated, keys and values stored in a paged cache, in one launch.

What `head_rotary` and `store_rows` do one after the other, without keys that go to memory in between. A program takes
one row and some of its heads, of queries, keys or values:

    queries    turned, to an array for attention
    keys       turned, to the row's slot
    values     as they are, to the row's slot

The norm in front of the products that gave them can be finished here: (x / rms(x) * scale) @ weight is
((x * scale) @ weight) / rms(x). What made x can multiply it by the scale, and a program finds rms(x) of its row while
it waits for heads. So there is no launch for the norm, and the products keep their pace.

Rows of padding go to slots of the sink page, as everywhere: their keys and values are left out.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels import head_tiles as tiles
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.lanes import as_bits, from_bits, power
from pallas_kernels.paged_rows import PagedRows, RowPlace
from pallas_kernels.store_rows import check_rows, stored
from pallas_kernels.triton import pltriton
from pallas_kernels.views import Array, View

WIDEST = 16384  # of a divisor's columns: a row of it lies in the registers of a program


def store_heads(
    rows: PagedRows,
    slots: jax.Array,
    q: Array,
    k: Array,
    v: Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    divisor: jax.Array | None = None,
    divisor_eps: float = 0.0,
    backend: str | None = None,
) -> tuple[jax.Array, PagedRows]:
    """Turns queries and keys as `head_rotary` does and stores keys and values as `store_rows` does.

    Args:
      rows: the buffer, and where K and V lie in it, see `store_rows`.
      slots: int32[B, D], physical slots, all different but for those of the sink, page 0.
      q, k: [B * D, heads, head_dim], arrays or Views of columns of wider rows, see `head_rotary`.
      v: [B * D, kv_heads, value_dim], likewise and of the same dtype; ignored where the K rows are the V rows.
      cos, sin, q_scale, k_scale, eps: of the norms and angles, see `head_rotary`.
      divisor: [B * D, K], any float, K up to 16384: rows by whose root mean squares, sqrt(mean(x * x) + divisor_eps),
        queries, keys and values are divided first. None: by nothing.
      divisor_eps: (static).
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`. Only 'reference', named, has
        a derivative.

    Returns:
      The queries, a new array; and the rows with K and V of row b * D + j at slots[b, j], keys rounded to q's dtype and
      then to the cache's. What the sink holds afterwards may be anything, and all else is as it was. In place where the
      buffer is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: see `head_rotary` and `store_rows`; that they are one launch is ours.

    >>> import jax.numpy as jnp
    >>> rows = PagedRows.of(jnp.zeros((2, 4)), kv_heads=1, head_dim=2, value_dim=2, page_size=1)
    >>> q, k, v = (jnp.array([[row]]) for row in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]))
    >>> cos, sin = jnp.zeros((1, 1)), jnp.ones((1, 1))  # a quarter turn
    >>> q, rows = store_heads(rows, jnp.array([[1]]), q, k, v, cos, sin)
    >>> q.tolist(), rows.buffer[1].tolist()
    ([[[-2.0, 1.0]]], [-4.0, 3.0, 5.0, 6.0])
    """
    place = rows.place
    backends.check(backend)
    v = None if place.values_are_keys else v
    tiles.check_heads(q, k, cos, sin, q_scale, k_scale)
    _check(rows, slots, k, v, divisor)
    settings = {"eps": float(eps), "divisor_eps": float(divisor_eps)}
    by_kernel, by_jnp = functools.partial(_kernel, **settings), functools.partial(_reference, **settings)
    arguments = rows, slots, q, k, v, cos, sin, q_scale, k_scale, divisor
    if 0 in (math.prod(q.shape), math.prod(k.shape), rows.buffer.size):
        return by_jnp(*arguments)
    return dispatch("store_heads", backend, by_kernel, by_jnp, arguments)


def _check(rows: PagedRows, slots, k: Array, v: Array | None, divisor) -> None:
    place = rows.place
    if getattr(slots, "ndim", None) != 2 or slots.dtype != jnp.int32 or slots.size != k.shape[0]:
        raise ValueError(f"slots is {describe(slots)}: give int32[B, D], B * D = {k.shape[0]}, as k is {describe(k)}")
    for name, x, width in (("k", k, place.head_dim), ("v", v, place.value_dim)):
        wanted = k.shape[0], place.kv_heads, width
        if width and (getattr(x, "shape", None) != wanted or x.dtype != k.dtype):
            raise ValueError(
                f"{name} is {describe(x)}: it must be {k.dtype}{list(wanted)}, as k is {describe(k)} and rows has "
                f"{place.kv_heads} heads of {width}"
            )
    if isinstance(v, View):
        tiles.check_view("v", v)

    if divisor is not None:
        shape = getattr(divisor, "shape", ())
        fits = len(shape) == 2 and shape[0] == k.shape[0] and 0 < shape[1] <= WIDEST
        if not fits or not jnp.issubdtype(divisor.dtype, jnp.floating):
            raise ValueError(
                f"divisor is {describe(divisor)}: it must be floats [{k.shape[0]}, K], K from 1 to {WIDEST}"
            )

    def shape(x):
        return None if x is None else jax.ShapeDtypeStruct((*slots.shape, *x.shape[1:]), x.dtype)

    check_rows(rows, slots, shape(k), shape(v))


def _reference(rows: PagedRows, slots, q, k, v, cos, sin, q_scale, k_scale, divisor, *, eps: float, divisor_eps: float):
    dtype, v = q.dtype, None if v is None else tiles.read(v)
    if divisor is not None:
        wide = divisor.astype(jnp.float32)
        factor = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + np.float32(divisor_eps))[:, None, None]
        q, k, v = (None if x is None else tiles.rounded(tiles.read(x) * factor, x.dtype) for x in (q, k, v))
        q, k, v = (None if x is None else x.astype(dtype) for x in (q, k, v))
    q, k = tiles.turned(q, k, cos, sin, q_scale, k_scale, eps=eps)
    if 0 in (k.size, rows.buffer.size):
        return q, rows
    k, v = (None if x is None else x.reshape(*slots.shape, *x.shape[1:]) for x in (k, v))
    return q, PagedRows(stored(rows, slots, k, v), rows.place)


def _kernel(
    rows: PagedRows,
    slots,
    q,
    k,
    v,
    cos,
    sin,
    q_scale,
    k_scale,
    divisor,
    *,
    eps: float,
    divisor_eps: float,
    interpret: bool,
):
    place, head_dim = rows.place, q.shape[2]
    given = [q, k] if v is None else [q, k, v]
    widths = [tiles.widest_of(head_dim, cos.shape[1])] * 2 + [power(place.value_dim)] * (v is not None)
    parts, programs = tiles.parts_of([x.shape[1] for x in given], widths)
    sources, starts = zip(*(tiles.rows_of(x) for x in given), strict=True)
    cells = as_bits(rows.buffer) if interpret else rows.buffer  # of a pool on a device nothing makes another array
    arguments, structure = jax.tree.flatten((slots.reshape(-1), sources, (q_scale, k_scale), divisor, cos, sin))

    def body(before, *refs):
        del before
        slots, sources, scales, divisor, *angles = jax.tree.unflatten(structure, refs[: len(arguments)])
        out, buffer = refs[len(arguments) :]
        row, program = pl.program_id(0), pl.program_id(1)
        slot = slots[row]
        factor = None if divisor is None else functools.partial(_factor, _row(divisor, row), divisor, divisor_eps)
        firsts = None, place.key, place.value
        for number, (part, x, start, first) in enumerate(zip(parts, sources, starts, firsts, strict=False)):
            if first is None:
                to = functools.partial(tiles.put, out, row)
            else:
                to = functools.partial(_put, place, buffer, slot, first)
            if number < 2:
                how = part, head_dim, row, program, x, start, scales[number], angles, to, eps, interpret, factor
                work = functools.partial(tiles.turn, *how)
            else:
                work = functools.partial(tiles.copy, part, place.value_dim, row, program, x, start, to, factor)
            mine = part.mine(program)
            pl.when(mine if first is None else mine & (slot >= place.page_size))(work)

    q_rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * head_dim), q.dtype)
    turned, after = pl.pallas_call(
        body,
        grid=(q.shape[0], programs),
        name="store_heads",
        out_shape=[q_rows, jax.ShapeDtypeStruct(cells.shape, cells.dtype)],
        input_output_aliases={0: 1},
        compiler_params=pltriton.CompilerParams(
            num_warps=tiles.WARPS if divisor is not None else tiles.warps_of(parts, widths, q.dtype.itemsize),
            num_stages=1,
        ),
        interpret=interpret,
    )(cells, *arguments)
    return turned.reshape(q.shape), PagedRows(from_bits(after, rows.buffer.dtype), place)


def _row(divisor, row):
    """All of a row of the divisor, zeros behind it."""
    K = divisor.shape[1]
    lane = lax.iota(jnp.int32, power(K))
    return tiles.load(divisor, (jnp.zeros_like(lane) + row, lane), lane < K if len(lane) > K else None)


def _factor(found, divisor, eps: float):
    """What heads of that row are multiplied by; not before their loads are on the way, since threads meet here."""
    wide = found.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(wide * wide) * np.float32(1 / divisor.shape[1]) + np.float32(eps))


def _put(place: RowPlace, buffer, slot, first: int, cell, tile, mask) -> None:
    """A tile of a token's K or V, whose first element is number `first` of its entry."""
    tile, W = tile.astype(place.dtype), buffer.shape[1]
    if buffer.dtype != place.dtype:
        tile = lax.bitcast_convert_type(tile, buffer.dtype)
    row, column = jnp.zeros_like(cell) + place.row(slot), cell + first
    if place.end > W:
        row, column = row + lax.div(column, np.int32(W)), lax.rem(column, np.int32(W))
    pltriton.store(buffer.at[row, column], tile, mask=mask)

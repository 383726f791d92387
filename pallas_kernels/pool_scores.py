"""pool_scores: the scores of a request's pools, read where their index keys lie, page by page.

A program scores TILE pools of one request for all its rows: it loads their keys once, then for each row multiplies them
with the query's heads and sums those up. Tiles behind the request's last visible pool end at once, so pages that no row
sees are neither looked up nor read.

Keys are bytes, which may be stored two or four to a wider element. They are unpacked by shifts, and the query's
elements are sorted alike: with two bytes an element, one product takes the even ones, another the odd ones.

    element  0     1     2    ...        query, even part   q0 q2 q4 ...   x   low bytes    k0 k2 k4 ...
    bytes    k0 k1 k2 k3 k4 k5 ...              odd part    q1 q3 q5 ...   x   high bytes   k1 k3 k5 ...

8-bit floats are exact in float16 and their products in float32, in which they are summed. A row's bits do not depend on
the other rows, nor on how many there are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.lanes import power
from pallas_kernels.triton import pltriton

TILE = 128  # pools a program
LEAST = 16  # of each side of a tile that is multiplied
WARPS = 4  # of a program
WORD = 4  # bytes of a scale
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["buffer"],
    meta_fields=["page_rows", "first_row", "pools", "width"],
)
@dataclasses.dataclass(frozen=True)
class PagedIndex:
    """Where the index keys of a layer lie: of each page its pools' keys, then their scales, without gaps.

    They start at the beginning of a row of the buffer. Either all of a page's are in that row, or rows are so short
    that keys are whole ones.

    buffer      unsigned integers [rows, cells], the bytes of which are what is stored
    page_rows   rows from one page to the next (static)
    first_row   row at which the keys of page 0 begin (static)
    pools       pools a page (static)
    width       X, bytes of a key, a float8_e4m3fn each (static). A scale is a float32.

    >>> import jax.numpy as jnp
    >>> index = PagedIndex(jnp.zeros((9, 640), jnp.uint8), page_rows=1, first_row=0, pools=32, width=16)
    >>> index.key_cells, index.chunk, index.read(jnp.array([[3, 1]]))[0].shape
    (16, 16, (1, 64, 16))
    """

    buffer: jax.Array
    page_rows: int
    first_row: int
    pools: int
    width: int

    @property
    def packed(self) -> int:
        """Bytes a cell."""
        return self.buffer.dtype.itemsize

    @property
    def key_cells(self) -> int:
        """Cells of a key."""
        return self.width // self.packed

    @property
    def one_row(self) -> bool:
        """Whether all keys and scales of a page lie in one row."""
        return self.pools * (self.width + WORD) <= self.buffer.shape[1] * self.packed

    @property
    def chunk(self) -> int:
        """Cells of a key that are neighbours in a row: all, or those of a row."""
        return self.key_cells if self.one_row else self.buffer.shape[1]

    def cell(self, page, offset):
        """Row and column of a cell of a page's keys and scales, counted from the first."""
        row = page * self.page_rows + self.first_row
        if self.one_row:
            return row, offset
        columns = np.int32(self.buffer.shape[1])
        return row + lax.div(offset, columns), lax.rem(offset, columns)

    def read(self, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All keys of int32[B, P] pages, float8_e4m3fn[B, n, X], and their scales, float32[B, n], n = P * pools."""
        columns = self.buffer.shape[1]
        count = 1 if self.one_row else -(-self.pools * (self.width + WORD) // (columns * self.packed))
        # One gather of whole windows: nothing slices or converts the buffer, which may be a whole pool.
        batch = pages.ndim
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(batch, batch + 1), collapsed_slice_dims=(), start_index_map=(0,)
        )
        start = (pages * self.page_rows + self.first_row)[..., None]
        cells = lax.gather(self.buffer, start, dimensions, (count, columns), mode=IN_BOUNDS)
        cells = cells.reshape(*pages.shape, count * columns)[..., : self.pools * (self.width + WORD) // self.packed]
        shape, end = (pages.shape[0], pages.shape[1] * self.pools), self.pools * self.key_cells
        keys, scales = cells[..., :end], cells[..., end:]
        keys = _bits_as(keys.reshape(*shape, self.key_cells), jnp.float8_e4m3fn)
        return keys, _bits_as(scales.reshape(*shape, WORD // self.packed), jnp.float32)[..., 0]

    def check(self) -> None:
        """Raises ValueError where the numbers do not describe such a buffer."""
        unsigned = jnp.issubdtype(getattr(self.buffer, "dtype", jnp.float32), jnp.unsignedinteger)
        if not unsigned or self.buffer.ndim != 2 or self.packed > WORD:
            raise ValueError(
                f"index.buffer is {describe(self.buffer)}: it must be uint8, uint16 or uint32[rows, cells]"
            )
        for name in ("pools", "width"):
            number = getattr(self, name)
            if number < 1 or number & (number - 1):
                raise ValueError(f"index.{name}={number}: it must be a power of two")
        columns = self.buffer.shape[1]
        if self.width < LEAST or not (self.one_row or (columns and self.key_cells % columns == 0)):
            raise ValueError(
                f"index.width={self.width} in rows of {columns} cells of {self.packed} bytes: a key must be of "
                f"{LEAST} bytes or more, and of whole rows where a page does not fit into one"
            )


def _bits_as(cells: jax.Array, dtype) -> jax.Array:
    """The bits of [..., n] as elements of another dtype, [..., m]."""
    wide, narrow = jnp.dtype(dtype).itemsize, cells.dtype.itemsize
    count = cells.shape[-1] * narrow // wide
    if wide > narrow:
        cells = cells.reshape(*cells.shape[:-1], count, wide // narrow)
    return lax.bitcast_convert_type(cells, dtype).reshape(*cells.shape[: -1 - (wide > narrow)], count)


def pool_scores(
    query: jax.Array,
    weights: jax.Array,
    index: PagedIndex,
    page_table: jax.Array,
    pool_lens: jax.Array,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Score of each pool for each row: scale * sum over heads of weight * max(query . key, 0).

    Args:
      query: float8_e4m3fn[B, D, H, X].
      weights: float32[B, D, H].
      index: where the keys lie.
      page_table: int32[B, P], physical pages. Those without a pool that is scored may be anything.
      pool_lens: int32[B, D], pools that each row sees, at most n = P * index.pools.
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`. The reference reads all
        pages of the table, so there all of them must be in range.

    Returns:
      float32[B, D, n]. From the largest pool_lens of the request on they may be anything.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the pool scores of SGLang's DSA indexer, their contract restated; the design is ours.

    >>> import jax, jax.numpy as jnp
    >>> key = jnp.zeros((1, 16), jnp.float8_e4m3fn).at[0, 0].set(3.0)  # one page of one pool, its scale behind the key
    >>> scale = jax.lax.bitcast_convert_type(jnp.array([[0.5]]), jnp.uint8)[0]
    >>> page = jnp.concatenate([jax.lax.bitcast_convert_type(key, jnp.uint8), scale], axis=1)
    >>> index = PagedIndex(page, page_rows=1, first_row=0, pools=1, width=16)
    >>> query = jnp.full((1, 1, 1, 16), 2.0, jnp.float8_e4m3fn)
    >>> pool_scores(query, jnp.ones((1, 1, 1)), index, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32))
    Array([[[3.]]], dtype=float32)
    """
    backends.check(backend)
    index.check()
    B, D, H, _ = _shape(query, jnp.float8_e4m3fn, "query", ("B", "D", "H", index.width))
    _shape(weights, jnp.float32, "weights", (B, D, H))
    _, P = _shape(page_table, jnp.int32, "page_table", (B, "P"))
    _shape(pool_lens, jnp.int32, "pool_lens", (B, D))
    if 0 in (B, D, H, P, index.buffer.size):
        return jnp.zeros((B, D, P * index.pools), jnp.float32)
    # Pallas indexes an array of up to 4 GiB by 32 bits, which Triton reads as signed.
    if index.packed == 1 and 2**31 < index.buffer.size <= 2**32 and backend in (None, "triton"):
        if backend == "triton":
            raise ValueError(
                f"index.buffer is {describe(index.buffer)} of more than 2^31 bytes, which Triton cannot index: "
                "use wider elements, or leave backend out"
            )
        backend = "reference"
    return dispatch("pool_scores", backend, _kernel, _reference, (query, weights, index, page_table, pool_lens))


def _shape(array, dtype, name: str, wanted: tuple) -> tuple:
    """The array's shape, or ValueError where it is not as wanted; a name stands for any number."""
    shape = getattr(array, "shape", ())
    fits = len(shape) == len(wanted) and all(n == w or isinstance(w, str) for n, w in zip(shape, wanted, strict=True))
    if not fits or array.dtype != dtype:
        sizes = ", ".join(map(str, wanted))
        raise ValueError(f"{name} is {describe(array)}: it must be {jnp.dtype(dtype)}[{sizes}]")
    return shape


def _reference(query, weights, index: PagedIndex, page_table, pool_lens):
    return scores_of_keys(query, weights, *index.read(page_table))


def scores_of_keys(query, weights, keys, scales):
    """`pool_scores` of keys float8_e4m3fn[B, n, X] and scales float32[B, n] that were read."""
    products = jnp.einsum(
        "bdhx,bnx->bdhn",
        query.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    heads = jnp.maximum(products, 0) * weights[..., None]
    return heads.sum(axis=2) * scales[:, None]


def _kernel(query, weights, index: PagedIndex, page_table, pool_lens, *, interpret: bool):
    B, D, H, _ = query.shape
    n = page_table.shape[1] * index.pools
    heads, cells, chunks = power(H, LEAST), power(index.chunk, LEAST), index.key_cells // index.chunk
    parts = chunks * index.packed
    # [B, D, part, cell, head]: a chunk of a key, and in it one byte of each cell, make a part.
    query = query.astype(jnp.float16).reshape(B, D, H, chunks, index.chunk, index.packed)
    query = query.transpose(0, 1, 3, 5, 4, 2).reshape(B, D, parts, index.chunk, H)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, cells - index.chunk), (0, heads - H)))
    query = query.reshape(B * D * parts, cells, heads)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, heads - H))).reshape(B * D, heads)
    lanes = power(D)

    def body(query, weights, buffer, table, lens, out):
        b, first = pl.program_id(0), pl.program_id(1) * TILE
        lane = lax.iota(jnp.int32, lanes)
        row_lens = pltriton.load(lens.at[b, lane], mask=lane < D, other=np.int32(0))
        live = jnp.minimum(jnp.max(row_lens), np.int32(n))

        @pl.when(first < live)
        def _():
            pool = lax.iota(jnp.int32, TILE) + first
            inside = pool < live
            nth = lax.div(pool, np.int32(index.pools))
            place = pool - nth * np.int32(index.pools)
            page = pltriton.load(table.at[b, nth], mask=inside, other=np.int32(0))
            keys = _load_keys(index, buffer, page, place, inside, cells)
            scale = _load_scales(index, buffer, page, place, inside)

            def score(d, _):
                row = b * D + d
                products = jnp.zeros((TILE, heads), jnp.float32)
                for part, key in enumerate(keys):
                    products += lax.dot_general(
                        key,
                        query[row * parts + part],
                        (((1,), (0,)), ((), ())),
                        preferred_element_type=jnp.float32,
                    )
                weighted = jnp.maximum(products, 0) * weights[row][None, :]
                pltriton.store(out.at[row, pool], jnp.sum(weighted, axis=1) * scale, mask=inside)

            lax.fori_loop(np.int32(0), np.int32(D), score, None)

    scores = pl.pallas_call(
        body,
        grid=(B, -(-n // TILE)),
        name="pool_scores",
        out_shape=jax.ShapeDtypeStruct((B * D, n), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(query, weights, index.buffer, page_table, pool_lens)
    return scores.reshape(B, D, n)


def _load_keys(index: PagedIndex, buffer, page, place, inside, cells: int) -> list:
    """float16[TILE, cells] for each part of the keys; what lies past a chunk is 0, as in the query."""
    cell = lax.broadcasted_iota(jnp.int32, (TILE, cells), 1)
    live = inside[:, None] & (cell < index.chunk)
    keys = []
    for chunk in range(index.key_cells // index.chunk):
        row, column = index.cell(page, place * np.int32(index.key_cells) + np.int32(chunk * index.chunk))
        at = jnp.broadcast_to(row[:, None], cell.shape), column[:, None] + cell
        packed = pltriton.load(buffer.at[at], mask=live, other=buffer.dtype.type(0))
        for byte in range(index.packed):
            value = packed >> buffer.dtype.type(8 * byte) if byte else packed
            value = lax.bitcast_convert_type(value.astype(jnp.uint8), jnp.float8_e4m3fn)
            keys.append(value.astype(jnp.float16))
    return keys


def _load_scales(index: PagedIndex, buffer, page, place, inside):
    """float32[TILE]."""
    count = WORD // index.packed
    bits = jnp.zeros(TILE, jnp.uint32)
    for part in range(count):
        offset = np.int32(index.pools * index.key_cells + part) + place * np.int32(count)
        cell = pltriton.load(buffer.at[index.cell(page, offset)], mask=inside, other=buffer.dtype.type(0))
        bits |= cell.astype(jnp.uint32) << np.uint32(8 * index.packed * part)
    return lax.bitcast_convert_type(bits, jnp.float32)

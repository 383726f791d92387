"""Around the selection of pools: the live tail behind what was selected, and the index pages that a prefill gathers.

kpool_append_tail    a program writes 1024 columns of a row
kpool_ragged_layout  up to 264 programs (two for each of an H200's 132 multiprocessors) stride over (request, block of
                     256 of its pages and query rows)
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import Destination
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Array, Section

COLUMNS = 1024  # of a row, that a program writes
PROGRAMS = 264
BLOCK = 256  # pages, or query rows, that a program handles at once
NOTHING = -1  # in a column that holds no token


class RaggedLayout(NamedTuple):
    """Index pages of all requests one behind the other, and the part of their pools that each query row sees.

    concat_page_table   int32[T]  index page (an allocator page)
    q_start             int32[N]  first pool of the row's request, counted over all pages
    q_end               int32[N]  the one after the last pool that the row sees
    """

    concat_page_table: Array
    q_start: Array
    q_end: Array


def kpool_append_tail(
    topk_result: Array,
    seq_lens: Array,
    pool_lens: Array,
    out: Array,
    *,
    pool: int,
    page_table: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Put each row's live tail behind the tokens of the pools that were selected for it.

    With n = pool_lens[r], h = pool * min(n, K // pool) and t = seq_lens[r] - pool * n (0 .. pool - 1) row r becomes

        topk_result[r, 0 .. h - 1], then the t tokens from position pool * n on, then -1

    So it has min(pool * n, K) + t entries that are not -1, side by side: what attention reads of it.

    Args:
      topk_result: int[rows, K], the tokens of the selected pools, pools one behind the other; K is a multiple of pool.
        Columns from h on are not read.
      seq_lens: int[rows], tokens that the row sees.
      pool_lens: int[rows], closed pools that it sees, seq_lens // pool.
      out: int32[rows, K + pool - 1], destination: an array, donated to be written in place, or a View.
      pool: tokens a pool (static).
      page_table: int[rows, columns], slot of each token, by which those of the tail are named as topk_result names its
        own; a position that the table does not reach gives 0, the sink. Without it they are named by position.
      backend: as in decode_metadata.

    Returns:
      `out` after.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the tail columns of SGLang's KPool top-k, their contract restated.

    >>> import jax.numpy as jnp
    >>> selected, out = jnp.array([[4, 5, 0, 1], [0, 1, -1, -1]]), jnp.zeros((2, 5), jnp.int32)
    >>> kpool_append_tail(selected, jnp.array([7, 3]), jnp.array([3, 1]), out, pool=2).tolist()
    [[4, 5, 0, 1, 6], [0, 1, 2, -1, -1]]
    """
    backends.check(backend)
    pool = _at_least_one("pool", pool)
    operands.check_integers("topk_result", topk_result, 2)
    rows, width = topk_result.shape
    if width == 0 or width % pool:
        raise ValueError(f"topk_result has {width} columns: it needs whole pools of {pool} tokens, one or more")
    buffers.check_array("out", out, (rows, width + pool - 1))
    flat, destination = buffers.flatten({"out": out}, ("out",))
    inputs = Inputs()
    selected = inputs.add("topk_result", topk_result, 2)
    lengths, pools = inputs.add("seq_lens", seq_lens, 1, rows), inputs.add("pool_lens", pool_lens, 1, rows)
    table = None if page_table is None else inputs.add("page_table", page_table, 2, rows)
    if table is not None and table.shape[1] == 0:
        raise ValueError("page_table has no columns: give one or more, or leave it out")
    if 0 in out.shape:
        return out
    operation = AppendTail(rows, width, pool, tuple(inputs.labels), destination, selected, lengths, pools, table)
    after = backends.run(operation, backend, tuple(inputs.arrays), flat)
    return buffers.unflatten({"out": out}, after, destination)["out"]


@dataclasses.dataclass(frozen=True)
class AppendTail:
    """One call: an `Operation` (see lanes.py)."""

    rows: int
    K: int
    pool: int
    labels: tuple[str, ...]
    destination: Destination
    selected: Section
    seq_lens: Section
    pool_lens: Section
    table: Section | None
    name = "kpool_append_tail"
    reference_is_faster = False

    @property
    def columns(self) -> int:
        return self.K + self.pool - 1

    @property
    def parts(self) -> int:
        """Programs a row."""
        return -(-self.columns // COLUMNS)

    @property
    def programs(self) -> int:
        return self.rows * self.parts

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        row = lanes.div(program, self.parts)
        column = lanes.iota(lanes.width(self.columns, COLUMNS)) + (program - row * self.parts) * COLUMNS
        length, pools = (place.load(lanes, ins, (row,)) for place in (self.seq_lens, self.pool_lens))
        history, position, live = self._place(lanes, length, pools, column)
        picked = self.selected.load(lanes, ins, (row, column), column < history, NOTHING)
        token = position
        if self.table is not None:
            reached = live & (position < self.table.shape[1])
            token = self.table.load(lanes, ins, (row, position), reached, 0)
        value = lanes.where(live, token, picked)
        self.destination["out"].store(lanes, outs, (row, column), value, column < self.columns)

    def _place(self, xp, length, pools, column):
        """(columns of selected tokens, position of the tail's token in each column, where there is one)."""
        pools = xp.maximum(pools, 0)
        history = xp.minimum(pools, self.K // self.pool) * self.pool
        tail = xp.minimum(length - pools * self.pool, self.pool - 1)
        return history, pools * self.pool + column - history, (column >= history) & (column < history + tail)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        column = lax.iota(jnp.int32, self.columns)
        length, pools = (place.read(inputs)[:, None] for place in (self.seq_lens, self.pool_lens))
        history, token, live = self._place(jnp, length, pools, column)
        if self.table is not None:
            reached = live & (token < self.table.shape[1])
            row = jnp.broadcast_to(lax.iota(jnp.int32, self.rows)[:, None], reached.shape)
            index = self.table.index(row, jnp.where(reached, token, 0))
            token = jnp.where(reached, inputs[self.table.buffer].at[index].get(mode="promise_in_bounds"), 0)
        selected = jnp.pad(self.selected.read(inputs), ((0, 0), (0, self.pool - 1)))
        value = jnp.where(column < history, selected, jnp.where(live, token, NOTHING))
        return self.destination.write(outputs, {"out": value})


def kpool_ragged_layout(
    page_table: Array,
    cu_pages_excl: Array,
    pool_pages: Array,
    cu_q_len_excl: Array,
    q_len: Array,
    pooled_seq_lens: Array,
    out: RaggedLayout,
    *,
    pool: int,
    index_page_size: int = 64,
    backend: str | None = None,
) -> RaggedLayout:
    """Lay the index pages of a prefill's requests side by side, and say which pools each of its query rows scores.

    Request b has the n = pool_pages[b] places from s = cu_pages_excl[b] on, and the q_len[b] rows from cu_q_len_excl[b]
    on. For i < n and each row r:

        concat_page_table[s + i] = page_table[b, i * pool] // pool
        q_start[r] = index_page_size * s
        q_end[r]   = min(q_start[r] + pooled_seq_lens[r], index_page_size * (s + n))

    A page that the table does not reach, or whose entry is negative, is 0, the sink. Nothing is written past the end of
    a destination, and cells that belong to no request stay as they are.

    Args:
      page_table: int[B, columns], attention page of each page of the sequence.
      cu_pages_excl: int[B], exclusive prefix sums of pool_pages.
      pool_pages: int[B], index pages that hold the request's closed pools.
      cu_q_len_excl: int[B], exclusive prefix sums of q_len.
      q_len: int[B], query rows of the request.
      pooled_seq_lens: int[N], closed pools that each query row sees.
      out: the destinations; each an array, donated to be written in place, or a View.
      pool: tokens a pool, and attention pages an index page (static).
      index_page_size: pools an index page (static).
      backend: as in decode_metadata.

    Returns:
      RaggedLayout after.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the gather plan of pooled keys in SGLang's KPool prefill, its contract restated.

    >>> import jax.numpy as jnp
    >>> table = jnp.array([[6, 7, 2, 3], [8, 9, 0, 0]])  # index pages 3, 1 and 4 of pools of 2 tokens
    >>> out = RaggedLayout(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
    >>> pages, rows = (jnp.array([0, 2]), jnp.array([2, 1])), (jnp.array([0, 1]), jnp.array([1, 2]))
    >>> out = kpool_ragged_layout(table, *pages, *rows, jnp.array([70, 4, 5]), out, pool=2)
    >>> [x.tolist() for x in out]
    [[3, 1, 4], [0, 128, 128], [70, 132, 133]]
    """
    backends.check(backend)
    pool, index_page_size = _at_least_one("pool", pool), _at_least_one("index_page_size", index_page_size)
    if not isinstance(out, RaggedLayout):
        raise ValueError(f"out is a {type(out).__name__}: give a RaggedLayout")
    operands.check_integers("page_table", page_table, 2)
    operands.check_integers("pooled_seq_lens", pooled_seq_lens, 1)
    batch, rows = page_table.shape[0], pooled_seq_lens.shape[0]
    pages = out.concat_page_table.shape[0] if getattr(out.concat_page_table, "ndim", 0) == 1 else "pages"
    for name, array in out._asdict().items():
        buffers.check_array(f"out.{name}", array, (pages if name == "concat_page_table" else rows,))
    flat, destination = buffers.flatten(out, out._fields)
    inputs = Inputs()
    table = inputs.add("page_table", page_table, 2)
    if table.shape[1] == 0:
        raise ValueError("page_table has no columns: it needs one or more")
    vectors = {
        "cu_pages_excl": cu_pages_excl,
        "pool_pages": pool_pages,
        "cu_q_len_excl": cu_q_len_excl,
        "q_len": q_len,
    }
    vectors = {name: inputs.add(name, array, 1, batch) for name, array in vectors.items()}
    lengths = inputs.add("pooled_seq_lens", pooled_seq_lens, 1)
    if batch == 0:
        return out
    operation = LayRagged(
        batch, pool, index_page_size, tuple(inputs.labels), destination, table, *vectors.values(), lengths
    )
    return buffers.unflatten(out, backends.run(operation, backend, tuple(inputs.arrays), flat), destination)


@dataclasses.dataclass(frozen=True)
class LayRagged:
    """One call: an `Operation` (see lanes.py)."""

    B: int
    pool: int
    index_page_size: int
    labels: tuple[str, ...]
    destination: Destination
    table: Section
    first_page: Section
    pages: Section
    first_row: Section
    rows: Section
    lengths: Section
    name = "kpool_ragged_layout"
    reference_is_faster = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Pages and query rows of all requests."""
        return self.destination["concat_page_table"].shape[0], self.lengths.shape[0]

    @property
    def splits(self) -> int:
        """Programs that share one request."""
        return min(-(-max(self.sizes) // BLOCK), -(-PROGRAMS // self.B))

    @property
    def programs(self) -> int:
        return self.B * self.splits

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        split = lanes.div(program, self.B)
        b = program - split * self.B
        first_page, pages, first_row, rows = (
            place.load(lanes, ins, (b,)) for place in (self.first_page, self.pages, self.first_row, self.rows)
        )
        end = (first_page + pages) * self.index_page_size

        def write_pages(item, live):
            column = item * self.pool
            entry = self.table.load(lanes, ins, (b, column), live & (column < self.table.shape[1]), 0)
            page = lanes.div(lanes.maximum(entry, 0), self.pool)
            self.destination["concat_page_table"].store(lanes, outs, (item + first_page,), page, live)

        def write_rows(item, live):
            row, start = item + first_row, first_page * self.index_page_size
            stop = lanes.minimum(self.lengths.load(lanes, ins, (row,), live) + start, end)
            self.destination["q_start"].store(lanes, outs, (row,), start, live)
            self.destination["q_end"].store(lanes, outs, (row,), stop, live)

        for first, count, size, write in (
            (first_page, pages, self.sizes[0], write_pages),
            (first_row, rows, self.sizes[1], write_rows),
        ):
            self._stride(lanes, split, first, lanes.minimum(count, size - first), write)

    def _stride(self, lanes: Lanes, split, first, count, write) -> None:
        """write(items, mask) for this split's blocks of the `count` items whose cells begin at `first`."""

        def turn(number, _):
            item = lanes.iota(BLOCK) + (split + number * self.splits) * BLOCK
            write(item, (item < count) & (item + first >= 0))

        blocks = lanes.cdiv(lanes.maximum(count, 0), BLOCK)
        lanes.loop(0, lanes.cdiv(lanes.maximum(blocks - split, 0), self.splits), turn)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        first_page, pages = self.first_page.read(inputs), self.pages.read(inputs)

        b, item, live = self._owner(first_page, pages, self.sizes[0])
        column = item * self.pool
        reached = live & (column < self.table.shape[1])
        index = self.table.index(b, jnp.where(reached, column, 0))
        entry = jnp.where(reached, inputs[self.table.buffer].at[index].get(mode="promise_in_bounds"), 0)
        found = {"concat_page_table": (live, jnp.maximum(entry, 0) // self.pool)}

        b, _, live = self._owner(self.first_row.read(inputs), self.rows.read(inputs), self.sizes[1])
        start, end = (x[b] * self.index_page_size for x in (first_page, first_page + pages))
        found |= {"q_start": (live, start), "q_end": (live, jnp.minimum(start + self.lengths.read(inputs), end))}

        values = {n: jnp.where(live, x, self.destination.read(outputs, n)) for n, (live, x) in found.items()}
        return self.destination.write(outputs, values)

    def _owner(self, first, count, size: int):
        """For each of `size` cells (request, item of the request, whether it belongs to one)."""
        cell = lax.iota(jnp.int32, size)
        b = jnp.clip(jnp.searchsorted(first, cell, side="right") - 1, 0, self.B - 1).astype(jnp.int32)
        item = cell - first[b]
        return b, item, (item >= 0) & (item < count[b])


def _at_least_one(name: str, value) -> int:
    """The Python integer of a static number >= 1, or raise ValueError."""
    number = operands.check_static(name, value)
    if number < 1:
        raise ValueError(f"{name}={number}: it must be 1 or more")
    return number

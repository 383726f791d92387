"""Page tables of pooled attention: wide (slots), compact (attention pages) and pooled (index pages).

The slot of token t is its place in the FULL pool. With pages of 64 tokens and pools of 4 tokens,

    wide[t] = slot(t)        compact[c] = slot(64 c) // 64        pooled[c] = slot(256 c) // 64 // 4

so compact and pooled tables take one token in 64 of the source, of a request's live ones only. Programs stride over
(request, block of 256 columns) as in tables.py.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.kpool_lengths import Span
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import PageMap, Source
from pallas_kernels.tables import BLOCK, HEAD_LANES, PROGRAMS
from pallas_kernels.views import Section

TABLES = ("page_table_1", "real_page_table", "page_table")


@dataclasses.dataclass(frozen=True)
class PageTables:
    """What is there of TABLES. A request has one row of each, or `copies` equal ones.

    source    its page is the one that `page_map` translates
    pool, page   log2 of the tokens of a pool and of an attention page
    copies    rows a request; None: new[b] rows (see Span), requests one after the other, the rest stays as it is
    zero_tail   whether columns past the live ones are cleared; otherwise they stay as they are
    """

    destination: Destination
    span: Span
    req_rows: Section
    source: Source
    page_map: PageMap
    pool: int
    page: int
    copies: int | None
    zero_tail: bool

    @property
    def tables(self) -> dict[str, int]:
        """log2 of the tokens of a column of each table."""
        shifts = dict(zip(TABLES, (0, self.page, self.page + self.pool), strict=True))
        return {name: shift for name, shift in shifts.items() if name in self.destination}

    @property
    def step(self) -> int:
        """log2 of the tokens from one lane to the next: every token only for a wide table."""
        return min(self.tables.values())

    @property
    def columns(self) -> int:
        """Lanes that reach the end of every table."""
        ends = (self.destination[name].shape[1] << shift - self.step for name, shift in self.tables.items())
        return max(ends, default=0)

    @property
    def splits(self) -> int:
        """Programs that share one request."""
        return min(-(-self.columns // BLOCK), -(-PROGRAMS // max(self.span.B, 1))) if self.tables else 0

    @property
    def programs(self) -> int:
        return 0 if self.copies == 0 else self.span.B * self.splits

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        """Blocks part, part + splits, part + 2 * splits, ... of one request."""
        columns, step, splits = self.columns, self.step, self.splits
        part = lanes.div(program, self.span.B)
        b = program - part * self.span.B
        cached = self.span.load_cached(lanes, ins, b)
        row = self.source.row(lanes, self.req_rows.load(lanes, ins, (b,)))
        live = lanes.minimum(lanes.cdiv(cached, 1 << step), columns)
        blocks = -(-columns // BLOCK) if self.zero_tail else lanes.cdiv(live, BLOCK)
        first, count = self._rows(lanes, ins, b)

        def write(block):
            column = lanes.iota(BLOCK) + block * BLOCK
            used = column < live
            position = column << step
            entry, inside = self.source.load(lanes, ins, row, position, used)
            page, offset = self.source.split(entry, position)
            physical = self.page_map.load(lanes, ins, page, offset, self.source.shift, inside)
            slot = lanes.where(physical < 0, 0, (physical << self.source.shift) + offset)
            written = column < columns if self.zero_tail else used
            cells = self._cells(lanes, column, slot, written)
            if self.copies == 1:
                self._store(lanes, outs, cells, first)
            else:
                lanes.loop(0, count, lambda i, _: self._store(lanes, outs, cells, first + i))

        if splits * BLOCK >= columns:
            lanes.when(part < blocks, lambda: write(part))
        else:
            turns = lanes.cdiv(lanes.maximum(blocks - part, 0), splits)
            lanes.loop(0, turns, lambda turn, _: write(part + turn * splits))

    def _rows(self, lanes: Lanes, ins: tuple, b):
        """(first row, number of rows) of a request in the tables."""
        if self.copies is not None:
            return b * self.copies, self.copies
        total, width = None, lanes.width(self.span.B, HEAD_LANES)
        for first in range(0, self.span.B, width):
            item = lanes.iota(width) + first
            before = lanes.sum(self.span.new.load(lanes, ins, (item,), item < b))
            total = before if total is None else total + before
        return total, self.span.new.load(lanes, ins, (b,))

    def _cells(self, lanes: Lanes, column, slot, written) -> list:
        """(table, its column, what it holds there, lanes that have a column of it)."""
        cells = []
        for name, shift in self.tables.items():
            table, skip, place, mask = self.destination[name], shift - self.step, column, written
            if skip:
                place = column >> skip
                mask = mask & (place << skip == column)
            cells.append((table, place, slot >> shift, mask & (place < table.shape[1])))
        return cells

    def _store(self, lanes: Lanes, outs: tuple, cells: list, row) -> None:
        for table, place, value, mask in cells:
            if self.copies is None:
                mask = mask & (row < table.shape[0])
            table.store(lanes, outs, (row, place), value, mask)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        if not self.tables or not self.span.B:
            return outputs
        position = lax.iota(jnp.int32, self.columns)[None, :] << self.step
        live = position < self.span.read_cached(inputs)[:, None]
        entry, inside = self.source.gather(inputs, self.req_rows.read(inputs)[:, None], position, live)
        page, offset = self.source.split(entry, position)
        physical = self.page_map.gather(inputs, jnp.where(inside, page, -1), offset, self.source.shift)
        slot = jnp.where(physical < 0, 0, (physical << self.source.shift) + offset)
        values = {}
        for name, shift in self.tables.items():
            stride, old = 1 << shift - self.step, self.destination.read(outputs, name)
            value = slot[:, ::stride][:, : old.shape[1]] >> shift
            used = live[:, ::stride][:, : old.shape[1]]
            request, exists = self._request(inputs, old.shape[0])
            tail = jnp.zeros_like(old) if self.zero_tail else old
            values[name] = jnp.where(exists, jnp.where(used[request], value[request], tail), old)
        return self.destination.write(outputs, values)

    def _request(self, inputs: tuple, rows: int):
        """(request of each row of a table, [rows, 1] whether it is one)."""
        row = lax.iota(jnp.int32, rows)
        if self.copies is not None:
            return lax.div(row, jnp.int32(max(self.copies, 1))), jnp.ones((rows, 1), bool)
        ends = lax.cumsum(self.span.new.read(inputs), axis=0)
        request = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        return jnp.minimum(request, self.span.B - 1), (request < self.span.B)[:, None]

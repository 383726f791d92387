"""Page tables of pooled attention: wide (slots), compact (attention pages) and pooled (index pages).

The slot of token t is its place in the FULL pool. With pages of 64 tokens and pools of 4 tokens,

    page_table_1[t] = slot(t)   real_page_table[c] = slot(64 c) // 64   page_table[c] = slot(256 c) // 64 // 4

so the last two take one token in 64 of the source, and only live ones. Programs stride over (request, block of 256
columns of the finest table) as in tables.py.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.lanes import Lanes
from pallas_kernels.span import Span
from pallas_kernels.tables import BLOCK, HEAD_LANES, PROGRAMS

TABLES = ("page_table_1", "real_page_table", "page_table")


@dataclasses.dataclass(frozen=True)
class PageTables:
    """What is there of TABLES, one or more. A request has one row of each, or `copies` equal ones.

    copies      rows a request; None: new[b] rows (see Span), requests one after the other, the rest stays as it is
    zero_tail   whether columns past the live ones are cleared; otherwise they stay as they are
    """

    destination: Destination
    span: Span
    slots: Slots
    copies: int | None
    zero_tail: bool

    @property
    def tables(self) -> dict[str, int]:
        """log2 of the tokens of a column of each table, the finest first."""
        shifts = dict(zip(TABLES, (0, self.slots.page, self.slots.page + self.slots.pool), strict=True))
        return {name: shift for name, shift in shifts.items() if name in self.destination}

    @property
    def step(self) -> int:
        """log2 of the tokens from one column of the finest table to the next."""
        return min(self.tables.values())

    @property
    def columns(self) -> int:
        """Columns of the finest table that reach the end of every table."""
        return max(self.destination[name].shape[1] << shift - self.step for name, shift in self.tables.items())

    @property
    def splits(self) -> int:
        """Programs that share one request."""
        return min(-(-self.columns // BLOCK), -(-PROGRAMS // max(self.span.B, 1)))

    @property
    def programs(self) -> int:
        return 0 if self.copies == 0 else self.span.B * self.splits

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        """Blocks part, part + splits, part + 2 * splits, ... of one request."""
        part = lanes.div(program, self.span.B)
        b = program - part * self.span.B
        cached = self.span.load_cached(lanes, ins, b)
        row = self.slots.row(lanes, ins, b)
        first, count = self._rows(lanes, ins, b)
        all_blocks = -(-self.columns // BLOCK)
        blocks = lanes.minimum(lanes.cdiv(cached, BLOCK << self.step), all_blocks) if not self.zero_tail else all_blocks

        def write(block):
            parts = [self._part(lanes, ins, name, row, cached, block) for name in self.tables]
            if self.copies == 1:
                self._store(lanes, outs, parts, first)
            else:
                lanes.loop(0, count, lambda i, _: self._store(lanes, outs, parts, first + i))

        if self.splits == all_blocks:
            lanes.when(part < blocks, lambda: write(part))
        else:
            turns = lanes.cdiv(lanes.maximum(blocks - part, 0), self.splits)
            lanes.loop(0, turns, lambda turn, _: write(part + turn * self.splits))

    def _rows(self, lanes: Lanes, ins: tuple, b):
        """(first row, number of rows) of a request in the tables."""
        if self.copies is not None:
            return b * self.copies, self.copies
        total, width = None, lanes.width(self.span.B, HEAD_LANES)
        for first in range(0, self.span.B, width):
            other = lanes.iota(width) + first
            before = lanes.sum(self.span.new.load(lanes, ins, (other,), other < b))
            total = before if total is None else total + before
        return total, self.span.new.load(lanes, ins, (b,))

    def _part(self, lanes: Lanes, ins: tuple, name: str, row, cached, block) -> tuple:
        """(table, columns, entries, lanes to write) of a block. Each table has lanes of its own: in a vector of the
        finest one's columns several lanes would have one cell of a coarser table."""
        table, shift = self.destination[name], self.tables[name]
        count = max(BLOCK >> shift - self.step, 1)
        lane = lanes.iota(lanes.width(count, BLOCK))
        column = lane + block * count
        here = (lane < count) & (column < table.shape[1])
        used = here & (column < lanes.cdiv(cached, 1 << shift))
        slot, _ = self.slots.load(lanes, ins, row, column << shift, used)
        return table, column, lanes.maximum(slot, 0) >> shift, here if self.zero_tail else used

    def _store(self, lanes: Lanes, outs: tuple, parts: list, row) -> None:
        for table, column, entry, mask in parts:
            if self.copies is None:
                mask = mask & (row < table.shape[0])
            table.store(lanes, outs, (row, column), entry, mask)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        if not self.span.B or self.copies == 0:
            return outputs
        cached, values = self.span.read_cached(inputs)[:, None], {}
        for name, shift in self.tables.items():
            old = self.destination.read(outputs, name)
            column = lax.iota(jnp.int32, old.shape[1])[None, :]
            used = column < lax.div(cached + ((1 << shift) - 1), jnp.int32(1 << shift))
            slot, _ = self.slots.gather(inputs, jnp.broadcast_to(column << shift, used.shape), used)
            request, exists = self._request(inputs, old.shape[0])
            tail = jnp.zeros_like(old) if self.zero_tail else old
            new = jnp.where(used[request], (jnp.maximum(slot, 0) >> shift)[request], tail)
            values[name] = jnp.where(exists, new, old)
        return self.destination.write(outputs, values)

    def _request(self, inputs: tuple, rows: int):
        """(request of each row of a table, [rows, 1] whether it is one)."""
        row = lax.iota(jnp.int32, rows)
        if self.copies is not None:
            return lax.div(row, jnp.int32(self.copies)), jnp.ones((rows, 1), bool)
        ends = lax.cumsum(self.span.new.read(inputs), axis=0)
        request = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        return jnp.minimum(request, self.span.B - 1), (request < self.span.B)[:, None]

"""Lengths, prefix sums and page tables in one launch: the kernel behind decode, draft extend and plain read tables.

About 264 programs (two for each of an H200's 132 multiprocessors) stride over (row, block of 256 columns); one more
writes the lengths and their prefix sums. A program stops at its row's live pages, so a wide table costs no time, and
its chain of dependent loads is as short as the job allows: (length, request row) -> source -> map -> store.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import PageMap, Source, scalar_array, scalar_value
from pallas_kernels.span import Span
from pallas_kernels.views import Section

# On an H200, in chains of forward_metadata, 132 to 1056 programs, blocks of 128 columns and 2 or 8 warps were no faster
# than these by more than equal kernels were apart, 0.2 us; blocks of 512 columns took 0.5 us more at 64 requests of
# 32768 tokens.
PROGRAMS = 264
BLOCK = 256  # table columns a program handles at once
HEAD_LANES = 1024  # rows whose lengths are summed at once
WARP_LANES, FEW = 32, 256  # the same for up to FEW rows: sums inside a warp need no shared memory, 0.1 us less


@dataclasses.dataclass(frozen=True)
class Count:
    """A length of each row: `tokens` [B], to which `delta` is added, a number or an operand.

    lengths, prefix_sums   names of the destinations; an absent one is not written
    more                   with it, more[b] is added too
    limit                  no length is more
    """

    tokens: Section
    delta: int | Section = 0
    lengths: str | None = None
    prefix_sums: str | None = None
    more: Section | None = None
    limit: int | Section | None = None

    @classmethod
    def cached(cls, span: Span, lengths: str | None, prefix_sums: str | None) -> "Count":
        """The tokens in the cache of each request of a span."""
        more = span.new if span.before else None
        return cls(span.tokens, span.cached, lengths, prefix_sums, more, span.limit)

    def load(self, lanes: Lanes, ins: tuple, row, mask=None):
        """The lengths of rows in a kernel body, 0 in lanes that are masked off."""
        tokens = self.tokens.load(lanes, ins, (row,), mask) + scalar_value(self.delta, lanes, ins)
        if self.more is not None:
            tokens = tokens + self.more.load(lanes, ins, (row,), mask)
        if self.limit is not None:
            tokens = lanes.minimum(tokens, scalar_value(self.limit, lanes, ins))
        return tokens if mask is None else lanes.where(mask, tokens, 0)

    def read(self, inputs: tuple):
        """All lengths in jnp."""
        tokens = self.tokens.read(inputs) + scalar_array(self.delta, inputs)
        if self.more is not None:
            tokens = tokens + self.more.read(inputs)
        return tokens if self.limit is None else jnp.minimum(tokens, scalar_array(self.limit, inputs))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tables of B rows: where ids come from and what becomes of them. `maps` pairs a destination with its map."""

    req_rows: Section
    source: Source
    maps: tuple[tuple[str, PageMap], ...]
    max_pages: int
    zero_tail: bool


@dataclasses.dataclass(frozen=True)
class Tables:
    """One call: an `Operation` (see lanes.py). The tables, if any, hold the pages of `counts[0]`."""

    name: str
    B: int
    labels: tuple[str, ...]
    destination: Destination
    counts: tuple[Count, ...]
    rows: Rows | None = None
    reference_is_faster = False

    @property
    def has_head(self) -> bool:
        """Whether lengths or prefix sums are written."""
        return any(count.lengths or count.prefix_sums for count in self.counts)

    @property
    def splits(self) -> int:
        """Programs that share one row of the tables."""
        return 0 if self.rows is None else min(-(-self.rows.max_pages // BLOCK), -(-PROGRAMS // max(self.B, 1)))

    @property
    def programs(self) -> int:
        # Without rows only the leading 0 of the prefix sums is left to write, which the reference does.
        return self.B and self.has_head + self.B * self.splits

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        if not self.has_head:
            self._write_rows(lanes, program, ins, outs)
        elif not self.splits:
            self._write_counts(lanes, ins, outs)
        else:
            lanes.when(program == 0, lambda: self._write_counts(lanes, ins, outs))
            lanes.when(program > 0, lambda: self._write_rows(lanes, program - 1, ins, outs))

    def _write_counts(self, lanes: Lanes, ins: tuple, outs: tuple) -> None:
        """Lengths and prefix sums of all rows, by one program, since a sum over rows crosses programs."""
        width = lanes.width(self.B, WARP_LANES if self.B <= FEW else HEAD_LANES)
        chunks, totals = [], {}
        for first in range(0, self.B, width):
            row = lanes.iota(width) + first
            valid = row < self.B
            chunks.append((first, row, valid, [count.load(lanes, ins, row, valid) for count in self.counts]))
        for first, row, valid, lengths in chunks:  # after all loads: a store would hold back the next ones
            for count, length in zip(self.counts, lengths, strict=True):
                if count.lengths:
                    self.destination[count.lengths].store(lanes, outs, (row,), length, valid)
                if count.prefix_sums:
                    place, before = self.destination[count.prefix_sums], totals.get(count)
                    if before is None:
                        place.store(lanes, outs, (row,), row * 0, row == 0)
                    sums = lanes.prefix_sum(length)
                    place.store(lanes, outs, (row + 1,), sums if before is None else sums + before, valid)
                    if first + width < self.B:
                        added = lanes.sum(length)
                        totals[count] = added if before is None else before + added

    def _write_rows(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        """Blocks part, part + splits, part + 2 * splits, ... of one row's tables."""
        rows, source = self.rows, self.rows.source
        shift, pages, splits = source.shift, rows.max_pages, self.splits
        part = lanes.div(program, self.B)
        b = program - part * self.B
        length = self.counts[0].load(lanes, ins, b)
        row = source.row(lanes, rows.req_rows.load(lanes, ins, (b,)))
        live = lanes.minimum(lanes.cdiv(length, 1 << shift), pages)
        blocks = -(-pages // BLOCK) if rows.zero_tail else lanes.cdiv(live, BLOCK)

        def write(block):
            column = lanes.iota(BLOCK) + block * BLOCK
            used = column < live
            position = column << shift
            entry, inside = source.load(lanes, ins, row, position, used)
            page, offset = source.split(entry, position)
            values = [(name, m.load(lanes, ins, page, offset, shift, inside)) for name, m in rows.maps]
            written = column < pages if rows.zero_tail else used
            for name, value in values:  # after both loads: a store would hold back the second one
                self.destination[name].store(lanes, outs, (b, column), lanes.maximum(value, 0), written)

        if splits * BLOCK >= pages:
            lanes.when(part < blocks, lambda: write(part))
        else:
            turns = lanes.cdiv(lanes.maximum(blocks - part, 0), splits)
            lanes.loop(0, turns, lambda turn, _: write(part + turn * splits))

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        values = {}
        for count in self.counts:
            length = count.read(inputs)
            if count.lengths:
                values[count.lengths] = length
            if count.prefix_sums:
                values[count.prefix_sums] = jnp.concatenate([jnp.zeros(1, jnp.int32), lax.cumsum(length, axis=0)])
        if self.rows is not None:
            values |= self._reference_rows(inputs, outputs)
        return self.destination.write(outputs, values)

    def _reference_rows(self, inputs: tuple, outputs: tuple) -> dict:
        rows, source = self.rows, self.rows.source
        shift, pages = source.shift, rows.max_pages
        column = lax.iota(jnp.int32, pages)[None, :]
        position = column << shift
        length = jnp.maximum(self.counts[0].read(inputs), 0)[:, None]
        live = column < (length + (1 << shift) - 1) >> shift
        entry, inside = source.gather(inputs, rows.req_rows.read(inputs)[:, None], position, live)
        page, offset = source.split(entry, position)
        page = jnp.where(inside, page, -1)
        values = {}
        for name, page_map in rows.maps:
            old = self.destination.read(outputs, name)
            new = jnp.maximum(page_map.gather(inputs, page, offset, shift), 0)
            tail = 0 if rows.zero_tail else old[:, :pages]
            values[name] = jnp.concatenate([jnp.where(live, new, tail), old[:, pages:]], axis=1)
        return values

"""Ragged streams: the tokens of request after request in one vector, as slots of a pool or as virtual ids.

Up to 1056 programs (eight for each of an H200's 132 multiprocessors, since a long stream is bound by its stores) stride
over (request, block of 256 of its tokens) and stop at its last one.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import PageMap, Source
from pallas_kernels.views import Section

PROGRAMS = 1056
BLOCK = 256  # tokens a program handles at once
HEAD_LANES = 1024  # requests whose lengths are summed at once


@dataclasses.dataclass(frozen=True)
class Stream:
    """One call: an `Operation` (see lanes.py).

    ends      with offsets, tokens of each request; without, the position after its last one
    starts    position of each request's first token; None: 0
    offsets   [B + 1], where each request begins in the stream; None: right behind the one before
    page_map  from virtual pages to those of a pool; None: virtual ids are wanted
    """

    name: str
    B: int
    labels: tuple[str, ...]
    destination: Destination
    req_rows: Section
    source: Source
    ends: Section
    starts: Section | None
    offsets: Section | None = None
    page_map: PageMap | None = None

    @property
    def reference_is_faster(self) -> bool:
        """For one request the reference has no search for whose cell it is, on which it spends its time otherwise."""
        return self.B == 1

    @property
    def size(self) -> int:
        """Cells of the stream."""
        return self.destination["out"].shape[0]

    @property
    def splits(self) -> int:
        """Programs that share one request."""
        return min(-(-self.size // BLOCK), -(-PROGRAMS // self.B))

    @property
    def programs(self) -> int:
        return self.B * self.splits

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        part = lanes.div(program, self.B)
        b = program - part * self.B
        start = 0 if self.starts is None else self.starts.load(lanes, ins, (b,))
        end = self.ends.load(lanes, ins, (b,))
        row = self.source.row(lanes, self.req_rows.load(lanes, ins, (b,)))
        if self.offsets is None:
            first, count = self._sum_before(lanes, b, ins), end - start
        else:
            first = self.offsets.load(lanes, ins, (b,))
            count = lanes.minimum(end, self.offsets.load(lanes, ins, (b + 1,)) - first)
        count = lanes.minimum(count, self.size - first)

        def write(block):
            item = lanes.iota(BLOCK) + block * BLOCK
            cell = item + first
            live = (item < count) & (cell >= 0)
            entry = lambda position: self.source.load(lanes, ins, row, position, live)  # noqa: E731
            look_up = lambda *page: self.page_map.load(lanes, ins, *page)  # noqa: E731
            value = self._value(lanes, item + start, entry, look_up)
            self.destination["out"].store(lanes, outs, (cell,), value, live)

        blocks = lanes.cdiv(count, BLOCK)
        if self.splits * BLOCK >= self.size:  # no request is longer than the stream: one turn, and no loop to set up
            lanes.when(part < blocks, lambda: write(part))
        else:
            turns = lanes.cdiv(lanes.maximum(blocks - part, 0), self.splits)
            lanes.loop(0, turns, lambda turn, _: write(part + turn * self.splits))

    def _sum_before(self, lanes: Lanes, b, ins: tuple):
        """Tokens of the requests before request b."""
        width = lanes.width(self.B, HEAD_LANES)
        total = None
        for first in range(0, self.B, width):
            row = lanes.iota(width) + first
            before = row < b  # and so < B
            length = self.ends.load(lanes, ins, (row,), before) - self.starts.load(lanes, ins, (row,), before)
            added = lanes.sum(lanes.maximum(length, 0))
            total = added if total is None else total + added
        return total

    def _value(self, xp, position, entry, look_up):
        """What is written for a position; `entry` reads the source and `look_up` the map, for a kernel or in jnp."""
        shift = self.source.shift
        if self.page_map is None:
            found, live = entry(position)
            return xp.where(live, self.source.virtual(xp, found, position & ((1 << shift) - 1)), 0)
        # The page is that of its first token, as in the tables: token and page tables translate the same entry.
        begin = (position >> shift) << shift
        found, live = entry(begin)
        physical = look_up(*self.source.split(found, begin), shift, live)
        return (xp.maximum(physical, 0) << shift) + (position & ((1 << shift) - 1))

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        place, ends = self.destination["out"], self.ends.read(inputs)
        starts = jnp.zeros_like(ends) if self.starts is None else self.starts.read(inputs)
        if self.offsets is None:
            counts = jnp.maximum(ends - starts, 0)
            first = lax.cumsum(counts, axis=0) - counts
        else:
            offsets = self.offsets.read(inputs)
            first, counts = offsets[:-1], jnp.minimum(ends, offsets[1:] - offsets[:-1])
        cell = lax.iota(jnp.int32, self.size)
        b = jnp.clip(jnp.searchsorted(first, cell, side="right") - 1, 0, self.B - 1)
        item = cell - first[b]
        live = (item >= 0) & (item < counts[b])
        rows = self.req_rows.read(inputs)[b]

        def entry(position):
            return self.source.gather(inputs, rows, position, live)

        def look_up(page, offset, shift, inside):
            return self.page_map.gather(inputs, jnp.where(inside, page, -1), offset, shift)

        value = self._value(jnp, starts[b] + item, entry, look_up)
        return place.write(outputs, jnp.where(live, value, place.read(outputs)))

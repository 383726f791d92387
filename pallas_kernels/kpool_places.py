"""Where the new tokens of a forward over pooled attention are written, and the keys of the pools that they close."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.kpool_lengths import Span
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import PageMap, Source, scalar_array, scalar_value
from pallas_kernels.views import Section

BLOCK = 128  # rows of the forward a program handles
WINDOW = ("virtual_loc", "full_loc", "positions", "anchor_ids")
PLAN = ("req_rows", "write_start", "tail_logical_start", "write_loc")


@dataclasses.dataclass(frozen=True)
class Places:
    """The write window and the write plan; what is there of WINDOW and PLAN is written.

    Position start + j is written by row j. Candidate m is pool g = start // p + m for pools of p tokens.
    Its key goes to place g % n of an index page of n pools, the physical page of the (g // n)-th run of n * p tokens.

    by_request   whether row b of the source belongs to request b, whatever req_rows says
    source     its page is the one that `page_map` translates
    pool       log2 of the tokens of a pool
    page       log2 of the tokens of an attention page, which is that of the pools of an index page, too
    limit      with it, nothing is placed at or past it, nor past the end of the source: such places are 0, the sink.
               Without, a pool past the end of the source takes the source's last attention page
    """

    destination: Destination
    span: Span
    req_rows: Section
    source: Source
    page_map: PageMap
    pool: int
    page: int
    anchor: Section | None = None
    by_request: bool = False

    @property
    def window(self) -> int:
        """Rows a request of the write window."""
        return self.destination["positions"].shape[1] if "positions" in self.destination else 0

    @property
    def candidates(self) -> int:
        """Pools a request of the write plan."""
        return self.destination["write_loc"].shape[1] if "write_loc" in self.destination else 0

    @property
    def steps(self) -> int:
        """Lanes a request."""
        return max(self.window, self.candidates, any(name in self.destination for name in PLAN))

    @property
    def programs(self) -> int:
        return -(-self.span.B * self.steps // BLOCK)

    @property
    def pages(self) -> int:
        """Attention pages that a row of the source reaches."""
        tokens = self.source.columns << (self.source.shift if self.source.granularity == "page" else 0)
        return -(-tokens >> self.page)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        total = self.span.B * self.steps
        item = lanes.iota(lanes.width(total, BLOCK)) + program * BLOCK
        valid = item < total
        b = lanes.div(item, self.steps)
        j = item - b * self.steps
        limit = None if self.span.limit is None else scalar_value(self.span.limit, lanes, ins)
        start, new = self.span.load_start(lanes, ins, b, valid)
        req_row = self.req_rows.load(lanes, ins, (b,), valid)
        row = b if self.by_request else self.source.row(lanes, req_row)

        def read(position, live):
            entry, live = self.source.load(lanes, ins, row, position, live)
            page, offset = self.source.split(entry, position)
            return entry, offset, self.page_map.load(lanes, ins, page, offset, self.source.shift, live), live

        stores = {}
        if self.window:
            mine = valid & (j < self.window)
            position, live = self._placed(start, new, j, mine, limit)
            entry, offset, physical, live = read(position, live)
            stores |= self._window(lanes, position, entry, offset, physical, live)
            stores = {name: ((b, j), value, mine) for name, value in stores.items()}
            if self.anchor is not None:
                first = valid & (j == 0)
                stores["anchor_ids"] = (b, j), self.anchor.load(lanes, ins, (b,), first), first
        base = start >> self.pool
        if self.candidates:
            mine = valid & (j < self.candidates)
            pool, position, live = self._candidate(lanes, base + j, mine, limit)
            _, offset, physical, live = read(position, live)
            stores["write_loc"] = (b, j), self._location(lanes, pool, physical, offset, live), mine
        first = valid & (j == 0)
        for name, value in (("req_rows", req_row), ("write_start", start), ("tail_logical_start", base << self.pool)):
            stores[name] = (b,), value, first
        for name, (index, value, mask) in stores.items():  # after every load: a store would hold the later ones back
            if name in self.destination:
                self.destination[name].store(lanes, outs, index, value, mask)

    def _placed(self, start, new, j, live, limit):
        """(position of row j, whether it has a place)."""
        position = start + j
        if new is not None:
            live = live & (j < new)
        if limit is not None:
            live = live & (position < limit)
        return position, live

    def _candidate(self, xp, pool, live, limit):
        """(pool, a position in the attention page that its index page begins with, whether it has a place)."""
        column = (pool >> self.page) << self.pool
        if limit is not None:
            live = live & (pool >= 0) & ((pool << self.pool) < limit) & (column < self.pages)
        return pool, xp.minimum(xp.maximum(column, 0), self.pages - 1) << self.page, live

    def _window(self, xp, position, entry, offset, physical, live) -> dict:
        slot = (physical << self.source.shift) + offset
        return {
            "positions": position,
            "virtual_loc": xp.where(live, self.source.virtual(xp, entry, offset), 0),
            "full_loc": xp.where(physical < 0, 0, slot),
        }

    def _location(self, xp, pool, physical, offset, live):
        """Place of a pool's key; 0 where there is none."""
        slot = (physical << self.source.shift) + offset
        place = (slot >> self.page + self.pool << self.page) + (pool & ((1 << self.page) - 1))
        return xp.where(live & (physical >= 0), place, 0)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        if not self.span.B * self.steps:
            return outputs
        limit = None if self.span.limit is None else scalar_array(self.span.limit, inputs)
        start, new = self.span.read_start(inputs)
        req_rows = self.req_rows.read(inputs)
        rows = lax.iota(jnp.int32, self.span.B) if self.by_request else req_rows
        column, new = start[:, None], None if new is None else new[:, None]

        def read(position, live):
            entry, live = self.source.gather(inputs, rows[:, None], position, live)
            page, offset = self.source.split(entry, position)
            page = jnp.where(live, page, -1)
            return entry, offset, self.page_map.gather(inputs, page, offset, self.source.shift), live

        base = start >> self.pool
        values = {"req_rows": req_rows, "write_start": start, "tail_logical_start": base << self.pool}
        if self.window:
            j = lax.iota(jnp.int32, self.window)[None, :]
            position, live = self._placed(column, new, j, jnp.ones((self.span.B, self.window), bool), limit)
            entry, offset, physical, live = read(position, live)
            values |= self._window(jnp, position, entry, offset, physical, live)
            if self.anchor is not None:
                values["anchor_ids"] = (
                    self.destination.read(outputs, "anchor_ids").at[:, 0].set(self.anchor.read(inputs))
                )
        if self.candidates:
            j = lax.iota(jnp.int32, self.candidates)[None, :]
            live = jnp.ones((self.span.B, self.candidates), bool)
            pool, position, live = self._candidate(jnp, base[:, None] + j, live, limit)
            _, offset, physical, live = read(position, live)
            values["write_loc"] = self._location(jnp, pool, physical, offset, live)
        values = {name: value for name, value in values.items() if name in self.destination}
        return self.destination.write(outputs, values)

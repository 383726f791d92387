"""Where the keys of the pools go that the new tokens of a forward over pooled attention close."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.lanes import Lanes
from pallas_kernels.span import Span

BLOCK = 128  # pools of the forward a program handles
PLAN = ("req_rows", "write_start", "tail_logical_start", "write_loc")


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """What is there of PLAN: the pools of p tokens whose keys the new tokens of a request may complete.

    Candidate m is pool g = start // p + m. Its key goes to place g % n of an index page of n pools: the physical page
    of the (g // n)-th run of n * p tokens. Six tokens from 255 on, with p = 4 and n = 64, may complete

        g = 63, 64        which go to place 63 of the request's first index page and 0 of its second

    A pool without a physical page goes to place 0. With `reached`, so does one that starts behind the tokens cached or
    behind the end of the source. Without, a pool behind the end of the source takes the source's last attention page.
    """

    destination: Destination
    span: Span
    slots: Slots
    reached: bool = False

    @property
    def candidates(self) -> int:
        """Pools a request."""
        return self.destination["write_loc"].shape[1] if "write_loc" in self.destination else 0

    @property
    def programs(self) -> int:
        return -(-self.span.B * max(self.candidates, 1) // BLOCK)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        item = lanes.iota(lanes.width(self.span.B * max(self.candidates, 1), BLOCK)) + program * BLOCK
        stores = self._requests(lanes, item, ins)
        if self.candidates:
            stores["write_loc"] = self._locations(lanes, item, ins)
        for name, (index, value, mask) in stores.items():
            if name in self.destination:
                self.destination[name].store(lanes, outs, index, value, mask)

    def _requests(self, lanes: Lanes, b, ins: tuple) -> dict:
        """What is written once a request, by lanes of its own: no two lanes of a store may have one cell."""
        mine = b < self.span.B
        start, _ = self.span.load_start(lanes, ins, b, mine)
        values = {"write_start": start, "tail_logical_start": start >> self.slots.pool << self.slots.pool}
        if "req_rows" in self.destination:
            values["req_rows"] = self.slots.req_rows.load(lanes, ins, (b,), mine)
        return {name: ((b,), value, mine) for name, value in values.items()}

    def _locations(self, lanes: Lanes, item, ins: tuple) -> tuple:
        mine = item < self.span.B * self.candidates
        b = lanes.div(item, self.candidates)
        m = item - b * self.candidates
        start, _ = self.span.load_start(lanes, ins, b, mine)
        row = self.slots.row(lanes, ins, b, mine)
        pool = (start >> self.slots.pool) + m
        cached = self.span.load_cached(lanes, ins, b, mine) if self.reached else None
        position, live = self._position(lanes, pool, mine, cached)
        slot, _ = self.slots.load(lanes, ins, row, position, live)
        return (b, m), self._place(lanes, pool, slot), mine

    def _position(self, xp, pool, live, cached):
        """(a position in the first attention page of the pool's index page, whether the pool has a place)."""
        slots = self.slots
        column = pool >> slots.page << slots.pool
        if cached is not None:
            live = live & (pool >= 0) & (pool << slots.pool < cached) & (column < slots.pages)
        return xp.minimum(xp.maximum(column, 0), slots.pages - 1) << slots.page, live

    def _place(self, xp, pool, slot):
        page, inside = slot >> self.slots.page + self.slots.pool, pool & ((1 << self.slots.page) - 1)
        return xp.where(slot < 0, 0, (page << self.slots.page) + inside)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        if not self.span.B:
            return outputs
        start, _ = self.span.read_start(inputs)
        pool = (start >> self.slots.pool)[:, None] + lax.iota(jnp.int32, self.candidates)[None, :]
        cached = self.span.read_cached(inputs)[:, None] if self.reached else None
        position, live = self._position(jnp, pool, jnp.ones(pool.shape, bool), cached)
        slot, _ = self.slots.gather(inputs, position, live)
        values = {
            "req_rows": self.slots.req_rows.read(inputs),
            "write_start": start,
            "tail_logical_start": start >> self.slots.pool << self.slots.pool,
            "write_loc": self._place(jnp, pool, slot),
        }
        return self.destination.write(outputs, {n: value for n, value in values.items() if n in self.destination})

"""Where the tokens of requests lie, as pages that attention and the index cache see."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import PageMap, Source
from pallas_kernels.views import Section


@dataclasses.dataclass(frozen=True)
class Slots:
    """The FULL slot of each token of each request.

    req_rows     request rows
    source       the request table; its page is the one that `page_map` translates
    by_request   whether row b of the source belongs to request b, whatever req_rows says
    pool         log2 of the tokens of a pool
    page         log2 of the tokens of an attention page, and of the pools of an index page
    """

    req_rows: Section
    source: Source
    page_map: PageMap
    pool: int
    page: int
    by_request: bool = False

    @property
    def pages(self) -> int:
        """Attention pages that a row of the source reaches."""
        tokens = self.source.columns << (self.source.shift if self.source.granularity == "page" else 0)
        return -(-tokens >> self.page)

    def row(self, lanes: Lanes, ins: tuple, b, mask=None):
        """Row of the source in a kernel body."""
        return b if self.by_request else self.source.row(lanes, self.req_rows.load(lanes, ins, (b,), mask))

    def load(self, lanes: Lanes, ins: tuple, row, position, live):
        """(slot, virtual token) of a position in a kernel body. Without a physical page the slot is -1; where not live
        or past the source both are: -1 and 0."""
        entry, live = self.source.load(lanes, ins, row, position, live)
        page, offset = self.source.split(entry, position)
        physical = self.page_map.load(lanes, ins, page, offset, self.source.shift, live)
        return self._found(lanes, entry, offset, physical, live)

    def gather(self, inputs: tuple, position, live):
        """The same in jnp, for positions [B, n]."""
        rows = self.req_rows.read(inputs)
        rows = lax.iota(jnp.int32, len(rows)) if self.by_request else rows
        entry, live = self.source.gather(inputs, rows[:, None], position, live)
        page, offset = self.source.split(entry, position)
        physical = self.page_map.gather(inputs, jnp.where(live, page, -1), offset, self.source.shift)
        return self._found(jnp, entry, offset, physical, live)

    def _found(self, xp, entry, offset, physical, live):
        slot = xp.where(physical < 0, -1, (physical << self.source.shift) + offset)
        return slot, xp.where(live, self.source.virtual(xp, entry, offset), 0)

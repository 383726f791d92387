"""Which tokens the rows of a forward see, and where its first new token is."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import scalar_array, scalar_value
from pallas_kernels.views import Section


@dataclasses.dataclass(frozen=True)
class Span:
    """Which tokens the rows of each of B requests see. Row j of request b sees tokens[b] - new[b] + first + j.

    rows     rows a request
    new      with it, a request has new[b] rows: the others see nothing, and no row sees less than nothing
    first    static: tokens that row 0 sees past tokens - new
    start    static: position of the first new token past tokens - new
    cached   static: tokens in the cache past tokens
    limit    end of the context: no row sees more, and no more is cached
    before   whether `tokens` are without the new ones: then read tokens + new wherever it says tokens
    """

    B: int
    rows: int
    tokens: Section
    new: Section | None
    first: int
    start: int
    cached: int
    limit: int | Section | None
    before: bool = False

    def load(self, lanes: Lanes, ins: tuple, b, j, mask):
        """(tokens seen, row exists) of rows j of requests b in a kernel body; 0 and False where masked off."""
        base, live = self.tokens.load(lanes, ins, (b,), mask), mask
        if self.new is not None:
            new = self.new.load(lanes, ins, (b,), mask)
            base, live = base if self.before else base - new, mask & (j < new)
        seen = base + (j + self.first)
        if self.new is not None:
            seen = lanes.maximum(seen, 0)
        if self.limit is not None:
            seen = lanes.minimum(seen, scalar_value(self.limit, lanes, ins))
        return lanes.where(live, seen, 0), live

    def read(self, inputs: tuple):
        """The same in jnp, [B, rows] each."""
        j = lax.iota(jnp.int32, self.rows)[None, :]
        base, live = self.tokens.read(inputs)[:, None], jnp.ones((self.B, self.rows), bool)
        if self.new is not None:
            new = self.new.read(inputs)[:, None]
            base, live = base if self.before else base - new, j < new
        seen = base + (j + self.first)
        if self.new is not None:
            seen = jnp.maximum(seen, 0)
        if self.limit is not None:
            seen = jnp.minimum(seen, scalar_array(self.limit, inputs))
        return jnp.where(live, seen, 0), live

    def load_start(self, lanes: Lanes, ins: tuple, b, mask=None):
        """(position of the first new token, new tokens or None) in a kernel body."""
        start = self.tokens.load(lanes, ins, (b,), mask) + self.start
        if self.new is None:
            return start, None
        new = self.new.load(lanes, ins, (b,), mask)
        return start if self.before else start - new, new

    def read_start(self, inputs: tuple):
        """The same in jnp, [B] each."""
        start = self.tokens.read(inputs) + self.start
        if self.new is None:
            return start, None
        new = self.new.read(inputs)
        return start if self.before else start - new, new

    def load_cached(self, lanes: Lanes, ins: tuple, b, mask=None):
        """Tokens in the cache in a kernel body."""
        tokens = self.tokens.load(lanes, ins, (b,), mask) + self.cached
        if self.before and self.new is not None:
            tokens = tokens + self.new.load(lanes, ins, (b,), mask)
        return tokens if self.limit is None else lanes.minimum(tokens, scalar_value(self.limit, lanes, ins))

    def read_cached(self, inputs: tuple):
        """The same in jnp, [B]."""
        tokens = self.tokens.read(inputs) + self.cached
        if self.before and self.new is not None:
            tokens = tokens + self.new.read(inputs)
        return tokens if self.limit is None else jnp.minimum(tokens, scalar_array(self.limit, inputs))

"""top_ids: the best scores of each row by their ids, found without a sort.

Scores become int32 ranks in the same order. The budget-th largest rank is found bit by bit, from the top: a bit belongs
to it if at least `budget` ranks reach it with the bit set. Every rank above it is chosen, and of those equal to it the
first ones that still fit; prefix sums say where each goes.

    scores 1 5 5 2 9, budget 3     third largest: 5     above it: 9     still to fit: 2     chosen: ids 1 2 4

A program is one row. A row of up to BLOCK * HELD scores is read once and stays in registers, in a branch for the number
of blocks that it may fill; a longer one is read again for each bit, from the L2 cache for the most part.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Array, Section

BLOCK = 4096  # most scores that are looked at together; fewer where vectors with prefix sums are shorter
HELD = 8  # most blocks that stay in registers, 64 registers a thread
TURN = 4  # blocks that a longer row reads between two looks at a loop's end
MOST = 2**15 - 1  # largest budget of a kernel: two counts up to it go into one int32
DEAD = -(2**31)  # the rank of a score that is not there; no number's, and not NaN's


def top_ids(scores: jax.Array, lens: Array, *, budget: int, backend: str | None = None) -> jax.Array:
    """The ids of the `budget` best of each row's first lens[r] scores, ascending.

    Of equal scores the one that comes first is taken. NaN is worse than any number, and 0 and -0 are equal. What lies
    from lens[r] on is not looked at and may hold anything.

    Args:
      scores: float32[N, n].
      lens: int[N]; more than n counts as n, less than 0 as 0.
      budget: most ids a row (static); the kernels take up to 32767, more are left to the reference.
      backend: as in decode_metadata.

    Returns:
      int32[N, budget]: min(lens, budget) ids, then -1.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    >>> import jax.numpy as jnp
    >>> scores = jnp.array([[1.0, 5.0, 5.0, 2.0, 9.0], [3.0, jnp.nan, 7.0, 8.0, 8.0]])
    >>> top_ids(scores, jnp.array([4, 2]), budget=3).tolist()
    [[1, 2, 3], [0, 1, -1]]
    """
    backends.check(backend)
    if getattr(scores, "ndim", None) != 2 or scores.dtype != jnp.float32:
        raise ValueError(f"scores is {describe(scores)}: it must be float32[rows, scores]")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise ValueError(f"budget={budget!r}: it must be a Python integer >= 0")
    if budget > MOST and backend not in (None, "reference"):
        raise ValueError(f"budget={budget}: backend={backend!r} takes up to {MOST}; leave backend out")
    rows, count = scores.shape
    inputs = Inputs()
    place = inputs.add("lens", lens, 1, rows)
    operation = TopIds(rows, count, budget, place)
    arrays = (*inputs.arrays, jnp.asarray(scores))
    return backends.run(operation, backend, arrays, (jnp.zeros((rows, budget), jnp.int32),))[0]


@dataclasses.dataclass(frozen=True)
class TopIds:
    """One call: an `Operation` (see lanes.py). `count` is the number of scores a row, dead ones counted."""

    rows: int
    count: int
    budget: int
    lens: Section
    labels = ("lens", "scores")
    name = "top_ids"
    warps = 16  # of a program: a row's ranks take the registers of all

    @property
    def programs(self) -> int:
        return self.rows if self.budget else 0

    @property
    def reference_is_faster(self) -> bool:
        return self.budget > MOST  # the kernel could not run at all

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        live = lanes.minimum(self.lens.load(lanes, ins, (program,)), np.int32(self.count))
        width = self._width(lanes)
        lanes.when(live <= self.budget, lambda: self._all(lanes, program, live, outs))
        done, blocks, total = self.budget, 1, -(-self.count // width)
        while done < self.count and done < HELD * width:
            blocks = min(blocks, total, HELD)
            if blocks * width > done:
                some = (live > done) & (live <= blocks * width)
                lanes.when(some, lambda n=blocks: self._held(lanes, program, live, n, ins, outs))
                done = blocks * width
            blocks *= 4
        if done < self.count:
            lanes.when(live > done, lambda: self._read_again(lanes, program, live, ins, outs))

    def _width(self, lanes: Lanes) -> int:
        return lanes.width(self.count, min(BLOCK, lanes.longest))

    def _all(self, lanes: Lanes, row, live, outs: tuple) -> None:
        """There is no choice."""
        width = lanes.width(self.budget, BLOCK)
        for first in range(0, self.budget, width):
            column = lanes.iota(width) + first
            lanes.store(outs[0], (row, column), lanes.where(column < live, column, np.int32(-1)), column < self.budget)

    def _held(self, lanes: Lanes, row, live, blocks: int, ins: tuple, outs: tuple) -> None:
        """A row whose ranks stay in registers."""
        width = self._width(lanes)
        ids = [lanes.iota(width) + block * width for block in range(blocks)]
        ranks = [self._ranks(lanes, row, live, block, ins) for block in ids]
        edge = self._edge(lanes, lambda rank: _reach(lanes, ranks, rank))
        room = self.budget - _reach(lanes, ranks, edge + 1)
        above = equal = np.int32(0)
        for block, rank in zip(ids, ranks, strict=True):
            above, equal = self._put(lanes, row, block, rank, edge, room, above, equal, outs)

    def _read_again(self, lanes: Lanes, row, live, ins: tuple, outs: tuple) -> None:
        """A row of any length."""
        width = self._width(lanes)

        def reach(rank):
            def turn(i, found):
                ids = [lanes.iota(width) + (i * TURN + block) * width for block in range(TURN)]
                return found + _reach(lanes, [self._ranks(lanes, row, live, block, ins) for block in ids], rank)

            return lanes.loop(0, lanes.cdiv(live, TURN * width), turn, np.int32(0))

        edge = self._edge(lanes, reach)
        room = self.budget - reach(edge + 1)

        def put(i, carry):
            block = lanes.iota(width) + i * width
            rank = self._ranks(lanes, row, live, block, ins)
            above, equal = self._put(lanes, row, block, rank, edge, room, carry & 0xFFFF, carry >> 16, outs)
            return above + (lanes.minimum(equal, room) << 16)  # past the room their number does not matter

        lanes.loop(0, lanes.cdiv(live, width), put, np.int32(0))

    def _ranks(self, lanes: Lanes, row, live, ids, ins: tuple):
        """Ranks of a block of scores: negative numbers by their magnitude downwards, which makes -0 a 0."""
        bits = lanes.bits(lanes.load(ins[1], (row, ids), ids < live), np.int32)
        magnitude = bits & 0x7FFFFFFF
        rank = lanes.where(bits < 0, -magnitude, bits)
        rank = lanes.where(magnitude > 0x7F800000, np.int32(DEAD + 1), rank)
        return lanes.where(ids < live, rank, np.int32(DEAD))

    def _edge(self, lanes: Lanes, reach):
        """The largest rank that at least `budget` ranks reach. The lowest has no bit set; the top bit is the sign."""

        def bit(i, edge):
            raised = edge ^ (np.int32(1) << (31 - i))
            return lanes.where(reach(raised) >= self.budget, raised, edge)

        return lanes.loop(np.int32(0), np.int32(32), bit, np.int32(DEAD))

    def _put(self, lanes: Lanes, row, ids, rank, edge, room, above, equal, outs: tuple):
        """Writes the chosen ids of a block. `above` and `equal` count earlier ranks; those returned, its own too."""
        # Both counts in one sum: a block has at most BLOCK of each.
        marks = lanes.where(rank > edge, np.int32(1), lanes.where(rank == edge, np.int32(1 << 16), np.int32(0)))
        before = lanes.prefix_sum(marks)
        ties = equal + (before >> 16)
        column = above + (before & 0xFFFF) + lanes.minimum(ties, room) - 1
        chosen = (rank > edge) | ((rank == edge) & (ties <= room))
        # A lane that stores nothing has a column of its own, past the last.
        lane = lanes.iota(self._width(lanes))
        lanes.store(outs[0], (row, lanes.where(chosen, column, lane + self.budget)), ids, chosen)
        both = lanes.sum(marks)
        return above + (both & 0xFFFF), equal + (both >> 16)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        lens, scores = self.lens.read(inputs), inputs[1]
        most = min(self.budget, self.count)
        live = lax.broadcasted_iota(jnp.int32, scores.shape, 1) < lens[:, None]
        bits = lax.bitcast_convert_type(scores, jnp.int32)
        rank = jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        rank = jnp.where(live, jnp.where(jnp.isnan(scores), DEAD + 1, rank), DEAD)
        _, ids = lax.top_k(rank, most)
        chosen = jnp.arange(most, dtype=jnp.int32) < lens[:, None]
        ids = lax.sort(jnp.where(chosen, ids.astype(jnp.int32), self.count), is_stable=False)
        ids = jnp.pad(ids, ((0, 0), (0, self.budget - most)), constant_values=self.count)
        return (jnp.where(ids < self.count, ids, -1),)


def _reach(lanes: Lanes, ranks: list, rank):
    """How many of the ranks are `rank` or more."""
    found = [lanes.where(block >= rank, np.int32(1), np.int32(0)) for block in ranks]
    return lanes.sum(sum(found[1:], found[0]))

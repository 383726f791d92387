"""Lengths of the rows of a forward over pooled attention: what each sees, what it attends to, how scoring is shared.

A request of S tokens, of which the last q are new, has rows 0, 1, ... that see first + j + 1 tokens each. In closed
pools of p tokens a row attends to `topk` tokens at most; the tokens behind its last closed pool always count:

    p = 4, topk = 8     tokens seen         0  3  4  8  11  12  15  16
                        tokens attended to  0  3  4  8  11   8  11   8
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import Destination
from pallas_kernels.lanes import Lanes
from pallas_kernels.span import Span
from pallas_kernels.tables import HEAD_LANES

SHARE = 8  # log2 of the pools that a processor scores at once
OUTPUTS = ("seqlens_expanded", "dsa_cache_seqlens", "dsa_cu_seqlens_k", "pool_seqlens", "paged_mqa_ctx_lens_2d")


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """One program that writes what is there of OUTPUTS, since a prefix sum crosses programs.

    pool     log2 of the tokens of a pool
    packed   whether requests have new[b] rows each, one after the other, and not `rows`. What lies behind them stays
    """

    destination: Destination
    span: Span
    pool: int
    topk: int
    packed: bool = False

    @property
    def programs(self) -> int:
        # Without rows the leading 0 of the prefix sums is left to write.
        return int(self.span.B > 0 and any(name in self.destination for name in OUTPUTS))

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        span, total = self.span, self.span.B * self.span.rows
        width = lanes.width(total, HEAD_LANES)
        before = attended_before = None
        for first in range(0, max(total, 1), width):
            item = lanes.iota(width) + first
            valid = item < total
            b = lanes.div(item, max(span.rows, 1))
            j = item - b * span.rows
            seen, live = span.load(lanes, ins, b, j, valid)
            pools = seen >> self.pool
            attended = lanes.minimum(pools << self.pool, self.topk) + (seen - (pools << self.pool))
            more = first + width < total
            row = item
            if self.packed:
                one = lanes.where(live, item * 0 + 1, 0)
                row = lanes.prefix_sum(one) - one
                row = row if before is None else row + before
                before = self._add(before, lanes.sum(one)) if more else None
            written = live if self.packed else valid
            self._store(lanes, outs, "seqlens_expanded", row, seen, written)
            self._store(lanes, outs, "dsa_cache_seqlens", row, attended, written)
            self._store(lanes, outs, "pool_seqlens", row, pools, written)
            if "dsa_cu_seqlens_k" in self.destination:
                place = self.destination["dsa_cu_seqlens_k"]
                sums = lanes.prefix_sum(attended)
                if attended_before is None:
                    place.store(lanes, outs, (item,), item * 0, item == 0)
                else:
                    sums = sums + attended_before
                self._store(lanes, outs, "dsa_cu_seqlens_k", row + 1, sums, written)
                attended_before = self._add(attended_before, lanes.sum(attended)) if more else None
            if "paged_mqa_ctx_lens_2d" in self.destination:
                cached = span.load_cached(lanes, ins, b, valid)
                self.destination["paged_mqa_ctx_lens_2d"].store(lanes, outs, (b, j), cached, valid)

    def _store(self, lanes: Lanes, outs: tuple, name: str, index, value, mask) -> None:
        if name in self.destination:
            place = self.destination[name]
            if self.packed:
                # Rows that do not exist share a number with one that does: they get cells past the end.
                mask, end = mask & (index < place.shape[0]), place.shape[0] + lanes.iota(index.size)
                index = lanes.where(mask, index, end)
            place.store(lanes, outs, (index,), value, mask)

    @staticmethod
    def _add(total, more):
        return more if total is None else total + more

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        span = self.span
        seen, live = span.read(inputs)
        pools = seen >> self.pool
        attended = jnp.minimum(pools << self.pool, self.topk) + (seen - (pools << self.pool))
        values = {"seqlens_expanded": seen, "dsa_cache_seqlens": attended, "pool_seqlens": pools}
        values = {name: value.reshape(-1) for name, value in values.items()}
        zero = jnp.zeros(1, jnp.int32)
        values["dsa_cu_seqlens_k"] = jnp.concatenate([zero, lax.cumsum(attended.reshape(-1), axis=0)])
        values = {name: value for name, value in values.items() if name in self.destination}
        if self.packed:
            values = {name: self._pack(outputs, name, value, live.reshape(-1)) for name, value in values.items()}
        if "paged_mqa_ctx_lens_2d" in self.destination:
            cached = span.read_cached(inputs)[:, None]
            values["paged_mqa_ctx_lens_2d"] = jnp.broadcast_to(cached, (span.B, span.rows))
        return self.destination.write(outputs, values)

    def _pack(self, outputs: tuple, name: str, value, live):
        """The destination with the values of rows that exist moved together; prefix sums behind a leading 0."""
        old, head = self.destination.read(outputs, name), len(value) - len(live)
        count = live.astype(jnp.int32)
        row = lax.cumsum(count, axis=0) - count
        spare = len(old)  # a cell behind the others, for rows that do not exist
        cell = jnp.where(live, jnp.minimum(row + head, spare), spare)
        new = jnp.concatenate([old, old[:1]]).at[cell].set(value[head:])
        return (new.at[:head].set(0) if head else new)[:spare]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How scoring the pools of all rows is shared out, in blocks of 256 pools: a row has one block at least.

    Entry i is (row, block in the row) where processor i starts. T blocks over n processors: the first ones take
    T // n each, the last T % n one more. A row past the last one stands for the end.

    Rows of 16, 32, 512 and 16382 pools have 1, 1, 2 and 64 blocks. Four processors take 17 of the 68 each:
    [[0, 0], [3, 13], [3, 30], [3, 47], [4, 0]].

    pool     log2 of the tokens of a pool
    packed   as in RowLengths: rows that do not exist have no blocks and no number
    """

    destination: Destination
    span: Span
    pool: int
    packed: bool = False

    @property
    def processors(self) -> int:
        return self.destination["schedule"].shape[0] - 1

    @property
    def programs(self) -> int:
        return self.processors + 1 if self.span.B else 0

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        """One entry: how many rows end before it, and the blocks of those."""
        span, total = self.span, self.span.B * self.span.rows
        width, chunks = lanes.width(total, HEAD_LANES), []
        for first in range(0, max(total, 1), width):
            item = lanes.iota(width) + first
            valid, b = item < total, lanes.div(item, max(span.rows, 1))
            seen, live = span.load(lanes, ins, b, item - b * span.rows, valid)
            live = live if self.packed else valid
            blocks = 1 + (lanes.maximum((seen >> self.pool) - 1, 0) >> SHARE)
            chunks.append((live, lanes.where(live, blocks, 0)))
        sums = [lanes.sum(blocks) for _, blocks in chunks]
        share = lanes.div(sum(sums[1:], sums[0]), self.processors)
        last = self.processors - (sum(sums[1:], sums[0]) - share * self.processors)
        target = program * share + lanes.maximum(program - last, 0)
        row = block = before = target * 0
        for (live, blocks), added in zip(chunks, sums, strict=True):
            passed = live & (lanes.prefix_sum(blocks) + before <= target)
            row = row + lanes.sum(lanes.where(passed, blocks * 0 + 1, 0))
            block = block + lanes.sum(lanes.where(passed, blocks, 0))
            before = before + added
        place = self.destination["schedule"]
        place.store(lanes, outs, (program, 0), row)
        place.store(lanes, outs, (program, 1), lanes.where(target < before, target - block, 0))

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        seen, live = self.span.read(inputs)
        blocks = 1 + (jnp.maximum((seen.reshape(-1) >> self.pool) - 1, 0) >> SHARE)
        live = live.reshape(-1) if self.packed else jnp.ones(blocks.shape, bool)
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), lax.cumsum(jnp.where(live, blocks, 0), axis=0)])
        numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), lax.cumsum(live.astype(jnp.int32), axis=0)])
        share = lax.div(ends[-1], jnp.int32(self.processors))
        entry = lax.iota(jnp.int32, self.processors + 1)
        last = self.processors - (ends[-1] - share * self.processors)
        target = entry * share + jnp.maximum(entry - last, 0)
        # All compared at once: a binary search is a loop, which takes XLA longer than everything else here together.
        passed = jnp.searchsorted(ends[1:], target, side="right", method="compare_all").astype(jnp.int32)
        block = jnp.where(target < ends[-1], target - ends[passed], 0)
        return self.destination.write(outputs, {"schedule": jnp.stack([numbers[passed], block], axis=1)})

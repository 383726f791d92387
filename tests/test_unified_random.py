"""The allocator of a unified pool against a clerk with dictionaries, after each of many random operations."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from pool_cases import asked, pool
from pool_model import PoolModel

from jaxspec.cache import compaction, init_pool, init_unified

R, P, B, T = 5, 6, 4, 32  # request rows (0 is the sink), pages a row, lanes, operations a run
MAX_NEW, MAX_RETIRED = 4, 2
DEMANDS = np.meshgrid(*(np.arange(count, dtype=np.int32) for count in (16, 20, 4)))  # pages of FULL, SWA, states
ALLOCATE, RETIRE, RETIRE_SHARED, RELEASE = range(4)
CODES = [ALLOCATE, ALLOCATE, ALLOCATE, RETIRE, RETIRE_SHARED, RELEASE]
GEOMETRIES = {  # units of a page: FULL, SWA, state
    "page 1": pool(1, 3, 2, 14, full=12, swa=9, extra=5),  # 6, 4, 14
    "page 1, large states": pool(1, 1, 2, 34, full=14),  # 2, 4, 34
    "page 4, no states": pool(4, 1, 3, full=12, swa=6),  # 8, 24
    "page 4, no SWA": pool(4, 1, 0, 34, full=14),  # 8, -, 34
    "page 4, FULL only": pool(4, 2, 0),  # 16
    "page 64, small states": pool(64, 1, 3, 6, full=14, states=3, extra=100),  # 128, 384, 6
    "page 128": pool(128, 2, 1, 600, full=12, swa=6),  # 512, 256, 600
}


def window(layout):
    """One and a half pages."""
    return layout.page_size + layout.page_size // 2


class Machine:
    """Runs T operations in one compiled program and tells what the state was after each.

    Pages are stamped after they were handed out: element i of the page gets its serial number + i. So the least and the
    greatest of element i - i say whether a page holds one stamp, unharmed.
    """

    def __init__(self, layout):
        self.layout = layout
        self.run = jax.jit(self._run, compiler_options=quick_compile.options())

    def _pages(self, buffer, kind):
        """[pages of the kind, elements]"""
        count, units = self.layout.num_pages(kind), self.layout.page_units(kind)
        return buffer[: count * units].reshape(count, -1)

    def _contents(self, buffer):
        """Of every page of each kind: least and greatest of element i - i, greatest absolute value."""
        told = []
        for kind in self.layout.kinds:
            pages = self._pages(buffer, kind)
            stamps = pages - jnp.arange(pages.shape[1])
            told.append((stamps.min(1), stamps.max(1), jnp.abs(pages).max(1)))
        return told

    def _stamp(self, buffer, before, pages, turn):
        """Writes the serial numbers of the pages and states that rows have got."""
        column = jnp.arange(P)
        new = (column >= before.num_pages[:, None]) & (column < pages.num_pages[:, None])
        for index, kind in enumerate(self.layout.kinds):
            place, got = pages.v2p[pages.page_table, index % 2], new
            if kind == "state":
                place = pages.state_v2p[pages.state_slot][:, None]
                got = ((before.state_slot == 0) & (pages.state_slot > 0))[:, None]
            place = jnp.where(got, place, self.layout.num_pages(kind))
            serial = self.serial(turn, jnp.arange(R)[:, None], column[: place.shape[1]], index)
            grid = self._pages(buffer, kind)
            stamps = jnp.zeros(len(grid)).at[place].set(serial, mode="drop")[:, None]
            grid = jnp.where(stamps > 0, stamps + jnp.arange(grid.shape[1]), grid)
            grid = grid.reshape(-1, buffer.shape[1])
            buffer = buffer.at[: len(grid)].set(grid)
        return buffer

    def serial(self, turn, row, column, index):
        return 1 + ((turn * R + row) * P + column) * len(self.layout.kinds) + index

    def _run(self, pages, cache, operations):
        sinks = max(map(self.layout.page_units, self.layout.kinds))
        first = cache.buffer[:sinks]

        def turn(carry, operation):
            pages, cache = carry
            number, code, rows, lengths, ended = operation
            at_most = {"max_retired": MAX_RETIRED}
            after, cache, ok = lax.switch(
                code,
                [
                    lambda: pages.allocate(cache, rows, lengths, max_new=MAX_NEW),
                    lambda: (pages.retire(rows, lengths, window(self.layout), **at_most), cache, True),
                    lambda: (
                        pages.retire(rows, lengths, window(self.layout), prefix_sharing=True, **at_most),
                        cache,
                        True,
                    ),
                    lambda: (pages.release(ended), cache, True),
                ],
            )
            seen = {
                "pages": after,
                "ok": ok,
                "short": pages.short(*asked(pages, rows, lengths)),
                "contents": self._contents(cache.buffer),
                "sinks": (cache.buffer[:sinks] == first).all(),
                "fits": after.fits(*DEMANDS),
                "bytes_moved": (cache.buffer != carry[1].buffer).any(),
            }
            granted = (code == ALLOCATE) & ok
            buffer = jnp.where(granted, self._stamp(cache.buffer, pages, after, number), cache.buffer)
            return (after, cache.replace(buffer=buffer)), seen

        numbered = (jnp.arange(T), *operations)
        return lax.scan(turn, (pages, cache), numbered)[1]

    def start(self, seed):
        """An empty pool full of garbage."""
        pages = init_unified(self.layout, rows=R, pages_per_row=P, seed=seed)
        garbage = np.random.default_rng(7).normal(size=(self.layout.units, self.layout.unit)).astype(np.float32)
        return pages, init_pool(self.layout).replace(buffer=jnp.asarray(garbage))

    def compare(self, operations, seed):
        """Runs the operations and walks the clerk through them. Returns the clerk, and how often there was no room."""
        codes, rows, lengths, ended = operations
        seen = jax.device_get(self.run(*self.start(seed), operations))
        model, kinds, refused = PoolModel(self.layout, R, P), self.layout.kinds, 0
        for step in range(T):
            now = jax.tree.map(lambda leaf, step=step: leaf[step], seen)
            wishes = {int(row): int(n) for row, n in zip(rows[step], lengths[step], strict=True) if row}
            assert now["short"] == model.short(wishes)
            new = []
            if codes[step] == ALLOCATE:
                granted = model.grants(wishes, MAX_NEW)
                assert now["ok"] == granted
                if granted:
                    new = model.adopt(wishes, now["pages"])
                else:
                    refused += 1
            elif codes[step] == RELEASE:
                for row in np.flatnonzero(ended[step][1:]) + 1:
                    model.release(int(row))
            elif "swa" in kinds:
                for row, length in wishes.items():
                    shared = codes[step] == RETIRE_SHARED
                    model.retire(row, length, window(self.layout), MAX_RETIRED, shared)
            model.check(now["pages"])
            assert now["sinks"]
            assert new or not now["bytes_moved"]
            self.compare_contents(model, now["contents"])
            self.compare_capacity(model, now)
            for kind, row, column, name in new:
                model.content[kind][name] = self.serial(step, row, column, kinds.index(kind))
        return model, refused

    def compare_contents(self, model, contents):
        """Every page that is alive holds its stamp, or zeros if it is new. A new state may hold anything."""
        for (low, high, peak), kind in zip(contents, self.layout.kinds, strict=True):
            for virtual, physical in model.place[kind].items():
                if stamp := model.content[kind][virtual]:
                    assert low[physical] == high[physical] == stamp
                else:
                    assert peak[physical] == 0 or kind == "state"

    def compare_capacity(self, model, now):
        np.testing.assert_array_equal(now["fits"], model.fits(*DEMANDS))


@functools.cache
def machine(geometry):
    return Machine(GEOMETRIES[geometry])


@st.composite
def runs(draw, page_size):
    """T operations. Lengths are drawn in 64ths of a full row, so that page edges and exhaustion are common."""
    lane_rows, lane_lengths = st.permutations(range(R)), st.lists(st.integers(0, 68), min_size=B, max_size=B)
    operation = st.tuples(st.sampled_from(CODES), lane_rows, st.integers(1, B), lane_lengths, st.integers(0, 31))
    operations = draw(st.lists(operation, min_size=T, max_size=T))
    return as_operations(page_size, *(np.array(column) for column in zip(*operations, strict=True)))


def seeded_runs(page_size, seeds):
    """The same without hypothesis, and the seed of the pages with each."""
    rng = np.random.default_rng(0)
    for seed in seeds:
        rows = np.array([rng.permutation(R) for _ in range(T)])
        lanes, lengths, ended = rng.integers(1, B, T), rng.integers(0, 40, (T, B)), 1 << rng.integers(0, R, T)
        yield as_operations(page_size, rng.choice(CODES, size=T), rows, lanes, lengths, ended), seed


def as_operations(page_size, codes, rows, lanes, lengths, ended):
    """Arrays as `Machine` takes them: int32 but for the last, with an axis of T."""
    rows = np.where(np.arange(B) < lanes[:, None], rows[:, :B], 0)
    lengths = -(-lengths * P * page_size // 64)
    return (*(np.asarray(x, np.int32) for x in (codes, rows, lengths)), (ended[:, None] >> np.arange(R)) & 1 > 0)


def check_runs(geometry, examples):
    @settings(max_examples=examples, deadline=None)
    @given(runs(GEOMETRIES[geometry].page_size), st.sampled_from([None, 3]))
    def check(operations, seed):
        machine(geometry).compare(operations, seed)

    check()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_against_a_clerk(geometry):
    """Three thousand operations in all. They do not just see a pool that is always wide enough."""
    check_runs(geometry, 6)
    moves, refused = 0, 0
    for operations, seed in seeded_runs(GEOMETRIES[geometry].page_size, (None, 3, 4, 5) * 2):
        model, refusals = machine(geometry).compare(operations, seed)
        moves += sum(model.moves.values())
        refused += refusals
    assert refused and (moves or len(GEOMETRIES[geometry].kinds) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_many_operations_against_a_clerk(geometry):
    """A hundred thousand operations in all."""
    check_runs(geometry, 450)


@functools.partial(jax.jit, compiler_options=quick_compile.options())
def turns(pages, cache, demands):
    """For states and demands, turns of the loop that makes room."""

    def count(pages, demand):
        counted = []

        def while_loop(busy, turn, carry):
            turns, carry = lax.while_loop(lambda c: busy(c[1]), lambda c: (c[0] + 1, turn(c[1])), (0, carry))
            counted.append(turns)
            return carry

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compaction, "lax", types.SimpleNamespace(**vars(lax) | {"while_loop": while_loop}))
            compaction.make_room(pages, cache.buffer, demand)
        return counted[0]

    return jax.vmap(count)(pages, demands)


@pytest.mark.parametrize("geometry", ["page 1", "page 64, small states"])
def test_making_room_ends(geometry):
    """It gives up no more than the holes that are not needed, and shifts SWA no further than the states' span can end
    from where it does: a page down, for which it takes one in and gives one up, or a page up."""
    layout, rng = GEOMETRIES[geometry], np.random.default_rng(1)
    states, demands, most = [], [], []
    for operations, seed in seeded_runs(layout.page_size, (None, 3)):
        seen = jax.device_get(machine(geometry).run(*machine(geometry).start(seed), operations))
        for step in range(T):
            fitting = np.argwhere(seen["fits"][step])[:, [1, 0, 2]]
            for demand in fitting[rng.choice(len(fitting), 4)]:
                pages = jax.tree.map(lambda leaf, step=step: leaf[step], seen["pages"])
                alive, spare = pages.span - pages.holes, pages.holes - demand
                ends = [alive[2] + demand[2], pages.span[2] + max(-spare[2], 0)]
                lowest, highest = (-(-layout.above_states(int(end)) // layout.page_units("swa")) for end in ends)
                shift = 2 * max(pages.swa_low - lowest, 0) + max(highest - pages.swa_low, 0)
                states.append(pages)
                demands.append(demand.astype(np.int32))
                most.append(np.maximum(spare, 0).sum() + shift * (pages.span[1] > 0))
    states = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    taken = turns(states, machine(geometry).start(None)[1], np.stack(demands))
    assert (taken <= np.array(most)).all() and (taken > 0).sum() > 20

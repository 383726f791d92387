"""The allocator of a unified pool against a clerk with dictionaries, after each of many random operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from pool_cases import pool
from pool_model import PoolModel

from jaxspec.cache import init_pool, init_unified

R, P, B, T = 5, 6, 4, 32  # request rows (0 is the sink), pages a row, lanes, operations a run
MAX_NEW, MAX_RETIRED = 4, 2
DEMANDS = np.meshgrid(np.arange(16, dtype=np.int32), np.arange(20, dtype=np.int32))  # pages of FULL, of SWA
ALLOCATE, RETIRE, RETIRE_SHARED, RELEASE = range(4)
GEOMETRIES = {
    "page 1": pool(1, 3, 2, extra=5),
    "page 4": pool(4, 1, 1),
    "page 4, FULL only": pool(4, 2, 0),
    "page 64, large SWA": pool(64, 1, 3, full=14, extra=100),
    "page 128": pool(128, 2, 1),
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
        """Writes the serial numbers of the pages that rows have got."""
        column = jnp.arange(P)
        new = (column >= before.num_pages[:, None]) & (column < pages.num_pages[:, None])
        for index, kind in enumerate(self.layout.kinds):
            place = jnp.where(new, pages.v2p[pages.page_table, index], self.layout.num_pages(kind))
            serial = self.serial(turn, jnp.arange(R)[:, None], column, index)
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
                "contents": self._contents(cache.buffer),
                "sinks": (cache.buffer[:sinks] == first).all(),
                "fits": after.fits(*DEMANDS),
                "free": after.free_pages(),
                "free_units": after.free_units,
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
        """Runs the operations and walks the clerk through them. Returns pages moved and demands refused."""
        codes, rows, lengths, ended = operations
        seen = jax.device_get(self.run(*self.start(seed), operations))
        model, kinds, refused = PoolModel(self.layout, R, P), self.layout.kinds, 0
        for step in range(T):
            now = jax.tree.map(lambda leaf, step=step: leaf[step], seen)
            wishes = {int(row): int(n) for row, n in zip(rows[step], lengths[step], strict=True) if row}
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
            for row, column, virtual in new:
                for index, kind in enumerate(kinds):
                    model.content[kind][virtual] = self.serial(step, row, column, index)
        return model.moves, refused

    def compare_contents(self, model, contents):
        """Every page that is alive holds its stamp, or zeros if it is new."""
        for (low, high, peak), kind in zip(contents, self.layout.kinds, strict=True):
            for virtual, physical in model.place[kind].items():
                if stamp := model.content[kind][virtual]:
                    assert low[physical] == high[physical] == stamp
                else:
                    assert peak[physical] == 0

    def compare_capacity(self, model, now):
        np.testing.assert_array_equal(now["fits"], model.fits(*DEMANDS))
        free_units = now["free_units"]
        assert free_units + model.units_in_use() <= model.usable_units()
        units = [self.layout.page_units(kind) for kind in self.layout.kinds]
        virtual = len(now["pages"].v2p) - 1 - len(model.place["full"])
        np.testing.assert_array_equal(now["free"], [virtual, *(free_units // n for n in units)])


@functools.cache
def machine(geometry):
    return Machine(GEOMETRIES[geometry])


@st.composite
def runs(draw, page_size):
    """T operations. Lengths are drawn in 64ths of a full row, so that page edges and exhaustion are common."""
    codes = st.sampled_from([ALLOCATE, ALLOCATE, ALLOCATE, RETIRE, RETIRE_SHARED, RELEASE])
    lane_rows, lane_lengths = st.permutations(range(R)), st.lists(st.integers(0, 68), min_size=B, max_size=B)
    operations = draw(st.lists(st.tuples(codes, lane_rows, lane_lengths, st.integers(0, 31)), min_size=T, max_size=T))
    codes, rows, lengths, ended = (np.array(column) for column in zip(*operations, strict=True))
    return as_operations(codes, rows[:, :B], lengths, ended, page_size)


def as_operations(codes, rows, lengths, ended, page_size):
    lengths = -(-lengths * P * page_size // 64)
    ended = (ended[:, None] >> np.arange(R)) & 1 > 0
    return (*(np.asarray(x, np.int32) for x in (codes, rows, lengths)), ended)


def check_runs(geometry, examples):
    @settings(max_examples=examples, deadline=None)
    @given(runs(GEOMETRIES[geometry].page_size), st.sampled_from([None, 3]))
    def check(operations, seed):
        machine(geometry).compare(operations, seed)

    check()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_against_a_clerk(geometry):
    """Some thirteen hundred operations in all."""
    check_runs(geometry, 8)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_many_operations_against_a_clerk(geometry):
    """A hundred thousand operations in all."""
    check_runs(geometry, 630)


@pytest.mark.parametrize("geometry", [name for name in GEOMETRIES if "only" not in name])
def test_runs_do_refuse_and_move(geometry):
    """What the tests above see is not a pool that is always wide enough."""
    rng = np.random.default_rng(0)
    page_size, total = GEOMETRIES[geometry].page_size, np.zeros(2, int)
    for seed in (None, 3, 4, 5):
        codes = rng.choice([ALLOCATE, ALLOCATE, ALLOCATE, RETIRE, RETIRE_SHARED, RELEASE], size=T)
        rows = np.array([rng.permutation(R)[:B] for _ in range(T)])
        ended = 1 << rng.integers(0, R, T)
        operations = as_operations(codes, rows, rng.integers(0, 60, (T, B)), ended, page_size)
        total += machine(geometry).compare(operations, seed)
    assert total[0] > 0 and total[1] > 0

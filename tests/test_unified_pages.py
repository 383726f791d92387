"""The allocator of a unified pool in worked cases: what is granted, what is freed, what is retired.

Its other tests: against a clerk with dictionaries (test_unified_random.py), space lost (test_unified_space.py), the
compiled program (test_unified_cost.py).

Known failures of unified pools elsewhere, and where they are tests:

* page reused with old bytes in it, or not cleared because there is one layer only: every byte of new pages is compared
  in `test_against_a_clerk` of test_unified_random.py (a geometry has one layer a kind); nothing else than the layout
  decides what is cleared.
* 32-bit overflow in large pools: `test_demands_beyond_int32`.
* SWA map sized by SWA's own pages: `test_virtual_pages_beyond_the_number_of_swa_pages`.
* capacity of one kind told without the other's, or both priced in the same gap: `test_joint_capacity`.
* double free of SWA, -1 or one page twice among the free, more credited than freed: conservation in every check, and
  `test_pages_that_were_retired_are_freed_once`.
* retirement that breaks the window behind a page edge, also with windows below a page: the tests of retirement.
* host stall of a free: `test_no_transfer` of test_unified_cost.py.
* the two frontiers overlap because one is rounded to the other's pages: `test_frontiers_are_compared_in_units`.
* a part is bound when the rest fails: `test_failure_leaves_the_hole`, and every refusal in `test_against_a_clerk`.
* pages lost or overlapping after compaction: every check; moved bytes are compared.

Not here: stale capacity memos, pending events, move gates and in-flight races (the device state is threaded through the
program, capacity is computed from it and no copy is in flight when a call begins); transfer of pages and tail
allocation (no prefix cache, no second machine); retirement of an unfinished insert (no prefix cache); state pages; pool
sizing and alignment (tests/test_pool_layout.py); translation, tables and their tails (tests of the metadata kernels).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from pool_cases import LANES, end, give, grow, pool, retire, round_of_pages, same, state

from jaxspec.cache import init_pool, init_unified


@pytest.mark.parametrize("page_size", [1, 4])
def test_page_edges(page_size):
    layout = pool(page_size, 1, 1)
    for count in (1, 2, 3):
        for length in {count * page_size - page_size + 1, count * page_size}:
            pages, _ = grow(*state(layout), {1: length})
            assert pages.num_pages.tolist() == [0, count, 0]
    pages, _ = grow(*state(layout), {1: 0})
    assert not pages.num_pages.any()


def test_no_lane_asks():
    """A batch without lanes, lanes that are padding, rows that have what they want: granted, and nothing is done."""
    before = grow(*state(pool(4, 1, 1)), {1: 8})
    for wishes in ({}, {0: 400}, {1: 5, 2: 0}):
        same(grow(*before, wishes), before)
    none = jnp.zeros(0, jnp.int32)
    *after, ok = give(*before, none, none, max_new=2)
    assert ok
    same(tuple(after), before)


def test_what_no_room_would_help_is_refused():
    """More pages in one call than announced, more than a row of the table holds, lengths near the limit of int32."""
    before = state(pool(4, 1, 1))
    same(grow(*before, {1: 4, 2: 12}, max_new=2, ok=False), before)
    same(grow(*before, {1: 21}, ok=False), before)
    same(grow(*before, {1: 2**31 - 1, 2: 2**31 - 1}, ok=False), before)
    grow(*before, {1: 20})


def bare(layout, span, holes):
    """A state of which only the counters count."""
    virtual = layout.num_pages("full") - layout.min_page("full") - (span[0] - holes[0])
    return init_unified(layout, rows=2, pages_per_row=2).replace(
        counters=jnp.array([virtual, *span, *holes], jnp.int32)
    )


def test_joint_capacity():
    """Units left by other pages are counted once, for both kinds together."""
    quarter = pool(1, 4, 1, full=8, swa=0)  # FULL pages of 8 units, SWA pages of 2, 64 units above the sinks
    assert quarter.units == 72 and quarter.page_units("full") == 4 * quarter.page_units("swa") == 8
    three_holes = bare(quarter, [7, 0], [3, 0])  # and a gap of 8: each kind alone could have 4 more pages
    assert three_holes.fits(4, 0) and three_holes.fits(0, 4) and not three_holes.fits(4, 4)
    assert three_holes.fits(3, 4) and not three_holes.fits(3, 5)
    assert three_holes.free_pages().tolist() == [4, 4, 16]
    equal = bare(pool(1, 1, 1, full=10, swa=0), [0, 0], [0, 0])  # room for ten pages of either kind
    assert equal.fits(5, 5) and not equal.fits(6, 6) and equal.fits(6, 4) and not equal.fits(6, 5)


def test_demands_beyond_int32():
    """In a pool of 2**31 - 1 units neither the number of units that pages fill nor that of a demand overflows."""
    layout = dataclasses.replace(pool(64, 4, 3), units=2**31 - 1)
    full, swa = layout.page_units("full"), layout.page_units("swa")
    pages = init_unified(pool(64, 4, 3), rows=2, pages_per_row=2).replace(layout=layout)
    pages = pages.replace(counters=jnp.array([2**31 - 1, 0, 0, 0, 0], jnp.int32))
    room = layout.num_pages("full") * full - layout.min_page("swa") * swa
    assert pages.free_units == room
    most = room // full
    assert pages.fits(most, 0) and not pages.fits(most + 1, 0)
    assert not pages.fits(2**31 - 1, 2**31 - 1) and not pages.fits(2**23, 2**23)  # 2**23 pages wrap to 0 units
    assert pages.fits(1, (room - full) // swa) and not pages.fits(1, (room - full) // swa + 1)


def test_frontiers_are_compared_in_units():
    """FULL pages of 10 units, SWA pages of 4: with SWA up to unit 24, FULL page 2 (units 20 .. 29) is not free."""
    layout = dataclasses.replace(pool(1, 5, 2), units=50)
    assert (layout.page_units("full"), layout.page_units("swa"), layout.min_page("swa")) == (10, 4, 3)
    assert bare(layout, [2, 2], [0, 0]).fits(1, 0)
    to_24 = bare(layout, [2, 3], [0, 0])
    assert not to_24.fits(1, 0) and to_24.fits(0, 1)


def test_failure_leaves_the_hole():
    """One hole, room for two pages more, four are asked for: the hole is still there, and so are the bytes."""
    pages, cache = grow(*state(pool(4, 1, 1)), {1: 20, 2: 4})
    pages = end(pages, 2)
    assert pages.counters[-2:].tolist() == [1, 1]
    same(grow(pages, cache, {2: 16}, ok=False), (pages, cache))
    grow(pages, cache, {2: 12})


@pytest.mark.parametrize("seed", [None, 2])
def test_virtual_pages_beyond_the_number_of_swa_pages(seed):
    """Virtual pages are as many as FULL pages, and each of them is bound in SWA once its turn comes."""
    pages, cache = state(pool(4, 1, 3, full=12, swa=3), seed=seed)
    turns = []
    for row in range(12):
        pages, cache = grow(pages, cache, {1 + row % 2: 4})
        virtual = int(pages.page_table[1 + row % 2, 0])
        assert min(pages.v2p[virtual].tolist()) > 0
        turns.append(virtual)
        pages = end(pages, 2 - row % 2)
    assert max(turns) > 3


def test_pages_that_were_retired_are_freed_once():
    """Retired, released, handed out and released again: always the same number is free."""
    pages, cache = state(pool(4, 1, 1))
    empty, page = pages.free_units, pages.layout.page_units("swa")
    for _ in range(3):
        pages, cache = grow(pages, cache, {1: 12})
        owned = pages.free_units
        for length, retired in ((8, 1), (8, 1), (12, 2)):
            pages = retire(pages, np.array([[1, 0], [length, 99]], np.int32), 1, max_retired=4)
            assert pages.free_units == owned + retired * page and pages.num_pages.tolist() == [0, 3, 0]
        pages = end(pages, 1)
        assert pages.free_units == empty


def test_what_fits_the_gap_moves_nothing_and_what_does_not_moves_what_it_must():
    """Two pages wide is the gap, and SWA has eight holes at its bottom. FULL, which has none, takes up to five pages:
    from the third on, a page of SWA moves down for each."""
    layout = pool(1, 1, 1, full=24, swa=0)  # pages of two units in both kinds, room for 24 in all
    pages, cache = grow(*state(layout, columns=12), {1: 9, 2: 2})
    cache = cache.replace(buffer=jnp.arange(cache.buffer.size, dtype=jnp.float32).reshape(cache.buffer.shape))
    pages = retire(pages, np.array([[1], [9]], np.int32), 1, max_retired=12)
    live = np.asarray(pages.page_table)[[1] * 9 + [2] * 2, [*range(9), *range(2)]]
    before = np.asarray(pages.v2p)
    for new, moved in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3)):
        after, cache_after = grow(pages, cache, {2: 2 + new})
        changed = np.asarray(after.v2p)[live] != before[live]
        assert changed.sum(axis=0).tolist() == [0, moved]
        for page in live[changed[:, 1]]:
            old, place = 2 * int(before[page, 1]), 2 * int(after.v2p[page, 1])
            assert old > place
            np.testing.assert_array_equal(cache_after.buffer[place : place + 2], cache.buffer[old : old + 2])
    same(grow(pages, cache, {2: 8}, ok=False), (pages, cache))


def test_seed_changes_the_order_only():
    layout = pool(4, 1, 1)
    plain, shuffled = (init_unified(layout, rows=3, pages_per_row=5, seed=seed) for seed in (None, 5))
    assert plain.free_virtual.tolist() != shuffled.free_virtual.tolist()
    assert sorted(plain.free_virtual.tolist()) == sorted(shuffled.free_virtual.tolist())
    assert plain.free_pages().tolist() == shuffled.free_pages().tolist()
    given, _ = grow(shuffled, init_pool(layout), {1: 20})
    for physical in given.v2p[given.page_table[1]].T.tolist():
        assert physical != sorted(physical) and physical != sorted(physical, reverse=True)


def test_types_with_x64():
    """Every table stays int32, and says the same."""
    layout, lanes = pool(4, 1, 1), np.array([[1, 2], [12, 10]], np.int32)

    def walk():
        rounds = jax.jit(round_of_pages, compiler_options=quick_compile.options())
        carried, first = rounds(state(layout, seed=1), *lanes, np.zeros(3, bool))
        carried, second = rounds(carried, *lanes + np.array([[0], [2]], np.int32), np.arange(3) == 1)
        return jax.device_get((carried, first, second))

    want = walk()
    assert want[1] and want[2]
    with jax.enable_x64(True):
        found = walk()
    same(found, want)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, want)


# Retirement


def first_bound(lengths, size, window, prefix_sharing, *, steps=1):
    """For each length, the first position still bound in SWA after it was reached in so many equal steps."""
    lengths, columns = np.asarray(lengths), LANES + 2
    pages, cache = state(pool(size, 1, 1, full=22 * LANES, swa=22 * LANES), rows=LANES + 1, columns=columns)
    rows = range(1, len(lengths) + 1)
    pages, _ = grow(pages, cache, dict(zip(rows, lengths + 1, strict=True)), max_new=columns)
    lanes = np.zeros((2, LANES), np.int32)
    lanes[0, : len(lengths)] = rows
    for step in range(1, steps + 1):
        lanes[1, : len(lengths)] = lengths * step // steps
        pages = pages.retire(*lanes, window, max_retired=columns, prefix_sharing=prefix_sharing)
    pages = jax.device_get(pages)
    for row in rows:
        bound = pages.v2p[pages.page_table[row, : pages.num_pages[row]], 1] > 0
        assert bound.tolist() == [column >= pages.swa_start[row] for column in range(len(bound))]
    return pages.swa_start[1 : len(lengths) + 1] * size


@pytest.mark.parametrize(
    ("window", "size", "length", "cut", "plain", "shared"),
    [(1000, 128, 1535, 1408, 512, 384), (6, 4, 15, 12, 8, 4), (8, 4, 16, 16, 8, 8), (100, 128, 300, 256, 128, 128)],
)
def test_retirement_table(window, size, length, cut, plain, shared):
    """Without prefix sharing keys before `plain` are gone, with it those before `shared`: not one of the window behind
    the last page edge."""
    assert first_bound([length], size, window, False) == plain
    assert first_bound([length], size, window, True) == shared <= cut - window


@pytest.mark.parametrize(
    ("window", "size"), [(1, 1), (5, 1), (1, 4), (3, 4), (4, 4), (5, 4), (6, 4), (8, 4), (9, 4), (100, 128), (128, 128)]
)
def test_the_window_behind_every_page_edge_is_bound(window, size):
    """With prefix sharing, whatever length a row ends at, and however it got there: a continuation of its whole pages
    sees `window` keys behind their end. Without, the row's next query sees its window, and no whole page more stays
    than the key before it lies in."""
    lengths = np.arange(1, LANES + 1) if size < 128 else np.linspace(1, 1500, LANES).astype(int)
    edges = lengths // size * size
    shared = first_bound(lengths, size, window, True, steps=3)
    assert (shared <= np.maximum(edges - window, 0)).all()
    plain = first_bound(lengths, size, window, False)
    assert (plain <= np.maximum(lengths - window, 0)).all() and (plain > lengths - window - size).all()
    assert (shared <= plain).all()


def test_a_call_retires_no_more_than_announced():
    """The rest is retired by the next call."""
    pages, _ = grow(*state(pool(4, 1, 1)), {1: 20, 2: 12})
    starts = []
    for _ in range(4):
        pages = retire(pages, np.array([[2, 1], [12, 20]], np.int32), 1, max_retired=2)
        starts.append(pages.swa_start.tolist())
    assert starts == [[0, 2, 2], [0, 4, 2], [0, 4, 2], [0, 4, 2]]

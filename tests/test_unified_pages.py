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
* memory of one kind that another cannot have, or states that wait for memory which SWA's pages lie in:
  `test_what_one_kind_frees_the_others_can_have`, `test_states_grow_where_swa_pages_are` and the two after it.

Not here: stale capacity memos, pending events, move gates and in-flight races (the device state is threaded through the
program, capacity is computed from it and no copy is in flight when a call begins); transfer of pages and tail
allocation (no prefix cache, no second machine); retirement of an unfinished insert (no prefix cache); clearing of
states (the step's: tests of recurrent layers); pool sizing and alignment (tests/test_layout.py); translation, tables
and their tails (tests of the metadata kernels).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from pool_cases import LANES, asked, end, give, grow, pool, release, retire, round_of_pages, same, state
from pool_model import PoolModel

from jaxspec.cache import UnifiedPages, compaction, init_pool, init_unified


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
    pages = init_unified(layout, rows=2, pages_per_row=2)
    return pages.replace(counters=jnp.array([virtual, *pages.counters[1:3], *span, *holes], jnp.int32))


def test_joint_capacity():
    """Units left by other pages are counted once, for both kinds together."""
    quarter = pool(1, 4, 1, full=8, swa=0)  # FULL pages of 8 units, SWA pages of 2, 64 units above the sinks
    assert quarter.units == 72 and quarter.page_units("full") == 4 * quarter.page_units("swa") == 8
    three_holes = bare(quarter, [7, 0], [3, 0])  # and a gap of 8: each kind alone could have 4 more pages
    assert three_holes.fits(4, 0) and three_holes.fits(0, 4) and not three_holes.fits(4, 4)
    assert three_holes.fits(3, 4) and not three_holes.fits(3, 5)
    equal = bare(pool(1, 1, 1, full=10, swa=0), [0, 0], [0, 0])  # room for ten pages of either kind
    assert equal.fits(5, 5) and not equal.fits(6, 6) and equal.fits(6, 4) and not equal.fits(6, 5)


def test_demands_beyond_int32():
    """In a pool of 2**31 - 1 units neither the number of units that pages fill nor that of a demand overflows."""
    layout = dataclasses.replace(pool(64, 4, 3), units=2**31 - 1)
    full, swa = layout.page_units("full"), layout.page_units("swa")
    pages = init_unified(pool(64, 4, 3), rows=2, pages_per_row=2).replace(layout=layout)
    pages = pages.replace(counters=jnp.array([2**31 - 1, *[0] * 6], jnp.int32))
    room = layout.num_pages("full") * full - layout.min_page("swa") * swa
    most = room // full
    assert pages.fits(most, 0) and not pages.fits(most + 1, 0)
    assert not pages.fits(2**31 - 1, 2**31 - 1) and not pages.fits(2**23, 2**23)  # 2**23 pages wrap to 0 units
    assert pages.fits(1, (room - full) // swa) and not pages.fits(1, (room - full) // swa + 1)
    # States of 2**20 units: there are addresses for 2047, and the sink is one of them.
    layout = dataclasses.replace(pool(64, 4, 3, 2**20), units=2**31 - 1)
    pages = init_unified(pool(64, 4, 3, 2**20), rows=2, pages_per_row=2).replace(layout=layout)
    pages = pages.replace(counters=jnp.array([2**31 - 1, 2**31 - 1, *[0] * 7], jnp.int32))
    assert pages.fits(0, 0, 2046) and not pages.fits(0, 0, 2047) and not pages.fits(1, 1, 2**31 - 1)
    left = 2**20 // (full + swa)
    assert pages.fits(left - 2, left - 2, 2046) and not pages.fits(left, left, 2046)


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
    assert pages.holes.tolist() == [1, 1]
    same(grow(pages, cache, {2: 16}, ok=False), (pages, cache))
    grow(pages, cache, {2: 12})


def alive(pages):
    """Pages of each kind that are in use."""
    return (pages.span - pages.holes).tolist()


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
    for _ in range(3):
        pages, cache = grow(pages, cache, {1: 12})
        for length, retired in ((8, 1), (8, 1), (12, 2)):
            pages = retire(pages, np.array([[1, 0], [length, 99]], np.int32), 1, max_retired=4)
            assert alive(pages) == [3, 3 - retired] and pages.num_pages.tolist() == [0, 3, 0]
        pages = end(pages, 1)
        assert alive(pages) == [0, 0]


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
    assert alive(plain) == alive(shuffled) == [0, 0]
    given, _ = grow(shuffled, init_pool(layout), {1: 20})
    for physical in given.v2p[given.page_table[1]].T.tolist():
        assert physical != sorted(physical) and physical != sorted(physical, reverse=True)


def test_types_with_x64():
    """Every table stays int32, and says the same."""
    layout, lanes = pool(4, 1, 1, 10), np.array([[1, 2], [12, 10]], np.int32)

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


# States


def filled(cache):
    """The pool with a different number in every element."""
    return cache.replace(buffer=jnp.arange(cache.buffer.size, dtype=jnp.float32).reshape(cache.buffer.shape))


def maps(pages):
    """Of each kind the physical page of each virtual page or slot."""
    return {"full": pages.v2p[:, 0], "swa": pages.v2p[:, 1], "state": pages.slots[0]}


def contents(pages, cache):
    """What lies in each page in use: {(kind, virtual page or slot): elements}."""
    pages, buffer = jax.device_get((pages, cache.buffer))
    layout, found = pages.layout, {}
    for kind in layout.kinds:
        physical, units = maps(pages)[kind], layout.page_units(kind)
        for name in np.flatnonzero(physical > 0):
            found[kind, int(name)] = buffer[physical[name] * units :][:units]
    return found


def check_kept(before, after, moved=()):
    """What was in use is where the tables say, unharmed; pages of the kinds `moved`, and no others, lie elsewhere."""
    old, new = contents(*before), contents(*after)
    for name, content in old.items():
        np.testing.assert_array_equal(new[name], content)
    was, now = (maps(jax.device_get(pages)) for pages, _ in (before, after))
    elsewhere = {kind for kind, name in old if was[kind][name] != now[kind][name]}
    assert elsewhere == set(moved)


def small(wishes):
    """A pool for nine pages of each kind and two states, after a first call."""
    return grow(*state(pool(4, 1, 1, 10, full=9, swa=9), rows=5), wishes)


def test_a_row_has_one_state_from_its_first_call_to_its_release():
    pages, cache = small({2: 0, 3: 5})
    assert pages.num_pages.tolist() == [0, 0, 0, 2, 0] and alive(pages) == [2, 2, 2]
    slots = pages.state_slot.tolist()
    assert [slot > 0 for slot in slots] == [False, False, True, True, False] and slots[2] != slots[3]
    assert min(pages.state_v2p[slots[2]], pages.state_v2p[slots[3]]) >= pages.layout.min_page("state")
    again, cache = grow(pages, cache, {0: 9, 2: 3, 3: 5})
    assert again.state_slot.tolist() == slots and again.num_pages.tolist() == [0, 0, 1, 2, 0]
    ended = end(again, 3)
    assert ended.state_slot.tolist() == [0, 0, slots[2], 0, 0] and alive(ended) == [1, 1, 1]
    assert ended.state_v2p[slots[3]] == -1 and ended.state_v2p[0] == 0
    other, _ = grow(ended, cache, {4: 0})
    assert other.state_slot[4] == slots[3]
    same(end(ended, 3), ended)


def test_states_come_with_their_pages_or_not_at_all():
    before = small({1: 16, 2: 20})
    same(grow(*before, {3: 0}, ok=False), before)
    pages, cache = end(before[0], 1), before[1]
    same(grow(pages, cache, {3: 20}, ok=False), (pages, cache))  # there is a state, but a page is missing
    grow(pages, cache, {3: 16})


def test_the_least_is_granted_where_the_whole_is_not():
    """Room for three pages: not for the four of both rows' wishes, but for what they cannot do without."""
    pages, cache = state(pool(4, 1, 1, full=3, swa=3))
    rows, allocate = jnp.array([1, 2]), jax.jit(UnifiedPages.allocate, static_argnames="max_new")
    pages, cache, ok = allocate(pages, cache, rows, jnp.array([8, 8]), max_new=3, least=jnp.array([5, 4]))
    assert ok and pages.num_pages.tolist() == [0, 2, 1]
    again, _, ok = allocate(pages, cache, rows, jnp.array([12, 8]), max_new=3, least=jnp.array([9, 4]))
    assert not ok
    same(again, pages)
    again, _, ok = allocate(end(pages, 2), cache, rows, jnp.array([12, 0]), max_new=3, least=jnp.array([9, 0]))
    assert ok and again.num_pages.tolist() == [0, 3, 0]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kinds", [(1, 1, 0), (1, 0, 6), (1, 1, 6)])
def test_a_turn_too_many_changes_nothing(kinds, seed):
    """Should the loop that makes room not end at once."""
    pages, cache = state(pool(4, *kinds), seed=seed)
    pages, cache = grow(pages, cache, {1: 7, 2: 5})
    demand = jnp.zeros(len(pages.layout.kinds), jnp.int32)
    same((pages, cache.buffer), compaction._turn(pages, cache.buffer, demand))


def test_short_is_who_lacks_a_page_or_a_state():
    pages, _ = small({1: 8, 2: 1})
    for wishes, short in (({1: 8, 2: 4}, False), ({1: 9, 2: 4}, True), ({1: 8, 2: 5}, True), ({0: 99}, False)):
        assert pages.short(*asked(pages, jnp.array(list(wishes)), jnp.array(list(wishes.values())))) == short
    assert pages.short(*asked(pages, jnp.array([1, 3]), jnp.array([8, 0])))
    assert not pages.short(*asked(pages, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)))


SIZES = {  # of a page of each kind in units
    "states far below a page": (64, 1, 3, 22),  # 128, 384, 22
    "states far above a page": (1, 2, 1, 502),  # 4, 2, 502
    "FULL and states": (4, 2, 0, 42),  # 16, 42
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", [None, 3])
def test_what_one_kind_frees_the_others_can_have(sizes, seed):
    """States alone fill a pool, then tokens, then states again, then both: each time all of it."""
    layout = pool(*SIZES[sizes], full=12, swa=6, states=3)
    rows = layout.num_pages("state") + 1
    pages, cache = state(layout, rows=rows, columns=rows + layout.num_pages("full"), seed=seed)
    clerk, columns = PoolModel(layout, *pages.page_table.shape), pages.page_table.shape[1]
    most_states = max(n for n in range(rows) if clerk.fits(0, 0, n))
    most_pages = max(n for n in range(columns) if clerk.fits(n, n, 1))
    with_two = max(n for n in range(columns) if clerk.fits(n, n, 2))
    assert most_states > 2 and most_pages >= with_two > 0

    def refill(wishes, one_more):
        nonlocal pages, cache
        pages = release(pages, np.ones(rows, bool))
        for row in range(1, rows):
            clerk.release(row)
        for start in range(0, len(wishes), LANES):
            part = dict(list(wishes.items())[start : start + LANES])
            pages, cache = grow(pages, cache, part, max_new=columns)
            clerk.adopt(part, jax.device_get(pages))
        same(grow(pages, cache, one_more, max_new=columns, ok=False), (pages, cache))
        clerk.check(jax.device_get(pages))

    full_of_states = dict.fromkeys(range(1, 1 + most_states), 0)
    full_of_tokens = {1: most_pages * layout.page_size}
    for _ in range(2):
        refill(full_of_states, {most_states: layout.page_size * layout.page_units("state")})
        refill(full_of_tokens, {1: full_of_tokens[1] + 1})
    refill({3: with_two * layout.page_size, 1: 0}, {1: 1})


def tight(wishes):
    """A pool of 70 units, pages of 2, 2 and 10 units, after a first call."""
    pages, cache = grow(*state(pool(1, 1, 1, 10, full=10, swa=10, states=3), rows=8, columns=20), wishes)
    return pages, filled(cache)


def test_states_grow_where_swa_pages_are():
    """SWA has no hole and lies on top of the states: its five pages move up for another state."""
    before = tight({1: 5})
    assert before[0].holes.tolist() == [0, 0, 0]
    after = grow(*before, {2: 0})
    check_kept(before, after, moved=["swa"])
    assert after[0].swa_low == before[0].swa_low + 5 and after[0].span.tolist() == [5, 5, 2]
    assert after[0].holes.tolist() == [0, 0, 0]
    # Where it has holes at its upper end, these are filled.
    pages, cache = grow(*after, {3: 5})
    before = end(pages, 2), cache
    before = end(before[0], 3), cache
    assert before[0].span.tolist() == [10, 10, 3] and before[0].holes.tolist() == [5, 5, 2]
    after = grow(*before, {2: 0, 3: 0, 4: 0})
    check_kept(before, after, moved=["swa"])
    assert after[0].span.tolist() == [10, 5, 4] and after[0].holes.tolist() == [5, 0, 0]


def test_swa_follows_states_that_are_gone():
    """Their memory lies below SWA: when FULL needs it, SWA moves down."""
    pages, cache = tight({3: 0, 2: 0, 1: 10})
    before = end(end(pages, 2), 3), cache
    assert before[0].fits(5, 5) and not before[0].fits(6, 6)
    after = grow(*before, {1: 15})
    check_kept(before, after, moved=["swa", "state"])
    assert after[0].swa_low == before[0].swa_low - 10 and alive(after[0]) == [15, 15, 1]
    same(grow(*after, {1: 16}, ok=False), after)


def test_an_empty_swa_span_is_where_the_states_leave_room():
    """All of SWA is retired and given up; then states take its place; then SWA starts anew above them."""
    pages, cache = tight({1: 10})
    before = retire(pages, np.array([[1], [99]], np.int32), 1, max_retired=20), cache
    assert alive(before[0]) == [10, 0, 1]
    after = grow(*before, {2: 0, 3: 0, 4: 0, 5: 0})
    check_kept(before, after)
    assert after[0].span.tolist() == [10, 0, 5] and not after[0].fits(1, 1)
    assert after[0].swa_low * 2 >= after[0].layout.above_states(5)
    before = end(end(after[0], 3), 2), after[1]
    after = grow(*before, {1: 15})
    check_kept(before, after, moved=["state"])
    assert alive(after[0]) == [15, 5, 3]


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

"""The device allocator against a dictionary: what is owned, what is free, and that the two always add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import Pages, init_pages
from jaxspec.cache.pages import retirement_threshold

R, P, B = 4, 6, 3  # request rows (0 is the sink), pages a row, lanes


# The three operations, each compiled once for all that hypothesis tries.
WINDOW = 3
GIVE = jax.jit(functools.partial(Pages.allocate, cache=None, max_new=P))
DROP = jax.jit(functools.partial(Pages.retire, window=WINDOW, max_retired=2))
END = jax.jit(Pages.release)


def allocate(pages, rows, lengths, max_new=4):
    pages, _, ok = pages.allocate(None, jnp.array(rows), jnp.array(lengths), max_new=max_new)
    return pages, ok


class Book:
    """Who owns what, kept as a clerk would: for each row a list of [virtual, full, swa or None]."""

    def __init__(self, num_pages, num_swa_pages, page_size, swa):
        self.page_size, self.swa, self.total, self.total_swa = page_size, swa, num_pages - 1, num_swa_pages - 1
        self.rows = {row: [] for row in range(1, R)}
        self.retired = {row: 0 for row in range(1, R)}

    def bound(self):
        return sum(page[2] is not None for pages in self.rows.values() for page in pages)

    def lacking(self, row, length):
        return max(-(-length // self.page_size) - len(self.rows[row]), 0)

    def allocate(self, wishes, device):
        """Whether all wishes can be met; if so the pages that the device chose are entered and must have been free."""
        lacking = {row: self.lacking(row, length) for row, length in wishes.items()}
        free = self.total - sum(len(pages) for pages in self.rows.values())
        if sum(lacking.values()) > free or (self.swa and sum(lacking.values()) > self.total_swa - self.bound()):
            return False
        for row, count in lacking.items():
            for _ in range(count):
                virtual = int(device.page_table[row, len(self.rows[row])])
                full, swa = (int(x) for x in device.v2p[virtual])
                self.rows[row].append([virtual, full, swa if self.swa else None])
        return True

    def retire(self, row, length):
        stop = min(max(length - WINDOW, 0) // self.page_size, len(self.rows[row]), self.retired[row] + 2)
        for page in self.rows[row][self.retired[row] : stop]:
            page[2] = None
        self.retired[row] = max(self.retired[row], stop)

    def release(self, row):
        self.rows[row], self.retired[row] = [], 0

    def check(self, device):
        """The device state says the same, nothing is owned twice, and nothing got lost."""
        owned = [[], [], []]
        for row, pages in self.rows.items():
            assert device.num_pages[row] == len(pages)
            assert device.page_table[row].tolist() == [page[0] for page in pages] + [0] * (P - len(pages))
            assert device.swa_start[row] == self.retired[row]
            for page in pages:
                want = [page[1], -1 if page[2] is None else page[2]]
                assert device.v2p[page[0]].tolist() == want
                for kind in range(3):
                    owned[kind] += [page[kind]] if page[kind] is not None else []
        for kind, total in enumerate((self.total, self.total, self.total_swa)):
            free = device.free[kind, 1 : 1 + int(device.free_count[kind])].tolist()
            assert sorted(free + owned[kind]) == list(range(1, total + 1))
        unbound = np.setdiff1d(np.arange(1, self.total + 1), owned[0])
        assert (device.v2p[unbound] == -1).all()
        assert device.v2p[0].tolist() == [0, 0] and device.page_table[0].tolist() == [0] * P
        assert device.free[:, 0].tolist() == [0, 0, 0] and device.num_pages[0] == device.swa_start[0] == 0


OPERATION = st.one_of(
    st.tuples(st.just("allocate"), st.permutations([0, 1, 2, 3]), st.lists(st.integers(0, 64), min_size=B, max_size=B)),
    st.tuples(st.just("retire"), st.permutations([0, 1, 2, 3]), st.lists(st.integers(-9, 64), min_size=B, max_size=B)),
    st.tuples(st.just("release"), st.lists(st.booleans(), min_size=R, max_size=R), st.none()),
)


@pytest.mark.parametrize(("page_size", "swa"), [(1, True), (4, True), (64, True), (4, False)])
@settings(max_examples=40, deadline=None)
@given(operations_done=st.lists(OPERATION, max_size=14), seed=st.sampled_from([None, 3]))
def test_against_a_book(page_size, swa, operations_done, seed):
    """Lengths are drawn in 64ths of a full row, so that page edges and exhaustion are common for every page size."""
    num_pages, num_swa_pages = 11, 8 if swa else 0
    pages = init_pages(
        rows=R, pages_per_row=P, num_pages=num_pages, num_swa_pages=num_swa_pages, page_size=page_size, seed=seed
    )
    book = Book(num_pages, max(num_swa_pages, 1), page_size, swa)
    for name, who, what in operations_done:
        before = pages
        if name == "release":
            ended = np.array(who)
            pages = END(pages, jnp.asarray(ended))
            for row in range(1, R):
                if ended[row]:
                    book.release(row)
        else:
            rows = who[:B]
            lengths = [-(-x * P * page_size // 64) for x in what]
            lanes = {"req_rows": jnp.asarray(rows, jnp.int32), "lengths": jnp.asarray(lengths, jnp.int32)}
            wishes = {row: length for row, length in zip(rows, lengths, strict=True) if row}
            if name == "allocate":
                pages, _, ok = GIVE(pages, **lanes)
                assert bool(ok) == book.allocate(wishes, jax.device_get(pages))
                if not ok:
                    jax.tree.map(np.testing.assert_array_equal, pages, before)
            elif swa:
                pages = DROP(pages, **lanes)
                for row, length in wishes.items():
                    book.retire(row, length)
        book.check(jax.device_get(pages))


def fresh(**changes):
    settings = {"rows": 3, "pages_per_row": 4, "num_pages": 8, "num_swa_pages": 8, "page_size": 4}
    return init_pages(**{**settings, **changes})


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_edges(page_size):
    for pages_wanted in range(1, 4):
        for length in (pages_wanted * page_size - page_size + 1, pages_wanted * page_size):
            pages, ok = allocate(fresh(page_size=page_size), [1], [length])
            assert ok and int(pages.num_pages[1]) == pages_wanted


def test_a_page_more_than_there_is_fails_whole():
    """Row 1 alone could be served: none gets anything."""
    before = fresh(num_pages=6, num_swa_pages=6)
    pages, ok = allocate(before, [1, 2], [16, 8])
    assert not ok
    jax.tree.map(np.testing.assert_array_equal, pages, before)
    pages, ok = allocate(before, [1, 2], [16, 4])
    assert ok and pages.free_count.tolist() == [0, 0, 0]


def test_more_new_pages_than_announced_fail():
    """`max_new` fixes the shapes: a row that lacks more is refused, not given a part."""
    before = fresh()
    pages, ok = allocate(before, [1], [12], max_new=2)
    assert not ok
    jax.tree.map(np.testing.assert_array_equal, pages, before)


@pytest.mark.parametrize("swa", [True, False])
def test_sliding_pages_run_out_alone(swa):
    before = fresh(num_swa_pages=3 if swa else 0)
    _, ok = allocate(before, [1], [12])
    assert bool(ok) == (not swa)


def test_retired_pages_serve_others():
    """Retiring twice frees once; what a row gave back another row gets; releasing it later frees each page once."""
    pages, _ = allocate(fresh(num_swa_pages=4), [1], [12])
    assert pages.free_count.tolist() == [4, 4, 0]
    for _ in range(2):
        pages = pages.retire(jnp.array([1]), jnp.array([8 + WINDOW]), WINDOW, max_retired=3)
        assert pages.free_count.tolist() == [4, 4, 2]
    pages, ok = allocate(pages, [2], [8])
    assert ok and pages.free_count.tolist() == [2, 2, 0]
    pages = pages.release(jnp.array([False, True, True]))
    assert pages.free_count.tolist() == [7, 7, 3]
    assert sorted(pages.free[2, 1:4].tolist()) == [1, 2, 3]


@pytest.mark.parametrize(("length", "retired"), [(-5, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_a_page_is_retired_when_all_of_it_is_behind(length, retired):
    pages, _ = allocate(fresh(), [1], [12])
    pages = pages.retire(jnp.array([1]), jnp.array([length + WINDOW]), WINDOW, max_retired=4)
    bound = [int(pages.v2p[page, 1]) > 0 for page in pages.page_table[1, :3]]
    assert bound == [False] * retired + [True] * (3 - retired)


def test_seed_changes_the_order_only():
    plain, shuffled = fresh(), fresh(seed=5)
    assert plain.free[0].tolist() != shuffled.free[0].tolist()
    for kind in range(3):
        assert sorted(plain.free[kind].tolist()) == sorted(shuffled.free[kind].tolist())


@pytest.mark.parametrize(
    ("window", "page_size", "length", "alone", "shared"),
    [(1000, 128, 1535, 512, 384), (6, 4, 15, 8, 4), (8, 4, 16, 8, 8), (100, 128, 300, 128, 128)],
)
def test_retirement_with_and_without_prefix_sharing(window, page_size, length, alone, shared):
    """First token that stays bound. With sharing, a cut at any whole page finds all of its window."""
    for sharing, wanted in ((False, alone), (True, shared)):
        threshold = int(retirement_threshold(jnp.int32(length), window, page_size, sharing))
        assert threshold // page_size * page_size == wanted
    cut = length // page_size * page_size
    assert shared <= max(cut - window, 0)

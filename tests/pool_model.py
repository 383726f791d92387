"""The allocator of a unified pool as a clerk with dictionaries would do it, and what must hold of the device's.

The clerk knows which row owns which virtual pages, where each of them lies and what it contains. It decides by itself
what is granted and what is freed; which page is handed out, and where pages move to, it reads from the device and
checks. Nothing here is shared with the implementation.
"""

import numpy as np


class PoolModel:
    """Rows 1 .. rows - 1 of `pages_per_row` pages each in the pool of `layout`."""

    def __init__(self, layout, rows, pages_per_row):
        self.layout, self.pages_per_row = layout, pages_per_row
        self.owned = {row: [] for row in range(1, rows)}  # row -> virtual pages
        self.retired = dict.fromkeys(self.owned, 0)  # row -> pages that are not in SWA any more
        self.place = {kind: {} for kind in layout.kinds}  # kind -> virtual page -> physical page
        self.content = {kind: {} for kind in layout.kinds}  # kind -> virtual page -> what was written there
        self.moves = 0

    # What the clerk decides

    def units_in_use(self):
        """Units of all pages that are alive."""
        return sum(len(pages) * self.layout.page_units(kind) for kind, pages in self.place.items())

    def usable_units(self):
        """Units of a pool without its sinks: from the first page that may be handed out to the end of the last."""
        layout = self.layout
        lowest = min(layout.min_page(kind) * layout.page_units(kind) for kind in layout.kinds)
        return layout.units - lowest

    def fits(self, full, swa):
        """Whether so many more pages fit: all of both kinds packed, FULL down from the top, SWA up from the bottom.
        Also for arrays of demands."""
        layout = self.layout
        lowest_full = layout.num_pages("full") - len(self.place["full"]) - full
        fits = lowest_full >= layout.min_page("full")
        if "swa" in layout.kinds:
            above_swa = layout.min_page("swa") + len(self.place["swa"]) + swa
            fits &= above_swa * layout.page_units("swa") <= lowest_full * layout.page_units("full")
        return fits

    def lacking(self, row, length):
        return max(-(-length // self.layout.page_size) - len(self.owned[row]), 0)

    def grants(self, wishes, max_new):
        """Whether rows get room for so many tokens, {row: length}."""
        lacking = {row: self.lacking(row, length) for row, length in wishes.items()}
        total = sum(lacking.values())
        return (
            all(count <= max_new for count in lacking.values())
            and all(len(self.owned[row]) + count <= self.pages_per_row for row, count in lacking.items())
            and self.fits(total, total)
        )

    def retire(self, row, length, window, max_retired, prefix_sharing):
        """Page by page: one is dead when its last token lies before what may still be looked at."""
        page = self.layout.page_size
        kept = window
        if prefix_sharing:
            kept = page
            while kept < window:
                kept += page
        for _ in range(max_retired):
            due = self.retired[row]
            if due == len(self.owned[row]) or (due + 1) * page > length - kept:
                return
            virtual = self.owned[row][due]
            del self.place["swa"][virtual], self.content["swa"][virtual]
            self.retired[row] += 1

    def release(self, row):
        for virtual in self.owned[row]:
            for kind in self.layout.kinds:
                self.place[kind].pop(virtual, None)
                self.content[kind].pop(virtual, None)
        self.owned[row], self.retired[row] = [], 0

    def adopt(self, wishes, device):
        """Enters what the device handed out for granted wishes, and where it moved pages to meanwhile."""
        for column, pages in enumerate(self.place.values()):
            virtual = np.fromiter(pages, int, len(pages))
            physical = device.v2p[virtual, column]
            for index in np.flatnonzero(physical != np.fromiter(pages.values(), int, len(pages))):
                pages[int(virtual[index])] = int(physical[index])
                self.moves += 1
        new = []
        for row, length in wishes.items():
            for _ in range(self.lacking(row, length)):
                virtual = int(device.page_table[row, len(self.owned[row])])
                assert virtual not in self.place["full"] and virtual > 0, "a page in use is handed out again"
                self.owned[row].append(virtual)
                for column, kind in enumerate(self.layout.kinds):
                    self.place[kind][virtual] = int(device.v2p[virtual, column])
                    self.content[kind][virtual] = 0
                new.append((row, len(self.owned[row]) - 1, virtual))
        return new

    # What must hold

    def check(self, device):
        """The device state says what the clerk says, in every table."""
        layout = self.layout
        rows = len(self.owned) + 1
        table = np.zeros((rows, self.pages_per_row), np.int32)
        counts = np.zeros((2, rows), np.int32)
        v2p = np.full_like(device.v2p, -1)
        v2p[0] = 0
        for row, pages in self.owned.items():
            table[row, : len(pages)] = pages
            counts[:, row] = len(pages), self.retired[row]
        for column, kind in enumerate(layout.kinds):
            for virtual, physical in self.place[kind].items():
                v2p[virtual, column] = physical
        np.testing.assert_array_equal(device.page_table, table)
        np.testing.assert_array_equal(device.rows, counts)
        np.testing.assert_array_equal(device.v2p, v2p)
        self._check_disjoint()
        self._check_conserved(device)

    def _check_disjoint(self):
        """No two pages that are alive share a unit, whatever their kinds, and none lies in a sink."""
        layout = self.layout
        spans = sorted(
            (page * layout.page_units(kind), (page + 1) * layout.page_units(kind))
            for kind, pages in self.place.items()
            for page in pages.values()
        )
        end = max(map(layout.page_units, layout.kinds))  # where the largest sink ends
        for start, stop in spans:
            assert start >= end, "pages overlap, or one overlaps a sink"
            end = stop
        assert end <= layout.units

    def _check_conserved(self, device):
        """Every page is free or in use, once; the tables of owners and of holes are inverse to what they invert."""
        layout, kinds = self.layout, len(self.layout.kinds)
        (virtual, free_slots, swa_low), span, holes = np.split(device.counters, [3, 3 + kinds])
        free = device.free_virtual[1 : 1 + virtual].tolist()
        in_use = list(self.place["full"])
        assert sorted(free + in_use) == list(range(1, len(device.v2p))) and device.free_virtual[0] == 0
        columns = np.split(device.physical, [layout.num_pages("full")], axis=1)
        for index, kind in enumerate(layout.kinds):
            owner, stack, place = columns[index]
            want = np.full(layout.num_pages(kind), -1)
            want[: layout.min_page(kind)] = 0
            for page, physical in self.place[kind].items():
                want[physical] = page
            np.testing.assert_array_equal(owner, want)
            cells = np.arange(1, 1 + holes[index])
            first = layout.num_pages(kind) - span[index] if kind == "full" else layout.min_page(kind)
            spanned = set(range(first, first + span[index]))
            # A set of them all, so none twice and nothing lost.
            assert sorted(stack[cells].tolist() + list(self.place[kind].values())) == sorted(spanned)
            np.testing.assert_array_equal(place[stack[cells]], cells)
            assert stack[0] == place[0] == 0

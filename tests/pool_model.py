"""The allocator of a unified pool as a clerk with dictionaries would do it, and what must hold of the device's.

The clerk knows which row owns which virtual pages and which slot, where each of them lies and what it contains. It
decides by itself what is granted and what is freed; which page is handed out, and where pages move to, it reads from
the device and checks. Nothing here is shared with the implementation.
"""

import itertools

import numpy as np


class PoolModel:
    """Rows 1 .. rows - 1 of `pages_per_row` pages each in the pool of `layout`."""

    def __init__(self, layout, rows, pages_per_row):
        self.layout, self.pages_per_row = layout, pages_per_row
        self.of_tokens = [kind for kind in layout.kinds if kind != "state"]
        self.stateful = "state" in layout.kinds
        self.owned = {row: [] for row in range(1, rows)}  # row -> virtual pages
        self.retired = dict.fromkeys(self.owned, 0)  # row -> pages that are not in SWA any more
        self.slot = {}  # row -> slot of its state
        self.place = {kind: {} for kind in layout.kinds}  # kind -> virtual page or slot -> physical page
        self.content = {kind: {} for kind in layout.kinds}  # kind -> virtual page or slot -> what was written there
        self.moves = dict.fromkeys(layout.kinds, 0)

    # What the clerk decides

    def units_in_use(self):
        """Units of all pages that are alive."""
        return sum(len(pages) * self.layout.page_units(kind) for kind, pages in self.place.items())

    def usable_units(self):
        """Units of a pool without its sinks: from the first page that may be handed out to the end of the last."""
        layout = self.layout
        lowest = min(layout.min_page(kind) * layout.page_units(kind) for kind in layout.kinds)
        return layout.units - lowest

    def fits(self, full, swa, state=0):
        """Whether so many more pages fit: all that are alive and those, FULL packed down from the top, states up from
        the bottom, SWA on top of them. Where no page is in SWA, its next one has room still. Also for arrays."""
        units = {kind: self.layout.page_units(kind) for kind in self.layout.kinds}
        count = {"full": full, "swa": swa, "state": state}
        count = {kind: len(self.place[kind]) + count[kind] for kind in units}
        sinks = max(units.values())
        top = self.layout.units // units["full"] * units["full"] - count["full"] * units["full"]
        end = sinks
        for kind in ("state", "swa"):
            if kind in units:
                end = -(-end // units[kind]) * units[kind] + count[kind] * units[kind]
        room = top // units["swa"] * units["swa"] if "swa" in units else top
        spare_slots = len(self.owned) - len(self.slot)
        return (end <= room) & (top >= sinks) & ((state <= spare_slots) | (not self.stateful))

    def lacking(self, row, length):
        return max(-(-length // self.layout.page_size) - len(self.owned[row]), 0)

    def short(self, wishes):
        """Whether a row lacks pages to hold so many tokens, {row: length}, or a state."""
        return any(self.lacking(row, length) for row, length in wishes.items()) or bool(self.stateless(wishes))

    def stateless(self, rows):
        return [row for row in rows if self.stateful and row not in self.slot]

    def grants(self, wishes, max_new):
        """Whether rows get a state and room for so many tokens, {row: length}."""
        lacking = {row: self.lacking(row, length) for row, length in wishes.items()}
        total = sum(lacking.values())
        return (
            all(count <= max_new for count in lacking.values())
            and all(len(self.owned[row]) + count <= self.pages_per_row for row, count in lacking.items())
            and bool(self.fits(total, total, len(self.stateless(wishes))))
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
            for kind in self.of_tokens:
                self.place[kind].pop(virtual, None)
                self.content[kind].pop(virtual, None)
        self.owned[row], self.retired[row] = [], 0
        if row in self.slot:
            slot = self.slot.pop(row)
            del self.place["state"][slot], self.content["state"][slot]

    def adopt(self, wishes, device):
        """Enters what the device handed out for granted wishes, and where it moved pages to meanwhile. Returns what is
        new: (kind, row, column in the row or 0, virtual page or slot)."""
        for kind, pages in self.place.items():
            name = np.fromiter(pages, int, len(pages))
            physical = self._map(device, kind)[name]
            for index in np.flatnonzero(physical != np.fromiter(pages.values(), int, len(pages))):
                pages[int(name[index])] = int(physical[index])
                self.moves[kind] += 1
        new = []
        for row, length in wishes.items():
            for _ in range(self.lacking(row, length)):
                virtual = int(device.page_table[row, len(self.owned[row])])
                assert virtual not in self.place["full"] and virtual > 0, "a page in use is handed out again"
                new += [(kind, row, len(self.owned[row]), virtual) for kind in self.of_tokens]
                self.owned[row].append(virtual)
        for row in self.stateless(wishes):
            slot = int(device.rows[2, row])
            assert slot not in self.place["state"] and slot > 0, "a slot in use is handed out again"
            self.slot[row] = slot
            new.append(("state", row, 0, slot))
        for kind, _, _, name in new:
            self.place[kind][name] = int(self._map(device, kind)[name])
            self.content[kind][name] = 0
        return new

    def _map(self, device, kind):
        """The device's physical page of each virtual page or slot."""
        return device.slots[0] if kind == "state" else device.v2p[:, self.of_tokens.index(kind)]

    # What must hold

    def check(self, device):
        """The device state says what the clerk says, in every table."""
        rows = len(self.owned) + 1
        table = np.zeros((rows, self.pages_per_row), np.int32)
        counts = np.zeros((3, rows), np.int32)
        for row, pages in self.owned.items():
            table[row, : len(pages)] = pages
            counts[:, row] = len(pages), self.retired[row], self.slot.get(row, 0)
        np.testing.assert_array_equal(device.page_table, table)
        np.testing.assert_array_equal(device.rows, counts)
        maps = {"full": device.v2p[:, 0], "swa": device.v2p[:, 1], "state": device.slots[0]}
        for kind, found in maps.items():
            want = np.full_like(found, -1)
            want[0] = 0
            for name, physical in self.place.get(kind, {}).items():
                want[name] = physical
            np.testing.assert_array_equal(found, want)
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
        for free, in_use, every in (
            (device.free_virtual[: 1 + virtual], self.place["full"], len(device.v2p)),
            (device.slots[1][: 1 + free_slots], self.slot.values(), device.slots.shape[1]),
        ):
            assert sorted([*free.tolist(), *in_use]) == list(range(every)) and free[0] == 0
        sizes = [layout.num_pages(kind) for kind in layout.kinds]
        ends = []
        for index, kind in enumerate(layout.kinds):
            owner, stack, place = np.split(device.physical, np.cumsum(sizes)[:-1], axis=1)[index]
            want = np.full(layout.num_pages(kind), -1)
            want[: layout.min_page(kind)] = 0
            for name, physical in self.place[kind].items():
                want[physical] = name
            np.testing.assert_array_equal(owner, want)
            cells = np.arange(1, 1 + holes[index])
            first = {
                "full": sizes[0] - span[0],
                "swa": swa_low,
                "state": layout.min_page("state") if kind == "state" else 0,
            }
            spanned = range(first[kind], first[kind] + span[index])
            # A set of them all, so none twice and nothing lost.
            assert sorted(stack[cells].tolist() + list(self.place[kind].values())) == list(spanned)
            np.testing.assert_array_equal(place[stack[cells]], cells)
            assert stack[0] == place[0] == 0
            if spanned:
                ends.append((spanned.start * layout.page_units(kind), spanned.stop * layout.page_units(kind)))
        ends.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(ends)), "spans overlap"

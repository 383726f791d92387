"""Bugs planted in kernels: a checked run stops each of them, an interpreted one hardly any."""

import collections
import dataclasses

import kernel_problems as problems
import numpy as np
import pytest
from kernel_problems import FORWARDS, ORACLES, PLAIN, POOLED, STALE, Shape
from kernel_small import Small, run_small

from pallas_kernels import KernelFault, checked, kpool_selection, kpool_tables, streams, tables, window
from pallas_kernels.fused import Fused
from pallas_kernels.kpool_lengths import RowLengths, Schedule
from pallas_kernels.kpool_places import WritePlan
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.kpool_tables import PageTables
from pallas_kernels.operands import PageMap, Source
from pallas_kernels.span import Span
from pallas_kernels.state_indices import StateSlots
from pallas_kernels.views import Section


def _past_the_end(lanes, program, ins, outs):
    lane = lanes.iota(32)
    lanes.store(outs[0], (lane,), lanes.load(ins[0], (lane,), lane < 33), lane < 5)


def _store_past_the_end(lanes, program, ins, outs):
    lane = lanes.iota(32)
    lanes.store(outs[0], (lane,), lane, lane < 6)


def _minus_one(lanes, program, ins, outs):
    lane = lanes.iota(32)
    lanes.store(outs[0], (lane,), lanes.load(ins[0], (lane - 1,), lane < 5), lane < 5)


def _scalar_minus_one(lanes, program, ins, outs):
    lanes.store(outs[0], (0,), lanes.load(ins[0], (program - 1,)))


def _lanes_share_a_cell(lanes, program, ins, outs):
    lane = lanes.iota(32)
    lanes.store(outs[0], (lane >> 1,), lane, lane < 6)


def _masked_lane_shares_a_cell(lanes, program, ins, outs):
    lane = lanes.iota(32)
    live = lane < 3
    lanes.store(outs[0], (lanes.where(live, lane, 0),), lane + 50, live)


def _programs_share_a_cell(lanes, program, ins, outs):
    lanes.store(outs[0], (program >> 1,), program)


def _reads_another_program(lanes, program, ins, outs):
    lanes.store(outs[0], (program,), lanes.load(outs[0], (program * 0,)) + 1)


def _dead_cell(lanes, program, ins, outs):
    lane = lanes.iota(32)
    lanes.store(outs[0], (lane,), lanes.load(ins[0], (lane,), lane < 5), lane < 4)


def _too_few_indices(lanes, program, ins, outs):
    lanes.store(outs[1], (program,), 1)


def _vector_without_mask(lanes, program, ins, outs):
    lanes.store(outs[0], (lanes.iota(32) * 0 + program,), 1)


# name: (kernel, programs, what the fault says). The array read is x[5], the last cell dead; written: out 0 [5].
FAULTS = {
    "load past the end": (_past_the_end, 1, r"small, program 0: load out of range of x\[5\]: \(5,\), \(6,\)"),
    "store past the end": (_store_past_the_end, 1, r"store out of range of out 0\[5\]: \(5,\)$"),
    "load of -1": (_minus_one, 1, r"load out of range of x\[5\]: \(-1,\)$"),
    "scalar load of -1": (_scalar_minus_one, 1, r"load out of range of x\[5\]: \(-1,\)$"),
    "two lanes, one cell": (_lanes_share_a_cell, 1, r"store by several lanes of out 0\[5\]: \(0,\), \(0,\)"),
    "a masked lane in a live cell": (_masked_lane_shares_a_cell, 1, r"store by several lanes of out 0\[5\]: \(0,\)"),
    "two programs, one cell": (_programs_share_a_cell, 4, r"program [0-3]: store to cells another program wrote"),
    "reads another's cell": (
        _reads_another_program,
        4,
        r"program [0-3]: (load|store).* another program (wrote|read)",
    ),
    "dead cell": (_dead_cell, 1, r"load of dead cells of x\[5\]: \(4,\)$"),
    "too few indices": (_too_few_indices, 1, r"store of out 1\[2, 3\] with 1 indices"),
    "vector without mask": (_vector_without_mask, 1, r"store of out 0\[5\]: a vector of lanes needs a mask"),
}
LAST_DEAD = {"x": np.arange(5) == 4}


@pytest.mark.parametrize("fault", FAULTS)
def test_checked_stops_a_planted_bug(fault):
    write, programs, message = FAULTS[fault]
    with checked.declare(dead=LAST_DEAD), pytest.raises(KernelFault, match=message):
        run_small(Small(write, programs), "checked", ([1, 2, 3, 4, 5],), (5,), (2, 3))


@pytest.mark.parametrize(
    ("fault", "result"),
    [
        ("load past the end", [1, 2, 3, 4, 5]),
        ("store past the end", [0, 1, 2, 3, 4]),
        ("load of -1", [5, 1, 2, 3, 4]),  # the last cell
        ("scalar load of -1", [5, STALE, STALE, STALE, STALE]),
        ("two lanes, one cell", [1, 3, 5, STALE, STALE]),
        ("a masked lane in a live cell", [STALE, 51, 52, STALE, STALE]),  # the store of lane 0 is lost
        ("two programs, one cell", [1, 3, STALE, STALE, STALE]),
        ("reads another's cell", [-6, -5, -5, -5, STALE]),  # programs run in order
        ("dead cell", [1, 2, 3, 4, STALE]),
    ],
)
def test_interpretation_lets_most_of_them_pass(fault, result):
    write, programs, _ = FAULTS[fault]
    out, _ = run_small(Small(write, programs), "interpret", ([1, 2, 3, 4, 5],), (5,), (2, 3))
    assert out.tolist() == result


def _source_without_bounds(self, lanes, ins, row, position, live):
    return self.place.load(lanes, ins, (row, self.column(position)), live, -1), live


def _source_of_every_lane(self, lanes, ins, row, position, live):
    column = self.column(position)
    inside = (column >= 0) & (column < self.columns)
    return self.place.load(lanes, ins, (row, column), inside, -1), live & inside


def _map_without_bounds(self, lanes, ins, page, offset, shift, live):
    return self.place.load(lanes, ins, (page,), live, -1)


def _store_patched(change):
    real = Section.store

    def store(self, lanes, refs, coordinates, value, mask=None):
        changed = (coordinates, value, None) if mask is None else change(lanes, coordinates, value, mask)
        real(self, lanes, refs, *changed)

    return store


def _index_patched(self, *coordinates):
    return (coordinates[0],)


def _body_patched(kind, change):
    real = kind.body
    return lambda self, lanes, program, ins, outs: change(real, self, lanes, program, ins, outs)


def _twice(real, self, lanes, program, ins, outs):
    real(self, lanes, program >> 1, ins, outs)


def _peek(real, self, lanes, program, ins, outs):
    """Reads, after its own work, every cell of the first destination."""
    real(self, lanes, program, ins, outs)
    place = self.destination.sections[-1][1]
    lanes.loop(0, place.shape[0], lambda i, _: place.load(lanes, outs, (i, 0)[: len(place.shape)]) and None)


def _piece_without_end(piece, first, lanes, program, ins, outs):
    lanes.when(program >= first, lambda: piece.body(lanes, program - first, ins, outs))


def _part_of_the_finest(self, lanes, ins, name, row, cached, block):
    table, shift = self.destination[name], self.tables[name]
    column = (lanes.iota(kpool_tables.BLOCK) + block * kpool_tables.BLOCK) >> shift - self.step
    return table, column, column * 0, column < table.shape[1]


def _longer_history(self, xp, length, pools, column, real=kpool_selection.AppendTail._place):
    history, *rest = real(self, xp, length, pools, column)
    return history + 1, *rest


def _with(kind, name, **changes):
    """(class, method, what to replace it with): the method of an object of which some fields are others."""
    real = getattr(kind, name)
    return kind, name, lambda self, *arguments: real(dataclasses.replace(self, **changes), *arguments)


def _start_of_all_rows(self, lanes, ins, b, mask=None, real=Span.load_start):
    return real(self, lanes, ins, b, mask)[0], None


def _states_with(change, real=StateSlots.body):
    return lambda self, *arguments: real(dataclasses.replace(self, **change(self)), *arguments)


def _longer(place):
    return dataclasses.replace(place, shape=(1000,))


def _states_of_the_sink(self, lanes, program, ins, outs):
    b = lanes.iota(4) + program * 4
    inside = b < self.B
    row = self.req_rows.load(lanes, ins, (b,), inside)
    live = inside & (row >= 0) & (row < self.slots.shape[0])
    slot = self.slots.load(lanes, ins, (row,), live, -1)
    self.out.store(lanes, outs, (b,), lanes.maximum(self.table.load(lanes, ins, slot, 0, 0, live), -1), inside)


def _found_at_page_start(self, xp, entry, offset, physical, live, real=Slots._found):
    slot, virtual = real(self, xp, entry, offset, physical, live)
    return xp.where(slot < 0, slot, slot - offset), virtual


def _place_of_pools_behind(self, xp, pool, live, cached, real=WritePlan._position):
    return real(self, xp, pool, live, None)


def _place_one_pool_late(self, xp, pool, live, cached, real=WritePlan._position):
    return real(self, xp, pool, live, cached + 1)


def _stride_without_last(self, lanes, split, first, count, write, real=kpool_selection.LayRagged._stride):
    real(self, lanes, split, first, count - 1, write)


TABLES = {"decode_metadata", "draft_extend_metadata", "kv_read_table"}
STREAMS = {"kv_read_stream", "extend_cache_locs"}
WINDOWS = {"draft_write_window"}
READERS = TABLES | STREAMS | WINDOWS  # of the request table
PASSES = {*PLAIN[:2], *POOLED[:2]}  # forwards: a verify and a draft extend have all that a chain has
POOLS, EXTENDS = PASSES & {*POOLED}, {PLAIN[1], POOLED[1]}
RAGGED = {"kpool_ragged_layout"}
OPERATIONS = [name for name in ORACLES if name not in {*FORWARDS} - PASSES]
KINDS = (tables.Tables, streams.Stream, window.Window)
# name: (operations that have the spot, what to replace, the fault)
BUGS = {
    "no bound on the table's columns": (
        READERS | PASSES,
        [(Source, "load", _source_without_bounds)],
        "load out of range of source",
    ),
    "no mask on the table's load": (
        READERS | PASSES,
        [(Source, "load", _source_of_every_lane)],
        "load of dead cells of source",
    ),
    "a request row as it comes": (
        READERS | PASSES,
        [(Source, "row", lambda self, xp, row: row)],
        "load out of range of source",
    ),
    "-1 in place of the sink row": (
        READERS | PASSES,
        [(Source, "row", lambda self, xp, row: xp.where((row >= 0) & (row < self.place.shape[0]), row, -1))],
        "load out of range of source.*: .-1,",
    ),
    "no bound on the map": (
        TABLES | WINDOWS | PASSES | {"kv_read_stream"},
        [(PageMap, "load", _map_without_bounds)],
        "load out of range of (v2p|full_v2p|swa_v2p|state_v2p)",
    ),
    "no mask on the stores": (
        set(OPERATIONS),
        [(Section, "store", _store_patched(lambda lanes, at, value, mask: (at, value, mask | True)))],
        "store out of range of out|store to cells another program wrote",
    ),
    "a vector stored without mask": (
        set(OPERATIONS),
        [(Section, "store", _store_patched(lambda lanes, at, value, mask: (at, value, None)))],
        "a vector of lanes needs a mask",
    ),
    "stored to b instead of (b, column)": (
        TABLES | WINDOWS,
        [
            (
                Section,
                "store",
                _store_patched(lambda lanes, at, value, mask: ((at[0], at[-1] * 0)[: len(at)], value, mask)),
            )
        ],
        "store by several lanes of out",
    ),
    "masked lanes sent to cell 0": (
        set(OPERATIONS) - {"kpool_append_tail"},  # whose last vector, which has some, writes other cells
        [
            (
                Section,
                "store",
                _store_patched(
                    lambda lanes, at, value, mask: ([lanes.where(mask, x, 0) for x in at], value, mask),
                ),
            )
        ],
        "store by several lanes of out",
    ),
    "one index for two dimensions": (
        READERS,
        [(Section, "index", _index_patched)],
        "with 1 indices",
    ),
    "two programs for one part": (
        READERS,
        [(kind, "body", _body_patched(kind, _twice)) for kind in KINDS],
        "store to cells another program wrote",
    ),
    "a destination read": (
        READERS,
        [(kind, "body", _body_patched(kind, _peek)) for kind in KINDS],
        "(load of cells another program wrote|store to cells another program read)",
    ),
    "offsets that forget a request": (
        {"extend_cache_locs"},
        [(streams.Stream, "_sum_before", lambda self, lanes, b, ins: b * 0)],
        "store to cells another program wrote",
    ),
    "pieces without a last program": (
        PASSES,
        [(Fused, "_run", staticmethod(_piece_without_end))],
        "out of range|another program (wrote|read)",
    ),
    "a coarse table in lanes of the finest": (
        POOLS,
        [(PageTables, "_part", _part_of_the_finest)],
        "store by several lanes of out",
    ),
    "no bound on the slots of requests": (
        PASSES,
        [(StateSlots, "body", _states_with(lambda self: {"slots": _longer(self.slots)}))],
        "load out of range of slot_of_req",
    ),
    "no bound on the map of states": (
        PASSES,
        [
            (
                StateSlots,
                "body",
                _states_with(lambda self: {"table": dataclasses.replace(self.table, place=_longer(self.table.place))}),
            )
        ],
        "load out of range of state_v2p",
    ),
    "a state of row 0 and of slot 0": (
        PASSES,
        [(StateSlots, "body", _states_of_the_sink)],
        "load of dead cells of (slot_of_req|state_v2p)",
    ),
    "states at request rows": (
        PASSES,
        [_with(StateSlots, "body", slots=None)],
        "load of dead cells of state_v2p",
    ),
    "no end of the places": (
        RAGGED,
        [(kpool_selection.LayRagged, "sizes", property(lambda self: (1000, 1000)))],
        "load of dead cells of page_table|out of range",
    ),
    "a row that reads the next one's selection": (
        {"kpool_append_tail"},
        [(kpool_selection.AppendTail, "_place", _longer_history)],
        "load (out of range|of dead cells) of topk_result",
    ),
}
# name: (operations, what to replace). No access is wrong, but a result is.
WRONG = {
    "sums of a chunk forgotten": (POOLS, [(RowLengths, "_add", staticmethod(lambda total, more: more))]),
    "rows that see past the limit": ({POOLED[0]}, [_with(Span, "load", limit=None)]),
    "keys past the limit": (PASSES, [_with(tables.Count, "load", limit=None)]),
    "pages past the limit": (POOLS, [_with(Span, "load_cached", limit=None)]),
    "new rows that are no keys": (EXTENDS, [_with(tables.Count, "load", more=None)]),
    "new rows without pages": ({POOLED[1]}, [_with(Span, "load_cached", new=None)]),
    "new rows that begin too early": (EXTENDS, [_with(Span, "load_start", before=False)]),
    "new rows that see too little": ({POOLED[1]}, [_with(Span, "load", before=False)]),
    "rows that are no tokens, written": (EXTENDS, [(Span, "load_start", _start_of_all_rows)]),
    "ids behind the anchor, left": (PASSES, [_with(window.Window, "body", fill=False)]),
    "states at virtual slots": (PASSES, [_with(StateSlots, "body", table=PageMap("identity"))]),
    "states of the first requests alone": (PASSES, [(StateSlots, "programs", property(lambda self: 1))]),
    "a slot without its place in the page": (POOLS, [(Slots, "_found", _found_at_page_start)]),
    "places of pools behind the table": (POOLS, [(WritePlan, "_position", _place_of_pools_behind)]),
    "places of pools behind the forward": ({POOLED[1]}, [(WritePlan, "_position", _place_one_pool_late)]),
    "a processor forgotten": (POOLS, [(Schedule, "processors", property(lambda self: 11))]),
    "0 in place of nothing": ({"kpool_append_tail"}, [(kpool_selection, "NOTHING", 0)]),
    "the last place forgotten": (RAGGED, [(kpool_selection.LayRagged, "_stride", _stride_without_last)]),
}
# Wider than its source, in pages that are smaller than a tiny block.
PLANTED = Shape(5, 3, 6, 43, (4, 5), 9, 2, "page", "pages", "arrays", zero_tail=False)


def planted_problems(operation):
    """Ordinary problems, each with the cells that it must not read declared dead."""
    for seed in range(20):
        problem = problems.ordinary(operation, PLANTED, seed)
        with checked.declare(dead=problem.dead(), seed=seed):
            yield problem


def each_spot(bugs):
    """Each bug in each operation that it can be planted in."""
    return pytest.mark.parametrize(
        ("bug", "operation"), [(bug, o) for bug in bugs for o in OPERATIONS if o in bugs[bug][0]]
    )


def plant(monkeypatch, changes):
    problems.tiny_blocks(monkeypatch)
    for kind, name, change in changes:
        monkeypatch.setattr(kind, name, change)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_checked_passes_ordinary_inputs(operation, monkeypatch):
    problems.tiny_blocks(monkeypatch)
    for problem in planted_problems(operation):
        problem.check("checked")


@each_spot(BUGS)
def test_checked_stops_a_bug_planted_in_an_operation(bug, operation, monkeypatch):
    """On one of the same inputs."""
    _, changes, message = BUGS[bug]
    plant(monkeypatch, changes)
    with pytest.raises(KernelFault, match=message):
        collections.deque((problem.run("checked") for problem in planted_problems(operation)), maxlen=0)


@each_spot(WRONG)
def test_the_oracle_finds_a_bug_planted_in_an_operation(bug, operation, monkeypatch):
    """On one of the same inputs, too."""
    plant(monkeypatch, WRONG[bug][1])
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        collections.deque((problem.check("checked") for problem in planted_problems(operation)), maxlen=0)


def test_interpretation_is_right_with_a_bug_that_a_gpu_may_crash_on(monkeypatch):
    """The table is read for lanes past the live length too; here their values are thrown away."""
    shape = dataclasses.replace(PLANTED, NV=10)  # compiled for this test alone
    monkeypatch.setattr(Source, "load", _source_of_every_lane)
    problems.ordinary("kv_read_table", shape, 0).check("interpret")

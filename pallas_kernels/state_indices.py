"""Which recurrent states a step reads and writes: the state slot of each request, and the rows whose states it keeps.

A program handles 128 requests.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import Destination
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import Inputs, PageMap, scalar_array, scalar_value
from pallas_kernels.views import Array, Section, View, section

BLOCK = 128  # requests a program handles
SKIP = -1  # the index and the step of a request that has none


class CommitSteps(NamedTuple):
    """Which of the states that a verify forward kept, one for each of its rows, are copied. -1 stands for none.

    last_step    int32[B]  the state after the last token that a request committed
    track_step   int32[B]  the state at the last grid point that it reached; None where no states are tracked
    """

    last_step: Array
    track_step: Array | None = None


def replay_state_indices(
    req_rows: Array,
    slot_of_req: Array,
    out: Array,
    *,
    valid: int | jax.Array,
    v2p: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Find the state slot of each request, and clear the request rows of padding.

        out[b] = v2p[slot_of_req[req_rows[b]]]     of a valid request; without v2p: slot_of_req[req_rows[b]]
        out[b] = -1                                of padding, and req_rows[b] = 0

    A valid request has -1 too where the row lies outside slot_of_req, the slot is negative or outside v2p, or v2p holds
    a negative number: consumers skip it. Whatever a padded request's row holds, nothing is read with it.

    Args:
      req_rows: int[B], row of each request in the request table. Both a source and a destination.
      slot_of_req: int[R], state slot of each request row, virtual if v2p is given.
      out: int32[B], destination. Donate it and `req_rows` to the surrounding jit and both are written in place.
      valid: which requests are none of padding: bool[B], or the number of them, which then come first: a Python integer
        or an integer array of one element.
      v2p: int[NS], physical slot of each virtual one, -1 where unbound.
      backend: as in decode_metadata.

    Returns:
      (out, req_rows) after; both int32.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the state indices of a replayed step in SGLang's hybrid attention backends, their contract restated.

    >>> import jax.numpy as jnp
    >>> rows, slots, v2p = jnp.array([2, 1, 7]), jnp.array([0, 3, 1]), jnp.array([0, 8, -1, 5])
    >>> indices, rows = replay_state_indices(rows, slots, jnp.zeros(3, jnp.int32), valid=2, v2p=v2p)
    >>> indices.tolist(), rows.tolist()
    ([8, 5, -1], [2, 1, 0])
    """
    backends.check(backend)
    operands.check_integers("req_rows", req_rows, 1)
    batch = req_rows.shape[0]
    buffers.check_array("out", out, (batch,))
    if not isinstance(req_rows, View):
        req_rows = operands.as_int32(req_rows)
    for name, array in (("out", out), ("req_rows", req_rows)):
        section(name, array, written=True)  # names the argument if it cannot be a destination
    both = {"out": out, "req_rows": req_rows}
    flat, destination = buffers.flatten(both, tuple(both))
    inputs = Inputs()
    slots = inputs.add("slot_of_req", slot_of_req, 1)
    if slots.shape[0] == 0:
        raise ValueError("slot_of_req has no rows: it needs at least row 0, the sink row")
    table = operands.make_map(inputs, v2p, None)
    mask = getattr(valid, "dtype", None) == jnp.bool_
    if mask and valid.shape != (batch,):
        raise ValueError(f"valid is {buffers.describe(valid)}: a mask must be bool[{batch}], one a request")
    count = inputs.add("valid", valid.astype(jnp.int32), 1) if mask else inputs.scalar("valid", valid)
    if batch == 0:
        return out, req_rows
    operation = ReplayIndices(batch, destination, slots, table, count, mask, tuple(inputs.labels))
    after = buffers.unflatten(both, backends.run(operation, backend, tuple(inputs.arrays), flat), destination)
    return after["out"], after["req_rows"]


@dataclasses.dataclass(frozen=True)
class ReplayIndices:
    """One call: an `Operation` (see lanes.py). `valid` is a mask of the requests if `mask`, or their number."""

    B: int
    destination: Destination
    slots: Section
    table: PageMap
    valid: int | Section
    mask: bool
    labels: tuple[str, ...]
    name = "replay_state_indices"
    reference_is_faster = True  # a launch costs more than XLA's fusion of so little

    @property
    def programs(self) -> int:
        return -(-self.B // BLOCK)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        b = lanes.iota(lanes.width(self.B, BLOCK)) + program * BLOCK
        inside = b < self.B
        if self.mask:
            valid = self.valid.load(lanes, ins, (b,), inside) > 0
        else:
            valid = inside & (b < scalar_value(self.valid, lanes, ins))
        row = self.destination["req_rows"].load(lanes, outs, (b,), inside)
        live = valid & (row >= 0) & (row < self.slots.shape[0])
        slot = self.slots.load(lanes, ins, (row,), live, SKIP)
        index = lanes.maximum(self.table.load(lanes, ins, slot, 0, 0, live), SKIP)
        self.destination["out"].store(lanes, outs, (b,), index, inside)
        self.destination["req_rows"].store(lanes, outs, (b,), lanes.where(valid, row, 0), inside)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        b = lax.iota(jnp.int32, self.B)
        valid = self.valid.read(inputs) > 0 if self.mask else b < scalar_array(self.valid, inputs)
        row = self.destination.read(outputs, "req_rows")
        live = valid & (row >= 0) & (row < self.slots.shape[0])
        slot = jnp.where(live, self.slots.read(inputs)[jnp.where(live, row, 0)], SKIP)
        index = jnp.maximum(self.table.gather(inputs, slot, 0, 0), SKIP)
        return self.destination.write(outputs, {"out": index, "req_rows": jnp.where(valid, row, 0)})


@dataclasses.dataclass(frozen=True)
class StateSlots:
    """A piece of a launch (see fused.py): the state slot of each request, -1 where its row or its slot is 0 or less.

    out[b] = table[slots[req_rows[b]]]      with no slots: table[req_rows[b]]
    """

    B: int
    out: Section
    req_rows: Section
    slots: Section | None
    table: PageMap

    @property
    def programs(self) -> int:
        return -(-self.B // BLOCK)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        b = lanes.iota(lanes.width(self.B, BLOCK)) + program * BLOCK
        inside = b < self.B
        slot = self.req_rows.load(lanes, ins, (b,), inside)
        live = inside & (slot > 0)
        if self.slots is not None:
            live = live & (slot < self.slots.shape[0])
            slot = self.slots.load(lanes, ins, (slot,), live, SKIP)
            live = live & (slot > 0)
        index = lanes.maximum(self.table.load(lanes, ins, slot, 0, 0, live), SKIP)
        self.out.store(lanes, outs, (b,), index, inside)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        slot = self.req_rows.read(inputs)
        live = slot > 0
        if self.slots is not None:
            live = live & (slot < self.slots.shape[0])
            slot = jnp.where(live, self.slots.read(inputs)[jnp.where(live, slot, 0)], SKIP)
            live = live & (slot > 0)
        index = jnp.maximum(self.table.gather(inputs, jnp.where(live, slot, SKIP), 0, 0), SKIP)
        return self.out.write(outputs, index)


def commit_track_indices(
    accept_lens: Array,
    seq_lens: Array,
    out: CommitSteps,
    *,
    num_draft_tokens: int,
    interval: int | None = None,
    accept_index: Array | None = None,
    backend: str | None = None,
) -> CommitSteps:
    """Say which of the D states kept by a verify forward each request commits, and which it tracks.

    Of the c = accept_lens[b] tokens that a request commits, the state after the last one becomes its state. States are
    tracked at multiples of `interval` tokens; the last such point that the round reached is that of token k:

        last_step[b]  = node(c - 1)
        track_step[b] = node(k), k = end - seq_lens[b] - 1    where end = (seq_lens[b] + c) // interval * interval
                                                              is more than seq_lens[b]
        node(i)       = i                                     of a chain
                      = accept_index[b, i] - b * D            of a tree: its i-th accepted node

    A step is -1 where there is none: nothing was accepted, no point was reached, or the node is not one of 0 .. D - 1.
    With interval 64: (62 tokens, 4 more) tracks 1, (63, 1) tracks 0, (64, 3) and (60, 3) nothing.

    Args:
      accept_lens: int[B], tokens each request commits in this round, 0 of padding.
      seq_lens: int[B], tokens committed before the round.
      out: destination; without `interval` its track_step may be None and is -1 throughout if not.
      num_draft_tokens: D, rows a request of the verify forward (static).
      interval: tokens from one tracked state to the next (static); None tracks none.
      accept_index: int[B, D], of a tree the accepted nodes in order, as rows of the whole forward; None for a chain.
      backend: as in decode_metadata.

    Returns:
      CommitSteps after, in place where `out` is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the commit and the tracking of Mamba states in SGLang's speculative workers, their contract restated.

    >>> import jax.numpy as jnp
    >>> out = CommitSteps(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
    >>> lens, before = jnp.array([4, 1, 0]), jnp.array([62, 64, 5])
    >>> [x.tolist() for x in commit_track_indices(lens, before, out, num_draft_tokens=4, interval=64)]
    [[3, 0, -1], [1, -1, -1]]
    """
    backends.check(backend)
    operands.check_integers("accept_lens", accept_lens, 1)
    batch = accept_lens.shape[0]
    rows = _at_least_one("num_draft_tokens", num_draft_tokens)
    if interval is not None:
        interval = _at_least_one("interval", interval)
    if not isinstance(out, CommitSteps):
        raise ValueError(f"out is a {type(out).__name__}: give CommitSteps")
    if out.track_step is None and interval is not None:
        raise ValueError(f"interval={interval} was given but out.track_step is None: give it or leave interval out")
    for name, array in out._asdict().items():
        if array is not None or name == "last_step":
            buffers.check_array(f"out.{name}", array, (batch,))
    flat, destination = buffers.flatten(out, out._fields)
    inputs = Inputs()
    lengths, before = inputs.add("accept_lens", accept_lens, 1), inputs.add("seq_lens", seq_lens, 1, batch)
    nodes = None if accept_index is None else inputs.add("accept_index", accept_index, 2, batch)
    if nodes is not None and nodes.shape[1] != rows:
        raise ValueError(f"accept_index has shape {nodes.shape}: it must have num_draft_tokens={rows} columns")
    if batch == 0:
        return out
    operation = CommitTrack(batch, rows, interval, destination, lengths, before, nodes, tuple(inputs.labels))
    return buffers.unflatten(out, backends.run(operation, backend, tuple(inputs.arrays), flat), destination)


@dataclasses.dataclass(frozen=True)
class CommitTrack:
    """One call: an `Operation` (see lanes.py)."""

    B: int
    D: int
    interval: int | None
    destination: Destination
    accept_lens: Section
    seq_lens: Section
    accept_index: Section | None
    labels: tuple[str, ...]
    name = "commit_track_indices"
    reference_is_faster = True  # a launch costs more than XLA's fusion of so little

    @property
    def programs(self) -> int:
        return -(-self.B // BLOCK)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        b = lanes.iota(lanes.width(self.B, BLOCK)) + program * BLOCK
        inside = b < self.B

        def node(i, live):
            return self.accept_index.load(lanes, ins, (b, i), inside & live)

        lengths, before = (place.load(lanes, ins, (b,), inside) for place in (self.accept_lens, self.seq_lens))
        for name, value in self._steps(lanes, lanes.div, b, lengths, before, node).items():
            self.destination[name].store(lanes, outs, (b,), value, inside)

    def _steps(self, xp, div, b, lengths, before, node) -> dict:
        """The values of the destinations, for a kernel or in jnp.

        div     divides a number >= 0 by a constant
        node    reads accept_index of request b where its second argument holds
        """

        def step(i):
            live = (i >= 0) & (i < self.D)
            if self.accept_index is not None:
                i = node(i, live) - b * self.D
                live = live & (i >= 0) & (i < self.D)
            return xp.where(live, i, SKIP)

        steps = {"last_step": step(lengths - 1)}
        if "track_step" in self.destination:
            steps["track_step"] = b * 0 + SKIP
        if self.interval is not None:
            point = div(before + xp.maximum(lengths, 0), self.interval) * self.interval
            steps["track_step"] = step(point - before - 1)  # negative if the point is not of this round
        return steps

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        b = lax.iota(jnp.int32, self.B)

        def node(i, live):
            return self.accept_index.read(inputs)[b, jnp.where(live, i, 0)]

        lengths, before = self.accept_lens.read(inputs), self.seq_lens.read(inputs)
        return self.destination.write(outputs, self._steps(jnp, jnp.floor_divide, b, lengths, before, node))


def _at_least_one(name: str, value) -> int:
    """The Python integer of a static number >= 1, or raise ValueError."""
    number = operands.check_static(name, value)
    if number < 1:
        raise ValueError(f"{name}={number}: it must be 1 or more")
    return number

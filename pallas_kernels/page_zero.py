"""page_zero: zeroes pages of several sizes in one buffer, in one launch that ends at once when there are none.

The programs are S splits of G groups. A group takes every G-th entry of the list, and its splits share each page: large
pages have many splits and few groups, so that one page alone is written at full bandwidth; small pages the reverse.

    page of 2 turns, 8 programs:   S = 2, G = 4    program 5 = split 1 of group 2: turn 1 of pages 2, 6, 10, ...
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels import operands
from pallas_kernels.buffers import describe
from pallas_kernels.lanes import Lanes, as_bits, from_bits
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Section

PROGRAMS = 528  # four for each of an H200's 132 multiprocessors
BLOCK = 1024  # cells of a store; 16 bytes or more a thread
TURN = 4  # stores between two looks at a loop's end
ENTRIES = 1024  # of the list that are looked at together


def page_zero(
    buffer: jax.Array, pages: jax.Array, *, page_units: tuple[int, ...], backend: str | None = None
) -> jax.Array:
    """Zero whole pages of a buffer that pages of several kinds share.

    For each kind k and each entry p = pages[k, n] > 0:

        buffer[p * page_units[k] : (p + 1) * page_units[k]] = 0

    Every other cell keeps its value. An entry of 0 is skipped: page 0 is the sink. So is a negative one, and a page
    that does not lie wholly inside the buffer. The pages listed must not overlap.

    Args:
      buffer: any dtype, [units, U], U cells a unit. Donate it to the surrounding jit and it is written in place.
      pages: int[K, N], up to N pages of each of K kinds, in any order.
      page_units: units a page of each kind (static).
      backend: as in decode_metadata.

    Returns:
      The buffer after.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the zeroing of pages on hand-out in SGLang's unified KV memory, its contract restated; the design is ours.

    >>> import jax.numpy as jnp
    >>> pages = jnp.array([[2, 0], [0, 1]])  # page 2 of two units, page 1 of one unit
    >>> page_zero(jnp.ones((6, 2)), pages, page_units=(2, 1))[:, 0].tolist()
    [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    """
    backends.check(backend)
    if getattr(buffer, "ndim", None) != 2:
        raise ValueError(f"buffer is {describe(buffer)}: it must be an array [units, U]")
    operands.check_integers("pages", pages, 2)
    units = _check_units(page_units, pages.shape[0])
    inputs = Inputs()
    place = inputs.add("pages", pages, 2)
    most = max((n for n in units if n <= buffer.shape[0]), default=0) * buffer.shape[1]
    if most > 2**31 - 1 - BLOCK * TURN:
        raise ValueError(f"page_units={units}: a page of {most} cells is more than an int32 can index")
    operation = PageZero(buffer.shape, units, place)
    if operation.programs == 0:
        return buffer
    return backends.run(operation, backend, tuple(inputs.arrays), (buffer,))[0]


@dataclasses.dataclass(frozen=True)
class PageZero:
    """One call: an `Operation` (see lanes.py). `shape` is the buffer's."""

    shape: tuple[int, int]
    page_units: tuple[int, ...]
    pages: Section
    labels = ("pages",)
    name = "page_zero"
    reference_is_faster = False

    def turns(self, kind: int) -> int:
        """Turns of a program that a page takes."""
        return -(-self.page_units[kind] * self.shape[1] // (BLOCK * TURN))

    @property
    def last(self) -> tuple[int, ...]:
        """The last page of each kind that lies inside the buffer."""
        return tuple(self.shape[0] // units - 1 for units in self.page_units)

    @property
    def splits(self) -> int:
        """Programs that share a page."""
        return min(PROGRAMS, max((self.turns(k) for k, last in enumerate(self.last) if last > 0), default=0))

    @property
    def groups(self) -> int:
        """Groups of programs that share the list."""
        return min(PROGRAMS // max(self.splits, 1), self.pages.shape[1])

    @property
    def programs(self) -> int:
        return self.splits * self.groups

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        group = lanes.div(program, self.splits)
        split = program - group * self.splits
        entries = -(-self.pages.shape[1] // self.groups)
        width = lanes.width(entries, ENTRIES)
        found, some = [], None  # all entries are loaded before anything waits for one
        for kind, last in enumerate(self.last):
            for first in range(0, entries if last > 0 else 0, width):
                entry = (lanes.iota(width) + first) * self.groups + group
                page = self.pages.load(lanes, ins, (kind, entry), entry < self.pages.shape[1])
                live = lanes.where((page > 0) & (page <= last), 1, 0)
                found.append((kind, page, live))
                some = live if some is None else some | live

        def zero():
            for kind, page, live in found:
                self._zero_each(lanes, split, kind, page, live, outs)

        lanes.when(lanes.sum(some) > 0, zero)

    def _zero_each(self, lanes: Lanes, split, kind: int, page, live, outs: tuple) -> None:
        """This split's part of the pages in the lanes where `live` is 1, one page after the other."""
        rank = lanes.prefix_sum(live) * live
        turns = lanes.cdiv(self.turns(kind) - split, self.splits)

        def zero(number, _):
            chosen = lanes.sum(lanes.where(rank == number + 1, page, 0))
            lanes.loop(0, turns, lambda turn, _: self._turn(lanes, kind, chosen, split + turn * self.splits, outs))

        lanes.loop(0, lanes.sum(live), zero)

    def _turn(self, lanes: Lanes, kind: int, page, turn, outs: tuple) -> None:
        """TURN blocks of cells of a page."""
        units, width = self.page_units[kind], self.shape[1]
        for block in range(min(TURN, -(-units * width // BLOCK))):
            cell = lanes.iota(BLOCK) + (turn * TURN + block) * BLOCK
            unit = lanes.div(cell, width)
            lanes.store(outs[0], (page * units + unit, cell - unit * width), 0, unit < units)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        buffer, listed = as_bits(outputs[0]), self.pages.read(inputs)
        for pages, units, last in zip(listed, self.page_units, self.last, strict=True):
            live = (pages > 0) & (pages <= last)
            (first,) = jnp.nonzero(live, size=live.size, fill_value=0)  # the entries in use, before the others
            zeros = jnp.zeros((min(units, self.shape[0]), self.shape[1]), buffer.dtype)

            def turn(rank, buffer, pages=pages, first=first, zeros=zeros, units=units):
                return lax.dynamic_update_slice(buffer, zeros, (pages[first[rank]] * units, jnp.int32(0)))

            buffer = lax.fori_loop(jnp.int32(0), live.sum(dtype=jnp.int32), turn, buffer)
        return (from_bits(buffer, outputs[0].dtype),)


def _check_units(page_units, kinds: int) -> tuple[int, ...]:
    """The units of each kind's pages, or raise ValueError."""
    try:
        units = tuple(map(operator.index, page_units))
    except TypeError as error:
        raise ValueError(f"page_units={page_units!r}: it must be integers known at compile time, one a kind") from error
    if len(units) != kinds or min(units, default=1) < 1:
        raise ValueError(f"page_units={units} for {kinds} rows of pages: give each kind the units of its page, >= 1")
    return units

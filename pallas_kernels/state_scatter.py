"""state_scatter: of the states that a verify forward kept for each row, the accepted ones go to the requests' slots.

A program moves 4096 elements of one state: it loads them all, then stores them. That of a skipped row ends at once.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.lanes import Lanes, as_bits, from_bits
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Array, Section, View, row_major, section

BLOCK = 1024  # elements of a load
BLOCKS = 4  # of a program, loaded before any is stored


def state_scatter(src: jax.Array, step: Array, dst_index: Array, out: Array, *, backend: str | None = None) -> Array:
    """Copy one of each request's D states, in every layer, to the request's slot.

        out[l, dst_index[b]] = src[l, b, step[b]]

    A row is skipped if step[b] is outside 0 .. D - 1 or dst_index[b] outside 0 .. slots - 1: neither its states nor the
    slot are touched, so both may hold anything. All other cells of `out` keep their value. The rows that are not
    skipped must have different slots. Elements are moved, bit for bit, never computed with.

    Args:
      src: [L, B, D, *inner], any dtype (with Mosaic none of one byte): in each of L layers the states of B requests
        after each of D rows. inner may be empty.
      step: int[B], which of the D states; -1 skips the request.
      dst_index: int[B], the slot; -1 skips the request.
      out: destination of the dtype of src, [L, slots, *entry], where an entry has as many cells as inner, in row-major
        order. An array, donated to be written in place; or a View with any strides of layers and slots but an entry
        without gaps: it fills a part of one row of the buffer, or whole rows. So one layer's part of a pool [units, U],
        `count` units from unit `first` on in each slot's `size` units, is

            View(pool, first * U, (1, slots, count, U), (0, size * U, U, 1))
      backend: as in decode_metadata.

    Returns:
      `out` after.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the commit of intermediate Mamba states in SGLang's speculative workers, its contract restated.

    >>> import jax.numpy as jnp
    >>> src = jnp.arange(6.0).reshape(1, 3, 2)  # three requests, two states each, of one number
    >>> step, slot = jnp.array([1, -1, 0]), jnp.array([2, 0, 3])
    >>> state_scatter(src, step, slot, jnp.full((1, 4), -7.0)).tolist()
    [[-7.0, -7.0, 1.0, 4.0]]
    """
    backends.check(backend)
    if getattr(src, "ndim", 0) < 3:
        raise ValueError(f"src is {describe(src)}: it must be an array [layers, requests, rows, ...]")
    layers, batch, rows, *inner = src.shape
    size = math.prod(inner)
    buffer, place = _destination(out, src.dtype, layers, size, inner)
    inputs = Inputs()
    steps = inputs.add("step", step, 1, batch)
    slots = inputs.add("dst_index", dst_index, 1, batch)
    operation = StateScatter(layers, batch, rows, size, place, steps, slots)
    if 0 in (src.size, place.shape[1]):
        return out
    states = jnp.asarray(src).reshape(layers * batch * rows, size)
    if max(*states.shape, *buffer.shape) > 2**31 - 1 - BLOCK * BLOCKS:
        raise ValueError(f"src is {describe(src)} and out {describe(out)}: more rows or cells than an int32 can index")
    (after,) = backends.run(operation, backend, (*inputs.arrays, states), (buffer,))
    return dataclasses.replace(out, buffer=after) if isinstance(out, View) else after.reshape(out.shape)


def _destination(out: Array, dtype, layers: int, size: int, inner: list) -> tuple[jax.Array, Section]:
    """The buffer and where in it cell c of part r of the entry of (layer, slot) lies, or raise ValueError.

    A part is what of an entry lies in one row of the buffer.
    """
    shape = getattr(out, "shape", ())
    if len(shape) < 2 or out.dtype != dtype or shape[0] != layers or math.prod(shape[2:]) != size:
        wanted = ", ".join(map(str, (layers, "slots", *inner)))
        raise ValueError(f"out is {describe(out)}: it must be {dtype}[{wanted}], as src is")
    slots, entry = shape[1], shape[2:]
    if not isinstance(out, View):
        return out.reshape(layers * slots, size), Section(
            0, 0, (layers, slots, 1, size), (slots * size, size, 0, 1), size
        )
    place = section("out", out, written=True, dtype=dtype)
    strides = [(n, stride) for n, *stride in zip(entry, place.strides[2:], row_major(entry), strict=True) if n > 1]
    if any(have != want for _, (have, want) in strides):
        raise ValueError(
            f"out has the strides {place.strides[2:]} within an entry of shape {entry}: it must be row-major without "
            "gaps; only layers and slots may be apart"
        )
    columns = size if place.columns is None else place.columns
    part = (1, size) if size <= columns else (size // columns, columns)
    return out.buffer, dataclasses.replace(
        place, shape=(layers, slots, *part), strides=(*place.strides[:2], columns if part[0] > 1 else 0, 1)
    )


@dataclasses.dataclass(frozen=True)
class StateScatter:
    """One call: an `Operation` (see lanes.py).

    size   elements of a state
    out    place of the destination: (layer, slot, part of the state, element of the part)
    """

    L: int
    B: int
    D: int
    size: int
    out: Section
    step: Section
    slot: Section
    labels = ("step", "dst_index", "src")
    name = "state_scatter"
    reference_is_faster = False

    @property
    def chunks(self) -> int:
        """Programs a state."""
        return -(-self.size // (BLOCK * BLOCKS))

    @property
    def programs(self) -> int:
        return self.L * self.B * self.chunks

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        item = lanes.div(program, self.chunks)  # l * B + b
        layer = lanes.div(item, self.B)
        b = item - layer * self.B
        step, slot = (place.load(lanes, ins, (b,)) for place in (self.step, self.slot))

        def move():
            width = lanes.width(self.size, BLOCK)
            first = (program - item * self.chunks) * (BLOCK * BLOCKS)
            moved = []
            for block in range(min(BLOCKS, -(-self.size // width))):
                element = lanes.iota(width) + (first + block * width)
                inside = element < self.size
                moved.append((element, inside, lanes.load(ins[2], (item * self.D + step, element), inside)))
            for element, inside, value in moved:
                # Of a state of one part the spare lanes lie behind it, not in a second part that would be the first.
                part = lanes.div(element, self.out.shape[3]) if self.out.shape[2] > 1 else 0
                index = (layer, slot, part, element - part * self.out.shape[3])
                self.out.store(lanes, outs, index, value, inside)

        lanes.when(self._live(step, slot), move)

    def _live(self, step, slot):
        return (step >= 0) & (step < self.D) & (slot >= 0) & (slot < self.out.shape[1])

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        buffer, steps, slots = as_bits(outputs[0]), self.step.read(inputs), self.slot.read(inputs)
        live = self._live(steps, slots)
        # A skipped row writes once more what the first of the others writes; where all are, slot 0 gets what it holds.
        b = jnp.where(live, jnp.arange(self.B), jnp.argmax(live))
        steps, slots = (jnp.where(live.any(), x[b], 0) for x in (steps, slots))
        layer = jnp.arange(self.L, dtype=jnp.int32)[:, None]
        new = as_bits(inputs[2])[(layer * self.B + b) * self.D + steps]  # [L, B, size]

        place = self.out.index(layer, slots, 0, 0)
        start = jnp.stack([jnp.broadcast_to(jnp.int32(i), new.shape[:2]) for i in place], axis=-1)
        window = self.out.shape[4 - buffer.ndim :]
        old = jax.vmap(jax.vmap(lambda at: lax.dynamic_slice(buffer, at, window)))(start)
        dims = tuple(range(len(window)))
        after = lax.scatter(
            buffer,
            start,
            jnp.where(live.any(), new.reshape(old.shape), old),
            lax.ScatterDimensionNumbers(tuple(d + 2 for d in dims), (), dims),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        return (from_bits(after, outputs[0].dtype),)

"""commit_context_rows: of the rows that a draft makes of its target's features, the accepted ones go to its cache.

A program handles one row of one layer, or a few heads of it. That of a row that is not committed ends at once: it looks
neither at the row's location nor at its K and V.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.context_places import MOST, add_locations, add_rows, check_kinds, check_rows, destinations
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Array, Section, View

HEADS = 8  # of a program: their loads wait together


def commit_context_rows(
    k: Array,
    v: Array,
    norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    locs: tuple[Array, ...],
    kinds: tuple[int, ...],
    commit: Array,
    out: tuple[Array, ...],
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Array, ...]:
    """Norm, rotate and store K, and store V, of the first commit[b] of each request's D rows, in all N layers.

        out[l][locs[kinds[l]][b, j]] = [rotate(norm_l(k[b, j, l])) of all heads | v[b, j, l] of all heads]

    for j < commit[b]. K is normed by head in float32, k / sqrt(mean(k * k) + eps) * norm[l], rounded to its dtype,
    rotated in float32, and rounded again. Element i of the first half of a head is paired with element i of the second.
    V is moved. It is one launch for any number of rows and layers.

    A row with j >= commit[b] is skipped, whatever its K, V and locations hold: they are not looked at. So is one whose
    location is outside 0 .. slots - 1. All other cells of `out` keep their value. The rows that are written must have
    different locations, but for slot 0, the sink, which is then left with anything that was there or meant for it.

    Args:
      k, v: [B, D, N, heads, hd] in float32 or bfloat16, or another float of 16 bits; hd is even. Arrays, or Views
        whose heads have no gaps, of one product's result for example.
      norm: [N, hd], any float.
      cos, sin: float32[B, D, hd // 2], of the angle at each row's position.
      locs: int[B, D] each: for each kind of page, the slots of the rows.
      kinds: for each layer, which of `locs` are its own (static).
      commit: int[B], rows to write; D and more are all of them.
      out: for each layer a destination [slots, *entry] or [pages, slots a page, *entry], the latter a power of two. An
        entry is 2 * heads * hd cells in row-major order: K of all heads, then V. An array, or a View with any strides
        but an entry without gaps: it fills a part of one row of its buffer, or whole rows. Views may share one buffer,
        those of one kind without cells in common. Of k's dtype, or of unsigned integers of its size, which then hold
        its bits. Donated, to be written in place.
      eps: of the norm (static).
      backend: as in decode_metadata.

    Returns:
      `out` after, in the same structure.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the commit of a block draft's context K/V in SGLang's DSPARK worker, its contract restated; the design is
    ours.

    >>> import jax.numpy as jnp
    >>> k, v = jnp.full((1, 2, 1, 1, 2), 3.0), jnp.full((1, 2, 1, 1, 2), 5.0)  # two rows, one layer, one head
    >>> cos, sin = jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1))  # a quarter turn
    >>> call = dict(norm=jnp.ones((1, 2)), cos=cos, sin=sin, locs=(jnp.array([[1, 2]]),), kinds=(0,), eps=0.0)
    >>> commit_context_rows(k, v, commit=jnp.array([1]), out=(jnp.zeros((3, 4)),), **call)[0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]]
    """
    backends.check(backend)
    B, D, N, heads, hd = check_rows(k, v)
    for name, array, shape in (("norm", norm, (N, hd)), ("cos", cos, (B, D, hd // 2)), ("sin", sin, (B, D, hd // 2))):
        if getattr(array, "shape", None) != shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(array)}: it must be floats of shape {shape}, as k is {describe(k)}")
    inputs = Inputs()
    commits = inputs.add("commit", commit, 1, B)
    places = tuple(add_locations(inputs, f"locs[{i}]", array, (B, D)) for i, array in enumerate(locs))
    kinds = check_kinds(kinds, N, len(places))
    rows = tuple(add_rows(inputs, name, array) for name, array in (("k", k), ("v", v)))
    first = len(inputs.arrays)
    inputs.arrays += [norm, *(jnp.asarray(x, jnp.float32).reshape(B * D, hd // 2) for x in (cos, sin))]
    inputs.labels += ["norm", "cos", "sin"]
    buffers, sections = destinations(out, N, k.dtype, 2 * heads * hd, kinds)
    static = (B, D, N, heads, hd), float(eps), str(k.dtype), str(norm.dtype)
    operation = ContextRows(*static, commits, places, kinds, *rows, first, sections, tuple(inputs.labels))
    if 0 in (B, D, N, heads, *(place.shape[0] for place in sections)):
        return tuple(out)
    after = backends.run(operation, backend, tuple(inputs.arrays), buffers)
    return tuple(
        dataclasses.replace(old, buffer=after[place.buffer])
        if isinstance(old, View)
        else after[place.buffer].reshape(old.shape)
        for old, place in zip(out, sections, strict=True)
    )


class _Item(NamedTuple):
    """What a program handles: a row of a request, a layer, heads from this one on."""

    b: Any
    j: Any
    layer: Any
    head: Any


def _of_layer(lanes: Lanes, layer, all_layers, number):
    """number(all_layers[layer]), of what is static by layer."""
    chosen, last = number(all_layers[0]), all_layers[0]
    for index, this in enumerate(all_layers):
        if this == last:
            continue
        value, last = number(this), this
        if isinstance(chosen, int) and isinstance(value, int) and value == chosen:
            continue
        # Triton takes a choice between two bare integers for a bool.
        value, chosen = (np.int32(x) if isinstance(x, int) else x for x in (value, chosen))
        chosen = lanes.where(layer >= index, value, chosen)
    return chosen


@dataclasses.dataclass(frozen=True)
class ContextRows:
    """One call: an `Operation` (see lanes.py).

    shape   requests, rows, layers, heads, width of a head
    dtype, norm_dtype   of K and V, and of the norm's weights
    k, v    places of the rows: (request, row, layer, cell of all heads)
    norm    number of that operand; those of cosine and sine follow
    outs    place of each layer's entries: (page, slot of the page, part of the entry, cell of the part)
    """

    shape: tuple[int, int, int, int, int]
    eps: float
    dtype: str
    norm_dtype: str
    commit: Section
    locs: tuple[Section, ...]
    kinds: tuple[int, ...]
    k: Section
    v: Section
    norm: int
    outs: tuple[Section, ...]
    labels: tuple[str, ...]
    name = "commit_context_rows"
    reference_is_faster = False

    @property
    def groups(self) -> int:
        """Programs that share a row of a layer."""
        return -(-self.shape[3] // HEADS)

    @property
    def programs(self) -> int:
        return math.prod(self.shape[:3]) * self.groups

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each layer."""
        return tuple(place.shape[0] * place.shape[1] for place in self.outs)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        _, D, N, _, _ = self.shape
        item = lanes.div(program, self.groups)  # (b * D + j) * N + layer
        row = lanes.div(item, N)
        b = lanes.div(row, D)
        at = _Item(b, row - b * D, item - row * N, (program - item * self.groups) * HEADS)

        def find():
            found = [place.load(lanes, ins, (b, at.j)) for place in self.locs]
            loc = _of_layer(lanes, at.layer, self.kinds, found.__getitem__)
            live = (loc >= 0) & (loc < _of_layer(lanes, at.layer, self.slots, int))
            lanes.when(live, lambda: self._store(lanes, at, loc, self._rows(lanes, at, ins), outs))

        lanes.when(at.j < self.commit.load(lanes, ins, (b,)), find)

    def _rows(self, lanes: Lanes, at: "_Item", ins: tuple) -> list[tuple]:
        """What the program stores, vector by vector: (cells of the entry, which of them, values)."""
        heads, hd = self.shape[3:]
        here, half = min(HEADS, heads), hd // 2
        whole = heads % here == 0
        row = lambda place, cell, live: place.load(lanes, ins, (at.b, at.j, at.layer, cell), live)  # noqa: E731

        lane = lanes.iota(lanes.width(half, MOST))
        inside, keys = lane < half, []
        for head in range(here):
            live = inside if whole else inside & (at.head + head < heads)
            cells = [lane + ((at.head + head) * hd + side) for side in (0, half)]
            keys.append((cells, live, [row(self.k, cell, live) for cell in cells]))
        norms = [lanes.load(ins[self.norm], (at.layer, lane + side), inside) for side in (0, half)]
        angles = [lanes.load(ins[self.norm + i], (at.b * self.shape[1] + at.j, lane), inside) for i in (1, 2)]

        width, moved = lanes.width(here * hd, MOST), []
        for first in range(0, here * hd, width):
            cell = lanes.iota(width) + first
            live, cell = cell < here * hd, cell + at.head * hd
            live = live if whole else live & (cell < heads * hd)
            moved.append((cell + heads * hd, live, row(self.v, cell, live)))

        norms = [lanes.widen(norm, self.norm_dtype) for norm in norms]
        stored = []
        for cells, live, key in keys:
            turned = self._key(lanes, [lanes.widen(side, self.dtype) for side in key], norms, *angles)
            stored += [(cell, live, side) for cell, side in zip(cells, turned, strict=True)]
        return stored + moved

    def _key(self, lanes: Lanes, halves: list, norms: list, cos, sin) -> list:
        """The halves of a head as they are stored."""
        squares = lanes.total(halves[0] * halves[0] + halves[1] * halves[1])
        scale = lanes.rsqrt(squares * np.float32(1 / self.shape[4]) + np.float32(self.eps))
        normed = [half * scale * norm for half, norm in zip(halves, norms, strict=True)]
        first, second = (lanes.widen(lanes.narrow(half, self.dtype), self.dtype) for half in normed)
        turned = first * cos - second * sin, second * cos + first * sin
        return [lanes.narrow(half, self.dtype) for half in turned]

    def _store(self, lanes: Lanes, at: "_Item", loc, rows: list, outs: tuple) -> None:
        """Stores vectors in the layer's buffer. Layers of one buffer are told apart by numbers, others by branches."""
        alike = {}
        for layer, place in enumerate(self.outs):
            alike.setdefault((place.buffer, place.shape[2:]), []).append(layer)
        for (buffer, (parts, size)), layers in alike.items():
            places = [
                self.outs[max((i for i in layers if i <= layer), default=layers[0])] for layer in range(self.shape[2])
            ]

            def store(buffer=buffer, parts=parts, size=size, places=places):
                start = [
                    _of_layer(lanes, at.layer, places, lambda place, i=i: self._address(place, loc)[i])
                    for i in range(1 if places[0].columns is None else 2)
                ]
                for cell, live, value in rows:
                    part = lanes.div(cell, size) if parts > 1 else 0
                    index = (*(i + part for i in start[:-1]), start[-1] + (cell - part * size))
                    lanes.store(outs[buffer], index, lanes.bits(value, outs[buffer].dtype), live)

            if len(alike) == 1:
                store()
            else:
                lanes.when(functools.reduce(operator.or_, (at.layer == layer for layer in layers)), store)

    def _address(self, place: Section, loc) -> tuple:
        """Index of the first cell of the entry of a slot."""
        shift = place.shape[1].bit_length() - 1
        return place.index(loc >> shift, loc & (place.shape[1] - 1), 0, 0) if shift else place.index(loc, 0, 0, 0)

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        B, D, N, heads, hd = self.shape
        commit, locs = self.commit.read(inputs), [place.read(inputs) for place in self.locs]
        k, v = (place.read(inputs).reshape(self.shape) for place in (self.k, self.v))
        norm, cos, sin = inputs[self.norm : self.norm + 3]
        angles = (x.reshape(B, D, 1, 1, hd // 2) for x in (cos, sin))
        rows = jnp.stack([self._keys(k, norm, *angles), v], axis=3).reshape(B * D, N, 2 * heads * hd)
        wanted = jnp.arange(D, dtype=jnp.int32) < commit[:, None]
        outputs = list(outputs)
        for layer, (place, kind) in enumerate(zip(self.outs, self.kinds, strict=True)):
            live = (wanted & (locs[kind] >= 0) & (locs[kind] < self.slots[layer])).reshape(B * D)
            loc = jnp.where(live, locs[kind].reshape(B * D), 0)
            outputs[place.buffer] = self._put(outputs[place.buffer], place, loc, live, rows[:, layer])
        return tuple(outputs)

    def _keys(self, k, norm, cos, sin):
        """K as it is stored. reduce_precision: of two casts, down and up, XLA may drop both."""
        wide = k.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        kind = jnp.finfo(self.dtype)
        wide = lax.reduce_precision(wide * norm[:, None].astype(jnp.float32), kind.nexp, kind.nmant)
        first, second = jnp.split(wide, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(self.dtype)

    def _put(self, buffer, place: Section, loc, live, rows):
        """The buffer with rows [n, size] at the slots; a row that is not live puts back what the sink holds."""
        window = place.shape[4 - buffer.ndim :]
        rows = rows.reshape(-1, *window)
        if buffer.dtype != rows.dtype:
            rows = lax.bitcast_convert_type(rows, buffer.dtype)
        start = [jnp.broadcast_to(jnp.int32(i), loc.shape) for i in self._address(place, loc)]
        sink = lax.dynamic_slice(buffer, [jnp.int32(i) for i in self._address(place, 0)], window)
        rows = jnp.where(live.reshape(-1, *(1,) * len(window)), rows, sink)
        dims = tuple(range(len(window)))
        dimensions = lax.ScatterDimensionNumbers(tuple(d + 1 for d in dims), (), dims)
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.scatter(buffer, jnp.stack(start, axis=-1), rows, dimensions, mode=mode)

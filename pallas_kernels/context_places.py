"""The operands of commit_context_rows: K and V, locations, and where each layer's entries lie."""

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.buffers import check_disjoint, describe
from pallas_kernels.operands import Inputs
from pallas_kernels.views import Array, Section, View, row_major, section

MOST = 1024  # lanes of a vector, and so pairs of a head


def check_rows(k: Array, v: Array) -> tuple[int, int, int, int, int]:
    """The shape of K and V, or raise ValueError."""
    shape = getattr(k, "shape", ())
    floats = len(shape) == 5 and jnp.issubdtype(k.dtype, jnp.floating) and k.dtype.itemsize in (2, 4)
    if not floats or shape[4] % 2 or not 0 < shape[4] <= 2 * MOST:
        raise ValueError(
            f"k is {describe(k)}: it must be [requests, rows, layers, heads, head width] in float32 or a float of 16 "
            f"bits, the width even and at most {2 * MOST}"
        )
    if getattr(v, "shape", ()) != shape or v.dtype != k.dtype:
        raise ValueError(f"v is {describe(v)}: it must be {k.dtype}{list(shape)}, as k is")
    return shape


def add_locations(inputs: Inputs, name: str, array: Array, shape: tuple[int, int]) -> Section:
    """The place of a table of locations, or raise ValueError."""
    place = inputs.add(name, array, 2, shape[0])
    if place.shape != shape:
        raise ValueError(f"{name} has shape {place.shape}: it must be {shape}, as k has requests and rows")
    return place


def check_kinds(kinds, layers: int, count: int) -> tuple[int, ...]:
    """Which of `count` tables of locations is each layer's, or raise ValueError."""
    try:
        kinds = tuple(map(operator.index, kinds))
    except TypeError as error:
        raise ValueError(f"kinds={kinds!r}: it must be integers known at compile time, one a layer") from error
    if len(kinds) != layers or any(not 0 <= kind < count for kind in kinds):
        raise ValueError(f"kinds={kinds} for {layers} layers: give each the index of its own among {count} locs")
    return kinds


def add_rows(inputs: Inputs, name: str, array: Array) -> Section:
    """The place of K or V: (request, row, layer, cell of all heads), in an operand that Views may share."""
    B, D, N, heads, hd = array.shape
    if not isinstance(array, View):
        operand, shape = array.reshape(B * D * N, heads * hd), (B, D, N, heads * hd)
        place = Section(len(inputs.arrays), 0, shape, row_major(shape), heads * hd)
    else:
        operand, number = array.buffer, _number(inputs.arrays, array.buffer)
        place = section(name, array, number, dtype=array.dtype)
        if (heads > 1 and place.strides[3] != hd) or (hd > 1 and place.strides[4] != 1):
            raise ValueError(f"{name} has the strides {place.strides[3:]} of heads and cells: heads must have no gaps")
        place = dataclasses.replace(place, shape=(B, D, N, heads * hd), strides=(*place.strides[:3], 1))
    if place.buffer == len(inputs.arrays):
        inputs.arrays.append(operand)
        inputs.labels.append(name)
    return place


def _number(arrays, array) -> int:
    """Where among the arrays this one is, or would be appended."""
    return next((i for i, other in enumerate(arrays) if other is array), len(arrays))


def destinations(
    out, layers: int, dtype, size: int, kinds: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], tuple[Section, ...]]:
    """The buffers, and where in them cell c of part r of the entry of (page, slot of the page) lies, for each layer.

    A part is what of an entry lies in one row of the buffer.
    """
    if not isinstance(out, tuple | list) or len(out) != layers:
        count = len(out) if isinstance(out, tuple | list) else type(out).__name__
        raise ValueError(f"out is {count} for {layers} layers of k: give a tuple with a destination for each")
    buffers, operands, sections = [], [], []
    for number, array in enumerate(out):
        name = f"out[{number}]"
        slots, entry = _split(name, array, dtype, size)
        holder = array.buffer if isinstance(array, View) else array
        buffer = _number(buffers, holder)
        if buffer == len(buffers):
            buffers.append(holder)
            operands.append(holder if isinstance(array, View) else holder.reshape(math.prod(slots), size))
        elif not isinstance(array, View):
            raise ValueError(f"{name} is the destination of another layer, too: give each its own")
        sections.append(_place(name, array, buffer, slots, entry, size))
    for kind in set(kinds):  # Pages of two kinds may lie in one memory: that two in use never meet is not seen here.
        same = tuple((f"out[{i}]", place) for i, place in enumerate(sections) if kinds[i] == kind)
        check_disjoint(same, tuple(x.size for x in operands))
    return tuple(operands), tuple(sections)


def _split(name: str, array: Array, dtype, size: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """((pages, slots a page), shape of an entry) of a destination, or raise ValueError."""
    shape = getattr(array, "shape", ())
    at = next((at for at in (1, 2) if math.prod(shape[at:]) == size and len(shape) > at), None)
    bits = f"uint{8 * dtype.itemsize}"
    if at is None or array.dtype not in (dtype, jnp.dtype(bits)):
        raise ValueError(
            f"{name} is {describe(array)}: it must be {dtype} or {bits}, [slots, {size}], entries as k and v have them"
        )
    pages, per_page = (shape[0], 1) if at == 1 else shape[:2]
    if per_page & (per_page - 1):
        raise ValueError(f"{name} has {per_page} slots a page: it must be a power of two")
    return (pages, per_page), shape[at:]


def _place(name: str, array: Array, buffer: int, slots: tuple[int, int], entry: tuple, size: int) -> Section:
    """Where the cells of a destination lie, or raise ValueError."""
    shape = (*slots, 1, size)
    if not isinstance(array, View):
        return Section(buffer, 0, shape, row_major(shape), size)
    place = section(name, array, buffer, written=True, dtype=array.dtype)
    lead, inner = array.strides[: array.ndim - len(entry)], array.strides[array.ndim - len(entry) :]
    if any(have != want for n, have, want in zip(entry, inner, row_major(entry), strict=True) if n > 1):
        raise ValueError(
            f"{name} has the strides {inner} within an entry of shape {entry}: it must be row-major without gaps; only "
            "slots and pages may be apart"
        )
    columns = size if place.columns is None else place.columns
    parts, cells = (1, size) if size <= columns else (size // columns, columns)
    page, slot = (*lead, 0)[:2]  # slots without pages are pages of one slot
    strides = page, slot, columns if parts > 1 else 0, 1
    return dataclasses.replace(place, shape=(*slots, parts, cells), strides=strides)

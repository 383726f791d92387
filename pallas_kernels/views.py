"""Arrays that are part of a wider buffer: offset, shape and strides, in cells."""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_dataclass, data_fields=["buffer"], meta_fields=["offset", "shape", "strides"])
@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array inside a wider buffer; it may stand for any array that a kernel reads or writes.

    Cell (r, c) is cell offset + r * strides[0] + c * strides[1] of the buffer in row-major order; in a buffer of two
    dimensions no row of the view may run past the end of a row of the buffer. Cells of the buffer
    that belong to no view are neither read nor written.

    buffer    one or two dimensions, int32 where nothing else is said. One of more than 2^31 - 1 cells has two
    offset    cells before the first one (static)
    shape     of the view, such as (n,) or (rows, columns) (static)
    strides   cells from one entry to the next, one a dimension; row-major without gaps if left out (static)

    Views of one buffer that are written by one call share its operand: pass the buffer into your own `jit` and make the
    views there (two views that enter a jit are two buffers to it). Destinations that overlap are refused.

    Raises ValueError for places that are no integers >= 0; the call that uses the view raises for cells outside the
    buffer and for a buffer of another kind.

    A column of an interleaved [NV, 2] map, and a table with four guard cells around it:

    >>> import jax.numpy as jnp
    >>> View(jnp.arange(6).reshape(3, 2), offset=1, shape=(3,), strides=(2,)).read().tolist()
    [1, 3, 5]
    >>> View(jnp.arange(20), offset=4, shape=(2, 3), strides=(6, 1)).read().tolist()
    [[4, 5, 6], [10, 11, 12]]
    """

    buffer: jax.Array
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def __post_init__(self):
        shape, strides = self.shape, row_major(self.shape) if self.strides is None else self.strides
        try:
            offset, shape, strides = (
                operator.index(self.offset),
                *(tuple(map(operator.index, x)) for x in (shape, strides)),
            )
            valid = min(offset, *shape, *strides) >= 0 and 1 <= len(shape) == len(strides)
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(
                f"View of offset {self.offset}, shape {self.shape}, strides {self.strides}: give integers >= 0, and as "
                "many strides as dimensions, one or more"
            )
        for name, value in (("offset", offset), ("shape", shape), ("strides", strides)):
            object.__setattr__(self, name, value)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self):
        return self.buffer.dtype

    def read(self) -> jax.Array:
        """The cells as an array of their own."""
        return section("view", self, dtype=self.dtype).read((self.buffer,))


Array = jax.Array | View


@dataclasses.dataclass(frozen=True)
class Section:
    """Static place of a named array: which operand it lies in, and where.

    buffer    number of the operand
    offset, shape, strides   as in View
    columns   columns of an operand of two dimensions, None for one dimension
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: int | None = None

    def index(self, *coordinates) -> tuple:
        """Index into the operand of an entry: one number a dimension of the operand.

        With two dimensions no number passes 2^31, however large the operand. Worked example: offset 11 and strides
        (20, 3) in rows of 10 cells: entry (r, c) lies in row 1 + 2 * r, column 1 + 3 * c.
        """
        if self.columns is None:
            return (self._linear(self.offset, coordinates, self.strides),)
        row, column = divmod(self.offset, self.columns)
        rows, columns = zip(*(divmod(stride, self.columns) for stride in self.strides), strict=True)
        return self._linear(row, coordinates, rows), self._linear(column, coordinates, columns)

    @staticmethod
    def _linear(start: int, coordinates, strides):
        total = None
        for coordinate, stride in zip(coordinates, strides, strict=True):
            if stride:
                term = coordinate if stride == 1 else coordinate * stride
                total = term if total is None else total + term
        if total is None:
            return start
        return total + start if start else total

    def load(self, lanes, refs: tuple, coordinates: tuple, mask=None, other: int = 0):
        """The entries in a kernel body."""
        return lanes.load(refs[self.buffer], self.index(*coordinates), mask, other)

    def store(self, lanes, refs: tuple, coordinates: tuple, value, mask=None) -> None:
        """Write entries in a kernel body."""
        lanes.store(refs[self.buffer], self.index(*coordinates), value, mask)

    def read(self, buffers: tuple) -> jax.Array:
        """All entries in jnp."""
        buffer = buffers[self.buffer]
        if self._whole(buffer):
            return buffer
        if self.columns is None and self.strides == row_major(self.shape):
            return buffer[self.offset : self.offset + math.prod(self.shape)].reshape(self.shape)
        return buffer.at[self._all()].get(mode="promise_in_bounds")

    def write(self, buffers: tuple, values: jax.Array) -> tuple:
        """The buffers with all entries replaced, in jnp."""
        buffer = buffers[self.buffer]
        if self._whole(buffer):
            new = values
        elif self.columns is None and self.strides == row_major(self.shape):
            new = buffer.at[self.offset : self.offset + math.prod(self.shape)].set(values.reshape(-1))
        else:
            new = buffer.at[self._all()].set(values, mode="promise_in_bounds", unique_indices=True)
        return (*buffers[: self.buffer], new, *buffers[self.buffer + 1 :])

    def _whole(self, buffer) -> bool:
        return buffer.shape == self.shape and self.offset == 0 and self.strides == row_major(self.shape)

    def _all(self) -> tuple:
        index = self.index(*jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in self.shape), indexing="ij"))
        return tuple(jnp.broadcast_to(i, self.shape) for i in index)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def section(name: str, array: Array, buffer: int = 0, *, written: bool = False, dtype=jnp.int32) -> Section:
    """The section of an array or a view as operand number `buffer`, or raise ValueError.

    `written`: for a destination, of which no two entries may share a cell. `dtype`: what a view's buffer must hold.
    """
    if not isinstance(array, View):
        columns = array.shape[1] if array.ndim == 2 else None
        return Section(buffer, 0, tuple(array.shape), row_major(array.shape), columns)
    place = array.buffer
    if place.dtype != dtype or place.ndim not in (1, 2):
        raise ValueError(
            f"{name} is a View of {place.dtype}{list(place.shape)}: its buffer must be {jnp.dtype(dtype)}, 1-D or 2-D"
        )
    if place.ndim == 1 and place.size > 2**31 - 1:
        raise ValueError(
            f"{name} is a View of {place.size} cells in one dimension, more than an int32 can index: reshape the "
            "buffer to two"
        )
    columns = place.shape[1] if place.ndim == 2 else None
    result = Section(buffer, array.offset, array.shape, array.strides, columns)
    if math.prod(array.shape):
        _check_inside(name, result, place)
        if written:
            _check_distinct(name, result)
    return result


def _check_inside(name: str, s: Section, buffer) -> None:
    last = [n - 1 for n in s.shape]
    end = s.offset + sum(map(math.prod, zip(last, s.strides, strict=True)))
    if end >= buffer.size:
        raise ValueError(
            f"{name} ends at cell {end} of a buffer of {buffer.size}: make offset, shape or strides smaller"
        )
    if s.columns is not None:
        column = s.offset % s.columns + sum(n * (stride % s.columns) for n, stride in zip(last, s.strides, strict=True))
        if column >= s.columns:
            raise ValueError(
                f"{name} runs past the {s.columns} columns of its buffer: offset {s.offset}, shape {s.shape} and "
                f"strides {s.strides} must keep each row of the view inside one row of the buffer, or reshape the "
                "buffer to one dimension"
            )


def _check_distinct(name: str, s: Section) -> None:
    dims = sorted((stride, n) for stride, n in zip(s.strides, s.shape, strict=True) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            raise ValueError(
                f"{name} has shape {s.shape} and strides {s.strides}, so that entries share cells: a destination's "
                "larger stride must step over everything the smaller one reaches"
            )
        reach += stride * (n - 1)

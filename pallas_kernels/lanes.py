"""The language kernel bodies are written in: vectors of int32 lanes, masked loads and stores, sums, loops.

A body is written once, as a function of an executor's `Lanes`, and runs wherever there is an executor:

    triton      pallas_kernels/triton.py    compiled Pallas Triton; the same module interprets it on a CPU
    mosaic      pallas_kernels/mosaic.py    compiled Pallas Mosaic GPU
    checked     pallas_kernels/checked.py   NumPy, one program after another, every access checked

An operation is a frozen dataclass (see `Operation`); `pallas_kernels.backend.run` hands it to an executor:

    >>> import dataclasses, jax.numpy as jnp
    >>> from pallas_kernels import backend
    >>> @dataclasses.dataclass(frozen=True)
    ... class AddOne:
    ...     count: int
    ...     name = "add_one"
    ...     labels = ("values",)
    ...     reference_is_faster = False
    ...
    ...     @property
    ...     def programs(self):
    ...         return -(-self.count // 128)  # each handles 128 cells
    ...
    ...     def body(self, lanes, program, ins, outs):
    ...         lane = lanes.iota(128) + program * 128
    ...         live = lane < self.count
    ...         lanes.store(outs[0], (lane,), lanes.load(ins[0], (lane,), live, 0) + 1, live)
    ...
    ...     def reference(self, inputs, outputs):
    ...         return (inputs[0] + 1,)
    >>> values = jnp.array([3, 1, 4])
    >>> [backend.run(AddOne(3), name, (values,), (jnp.zeros(3, jnp.int32),))[0].tolist() for name in ("checked", None)]
    [[4, 2, 5], [4, 2, 5]]

Values are int32 and bool, scalars or vectors, with Python's operators (+ - * << >> & | and comparisons); integers
written in a body are constants. An array of any other dtype may be moved: what is loaded from it can only be stored,
bit for bit, to an array of the same dtype, as can constants. What is loaded from an array of floats may also become
float32 (`widen`), with + - * on it and float32 constants, `total` and `rsqrt`; `narrow` makes of it what can be
stored. Interpreted, a float of 16 bits is loaded and stored as an unsigned integer: `widen` and `narrow` are told of
which dtype its bits are. Rules:

* A vector has a power-of-two number of lanes (`width`); spare lanes are masked off.
* A lane whose mask is False touches no memory: a load gives it `other`, a store skips it.
* One index a dimension: a scalar or a vector, never a slice. A live lane's index is in range and not negative.
* No two lanes of one store, masked ones included, have the same index: an interpreted store writes the old value back
  through a masked lane.
* Inputs are only read. A cell of an output is written by one program, and read by no other one.
"""

import abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

Value = Any  # an int32 or bool scalar or vector of the executor at hand


class Operation(Protocol):
    """A kernel with its reference: a frozen, hashable description of one call, all shapes static.

    name        what profilers and error messages call it
    programs    programs of the launch; 0 leaves the work to the reference
    labels      name of each input, for error messages
    reference_is_faster    whether the reference was measured to be faster than the kernel at this call's shape

    An operation may also have `warps`, those of a program, where the executor has a choice.
    """

    name: str
    programs: int
    labels: tuple[str, ...]
    reference_is_faster: bool

    def body(self, lanes: "Lanes", program: Value, ins: tuple, outs: tuple) -> None:
        """One program of the kernel, in the lane language. `ins` and `outs` are references to whole arrays."""

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        """The same function of the same arrays in plain jnp: the outputs after the call."""


def power(count: int, least: int = 1) -> int:
    """The next power of two, at least `least`: lengths of vectors and sides of tiles are such."""
    return max(least, 1 << max(0, count - 1).bit_length())


class Lanes(abc.ABC):
    """The language. What all executors that trace with jax share stands here."""

    least = 32  # lanes of the smallest vector: a warp
    longest = 4096  # lanes of the longest vector that has prefix sums

    def width(self, count: int, most: int) -> int:
        """Lanes for `count` items: the next power of two, at most `most` (itself one), but no less than one warp."""
        return max(self.least, min(power(count), most))

    def iota(self, count: int) -> Value:
        """0, 1, 2, ... count - 1."""
        return lax.iota(jnp.int32, count)

    @abc.abstractmethod
    def load(self, ref, index: tuple, mask: Value | None = None, other: int = 0) -> Value:
        """ref[index] where mask, `other` elsewhere. Without a mask the index is made of scalars."""

    @abc.abstractmethod
    def store(self, ref, index: tuple, value: Value, mask: Value | None = None) -> None:
        """ref[index] = value where mask. Without a mask the index is made of scalars."""

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """a where condition, b elsewhere."""
        return jnp.where(condition, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller of a and b, lane by lane."""
        return jnp.minimum(a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of a and b, lane by lane."""
        return jnp.maximum(a, b)

    def div(self, a: Value, b: int) -> Value:
        """a / b for a constant b > 0, cut towards zero, which is one instruction less than rounding down."""
        return lax.div(a, np.int32(b))

    def cdiv(self, a: Value, b: int) -> Value:
        """a / b rounded up, for a > -b; smaller a give a value <= 0 too."""
        return self.div(a + np.int32(b - 1), b)

    def sum(self, vector: Value) -> Value:
        """The sum of all lanes, a scalar."""
        return jnp.sum(vector, dtype=jnp.int32)

    def bits(self, value: Value, dtype) -> Value:
        """A value that was loaded, for an array of another dtype of the same size: its bits stay as they are."""
        return value if value.dtype == dtype else lax.bitcast_convert_type(value, dtype)

    def widen(self, value: Value, dtype) -> Value:
        """float32 of a value of the float `dtype`, or of its bits."""
        return self.bits(value, dtype).astype(jnp.float32)

    def narrow(self, value: Value, dtype) -> Value:
        """float32 rounded to the float `dtype`."""
        return value.astype(dtype)

    def total(self, vector: Value) -> Value:
        """The sum of all float32 lanes, a scalar, in any order."""
        return jnp.sum(vector)

    def rsqrt(self, scalar: Value) -> Value:
        """1 / sqrt(scalar), of a float32."""
        return lax.rsqrt(scalar)

    @abc.abstractmethod
    def prefix_sum(self, vector: Value) -> Value:
        """The sum of each lane and those before it."""

    def when(self, condition: Value, action) -> None:
        """action() where the scalar condition holds."""
        pl.when(condition)(action)

    def loop(self, lower: Value, upper: Value, step, carry: Value | None = None) -> Value | None:
        """carry = step(i, carry) for i from lower to upper - 1, both known only at run time; the last carry.

        A carry is one int32 scalar that the step computes, or None.
        """
        return lax.fori_loop(lower, upper, step, carry)


def as_bits(array: jax.Array) -> jax.Array:
    """Floats of 16 bits or fewer as integers, to be moved: XLA for CPUs may go through float32 and change NaNs.

    A cell that holds half of a wider number may look like such a NaN.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize > 2:
        return array
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def from_bits(array: jax.Array, dtype) -> jax.Array:
    """The inverse of `as_bits`."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)

"""Heads of rows, in tiles: normed and turned to their positions, or as they are.

A program takes one row and some of its heads, all of one kind: queries, keys or values. It loads the two halves of what
is turned side by side, each into a tile of its own, so that channel i of the first half and channel i of the second
meet in one thread and nothing is moved between threads but the sums of the norm:

    channel of a head    0 .. half - 1   half .. 2 * half - 1   2 * half .. head_dim - 1
    tile                 first           second                 rest
    result               first * cos - second * sin
                                         second * cos + first * sin
                                                                rest

XLA makes one product of those that give queries, keys and values of the same rows, and would cut their results out of
its own before a kernel reads them, a launch each. Views are read where they lie instead.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.buffers import describe
from pallas_kernels.lanes import power
from pallas_kernels.triton import pltriton
from pallas_kernels.views import Array, View

HEADS = 8  # of a program, at most
MANY = 8  # tiles of what is not rotated, at most
CELLS = 1024  # of a tile, unless one head has more
WARPS = 4  # of a program, at most
ACCESS = 16  # bytes of a load, the longest there is
DTYPES = ("float32", "bfloat16", "float16")


def check_heads(q, k, cos, sin, q_scale, k_scale) -> None:
    """Raises ValueError for arguments against the rules of `head_rotary`."""
    if len(getattr(q, "shape", ())) != 3 or str(q.dtype) not in DTYPES:
        raise ValueError(f"q is {describe(q)}: it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}[N, heads, head_dim]")
    N, _, head_dim = q.shape
    fits = len(getattr(k, "shape", ())) == 3 and (k.shape[0], k.shape[2]) == (N, head_dim)
    if not fits or k.dtype != q.dtype:
        raise ValueError(f"k is {describe(k)}: it must be {q.dtype}[{N}, heads, {head_dim}], as q is {describe(q)}")
    for name, x in (("q", q), ("k", k)):
        if isinstance(x, View):
            check_view(name, x)
    most = head_dim // 2
    fits = len(getattr(cos, "shape", ())) == 2 and cos.shape[0] == N and 1 <= cos.shape[1] <= most
    if not fits or cos.dtype != jnp.float32:
        raise ValueError(
            f"cos is {describe(cos)}: it must be float32[{N}, half], half from 1 to {most}, as q is {describe(q)}; "
            "reshape what has more axes"
        )
    if getattr(sin, "shape", None) != cos.shape or sin.dtype != jnp.float32:
        raise ValueError(f"sin is {describe(sin)}: it must be {describe(cos)}, as cos is")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is None:
            continue
        if getattr(scale, "shape", None) != (head_dim,) or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(scale)}: it must be floats of shape ({head_dim},), or None: no norm")


def check_view(name: str, x: View) -> None:
    """Raises ValueError unless the view is columns of wider rows, heads side by side."""
    N, heads, head_dim = x.shape
    rows = x.buffer.ndim == 2 and x.buffer.shape[0] == N and x.offset + heads * head_dim <= x.buffer.shape[1]
    if not rows or x.strides != (x.buffer.shape[1], head_dim, 1):
        raise ValueError(
            f"{name} is {describe(x)}, offset {x.offset}, strides {x.strides}, in {describe(x.buffer)}: it must be "
            f"columns of a buffer [{N}, W], of strides (W, {head_dim}, 1); View.read() makes an array of any other"
        )


def rows_of(x: Array) -> tuple[jax.Array, int]:
    """[N, W], and the column at which the first head begins."""
    return (x.buffer, x.offset) if isinstance(x, View) else (x.reshape(x.shape[0], x.shape[1] * x.shape[2]), 0)


def read(x: Array) -> jax.Array:
    """[N, heads, head_dim], an array."""
    rows, first = rows_of(x)
    return jnp.asarray(rows)[:, first : first + x.shape[1] * x.shape[2]].reshape(x.shape)


# The reference --------------------------------------------------------------------------------------------------------


def turned(q, k, cos, sin, q_scale, k_scale, *, eps: float):
    """Queries and keys, as `head_rotary` says."""
    return tuple(_turned(x, cos[:, None], sin[:, None], scale, eps) for x, scale in ((q, q_scale), (k, k_scale)))


def _turned(x, cos, sin, scale, eps: float):
    x = read(x)
    wide = x.astype(jnp.float32)
    if scale is not None:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(mean + np.float32(eps)) * scale.astype(jnp.float32)
        wide = rounded(wide, x.dtype)
    half = cos.shape[-1]
    first, second = wide[..., :half], wide[..., half : 2 * half]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    rest = x if scale is None else wide.astype(x.dtype)
    return jnp.concatenate([turned, rest[..., 2 * half :]], axis=-1)


def rounded(wide, dtype):
    """float32 rounded to `dtype`, in float32. Of two casts, down and up, XLA may drop both."""
    kind = jnp.finfo(dtype)
    near = lax.reduce_precision(wide, kind.nexp, kind.nmant)
    if dtype != jnp.float16:
        return near
    # What float16 holds with fewer digits, multiples of 2 ** -24, reduce_precision makes 0.
    few = lax.round(wide * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
    # Rounding has no slope of its own: what is corrected passes none on.
    return jnp.where(jnp.abs(wide) < np.float32(2**-14), near + lax.stop_gradient(few - near), near)


# In a kernel ----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Heads of one kind: how many a row has and a program takes, and the program that is the first."""

    heads: int
    tile: int
    first: int

    @property
    def programs(self) -> int:
        """Of a row."""
        return -(-self.heads // self.tile)

    def mine(self, program):
        """Whether a program is one of these."""
        return (program >= self.first) & (program < self.first + self.programs)


def parts_of(heads: list[int], widths: list[int]) -> tuple[list[Part], int]:
    """What the programs of a row take, one kind of heads after the other, and how many programs there are.

    Args:
      heads: of each kind.
      widths: lanes of its widest tile.
    """
    parts, programs = [], 0
    for count, widest in zip(heads, widths, strict=True):
        parts.append(Part(count, max(1, min(HEADS, power(count), CELLS // widest)), programs))
        programs += parts[-1].programs
    return parts, programs


def widest_of(head_dim: int, half: int) -> int:
    """Lanes of the widest tile of heads that are turned."""
    return power(max(width for _, width in _sections(head_dim, half)))


def warps_of(parts: list[Part], widths: list[int], itemsize: int) -> int:
    """Of a program: one for each 32 loads of its widest tile."""
    accesses = max(part.tile * widest for part, widest in zip(parts, widths, strict=True)) * itemsize // ACCESS
    return max(1, min(WARPS, accesses // 32))


def turn(part: Part, head_dim: int, row, program, x, start: int, scale, angles, to, eps, interpret: bool, factor=None):
    """One program's heads, normed and turned.

    Args:
      x, row, start: [N, W], which of its rows, and the column at which the first head begins.
      scale: [head_dim] of the norm, or None.
      angles: cosine and sine, [N, half] each.
      to: to(cell, tile, mask) stores a tile; cells are those of all heads of the row, side by side.
      eps: of the norm.
      factor: factor() is what heads are multiplied by first; None: by nothing.
    """
    dtype = x.dtype
    # All loads come first, so that they wait together.
    sections = _sections(head_dim, angles[0].shape[1])
    places = [places_of(part, head_dim, program, *section) for section in sections]
    heads = [load(x, (jnp.zeros_like(cell) + row, cell + start), mask) for cell, _, mask in places]
    weights = None if scale is None else [load(scale, (channel,), mask) for _, channel, mask in places]
    _, channel, mask = places[0]
    cos, sin = (load(angle, (jnp.zeros_like(channel) + row, channel), mask) for angle in angles)

    if factor is not None:
        by = factor()
        heads = [_round(tile * by, dtype, interpret) for tile in heads]
    first, second, *rest = (tile.astype(jnp.float32) for tile in heads)
    if scale is not None:
        squares = [first * first + second * second]
        for tile in rest:
            if tile.shape == first.shape:
                squares[0] += tile * tile
            else:
                squares.append(tile * tile)
        total = functools.reduce(operator.add, (jnp.sum(tile, axis=1) for tile in squares))
        factor = lax.rsqrt(total * np.float32(1 / head_dim) + np.float32(eps))[:, None]
        normed = []
        for tile, weight in zip((first, second, *rest), weights, strict=True):
            tile = tile * factor * weight.astype(jnp.float32)
            normed.append(_round(tile, dtype, interpret))
        first, second, *rest = normed
    tiles = [first * cos - second * sin, second * cos + first * sin, *rest]
    for (cell, _, mask), tile in zip(places, tiles, strict=True):
        to(cell, tile.astype(dtype), mask)


def _round(tile, dtype, interpret: bool):
    """float32 rounded to `dtype`, in float32."""
    return rounded(tile, dtype) if interpret else tile.astype(dtype).astype(jnp.float32)  # Triton keeps both casts


def put(out, row, cell, tile, mask) -> None:
    """A tile to cells of a row of `out`."""
    pltriton.store(out.at[jnp.zeros_like(cell) + row, cell], tile, mask=mask)


def _sections(head_dim: int, half: int) -> list[tuple[int, int]]:
    """First channel and number of those of each tile: the halves, and what is not rotated.

    The latter are several tiles as wide as a half where that is possible. Threads then share out all tiles alike.
    """
    rest = head_dim - 2 * half
    width = half if rest % half == 0 and rest <= MANY * half else rest
    return [(0, half), (half, half), *((start, width) for start in range(2 * half, head_dim, width or 1))]


def places_of(part: Part, head_dim: int, program, start: int, width: int):
    """Of a tile of channels from `start` on: cells among those of all heads of the row, channels, and which of them
    there are, None for all."""
    shape = part.tile, power(width)
    head = lax.broadcasted_iota(jnp.int32, shape, 0) + (program - part.first) * part.tile
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = lane < width if width < shape[1] else None
    if part.heads % part.tile:
        mask = head < part.heads if mask is None else mask & (head < part.heads)
    channel = lane + start
    return head * head_dim + channel, channel, mask


def load(ref, index, mask):
    """Entries, zeros where there are none."""
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else ref.dtype.type(0))


def copy(part: Part, head_dim: int, row, program, x, start: int, to, factor=None) -> None:
    """One program's heads, as they are, or multiplied by factor()."""
    cell, _, mask = places_of(part, head_dim, program, 0, head_dim)
    tile = load(x, (jnp.zeros_like(cell) + row, cell + start), mask)
    to(cell, tile if factor is None else (tile * factor()).astype(tile.dtype), mask)

"""head_rotary: the heads of some rows, normed and turned to their positions, queries and keys in one launch.

A program takes one row and some of its heads, of either the queries or the keys. It loads the two halves of what is
turned side by side, each into a tile of its own, so that channel i of the first half and channel i of the second meet
in one thread and nothing is moved between threads but the sums of the norm:

    channel of a head    0 .. half - 1   half .. 2 * half - 1   2 * half .. head_dim - 1
    tile                 first           second                 rest
    result               first * cos - second * sin
                                         second * cos + first * sin
                                                                rest

XLA makes one product of those that give queries, keys and values of the same rows, and would cut their results out of
its own before a kernel reads them, a launch each. Views are read where they lie instead.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.triton import pltriton
from pallas_kernels.views import Array, View

HEADS = 8  # of a program, at most
MANY = 8  # tiles of what is not rotated, at most
CELLS = 1024  # of a tile, unless one head has more
WARPS = 4  # of a program, at most
ACCESS = 16  # bytes of a load, the longest there is
DTYPES = ("float32", "bfloat16", "float16")


def head_rotary(
    q: Array,
    k: Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as attention takes them: each head over its root mean square, then rotated.

        normed = head / sqrt(mean(head * head) + eps) * scale           if there is a scale, otherwise the head itself
        out[i]        = normed[i] * cos[i] - normed[half + i] * sin[i]         i < half
        out[half + i] = normed[half + i] * cos[i] + normed[i] * sin[i]

    The channels from 2 * half on are normed with the others and not rotated. Arithmetic is float32; what is normed and
    what is rotated are each rounded to the dtype. The bits of a row depend neither on the other rows nor on N.

    Args:
      q: [N, Hq, head_dim] in float32, bfloat16 or float16. An array, or a View of columns of a buffer [N, W], such as
        the rows of q, k and v side by side: its strides are (W, head_dim, 1).
      k: [N, Hkv, head_dim], of the same dtype, likewise.
      cos, sin: float32[N, half], of the angles of each row, 1 <= half <= head_dim / 2.
      q_scale, k_scale: [head_dim], any float. None: these heads are rotated alone.
      eps: of the norm (static).
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`. Only 'reference',
        named, has a derivative.

    Returns:
      (q, k), new arrays of the same shapes and dtype.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the rotary embedding is that of "RoFormer" (arXiv 2104.09864), with the halves paired; normed heads are
    those of the "Qwen3 Technical Report" (arXiv 2505.09388). The design is ours.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[3.0, 4.0, 5.0, 2.0, 2.0, 2.0]])  # one row: a head of q and one of k
    >>> q, k = (View(rows, offset, shape=(1, 1, 3), strides=(6, 3, 1)) for offset in (0, 3))
    >>> cos, sin = jnp.zeros((1, 1)), jnp.ones((1, 1))  # a quarter turn of the first two channels
    >>> q, k = head_rotary(q, k, cos, sin, k_scale=jnp.array([10.0, 20.0, 30.0]), eps=0.0)
    >>> q.tolist(), k.tolist()
    ([[[-4.0, 3.0, 5.0]]], [[[-20.0, 10.0, 30.0]]])
    """
    backends.check(backend)
    _check(q, k, cos, sin, q_scale, k_scale)
    if not math.prod(q.shape) + math.prod(k.shape):
        return _read(q), _read(k)
    settings = {"eps": float(eps)}
    kernel, reference = functools.partial(_kernel, **settings), functools.partial(_reference, **settings)
    return dispatch("head_rotary", backend, kernel, reference, (q, k, cos, sin, q_scale, k_scale))


def _check(q, k, cos, sin, q_scale, k_scale) -> None:
    if len(getattr(q, "shape", ())) != 3 or str(q.dtype) not in DTYPES:
        raise ValueError(f"q is {describe(q)}: it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}[N, heads, head_dim]")
    N, _, head_dim = q.shape
    fits = len(getattr(k, "shape", ())) == 3 and (k.shape[0], k.shape[2]) == (N, head_dim)
    if not fits or k.dtype != q.dtype:
        raise ValueError(f"k is {describe(k)}: it must be {q.dtype}[{N}, heads, {head_dim}], as q is {describe(q)}")
    for name, x in (("q", q), ("k", k)):
        if isinstance(x, View):
            _check_view(name, x)
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


def _check_view(name: str, x: View) -> None:
    N, heads, head_dim = x.shape
    rows = x.buffer.ndim == 2 and x.buffer.shape[0] == N and x.offset + heads * head_dim <= x.buffer.shape[1]
    if not rows or x.strides != (x.buffer.shape[1], head_dim, 1):
        raise ValueError(
            f"{name} is {describe(x)}, offset {x.offset}, strides {x.strides}, in {describe(x.buffer)}: it must be "
            f"columns of a buffer [{N}, W], of strides (W, {head_dim}, 1); View.read() makes an array of any other"
        )


def _rows(x: Array) -> tuple[jax.Array, int]:
    """[N, W], and the column at which the first head begins."""
    return (x.buffer, x.offset) if isinstance(x, View) else (x.reshape(x.shape[0], x.shape[1] * x.shape[2]), 0)


def _read(x: Array) -> jax.Array:
    """[N, heads, head_dim], an array."""
    rows, first = _rows(x)
    return jnp.asarray(rows)[:, first : first + x.shape[1] * x.shape[2]].reshape(x.shape)


# The reference --------------------------------------------------------------------------------------------------------


def _reference(q, k, cos, sin, q_scale, k_scale, *, eps: float):
    return tuple(_turned(x, cos[:, None], sin[:, None], scale, eps) for x, scale in ((q, q_scale), (k, k_scale)))


def _turned(x, cos, sin, scale, eps: float):
    x = _read(x)
    wide = x.astype(jnp.float32)
    if scale is not None:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(mean + np.float32(eps)) * scale.astype(jnp.float32)
        wide = _rounded(wide, x.dtype)
    half = cos.shape[-1]
    first, second = wide[..., :half], wide[..., half : 2 * half]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    rest = x if scale is None else wide.astype(x.dtype)
    return jnp.concatenate([turned, rest[..., 2 * half :]], axis=-1)


def _rounded(wide, dtype):
    """float32 rounded to `dtype`, in float32. Of two casts, down and up, XLA may drop both."""
    kind = jnp.finfo(dtype)
    near = lax.reduce_precision(wide, kind.nexp, kind.nmant)
    if dtype != jnp.float16:
        return near
    # What float16 holds with fewer digits, multiples of 2 ** -24, reduce_precision makes 0.
    few = lax.round(wide * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
    # Rounding has no slope of its own: what is corrected passes none on.
    return jnp.where(jnp.abs(wide) < np.float32(2**-14), near + lax.stop_gradient(few - near), near)


# The kernel -----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Heads of one kind, queries or keys: how many a row has and a program takes, and the program that is the first."""

    heads: int
    tile: int
    first: int

    @property
    def programs(self) -> int:
        """Of a row."""
        return -(-self.heads // self.tile)


def _parts(heads: list[int], widest: int) -> tuple[list[_Part], int]:
    """What the programs of a row take, one kind of heads after the other, and how many programs there are."""
    parts, programs = [], 0
    for count in heads:
        parts.append(_Part(count, max(1, min(HEADS, _power(count), CELLS // widest)), programs))
        programs += parts[-1].programs
    return parts, programs


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _kernel(q, k, cos, sin, q_scale, k_scale, *, eps: float, interpret: bool):
    N, _, head_dim = q.shape
    widest = _power(max(width for _, width in _sections(head_dim, cos.shape[1])))
    given = [(x, scale) for x, scale in ((q, q_scale), (k, k_scale)) if x.shape[1]]
    parts, programs = _parts([x.shape[1] for x, _ in given], widest)
    rows, starts = zip(*(_rows(x) for x, _ in given), strict=True)
    accesses = max(part.tile for part in parts) * widest * q.dtype.itemsize // ACCESS
    arguments, structure = jax.tree.flatten((rows, [scale for _, scale in given], cos, sin))

    def body(*refs):
        rows, scales, *angles = jax.tree.unflatten(structure, refs[: len(arguments)])
        row, program = pl.program_id(0), pl.program_id(1)
        for part, x, start, scale, out in zip(parts, rows, starts, scales, refs[len(arguments) :], strict=True):
            turn = functools.partial(_turn, part, head_dim, row, program, x, start, scale, angles, out, eps, interpret)
            if len(parts) == 1:
                turn()
            else:
                pl.when(program >= part.first if part.first else program < part.programs)(turn)

    results = pl.pallas_call(
        body,
        grid=(N, programs),
        name="head_rotary",
        out_shape=[jax.ShapeDtypeStruct((N, part.heads * head_dim), q.dtype) for part in parts],
        compiler_params=pltriton.CompilerParams(num_warps=max(1, min(WARPS, accesses // 32)), num_stages=1),
        interpret=interpret,
    )(*arguments)
    found = iter(results)
    return tuple(next(found).reshape(x.shape) if x.shape[1] else _read(x) for x in (q, k))


def _turn(
    part: _Part, head_dim: int, row, program, x, start: int, scale, angles, out, eps: float, interpret: bool
) -> None:
    """One program's heads: of a row of x, in which they begin at `start`, to the same row of `out`."""
    dtype = x.dtype
    # All loads come first, so that they wait together.
    sections = _sections(head_dim, angles[0].shape[1])
    places = [_places(part, head_dim, program, *section) for section in sections]
    heads = [_load(x, (jnp.zeros_like(cell) + row, cell + start), mask) for cell, _, mask in places]
    weights = None if scale is None else [_load(scale, (channel,), mask) for _, channel, mask in places]
    _, channel, mask = places[0]
    cos, sin = (_load(angle, (jnp.zeros_like(channel) + row, channel), mask) for angle in angles)

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
            # Triton keeps both casts.
            normed.append(_rounded(tile, dtype) if interpret else tile.astype(dtype).astype(jnp.float32))
        first, second, *rest = normed
    turned = [first * cos - second * sin, second * cos + first * sin, *rest]
    for (cell, _, mask), tile in zip(places, turned, strict=True):
        pltriton.store(out.at[jnp.zeros_like(cell) + row, cell], tile.astype(dtype), mask=mask)


def _sections(head_dim: int, half: int) -> list[tuple[int, int]]:
    """First channel and number of those of each tile: the halves, and what is not rotated.

    The latter are several tiles as wide as a half where that is possible. Threads then share out all tiles alike.
    """
    rest = head_dim - 2 * half
    width = half if rest % half == 0 and rest <= MANY * half else rest
    return [(0, half), (half, half), *((start, width) for start in range(2 * half, head_dim, width or 1))]


def _places(part: _Part, head_dim: int, program, start: int, width: int):
    """Of a tile of channels from `start` on: cells among those of all heads of the row, channels, and which of them
    there are, None for all."""
    shape = part.tile, _power(width)
    head = lax.broadcasted_iota(jnp.int32, shape, 0) + (program - part.first) * part.tile
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = lane < width if width < shape[1] else None
    if part.heads % part.tile:
        mask = head < part.heads if mask is None else mask & (head < part.heads)
    channel = lane + start
    return head * head_dim + channel, channel, mask


def _load(ref, index, mask):
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else ref.dtype.type(0))

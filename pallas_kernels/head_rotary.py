"""head_rotary: the heads of some rows, normed and turned to their positions, queries and keys in one launch.

How programs take them is said in head_tiles.py. `store_heads` stores the keys as well.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.dispatch import dispatch
from pallas_kernels.head_tiles import (
    check_heads,
    parts_of,
    put,
    read,
    rows_of,
    turn,
    turned,
    warps_of,
    widest_of,
)
from pallas_kernels.triton import pltriton
from pallas_kernels.views import Array


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
    >>> from pallas_kernels import View
    >>> rows = jnp.array([[3.0, 4.0, 5.0, 2.0, 2.0, 2.0]])  # one row: a head of q and one of k
    >>> q, k = (View(rows, offset, shape=(1, 1, 3), strides=(6, 3, 1)) for offset in (0, 3))
    >>> cos, sin = jnp.zeros((1, 1)), jnp.ones((1, 1))  # a quarter turn of the first two channels
    >>> q, k = head_rotary(q, k, cos, sin, k_scale=jnp.array([10.0, 20.0, 30.0]), eps=0.0)
    >>> q.tolist(), k.tolist()
    ([[[-4.0, 3.0, 5.0]]], [[[-20.0, 10.0, 30.0]]])
    """
    backends.check(backend)
    check_heads(q, k, cos, sin, q_scale, k_scale)
    if not math.prod(q.shape) + math.prod(k.shape):
        return read(q), read(k)
    settings = {"eps": float(eps)}
    by_kernel, by_jnp = functools.partial(_kernel, **settings), functools.partial(turned, **settings)
    return dispatch("head_rotary", backend, by_kernel, by_jnp, (q, k, cos, sin, q_scale, k_scale))


def _kernel(q, k, cos, sin, q_scale, k_scale, *, eps: float, interpret: bool):
    N, _, head_dim = q.shape
    given = [(x, scale) for x, scale in ((q, q_scale), (k, k_scale)) if x.shape[1]]
    widths = [widest_of(head_dim, cos.shape[1])] * len(given)
    parts, programs = parts_of([x.shape[1] for x, _ in given], widths)
    rows, starts = zip(*(rows_of(x) for x, _ in given), strict=True)
    arguments, structure = jax.tree.flatten((rows, [scale for _, scale in given], cos, sin))

    def body(*refs):
        rows, scales, *angles = jax.tree.unflatten(structure, refs[: len(arguments)])
        row, program = pl.program_id(0), pl.program_id(1)
        for part, x, start, scale, out in zip(parts, rows, starts, scales, refs[len(arguments) :], strict=True):
            to_out = functools.partial(put, out, row)
            how = part, head_dim, row, program, x, start, scale, angles, to_out, eps, interpret
            pl.when(part.mine(program))(functools.partial(turn, *how))

    results = pl.pallas_call(
        body,
        grid=(N, programs),
        name="head_rotary",
        out_shape=[jax.ShapeDtypeStruct((N, part.heads * head_dim), q.dtype) for part in parts],
        compiler_params=pltriton.CompilerParams(num_warps=warps_of(parts, widths, q.dtype.itemsize), num_stages=1),
        interpret=interpret,
    )(*arguments)
    found = iter(results)
    return tuple(next(found).reshape(x.shape) if x.shape[1] else read(x) for x in (q, k))

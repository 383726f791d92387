"""row_sums: the parts of a product summed onto rows, and what a norm of them needs, in one launch.

XLA splits the contraction of a product of few rows and adds the parts in a second launch; the norm behind it is a
third. Here the second one leaves what the third would compute to the products that follow:

    total      x + the parts
    scaled     total * scale
    squares    sums of total * total over blocks of columns

since (total / rms(total) * scale) @ weight is (scaled @ weight) / rms(total); see `row_products`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.triton import pltriton

Array = jax.Array
BLOCK = 512  # columns of a program
WARPS = 4


def row_sums(parts: Array, x: Array, scale: Array, *, backend: str | None = None) -> tuple[Array, Array, Array]:
    """x plus the sum of parts, in float32, rounded to x's dtype; the same times a scale; and its squares.

    Args:
      parts: float32[S, N, M].
      x: [N, M], any float.
      scale: [M], any float.
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`.

    Returns:
      total and scaled, [N, M] in x's dtype, scaled of the rounded total; and squares, float32[N, ceil(M / 512)], those
      of the rounded total summed over 512 columns each.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a backend that cannot run it.

    Source: parts are those of split-K products, as in Stream-K (arXiv 2301.03598); the design is ours.

    >>> import jax.numpy as jnp
    >>> total, scaled, squares = row_sums(jnp.ones((2, 1, 2)), jnp.array([[1.0, 2.0]]), jnp.array([1.0, 10.0]))
    >>> total.tolist(), scaled.tolist(), squares.tolist()
    ([[3.0, 4.0]], [[3.0, 40.0]], [[25.0]])
    """
    backends.check(backend)
    _check(parts, x, scale)
    if 0 in parts.shape:
        return _reference(parts, x, scale)
    return dispatch("row_sums", backend, _kernel, _reference, (parts, x, scale))


def _check(parts, x, scale) -> None:
    if len(getattr(x, "shape", ())) != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {describe(x)}: give floating [N, M]")
    shape = getattr(parts, "shape", ())
    if len(shape) != 3 or shape[1:] != x.shape or parts.dtype != jnp.float32:
        raise ValueError(
            f"parts is {describe(parts)}: with x {describe(x)} give float32[S, {x.shape[0]}, {x.shape[1]}]"
        )
    if getattr(scale, "shape", None) != x.shape[1:] or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale is {describe(scale)}: with x {describe(x)} give floats of shape ({x.shape[1]},)")


def _reference(parts, x, scale):
    total = (x.astype(jnp.float32) + jnp.sum(parts, axis=0)).astype(x.dtype)
    wide = total.astype(jnp.float32)
    blocks = -(-x.shape[1] // BLOCK)
    squares = jnp.pad(wide * wide, ((0, 0), (0, blocks * BLOCK - x.shape[1])))
    squares = jnp.sum(squares.reshape(x.shape[0], blocks, BLOCK), axis=-1)
    return total, (wide * scale.astype(jnp.float32)).astype(x.dtype), squares


def _kernel(parts, x, scale, *, interpret: bool):
    (S, N, M), blocks = parts.shape, -(-parts.shape[2] // BLOCK)

    def body(parts, x, scale, total, scaled, squares):
        row, block = pl.program_id(0), pl.program_id(1)
        lane = lax.iota(jnp.int32, BLOCK)
        column = lane + block * BLOCK
        inside = column < M if M % BLOCK else None

        def load(ref, *index):
            other = None if inside is None else ref.dtype.type(0)
            return pltriton.load(ref.at[(*index, column)], mask=inside, other=other).astype(jnp.float32)

        there = jnp.zeros_like(lane) + row
        found = [load(parts, jnp.zeros_like(lane) + part, there) for part in range(S)]
        weight, wide = load(scale), load(x, there)
        result = (wide + functools.reduce(jnp.add, found)).astype(total.dtype)
        wide = result.astype(jnp.float32)
        pltriton.store(total.at[there, column], result, mask=inside)
        pltriton.store(scaled.at[there, column], (wide * weight).astype(scaled.dtype), mask=inside)
        pltriton.store(squares.at[row, block], jnp.sum(wide * wide))

    shapes = [((N, M), x.dtype), ((N, M), x.dtype), ((N, blocks), jnp.float32)]
    return tuple(
        pl.pallas_call(
            body,
            grid=(N, blocks),
            name="row_sums",
            out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
            compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpret,
        )(parts, x, scale)
    )

"""row_parts and add_norm: a product whose sum is left in parts, and the launch that puts it to work.

A single matrix has too few blocks of columns to keep a device busy, so the rows of the matrix are cut as well, and each
piece leaves its own sums. Whoever adds those up would be a launch for itself. Behind such a product of a decoder layer
stand the residual and a norm, so one launch does all three:

    row_parts    parts[s] = x[:, piece s] @ weight[piece s]
    add_norm     stream = residual + sum of the parts;  normed = stream / sqrt(mean(stream ** 2) + eps) * scale

A row's bits depend neither on the other rows nor on how many there are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.row_products import DTYPES, LEAST, MOST, Sizes, product_step, tile_of
from pallas_kernels.triton import pltriton

Array = jax.Array

# By measurement on an H200, as in row_products.
SIZES = Sizes(columns=128, depth=64, warps=4, stages=5)
PROGRAMS = 264  # two for each processor of an H200
MOST_PARTS = 16  # that the second launch adds up
LEAST_PIECE = 256  # rows of a piece: less is not worth its share of the second launch
WIDE = 256  # columns a warp of the second launch


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static of `row_parts`.

    Attributes:
      N, K, M: rows, what the product sums over, columns.
      sizes: how the work is cut.
    """

    N: int
    K: int
    M: int
    sizes: Sizes = SIZES

    @property
    def rows(self) -> int:
        """Rows of the tile, spare ones included."""
        return max(LEAST, 1 << (self.N - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Of columns."""
        return -(-self.M // self.sizes.columns)

    @property
    def piece(self) -> int:
        """Rows of the matrix in a part, whole turns; the last one may have fewer."""
        wanted = max(1, min(PROGRAMS // self.blocks, MOST_PARTS, self.K // LEAST_PIECE))
        turns = -(-self.K // (wanted * self.sizes.depth))
        return turns * self.sizes.depth

    @property
    def parts(self) -> int:
        """S."""
        return -(-self.K // self.piece)


def takes(N: int, dtype) -> bool:
    """Whether `row_parts` is worth calling for so many rows: otherwise the product is XLA's as it is."""
    return jnp.dtype(dtype).name in DTYPES and 0 < N <= MOST


def row_parts(x: Array, weight: Array, *, backend: str | None = None) -> Array:
    """`x @ weight`, its sum over K left in parts.

    Args:
      x: [N, K] in bfloat16 or float16, N from 1 to 64.
      weight: [K, M] in the dtype of x.
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`.

    Returns:
      float32[S, N, M]; how many parts there are follows from K and M alone.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a backend that cannot run it; the message names the argument.

    Source: the cut of the contraction is "split-K" of matrix libraries; the design is ours.

    >>> import jax.numpy as jnp
    >>> x, weight = jnp.ones((1, 512), jnp.bfloat16), jnp.ones((512, 2), jnp.bfloat16)
    >>> row_parts(x, weight).tolist()
    [[[256.0, 256.0]], [[256.0, 256.0]]]
    """
    backends.check(backend)
    if x.ndim != 2 or not takes(x.shape[0], x.dtype) or not x.shape[1]:
        raise ValueError(f"x is {describe(x)}: give {' or '.join(DTYPES)}[N, K], N from 1 to {MOST}")
    N, K = x.shape
    if weight.ndim != 2 or weight.shape[0] != K or weight.dtype != x.dtype or not weight.shape[1]:
        raise ValueError(f"weight is {describe(weight)}: with x {describe(x)} give {x.dtype}[{K}, M]")
    plan = Plan(N, K, weight.shape[1])
    return dispatch(
        "row_parts", backend, functools.partial(_parts, plan), functools.partial(_parts_reference, plan), (x, weight)
    )


def _parts_reference(plan: Plan, x, weight):
    spare = plan.parts * plan.piece - plan.K
    x, weight = jnp.pad(x, ((0, 0), (0, spare))), jnp.pad(weight, ((0, spare), (0, 0)))
    pieces = x.reshape(plan.N, plan.parts, plan.piece), weight.reshape(plan.parts, plan.piece, plan.M)
    return jnp.einsum("nsk,skm->snm", *pieces, preferred_element_type=jnp.float32)


def _parts(plan: Plan, x, weight, *, interpret: bool):
    sizes = plan.sizes
    limit = plan.K if plan.K % plan.piece else None

    def body(x, weight, out):
        program = pl.program_id(0)
        part, block = lax.div(program, np.int32(plan.blocks)), lax.rem(program, np.int32(plan.blocks))
        row, column = lax.iota(jnp.int32, plan.rows), lax.iota(jnp.int32, sizes.columns) + block * sizes.columns
        real = None if plan.rows == plan.N else row < plan.N
        inside = None if plan.M % sizes.columns == 0 else column < plan.M
        step = functools.partial(
            product_step, limit, sizes.depth, x, (weight,), row, column, real, inside, part * np.int32(plan.piece)
        )
        zero = (jnp.zeros((plan.rows, sizes.columns), jnp.float32),)
        (total,) = lax.fori_loop(0, plan.piece // sizes.depth, step, zero)
        index, mask = tile_of(row + part * np.int32(plan.N), column, real, inside)
        pltriton.store(out.at[index], total, mask=mask)

    found = pl.pallas_call(
        body,
        grid=(plan.parts * plan.blocks,),
        name="row_parts",
        out_shape=jax.ShapeDtypeStruct((plan.parts * plan.N, plan.M), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
    )(x, weight)
    return found.reshape(plan.parts, plan.N, plan.M)


def add_norm(
    residual: Array, parts: Array, scale: Array, *, eps: float, backend: str | None = None
) -> tuple[Array, Array]:
    """The residual stream behind a product, and its norm.

    The sum of the parts is rounded to the dtype, then added, and the stream is rounded before it is normed.

    Args:
      residual: [N, M] in bfloat16, float16 or float32.
      parts: float32[S, N, M], of `row_parts`.
      scale: float[M], of the norm.
      eps: of the norm (static).
      backend: as in `row_parts`.

    Returns:
      (stream, normed), [N, M] each in the residual's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a backend that cannot run it; the message names the argument.

    Source: RMSNorm (arXiv 1910.07467).

    >>> import jax.numpy as jnp
    >>> stream, normed = add_norm(jnp.ones((1, 2)), jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]]), jnp.ones(2), eps=0.0)
    >>> stream.tolist(), normed.round(4).tolist()
    ([[3.0, 1.0]], [[1.3416, 0.4472]])
    """
    backends.check(backend)
    if residual.ndim != 2 or not jnp.issubdtype(residual.dtype, jnp.floating):
        raise ValueError(f"residual is {describe(residual)}: give floating [N, M]")
    N, M = residual.shape
    if parts.ndim != 3 or parts.shape[1:] != (N, M) or parts.dtype != jnp.float32:
        raise ValueError(f"parts is {describe(parts)}: with residual {describe(residual)} give float32[S, {N}, {M}]")
    if scale.shape != (M,) or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale is {describe(scale)}: with residual {describe(residual)} give floating [{M}]")
    kernel, reference = (functools.partial(f, float(eps)) for f in (_add_norm, _add_norm_reference))
    if 0 in (N, M):
        return residual, residual
    return dispatch("add_norm", backend, kernel, reference, (residual, parts, scale))


def _add_norm_reference(eps: float, residual, parts, scale):
    stream = residual + parts.sum(axis=0).astype(residual.dtype)
    wide = stream.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return stream, (wide * scale.astype(jnp.float32)).astype(residual.dtype)


def _add_norm(eps: float, residual, parts, scale, *, interpret: bool):
    S, N, M = parts.shape
    lanes = max(LEAST, 1 << (M - 1).bit_length())

    def body(residual, parts, scale, stream, normed):
        n, lane = pl.program_id(0), lax.iota(jnp.int32, lanes)
        mask = None if lanes == M else lane < M

        def read(ref, *row):
            index = (*(jnp.full_like(lane, 0) + r for r in row), lane)
            return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else ref.dtype.type(0))

        # All loads stand before the first sum, so that all are on their way together.
        found = [read(parts, n + np.int32(part * N)) for part in range(S)]
        old, factor = read(residual, n), read(scale).astype(jnp.float32)
        total = sum(found[1:], start=found[0]).astype(old.dtype)
        new = (old.astype(jnp.float32) + total.astype(jnp.float32)).astype(old.dtype)
        wide = new.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.sum(wide * wide) / np.float32(M) + np.float32(eps)) * factor
        for out, value in ((stream, new), (normed, wide.astype(old.dtype))):
            pltriton.store(out.at[jnp.full_like(lane, 0) + n, lane], value, mask=mask)

    warps = max(1, min(16, lanes // WIDE))
    return tuple(
        pl.pallas_call(
            body,
            grid=(N,),
            name="add_norm",
            out_shape=[jax.ShapeDtypeStruct((N, M), residual.dtype)] * 2,
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
        )(residual, parts.reshape(S * N, M), scale)
    )

"""row_products: a few rows times matrices of a layer, at the speed at which the matrices are read.

A verify forward has B * D rows, often 8, so its products take as long as their weights take to arrive. A program owns a
block of a matrix's columns and runs down all of them, with several tiles on their way. So no second launch adds up
parts, and what comes right behind a product is done where its numbers are:

    several    matrices of one input are one launch, each with an output of its own; no copy joins them in memory
    gated      two matrices of one shape: silu(x @ first) * (x @ second), neither of which is stored
    divided    by the root mean squares of other rows, which end the norm that `row_sums` began

A row's bits depend neither on the other rows nor on how many there are, among up to 64: more are left to XLA.

On an H200, 8 rows in bfloat16, XLA's own in parentheses: the gated pair of 4096 x 12288 50 us (57), three matrices of
4096 x 6144 in all 13.5 us (11.3 to 13.7, of a copy that joins them). Left to XLA, which splits the contraction and
needs a second launch: a single matrix, 12.1 (11.0) of 4096 x 4096 and 29 (27) of 12288 x 4096. A norm before the
product cost more inside (4 us) than in a launch of its own (2.5).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels.buffers import describe
from pallas_kernels.dispatch import dispatch
from pallas_kernels.lanes import power
from pallas_kernels.triton import pltriton

Array = jax.Array

LEAST, MOST = 16, 64  # rows of a tile; with more the products themselves take time, and XLA's are as good
DTYPES = ("bfloat16", "float16")  # of those that tensor cores take as they are


class Sizes(NamedTuple):
    """How matrices are cut; chosen by measurement on an H200.

    columns    of a program
    depth      rows of a matrix a turn
    warps      of a program
    stages     tiles that are read or on their way at a time, where there is room for as many
    """

    columns: int
    depth: int
    warps: int
    stages: int


# Bytes that tiles on their way have in a processor, by compute capability; H200's where the device is not known.
SHARED = {(8, 0): 163_840, (8, 7): 163_840, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}
LEAST_SHARED = 101_376  # of any other that runs the kernel
SIZES, GATED_SIZES = Sizes(64, 128, 4, 6), Sizes(128, 64, 4, 4)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static of a call.

    Attributes:
      N, K: rows, and what a product sums over.
      widths: columns of each matrix.
      gated: whether there are two, which make one output.
      eps: under the root of what products are divided by; None if by nothing.
      sizes: how the work is cut.
      shared: bytes that there are for tiles on their way.
    """

    N: int
    K: int
    widths: tuple[int, ...]
    gated: bool
    eps: float | None
    sizes: Sizes
    shared: int = SHARED[9, 0]

    @property
    def rows(self) -> int:
        """Rows of the tile, spare ones included."""
        return power(self.N, LEAST)

    @property
    def stages(self) -> int:
        """Tiles at a time: one is read while the others are on their way."""
        each = 2 if self.gated else 1
        tiles = self.sizes.depth * (self.rows + each * self.sizes.columns) * 2
        return max(1, min(self.sizes.stages, 1 + self.shared // tiles))

    @property
    def outs(self) -> tuple[int, ...]:
        """Columns of each output."""
        return self.widths[:1] if self.gated else self.widths

    @property
    def blocks(self) -> tuple[int, ...]:
        """Programs of each output."""
        return tuple(-(-width // self.sizes.columns) for width in self.outs)


def row_products(
    x: Array,
    weights: tuple[Array, ...],
    *,
    gated: bool = False,
    squares: Array | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Array, ...]:
    """`x @ weight` of each weight; or, gated, silu(x @ first) * (x @ second).

    With squares each row of a product is first divided by sqrt(sum(squares) / K + eps) of that row.

    Sums are float32. The kernel serves bfloat16 and float16 and up to 64 rows; anything else is left to XLA, and so is
    a single matrix, with which it is as fast.

    Args:
      x: [N, K], rows.
      weights: [K, M] each, M their own, in the dtype of x; two of one shape if gated.
      squares: float32[N, blocks], as of `row_sums`: the sum of a row is K times a mean square. None: no division.
      eps: (static).
      backend: None, 'triton', 'interpret' or 'reference', as in `pallas_kernels.dispatch`. Only 'reference', named, has
        a derivative.

    Returns:
      One array [N, M] a weight, or a single one if gated, in the dtype of x.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a backend that cannot run it; the message names the argument.

    Source: gated products as in "GLU Variants Improve Transformer" (arXiv 2002.05202); the design is ours.

    >>> import jax.numpy as jnp
    >>> x, ones = jnp.ones((1, 4), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)
    >>> [each.tolist() for each in row_products(x, (ones, 2 * ones))]
    [[[4.0, 4.0]], [[8.0, 8.0]]]
    >>> row_products(x, (ones, 2 * ones), gated=True)[0].tolist()  # 4 * sigmoid(4) * 8
    [[31.5, 31.5]]
    """
    _check(x, weights, gated, squares)
    backends.check(backend)
    (N, K), widths, eps = x.shape, tuple(weight.shape[1] for weight in weights), float(eps)
    reference = functools.partial(_reference, gated=gated, eps=eps)
    if not serves(N, K, widths, x.dtype) or (squares is not None and not squares.size):
        return reference(x, weights, squares)
    capability = backends._capability() or (9, 0)
    shared = SHARED.get(capability, LEAST_SHARED)
    plan = Plan(N, K, widths, gated, None if squares is None else eps, GATED_SIZES if gated else SIZES, shared)
    by_kernel = functools.partial(products, plan)
    return dispatch("row_products", backend, by_kernel, reference, (x, tuple(weights), squares))


def serves(N: int, K: int, widths: tuple[int, ...], dtype) -> bool:
    """Whether the kernel takes such products, where there is one: N rows, sums over K, columns of each matrix."""
    if jnp.dtype(dtype).name not in DTYPES or not 0 < N <= MOST or len(widths) < 2 or 0 in (K, *widths):
        return False
    return max(N * K, K * max(widths), N * max(widths)) < 2**31  # cells of an array are counted in 32 bits


def _check(x, weights, gated: bool, squares) -> None:
    if len(getattr(x, "shape", ())) != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {describe(x)}: give floating [N, K]")
    for number, weight in enumerate(weights):
        shape = getattr(weight, "shape", ())
        if len(shape) != 2 or shape[0] != x.shape[1] or weight.dtype != x.dtype:
            raise ValueError(
                f"weights[{number}] is {describe(weight)}: with x {describe(x)} give {x.dtype}[{x.shape[1]}, M]"
            )
    if gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError(f"weights are {[describe(weight) for weight in weights]}: gated takes two of one shape")

    shape = getattr(squares, "shape", ())
    if squares is not None and (len(shape) != 2 or shape[0] != x.shape[0] or squares.dtype != jnp.float32):
        raise ValueError(f"squares is {describe(squares)}: give float32[{x.shape[0]}, blocks], or None: no division")


def _reference(x, weights, squares, *, gated: bool, eps: float):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    kind = x.dtype if squares is None else jnp.float32

    def product(weight):
        # The result's type is asked of the product itself: a float32 result cast down would make the products of the
        # backward pass float32 ones.
        return lax.dot_general(x, weight, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=kind)

    found = tuple(product(weight) for weight in weights)
    if squares is not None:
        factor = lax.rsqrt(
            jnp.sum(squares, axis=-1, keepdims=True) * np.float32(1 / max(1, x.shape[1])) + np.float32(eps)
        )
        found = tuple(each * factor for each in found)
    found = (jax.nn.silu(found[0]) * found[1],) if gated else found
    return tuple(each.astype(x.dtype) for each in found)


def products(plan: Plan, x, weights, squares, *, interpret: bool):
    """`row_products` in one launch."""
    first = 1 if squares is None else 2
    last = first + len(weights)

    def body(x, *refs):
        _columns(plan, x, *refs[: first - 1], matrices=refs[first - 1 : last - 1], outs=refs[last - 1 :])

    found = pl.pallas_call(
        body,
        grid=(sum(plan.blocks),),
        name="row_products",
        out_shape=[jax.ShapeDtypeStruct((plan.N, width), x.dtype) for width in plan.outs],
        compiler_params=pltriton.CompilerParams(num_warps=plan.sizes.warps, num_stages=plan.stages),
        interpret=interpret,
    )(x, *([] if squares is None else [squares]), *weights)
    return tuple(found)


def _columns(plan: Plan, x, squares=None, *, matrices, outs) -> None:
    """A block of columns of one output."""
    sizes, rows, program = plan.sizes, plan.rows, pl.program_id(0)
    row = lax.iota(jnp.int32, rows)
    real = None if rows == plan.N else row < plan.N
    each = 2 if plan.gated else 1
    turns = -(-plan.K // sizes.depth)
    limit = plan.K if plan.K % sizes.depth else None
    sums, first, places = (jnp.zeros((rows, sizes.columns), jnp.float32),) * each, 0, []
    for number, (out, blocks) in enumerate(zip(outs, plan.blocks, strict=True)):
        block, mine = program - first, None
        if len(outs) > 1:
            mine = (block >= 0) & (block < blocks)
            block = jnp.where(mine, block, 0)
        column = lax.iota(jnp.int32, sizes.columns) + block * sizes.columns
        inside = None if out.shape[1] % sizes.columns == 0 else column < out.shape[1]
        own = matrices[each * number : each * (number + 1)]
        step = functools.partial(_step, limit, sizes.depth, x, own, row, column, real, inside)
        # A loop for each output, of no turns but for the program's own, and no branch around a product.
        count = np.int32(turns) if mine is None else mine.astype(jnp.int32) * np.int32(turns)
        sums = lax.fori_loop(np.int32(0), count, step, sums)
        places.append((out, column, inside, mine))
        first += blocks
    if squares is not None:
        # One block after the other. How a sum along an axis is ordered depends on the tile, so on how many rows it has.
        columns = (_load_column(squares, row, block, real) for block in range(squares.shape[1]))
        mean = functools.reduce(jnp.add, columns)
        factor = lax.rsqrt(mean * np.float32(1 / plan.K) + np.float32(plan.eps))[:, None]
        sums = [total * factor for total in sums]
    result = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if plan.gated else sums[0]
    for out, column, inside, mine in places:
        live = real
        if mine is not None:
            live = jnp.broadcast_to(mine, (rows,)) if real is None else real & mine
        index, mask = _tile(row, column, live, inside)
        pltriton.store(out.at[index], result.astype(out.dtype), mask=mask)


def _step(limit: int | None, depth: int, x, matrices, row, column, real, inside, turn, sums):
    """The sums [row, column] of x @ matrix, of each matrix, with one more piece of the contraction.

    Args:
      limit: K, what is summed over, where a piece may end behind it; None where none does.
      depth: of a piece.
      real, inside: rows and columns that there are; None for all.
      turn: number of the piece.
    """
    k = lax.iota(jnp.int32, depth) + turn * depth
    there = None if limit is None else k < limit
    values = _load(x, row, k, real, there)
    dimensions = (((1,), (0,)), ((), ()))

    def product(matrix):
        tile = _load(matrix, k, column, there, inside)
        return lax.dot_general(values, tile, dimensions, preferred_element_type=jnp.float32)

    return tuple(total + product(matrix) for total, matrix in zip(sums, matrices, strict=True))


def _tile(row, column, real, inside):
    """Indices of a tile of a 2-D array and its mask; None stands for all."""
    shape, mask = (row.shape[0], column.shape[0]), None
    if real is not None:
        mask = jnp.broadcast_to(real[:, None], shape)
    if inside is not None:
        lanes = jnp.broadcast_to(inside[None], shape)
        mask = lanes if mask is None else mask & lanes
    return (jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)), mask


def _load(ref, row, column, real, inside):
    """A tile of a 2-D array, zeros where there is nothing."""
    index, mask = _tile(row, column, real, inside)
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else ref.dtype.type(0))


def _load_column(ref, row, column: int, real):
    """float32[rows], one column of the rows of a 2-D array, zeros where there is no row."""
    index = row, jnp.full_like(row, column)
    return pltriton.load(ref.at[index], mask=real, other=None if real is None else ref.dtype.type(0))

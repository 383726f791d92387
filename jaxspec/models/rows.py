"""What a decoder computes row by row and kernels may do at once: products with the weights, norms, rotation.

Modules take a `Rows`, as they take `attend`. The default computes everything in plain jax, which can be differentiated;
a step hands over one that leaves to kernels what they do faster.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.attention.heads import Heads
from pallas_kernels import View, row_products, row_sums
from pallas_kernels.dispatch import supported
from pallas_kernels.head_tiles import read
from pallas_kernels.row_products import MOST, serves
from pallas_kernels.store_heads import WIDEST

Array = jax.Array


def dot(x: Array, weight: Array, dtype: Any, *, transposed: bool = False, out_dtype: Any = None) -> Array:
    """`x [..., K] @ weight [K, N]` (`[N, K]` if `transposed`) as one two-dimensional product: [..., N].

    Both operands are taken in `dtype` and accumulated in float32; a float32 product is a true one (no TF32). The
    leading axes are flattened, so that B requests of T rows are one matrix product of B * T rows.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
    # The result's type is asked of the product itself: a float32 result cast down would make the products of the
    # backward pass float32 ones.
    out = lax.dot_general(
        rows, weight.astype(dtype), contract, precision=precision, preferred_element_type=out_dtype or dtype
    )
    return out.reshape(*x.shape[:-1], out.shape[-1])


def rms_norm(x: Array, scale: Array, eps: float, dtype: Any) -> Array:
    """`x [..., N]` over its root mean square along N, times `scale [N]`; float32 inside, `dtype` outside."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(dtype)


# attend(layer, q [B, T, Hq, hd], k [B, T, Hkv, hd], v [B, T, Hkv, hd], cache) -> (out [B, T, Hq, hd], cache)
Attend = Callable[..., tuple[Array, Any]]
Projected = tuple[Array | View, Array | View, Array | View]  # q, k, v, each [B * T, heads, hd]
SPLIT = 8  # pieces of a contraction whose parts `row_sums` adds up, if it divides them


@flax.struct.dataclass
class Normed:
    """Rows that went through a norm, or the most of it.

    Attributes:
      rows: [B, T, K]; where there are squares the rows before the norm times its scale, and what products make of them
        is still to be divided.
      squares: float32[B * T, blocks], whose sum is that of the squares of a row before the norm; None: all is done.
      eps: of the norm (static).
    """

    rows: Array
    squares: Array | None
    eps: float = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is computed of rows [B, T, K] and weights.

    A norm in front of products of few rows is a launch that they wait for. It is ended behind them instead, by launches
    that are there anyway: (x / rms(x) * scale) @ weight is ((x * scale) @ weight) / rms(x).

    Attributes:
      backend: who runs the kernels, as in `pallas_kernels`; 'reference' is plain jax.
      turns: whether `attend` itself norms and rotates heads, on their way to the cache: it is then called as
        `attend(layer, q, k, v, cache, heads=heads)`, with q, k and v as projected, see `jaxspec.Heads`.

    Example:
      >>> x, scale, ones = jnp.ones((1, 3, 4)), jnp.ones(4), jnp.ones((4, 2))
      >>> _, normed = Rows().added(x, x, jnp.eye(4), (scale, 1e-6), "float32")
      >>> Rows().gated(normed, ones, 2 * ones, "float32").shape
      (1, 3, 2)
    """

    backend: str | None = "reference"
    turns: bool = False

    def projected(
        self, x: Array, norm: tuple[Array, float], weights: tuple[Array, ...], head_dim: int, heads: Heads, dtype: Any
    ) -> tuple[Projected, Heads]:
        """Queries, keys and values of normed rows.

        Args:
          x: [B, T, K].
          norm: scale [K] and eps of the `rms_norm` that the rows go through first.
          weights: [K, Hq * hd], [K, Hkv * hd] and [K, Hkv * hd].
          head_dim: hd.
          heads: what is to become of queries and keys.
          dtype: of products and results; sums are float32, float32 products true ones (no TF32).

        Returns:
          q [B * T, Hq, hd], k and v [B * T, Hkv, hd], arrays, or Views of a joint product; and the heads, which may
          have been left to end the norm.
        """
        (scale, eps), count, widths = norm, x.shape[0] * x.shape[1], [weight.shape[1] for weight in weights]
        if self.turns and self._ends_later(count, dtype) and x.shape[-1] <= WIDEST:
            heads = heads.replace(rows=x.reshape(count, x.shape[-1]), rows_eps=eps)
            x = (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)  # by whatever made x
        else:
            x = rms_norm(x, scale, eps, dtype)
        shapes = [(count, width // head_dim, head_dim) for width in widths]
        found = self._products(x, weights, dtype)
        if serves(count, x.shape[-1], widths, dtype):
            return tuple(rows.reshape(shape) for rows, shape in zip(found, shapes, strict=True)), heads
        # XLA joined the three products wherever it was looked at. A kernel's arrays would be cut out of the joint one,
        # a launch each; they are read where they lie in it instead.
        buffer, strides = jnp.concatenate(found, axis=-1), (sum(widths), head_dim, 1)
        starts = 0, widths[0], widths[0] + widths[1]
        return tuple(View(buffer, start, shape, strides) for start, shape in zip(starts, shapes, strict=True)), heads

    def attend(self, layer: int, rows: Projected, heads: Heads, attend: Attend, cache: Any) -> tuple[Array, Any]:
        """What `attend` makes of projected rows: out [B, T, Hq, hd] and the cache."""
        if self.turns:
            return attend(layer, *rows, cache, heads=heads)
        q, k = heads.turned(*rows[:2], supported(self.backend))
        return attend(layer, q, k, heads.by_request(read(rows[2])), cache)

    def added(
        self, x: Array, rows: Array, weight: Array, norm: tuple[Array, float], dtype: Any
    ) -> tuple[Array, Normed]:
        """x + rows @ weight, and what `gated` takes of it.

        Args:
          x: [B, T, M].
          rows, weight: [B, T, K] and [K, M].
          norm: scale [M] and eps of the `rms_norm` that the sum goes through.
          dtype: of the product and of the results.
        """
        (scale, eps), (B, T, M), K = norm, x.shape, rows.shape[-1]
        if not self._ends_later(B * T, dtype):
            x = x + dot(rows, weight, dtype)
            return x, Normed(rms_norm(x, scale, eps, dtype), None, eps)
        S = math.gcd(K, SPLIT)
        pieces = rows.reshape(B * T, S, K // S).astype(dtype), weight.reshape(S, K // S, M).astype(dtype)
        parts = jnp.einsum("nsk,skm->snm", *pieces, preferred_element_type=jnp.float32)
        x, scaled, squares = row_sums(parts, x.reshape(B * T, M), scale, backend=supported(self.backend))
        return x.reshape(B, T, M), Normed(scaled.reshape(B, T, M), squares, eps)

    def gated(self, normed: Normed, gate: Array, up: Array, dtype: Any) -> Array:
        """silu(rows @ gate) * (rows @ up), [B, T, M], of normed rows [B, T, K]."""
        (found,) = self._products(normed.rows, (gate, up), dtype, gated=True, squares=normed.squares, eps=normed.eps)
        return found.reshape(*normed.rows.shape[:-1], gate.shape[1])

    def _ends_later(self, count: int, dtype: Any) -> bool:
        """Whether the norm of so many rows in front of several products is ended behind them. Float16 may not hold rows
        times a scale."""
        return self.backend != "reference" and jnp.dtype(dtype) == jnp.bfloat16 and 0 < count <= MOST

    def _products(self, x, weights, dtype, **how):
        # Leading axes are flattened, so that B requests of T rows are one product of B * T rows.
        flat, cast = x.reshape(-1, x.shape[-1]).astype(dtype), tuple(weight.astype(dtype) for weight in weights)
        return row_products(flat, cast, backend=supported(self.backend), **how)


PLAIN = Rows()

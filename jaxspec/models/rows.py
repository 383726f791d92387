"""What a decoder computes row by row and kernels may do at once: products with the weights, norms, rotation.

Modules take a `Rows`, as they take `attend`. The default computes everything in plain jax, which can be differentiated;
a step hands over one that leaves to kernels what they do faster.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import View, head_rotary, row_products
from pallas_kernels.dispatch import supported
from pallas_kernels.row_products import serves

Array = jax.Array


def rms_norm(x: Array, scale: Array, eps: float, dtype: Any) -> Array:
    """`x [..., N]` over its root mean square along N, times `scale [N]`; float32 inside, `dtype` outside."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Heads:
    """How projected rows become queries and keys.

    Attributes:
      head_dim: hd, channels of a head.
      cos, sin: float32[B, T, 1, half], of the angles of each row; the first 2 * half channels of a head are rotated.
      scales: those of the norms of queries and of keys, float[hd] each.
      eps: of these norms.
    """

    head_dim: int
    cos: Array
    sin: Array
    scales: tuple[Array, Array]
    eps: float


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is computed of rows [B, T, K] and weights.

    Attributes:
      backend: who runs the kernels, as in `pallas_kernels`; 'reference' is plain jax.

    Example:
      >>> ones = jnp.ones((4, 2))
      >>> Rows().gated(jnp.ones((1, 3, 4)), ones, 2 * ones, "float32").shape
      (1, 3, 2)
    """

    backend: str | None = "reference"

    def attention(self, x: Array, weights: tuple[Array, Array, Array], heads: Heads, dtype: Any) -> tuple[Array, ...]:
        """Queries, keys and values of rows [B, T, K], as attention takes them.

        Args:
          weights: [K, Hq * hd], [K, Hkv * hd] and [K, Hkv * hd].
          dtype: of products and results; sums are float32, float32 products true ones (no TF32).

        Returns:
          q [B, T, Hq, hd] and k [B, T, Hkv, hd], normed and rotated, and v [B, T, Hkv, hd].
        """
        q, k, v = self._products(x, weights, dtype)
        count, widths = q.shape[0], (q.shape[1], k.shape[1], v.shape[1])
        if not serves(count, x.shape[-1], widths, dtype):
            # XLA joined the three products wherever it was looked at. A kernel's arrays would be cut out of the joint
            # one, a launch each; q and k are read where they lie in it instead. What stores V still has it cut out.
            joint, row = jnp.concatenate([q, k, v], axis=-1), sum(widths)
            strides = row, heads.head_dim, 1
            split = [
                (offset, (count, width // heads.head_dim, heads.head_dim))
                for offset, width in ((0, widths[0]), (widths[0], widths[1]))
            ]
            q, k = (View(joint, offset, shape, strides) for offset, shape in split)
            v = joint[:, row - widths[2] :]
        else:
            q, k = (rows.reshape(count, -1, heads.head_dim) for rows in (q, k))
        turns = (turn.reshape(count, turn.shape[-1]) for turn in (heads.cos, heads.sin))
        norms = dict(zip(("q_scale", "k_scale"), heads.scales, strict=True))
        q, k = head_rotary(q, k, *turns, **norms, eps=heads.eps, backend=supported(self.backend))
        return tuple(
            rows.reshape(*x.shape[:-1], width // heads.head_dim, heads.head_dim)
            for rows, width in zip((q, k, v), widths, strict=True)
        )

    def gated(self, x: Array, gate: Array, up: Array, dtype: Any) -> Array:
        """silu(x @ gate) * (x @ up), [B, T, M]."""
        return self._products(x, (gate, up), dtype, gated=True)[0].reshape(*x.shape[:-1], gate.shape[1])

    def _products(self, x, weights, dtype, *, gated=False):
        # Leading axes are flattened, so that B requests of T rows are one product of B * T rows.
        flat, cast = x.reshape(-1, x.shape[-1]).astype(dtype), tuple(weight.astype(dtype) for weight in weights)
        return row_products(flat, cast, gated=gated, backend=supported(self.backend))


PLAIN = Rows()

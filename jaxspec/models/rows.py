"""How the rows of a forward meet the weights: what a decoder computes row by row and a kernel may do at once.

Modules take a `Rows`, as they take `attend`. The default computes everything in plain jax, which can be differentiated;
a step hands over one that leaves to kernels what they do faster.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import head_rotary, row_products
from pallas_kernels.dispatch import supported

Array = jax.Array


def rms_norm(x: Array, scale: Array, eps: float, dtype: Any) -> Array:
    """`x [..., N]` over its root mean square along N, times `scale [N]`; float32 inside, `dtype` outside."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Products of rows [B, T, K] with weights.

    Attributes:
      backend: who runs the kernels, as in `pallas_kernels`; 'reference' is plain jax.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = jnp.ones((4, 2))
      >>> q, k = Rows().products(jnp.ones((1, 3, 4)), (ones, 2 * ones), "float32")
      >>> q.shape, k[0, 0].tolist()
      ((1, 3, 2), [8.0, 8.0])
    """

    backend: str | None = "reference"

    def products(self, x: Array, weights: tuple[Array, ...], dtype: Any) -> tuple[Array, ...]:
        """`x @ weight` of each weight [K, M]: [B, T, M] in `dtype`, summed in float32; float32 products are true ones
        (no TF32)."""
        return self._run(x, weights, dtype, gated=False)

    def gated(self, x: Array, gate: Array, up: Array, dtype: Any) -> Array:
        """silu(x @ gate) * (x @ up), [B, T, M]."""
        return self._run(x, (gate, up), dtype, gated=True)[0]

    def heads(
        self, q: Array, k: Array, cos: Array, sin: Array, q_scale: Array | None, k_scale: Array | None, eps: float
    ) -> tuple[Array, Array]:
        """Queries [B, T, Hq, hd] and keys [B, T, Hkv, hd], normed by their scales float[hd], if there are any, and
        rotated.

        The first channels of a head are, as many as twice cos and sin float32[B, T, 1, half] have.
        """
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k))
        turns = (x.reshape(-1, x.shape[-1]) for x in (cos, sin))
        found = head_rotary(*flat, *turns, q_scale=q_scale, k_scale=k_scale, eps=eps, backend=supported(self.backend))
        return found[0].reshape(q.shape), found[1].reshape(k.shape)

    def _run(self, x, weights, dtype, *, gated):
        # Leading axes are flattened, so that B requests of T rows are one product of B * T rows.
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        found = row_products(
            flat, tuple(weight.astype(dtype) for weight in weights), gated=gated, backend=supported(self.backend)
        )
        return tuple(out.reshape(*x.shape[:-1], out.shape[-1]) for out in found)


PLAIN = Rows()

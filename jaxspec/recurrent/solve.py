"""What the delta rule is solved with: full-precision products, and the inverse of a unit lower triangular matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

WHOLE = 16  # rows up to which masks are cheaper than cutting blocks out


def only_real(x: Array, real: Array | None) -> Array:
    """x [B, T, ...] with zeros in the rows that are not real, whatever is there."""
    return x if real is None else jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)


def unit(x: Array) -> Array:
    """x brought to length 1 along the last axis; zeros stay zeros."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def product(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def inverse(system):
    """(I + system)^-1 of strictly lower triangular matrices [..., C, C], from the inverses of blocks on the diagonal.

    The sum of powers of A would be as short, but for keys alike its terms grow like binomials and cancel; the inverse
    of every block is as tame as the rule itself.
    """
    C = system.shape[-1]
    if C > WHOLE and C % 2 == 0:
        half = C // 2
        upper, lower = inverse(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
        corner = -product("...ti,...ij->...tj", lower, matmul(system[..., half:, :half], upper))
        return jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])
    row, column = np.ogrid[:C, :C]
    found, size = jnp.eye(C, dtype=system.dtype), 1
    while size < C:  # blocks of `size` are done: pairs of them become blocks of twice the size
        corners = jnp.where((row // size % 2 == 1) & (column // size == row // size - 1), system, 0)
        if size > 1:
            corners = matmul(found, matmul(corners, found))
        found, size = found - corners, 2 * size
    return jnp.broadcast_to(found, system.shape)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
    found = inverse(*primals)
    return found, -matmul(found, matmul(tangents[0], found))

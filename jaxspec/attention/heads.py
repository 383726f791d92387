"""How projected rows become the heads that attention takes."""

import flax.struct
import jax

from pallas_kernels import View, head_rotary

Array = jax.Array


@flax.struct.dataclass
class Heads:
    """The norms and the rotation of queries and keys, for `jaxspec.attend` to do with storing them.

    Attributes:
      cos, sin: float32[B, D, 1, half], of the angles of each row; the first 2 * half channels of a head are rotated,
        channel i with channel half + i.
      scales: those of the norms of queries and of keys, float[head_dim] each, or None for no norm.
      eps: of these norms (static).
      rows: [B * D, K], by whose root mean squares queries, keys and values are still to be divided; None if by none.
        See `pallas_kernels.store_heads`.
      rows_eps: what is added to the mean square there (static).

    Example: `out, cache = jaxspec.attend(cache, layer, q, k, v, metadata, heads=heads)`, or by themselves
      >>> import jax.numpy as jnp
      >>> heads = Heads(jnp.zeros((1, 2, 1, 1)), jnp.ones((1, 2, 1, 1)))  # a quarter turn
      >>> q, k = heads.turned(jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]]), jnp.ones((2, 1, 2)))
      >>> q.shape, q[0, 1, 0].tolist()
      ((1, 2, 1, 2), [-4.0, 3.0])
    """

    cos: Array
    sin: Array
    scales: tuple[Array | None, Array | None] = (None, None)
    eps: float = flax.struct.field(pytree_node=False, default=1e-6)
    rows: Array | None = None
    rows_eps: float = flax.struct.field(pytree_node=False, default=0.0)

    @property
    def arguments(self) -> dict[str, Array | float | None]:
        """As `pallas_kernels.head_rotary` takes them, for rows [B * D, ...]."""
        cos, sin = (turn.reshape(-1, turn.shape[-1]) for turn in (self.cos, self.sin))
        return dict(cos=cos, sin=sin, q_scale=self.scales[0], k_scale=self.scales[1], eps=self.eps)

    def turned(self, q: Array | View, k: Array | View, backend: str | None = None) -> tuple[Array, Array]:
        """q [B, D, heads, head_dim] and k, normed and rotated, of projected rows [B * D, heads, head_dim] that nothing
        divides."""
        found = head_rotary(q, k, **self.arguments, backend=backend)
        return tuple(self.by_request(rows) for rows in found)

    def by_request(self, rows: Array) -> Array:
        """[B * D, ...] as [B, D, ...]."""
        return rows.reshape(*self.cos.shape[:2], *rows.shape[1:])

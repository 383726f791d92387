"""How projected rows become the heads that attention takes."""

import dataclasses

import jax

from pallas_kernels import View, head_rotary

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Heads:
    """The norms and the rotation of queries and keys, which some model has and some step computes.

    Attributes:
      head_dim: hd, channels of a head.
      cos, sin: float32[B, T, 1, half], of the angles of each row; the first 2 * half channels of a head are rotated.
      scales: those of the norms of queries and of keys, float[hd] each.
      eps: of these norms.
      rows, rows_eps: [B * T, K], by whose root mean squares queries, keys and values are still to be divided, with the
        eps under the root; None if by none. See `pallas_kernels.store_heads`.
    """

    head_dim: int
    cos: Array
    sin: Array
    scales: tuple[Array, Array]
    eps: float
    rows: Array | None = None
    rows_eps: float = 0.0

    @property
    def arguments(self) -> dict[str, Array | float]:
        """As `pallas_kernels.head_rotary` takes them, for rows [B * T, ...]."""
        cos, sin = (turn.reshape(-1, turn.shape[-1]) for turn in (self.cos, self.sin))
        return dict(cos=cos, sin=sin, q_scale=self.scales[0], k_scale=self.scales[1], eps=self.eps)

    def turned(self, q: Array | View, k: Array | View, backend: str | None) -> tuple[Array, Array]:
        """q [B, T, Hq, hd] and k [B, T, Hkv, hd], normed and rotated, of projected rows [B * T, heads, hd]."""
        found = head_rotary(q, k, **self.arguments, backend=backend)
        return tuple(self.by_request(rows) for rows in found)

    def by_request(self, rows: Array) -> Array:
        """[B * T, ...] as [B, T, ...]."""
        return rows.reshape(*self.cos.shape[:2], *rows.shape[1:])

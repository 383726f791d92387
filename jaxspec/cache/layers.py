"""What the layers of a model carry from one forward to the next.

There are two ways, and each kind of layer says in `carries` which is its own:

* POSITION: a row for each token, found by its position. Rows of rejected drafts stay behind and are overwritten when
  their positions come round again; nothing has to be undone.
* ACCUMULATED: one value a request into which every token has been folded. It cannot be overwritten in part, so a verify
  leaves it alone and keeps what it would be after each of its rows; commit stores the one after the last accepted row.

`LayerSpec` is what a layer of the first kind says of itself, `StateSpec` one of the second. The step asks no more.
`KPoolSpec` is a `LayerSpec` that keeps more by position: a key for each few tokens, and the last tokens' parts of the
keys to come.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar

import jax.numpy as jnp

POSITION, ACCUMULATED = "position", "accumulated"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one attention layer keeps for a token, and how far its queries look back. Position-addressed.

    Attributes:
      num_kv_heads: K/V heads.
      head_dim: width of one head of K, and of V where `value_dim` does not say otherwise.
      window: None for full attention; otherwise a query at position p sees keys at positions p - window + 1 .. p.
      storage: "full" or "swa", the kind of page the layer lives in. Pages of kind "swa" are retired once they fall
        behind the largest window of their kind. A windowed layer stored in "full" still clips its reads to its window.
      value_dim: width of one head of V; None for head_dim. 0 keeps no V: what attention sums up are the K rows, as in
        MLA, where one latent row is both.

    Example:
      >>> spec = LayerSpec(2, 64, value_dim=32)
      >>> spec.key_width, spec.value_width
      (128, 64)
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    storage: str = "full"
    value_dim: int | None = None
    carries: ClassVar[str] = POSITION

    def __post_init__(self):
        for name in ("num_kv_heads", "head_dim"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name}={size}: a layer keeps at least one head, at least one element wide")
        if self.value_dim is not None and self.value_dim < 0:
            raise ValueError(f"value_dim={self.value_dim}: the width of a head of V is at least 0, which keeps no V")
        if self.storage not in ("full", "swa"):
            raise ValueError(f"storage={self.storage!r}: a layer is stored in 'full' or 'swa' pages")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window}: a query sees itself, so a window is at least 1; use None for full attention"
            )
        if self.storage == "swa" and self.window is None:
            raise ValueError("storage='swa' needs a window: pages of that kind are freed behind it")

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and head width of K."""
        return self.num_kv_heads, self.head_dim

    @property
    def value_shape(self) -> tuple[int, int]:
        """Heads and head width of V."""
        return self.num_kv_heads, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_width(self) -> int:
        """Elements of a K row, all heads."""
        return math.prod(self.key_shape)

    @property
    def value_width(self) -> int:
        """Elements of a V row, all heads."""
        return math.prod(self.value_shape)


@dataclasses.dataclass(frozen=True)
class KPoolSpec(LayerSpec):
    """What an attention layer keeps that picks the tokens it looks at by compressed keys (KPool). Position-addressed.

    Besides K, and V if there is any, it keeps two things. Each `pool` neighbouring tokens have an index key of
    `index_dim` float8_e4m3fn and a float32 scale; those of a page lie together, the keys first. And each request has a
    ring of the bfloat16 keys and scores that index keys are made of: the token at position t has row t % ring. A pool
    is made again with each row that it was wrong about, and rows of rejected drafts are overwritten like K and V.

    Attributes:
      pool: p, tokens an index key stands for, a power of two; with 1 a query picks single tokens, and there is no tail.
      topk: tokens a query looks at, those behind the last whole pool not counted: a multiple of `pool`.
      index_dim: X, width of an index key, a power of two, at least 16.
      ring: rows of the ring: p and one for each row of a forward, so that no row takes the place of one that a pool is
        still to be made of. 0 where no step has said yet how many those are.

    Example:
      >>> spec = KPoolSpec(1, 576, value_dim=0).with_rows(6)
      >>> spec.ring, spec.tail_shape, spec.index_bytes(256)
      (10, (10, 2, 128), 8448)
    """

    pool: int = 4
    topk: int = 2048
    index_dim: int = 128
    ring: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.storage != "full" or self.window is not None:
            raise ValueError(
                f"storage={self.storage!r}, window={self.window}: a layer with compressed keys may look at any token; "
                "leave storage='full' and window=None"
            )
        if self.pool < 1 or self.pool & (self.pool - 1):
            raise ValueError(f"pool={self.pool}: must be a power of two, to divide a page")
        if self.topk < self.pool or self.topk % self.pool:
            raise ValueError(f"topk={self.topk}: tokens are picked by whole pools; choose a multiple of {self.pool}")
        if self.index_dim < 16 or self.index_dim & (self.index_dim - 1):
            raise ValueError(
                f"index_dim={self.index_dim}: keys go through a Hadamard transform, and have a byte an element; "
                "choose a power of two, at least 16"
            )
        if self.ring and self.ring <= self.pool:
            raise ValueError(
                f"ring={self.ring}: it holds a pool of {self.pool} tokens and the rows of a forward; use with_rows(D)"
            )

    def with_rows(self, rows: int) -> "KPoolSpec":
        """The layer with a ring for forwards of so many rows a request."""
        return dataclasses.replace(self, ring=self.pool + rows)

    @property
    def tail_shape(self) -> tuple[int, int, int]:
        """A request's ring: rows, key and score, elements."""
        return self.ring, 2, self.index_dim

    def index_bytes(self, page_size: int) -> int:
        """Bytes of a page's index keys and their scales."""
        return page_size // self.pool * (self.index_dim + 4)


def sized_layers(layers: Iterable["LayerSpec | StateSpec"], rows: int) -> tuple["LayerSpec | StateSpec", ...]:
    """The layers, those with compressed keys with rings for forwards of `rows` rows a request.

    Example:
      >>> [spec.ring for spec in sized_layers([KPoolSpec(1, 64), KPoolSpec(1, 64, pool=2)], 3)]
      [7, 5]
    """
    return tuple(spec.with_rows(rows) if isinstance(spec, KPoolSpec) else spec for spec in layers)


def check_pools(name: str, layers: Iterable["LayerSpec | StateSpec"], page_size: int) -> None:
    """Raises ValueError where a page is no whole number of a layer's pools, or a ring has no size yet."""
    for index, spec in enumerate(layers):
        if not isinstance(spec, KPoolSpec):
            continue
        if page_size % spec.pool:
            raise ValueError(
                f"page_size={page_size}: {name}[{index}] keeps a key for each {spec.pool} tokens, all of one page; "
                f"choose a page_size that is a multiple of {spec.pool}"
            )
        if not spec.ring:
            raise ValueError(
                f"{name}[{index}]: ring=0: how many rows its ring has depends on those of a forward, D; give "
                "sized_layers(layers, D)"
            )


@dataclasses.dataclass(frozen=True)
class StatePart:
    """One array of a layer's state.

    Attributes:
      name: what it is called in messages, as "conv".
      shape: of one request, without a batch axis.
      dtype: what it is kept in, as a string, whatever the dtype of K and V.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"state part {self.name!r} has shape {self.shape}: give at least one axis, none of them 0")

    @property
    def nbytes(self) -> int:
        """Bytes of one request's."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """What one recurrent layer keeps for a request. Accumulated.

    Attributes:
      parts: its arrays, at least one.

    Example:
      >>> spec = StateSpec((StatePart("conv", (3, 8)), StatePart("temporal", (2, 4, 4))))
      >>> spec.carries, [part.nbytes for part in spec.parts]
      ('accumulated', [96, 128])
    """

    parts: tuple[StatePart, ...]
    carries: ClassVar[str] = ACCUMULATED

    def __post_init__(self):
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("parts=(): a state has at least one part")

"""What the layers of a model carry from one forward to the next.

There are two ways, and each kind of layer says in `carries` which is its own:

* POSITION: a row for each token, found by its position. Rows of rejected drafts stay behind and are overwritten when
  their positions come round again; nothing has to be undone.
* ACCUMULATED: one value a request into which every token has been folded. It cannot be overwritten in part, so a verify
  leaves it alone and keeps what it would be after each of its rows; commit stores the one after the last accepted row.

`LayerSpec` is what a layer of the first kind says of itself, `StateSpec` one of the second. The step asks no more.
"""

import dataclasses
import math
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
      value_dim: width of one head of V; None for head_dim.

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
        for name in ("num_kv_heads", "head_dim", "value_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: a layer keeps at least one head, at least one element wide")
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

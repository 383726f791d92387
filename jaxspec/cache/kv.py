"""KV buffers, one array a layer.

A *slot* holds the K and V rows of one token in one layer; a *page* is `page_size` consecutive slots. Buffers are
addressed by physical slot: `slot = physical_page * page_size + position % page_size`. Physical page 0 of every buffer
is the *sink*: it belongs to nobody, rows that must not land anywhere write there, and nothing may depend on what it
holds.

Layers stay separate arrays (never stacked): inside a device loop XLA would copy a slice of a stacked buffer in every
turn.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one attention layer keeps for a token, and how far its queries look back.

    Attributes:
      num_kv_heads: K/V heads.
      head_dim: width of one head.
      window: None for full attention; otherwise a query at position p sees keys at positions p - window + 1 .. p.
      storage: "full" or "swa", the kind of page the layer lives in. Pages of kind "swa" are retired once they fall
        behind the largest window of their kind. A windowed layer stored in "full" still clips its reads to its window.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    storage: str = "full"

    def __post_init__(self):
        if self.storage not in ("full", "swa"):
            raise ValueError(f"storage={self.storage!r}: a layer is stored in 'full' or 'swa' pages")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window}: a query sees itself, so a window is at least 1; use None for full attention"
            )
        if self.storage == "swa" and self.window is None:
            raise ValueError("storage='swa' needs a window: pages of that kind are freed behind it")


@flax.struct.dataclass
class KVCache:
    """The cache view that a model writes and reads through `jaxspec.attend`.

    Attributes:
      buffers: one array a layer, [slots, 2, num_kv_heads, head_dim] in the cache dtype; index 0 of the second axis is
        K, 1 is V. `slots` = pages of the layer's storage kind * page_size.
      layers: the specification of each layer (static).
      page_size: tokens a page (static).
    """

    buffers: tuple[Array, ...]
    layers: tuple[LayerSpec, ...] = flax.struct.field(pytree_node=False)
    page_size: int = flax.struct.field(pytree_node=False)


def init_cache(
    layers: tuple[LayerSpec, ...], *, page_size: int, num_pages: int, num_swa_pages: int, dtype=jnp.float32
) -> KVCache:
    """Zero-filled buffers for `layers`.

    Args:
      layers: one specification a layer.
      page_size: tokens a page, a power of two.
      num_pages: pages of kind "full", the sink included.
      num_swa_pages: pages of kind "swa", the sink included; unused when no layer is stored there.
      dtype: storage dtype of K and V.

    Example:
      >>> cache = init_cache((LayerSpec(2, 64), LayerSpec(2, 64, 16, "swa")), page_size=4, num_pages=9, num_swa_pages=5)
      >>> [b.shape for b in cache.buffers]
      [(36, 2, 2, 64), (20, 2, 2, 64)]
    """

    def buffer(spec):
        pages = num_swa_pages if spec.storage == "swa" else num_pages
        return jnp.zeros((pages * page_size, 2, spec.num_kv_heads, spec.head_dim), dtype)

    return KVCache(buffers=tuple(buffer(spec) for spec in layers), layers=tuple(layers), page_size=page_size)

"""How a recurrent layer reaches its state: what a model calls, and what the step does with the answer.

A verify runs over rows that may be rejected, so it leaves the stored state as it is and keeps the states after each row
aside; `commit` stores the one after the last accepted row. A prefill knows all its rows to be real and stores the state
after the last of them. Which of the two a forward is, its metadata say; the layer is told only what to `keep`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, PoolCache
from jaxspec.cache.layers import ACCUMULATED
from jaxspec.cache.pages import read_first
from jaxspec.metadata import DraftExtendMetadata, VerifyMetadata
from jaxspec.metadata.ids import unmarked

Array = jax.Array
Cache = KVCache | PoolCache
Parts = tuple[Array, ...]
Update = Callable[[Parts, Array, str], tuple[Array, Parts]]


def recur(cache: Cache, layer: int, update: Update, metadata) -> tuple[Array, Cache]:
    """Runs one recurrent layer over the rows of a forward: what a model calls once a layer that has a state.

    Args:
      cache: the cache view that the step handed to the model.
      layer: index into `cache.layers` (static).
      update: the layer. `update(parts, real, keep)` gets the requests' states, [B, *shape] for each of the layer's
        `parts`, zeros where a request begins; real, bool[B, D], the rows that are tokens; and keep, "last" or "rows".
        It returns its output, any array, and the parts after the last real row, [B, *shape], or with "rows" after each
        row, [B, D, *shape]. Rows that are not real must change nothing.
      metadata: `VerifyMetadata` or `DraftExtendMetadata` of this forward.

    Returns:
      The output, and the cache: with the new state stored ("last"), or unchanged but for `pending` ("rows").

    Raises:
      TypeError: the metadata are of another kind or name no states, or the layer has none.
      ValueError: the parts that `update` returned have other shapes.
    """
    spec = cache.layers[layer]
    if spec.carries != ACCUMULATED:
        raise TypeError(f"layer {layer} is an attention layer: it has rows and no state, call jaxspec.attend")
    if metadata.state_slots is None:
        raise TypeError("metadata.state_slots is None: they were built for a model without recurrent layers")
    slots, positions = unmarked(metadata.state_slots, "state"), metadata.window.positions
    taking_part = slots >= 0
    if isinstance(metadata, VerifyMetadata):
        keep, real = "rows", jnp.broadcast_to(taking_part[:, None], positions.shape)
    elif isinstance(metadata, DraftExtendMetadata):
        column = jnp.arange(positions.shape[1], dtype=jnp.int32)
        keep, real = "last", taking_part[:, None] & (column < metadata.extend_lens[:, None])
    else:
        raise TypeError(f"{type(metadata).__name__}: a recurrent layer runs in a verify or a prefill, not in a draft")

    # A state is not cleared when it is handed out, so a request that begins must not see what is there.
    stored = taking_part & (positions[:, 0] > 0)
    # The states after each row are wanted at the end of a verify. XLA would rather read what they are made of there,
    # from before the writes in between, and copy the whole pool.
    parts, cache = read_first(cache.read_state(layer, jnp.where(taking_part, slots, 0)), cache)
    parts = tuple(jnp.where(stored.reshape(-1, *[1] * (part.ndim - 1)), part, 0) for part in parts)
    out, after = update(parts, real, keep)
    axes = positions.shape if keep == "rows" else positions.shape[:1]
    wanted, got = [(*axes, *part.shape) for part in spec.parts], [part.shape for part in after]
    if got != wanted:
        raise ValueError(f"layer {layer}: update returned parts of shapes {got}; with keep={keep!r} they are {wanted}")
    if keep == "rows":
        return out, cache.replace(pending={**cache.pending, layer: tuple(after)})
    return out, cache.write_state(layer, jnp.where(real.any(axis=1), slots, 0), tuple(after))


def take_pending(cache: Cache) -> tuple[Cache, dict[int, Parts]]:
    """The cache without the states that a verify has put aside, and those states."""
    return cache.replace(pending={}), cache.pending


def commit(
    cache: Cache, pending: dict[int, Parts], slots: Array, last_row: Array, *, backend: str | None = None
) -> Cache:
    """Stores, for each request, the states after the last row that it keeps.

    Args:
      cache: the cache before.
      pending: from `take_pending`.
      slots: int32[B], where the states of each request are; -1 for padding.
      last_row: int32[B], the row, 0 .. D - 1; -1 stores nothing.
      backend: who runs the kernel, see `pallas_kernels`.

    Returns:
      The cache after. A request that keeps no row, or is padding, has the state that it had.

    States at grid points, for whoever keeps them, are a second commit of the same rows to slots of their own: to the
    rows that `pallas_kernels.commit_track_indices` names.
    """
    for layer, parts in pending.items():
        cache = cache.commit_state(layer, slots, last_row, parts, backend)
    return cache

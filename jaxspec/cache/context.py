"""Commit of a block draft's context rows: K and V of all its layers, made of the target's features, in one call.

A block draft reads a text through the target's features: its K and V at a position are products of the features there.
A forward of the target gives those of all its rows; only the accepted ones may stay, and only they are written.
"""

import jax

from jaxspec.cache.kv import KVCache
from jaxspec.cache.layers import POSITION, KPoolSpec
from jaxspec.cache.pool import PoolCache
from jaxspec.metadata.ids import Ids, unmarked
from pallas_kernels import View, commit_context_rows

Array = jax.Array


def commit_context(
    cache: KVCache | PoolCache,
    k: Array | View,
    v: Array | View,
    norms: Array,
    cos: Array,
    sin: Array,
    *,
    full_loc: Array | Ids | None = None,
    swa_loc: Array | Ids | None = None,
    virtual_loc: Array | Ids | None = None,
    count: Array,
    eps: float,
    backend: str | None = None,
) -> KVCache | PoolCache:
    """Stores the first count[b] of each request's D context rows, in all N layers of a draft's cache.

    K is normed and rotated on its way, see `pallas_kernels.commit_context_rows`, which is launched once.

    Args:
      cache: the draft's own buffers, or a pool seen through the draft's lanes: `cache.replace(lanes="draft")`. Its
        layers keep K and V of one shape, in k's dtype.
      k, v: [B, D, N, num_kv_heads, head_dim], of the rows of the target's forward; or Views of the product that they
        come from.
      norms: [N, head_dim], each layer's weights of the norm of K.
      cos, sin: float32[B, D, head_dim / 2], or with an axis of size one before the last, as `rotary_angles` gives them.
      full_loc: int32[B, D], slots of layers that are stored in "full", as those of a forward's write window.
      swa_loc: the same of layers stored in "swa"; None where no layer is.
      virtual_loc: the same for buffers that are addressed by virtual ids, whatever their layers' storage; instead of
        the other two.
      count: int32[B], rows to store. Those behind may hold anything.
      eps: of the norm (static).
      backend: who runs the kernel, see `pallas_kernels` (static).

    Returns:
      The cache with the rows stored; all else is as it was, but for the sinks. In place where the buffers are donated.

    Raises:
      ValueError: layers of other shapes, or locations missing.
      TypeError: locations of another space, where ids are checked.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxspec.cache import LayerSpec, PoolLayout, init_pool
      >>> layout = PoolLayout.for_pages([LayerSpec(1, 4)], full=3, page_size=2, draft_layers=[LayerSpec(1, 4)] * 2)
      >>> cache = init_pool(layout).replace(lanes="draft")
      >>> rows, straight = jnp.full((1, 2, 2, 1, 4), 3.0), (jnp.ones((1, 2, 2)), jnp.zeros((1, 2, 2)))
      >>> slots, count = jnp.array([[4, 5]]), jnp.array([1])
      >>> cache = commit_context(cache, rows, rows, jnp.ones((2, 4)), *straight, full_loc=slots, count=count, eps=0.0)
      >>> [part[0, :, 0, 0].tolist() for part in cache.read(1, slots)]
      [[1.0, 0.0], [3.0, 0.0]]
    """
    _check_layers(cache, k)
    locs = {"full": full_loc, "swa": swa_loc} if virtual_loc is None else {"virtual": virtual_loc}
    spaces = [spec.storage if virtual_loc is None else "virtual" for spec in cache.layers]
    if missing := [space for space in spaces if locs[space] is None]:
        raise ValueError(f"{missing[0]}_loc=None: layers of the cache are stored in {missing[0]!r}; give their slots")
    used = list(dict.fromkeys(spaces))
    angles = (x.reshape(*x.shape[:2], x.shape[-1]) for x in (cos, sin))
    pooled = isinstance(cache, PoolCache)
    out = tuple(_rows(cache, layer) for layer in range(len(spaces))) if pooled else cache.buffers
    out = commit_context_rows(
        k,
        v,
        norms,
        *angles,
        tuple(unmarked(locs[space], space) for space in used),
        tuple(map(used.index, spaces)),
        count,
        out,
        eps=eps,
        backend=backend,
    )
    if not pooled:
        return cache.replace(buffers=out)
    return cache.replace(buffer=out[0].buffer) if out else cache


def _check_layers(cache: KVCache | PoolCache, k: Array | View) -> None:
    """Raises ValueError unless each layer keeps the K and V rows that are given."""
    if isinstance(cache, PoolCache) and k.dtype != cache.layout.dtype:  # a pool of bits would take them as they are
        raise ValueError(
            f"k is {k.dtype}, and the pool keeps {cache.layout.dtype}: a draft in its lanes computes in that"
        )
    if len(k.shape) != 5 or k.shape[2] != len(cache.layers):
        raise ValueError(f"k has shape {k.shape}: it must be [B, D, {len(cache.layers)}, heads, width], a row a layer")
    for index, spec in enumerate(cache.layers):
        plain = spec.carries == POSITION and not isinstance(spec, KPoolSpec)
        if not plain or not spec.key_shape == spec.value_shape == tuple(k.shape[3:]):
            raise ValueError(
                f"layers[{index}] is {spec}: context rows are K and V of {k.shape[3]} heads, {k.shape[4]} wide, alike "
                "in every layer"
            )


def _rows(cache: PoolCache, layer: int) -> View:
    """The rows of one layer in the entries of its kind, [slots, units, unit] or [pages, page size, units, unit]."""
    layout, draft = cache.layout, cache.lanes == "draft"
    row = layout.row(layer, draft)
    entry = (row.key_units + row.value_units, layout.unit)
    step, page, pages = layout.entry_units(row.kind), layout.page_units(row.kind), layout.num_pages(row.kind)
    slots, steps = (pages * layout.page_size,), (step,)
    if page != step * layout.page_size:  # something of the whole page lies behind its entries
        slots, steps = (pages, layout.page_size), (page, step)
    strides = (*(units * layout.unit for units in steps), layout.unit, 1)
    return View(cache.buffer, row.key * layout.unit, (*slots, *entry), strides)

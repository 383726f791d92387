"""The memory of a step: split pools, a buffer a layer and a pool for each kind of page, or one unified pool.

In a unified pool a drafter's layers are lanes of the target's entries, so its rows live and die with the target's.
Such a drafter names its layers as `cache_layers`, and its state has a field `cache`: the step lends it a view of the
pool while the drafter runs, and takes the pool back. A drafter whose rows cannot be lanes has a private pool in its own
state.
"""

from typing import Any

import jax

from jaxspec.cache import (
    KVCache,
    Pages,
    PoolCache,
    PoolLayout,
    UnifiedPages,
    init_cache,
    init_pages,
    init_pool,
    init_unified,
    sized_layers,
)
from jaxspec.cache.placement import PRIVATE
from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.metadata import Ids, StateTable
from jaxspec.models.contract import Model

Array = jax.Array


def place(target: Model, drafter: Drafter | None, config: SpecConfig) -> Drafter | None:
    """The drafter with its layers where this target and this memory want them; itself if it does not ask."""
    return drafter.placed(target, config) if hasattr(drafter, "placed") else drafter


def _layers(target: Model, drafter: Drafter | None, config: SpecConfig) -> dict[str, tuple]:
    """The target's layers and the drafter's lanes, sized for the rows of a round."""
    drafter = place(target, drafter, config)
    lists = {"layers": target.layers, "draft_layers": getattr(drafter, "cache_layers", ())}
    for name, layers in lists.items():
        for index, spec in enumerate(layers):
            pool = getattr(spec, "pool", 1)
            if config.page_size % pool:
                raise InputError(
                    f"page_size={config.page_size}: {name}[{index}] keeps a compressed key for each {pool} tokens, all "
                    f"of one page; choose a page_size that is a multiple of {pool}"
                )
    return {name: sized_layers(layers, config.num_draft_tokens) for name, layers in lists.items()}


def _settings(target: Model, drafter: Drafter | None, config: SpecConfig) -> dict[str, Any]:
    return {"page_size": config.page_size, "dtype": target.dtype, **_layers(target, drafter, config)}


def smallest_pool(
    target: Model, drafter: Drafter | None, config: SpecConfig, *, full: int, swa: int, state: int
) -> PoolLayout:
    """The layout of the smallest unified pool that holds so many pages of each kind that the model has."""
    return PoolLayout.for_pages(full=full, swa=swa, state=state, **_settings(target, drafter, config))


def pool_layout(target: Model, drafter: Drafter | None, config: SpecConfig) -> PoolLayout:
    """The layout of the unified pool: of `config.pool_bytes`, or just large enough for the pages that split pools would
    have."""
    if config.pool_bytes is not None:
        least = smallest_pool(target, drafter, config, full=1, swa=1, state=1).nbytes
        if config.pool_bytes < least:
            raise InputError(
                f"pool_bytes={config.pool_bytes}: the sinks and one page of each kind take {least} bytes, so give more"
            )
        return PoolLayout.for_budget(budget=config.pool_bytes, **_settings(target, drafter, config))
    full, swa = config.full_pages() - 1, config.swa_pages(target.swa_window) - 1
    if full < 1:
        raise InputError(f"num_pages={config.num_pages}: the pool needs a page besides the sink, so at least 2")
    return smallest_pool(target, drafter, config, full=full, swa=swa, state=config.batch_size)


def init_memory(
    target: Model, drafter: Drafter | None, config: SpecConfig
) -> tuple[KVCache | PoolCache, Pages | UnifiedPages, Any]:
    """The target's cache, the pages and the drafter's state, all empty."""
    drafter, private = place(target, drafter, config), {}
    shape = {"rows": config.rows, "pages_per_row": config.pages_per_row, "seed": config.pool_seed}
    if config.memory == "unified":
        layout = pool_layout(target, drafter, config)
        cache, pages = init_pool(layout), init_unified(layout, **shape)
        if private_bytes(drafter):
            private = {"num_pages": pages.v2p.shape[0]}
    else:
        num_pages, num_swa_pages = config.full_pages(), config.swa_pages(target.swa_window)
        sizes = {"page_size": config.page_size, "num_pages": num_pages}
        # The state of a request lies at its request row: there are as many, and none is ever short of one.
        layers = _layers(target, drafter, config)["layers"]
        cache = init_cache(layers, num_swa_pages=num_swa_pages, num_states=config.rows, dtype=target.dtype, **sizes)
        pages = init_pages(num_swa_pages=0 if target.swa_window is None else num_swa_pages, **sizes, **shape)
    return cache, pages, () if drafter is None else drafter.init(config, **private)


def private_bytes(drafter: Drafter | None) -> int:
    """Bytes a token in a placed drafter's private pool; 0 if it has none."""
    placement = getattr(drafter, "placement", None)
    return placement.token_bytes(drafter.dtype) if placement is not None and placement.where == PRIVATE else 0


def page_rows(config: SpecConfig, pages: Pages | UnifiedPages) -> Array | Ids:
    """The request table that metadata are built from, its ids marked as virtual if the step checks them."""
    return Ids(pages.page_table, "virtual") if config.check_ids else pages.page_table


def state_table(pages: Pages | UnifiedPages) -> StateTable | None:
    """Where the states of requests are, asked after the pages of a forward were handed out; None if that is their
    request rows."""
    return StateTable(pages.state_slot, pages.state_v2p) if isinstance(pages, UnifiedPages) else None


def lend(cache: KVCache | PoolCache, draft: Any) -> Any:
    """The drafter's state with its view of the pool, if its layers lie there."""
    if isinstance(cache, PoolCache) and cache.layout.draft_layers:
        return draft.replace(cache=cache.replace(lanes="draft"))
    return draft


def take_back(cache: KVCache | PoolCache, draft: Any) -> tuple[KVCache | PoolCache, Any]:
    """The target's cache and the drafter's state after the drafter has run: the inverse of `lend`."""
    if isinstance(cache, PoolCache) and cache.layout.draft_layers:
        return draft.cache.replace(lanes="host"), draft.replace(cache=None)
    return cache, draft


def memory_bytes(cache: KVCache | PoolCache, draft: Any) -> int:
    """Bytes of all buffers of K, V and states, those of a drafter with buffers of its own included."""
    own = getattr(draft, "cache", None)
    arrays = [cache.buffer] if isinstance(cache, PoolCache) else cache.buffers
    return sum(array.nbytes for array in jax.tree.leaves((arrays, () if own is None else own.buffers)))

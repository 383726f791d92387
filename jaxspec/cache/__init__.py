"""The paged KV cache: what one layer stores, where its rows lie, the buffers, and the pages that requests own."""

from jaxspec.cache.kv import KPoolBuffers, KVCache, init_cache
from jaxspec.cache.layers import KPoolSpec, LayerSpec, StatePart, StateSpec, sized_layers
from jaxspec.cache.layout import Entry, PoolLayout, Row, Span, StateRow
from jaxspec.cache.pages import Pages, init_pages
from jaxspec.cache.pool import PoolCache, init_pool
from jaxspec.cache.unified import UnifiedPages, init_unified

__all__ = [
    "Entry",
    "KPoolBuffers",
    "KPoolSpec",
    "KVCache",
    "LayerSpec",
    "Pages",
    "PoolCache",
    "PoolLayout",
    "Row",
    "Span",
    "StatePart",
    "StateRow",
    "StateSpec",
    "UnifiedPages",
    "init_cache",
    "init_pages",
    "init_pool",
    "init_unified",
    "sized_layers",
]

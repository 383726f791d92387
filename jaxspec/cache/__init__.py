"""The paged KV cache: what one layer stores, the buffers, and the pages that requests own."""

from jaxspec.cache.kv import KVCache, LayerSpec, init_cache
from jaxspec.cache.pages import Pages, allocate, init_pages, release, retire

__all__ = ["KVCache", "LayerSpec", "Pages", "allocate", "init_cache", "init_pages", "release", "retire"]

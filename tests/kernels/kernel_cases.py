"""Running a metadata kernel in a test: quick compilation, poisoned destinations, random request tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import DecodeTables, MetadataLayout, PackedMetadata, WindowBuffers

STALE = -7  # in every destination cell before a call
BACKENDS = ["reference", "interpret", pytest.param("triton", marks=pytest.mark.gpu)]
EVERY_BACKEND = [*BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]


@functools.cache
def _options():
    """XLA options that compile an interpreted kernel four times as fast on CPU."""
    if jax.default_backend() != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return options | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})


@functools.cache
def _compiled(function, static):
    call = lambda arrays, out: function(**arrays, out=out, **dict(static))  # noqa: E731
    return jax.jit(call, compiler_options=_options())


def run(function, out, **arguments):
    """function(out=out, ...) compiled once for its static arguments; arrays (also jax ones) are operands."""
    arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray | jax.Array)}
    static = {k: v for k, v in arguments.items() if k not in arrays}
    return jax.tree.map(np.asarray, _compiled(function, tuple(sorted(static.items())))(arrays, out))


def stale(*shape):
    return jnp.full(shape, STALE, jnp.int32)


def decode_out(batch, pages, has_swa):
    swa = stale(batch, pages) if has_swa else None
    return DecodeTables(stale(batch), stale(batch + 1), stale(batch, pages), swa)


def window_out(batch, rows, has_swa, has_anchor=True):
    columns = [stale(batch, rows) for _ in range(5)]
    return WindowBuffers(*columns[:2], columns[2] if has_swa else None, columns[3], columns[4] if has_anchor else None)


def packed_out(layout: MetadataLayout):
    return PackedMetadata(stale(layout.size), layout)


def to_dict(out):
    """A destination as writable NumPy arrays by name, for the oracle."""
    return {k: None if v is None else np.array(v) for k, v in out._asdict().items()}


def assert_equal(actual, expected: dict):
    for name, value in actual._asdict().items():
        if value is None:
            assert expected.get(name) is None, name
        else:
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def request_table(rng, rows, columns, virtual_pages, bad=0.15):
    """int32[rows, columns] of virtual pages, some -1 and some past every map; row 0 is the sink row."""
    table = rng.integers(0, virtual_pages, (rows, columns))
    wrong = rng.choice([-1, virtual_pages, virtual_pages + 5], table.shape)
    table = np.where(rng.random(table.shape) < bad, wrong, table)
    table[0] = 0
    return table.astype(np.int32)


def page_map(rng, virtual_pages, unbound):
    """int32[virtual_pages]: a permutation of the pages with some unbound; page 0 is the sink."""
    table = 1 + rng.permutation(virtual_pages)
    table = np.where(rng.random(virtual_pages) < unbound, -1, table)
    table[0] = 0
    return table.astype(np.int32)


def as_tokens(pages, page_size):
    """The token-granular form of a page-granular table; a negative page gives negative tokens."""
    tokens = pages[:, :, None].astype(np.int64) * page_size + np.arange(page_size)
    return np.where(pages[:, :, None] < 0, pages[:, :, None], tokens).reshape(len(pages), -1).astype(np.int32)


def edge_lengths(page_size, full, batch):
    """Lengths around the edges of a page and of the cache, as many as the batch has rows."""
    edges = [page_size, 0, full, page_size + 1, 1, page_size - 1, full - 1]
    return np.array([min(max(edges[b % len(edges)], 0), full) for b in range(batch)], np.int32)

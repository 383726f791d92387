"""The kernels of the selection step inside a sparse layer: interpreted, they pick the tokens that the reference picks,
over separate buffers and over one pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxspec.attention import IndexRows, attend_pooled, attend_selected
from jaxspec.attention.selection import pool_scores, select_pools
from jaxspec.cache import KPoolSpec, LayerSpec, PoolLayout, init_cache, init_pool
from jaxspec.metadata import KPool, draft_extend_metadata, verify_layout
from pallas_kernels import PackedMetadata, top_ids
from pallas_kernels import pool_scores as paged_scores

POOL, TOPK, PAGE, X, HI, WIDTH, HEADS, D = 4, 12, 32, 64, 3, 64, 2, 20
B, P = 3, 5
KPOOL = KPool(POOL, TOPK)
SPEC = KPoolSpec(1, WIDTH, value_dim=0, pool=POOL, topk=TOPK, index_dim=X).with_rows(D)
LAYERS = [LayerSpec(1, WIDTH), SPEC]
DTYPES = {"static": "float32", "unified": "float32", "unified, pairs": "bfloat16"}  # of K and V, by memory
EXTEND = [[20, 9, 20], [7, 0, 20], [20, 0, 20], [0, 1, 20], [4, 0, 20], [5, 2, 13], [1, 0, 20]]  # rows of each forward
each_memory = pytest.mark.parametrize("memory", DTYPES)
GPU = pytest.param("triton", marks=pytest.mark.gpu)


def empty(memory):
    """A cache of ones in every bit: no number, where there is one."""
    if memory == "static":
        cache = init_cache(LAYERS, page_size=PAGE, num_pages=B * P + 1, num_swa_pages=1, num_states=B + 1)
    else:
        cache = init_pool(PoolLayout.for_pages(LAYERS, full=B * P, state=B, page_size=PAGE, dtype=DTYPES[memory]))
    return jax.tree.map(lambda x: ~x if jnp.issubdtype(x.dtype, jnp.integer) else jnp.full_like(x, jnp.nan), cache)


def tables(cache, rng):
    """(page_rows, v2p, lanes): pages in any order, clear of sinks and states."""
    first = 1 if not hasattr(cache, "layout") else cache.layout.num_pages("full") - B * P
    page_rows, v2p = np.zeros((B + 1, P), np.int32), np.zeros((B * P + 1, 2), np.int32)
    page_rows[1:] = 1 + rng.permutation(B * P).reshape(B, P)
    v2p[1:, 0] = first + rng.permutation(B * P)
    lanes = np.arange(1, B + 1, dtype=np.int32)
    if hasattr(cache, "layout"):
        lanes += cache.layout.min_page("state") - 1
        page_rows = np.concatenate([np.zeros((lanes[0] - 1, P), np.int32), page_rows])
    return jnp.asarray(page_rows), jnp.asarray(v2p), jnp.asarray(lanes)


@functools.partial(jax.jit, static_argnames="backend", compiler_options=quick_compile.options())
def forward(cache, rows, metadata, backend):
    index = IndexRows(rows["query"], rows["weight"], rows["key"], rows["score"], rows["ape"])
    return attend_pooled(cache, 1, rows["q"], rows["k"][:, :, None], None, index, metadata.replace(backend=backend))


@functools.cache
def forwards(memory, backend):
    """[out, tokens, count] of the real rows of each forward; the cache, the page table and the lengths after."""
    rng = np.random.default_rng(0)
    cache = empty(memory)
    page_rows, v2p, lanes = tables(cache, rng)
    shapes = {"q": (HEADS, WIDTH), "k": (WIDTH,), "query": (HI, X), "weight": (HI,), "key": (X,), "score": (X,)}
    layout = verify_layout(batch_size=B, pages_per_row=P, swa=False, states=True, num_rows=D, kpool=KPOOL)
    ape, found, length = rng.standard_normal((POOL, X)).astype(np.float32), [], np.zeros(B, np.int32)
    for extend in np.array(EXTEND, np.int32):
        rows = {name: rng.standard_normal((B, D, *shape)).astype(np.float32) for name, shape in shapes.items()}
        metadata, _ = draft_extend_metadata(
            jnp.asarray(length),
            jnp.asarray(extend),
            lanes,
            page_rows,
            v2p,
            PackedMetadata.zeros(layout),
            page_size=PAGE,
            kpool=KPOOL,
        )
        out, cache, selection = forward(cache, rows | {"ape": ape}, metadata, backend)
        live = np.arange(D) < extend[:, None]
        found.append([np.asarray(x)[live] for x in (out, *selection)])
        length += extend
    return found, cache, metadata.page_table, length


@pytest.mark.parametrize("backend", ["interpret", None, GPU])
@each_memory
def test_the_kernels_select_what_the_reference_selects(memory, backend):
    wanted, found = (forwards(memory, name)[0] for name in ("reference", backend))
    assert max(count.max() for _, _, count in wanted) == TOPK + POOL - 1  # there was a choice
    for (out, *selection), (other_out, *other) in zip(wanted, found, strict=True):
        for left, right in zip(selection, other, strict=True):
            np.testing.assert_array_equal(left, right)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(other_out, out, rtol=2e-2 if backend == "triton" else 1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU None is the kernels")
@pytest.mark.parametrize("backend", [None, "reference"])
@each_memory
def test_on_a_cpu_the_bits_are_those_of_all_pages_read(memory, backend):
    _, cache, table, length = forwards(memory, "reference")
    rng = np.random.default_rng(3)
    query = jnp.asarray(rng.standard_normal((B, D, HI, X)), jnp.float8_e4m3fn)
    weights = jnp.asarray(rng.standard_normal((B, D, HI)), jnp.float32)
    lens = jnp.broadcast_to(jnp.asarray(length // POOL)[:, None], (B, D))

    @jax.jit
    def whole(cache):
        scores = pool_scores(query, weights, *cache.read_index(1, table))
        return scores, select_pools(scores, lens, 3)

    @jax.jit
    def paged(cache):
        scores = paged_scores(query, weights, cache.index_pages(1), table, lens, backend=backend)
        chosen = top_ids(scores.reshape(B * D, -1), lens.reshape(B * D), budget=3, backend=backend)
        return scores, chosen.reshape(B, D, 3)

    for left, right in zip(whole(cache), paged(cache), strict=True):
        np.testing.assert_array_equal(left, right)


@each_memory
def test_pages_behind_the_last_pool_are_not_read(memory):
    """An id in the stale part of the table may be anything."""
    _, cache, table, length = forwards(memory, "reference")
    pools = jnp.asarray(length // POOL)[:, None]
    stale = np.arange(P) * (PAGE // POOL) >= np.asarray(pools)
    assert stale.any(axis=1).sum() == 2
    query, weights = jnp.ones((B, 1, HI, X), jnp.float8_e4m3fn), jnp.ones((B, 1, HI))
    want = paged_scores(query, weights, cache.index_pages(1), table, pools, backend="reference")
    wild = jnp.where(stale, 2**31 - 1, table)
    found = paged_scores(query, weights, cache.index_pages(1), wild, pools, backend="interpret")
    for b, live in enumerate(np.asarray(pools)[:, 0]):
        assert live == 0 or np.isfinite(want[b, :, :live]).all()
        np.testing.assert_allclose(found[b, :, :live], want[b, :, :live], rtol=1e-5)


def test_a_compiled_backend_of_the_lane_language_leaves_the_scores_to_the_platform(monkeypatch):
    """'mosaic' is for the kernels that it has; the scores are then those of None."""
    import jaxspec.attention.kpool as module

    seen = []
    monkeypatch.setattr(module, "top_ids", lambda *a, backend, **k: seen.append(backend) or top_ids(*a, **k))
    forward.clear_cache()
    found = forwards.__wrapped__("static", "mosaic")[0]
    assert set(seen) == {"mosaic"}
    for left, right in zip(found, forwards("static", "reference")[0], strict=True):
        np.testing.assert_array_equal(left[1], right[1])


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", True), ("float64", False)])
def test_what_the_kernel_does_not_take_is_gathered_on_a_gpu_too(dtype, kernels):
    with jax.enable_x64(True):
        layers = (KPoolSpec(1, 32, value_dim=0).with_rows(2),)
        cache = init_cache(layers, page_size=8, num_pages=5, num_swa_pages=1, num_states=2, dtype=dtype)
        q, slots = jnp.ones((1, 2, 2, 32), dtype), jnp.arange(18, dtype=jnp.int32).reshape(1, 2, 9)
        call = jax.jit(lambda *rows: attend_selected(rows[0], 0, *rows[1:]))
        arguments = cache, q, slots, jnp.full((1, 2), 4, jnp.int32)
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))):
            text = call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert ("xla.gpu.triton" in text) is kernels
        assert call(*arguments).dtype == dtype

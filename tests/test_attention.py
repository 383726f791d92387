"""Paged attention against float64 loops, with wild values in every cell that must not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import quick_compile

from jaxspec.attention import Heads, attend, paged_attention
from jaxspec.cache import LayerSpec, PoolLayout, init_cache, init_pool
from jaxspec.metadata import DecodeMetadata, WriteWindow

PAGE, P = 4, 6
HEADS, KV_HEADS, WIDTH = 4, 2, 8
LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16)  # committed tokens, around the edges of pages and windows
WINDOWS = (None, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 100)


@functools.cache
def compiled(window, page_size=PAGE, scale=None):
    return jax.jit(functools.partial(paged_attention, page_size=page_size, window=window, scale=scale))


def problem(seed, D, committed=LENGTHS, *, page_size=PAGE, heads=HEADS, kv_heads=KV_HEADS, window=None):
    """Queries behind each request's committed tokens, rows scattered over shuffled pages, and wild values elsewhere.

    Lane 0 is padding: no keys, and a table of zeros. Columns of the table that no query needs name any page in range.
    """
    rng = np.random.default_rng(seed)
    B, pages = len(committed), 1 + len(committed) * P
    committed = np.array(committed)
    q = rng.standard_normal((B, D, heads, WIDTH)).astype(np.float32)
    positions = (committed[:, None] + np.arange(D)).astype(np.int32)
    lengths = np.where(committed > 0, committed + D, 0).astype(np.int32)
    table = (1 + rng.permutation(pages - 1)).reshape(B, P).astype(np.int32)
    table[committed == 0] = 0

    kv = np.full((pages * page_size, 2, kv_heads, WIDTH), np.nan, np.float32)
    kv[rng.random(len(kv)) < 0.5] = 3e38
    for b in range(B):
        start = 0 if window is None else max(0, committed[b] - window + 1)
        for p in range(start, lengths[b]):
            kv[table[b, p // page_size] * page_size + p % page_size] = rng.standard_normal((2, kv_heads, WIDTH))
        needed = range(start // page_size, -(-lengths[b] // page_size))
        stale = [column for column in range(P) if column not in needed]
        table[b, stale] = rng.integers(0, pages, len(stale))
    return q, kv, table, positions, lengths


def check(arguments, *, page_size=PAGE, window=None, scale=None):
    out = np.asarray(compiled(window, page_size, scale)(*arguments))
    want = oracles.attention(*arguments, page_size=page_size, window=window, scale=scale)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)
    return out


@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_ragged_lengths(D, window):
    arguments = problem(D, D, window=window)
    out = check(arguments, window=window)
    assert (out[0] == 0).all()  # padding sees no key


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("window", [None, 3])
def test_page_sizes(page_size, window):
    committed = (0, 1, 2) if page_size == 1 else (0, page_size - 1, page_size, page_size + 1, 3 * page_size)
    check(problem(1, 3, committed, page_size=page_size, window=window), page_size=page_size, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 3)])
def test_head_groups(heads, kv_heads):
    check(problem(2, 3, heads=heads, kv_heads=kv_heads))


def test_scale():
    arguments = problem(3, 2)
    assert not np.allclose(check(arguments, scale=1.0), check(arguments, scale=0.25), atol=1e-3)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_where_the_pages_lie_does_not_matter(window):
    """All pages moved and the table with them: equal to the last bit."""
    q, kv, table, positions, lengths = problem(4, 4, window=window)
    to = np.random.default_rng(0).permutation(len(kv) // PAGE)
    moved = np.empty_like(kv.reshape(-1, PAGE, *kv.shape[1:]))
    moved[to] = kv.reshape(moved.shape)
    here = compiled(window)(q, kv, table, positions, lengths)
    there = compiled(window)(q, moved.reshape(kv.shape), to[table].astype(np.int32), positions, lengths)
    np.testing.assert_array_equal(here, there)


def test_each_request_by_itself():
    """A request's rows do not depend on who else is in the batch, or in which lane it is."""
    arguments = problem(5, 3, window=PAGE)
    out = check(arguments, window=PAGE)
    q, kv, table, positions, lengths = arguments
    order = np.random.default_rng(1).permutation(len(lengths))
    again = compiled(PAGE)(q[order], kv, table[order], positions[order], lengths[order])
    np.testing.assert_array_equal(out[order], again)


def test_bfloat16_keeps_its_type():
    """Scores and sums are float32 inside: the error is that of rounding inputs and output."""
    q, kv, table, positions, lengths = problem(6, 2)
    short = [np.asarray(x.astype(jnp.bfloat16).astype(np.float32)) for x in (jnp.asarray(q), jnp.asarray(kv))]
    out = compiled(None)(jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), table, positions, lengths)
    assert out.dtype == jnp.bfloat16
    want = oracles.attention(*short, table, positions, lengths, page_size=PAGE)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), want, rtol=0.02, atol=0.02)


def test_heads_that_do_not_divide():
    q, kv, table, positions, lengths = problem(7, 1, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 heads, kv 2"):
        paged_attention(q, kv, table, positions, lengths, page_size=PAGE)


# Cache views: what a model sees through `attend` is the same whatever the memory behind it

MODEL = (
    LayerSpec(2, 16, value_dim=8),
    LayerSpec(2, 16, 6, "swa"),
    LayerSpec(2, 8, 5, value_dim=24),  # windowed, stored in FULL
    LayerSpec(1, 24, 11, "swa", value_dim=8),
)
DRAFT = (LayerSpec(1, 16), LayerSpec(2, 8, 13, value_dim=16))  # the window is larger than the model's SWA windows
REQUESTS = 5


def batch(seed, D, page_size):
    """Requests with texts around a page's edge, the first of them padding, and rows of all layers for every token."""
    rng = np.random.default_rng(seed)
    around = page_size if page_size > 2 else 12
    committed = np.array([0, 1, around - 1, around, around + 1])
    columns = -(-(committed.max() + D) // page_size)
    rows = {
        lanes: [
            tuple(rng.standard_normal((REQUESTS, committed.max() + D, *shape)).astype(np.float32) for shape in shapes)
            for shapes in ((spec.key_shape, spec.value_shape) for spec in layers)
        ]
        for lanes, layers in (("host", MODEL), ("draft", DRAFT))
    }
    return committed, int(columns), rows


def views(layout, dtype):
    """{name: the caches of model and draft, NaN in every byte}; the two of the pool are one."""
    sizes = {"num_pages": layout.num_pages("full"), "num_swa_pages": layout.num_pages("swa")}
    split = [init_cache(layers, page_size=layout.page_size, dtype=dtype, **sizes) for layers in (MODEL, DRAFT)]
    nan = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tree)  # noqa: E731
    return {"split": nan(split), "pool": nan(init_pool(layout))}


def lane(caches, lanes):
    """The view of a model's own layers or of the draft's."""
    return caches.replace(lanes=lanes) if hasattr(caches, "lanes") else caches[lanes == "draft"]


def with_lane(caches, lanes, cache):
    if hasattr(caches, "lanes"):
        return cache
    return [cache, caches[1]] if lanes == "host" else [caches[0], cache]


def forward(caches, tables, committed, rows, queries, *, D, page_size):
    """Stores what the texts' next queries may see, then appends D rows and attends, layer after layer."""

    def slots(kind, positions, wanted):
        page = jnp.take_along_axis(tables[kind], jnp.where(wanted, positions // page_size, 0), axis=1)
        return jnp.where(wanted, page * page_size + positions % page_size, 0)

    B, text = rows["host"][0][0].shape[:2]
    before = jnp.broadcast_to(jnp.arange(text, dtype=jnp.int32), (B, text))
    for lanes in ("host", "draft"):
        for index, spec in enumerate(lane(caches, lanes).layers):
            first = 0 if spec.window is None else committed[:, None] - spec.window + 1
            seen = (before >= first) & (before < committed[:, None])
            # What may not be read is NaN in the sink, too.
            k, v = (jnp.where(seen[..., None, None], x, jnp.nan) for x in rows[lanes][index])
            cache = lane(caches, lanes).write(index, slots(spec.storage, before, seen), k, v)
            caches = with_lane(caches, lanes, cache)

    positions = committed[:, None] + jnp.arange(D, dtype=jnp.int32)
    live = jnp.broadcast_to(committed[:, None] > 0, positions.shape)
    lengths = jnp.where(committed > 0, committed + D, 0)
    full, swa = (slots(kind, positions, live) for kind in ("full", "swa"))
    metadata = DecodeMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=jnp.zeros((B + 1,), jnp.int32),
        page_table=tables["full"],
        swa_page_table=tables["swa"],
        window=WriteWindow(virtual_loc=full, full_loc=full, swa_loc=swa, positions=positions),
        logit_rows=None,
        state_slots=None,
    )
    outputs = []
    for lanes in ("host", "draft"):
        for index, q in enumerate(queries[lanes]):
            new = (jnp.take_along_axis(x, positions[..., None, None], axis=1) for x in rows[lanes][index])
            out, cache = attend(lane(caches, lanes), index, q, *new, metadata)
            caches = with_lane(caches, lanes, cache)
            outputs.append(out)
    return outputs


@pytest.mark.parametrize("memory", ["split", "pool"])
@pytest.mark.parametrize(("backend", "dtype"), [(None, "float32"), ("interpret", "float32"), ("interpret", "bfloat16")])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_turned_on_their_way_to_the_cache(memory, backend, dtype, normed):
    """The same bits of what attention gives and of the cache, as when they are turned first; padding stores nothing."""
    rng, page_size, D = np.random.default_rng(0), 4, 3
    spec = MODEL[2]
    layout = PoolLayout.for_pages(MODEL, full=9, swa=9, page_size=page_size, dtype=dtype)
    cache = init_pool(layout)
    if memory == "split":
        cache = init_cache(MODEL, page_size=page_size, num_pages=9, num_swa_pages=9, dtype=dtype)
    first = layout.min_page("full")
    slots = jnp.array([[0, 0, 0], [first * page_size + 3, (first + 1) * page_size, 0]], jnp.int32)
    positions = jnp.array([[0, 1, 2], [3, 4, 5]], jnp.int32)
    table = jnp.array([[0, 0], [first, first + 1]], jnp.int32)
    metadata = DecodeMetadata(
        cache_seqlens=jnp.array([0, 5]),
        cu_seqlens_k=jnp.zeros(3, jnp.int32),
        page_table=table,
        swa_page_table=table,
        window=WriteWindow(virtual_loc=slots, full_loc=slots, swa_loc=slots, positions=positions),
        logit_rows=None,
        state_slots=None,
        backend=backend,
    )
    draw = [(4, spec.head_dim), spec.key_shape, spec.value_shape]
    q, k, v = (jnp.asarray(rng.standard_normal((2 * D, *shape)), dtype) for shape in draw)
    angles = rng.uniform(0, 6, (2, D, 1, spec.head_dim // 2)).astype(np.float32)
    scales = tuple(jnp.asarray(rng.uniform(0.5, 2, spec.head_dim), dtype) if normed else None for _ in range(2))
    heads = Heads(np.cos(angles), np.sin(angles), scales)
    run = jax.jit(functools.partial(attend, layer=2), compiler_options=quick_compile.options())

    found = run(cache, q=q, k=k, v=v, metadata=metadata, heads=heads)
    turned = jax.jit(functools.partial(Heads.turned, backend=backend), compiler_options=quick_compile.options())
    turned = turned(heads, q, k)
    want = run(cache, q=turned[0], k=turned[1], v=heads.by_request(v), metadata=metadata)
    assert found[0].shape == (2, D, 4, spec.value_shape[1]) and not np.asarray(found[0][0]).any()
    np.testing.assert_array_equal(found[0][1, :2], want[0][1, :2])
    stored = [np.asarray(x) for cache in (found[1], want[1]) for x in cache.read(2, slots[1:, :2])]
    for x, y in zip(stored[:2], stored[2:], strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.any(axis=(-2, -1)).all()
    kept = [np.asarray(x) for x in found[1].read(2, slots[1:, :1] + 1 + jnp.arange(4)) if x.size]
    for x in kept:
        assert x[0, 0].any() and not x[0, 1:].any()


def scattered(seed, layout, committed, columns):
    """Page tables of both kinds: pages that share no byte, in any order; a padded row's are 0."""
    rng = np.random.default_rng(seed)
    count = REQUESTS * columns
    top, low = layout.num_pages("full"), layout.min_page("swa")
    pages = {"full": top - 1 - rng.permutation(count), "swa": low + rng.permutation(count)}
    return {
        kind: np.where(committed[:, None] > 0, ids.reshape(REQUESTS, columns), 0).astype(np.int32)
        for kind, ids in pages.items()
    }


@pytest.mark.parametrize(
    ("D", "page_size", "dtype", "fast"),
    [
        (1, 128, "float32", True),
        (2, 4, "bfloat16", True),
        (3, 1, "float32", True),
        (4, 64, "bfloat16", True),
        (5, 2, "float32", True),
        (6, 8, "bfloat16", True),
        (7, 32, "float32", True),
        (8, 16, "bfloat16", True),
        (4, 4, "float32", False),  # the program that users get
        pytest.param(4, 1, "bfloat16", False, marks=pytest.mark.slow),
    ],
)
def test_views_agree_to_the_last_bit(D, page_size, dtype, fast):
    """One array a layer or one pool, pages here or there: the same bits, and those the oracle asks for."""
    run = jax.jit(
        functools.partial(forward, D=D, page_size=page_size),
        compiler_options=quick_compile.options() if fast else None,
    )
    committed, columns, rows = batch(D, D, page_size)
    count = REQUESTS * columns
    layout = PoolLayout.for_pages(MODEL, draft_layers=DRAFT, full=count, swa=count, page_size=page_size, dtype=dtype)
    rng = np.random.default_rng(0)
    queries = {
        lanes: [
            jnp.asarray(rng.standard_normal((REQUESTS, D, 2 * spec.num_kv_heads, spec.head_dim)), dtype)
            for spec in layers
        ]
        for lanes, layers in (("host", MODEL), ("draft", DRAFT))
    }
    rows = jax.tree.map(lambda x: jnp.asarray(x, dtype), rows)
    results = [
        run(caches, scattered(seed, layout, committed, columns), committed.astype(np.int32), rows, queries)
        for caches in views(layout, dtype).values()
        for seed in (1, 2)
    ]
    for other in results[1:]:
        for want, got in zip(results[0], other, strict=True):
            assert got.dtype == want.dtype == dtype
            np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))

    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    positions = committed[:, None] + np.arange(D)
    own = np.arange(REQUESTS * rows["host"][0][0].shape[1]).reshape(REQUESTS, -1)  # tokens in order, pages of one token
    for spec, q, (k, v), out in zip(
        MODEL + DRAFT, queries["host"] + queries["draft"], rows["host"] + rows["draft"], results[0], strict=True
    ):
        q, k, v, out = (np.asarray(x.astype(jnp.float32)) for x in (q, k, v, out))
        width = max(k.shape[-1], v.shape[-1])
        wide = lambda x: np.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])  # noqa: B023, E731
        kv = np.stack([wide(k), wide(v)], axis=2).reshape(-1, 2, spec.num_kv_heads, width)
        lengths = np.where(committed > 0, committed + D, 0)
        want = oracles.attention(
            wide(q), kv, own, positions, lengths, page_size=1, window=spec.window, scale=spec.head_dim**-0.5
        )
        np.testing.assert_allclose(out, want[..., : v.shape[-1]], **tolerance)


def test_a_reader_or_an_array():
    """`paged_attention` of a cache's reader is that of the same rows in one array."""
    q, kv, *rest = problem(8, 3)
    cache = init_cache([LayerSpec(KV_HEADS, WIDTH)], page_size=PAGE, num_pages=len(kv) // PAGE, num_swa_pages=0)
    cache = cache.write(0, jnp.arange(len(kv))[None], kv[None, :, 0], kv[None, :, 1])
    read = jax.jit(lambda cache, q, *rest: paged_attention(q, functools.partial(cache.read, 0), *rest, page_size=PAGE))
    np.testing.assert_array_equal(compiled(None)(q, kv, *rest), read(cache, q, *rest))


@pytest.mark.parametrize("kind", ["array", "reader"])
def test_an_empty_batch(kind):
    kv = (
        jnp.zeros((8, 2, 1, 4)) if kind == "array" else lambda slots: (jnp.zeros((0, 8, 1, 4)), jnp.zeros((0, 8, 1, 2)))
    )
    none = jnp.zeros((0, 2), jnp.int32)
    out = paged_attention(jnp.zeros((0, 2, 2, 4)), kv, none, none, none[:, 0], page_size=4)
    assert out.shape == (0, 2, 2, 4 if kind == "array" else 2)

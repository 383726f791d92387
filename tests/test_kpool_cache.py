"""Compressed keys and rings in both memories: their bytes, equal reads, pages that move, sizes, and no copies."""

import dataclasses
import functools
import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pool_cases
import pytest
import quick_compile
from jax import lax
from test_unified_place import large_copies

import jaxspec
from jaxspec.cache import (
    KPoolSpec,
    KVCache,
    LayerSpec,
    PoolLayout,
    StatePart,
    StateSpec,
    init_cache,
    init_pool,
    init_unified,
    sized_layers,
)
from jaxspec.models.contract import Model
from jaxspec.steps.memory import init_memory, pool_layout
from jaxspec.steps.sizing import PoolConfig

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

D = 3  # rows a forward
FULL, STATES = 5, 3  # pages alive in the tests, sinks not counted


def layers_of(pool, index_dim):
    """MLA and attention with V, both with compressed keys, beside a window and a state; the same among the lanes."""
    latent = KPoolSpec(1, 96, value_dim=0, pool=pool, topk=4 * pool, index_dim=index_dim)
    grouped = KPoolSpec(2, 32, value_dim=16, pool=pool, topk=4 * pool, index_dim=index_dim)
    state = StateSpec((StatePart("conv", (3, 8)), StatePart("temporal", (2, 4, 4))))
    draft = dataclasses.replace(latent, head_dim=32), LayerSpec(1, 16)
    return sized_layers((latent, LayerSpec(1, 32, 6, "swa"), state, grouped), D), sized_layers(draft, D)


def make_layout(page_size, pool, index_dim, dtype, full=FULL, swa=4):
    layers, draft_layers = layers_of(pool, index_dim)
    return PoolLayout.for_pages(
        layers, draft_layers=draft_layers, full=full, swa=swa, state=STATES, page_size=page_size, dtype=dtype
    )


call = functools.partial(jax.jit, static_argnums=(0, 2), compiler_options=quick_compile.options())(
    lambda name, cache, layer, *arrays: getattr(cache, name)(layer, *arrays)
)


SHAPES = [  # page_size, pool, X, dtype
    (8, 2, 16, "float32"),
    (8, 4, 16, "bfloat16"),
    (8, 4, 128, "float32"),
    (16, 4, 32, "bfloat16"),
    (16, 2, 128, "bfloat16"),
    (256, 4, 128, "bfloat16"),
    (256, 4, 32, "float32"),
]
every_shape = pytest.mark.parametrize(("page_size", "pool", "index_dim", "dtype"), SHAPES)


def noisy(cache, rng):
    """The cache full of any bits, NaN of all dtypes among them."""
    noise = lambda array: np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)  # noqa: E731
    return jax.tree.map(lambda array: jnp.asarray(noise(array)), cache)


def cells(array):
    """The array's bytes."""
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)


def some_keys(rng, spec, shape):
    return rng.standard_normal((*shape, spec.index_dim)).astype(jnp.float8_e4m3fn), rng.random(shape, np.float32)


def some_tail(rng, spec, shape):
    return rng.standard_normal((*shape, 2, spec.index_dim)).astype(jnp.bfloat16)


def some_rows(rng, spec, shape, dtype):
    return (rng.standard_normal((*shape, *s)).astype(dtype) for s in (spec.key_shape, spec.value_shape))


def pooled(cache):
    return [index for index, spec in enumerate(cache.layers) if isinstance(spec, KPoolSpec)]


# Where the bytes lie, by the definition, from sizes alone


def up(size, multiple):
    return -(-size // multiple) * multiple


class Bytes:
    """The first byte of anything in a pool, an own sum over the layers."""

    def __init__(self, layout):
        self.page_size, itemsize = layout.page_size, jnp.dtype(layout.dtype).itemsize
        self.row, self.index, self.ring, end, section, self.state = {}, {}, {}, 0, 0, 0
        for spec in layout.layers:
            if isinstance(spec, StateSpec):
                self.state += sum(part.nbytes for part in spec.parts)
        for lanes, layers in (("host", layout.layers), ("draft", layout.draft_layers)):
            end = up(end, 16)
            for layer, spec in enumerate(layers):
                if isinstance(spec, LayerSpec) and spec.storage == "full":
                    self.row[lanes, layer] = end
                    end += spec.num_kv_heads * (spec.head_dim + spec.value_shape[1]) * itemsize
                if isinstance(spec, KPoolSpec):
                    self.index[lanes, layer] = section
                    section += up(self.page_size // spec.pool * (spec.index_dim + 4), 32)
                    self.ring[lanes, layer] = self.state
                    self.state += spec.ring * 4 * spec.index_dim
        self.entry, self.state = up(end, 32), up(self.state, 32)
        self.page = self.page_size * self.entry + section

    def of_row(self, lanes, layer, slot):
        page, offset = divmod(slot, self.page_size)
        return page * self.page + offset * self.entry + self.row[lanes, layer]

    def of_key(self, lanes, layer, spec, pool):
        """First byte of the key, and of its scale."""
        page, place = divmod(pool, self.page_size // spec.pool)
        start = page * self.page + self.page_size * self.entry + self.index[lanes, layer]
        return start + place * spec.index_dim, start + self.page_size // spec.pool * spec.index_dim + 4 * place

    def of_tail(self, lanes, layer, spec, state, column):
        return state * self.state + self.ring[lanes, layer] + column * 4 * spec.index_dim


@every_shape
def test_all_lands_at_its_bytes(page_size, pool, index_dim, dtype):
    """Rows, index keys and tails of every layer of model and draft: those bytes hold them and no other changes."""
    rng = np.random.default_rng(page_size)
    layout = make_layout(page_size, pool, index_dim, dtype)
    where, cache = Bytes(layout), noisy(init_pool(layout), rng)
    assert (layout.page_units("full") * layout.unit_bytes, layout.entry_units("state") * layout.unit_bytes) == (
        where.page,
        where.state,
    )
    expected = cells(cache.buffer).copy()

    def expect(first, value):
        expected[first : first + value.nbytes] = cells(value)

    top, low = layout.num_pages("full"), layout.min_page("state")
    for lanes in ("host", "draft"):
        cache = cache.replace(lanes=lanes)
        for layer in pooled(cache):
            spec = cache.layers[layer]
            count = page_size // pool
            slots = (top - FULL) * page_size + rng.permutation(FULL * page_size)[:6].reshape(2, 3).astype(np.int32)
            k, v = some_rows(rng, spec, (2, 3), dtype)
            cache = call("write", cache, layer, slots, k, v)
            pools = (top - FULL) * count + rng.permutation(FULL * count)[:8].reshape(2, 4).astype(np.int32)
            keys, scales = some_keys(rng, spec, (2, 4))
            cache = call("write_index", cache, layer, pools, keys, scales)
            states = low + rng.permutation(STATES)[:2].astype(np.int32)
            columns = np.array([rng.permutation(spec.ring)[:D] for _ in range(2)], np.int32)
            tail = some_tail(rng, spec, (2, D))
            cache = call("write_tail", cache, layer, states, columns, tail)
            for b, j in np.ndindex(2, 3):
                row = np.concatenate([k[b, j].reshape(-1), v[b, j].reshape(-1)])
                expect(where.of_row(lanes, layer, slots[b, j]), row)
                expect(where.of_tail(lanes, layer, spec, states[b], columns[b, j]), tail[b, j])
            for b, j in np.ndindex(2, 4):
                key, scale = where.of_key(lanes, layer, spec, pools[b, j])
                expect(key, keys[b, j])
                expect(scale, scales[b, j])
    np.testing.assert_array_equal(cells(cache.buffer), expected)


# The same reads from both memories


@every_shape
def test_both_memories_read_the_same(page_size, pool, index_dim, dtype):
    """Random writes into noise, the pool's pages in any order: what was written reads the same, bit for bit."""
    rng = np.random.default_rng(index_dim)
    layout = make_layout(page_size, pool, index_dim, dtype)
    count, low = page_size // pool, layout.min_page("state")
    page = np.concatenate([[0], layout.num_pages("full") - 1 - rng.permutation(FULL)]).astype(np.int32)
    state = np.concatenate([[0], low + rng.permutation(STATES)]).astype(np.int32)
    unified = noisy(init_pool(layout), rng)
    for lanes, layers in (("host", layout.layers), ("draft", layout.draft_layers)):
        unified = unified.replace(lanes=lanes)
        sizes = {"page_size": page_size, "num_pages": FULL + 1, "num_swa_pages": 5, "num_states": STATES + 1}
        static = noisy(init_cache(layers, dtype=dtype, **sizes), rng)
        for layer in pooled(static):
            spec, seen = layers[layer], {"rows": set(), "pools": set(), "tails": set()}
            for _ in range(3):
                slots = page_size + rng.permutation(FULL * page_size)[:8].reshape(2, 4)
                slots[0, 0] = slots[1, 3] = 0  # lanes that are padding, both in the sink
                k, v = some_rows(rng, spec, (2, 4), dtype)
                static = call("write", static, layer, slots, k, v)
                unified = call("write", unified, layer, page[slots // page_size] * page_size + slots % page_size, k, v)
                pools = count + rng.permutation(FULL * count)[:8].reshape(2, 4)
                pools[0, 1] = pools[1, 2] = 0
                keys, scales = some_keys(rng, spec, (2, 4))
                static = call("write_index", static, layer, pools, keys, scales)
                unified = call(
                    "write_index", unified, layer, page[pools // count] * count + pools % count, keys, scales
                )
                states = np.array([0, rng.integers(1, STATES + 1)])
                columns = np.array([rng.permutation(spec.ring)[:D] for _ in range(2)])
                tail = some_tail(rng, spec, (2, D))
                static = call("write_tail", static, layer, states, columns, tail)
                unified = call("write_tail", unified, layer, state[states], columns, tail)
                seen["rows"] |= set(slots.flat) - {0}
                seen["pools"] |= set(pools.flat) - {0}
                seen["tails"] |= {(states[1], column) for column in columns[1]}

            slots = np.resize(sorted(seen["rows"]), (1, 24))
            moved = page[slots // page_size] * page_size + slots % page_size
            left, right = call("read", static, layer, slots), call("read", unified, layer, moved)
            same_bits(left, right)
            assert left[1].shape == (1, slots.size, *spec.value_shape)

            pages = np.array([[3, 1, 2, 4, 5], [5, 5, 1, 0, 2]])
            left, right = call("read_index", static, layer, pages), call("read_index", unified, layer, page[pages])
            assert [a.shape for a in left] == [(2, 5 * count, index_dim), (2, 5 * count)]
            written = np.isin((pages[..., None] * count + np.arange(count)).reshape(2, -1), list(seen["pools"]))
            same_bits([a[written] for a in left], [a[written] for a in right])
            assert written.sum() >= 6

            states, columns = np.resize(sorted(seen["tails"]), (9, 2)).T
            left = call("read_tail", static, layer, states, columns[:, None])
            same_bits(left, call("read_tail", unified, layer, state[states], columns[:, None]))
            assert left.shape == (len(states), 1, 2, index_dim)


def same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(cells(a), cells(b))


def caches(page_size=8):
    layout = make_layout(page_size, 4, 16, "float32")
    return [
        init_pool(layout),
        init_cache(layout.layers, page_size=page_size, num_pages=4, num_swa_pages=4, num_states=3),
    ]


@pytest.mark.parametrize("cache", caches(), ids=["unified", "static"])
def test_arrays_may_be_empty_or_wrong(cache):
    none, one = jnp.zeros((0, 2), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    assert [a.shape for a in cache.read_index(0, none)] == [(0, 2 * 2, 16), (0, 2 * 2)]
    assert cache.read_tail(0, none[:, 0], none).shape == (0, 2, 2, 16)
    same = cache.write_index(0, none, jnp.zeros((0, 2, 16)), jnp.zeros((0, 2)))
    same_bits(same.write_tail(0, none[:, 0], none, jnp.zeros((0, 2, 2, 16))), cache)
    keys, scales, tail = jnp.zeros((1, 1, 16)), jnp.zeros((1, 1)), jnp.zeros((1, 1, 2, 16))
    for wrong in ((keys[..., :8], scales), (keys, scales[:, :0]), (keys, keys)):
        with pytest.raises(ValueError, match=r"has shape .*: the layer keeps keys \[B, M, 16\] and scales \[B, M\]"):
            cache.write_index(0, one, *wrong)
    with pytest.raises(ValueError, match=r"rows has shape \(1, 1, 1, 16\): the layer keeps \[B, D, 2, 16\]"):
        cache.write_tail(0, one[0], one, tail[:, :, :1])
    for layer in (1, 2):
        for call in (
            lambda layer: cache.write_index(layer, one, keys, scales),
            lambda layer: cache.read_index(layer, one),
            lambda layer: cache.write_tail(layer, one[0], one, tail),
            lambda layer: cache.read_tail(layer, one[0], one),
        ):
            with pytest.raises(ValueError, match=f"layer={layer}: it keeps no compressed keys"):
                call(layer)


@pytest.mark.parametrize("cache", caches(), ids=["unified", "static"])
def test_a_layer_without_v(cache):
    """V may be left out when rows are stored, and has width 0 when they are read."""
    slots, k = jnp.array([[9]]), jnp.arange(96.0).reshape(1, 1, 1, 96)
    keys, values = cache.write(0, slots, k, None).read(0, slots)
    assert (keys == k).all() and values.shape == (1, 1, 1, 0)


# Pages that move


def test_pages_move_with_their_keys_and_rings():
    """Two requests fill the pool in turns, and when one has ended many others get their states: pages of tokens and of
    states move into holes, index keys and rings with them; new pages are zero, their sections too."""
    layout, count, rng = make_layout(8, 4, 16, "float32", full=14, swa=14), 2, np.random.default_rng(0)
    pages, cache = init_unified(layout, rows=20, pages_per_row=7, seed=1), noisy(init_pool(layout), rng)
    keys, tails, before, moved = {}, {}, None, np.zeros(2, int)
    turns = [(1, 17), (2, 17), (1, 40), (2, 40), (2, 56), (1, 56), (2, None)]
    for row, length in [*turns, *((row, 0) for row in range(3, 20))]:
        if length is None:
            pages = pool_cases.end(pages, row)
            keys = {key: content for key, content in keys.items() if key[0] != row}
            tails = {key: content for key, content in tails.items() if key[0] != row}
            continue
        old = int(pages.num_pages[row])
        pages, cache = pool_cases.grow(pages, cache, {row: length})
        table, v2p, slots, places = map(np.asarray, (pages.page_table, pages.v2p, pages.state_slot, pages.state_v2p))
        new = v2p[table[row, old : int(pages.num_pages[row])], 0]
        owned = [np.where(table > 0, v2p[table, 0], 0), np.where(slots > 0, places[slots], 0)]
        if before is not None:
            moved += [((a > 0) & (b > 0) & (a != b)).sum() for a, b in zip(before, owned, strict=True)]
        before = owned
        for lanes in ("host", "draft"):
            cache = cache.replace(lanes=lanes)
            for layer in pooled(cache):
                spec = cache.layers[layer]
                assert not any(cells(a).any() for a in call("read_index", cache, layer, new[None]))
                pools = (new[:, None] * count + np.arange(count)).reshape(1, -1)
                keys[row, old, lanes, layer] = some_keys(rng, spec, pools.shape)
                cache = call("write_index", cache, layer, pools, *keys[row, old, lanes, layer])
                if old == 0:
                    columns = np.arange(spec.ring)[None]
                    tails[row, lanes, layer] = some_tail(rng, spec, columns.shape)
                    cache = call("write_tail", cache, layer, owned[1][[row]], columns, tails[row, lanes, layer])
        cache = cache.replace(lanes="host")
        for (owner, first, lanes, layer), expected in keys.items():
            mine = owned[0][[owner], first : first + expected[1].size // count]
            same_bits(expected, jax.device_get(call("read_index", cache.replace(lanes=lanes), layer, mine)))
        for (owner, lanes, layer), expected in tails.items():
            place, columns = owned[1][[owner]], np.arange(expected.shape[1])[None]
            same_bits(expected, jax.device_get(call("read_tail", cache.replace(lanes=lanes), layer, place, columns)))
    assert moved.all()


# In place


def step(cache, slots, pools, pages, states, columns, rows, tail):
    """A forward's calls: each layer writes and reads all that it keeps, and what follows depends on what was read."""
    for layer in pooled(cache):
        spec = cache.layers[layer]
        k = jnp.broadcast_to(rows[..., None, None], (*slots.shape, *spec.key_shape))
        v = jnp.broadcast_to(rows[..., None, None], (*slots.shape, *spec.value_shape))
        cache = cache.write(layer, slots, k, v)
        cache = cache.write_tail(layer, states, columns, tail + rows[..., None, None].astype(tail.dtype))
        made = cache.read_tail(layer, states, columns).astype(jnp.float32)
        found = jnp.broadcast_to(made[:, :1, 0], (*pools.shape, spec.index_dim)).astype(jnp.float8_e4m3fn)
        cache = cache.write_index(layer, pools, found, made[:, : pools.shape[1], 0, 0])
        keys, scales = cache.read_index(layer, pages)
        rows = rows + (keys.astype(jnp.float32).sum(-1) * scales).sum()
        rows = rows + cache.read(layer, slots)[0].astype(jnp.float32).sum()
    return cache, rows


def loop(cache, slots, pools, pages, states, columns, rows, tail):
    def body(carry):
        turn, cache, rows = carry
        return turn + 1, *step(cache, slots + turn, pools + turn, pages, states, columns, rows, tail)

    return lax.while_loop(lambda carry: carry[0] < 9, body, (jnp.int32(0), cache, rows))[1:]


def assert_in_place(function, dtype, compile):
    """A pool four times as large takes no more temporary memory, and nothing of its size is copied."""
    shape, temporaries = jax.ShapeDtypeStruct, set()
    ids = [shape(size, jnp.int32) for size in ((4, D), (4, 2), (4, 6), (4,), (4, D))]
    rows, tail = shape((4, D), jnp.float32), shape((4, D, 2, 128), jnp.bfloat16)
    for pages in (256, 1024):
        layout = make_layout(256, 4, 128, dtype, full=pages)
        compiled = compile(function, jax.eval_shape(lambda: init_pool(layout)), *ids, rows, tail)  # noqa: B023
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= layout.nbytes
        assert not large_copies(compiled.as_text(), layout.nbytes // 16)
        temporaries.add(memory.temp_size_in_bytes)
    assert len(temporaries) == 1 and temporaries.pop() < layout.nbytes // 16


def compile_here(function, *arguments):
    return jax.jit(function, donate_argnums=0).lower(*arguments).compile()


@pytest.mark.parametrize(("function", "dtype"), [(step, "float32"), (loop, "bfloat16")])
def test_the_pool_stays_in_place(function, dtype):
    assert_in_place(function, dtype, compile_here)


@pytest.mark.parametrize("function", [step, loop])
def test_the_pool_stays_in_place_on_sm_90(function):
    if reason := aot.missing():
        pytest.skip(reason)
    assert_in_place(function, "bfloat16", aot.compile_for_h200)


def test_each_call_is_one_scatter_or_gather():
    """And no division."""
    one, keys, tail = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 16)), jnp.zeros((1, 1, 2, 16))
    for cache in caches():
        for call, name in (
            (lambda cache: cache.write_index(0, one, keys, keys[..., 0]), "scatter"),
            (lambda cache: cache.write_tail(0, one[0], one, tail), "scatter"),
            (lambda cache: cache.read_index(0, one), "gather"),
            (lambda cache: cache.read_tail(0, one[0], one), "gather"),
        ):
            found = re.findall(r"= (scatter|gather|dynamic\w+|div|rem)\W", str(jax.make_jaxpr(call)(cache)))
            assert found == [name]


# What no layer and no memory may be


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"storage": "swa", "window": 4}, "storage='swa', window=4: .* leave storage='full' and window=None"),
        ({"window": 4}, "window=4: "),
        ({"pool": 0}, "pool=0: must be a power of two"),
        ({"pool": 6}, "pool=6: must be a power of two"),
        ({"topk": 2}, "topk=2: .* choose a multiple of 4"),
        ({"topk": 2046}, "topk=2046: .* choose a multiple of 4"),
        ({"index_dim": 8}, "index_dim=8: .* choose a power of two"),
        ({"index_dim": 48}, "index_dim=48: .* Hadamard"),
        ({"index_dim": 0}, "index_dim=0"),
        ({"ring": 4}, r"ring=4: .* use with_rows\(D\)"),
        ({"head_dim": 0}, "head_dim=0"),
    ],
)
def test_specifications(fields, message):
    with pytest.raises(ValueError, match=message):
        KPoolSpec(**({"num_kv_heads": 1, "head_dim": 64} | fields))


def make_pool(layers, page_size, draft_layers=()):
    return PoolLayout.for_pages(layers, draft_layers=draft_layers, full=4, state=2, page_size=page_size)


def test_pages_are_whole_pools():
    sized, bare = KPoolSpec(1, 64).with_rows(2), KPoolSpec(1, 64)
    make_static = lambda layers, page_size: init_cache(  # noqa: E731
        layers, page_size=page_size, num_pages=3, num_swa_pages=1, num_states=3
    )
    for make in (make_pool, make_static):
        with pytest.raises(ValueError, match=r"page_size=2: layers\[1\] .* choose a page_size that is a multiple of 4"):
            make([LayerSpec(1, 64), sized], 2)
        with pytest.raises(ValueError, match=r"layers\[0\]: ring=0: .* give sized_layers\(layers, D\)"):
            make([bare], 4)
        make([sized], 4)
    with pytest.raises(ValueError, match=r"page_size=2: draft_layers\[0\]"):
        make_pool([LayerSpec(1, 64)], 2, [sized])
    with pytest.raises(ValueError, match=r"dtype='float64': .* choose a dtype of 4 bytes or less"):
        PoolLayout.for_pages([sized], full=4, state=2, page_size=4, dtype="float64")


# The memory of a step


class Lanes:
    """As much of a drafter as the memory asks of one."""

    cache_layers = (KPoolSpec(1, 32, value_dim=0, topk=8, index_dim=16),)

    def init(self, config):
        return ()


MODEL = Model(None, (KPoolSpec(1, 96, value_dim=0, topk=8, index_dim=16),) * 2, vocab_size=61, context_len=64)


def config_of(memory, page_size=8, **fields):
    shape = {"batch_size": 2, "num_draft_tokens": D, "context_len": 64, "max_new_tokens": 8, "prefill_chunk": 16}
    return jaxspec.SpecConfig(**(shape | fields), page_size=page_size, memory=memory)


def test_rings_follow_the_rows_of_a_round():
    """p and one for each row verified; a slot a request, though no layer accumulates."""
    assert MODEL.has_state and not Model(None, (LayerSpec(1, 4),), vocab_size=3, context_len=8).has_state
    cache, pages, _ = init_memory(MODEL, Lanes(), config_of("unified"))
    assert pages.has_state and cache.layout.kinds == ("full", "state")
    assert [spec.ring for spec in (*cache.layers, *cache.layout.draft_layers)] == [4 + D] * 3
    cache, *_ = init_memory(MODEL, Lanes(), config_of("static"))
    assert [buffer.tail.shape for buffer in cache.buffers] == [(3, 4 + D, 2, 16)] * 2
    assert isinstance(cache, KVCache) and cache.buffers[0].index.shape == (config_of("static").full_pages(), 2 * 20)


@pytest.mark.parametrize("memory", ["static", "unified"])
def test_the_way_out_of_small_pages(memory):
    with pytest.raises(jaxspec.InputError, match=r"page_size=2: layers\[0\] .* choose a page_size .* multiple of 4"):
        init_memory(MODEL, None, config_of(memory, page_size=2))


def test_a_pool_lies_in_the_smallest_budget():
    """A section is charged like entries: what `for_pages` takes is what `for_budget` makes of as many bytes."""
    for full in (1, 2, 9):
        layout = make_layout(8, 4, 16, "bfloat16", full=full)
        same = {name: getattr(layout, name) for name in ("layers", "draft_layers", "page_size", "dtype")}
        assert PoolLayout.for_budget(budget=layout.nbytes, **same) == layout
        assert layout.holds(full=full, swa=4, state=STATES)
        less = dataclasses.replace(layout, units=layout.units - 1)
        assert not less.holds(full=full, swa=4, state=STATES)


def test_a_budget_for_rings_and_sections():
    """No scratch for rings; requests as whole ones fit; the pool is the one of its configuration."""
    for budget in (200_000, 1_000_000):
        pool = PoolConfig.from_budget(budget, MODEL, Lanes(), num_draft_tokens=D, page_size=8, prefill_chunk=16)
        layout = pool.layout
        assert pool.scratch_bytes == 0 and pool.bytes_used <= budget < pool.bytes_used + 2 * 8 * 700
        assert pool.whole_requests == pool.requests == pool.state_pages
        assert layout.holds(full=pool.full_pages, state=pool.requests)
        assert not layout.holds(full=pool.full_pages + 1, state=pool.requests)
        assert pool_layout(MODEL, Lanes(), jaxspec.SpecConfig(**pool.spec_fields(), max_new_tokens=8)) == layout
    sinks = -(-layout.above_states(pool.requests) // layout.page_units("full"))
    assert pool.full_pages == layout.nbytes // Bytes(layout).page - sinks

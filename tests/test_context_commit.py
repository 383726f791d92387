"""commit_context: context rows of all layers of a draft, in buffers of its own and in the lanes of a pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxspec.cache import KPoolSpec, LayerSpec, PoolLayout, StatePart, StateSpec, init_cache, init_pool
from jaxspec.cache.context import commit_context
from jaxspec.metadata import Ids
from jaxspec.models.qwen3 import rotary_angles, rotate
from jaxspec.models.rows import rms_norm

B, D, HEADS, WIDTH, PAGE, EPS = 4, 3, 2, 16, 4, 1e-6
FULL, SWA = LayerSpec(HEADS, WIDTH), LayerSpec(HEADS, WIDTH, 8, "swa")
STATES = StateSpec((StatePart("temporal", (4, 8)),))
FOLDED = LayerSpec(HEADS, WIDTH, 8)  # a window, but pages that are kept
COUNT = np.array([0, 1, 2, 3], np.int32)
PAGES = 6  # of a kind, in use
HOST = FULL, LayerSpec(1, 32, 8, "swa")


def rows(layers, dtype, seed=0):
    """k, v, norms and the angles at each row's position."""
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.normal(size=(B, D, layers, HEADS, WIDTH)), dtype) for _ in "kv")
    positions = jnp.asarray(rng.integers(0, 4000, (B, 1)) + np.arange(D), jnp.int32)
    return k, v, jnp.asarray(rng.uniform(-2, 2, (layers, WIDTH)), dtype), *rotary_angles(positions, WIDTH, 1e4)


def first_slots(cache):
    """Where PAGES pages of kind "full" start that a test may use, and of kind "swa": in a pool FULL pages are its last,
    SWA pages its first behind the sinks, so that no slots of the two overlap."""
    layout = getattr(cache, "layout", None)
    if layout is None:
        return [2 * PAGE] * 2
    first = layout.num_pages("full") - PAGES, layout.min_page("swa") if "swa" in layout.kinds else 0
    return [page * PAGE for page in first]


def locations(cache, seed=1):
    """Different slots of each row, of either kind; those of rows that are not stored are wild."""
    rng = np.random.default_rng(seed)
    found = [
        first + rng.permutation(PAGES * PAGE)[: B * D].reshape(B, D).astype(np.int32) for first in first_slots(cache)
    ]
    for locs in found:
        locs[np.arange(D) >= COUNT[:, None]] = rng.choice([-1, 0, 5, 2**31 - 1])
    return found


def slots_of(cache, where):
    """The arguments that say where rows go, by what `where` names."""
    full, swa = locations(cache)
    if "virtual" in where:
        return {"virtual_loc": full}
    return {"full_loc": full} | ({"swa_loc": swa} if "swa" in where else {})


def static(layers, dtype):
    cache = init_cache(layers, page_size=PAGE, num_pages=8, num_swa_pages=8, dtype=dtype)
    return cache.replace(buffers=tuple(jnp.full(x.shape, 7, x.dtype) for x in cache.buffers))


def pool(draft_layers, dtype, host=HOST):
    """A pool of sevens, seen through the draft's lanes."""
    sizes = {"full": 8, "swa": 8, "state": 2, "page_size": PAGE}
    cache = init_pool(PoolLayout.for_pages(host, dtype=dtype, draft_layers=draft_layers, **sizes))
    return cache.replace(buffer=jnp.full(cache.buffer.shape, 7, cache.buffer.dtype), lanes="draft")


@functools.partial(jax.jit, static_argnames="backend", compiler_options=quick_compile.options())
def commit(cache, rows, slots, count, backend="reference"):
    return commit_context(cache, *rows, **slots, count=count, eps=EPS, backend=backend)


@functools.partial(jax.jit, compiler_options=quick_compile.options())
def by_hand(cache, rows, slots, count):
    """The same with what models are made of, a layer at a time, rows that are not committed sent to the sink."""
    k, v, norms, cos, sin = rows
    stays = jnp.arange(D) < count[:, None]
    for layer, loc in enumerate(slots):
        keys = rotate(rms_norm(k[:, :, layer], norms[layer], EPS, k.dtype), cos, sin)
        cache = cache.write(layer, jnp.where(stays, loc, 0), keys, v[:, :, layer])
    return cache


def data(cache):
    """All that a cache holds but for page 0 of each kind."""
    if hasattr(cache, "buffer"):
        return [np.asarray(cache.buffer[max(map(cache.layout.page_units, cache.layout.kinds)) :])]
    return [np.asarray(buffer[PAGE:]) for buffer in cache.buffers]


CACHES = {  # a cache of k's dtype, and where each of its layers is found
    "buffers": (lambda dtype: static((FULL, SWA, FULL), dtype), "full swa full"),
    "buffers by virtual ids": (lambda dtype: static((FULL, FOLDED), dtype), "virtual virtual"),
    "lanes": (lambda dtype: pool((FULL, SWA, SWA), dtype), "full swa swa"),
    "lanes, a window in full pages": (lambda dtype: pool((FOLDED, FULL), dtype), "full full"),
    "lanes, all windows": (lambda dtype: pool((SWA,), dtype), "swa"),
    "lanes beside states": (
        lambda dtype: pool((FULL, FULL), dtype, (FULL, STATES)),
        "full full",
    ),
    "lanes of pages with compressed keys": (
        lambda dtype: pool((FULL,), dtype, (KPoolSpec(1, 64, value_dim=0, pool=2, topk=4, index_dim=16, ring=9),)),
        "full",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CACHES)
def test_rows_are_those_of_the_model_bit_for_bit(name, dtype):
    """Committed rows read back as K normed and rotated by the model's own functions, in one program with all the rest
    of the memory: what the target keeps, the other layers, the rows that are not committed."""
    make, where = CACHES[name]
    cache = make(dtype)
    given = slots_of(cache, where)
    after = commit(cache, rows(len(cache.layers), dtype), given, COUNT)
    expected = by_hand(cache, rows(len(cache.layers), dtype), [given[f"{kind}_loc"] for kind in where.split()], COUNT)
    changed = 0
    for found, wanted, before in zip(data(after), data(expected), data(cache), strict=True):
        np.testing.assert_array_equal(found, wanted)
        changed += (found != before).sum()
    assert changed > 0.9 * COUNT.sum() * len(cache.layers) * 2 * HEADS * WIDTH


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("buffers", "checked"),
        ("lanes", "checked"),
        ("lanes", "interpret"),
        ("lanes of pages with compressed keys", "checked"),
    ],
)
def test_kernels_store_what_the_reference_does(name, backend):
    """In bfloat16, whose roundings hide in which order the squares are summed."""
    make, where = CACHES[name]
    cache = make("bfloat16")
    arguments = cache, rows(len(cache.layers), "bfloat16"), slots_of(cache, where), COUNT
    run = commit.__wrapped__ if backend == "checked" else commit
    for found, expected in zip(data(run(*arguments, backend=backend)), data(commit(*arguments)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["buffers", "lanes"])
@pytest.mark.parametrize("count", [0, D])
def test_none_and_all(name, count):
    cache = CACHES[name][0]("float32")
    where = [first + np.arange(B * D, dtype=np.int32).reshape(B, D) for first in first_slots(cache)]
    slots = dict(zip(("full_loc", "swa_loc"), where, strict=True))
    made = rows(3, "float32")
    after = commit(cache, made, slots, np.full(B, count, np.int32))
    kinds = CACHES[name][1].split()
    read = [after.read(layer, slots[f"{kind}_loc"]) for layer, kind in enumerate(kinds)]
    for layer, (keys, values) in enumerate(read):
        if count:
            np.testing.assert_array_equal(values, made[1][:, :, layer])
        else:
            assert (keys == read[0][0]).all() and (values == read[0][0]).all()


def test_a_pool_is_neither_copied_nor_converted_in_a_device_loop():
    """On a CPU too, where the reference writes: the program's temporaries are a small part of the pool."""
    host = (FULL, LayerSpec(HEADS, WIDTH, 8, "swa"))
    layout = PoolLayout.for_pages(host, full=900, swa=900, page_size=PAGE, dtype="bfloat16", draft_layers=(FULL, SWA))

    def loop(cache, rows):
        def turn(_, cache):
            return commit_context(cache, *rows, **slots_of(cache, "full swa"), count=COUNT, eps=EPS)

        return jax.lax.fori_loop(0, 3, turn, cache)

    cache = jax.eval_shape(lambda: init_pool(layout).replace(lanes="draft"))
    compiled = jax.jit(loop, donate_argnums=0).lower(cache, rows(2, "bfloat16")).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == layout.nbytes and memory.temp_size_in_bytes < layout.nbytes / 4


@pytest.mark.parametrize("name", ["buffers", "lanes"])
def test_one_launch_for_all_layers(name):
    """Of a CUDA program, lowered without a GPU."""
    cache = CACHES[name][0]("bfloat16")
    arguments = cache, rows(3, "bfloat16"), slots_of(cache, "full swa"), COUNT
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))):
        lowered = jax.jit(commit.__wrapped__, static_argnames="backend").trace(*arguments, backend=None)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1


# Ids and what is refused ---------------------------------------------------------------------------------------------


def call(cache, seed=0, **changes):
    k, v, norms, cos, sin = rows(len(cache.layers), "float32", seed)
    return commit_context(cache, k, v, norms, cos, sin, **{"count": COUNT, "eps": EPS} | changes)


def test_marked_ids_are_of_the_space_that_they_are_used_in():
    cache = static((FULL, SWA), "float32")
    full, swa = locations(cache)
    marked = call(cache, full_loc=Ids(full, "full"), swa_loc=Ids(swa, "swa"))
    plain = call(cache, full_loc=full, swa_loc=swa)
    jax.tree.map(np.testing.assert_array_equal, marked, plain)
    with pytest.raises(TypeError, match="ids are 'virtual' where 'swa' ones are needed"):
        call(cache, full_loc=Ids(full, "full"), swa_loc=Ids(swa, "virtual"))
    with pytest.raises(TypeError, match="ids are 'full' where 'virtual' ones are needed"):
        call(cache, virtual_loc=Ids(full, "full"))


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ((FULL, SWA), {}, "swa_loc=None: layers of the cache are stored in 'swa'; give their slots"),
        ((FULL,), {"full_loc": None}, "full_loc=None: layers of the cache are stored in 'full'"),
        (
            (FULL, LayerSpec(HEADS, WIDTH, value_dim=8)),
            {},
            r"layers\[1\] is .*: context rows are K and V of 2 heads, 16",
        ),
        ((LayerSpec(1, WIDTH),), {}, r"layers\[0\] is LayerSpec\(num_kv_heads=1"),
        ((KPoolSpec(HEADS, WIDTH, ring=9),), {}, r"layers\[0\] is KPoolSpec"),
        ((STATES,), {}, r"layers\[0\] is StateSpec"),
    ],
)
def test_refused(layers, changes, message):
    cache = init_cache(layers, page_size=PAGE, num_pages=8, num_swa_pages=8)
    with pytest.raises(ValueError, match=message):
        call(cache, **{"full_loc": locations(cache)[0]} | changes)


def test_refused_rows():
    cache = pool((FULL,), "bfloat16")
    with pytest.raises(ValueError, match="k is float32, and the pool keeps bfloat16"):
        call(cache, full_loc=locations(cache)[0])
    k, *rest = rows(2, "bfloat16")
    with pytest.raises(ValueError, match=r"k has shape \(4, 3, 2, 2, 16\): it must be \[B, D, 1, heads, width\]"):
        commit_context(cache, k, *rest, full_loc=locations(cache)[0], count=COUNT, eps=EPS)

"""commit_context_rows: which rows are stored, what their K becomes, and that nothing else is read or written."""

import functools
import importlib
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_cases as cases
import kernel_ptx as ptx
import numpy as np
import pytest
import quick_compile
from kernel_cases import int32
from numpy.lib.stride_tricks import as_strided

from pallas_kernels import KernelFault, View, checked, commit_context_rows, mosaic

module = importlib.import_module("pallas_kernels.context_rows")
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))
each_backend = pytest.mark.parametrize("backend", cases.BACKENDS)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
each_gpu_backend = pytest.mark.parametrize("backend", ["triton", MOSAIC])
each_dtype = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
EPS, STALE = 1e-6, -7


# The oracle ----------------------------------------------------------------------------------------------------------


def stored_head(k, norm, cos, sin):
    """A head of K as it is stored: wide arithmetic, with the two roundings of the contract."""
    wide = [float(x) for x in k]
    scale = 1 / math.sqrt(sum(x * x for x in wide) / len(wide) + EPS)
    normed = np.array([x * scale * float(weight) for x, weight in zip(wide, norm, strict=True)]).astype(k.dtype)
    half = len(normed) // 2
    pairs = [(float(normed[i]), float(normed[i + half]), float(cos[i]), float(sin[i])) for i in range(half)]
    first = [x * c - y * s for x, y, c, s in pairs]
    return np.array(first + [y * c + x * s for x, y, c, s in pairs]).astype(k.dtype)


def stored(before, call):
    """The destinations after, [slots, 2 * heads * hd] each, and which of their cells hold a K."""
    after, is_key = [x.copy() for x in before], [np.zeros(x.shape, bool) for x in before]
    requests, depth, layers, heads, hd = call["k"].shape
    for b in range(requests):
        for j in range(min(max(int(call["commit"][b]), 0), depth)):
            for layer in range(layers):
                slot = int(call["locs"][call["kinds"][layer]][b, j])
                if not 0 <= slot < len(before[layer]):
                    continue
                row = after[layer][slot]
                row[heads * hd :] = call["v"][b, j, layer].reshape(-1)
                for head in range(heads):
                    turn = call["norm"][layer], call["cos"][b, j], call["sin"][b, j]
                    row[head * hd : (head + 1) * hd] = stored_head(call["k"][b, j, layer, head], *turn)
                is_key[layer][slot, : heads * hd] = True
    return after, is_key


def assert_stored(after, before, call, sink=True):
    """Every cell is what it was, bit for bit, V that was moved, or K but for what the order of a sum may change.

    `sink`: whether slot 0 is looked at. A reference may leave there what it finds, or a row meant for it.
    """
    for found, expected, is_key in zip(after, *stored(before, call), strict=True):
        assert found.dtype == expected.dtype
        start = 0 if sink else 1
        found, expected, is_key = found[start:], expected[start:], is_key[start:]
        np.testing.assert_array_equal(bits(found)[~is_key], bits(expected)[~is_key])
        assert_keys_near(found[is_key], expected[is_key])


def assert_keys_near(found, expected):
    """In float32 a few units in the last place. In bfloat16 almost all are equal: a sum in another order seldom
    changes what it is rounded to, and then by one unit; without the rounding before the turn a quarter would differ."""
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-7 * max(1, np.abs(expected).max(initial=0)))
        return
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    assert (found != expected).sum() <= len(found) // 100
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7)


def bits(array):
    """The bits of floats, so that NaNs can be compared."""
    return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")


# Problems ------------------------------------------------------------------------------------------------------------


def problem(rng, shape, dtype, *, kinds, slots, commit=None):
    """Arguments of a call; the locations of a kind differ, and are neither the sink nor out of range."""
    B, D, N, _, hd = shape
    angles = rng.uniform(0, 7, (B, D, hd // 2)).astype(np.float32)
    return {
        "k": rng.normal(size=shape).astype(dtype),
        "v": rng.normal(size=shape).astype(dtype),
        "norm": rng.uniform(-2, 2, (N, hd)).astype(dtype),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "locs": tuple(
            1 + rng.permutation(slots - 1)[: B * D].reshape(B, D).astype(np.int32) for _ in range(max(kinds) + 1)
        ),
        "kinds": kinds,
        "commit": rng.integers(-1, D + 2, B).astype(np.int32) if commit is None else int32(*commit),
    }


def destinations(call, slots):
    N, heads, hd = call["k"].shape[2:]
    return [np.full((slots, 2 * heads * hd), STALE, call["k"].dtype) for _ in range(N)]


@functools.cache
def compiled(kinds, backend):
    def call(out, arrays):
        return commit_context_rows(**arrays, kinds=kinds, out=out, eps=EPS, backend=backend)

    return jax.jit(call, compiler_options=quick_compile.options())


def run(out, call, backend):
    """The destinations after, arrays."""
    arrays = {name: array for name, array in call.items() if name != "kinds"}
    out = tuple(map(jnp.asarray, out))
    if backend == "checked":
        with checked.declare(dead=dead(call)):
            after = commit_context_rows(**call, out=out, eps=EPS, backend=backend)
    else:
        after = compiled(call["kinds"], backend)(out, jax.tree.map(jnp.asarray, arrays))
    return [np.asarray(x) for x in after]


def dead(call):
    """All that belongs to rows that are not committed."""
    B, D, N, heads, hd = call["k"].shape
    skipped = np.arange(D) >= call["commit"][:, None]
    rows = np.repeat(skipped.reshape(-1), N)[:, None]
    cells = {name: np.broadcast_to(rows, (B * D * N, heads * hd)) for name in ("k", "v")}
    cells |= {name: np.broadcast_to(skipped.reshape(-1, 1), (B * D, hd // 2)) for name in ("cos", "sin")}
    return cells | {f"locs[{i}]": skipped for i in range(len(call["locs"]))}


def check(call, slots, backend, **options):
    before = destinations(call, slots)
    assert_stored(run(before, call, backend), before, call, **options)


# Rows ----------------------------------------------------------------------------------------------------------------


@each_backend
@each_dtype
def test_the_first_rows_of_each_request_are_stored(dtype, backend):
    rng = np.random.default_rng(0)
    check(problem(rng, (6, 3, 3, 2, 16), dtype, kinds=(0, 1, 0), slots=29, commit=(0, 1, 2, 3, 5, -1)), 29, backend)


def test_a_worked_row():
    """k = (3, 4) has the root mean square sqrt(12.5); a quarter turn makes (x, y) of (-y, x)."""
    call = {"k": [3.0, 4.0], "v": [5.0, 6.0]}
    call = {name: jnp.asarray(row).reshape(1, 1, 1, 1, 2) for name, row in call.items()}
    turn = {"norm": jnp.array([[1.0, 10.0]]), "cos": jnp.zeros((1, 1, 1)), "sin": jnp.ones((1, 1, 1))}
    where = {"locs": (jnp.array([[1]]),), "kinds": (0,), "commit": jnp.array([1])}
    (out,) = commit_context_rows(**call, **turn, **where, out=(jnp.zeros((2, 4)),), eps=0.0)
    np.testing.assert_allclose(out, [[0, 0, 0, 0], [-40 / 12.5**0.5, 3 / 12.5**0.5, 5, 6]], rtol=1e-6)


WILD = int32(-(2**31), -1, 17, 2**31 - 1)


@quick_backends
@each_dtype
def test_rows_that_are_not_committed_may_hold_anything(dtype, backend):
    rng = np.random.default_rng(1)
    call = problem(rng, (4, 3, 2, 1, 8), dtype, kinds=(1, 0), slots=17, commit=(0, 1, 2, 3))
    skipped = np.arange(3) >= call["commit"][:, None]
    for name in ("k", "v", "cos", "sin"):
        call[name][skipped] = np.nan
    call["locs"][0][skipped] = np.resize(WILD, skipped.sum())
    call["locs"][1][skipped] = call["locs"][1][3, 0]  # that of a row that is
    before = destinations(call, 17)
    after = run(before, call, backend)
    assert not any(np.isnan(x.astype(np.float32)).any() for x in after)
    assert_stored(after, before, call)


@quick_backends
@pytest.mark.parametrize("wild", WILD.tolist())
def test_a_committed_row_without_a_slot_is_skipped(wild, backend):
    call = problem(np.random.default_rng(2), (2, 2, 1, 1, 4), np.float32, kinds=(0,), slots=17, commit=(2, 1))
    call["locs"][0][0, 1] = wild
    check(call, 17, backend)


@quick_backends
def test_the_sink_is_written_by_a_row_that_is_meant_for_it(backend):
    call = problem(np.random.default_rng(3), (2, 2, 2, 1, 4), np.float32, kinds=(0, 1), slots=9, commit=(2, 1))
    call["locs"][1][0, 1] = 0
    check(call, 9, backend, sink=backend != "reference")


@quick_backends
@pytest.mark.parametrize(("heads", "hd"), [(1, 2), (1, 6), (3, 80), (2, 130), (8, 4), (9, 4), (17, 10), (1, 2048)])
def test_heads_of_any_number_and_width(heads, hd, backend):
    dtype = jnp.bfloat16 if heads % 2 else np.float32
    rng = np.random.default_rng(heads)
    check(problem(rng, (1, 2, 1, heads, hd), dtype, kinds=(0,), slots=4, commit=(2,)), 4, backend)


def test_heads_of_several_programs_interpreted(monkeypatch):
    monkeypatch.setattr(module, "HEADS", 2)
    rng = np.random.default_rng(9)
    check(problem(rng, (1, 1, 1, 3, 66), jnp.bfloat16, kinds=(0,), slots=4, commit=(1,)), 4, "interpret")


@quick_backends
@pytest.mark.parametrize(("dtype", "norm"), [(jnp.bfloat16, np.float32), (np.float16, jnp.bfloat16)])
def test_weights_of_another_dtype(norm, dtype, backend):
    call = problem(np.random.default_rng(4), (2, 2, 2, 1, 64), dtype, kinds=(0, 0), slots=9)
    call["norm"] = call["norm"].astype(np.float32).astype(norm)
    before = destinations(call, 9)
    after = run(before, call, backend)
    for found, expected in zip(after, stored(before, call)[0], strict=True):
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=2**-7)


ZERO_SIZES = [
    ((0, 2, 2, 1, 4), 5),
    ((2, 0, 2, 1, 4), 5),
    ((2, 2, 2, 1, 4), 0),
    ((2, 2, 0, 1, 4), 5),
    ((2, 2, 2, 0, 4), 5),
]


@pytest.mark.parametrize("backend", ["reference", "interpret", "checked"])
@pytest.mark.parametrize(("shape", "slots"), ZERO_SIZES)
def test_without_cells_nothing_is_written(shape, slots, backend):
    call = problem(np.random.default_rng(0), shape, np.float32, kinds=(0,) * shape[2] or (0,), slots=9)
    call["kinds"] = call["kinds"][: shape[2]]
    before = destinations(call, slots)
    after = commit_context_rows(**call, out=tuple(map(jnp.asarray, before)), eps=EPS, backend=backend)
    assert isinstance(after, tuple) and len(after) == shape[2]
    for x, y in zip(after, before, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@quick_backends
def test_64_bit_indices_with_x64_on(backend):
    call = problem(np.random.default_rng(5), (2, 2, 2, 1, 4), np.float32, kinds=(0, 1), slots=9, commit=(1, 2))
    wide = call | {"locs": tuple(x.astype(np.int64) for x in call["locs"]), "commit": call["commit"].astype(np.int64)}
    wide["locs"][0][0, 0] = 2**40
    call["locs"][0][0, 0] = 2**31 - 1
    before = destinations(call, 9)
    with jax.enable_x64(True):
        after = commit_context_rows(**wide, out=tuple(map(jnp.asarray, before)), eps=EPS, backend=backend)
    assert_stored([np.asarray(x) for x in after], before, call)


SIZES = st.integers(0, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.tuples(*SIZES), st.integers(0, 2**32 - 1))
def test_any_rows_checked(sizes, seed):
    rng = np.random.default_rng(seed)
    *shape, half = sizes
    kinds = tuple(rng.integers(0, 2, shape[2]).tolist())
    call = problem(rng, (*shape, 2 * half), np.float32, kinds=(*kinds, 1), slots=20)
    call["kinds"] = kinds
    for locs in call["locs"]:
        locs[rng.random(locs.shape) < 0.2] = rng.choice([-1, 20, 2**31 - 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked.CheckedLanes, "least", 2)
        patch.setattr(module, "HEADS", int(rng.integers(1, 4)))
        patch.setattr(module, "MOST", 8)
        check(call, 20, "checked")


def test_checked_stops_a_kernel_that_looks_at_rows_that_are_not_committed():
    call = problem(np.random.default_rng(6), (1, 2, 1, 1, 4), np.float32, kinds=(0,), slots=9, commit=(1,))
    more = call | {"commit": int32(2)}
    with checked.declare(dead=dead(call)), pytest.raises(KernelFault, match=r"load of dead cells of locs\[0\]"):
        commit_context_rows(**more, out=(jnp.zeros((9, 8)),), eps=EPS, backend="checked")


def test_checked_stops_a_kernel_that_bounds_no_location(monkeypatch):
    monkeypatch.setattr(module.ContextRows, "slots", (2**31 - 1,))
    call = problem(np.random.default_rng(6), (1, 2, 1, 1, 4), np.float32, kinds=(0,), slots=9, commit=(2,))
    call["locs"][0][0, 1] = 9
    with pytest.raises(KernelFault, match=r"out of range of out 0\[9, 8\]"):
        run(destinations(call, 9), call, "checked")


# Views ---------------------------------------------------------------------------------------------------------------

# Two layers of entries of 2 * 3 * 8 = 48 cells: shape of the buffer; offset, shape and strides of each view.
VIEWS = {
    "one dimension": ((1000,), (3, (9, 48), (101, 1)), (53, (9, 48), (101, 1))),
    "part of a row": ((11, 100), (101, (9, 48), (100, 1)), (152, (9, 2, 24), (100, 24, 1))),
    "several rows": ((60, 16), (0, (9, 3, 16), (96, 16, 1)), (48, (9, 3, 16), (96, 16, 1))),
    "units of a pool": ((70, 8), (8, (9, 6, 8), (56, 8, 1)), (8, (4, 6, 8), (112, 8, 1))),
    "pages": ((70, 16), (16, (5, 2, 3, 16), (208, 96, 16, 1)), (64, (5, 2, 3, 16), (208, 96, 16, 1))),
    "cells that two kinds share": ((60, 16), (0, (9, 3, 16), (96, 16, 1)), (16, (8, 3, 16), (112, 16, 1))),
    "buffers of their own": (None, (16, (9, 3, 16), (64, 16, 1)), (0, (5, 2, 3, 16), (96, 48, 16, 1))),
}


HELD = {np.float32: np.float32, jnp.bfloat16: np.uint16}
VIEW_CASES = [(name, dtype, "checked") for name in VIEWS for dtype in HELD]
VIEW_CASES += [(name, [*HELD][number % 2], "reference") for number, name in enumerate(VIEWS)]
VIEW_CASES += [
    ("cells that two kinds share", jnp.bfloat16, "interpret"),
    ("buffers of their own", np.float32, "interpret"),
]
VIEW_CASES += [
    pytest.param(name, dtype, *gpu.values, marks=gpu.marks) for name in VIEWS for dtype in HELD for gpu in cases.GPU
]


@pytest.mark.parametrize(("name", "dtype", "backend"), VIEW_CASES)
def test_views(name, dtype, backend):
    call = problem(np.random.default_rng(7), (2, 2, 2, 3, 8), dtype, kinds=(0, 1), slots=9, commit=(1, 1))
    call["locs"] = int32([1, 7], [5, 6]), int32([2, 1], [3, 0])  # whose committed rows have no cell in common
    shape, *places = VIEWS[name]
    held = HELD[dtype]
    befores = [np.full(s, STALE, np.int32).astype(held) for s in ([shape] if shape else [(60, 16), (512,)])]
    whose = [0, 0] if shape else [0, 1]

    def function(arrays, buffers):
        out = tuple(View(buffers[i], *place) for i, place in zip(whose, places, strict=True))
        after = commit_context_rows(**arrays, kinds=call["kinds"], out=out, eps=EPS, backend=backend)
        assert [(x.offset, x.shape, x.strides) for x in after] == [(x.offset, x.shape, x.strides) for x in out]
        assert shape is None or after[0].buffer is after[1].buffer
        return [after[whose.index(i)].buffer for i in range(len(buffers))]

    arrays = {n: jax.tree.map(jnp.asarray, x) for n, x in call.items() if n != "kinds"}
    if backend != "checked":
        function = jax.jit(function, compiler_options=quick_compile.options())
    afters = [np.asarray(x) for x in function(arrays, [jnp.asarray(x) for x in befores])]

    rows, is_key = stored(destinations(call, 10), call)
    expected, keys = [x.copy() for x in befores], [np.zeros(x.shape, bool) for x in befores]
    for layer, (i, place) in enumerate(zip(whose, places, strict=True)):
        for slot in np.flatnonzero(is_key[layer].any(axis=1)):
            for buffer, row in ((expected[i], rows[layer][slot].view(held)), (keys[i], is_key[layer][slot])):
                slot_cells(buffer, *place)(slot)[...] = row.reshape(place[1][-2:] if len(place[1]) > 2 else -1)
    for found, wanted, key in zip(afters, expected, keys, strict=True):
        assert key.any()
        np.testing.assert_array_equal(found[~key], wanted[~key])
        assert_keys_near(found[key].view(dtype), wanted[key].view(dtype))


def slot_cells(buffer, offset, shape, strides):
    """The cells of a slot of a view's, that can be written to."""
    cells = as_strided(buffer.reshape(-1)[offset:], shape, [n * buffer.itemsize for n in strides])
    return lambda slot: cells[divmod(slot, shape[1])] if len(shape) == 4 else cells[slot]


@quick_backends
def test_k_and_v_may_be_views_of_one_product(backend):
    call = problem(np.random.default_rng(8), (2, 3, 2, 2, 8), np.float32, kinds=(0, 0), slots=9)
    product = jnp.asarray(np.concatenate([call[n].reshape(6, 2, 16) for n in "kv"], axis=2).reshape(6, 64))
    before = destinations(call, 9)

    def function(product, out):
        k, v = (View(product, at, (2, 3, 2, 2, 8), (192, 64, 32, 8, 1)) for at in (0, 16))
        return commit_context_rows(**call | {"k": k, "v": v}, out=out, eps=EPS, backend=backend)

    if backend != "checked":
        function = jax.jit(function, compiler_options=quick_compile.options())
    after = function(product, tuple(map(jnp.asarray, before)))
    assert_stored([np.asarray(x) for x in after], before, call)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_donated_destinations_are_written_in_place(backend):
    call = problem(np.random.default_rng(9), (1, 1, 2, 1, 8), np.float32, kinds=(0, 0), slots=9, commit=(1,))

    def function(out):
        buffers = out[0], View(out[1], 16, (3, 16), (32, 1))
        after = commit_context_rows(**call, out=buffers, eps=EPS, backend=backend)
        return after[0], after[1].buffer

    call["locs"] = (int32([2]),)
    out = jnp.full((9, 16), STALE, jnp.float32), jnp.full(96, STALE, jnp.float32)
    pointers = [x.unsafe_buffer_pointer() for x in out]
    after = jax.jit(function, donate_argnums=0, compiler_options=quick_compile.options())(out)
    assert all(x.is_deleted() for x in out) and [x.unsafe_buffer_pointer() for x in after] == pointers
    assert np.flatnonzero((after[0] != STALE).any(axis=1)).tolist() == [2]
    assert np.flatnonzero(after[1] != STALE).tolist() == list(range(80, 96))


# What is refused -----------------------------------------------------------------------------------------------------

GOOD = problem(np.random.default_rng(0), (2, 3, 2, 1, 4), np.float32, kinds=(0, 1), slots=9)
FLAT = np.zeros(200, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": GOOD["k"][0]}, r"k is float32\[3, 2, 1, 4\]: it must be \[requests, rows, layers, heads, head width\]"),
        ({"k": GOOD["k"][..., :3]}, "k is .* the width even and at most 2048"),
        ({"k": GOOD["k"].astype(np.float64)}, "k is float64"),
        ({"v": GOOD["v"][:, :2]}, r"v is float32\[2, 2, 2, 1, 4\]: it must be float32\[2, 3, 2, 1, 4\], as k is"),
        ({"v": GOOD["v"].astype(np.float16)}, "v is float16.*: it must be float32"),
        ({"norm": GOOD["norm"][0]}, r"norm is float32\[4\]: it must be floats of shape \(2, 4\)"),
        ({"cos": GOOD["cos"][:, :, None]}, r"cos is float32\[2, 3, 1, 2\]: it must be floats of shape \(2, 3, 2\)"),
        ({"sin": GOOD["sin"][..., :1]}, r"sin is float32\[2, 3, 1\]"),
        ({"commit": GOOD["commit"][:1]}, "commit has 1 rows for a batch of 2"),
        ({"commit": [1, 1]}, "commit is list: it must be an array of integers"),
        ({"locs": (GOOD["locs"][0], GOOD["locs"][1][:, :2])}, r"locs\[1\] has shape \(2, 2\): it must be \(2, 3\)"),
        ({"kinds": (0, 2)}, r"kinds=\(0, 2\) for 2 layers: give each the index of its own among 2 locs"),
        ({"kinds": (0,)}, r"kinds=\(0,\) for 2 layers"),
        ({"kinds": (0.5, 1)}, "kinds=.* must be integers known at compile time"),
        ({"out": np.zeros((9, 8), np.float32)}, "out is ndarray for 2 layers of k: give a tuple"),
        ({"out": (np.zeros((9, 8), np.float32),)}, "out is 1 for 2 layers of k"),
        ({"out": (np.zeros((9, 8), np.float16),) * 2}, r"out\[0\] is float16\[9, 8\]: it must be float32 or uint32"),
        ({"out": (np.zeros((9, 9), np.float32),) * 2}, r"out\[0\] is float32\[9, 9\]: it must be .*\[slots, 8\]"),
        ({"out": (np.zeros((3, 3, 8), np.float32),) * 2}, r"out\[0\] has 3 slots a page: it must be a power of two"),
        ({"out": (np.zeros((9, 8), np.float32),) * 2}, r"out\[1\] is the destination of another layer, too"),
        ({"out": (View(FLAT, 0, (3, 2, 4), (16, 8, 1)),) * 2}, r"out\[0\] has the strides \(8, 1\) within an entry"),
        ({"out": (View(FLAT, 190, (3, 8)),) * 2}, r"out\[0\] ends at cell 213 of a buffer of 200"),
        (
            {"kinds": (1, 1), "out": (View(FLAT, 0, (3, 8), (16, 1)), View(FLAT, 7, (3, 8), (16, 1)))},
            r"out\[1\] and out\[0\] share cells of their buffer: give Views that do not overlap",
        ),
        (
            {n: View(np.zeros(999, np.float32), 0, (2, 3, 2, 2, 4), (96, 32, 16, 8, 1)) for n in "kv"},
            r"k has the strides \(8, 1\) of heads and cells: heads must have no gaps",
        ),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = GOOD | {"out": tuple(np.zeros((9, 8), np.float32) for _ in range(2)), "eps": EPS} | change
    with pytest.raises(ValueError, match=message):
        commit_context_rows(**call)


# More than 2^31 cells ------------------------------------------------------------------------------------------------


def to_last_unit(pool, k, v, norm, cos, sin, loc, commit, backend):
    """Two layers in a pool whose slots take 64 units each."""
    out = tuple(View(pool, at * 64, (pool.shape[0] // 64, 4, 64), (64 * 64, 64, 1)) for at in (1, 33))
    return commit_context_rows(k, v, norm, cos, sin, (loc,), (0, 0), commit, out, eps=EPS, backend=backend)[0].buffer


@each_gpu_backend
def test_slots_past_2_to_the_31_cells_have_64_bit_offsets(backend, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    rows, angles = jax.ShapeDtypeStruct((4, 2, 2, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 32), jnp.float32)
    arrays = [
        jax.ShapeDtypeStruct((2**21 * 64, 64), jnp.uint16),
        rows,
        rows,
        jax.ShapeDtypeStruct((2, 64), jnp.bfloat16),
    ]
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 2), (4,))]
    call = functools.partial(to_last_unit, backend=backend)
    compiled = aot.compile_for_h200(call, *arrays, angles, angles, *integers, dump=tmp_path)
    assert aot.launches(compiled).total() == 1
    (text,) = aot.ptx(tmp_path).values()
    steps = ptx.address_steps(text)[8 if backend == "triton" else 7]
    assert [s for s in steps if s[0] == 64 * 64 * 2] == [(64 * 64 * 2, 64 * 2)]  # in units until there are 64 bits


@pytest.mark.gpu
@each_gpu_backend
def test_the_last_slot_past_2_to_the_31_cells(backend):
    call = problem(np.random.default_rng(0), (1, 2, 2, 2, 64), jnp.bfloat16, kinds=(0, 0), slots=9, commit=(1,))
    arrays = [jnp.asarray(call[name]) for name in ("k", "v", "norm", "cos", "sin")]
    pool = jnp.full((2**20 * 64, 64), 7, jnp.uint16)  # 2^32 cells
    step = jax.jit(functools.partial(to_last_unit, backend=backend), donate_argnums=0)
    after = step(pool, *arrays, jnp.array([[2**20 - 1, 5]]), jnp.array([1]))
    rows = np.asarray(after[-64:])
    for layer, at in enumerate((1, 33)):
        expected = call["v"][0, 0, layer].reshape(2, 64)
        np.testing.assert_array_equal(rows[at + 2 : at + 4], bits(expected))
    untouched = np.ones(64, bool)
    untouched[[*range(1, 5), *range(33, 37)]] = False
    assert (rows[untouched] == 7).all() and (after[:-64] == 7).all()

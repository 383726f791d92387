"""page_zero: pages of several sizes, whatever the list holds; nothing else is touched."""

import importlib

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_cases as cases
import kernel_oracle as oracle
import kernel_ptx as ptx
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels import KernelFault, checked, mosaic, page_zero

module = importlib.import_module("pallas_kernels.page_zero")
each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))
each_gpu_backend = pytest.mark.parametrize("backend", ["triton", MOSAIC])


def run(buffer, pages, page_units, backend):
    def call(buffer, pages):
        return page_zero(buffer, pages, page_units=page_units, backend=backend)

    if backend != "checked":
        call = jax.jit(call, compiler_options=quick_compile.options())
    return np.asarray(call(jnp.asarray(buffer), jnp.asarray(pages, jnp.int32)))


def check(buffer, pages, page_units, backend):
    expected = buffer.copy()
    oracle.zero_pages(expected, pages, page_units)
    np.testing.assert_array_equal(run(buffer, pages, page_units, backend), expected, strict=True)


def disjoint(rng, units, page_units, count, bad=0.3):
    """Pages of every kind in a buffer of so many units, none over another; 0, negative and too large ones between."""
    pages, used = np.zeros((len(page_units), count), np.int32), np.zeros(units, bool)
    for kind, n in np.ndindex(*pages.shape):
        size = page_units[kind]
        page = rng.integers(0, max(units // size, 1))
        cells = slice(page * size, (page + 1) * size)
        if rng.random() < bad:
            pages[kind, n] = rng.choice([0, -1, -(2**31), units // size, 2**31 - 1])
        elif page > 0 and not used[cells].any():
            used[cells], pages[kind, n] = True, page
    return pages


@each_backend
def test_pages_of_two_sizes(backend):
    after = run(np.ones((12, 2), np.float32), [[2, 0, 3], [1, 4, 0]], (3, 1), backend)
    assert after[:, 0].tolist() == [1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert (after[:, 0] == after[:, 1]).all()


@each_backend
def test_not_a_number_is_zeroed_and_stays_where_it_may(backend):
    buffer = np.full((40, 64), np.nan, jnp.bfloat16)
    after = run(buffer, [[1, 0], [0, 3]], (10, 7), backend)
    zero = np.zeros(40, bool)
    zero[10:20] = zero[21:28] = True
    assert (after[zero] == 0).all() and np.isnan(after[~zero].astype(np.float32)).all()


@quick_backends
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.uint16, np.int8, np.int32])
def test_any_dtype(dtype, backend):
    check(np.full((20, 64), 7, dtype), [[1, 0, 4]], (4,), backend)


@quick_backends
@pytest.mark.parametrize(
    ("units", "width", "page_units", "count"),
    [
        (9, 64, (1, 2), 1),
        (300, 64, (63, 64, 65), 4),  # one turn of a program, and a unit more or less
        (50, 3, (1, 5, 2), 33),
        (4100, 5, (2000, 17), 3),  # units that do not fill the lanes of a store
        (700, 1, (1,), 600),  # more entries than programs
        (9, 64, (20, 4), 2),  # larger than the buffer
    ],
)
def test_sizes(units, width, page_units, count, backend):
    rng = np.random.default_rng(units)
    buffer = rng.integers(1, 99, (units, width)).astype(np.float32)
    check(buffer, disjoint(rng, units, page_units, count), page_units, backend)


def test_several_turns_and_groups_interpreted(monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 5)
    rng = np.random.default_rng(0)
    buffer = rng.integers(1, 99, (900, 64)).astype(np.float32)
    check(buffer, disjoint(rng, 900, (131, 40), 6), (131, 40), "interpret")  # 3 turns a page, and one group


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_checked_in_tiny_blocks(data):
    """Every shape of programs: splits of a page, groups of entries, several blocks of a list."""
    sizes = {"PROGRAMS": st.integers(1, 9), "BLOCK": st.just(4), "TURN": st.integers(1, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked.CheckedLanes, "least", 4)
        for name, size in (sizes | {"ENTRIES": st.sampled_from([4, 8])}).items():
            patch.setattr(module, name, data.draw(size))
        page_units = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        units, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        pages = disjoint(rng, units, page_units, data.draw(st.integers(1, 12)))
        with checked.declare(seed=data.draw(st.integers(0, 99))):
            check(rng.integers(1, 99, (units, width)).astype(np.int16), pages, page_units, "checked")


def test_checked_stops_a_page_past_the_buffer(monkeypatch):
    monkeypatch.setattr(module.PageZero, "last", (9,))
    with pytest.raises(KernelFault, match=r"store out of range of out 0\[10, 4\]: \(10, 0\)"):
        run(np.ones((10, 4), np.float32), [[2]], (4,), "checked")


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    ("buffer", "pages", "page_units"),
    [((4, 8), (2, 0), (1, 2)), ((4, 8), (0, 3), ()), ((0, 8), (1, 3), (2,)), ((4, 0), (1, 3), (2,))],
)
def test_nothing_to_do(buffer, pages, page_units, backend):
    after = page_zero(jnp.ones(buffer), jnp.ones(pages, jnp.int32), page_units=page_units, backend=backend)
    assert after.shape == buffer and (after == 1).all()


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_a_list_of_zeros_leaves_the_buffer(backend):
    check(np.full((30, 64), 7, np.float32), np.zeros((2, 40), np.int32), (4, 3), backend)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_donated_buffer_is_written_in_place(backend):
    buffer = jnp.ones((30, 64), jnp.bfloat16)
    place = buffer.unsafe_buffer_pointer()
    call = jax.jit(lambda b, p: page_zero(b, p, page_units=(4,), backend=backend), donate_argnums=0)
    after = call(buffer, jnp.array([[2]]))
    assert buffer.is_deleted() and after.unsafe_buffer_pointer() == place
    assert (after[8:12] == 0).all() and after.astype(jnp.float32).sum() == 26 * 64


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_pages_with_x64_on(backend):
    with jax.enable_x64(True):
        pages = jnp.array([[2, 2**40, -1]])
        after = page_zero(jnp.ones((9, 2), jnp.float32), pages, page_units=(3,), backend=backend)
    assert after[:, 0].tolist() == [1] * 6 + [0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": np.zeros(4)}, r"buffer is float64\[4\]: it must be an array \[units, U\]"),
        ({"pages": np.zeros((1, 2))}, "pages is float64: it must be an array of integers"),
        ({"pages": np.zeros(2, np.int32)}, r"pages has shape \(2,\): it must have 2 dimensions"),
        ({"page_units": (1, 2)}, r"page_units=\(1, 2\) for 1 rows of pages: give each kind the units of its page"),
        ({"page_units": (0,)}, r"page_units=\(0,\) for 1 rows"),
        ({"page_units": (1.5,)}, r"page_units=\(1.5,\): it must be integers known at compile time"),
        ({"page_units": 3}, "page_units=3: it must be integers known at compile time"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = {"buffer": np.zeros((4, 2), np.float32), "pages": np.zeros((1, 2), np.int32), "page_units": (1,)} | change
    with pytest.raises(ValueError, match=message):
        page_zero(call.pop("buffer"), call.pop("pages"), **call)


# Compiled for a GPU that is not there ---------------------------------------------------------------------------------

POOL = jax.ShapeDtypeStruct((70_000_000, 64), jnp.float32)  # more than 2^32 cells


@each_gpu_backend
def test_units_past_2_to_the_31_cells_have_64_bit_offsets(backend, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    pages = jax.ShapeDtypeStruct((2, 300), jnp.int32)
    call = lambda b, p: page_zero(b, p, page_units=(500, 3), backend=backend)  # noqa: E731
    compiled = aot.compile_for_h200(call, POOL, pages, dump=tmp_path)
    assert compiled.memory_analysis().alias_size_in_bytes == POOL.size * 4
    (text,) = aot.ptx(tmp_path).values()
    steps = ptx.address_steps(text)[2 if backend == "triton" else 1]
    assert {(500 * 256, 256), (3 * 256, 256)} <= steps  # pages are counted in units until the number has 64 bits
    if backend == "triton":
        assert "st.global.v4" in text  # 16 bytes a thread


@each_gpu_backend
def test_in_a_loop_the_pool_stays_where_it_is(backend):
    if reason := aot.missing():
        pytest.skip(reason)

    def call(carry):
        def turn(carry):
            left, buffer = carry
            return left - 1, page_zero(buffer, left[None, None], page_units=(500,), backend=backend)

        return lax.while_loop(lambda carry: carry[0] > 0, turn, carry)

    compiled = aot.compile_for_h200(call, (jax.ShapeDtypeStruct((), jnp.int32), POOL))
    assert compiled.memory_analysis().alias_size_in_bytes == POOL.size * 4 + 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_triton_refuses_bytes_that_it_would_count_in_31_bits():
    call = lambda b, p: page_zero(b, p, page_units=(1,), backend="triton")  # noqa: E731
    pages = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"int8\[50000000, 64\] .* use wider elements, or backend='mosaic'"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((50_000_000, 64), jnp.int8), pages)
    for units, dtype in [(2**25, jnp.int8), (2**26 + 1, jnp.int8), (50_000_000, jnp.int16)]:
        assert jax.eval_shape(call, jax.ShapeDtypeStruct((units, 64), dtype), pages).shape == (units, 64)


@pytest.mark.gpu
@each_gpu_backend
def test_the_last_page_past_2_to_the_31_cells(backend):
    units = 2**26 + 7
    buffer = jnp.full((units, 64), 7, jnp.int8)
    call = jax.jit(lambda b, p: page_zero(b, p, page_units=(1,), backend=backend), donate_argnums=0)
    after = call(buffer, jnp.array([[units - 1]]))
    assert (after[-1] == 0).all() and (after[:-1] == 7).all()

"""state_scatter: which states move, that they move bit for bit, and that nothing else is read or written."""

import dataclasses
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
from kernel_cases import int32
from numpy.lib.stride_tricks import as_strided

from pallas_kernels import KernelFault, View, checked, mosaic, state_scatter

module = importlib.import_module("pallas_kernels.state_scatter")
each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))
each_gpu_backend = pytest.mark.parametrize("backend", ["triton", MOSAIC])


def run(src, step, dst_index, out, backend):
    """The destination after; of a View its whole buffer."""

    def call(buffer, src, step, dst_index):
        held = dataclasses.replace(out, buffer=buffer) if isinstance(out, View) else buffer
        result = state_scatter(src, step, dst_index, held, backend=backend)
        return result.buffer if isinstance(out, View) else result

    if backend != "checked":
        call = jax.jit(call, compiler_options=quick_compile.options())
    buffer = out.buffer if isinstance(out, View) else out
    return np.asarray(call(*map(jnp.asarray, (buffer, src, step, dst_index))))


def bits(array):
    """The bits of floats, so that NaNs can be compared."""
    return array.view(f"uint{8 * array.dtype.itemsize}")


def check(src, step, dst_index, before, backend):
    expected = before.copy()
    oracle.scatter_states(expected, src, step, dst_index)
    after = run(src, step, dst_index, before, backend)
    assert after.dtype == before.dtype
    np.testing.assert_array_equal(bits(after), bits(expected), strict=True)


def random_bits(rng, dtype, *shape):
    dtype = np.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def rows(rng, batch, depth, slots):
    """A step and a slot for each request, every third row skipped; no two of the others have one slot."""
    step, slot = rng.integers(0, depth, batch), rng.permutation(max(slots, batch))[:batch]
    step[1::3], slot[2::3] = rng.choice([-1, depth, -(2**31)]), rng.choice([-1, slots, 2**31 - 1])
    return step.astype(np.int32), np.where(slot < slots, slot, -1).astype(np.int32)


@each_backend
def test_the_accepted_state_goes_to_the_slot(backend):
    src = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    after = run(src, int32(1, -1, 0), int32(0, 1, 3), np.full((2, 4, 2), -7, np.float32), backend)
    assert after[0].tolist() == [[2, 3], [-7, -7], [-7, -7], [8, 9]]
    assert after[1].tolist() == [[14, 15], [-7, -7], [-7, -7], [20, 21]]


SKIPPED = {
    "no step": (int32(-1, -1), int32(2, 2)),
    "a step past the last": (int32(3, 1000), int32(2, 2)),
    "no slot": (int32(0, 1), int32(-1, -1)),
    "a slot past the last": (int32(0, 1), int32(5, 2**31 - 1)),
    "neither": (int32(-(2**31), 2**31 - 1), int32(-(2**31), 7)),
}


@quick_backends
@pytest.mark.parametrize("why", SKIPPED)
def test_padded_rows_on_one_slot_touch_nothing(why, backend):
    before = np.full((2, 5, 3), np.nan, np.float32)
    after = run(np.ones((2, 2, 3, 3), np.float32), *SKIPPED[why], before, backend)
    assert np.isnan(after).all()


@quick_backends
def test_a_padded_row_on_the_slot_of_a_real_one(backend):
    src = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    after = run(src, int32(-1, 0, -1), int32(1, 1, 1), np.full((1, 2, 1), 7, np.float32), backend)
    assert after.ravel().tolist() == [7, 1]


@quick_backends
@pytest.mark.parametrize("depth", range(1, 10))
def test_depths(depth, backend):
    rng = np.random.default_rng(depth)
    src = random_bits(rng, np.float32, 2, 7, depth, 6)
    check(src, *rows(rng, 7, depth, 9), random_bits(rng, np.float32, 2, 9, 6), backend)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.uint16, np.int8, np.int32])
def test_any_bits_of_any_dtype(dtype, backend):
    """NaNs of every kind among them, and half floats that are halves of wider numbers."""
    rng = np.random.default_rng(0)
    src = random_bits(rng, dtype, 1, 2, 2, 1500)
    if (dtype, backend) == (np.int8, "mosaic"):
        with pytest.raises(ValueError, match="int8 elements are of one byte"):
            state_scatter(src, int32(1, 0), int32(2, 0), random_bits(rng, dtype, 1, 3, 1500), backend=backend)
        return
    check(src, int32(1, 0), int32(2, 0), random_bits(rng, dtype, 1, 3, 1500), backend)


@quick_backends
@pytest.mark.parametrize(
    ("layers", "batch", "inner"),
    [(1, 1, ()), (3, 2, (1,)), (2, 5, (3,)), (1, 4, (64,)), (2, 3, (1000,)), (1, 3, (32, 32)), (2, 2, (3, 2731))],
)
def test_sizes(layers, batch, inner, backend):
    rng = np.random.default_rng(batch)
    src = random_bits(rng, np.float32, layers, batch, 3, *inner)
    check(src, *rows(rng, batch, 3, 5), random_bits(rng, np.float32, layers, 5, *inner), backend)


def test_several_programs_a_state_interpreted():
    rng = np.random.default_rng(1)
    src = random_bits(rng, jnp.bfloat16, 2, 3, 2, 3, 2731)  # two programs and a part
    check(src, int32(1, -1, 0), int32(4, 0, 2), random_bits(rng, jnp.bfloat16, 2, 5, 3, 2731), "interpret")


@pytest.mark.parametrize("seed", range(12))
def test_checked_reads_nothing_but_the_accepted_states(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(checked.CheckedLanes, "least", 4)
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "BLOCKS", 1 + seed % 3)
    layers, batch, depth, size = (int(rng.integers(1, most)) for most in (5, 5, 5, 40))
    src = random_bits(rng, np.float32, layers, batch, depth, size)
    step, slot = rows(rng, batch, depth, 6)
    dead = np.ones(src.shape, bool)
    for b in range(batch):
        if 0 <= step[b] < depth and 0 <= slot[b] < 6:
            dead[:, b, step[b]] = False
    with checked.declare(dead={"src": dead.reshape(-1, size)}, seed=seed):
        check(src, step, slot, random_bits(rng, np.float32, layers, 6, size), "checked")


@pytest.mark.parametrize(("step", "slot"), [(-1, 0), (4, 0), (0, -1), (3, 4)])
def test_checked_stops_a_kernel_that_skips_no_row(step, slot, monkeypatch):
    monkeypatch.setattr(module.StateScatter, "_live", lambda self, step, slot: step == step)
    with pytest.raises(KernelFault, match=r"out of range of (src\[4, 3\]|out 0\[4, 3\])"):
        run(np.zeros((1, 1, 4, 3), np.float32), int32(step), int32(slot), np.zeros((1, 4, 3), np.float32), "checked")


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    ("src", "slots"),
    [((0, 2, 3, 4), 5), ((2, 0, 3, 4), 5), ((2, 2, 0, 4), 5), ((2, 2, 3, 0), 5), ((2, 2, 3, 4), 0)],
)
def test_without_cells_nothing_is_written(src, slots, backend):
    out = jnp.ones((src[0], slots, src[3]))
    after = state_scatter(jnp.zeros(src), *(np.zeros(src[1], np.int32),) * 2, out, backend=backend)
    assert after.shape == out.shape and (after == 1).all()


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_indices_with_x64_on(backend):
    with jax.enable_x64(True):
        src = jnp.arange(8, dtype=jnp.float32).reshape(1, 2, 2, 2)
        out = jnp.full((1, 3, 2), -7, jnp.float32)
        after = state_scatter(src, jnp.array([1, 2**40]), jnp.array([2, 0]), out, backend=backend)
    assert after.dtype == jnp.float32 and after[0].tolist() == [[-7, -7], [-7, -7], [2, 3]]


# Views ---------------------------------------------------------------------------------------------------------------

VIEWS = {  # of L = 2, 5 slots and an inner shape (3, 4): shape of the buffer, offset, shape and strides of the view
    "every other entry": ((240,), 0, (2, 5, 3, 4), (120, 24, 4, 1)),
    "gaps everywhere": ((400,), 7, (2, 5, 12), (180, 29, 1)),
    "slots outside layers": ((400,), 3, (2, 5, 3, 4), (17, 41, 4, 1)),
    "part of a row": ((12, 20), 21, (2, 5, 3, 4), (100, 20, 4, 1)),
    "several entries a row": ((5, 30), 2, (2, 5, 12), (13, 30, 1)),
    "whole rows": ((40, 4), 8, (2, 5, 3, 4), (68, 12, 4, 1)),
    "whole rows, cells of another shape": ((70, 2), 4, (2, 5, 6, 2), (66, 12, 2, 1)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, backend):
    shape, offset, *place = VIEWS[name]
    rng = np.random.default_rng(3)
    src = random_bits(rng, np.float32, 2, 4, 3, 3, 4)
    before = random_bits(rng, np.float32, *shape)
    expected = before.copy()
    cells = as_strided(expected.reshape(-1)[offset:], place[0], [4 * n for n in place[1]])
    oracle.scatter_states(cells, src.reshape(2, 4, 3, *place[0][2:]), int32(2, -1, 0, 1), int32(4, 1, 0, -1))
    after = run(src, int32(2, -1, 0, 1), int32(4, 1, 0, -1), View(jnp.asarray(before), offset, *place), backend)
    np.testing.assert_array_equal(bits(after), bits(expected))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("pool", [False, True])
def test_a_donated_destination_is_written_in_place(pool, backend):
    def call(buffer, src):
        out = View(buffer, 64, (1, 3, 2, 64), (0, 192, 64, 1)) if pool else buffer.reshape(1, 10, 64)
        out = state_scatter(src, int32(0, 1), int32(2, 0), out, backend=backend)
        return out.buffer if pool else out.reshape(10, 64)

    buffer = jnp.full((10, 64), -7, jnp.bfloat16)
    place = buffer.unsafe_buffer_pointer()
    after = jax.jit(call, donate_argnums=0)(buffer, jnp.ones((1, 2, 2, 2 if pool else 1, 64), jnp.bfloat16))
    assert buffer.is_deleted() and after.unsafe_buffer_pointer() == place
    assert np.flatnonzero((after == 1).all(axis=1)).tolist() == ([1, 2, 7, 8] if pool else [0, 2])


# What is refused -----------------------------------------------------------------------------------------------------

SRC, OUT = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 7, 5), np.float32)
FLAT, GRID = np.zeros(90, np.float32), np.zeros((9, 10), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": SRC[0, 0]}, r"src is float32\[4, 5\]: it must be an array \[layers, requests, rows, ...\]"),
        ({"step": np.zeros(3)}, "step is float64: it must be an array of integers"),
        ({"step": np.zeros(2, np.int32)}, "step has 2 rows for a batch of 3"),
        ({"dst_index": np.zeros((3, 1), np.int32)}, r"dst_index has shape \(3, 1\): it must have 1 dimension"),
        ({"out": OUT.astype(np.float16)}, r"out is float16\[2, 7, 5\]: it must be float32\[2, slots, 5\], as src is"),
        ({"out": OUT[:1]}, r"out is float32\[1, 7, 5\]: it must be float32\[2, slots, 5\]"),
        ({"out": OUT[..., :4]}, r"out is float32\[2, 7, 4\]"),
        ({"out": OUT[0, 0]}, r"out is float32\[5\]"),
        ({"out": None}, "out is NoneType"),
        ({"out": View(FLAT.astype(np.int32), 0, (2, 7, 5))}, r"out is a View of int32\[2, 7, 5\]"),
        ({"out": View(FLAT, 30, (2, 7, 5))}, "out ends at cell 99 of a buffer of 90"),
        ({"out": View(FLAT, 0, (2, 4, 5), (45, 10, 2))}, r"out has the strides \(2,\) within an entry of shape \(5,\)"),
        ({"out": View(FLAT, 0, (2, 4, 5), (20, 4, 1))}, "out has shape .* so that entries share cells"),
        ({"out": View(GRID, 6, (2, 4, 5), (40, 10, 1))}, "out runs past the 10 columns of its buffer"),
        ({"out": View(FLAT.reshape(3, 5, 6), 0, (2, 7, 5))}, "its buffer must be float32, 1-D or 2-D"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = {"src": SRC, "step": int32(0, 0, 0), "dst_index": int32(0, 1, 2), "out": OUT} | change
    with pytest.raises(ValueError, match=message):
        state_scatter(**call)


# More than 2^31 cells ------------------------------------------------------------------------------------------------


def to_last_unit(buffer, src, step, index, backend):
    """A pool whose slots take 64 units each."""
    out = View(buffer, 64, (1, buffer.shape[0] // 64, 32, 64), (0, 64 * 64, 64, 1))
    return state_scatter(src, step, index, out, backend=backend).buffer


@each_gpu_backend
def test_slots_past_2_to_the_31_cells_have_64_bit_offsets(backend, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    shapes = [(2**21 * 64, 64), (1, 4, 3, 32, 64)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    call = lambda *arrays: to_last_unit(*arrays, backend)  # noqa: E731
    compiled = aot.compile_for_h200(call, *arrays, rows, rows, dump=tmp_path)
    assert aot.launches(compiled).total() == 1
    (text,) = aot.ptx(tmp_path).values()
    slots = [s for s in ptx.address_steps(text)[4 if backend == "triton" else 3] if s[0] == 64 * 64 * 4]
    assert slots == [(64 * 64 * 4, 64 * 4)]  # counted in units until the number has 64 bits
    if backend == "triton":
        assert "ld.global.v4" in text and "st.global.v4" in text  # 16 bytes a thread


@pytest.mark.gpu
@each_gpu_backend
def test_the_last_slot_past_2_to_the_31_cells(backend):
    buffer = jnp.full((2**26, 64), 7, jnp.bfloat16)
    call = jax.jit(lambda *arrays: to_last_unit(*arrays, backend), donate_argnums=0)
    after = call(buffer, jnp.ones((1, 1, 2, 32, 64), jnp.bfloat16), jnp.array([1]), jnp.array([2**20 - 1]))
    assert (after[-63:-31] == 1).all() and (after[:-63] == 7).all() and (after[-31:] == 7).all()

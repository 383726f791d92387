"""top_ids: exactly the best of each row's live scores, whatever lies behind them."""

import importlib

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_cases as cases
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.attention.selection import select_pools
from pallas_kernels import KernelFault, View, checked, mosaic, top_ids

module = importlib.import_module("pallas_kernels.top_ids")
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))
each_gpu_backend = pytest.mark.parametrize("backend", ["triton", MOSAIC])
NAN, INF = np.nan, np.inf


def oracle(scores, lens, budget):
    """By sorting: worse scores later, NaN last of all, equal ones by their ids."""
    out = np.full((len(lens), budget), -1, np.int32)
    for row, live in enumerate(lens):
        live = min(max(int(live), 0), scores.shape[1])
        key = [(np.isnan(x), 0.0 if np.isnan(x) else -float(x)) for x in scores[row, :live]]
        best = sorted(sorted(range(live), key=key.__getitem__)[:budget])  # stable
        out[row, : len(best)] = best
    return out


def run(scores, lens, budget, backend):
    def call(scores, lens):
        return top_ids(scores, lens, budget=budget, backend=backend)

    if backend != "checked":
        call = jax.jit(call, compiler_options=quick_compile.options())
    return np.asarray(call(jnp.asarray(scores), jnp.asarray(lens, jnp.int32)))


def check(scores, lens, budget, backend):
    found = run(scores, lens, budget, backend)
    np.testing.assert_array_equal(found, oracle(scores, lens, budget), strict=True)


def random_scores(rng, rows, count):
    """Rows of many kinds: all different, few values, of all magnitudes, zeros of both signs, NaN and infinities."""
    scores = rng.standard_normal((rows, count)).astype(np.float32)
    scores[1::4] = rng.integers(-2, 3, scores[1::4].shape)
    scores[2::4] *= 10.0 ** rng.integers(-30, 30, scores[2::4].shape)
    scores[3::4] = rng.choice([0.0, -0.0, NAN, -NAN, INF, -INF, 1.0], scores[3::4].shape)
    return scores.astype(np.float32)


def edges(budget, count):
    lens = [0, 1, budget - 1, budget, budget + 1, count - 1, count, -3, count + 9]
    return np.array(sorted({n for n in lens if n <= count + 9}), np.int32)


@each_backend
def test_the_first_of_equals(backend):
    scores = np.float32([[1, 5, 5, 2, 9], [5, 5, 5, 5, 5], [0.0, -0.0, -1, 0.0, -0.0], [-1, -3, -2, -INF, -5]])
    found = run(scores, [4, 5, 5, 5], 2, backend)
    assert found.tolist() == [[1, 2], [0, 1], [0, 1], [0, 2]]


@each_backend
def test_not_a_number_is_worse_than_any(backend):
    quiet, other = np.float32(NAN), np.array(0xFFC12345, np.uint32).view(np.float32)
    scores = np.float32([[NAN, -INF, NAN, -1e38, NAN], [0, 0, 0, 0, 0], [NAN] * 5])
    scores[1] = [quiet, other, -INF, other, 3]
    found = run(scores, [5, 5, 4], 3, backend)
    assert found.tolist() == [[0, 1, 3], [0, 2, 4], [0, 1, 2]]


POISON = [NAN, INF, -INF, 3e38, -0.0, 0.0]


@quick_backends
@pytest.mark.parametrize("poison", POISON)
def test_what_lies_behind_is_not_looked_at(poison, backend):
    rng = np.random.default_rng(0)
    scores, lens = random_scores(rng, 9, 70), np.array([0, 1, 5, 6, 7, 8, 31, 69, 70])
    expected = oracle(scores, lens, 6)
    for row, live in enumerate(lens):
        scores[row, live:] = poison
    np.testing.assert_array_equal(run(scores, lens, 6, backend), expected)


@quick_backends
@pytest.mark.parametrize(
    ("count", "budget"),
    [(1, 1), (5, 9), (33, 32), (64, 1), (100, 99), (100, 100), (300, 7), (4096, 512), (4097, 512), (17000, 512)],
)
def test_sizes(count, budget, backend):
    rng = np.random.default_rng(count)
    lens = edges(budget, count)
    check(random_scores(rng, len(lens), count), lens, budget, backend)


@pytest.mark.parametrize(("count", "budget"), [(5, 9), (300, 7), (9000, 5000), (33000, 40)])
def test_sizes_interpreted(count, budget):
    """One block, several in registers, and a row that is read again for each bit."""
    rng = np.random.default_rng(count)
    lens = edges(budget, count)
    check(random_scores(rng, len(lens), count), lens, budget, "interpret")


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_checked_in_tiny_blocks(data):
    """Every branch: blocks in registers, blocks read again, with any number of equals over their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked.CheckedLanes, "least", 4)
        patch.setattr(checked.CheckedLanes, "longest", data.draw(st.sampled_from([4, 8, 4096])))
        patch.setattr(module, "BLOCK", data.draw(st.sampled_from([4, 16])))
        patch.setattr(module, "HELD", data.draw(st.integers(1, 5)))
        patch.setattr(module, "TURN", data.draw(st.integers(1, 3)))
        rows, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
        values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, NAN, INF, -INF, 1e-30, -1e30])
        scores = np.float32(data.draw(st.lists(values, min_size=rows * count, max_size=rows * count)))
        scores = scores.reshape(rows, count)
        lens = np.int32(data.draw(st.lists(st.integers(-1, count + 1), min_size=rows, max_size=rows)))
        dead = {"scores": np.arange(count) >= lens[:, None]}
        with checked.declare(dead=dead, seed=data.draw(st.integers(0, 99))):
            check(scores, lens, data.draw(st.integers(1, count + 5)), "checked")


def test_checked_stops_a_read_behind_the_live_scores(monkeypatch):
    held = module.TopIds._held
    monkeypatch.setattr(module.TopIds, "_held", lambda self, lanes, row, live, *rest: held(self, lanes, row, 9, *rest))
    dead = {"scores": np.arange(9)[None] >= 8}
    with checked.declare(dead=dead), pytest.raises(KernelFault, match=r"dead cells of scores\[1, 9\]: \(0, 8\)"):
        run(np.ones((1, 9), np.float32), [8], 2, "checked")


@pytest.mark.parametrize("backend", ["reference", "interpret", None])
def test_equals_select_pools(backend):
    rng = np.random.default_rng(2)
    scores, lens = random_scores(rng, 12, 150).reshape(3, 4, 150), rng.integers(0, 151, (3, 4)).astype(np.int32)
    want = select_pools(jnp.asarray(scores), jnp.asarray(lens), 16)
    found = run(scores.reshape(12, 150), lens.reshape(12), 16, backend)
    np.testing.assert_array_equal(found.reshape(3, 4, 16), want)


@quick_backends
@pytest.mark.parametrize(("rows", "count", "budget"), [(0, 5, 3), (3, 0, 4), (3, 5, 0)])
def test_without_cells(rows, count, budget, backend):
    found = run(np.zeros((rows, count), np.float32), [5] * rows, budget, backend)
    assert found.shape == (rows, budget) and (found == -1).all()


def test_lengths_in_a_wider_buffer():
    scores, lens = jnp.arange(12.0).reshape(2, 6), jnp.array([9, 9, 2, 9, 4])
    found = top_ids(scores, View(lens.astype(jnp.int32), 2, (2,), (2,)), budget=3, backend="checked")
    assert found.tolist() == [[0, 1, -1], [1, 2, 3]]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_64_bit_numbers_with_x64_on(backend):
    with jax.enable_x64(True):
        scores = jnp.array([[1.0, 5.0, 5.0, 2.0, 9.0]], jnp.float32)
        found = top_ids(scores, jnp.array([4]), budget=2, backend=backend)
    assert found.dtype == jnp.int32 and found.tolist() == [[1, 2]]


def test_a_budget_too_large_for_the_kernels_is_the_references():
    scores = np.ones((1, 3), np.float32)
    assert run(scores, [2], 40000, None)[0, :3].tolist() == [0, 1, -1]
    with pytest.raises(ValueError, match="budget=40000: backend='interpret' takes up to 32767; leave backend out"):
        run(scores, [2], 40000, "interpret")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": np.zeros((2, 3))}, r"scores is float64\[2, 3\]: it must be float32\[rows, scores\]"),
        ({"scores": np.zeros(3, np.float32)}, r"scores is float32\[3\]"),
        ({"lens": np.zeros(2, np.float32)}, "lens is float32: it must be an array of integers"),
        ({"lens": np.zeros(3, np.int32)}, "lens has 3 rows for a batch of 2"),
        ({"budget": -1}, "budget=-1: it must be a Python integer >= 0"),
        ({"budget": 2.0}, "budget=2.0: it must be a Python integer"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = {"scores": np.zeros((2, 3), np.float32), "lens": np.zeros(2, np.int32), "budget": 2} | change
    with pytest.raises(ValueError, match=message):
        top_ids(**call)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        top_ids(jnp.ones((1, 3)), jnp.ones(1, jnp.int32), budget=2, backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

SIZES = [(300, 7), (32768, 512), (65536, 512)]


def call_of(count, budget, backend):
    """A function and its arguments, the first to be donated."""
    shapes = ((), jnp.int32), ((32, count), jnp.float32), ((32,), jnp.int32)

    def call(number, scores, lens):
        return number, top_ids(scores, lens, budget=budget, backend=backend)

    return call, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize(("count", "budget"), SIZES)
def test_lowers_for_cuda(count, budget, backend):
    function, arguments = call_of(count, budget, backend)
    assert aot.lower_text(function, *arguments).count("triton") >= 1


@each_gpu_backend
@pytest.mark.parametrize(("count", "budget"), SIZES)
def test_compiles_for_sm_90_as_one_launch_and_its_destination(count, budget, backend):
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(count, budget, backend)
    launches = aot.launches(aot.compile_for_h200(function, *arguments))
    assert launches["custom-call"] == 1 and launches.total() <= 2, launches


@pytest.mark.gpu
@each_gpu_backend
@pytest.mark.parametrize("count", [300, 4096, 20000, 32768, 70000])
def test_long_rows(count, backend):
    rng = np.random.default_rng(count)
    lens = rng.integers(0, count + 1, 24).astype(np.int32)
    lens[:9] = np.resize(edges(512, count), 9)
    scores = random_scores(rng, 24, count)
    scores[np.arange(count) >= lens[:, None]] = NAN
    check(scores, lens, 512, backend)

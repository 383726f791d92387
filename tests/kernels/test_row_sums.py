"""row_sums: parts summed onto rows, what a norm of them needs, and that a row's numbers are its own alone."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import kernel_aot as aot
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import row_sums

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["interpret", GPU]
EVERY_BACKEND = ["reference", *BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
DTYPES = ["float32", "bfloat16", "float16"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
COLUMNS = 512  # that a square is summed over


@functools.cache
def compiled(backend):
    return jax.jit(functools.partial(row_sums, backend=backend), compiler_options=quick_compile.options())


@dataclasses.dataclass
class Problem:
    rng: np.random.Generator
    N: int = 3
    M: int = 700
    S: int = 3
    dtype: str = "bfloat16"
    scale_dtype: str = "bfloat16"

    def __post_init__(self):
        rng = self.rng
        self.parts = rng.normal(size=(self.S, self.N, self.M)).astype(np.float32)
        self.x = rng.normal(size=(self.N, self.M)).astype(jnp.dtype(self.dtype))
        self.scale = rng.uniform(-2, 2, self.M).astype(jnp.dtype(self.scale_dtype))

    def run(self, backend, rows=None):
        """total, scaled and squares; of some rows."""
        rows = np.arange(self.N) if rows is None else np.asarray(rows)
        found = [np.asarray(y) for y in compiled(backend)(self.parts[:, rows], self.x[rows], self.scale)]
        blocks = -(-self.M // COLUMNS)
        shapes = [((len(rows), self.M), self.x.dtype)] * 2 + [((len(rows), blocks), np.float32)]
        assert [(y.shape, y.dtype) for y in found] == shapes
        return found

    def check(self, backend):
        """The total is the nearest number of the dtype, but for errors of float32 sums: 1e-6 of the sum of their parts.

        What is made of it is made of the number that it was rounded to: scaled is one product, rounded to float32 and
        then to the dtype, so that there is no doubt about any bit; of squares only sums in another order differ.
        """
        total, scaled, squares = self.run(backend)
        terms = [self.x.astype(np.float64), *self.parts.astype(np.float64)]
        want, error = sum(terms), 1e-6 * sum(map(np.abs, terms))
        info = jnp.finfo(self.x.dtype)
        half = float(info.eps) / 2 * np.abs(want) + float(info.smallest_subnormal)
        off = np.abs(total.astype(np.float64) - want)
        assert (off <= 1.01 * half + error).all(), (off - half - error).max()
        exact = self.scale.astype(np.float64) * total.astype(np.float64)
        np.testing.assert_array_equal(scaled, exact.astype(np.float32).astype(scaled.dtype))
        each = np.square(total.astype(np.float64))
        for block in range(squares.shape[1]):
            sums = each[:, block * COLUMNS : (block + 1) * COLUMNS].sum(axis=1)
            np.testing.assert_allclose(squares[:, block], sums, rtol=5e-6)


def assert_same_bits(found, want):
    for y, z in zip(found, want, strict=True):
        kind = f"uint{8 * y.dtype.itemsize}"
        np.testing.assert_array_equal(np.ascontiguousarray(y).view(kind), np.ascontiguousarray(z).view(kind))


# What comes out -------------------------------------------------------------------------------------------------------


@every_backend
@each_dtype
@pytest.mark.parametrize("M", [1, 8, 511, 512, 513, 1024, 4096])
def test_columns(M, dtype, backend):
    """What lies behind the last column is not summed up."""
    Problem(np.random.default_rng(M), M=M, dtype=dtype).check(backend)


@every_backend
@pytest.mark.parametrize("S", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("N", [1, 8, 65])
def test_rows_and_parts(N, S, backend):
    Problem(np.random.default_rng(N), N=N, M=520, S=S).check(backend)


@every_backend
@pytest.mark.parametrize("scale_dtype", DTYPES)
@each_dtype
def test_dtypes(dtype, scale_dtype, backend):
    Problem(np.random.default_rng(0), dtype=dtype, scale_dtype=scale_dtype).check(backend)


@every_backend
def test_what_is_rounded_is_scaled_and_squared(backend):
    """1 + 2^-9 and 1 - 2^-10 are 1 in bfloat16, and ties go to even ones."""
    x, parts = np.ones((1, 4), jnp.bfloat16), np.zeros((2, 1, 4), np.float32)
    parts[0, 0] = [2.0**-9, 0, 2.0**-8, 2.0**-8]
    parts[1, 0] = [0, -(2.0**-10), 0, 2.0**-7]
    total, scaled, squares = (np.asarray(y) for y in compiled(backend)(parts, x, np.float32([1, 1, 1, 2])))
    assert total.astype(float).tolist() == [[1, 1, 1, 1 + 2.0**-6]]
    assert scaled.astype(float).tolist() == [[1, 1, 1, 2 + 2.0**-5]]
    assert squares.tolist() == [[3 + (1 + 2.0**-6) ** 2]]


@every_backend
@pytest.mark.parametrize(("S", "N", "M"), [(2, 0, 16), (2, 3, 0), (0, 3, 16), (0, 0, 0)])
def test_nothing(S, N, M, backend):
    """No rows, no columns, and no parts: rows as they are."""
    problem = Problem(np.random.default_rng(1), S=S, N=N, M=M)
    problem.check(backend)
    if not S:
        assert_same_bits(problem.run(backend)[:1], [problem.x])


@settings(max_examples=15, deadline=None, database=None)
@given(st.data())
def test_random(data):
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        N=data.draw(st.integers(0, 9)),
        M=data.draw(st.integers(0, 1100)),
        S=data.draw(st.integers(0, 9)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        scale_dtype=data.draw(st.sampled_from(DTYPES)),
    )
    problem.check("reference")
    problem.check("interpret")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(backend):
    with jax.enable_x64(True):
        problem = Problem(np.random.default_rng(2), scale_dtype="float32")
        problem.scale = problem.scale.astype(np.float64)
        problem.check(backend)


@every_backend
def test_it_is_the_norm_of_a_product(backend):
    """Of x plus the parts: the scaled rows times a matrix, over the root of the mean of all squares."""
    problem = Problem(np.random.default_rng(3), dtype="float32", scale_dtype="float32")
    _, scaled, squares = problem.run(backend)
    matrix = problem.rng.normal(size=(problem.M, 5))
    rows = problem.x.astype(np.float64) + problem.parts.sum(axis=0, dtype=np.float64)
    normed = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 0.1) * problem.scale
    found = scaled.astype(np.float64) @ matrix / np.sqrt(squares.sum(axis=1, keepdims=True) / problem.M + 0.1)
    np.testing.assert_allclose(found, normed @ matrix, rtol=1e-4, atol=1e-4)


# Whose a row's bits are -----------------------------------------------------------------------------------------------


@each_backend
@each_dtype
@pytest.mark.parametrize("M", [512, 700])
def test_a_row_is_its_own_alone(M, dtype, backend):
    """Its bits do not change with the rows beside it: permuted, not numbers, or not there."""
    problem = Problem(np.random.default_rng(4), N=9, M=M, dtype=dtype)
    whole = problem.run(backend)
    order = problem.rng.permutation(9)
    assert_same_bits(problem.run(backend, order), [y[order] for y in whole])
    for rows in ([0], [8], [2, 3, 7]):
        assert_same_bits(problem.run(backend, rows), [y[rows] for y in whole])
    gone, kept = [1, 2, 7], [0, 3, 4, 5, 6, 8]
    problem.x[gone], problem.parts[:, [1, 6]] = np.nan, np.inf
    kept.remove(6)
    assert_same_bits([y[kept] for y in problem.run(backend)], [y[kept] for y in whole])


@each_backend
def test_a_block_of_columns_is_its_own_alone(backend):
    """As are, of total and scaled, single columns."""
    problem = Problem(np.random.default_rng(5), M=1030)
    whole = problem.run(backend)
    problem.x[:, 600], problem.parts[1, :, 700], problem.scale[3] = np.nan, np.inf, np.nan
    total, scaled, squares = problem.run(backend)
    kept = np.setdiff1d(np.arange(1030), [600, 700])
    assert_same_bits([total[:, kept], squares[:, [0, 2]]], [whole[0][:, kept], whole[2][:, [0, 2]]])
    kept = np.setdiff1d(kept, [3])
    assert_same_bits([scaled[:, kept]], [whole[1][:, kept]])
    assert not np.isfinite(squares[:, 1]).any()


# What is refused ------------------------------------------------------------------------------------------------------

PARTS, X, SCALE = np.zeros((2, 3, 4), np.float32), np.zeros((3, 4), jnp.bfloat16), np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(4, jnp.bfloat16)}, r"^x is bfloat16\[4\]: give floating \[N, M\]"),
        ({"x": np.zeros((3, 4), np.int8)}, r"^x is int8\[3, 4\]: give floating \[N, M\]"),
        ({"x": [[1.0]]}, r"^x is list: give floating \[N, M\]"),
        ({"parts": PARTS[0]}, r"^parts is float32\[3, 4\]: with x bfloat16\[3, 4\] give float32\[S, 3, 4\]"),
        ({"parts": PARTS[:, :2]}, r"^parts is float32\[2, 2, 4\]: .* give float32\[S, 3, 4\]"),
        ({"parts": PARTS.astype(np.float16)}, r"^parts is float16\[2, 3, 4\]: .* give float32\[S, 3, 4\]"),
        ({"parts": 1.0}, r"^parts is float: .* give float32\[S, 3, 4\]"),
        ({"scale": SCALE[:3]}, r"^scale is float32\[3\]: with x bfloat16\[3, 4\] give floats of shape \(4,\)"),
        ({"scale": np.zeros(4, np.int32)}, r"^scale is int32\[4\]: .* give floats of shape \(4,\)"),
        ({"scale": None}, r"^scale is NoneType: .* give floats of shape \(4,\)"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which row_sums is not: leave"),
        ({"backend": "checked"}, "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interp"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"backend": "tpu", "parts": PARTS[:0]}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        row_sums(**{"parts": PARTS, "x": X, "scale": SCALE} | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        row_sums(*map(jnp.asarray, (PARTS, X, SCALE)), backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

SHAPES = {  # S, N, M, dtype, dtype of the scale
    "a round": (3, 8, 4096, "bfloat16", "bfloat16"),
    "many rows": (8, 300, 4096, "bfloat16", "float32"),
    "float32": (2, 8, 2048, "float32", "float32"),
    "ends within a block": (2, 8, 1000, "float16", "float16"),
    "odd": (1, 3, 77, "bfloat16", "bfloat16"),
}
VECTORS = ["a round", "many rows", "float32"]


def call_of(name, backend):
    """A function and its arguments, the first to be donated."""
    S, N, M, dtype, scale_dtype = SHAPES[name]
    shapes = ((), "int32"), ((S, N, M), "float32"), ((N, M), dtype), ((M,), scale_dtype)

    def call(number, *arrays):
        return number, row_sums(*arrays, backend=backend)

    return call, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda_as_one_launch(name, backend):
    function, arguments = call_of(name, backend)
    assert aot.lower_text(function, *arguments).count('name = "row_sums"') == 1


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_no_launch_for_nothing(shape, backend):
    def call(number, *arrays):
        return number, row_sums(*arrays, backend=backend)

    shapes = ((), jnp.int32), (shape, jnp.float32), (shape[1:], jnp.bfloat16), (shape[2:], jnp.bfloat16)
    assert "custom_call" not in aot.lower_text(call, *(jax.ShapeDtypeStruct(*each) for each in shapes))


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_for_sm_90(name, tmp_path):
    """One launch, and nothing beside it. All loads are on their way before the first thread waits for others."""
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(name, None)
    program = aot.compile_for_h200(function, *arguments, dump=tmp_path)
    assert aot.launches(program) == collections.Counter({"custom-call": 1})
    assert program.memory_analysis().temp_size_in_bytes < 1024
    text = aot.ptx(tmp_path)["row_sums"]
    first = text.find("bar.sync")
    assert first > 0 and "ld.global" not in text[first:]
    if name in VECTORS:
        accesses = re.findall(r"\b(?:ld|st)\.global\S*", text)
        narrow = [access for access in accesses if ".v" not in access]
        assert len(narrow) == 1 and narrow[0].startswith("st."), accesses  # that of the squares


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name):
    S, N, M, dtype, scale_dtype = SHAPES[name]
    Problem(np.random.default_rng(6), N, M, S, dtype, scale_dtype).check("triton")

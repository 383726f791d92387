"""row_products: a few rows times several matrices, and that a row's numbers are its own alone."""

import collections
import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import kernel_aot as aot
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import row_products

module = importlib.import_module("pallas_kernels.row_products")
GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["interpret", GPU]
EVERY_BACKEND = ["reference", *BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
each_form = pytest.mark.parametrize("gated", [False, True], ids=["several", "gated"])
ROWS = [1, 2, 15, 16, 17, 33, 64]


EPS = 0.25  # under the root of what is divided by; of mean squares from 0.2 to 3


@functools.cache
def compiled(gated, backend):
    def call(x, weights, squares):
        return row_products(x, weights, gated=gated, squares=squares, eps=EPS, backend=backend)

    return jax.jit(call, compiler_options=quick_compile.options())


@dataclasses.dataclass
class Problem:
    """Of gated ones the second matrix is as wide as the first. blocks: of squares that rows are divided by, or None."""

    rng: np.random.Generator
    N: int = 8
    K: int = 200
    widths: tuple[int, ...] = (70, 70)
    gated: bool = False
    dtype: str = "bfloat16"
    blocks: int | None = None

    def __post_init__(self):
        self.widths = self.widths[:1] * 2 if self.gated else self.widths
        self.x = self.rng.normal(size=(self.N, self.K)).astype(jnp.dtype(self.dtype))
        # Products are a few units long, where silu is neither 0 nor the identity.
        draw = [self.rng.normal(size=(self.K, width)) * 2 / np.sqrt(max(self.K, 1)) for width in self.widths]
        self.weights = tuple(weight.astype(self.x.dtype) for weight in draw)
        self.squares = None
        if self.blocks is not None:
            mean = self.rng.uniform(0.2, 3, (self.N, 1)) * self.rng.dirichlet(np.ones(self.blocks), self.N)
            self.squares = (mean * self.K).astype(np.float32)

    def run(self, backend, x=None, weights=None, squares=None):
        x, weights = self.x if x is None else x, self.weights if weights is None else weights
        found = compiled(self.gated, backend)(x, weights, self.squares if squares is None else squares)
        outs = weights[:1] if self.gated else weights
        assert [(y.shape, y.dtype) for y in found] == [((len(x), weight.shape[1]), x.dtype) for weight in outs]
        return [np.asarray(y) for y in found]

    def check(self, found, roundings=0):
        """Each is the nearest number of the dtype, but for errors of float32 sums: 3e-6 of the sum of their parts.

        roundings: by how many more a formula differs that stores what it computes on its way.
        """
        x, weights = self.x.astype(np.float64), [weight.astype(np.float64) for weight in self.weights]
        sums, errors = [x @ weight for weight in weights], [3e-6 * np.abs(x) @ np.abs(weight) for weight in weights]
        if self.squares is not None:
            mean = self.squares.astype(np.float64).sum(axis=1, keepdims=True) / max(self.K, 1)
            by = np.sqrt(mean + EPS)
            sums, errors = ([each / by for each in found] for found in (sums, errors))
        if self.gated:
            gate, up = sums[0] / (1 + np.exp(-sums[0])), sums[1]
            # The slope of silu is below 1.1.
            sums, errors = [gate * up], [1.1 * errors[0] * np.abs(up) + np.abs(gate) * errors[1]]
        info = jnp.finfo(self.x.dtype)
        for y, want, error in zip(found, sums, errors, strict=True):
            half = float(info.eps) / 2 * (1 + roundings) * np.abs(want) + float(info.smallest_subnormal)
            off = np.abs(y.astype(np.float64) - want)
            assert (off <= 1.01 * half + error).all(), (off - half - error).max()

    def check_run(self, backend):
        plain = backend in ("reference", None) or not module.serves(self.N, self.K, self.widths, self.dtype)
        plain = plain or (self.squares is not None and not self.squares.size)
        # What XLA computes stores the products, if they are not divided, and parts of silu in the dtype.
        self.check(self.run(backend), roundings=6 if plain and self.gated and self.squares is None else 0)


def assert_same_bits(found, want):
    for y, z in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(y).view(np.uint16), np.ascontiguousarray(z).view(np.uint16))


# What comes out -------------------------------------------------------------------------------------------------------


@every_backend
@each_form
@pytest.mark.parametrize("N", [*ROWS, 65])
def test_rows(N, gated, backend):
    Problem(np.random.default_rng(N), N=N, gated=gated).check_run(backend)


@every_backend
@each_form
@pytest.mark.parametrize(
    ("K", "dtype"), [*((K, "bfloat16") for K in (1, 63, 65, 128)), *((K, "float16") for K in (64, 127, 129, 384))]
)
def test_depths(K, dtype, gated, backend):
    """What lies behind the last piece of a contraction is not summed up."""
    Problem(np.random.default_rng(K), N=3, K=K, gated=gated, dtype=dtype).check_run(backend)


@every_backend
@pytest.mark.parametrize("widths", [(1, 1), (64, 64), (65, 63), (128, 1, 40), (7, 200, 64), (63,), (24, 24, 24, 8)])
def test_several_matrices(widths, backend):
    """Each of a width of its own; a single one is left to XLA."""
    Problem(np.random.default_rng(len(widths)), K=130, widths=widths).check_run(backend)


@every_backend
@pytest.mark.parametrize("width", [1, 127, 128, 129, 260])
def test_gated_widths(width, backend):
    Problem(np.random.default_rng(width), K=130, widths=(width,), gated=True, dtype="float16").check_run(backend)


@every_backend
def test_gates_far_from_zero(backend):
    """silu(-300) is 0 times what is gated, and silu(300) is 300 times it; none of it is NaN."""
    problem = Problem(np.random.default_rng(0), N=2, K=2, widths=(3,), gated=True)
    problem.x = np.array([[1, 0], [0, 1]], problem.x.dtype)
    problem.weights = tuple(
        np.array(rows, problem.x.dtype) for rows in ([[-300, 0, 300], [-90, 88, 1e30]], [[2, 2, 2], [-1, -1, -1]])
    )
    (found,) = problem.run(backend)
    want = np.array([[0, 0, 600], [0, -88, -1e30]], np.float64)
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=2**-7, atol=1e-30)


@every_backend
@each_form
@pytest.mark.parametrize(("N", "K", "width"), [(0, 16, 8), (3, 0, 8), (3, 16, 0)])
def test_nothing(N, K, width, gated, backend):
    """No rows, sums over nothing, which are 0, and no columns."""
    Problem(np.random.default_rng(1), N=N, K=K, widths=(width, width), gated=gated).check_run(backend)


@every_backend
@pytest.mark.parametrize("N", [3, 65])
def test_a_product_too_large_for_float16_is_divided_first(N, backend):
    problem = Problem(np.random.default_rng(0), N=N, K=4096, widths=(2, 2), dtype="float16", blocks=1)
    problem.x, problem.squares = np.full_like(problem.x, 100), np.full_like(problem.squares, 4096e4)
    problem.weights = tuple(np.ones_like(weight) for weight in problem.weights)
    for found in problem.run(backend):
        np.testing.assert_array_equal(found, 4096)


@each_backend
def test_no_matrices(backend):
    assert row_products(jnp.ones((2, 3), jnp.bfloat16), (), backend=backend) == ()


@every_backend
@each_form
def test_float32_is_left_to_xla(gated, backend):
    problem = Problem(np.random.default_rng(2), gated=gated, dtype="float32")
    problem.check_run(backend)
    for y, z in zip(problem.run(backend), problem.run("reference"), strict=True):
        np.testing.assert_array_equal(y, z)


@every_backend
@each_form
@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("N", [*ROWS, 65])
def test_divided_rows(N, blocks, gated, backend):
    """By the root of the mean square, of as many sums as there are."""
    Problem(np.random.default_rng(N), N=N, gated=gated, blocks=blocks).check_run(backend)


@every_backend
@each_form
@pytest.mark.parametrize(
    ("K", "widths", "dtype"),
    [
        (1, (1, 1), "float16"),
        (129, (65, 63, 7), "float16"),
        (384, (129, 70), "bfloat16"),
        (200, (70, 9), "float32"),
        (200, (63,), "bfloat16"),
        (0, (8, 8), "bfloat16"),
        (16, (0, 0), "bfloat16"),
    ],
)
def test_divided_products(K, widths, dtype, gated, backend):
    """Those among them that are left to XLA: of float32, of a single matrix, and of nothing."""
    Problem(np.random.default_rng(K), N=3, K=K, widths=widths, gated=gated, dtype=dtype, blocks=5).check_run(backend)


@every_backend
@each_form
@pytest.mark.parametrize("K", [0, 40])
def test_squares_of_no_blocks_are_0(K, gated, backend):
    """As `row_sums` gives of rows of no columns; eps is left."""
    Problem(np.random.default_rng(8), K=K, gated=gated, blocks=1).check_run(backend)
    problem = Problem(np.random.default_rng(8), K=K, gated=gated)
    problem.squares = np.zeros((problem.N, 0), np.float32)
    problem.check_run(backend)


@each_backend
@each_form
def test_rows_are_divided_by_squares_of_their_own(gated, backend):
    """To the bit, where the squares of other rows are not numbers, or the rows lie elsewhere."""
    problem = Problem(np.random.default_rng(9), N=64, gated=gated, blocks=8)
    whole = problem.run(backend)
    order = problem.rng.permutation(64)
    found = problem.run(backend, problem.x[order], squares=problem.squares[order])
    assert_same_bits(found, [y[order] for y in whole])
    for rows in ([0], [63], [2, 3, 7], list(range(32))):
        found = problem.run(backend, problem.x[rows], squares=problem.squares[rows])
        assert_same_bits(found, [y[rows] for y in whole])
    kept, wild = np.array([0, 4, 63]), np.full_like(problem.squares, np.nan)
    wild[kept] = problem.squares[kept]
    found = problem.run(backend, squares=wild)
    assert_same_bits([y[kept] for y in found], [y[kept] for y in whole])


@settings(max_examples=15, deadline=None, database=None)
@given(st.data())
def test_random(data):
    gated = data.draw(st.booleans())
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        N=data.draw(st.integers(0, 66)),
        K=data.draw(st.integers(0, 300)),
        widths=tuple(data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))),
        gated=gated,
        dtype=data.draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        blocks=data.draw(st.sampled_from([None, 1, 2, 7])),
    )
    problem.check_run("reference")
    problem.check_run("interpret")


@each_form
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(gated, backend):
    with jax.enable_x64(True):
        Problem(np.random.default_rng(3), widths=(70, 9), gated=gated).check_run(backend)


# Whose a row's bits are -----------------------------------------------------------------------------------------------


@each_backend
@each_form
@pytest.mark.parametrize(("K", "widths", "dtype"), [(200, (70, 9), "bfloat16"), (384, (128, 64, 64), "float16")])
def test_a_row_is_its_own_alone(K, widths, dtype, gated, backend):
    """The same to the bit among 64 or fewer, at another place, or with rows beside it that are not numbers."""
    problem = Problem(np.random.default_rng(4), N=64, K=K, widths=widths, gated=gated, dtype=dtype)
    whole = problem.run(backend)
    order = problem.rng.permutation(64)
    assert_same_bits(problem.run(backend, problem.x[order]), [y[order] for y in whole])
    for N in ROWS:
        assert_same_bits(problem.run(backend, problem.x[:N]), [y[:N] for y in whole])
    for row in (17, 63):
        assert_same_bits(problem.run(backend, problem.x[row : row + 1]), [y[row : row + 1] for y in whole])
    for count in (8, 64):
        kept = np.array([0, 4, count - 1])
        for wild in (np.nan, np.inf):
            x = np.full_like(problem.x[:count], wild)
            x[kept] = problem.x[kept]
            assert_same_bits([y[kept] for y in problem.run(backend, x)], [y[kept] for y in whole])


@each_backend
@each_form
@pytest.mark.parametrize("widths", [(70, 70), (200, 64), (256, 192)])
def test_a_column_is_its_own_alone(widths, gated, backend):
    """Columns that are not numbers, of either matrix, are not seen by the others."""
    problem = Problem(np.random.default_rng(5), widths=widths, gated=gated)
    whole = problem.run(backend)
    wild = [np.array([1, 64, width - 1]) % width for width in problem.widths]
    weights = tuple(weight.copy() for weight in problem.weights)
    for weight, columns, value in zip(weights, wild, (np.nan, np.inf), strict=True):
        weight[:, columns] = value
    gone = [np.union1d(*wild)] if gated else wild
    kept = [np.setdiff1d(np.arange(y.shape[1]), columns) for y, columns in zip(whole, gone, strict=True)]
    found = problem.run(backend, weights=weights)
    assert_same_bits(
        [y[:, k] for y, k in zip(found, kept, strict=True)], [y[:, k] for y, k in zip(whole, kept, strict=True)]
    )
    assert not np.isfinite(found[0][:, wild[0]].astype(np.float32)).any()


@each_backend
def test_matrices_do_not_see_each_other(backend):
    problem = Problem(np.random.default_rng(6), widths=(70, 128, 9))
    whole = problem.run(backend)
    for order in ([2, 0, 1], [1, 2], [0, 1]):
        found = problem.run(backend, weights=tuple(problem.weights[i] for i in order))
        assert_same_bits(found, [whole[i] for i in order])


def test_what_the_kernel_serves():
    assert module.serves(1, 1, (1, 1), "bfloat16") and module.serves(64, 12288, (4096,) * 3, jnp.float16)
    for N, K, widths, dtype in [
        (0, 8, (8, 8), "bfloat16"),
        (65, 8, (8, 8), "bfloat16"),
        (8, 0, (8, 8), "bfloat16"),
        (8, 8, (8, 0), "bfloat16"),
        (8, 8, (8,), "bfloat16"),
        (8, 8, (8, 8), "float32"),
        (8, 2**16, (2**15, 8), "bfloat16"),  # a cell's number is 32 bits wide, in a matrix,
        (8, 2**28, (1, 1), "bfloat16"),  # in x
        (8, 1, (2**28, 1), "bfloat16"),  # and in an output
    ]:
        assert not module.serves(N, K, widths, dtype), (N, K, widths, dtype)
    assert module.serves(8, 2**16, (2**15 - 1, 8), "bfloat16") and module.serves(8, 2**28 - 1, (1, 1), "bfloat16")


# What is refused ------------------------------------------------------------------------------------------------------

X = np.zeros((2, 3), jnp.bfloat16)
PAIR = (np.zeros((3, 4), jnp.bfloat16),) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(3, jnp.bfloat16)}, r"^x is bfloat16\[3\]: give floating \[N, K\]"),
        ({"x": np.zeros((2, 3), np.int8)}, r"^x is int8\[2, 3\]: give floating \[N, K\]"),
        ({"x": [[1.0]]}, r"^x is list: give floating \[N, K\]"),
        (
            {"weights": (PAIR[0], np.zeros((4, 4), jnp.bfloat16))},
            r"^weights\[1\] is bfloat16\[4, 4\]: with x bfloat16\[2, 3\] give bfloat16\[3, M\]",
        ),
        ({"weights": (np.zeros(3, jnp.bfloat16),)}, r"^weights\[0\] is bfloat16\[3\]: .* give bfloat16\[3, M\]"),
        ({"weights": (np.zeros((3, 4), np.float16), PAIR[0])}, r"^weights\[0\] is float16\[3, 4\]: .* give bfloat16"),
        ({"weights": (PAIR[0], 1.0)}, r"^weights\[1\] is float: .* give bfloat16\[3, M\]"),
        (
            {"gated": True, "weights": PAIR[:1]},
            r"^weights are \['bfloat16\[3, 4\]'\]: gated takes two of one shape",
        ),
        (
            {"gated": True, "weights": (PAIR[0], np.zeros((3, 5), jnp.bfloat16))},
            r"^weights are \['bfloat16\[3, 4\]', 'bfloat16\[3, 5\]'\]: gated takes two of one shape",
        ),
        ({"gated": True, "weights": PAIR + PAIR}, "^weights are .*: gated takes two of one shape"),
        (
            {"squares": np.zeros(2, np.float32)},
            r"^squares is float32\[2\]: give float32\[2, blocks\], or None: no division",
        ),
        ({"squares": np.zeros((3, 1), np.float32)}, r"^squares is float32\[3, 1\]: give float32\[2, blocks\]"),
        ({"squares": np.zeros((2, 1), np.float16)}, r"^squares is float16\[2, 1\]: give float32\[2, blocks\]"),
        ({"squares": 1.0}, r"^squares is float: give float32\[2, blocks\]"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which row_products is not: leave"),
        ({"backend": "checked"}, "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interp"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"backend": "tpu", "weights": PAIR[:1]}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        row_products(**{"x": X, "weights": PAIR} | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        row_products(jnp.asarray(X), tuple(map(jnp.asarray, PAIR)), backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

SHAPES = {  # N, K, widths, gated, dtype
    "attention": (8, 4096, (4096, 1024, 1024), False, "bfloat16"),
    "attention, many rows": (64, 4096, (4096, 1024, 1024), False, "bfloat16"),
    "two": (1, 2048, (2048, 512), False, "float16"),
    "gated": (8, 4096, (12288, 12288), True, "bfloat16"),
    "gated, many rows": (64, 2048, (6144, 6144), True, "float16"),
    "ends within a tile": (17, 1000, (1000, 200, 8), False, "bfloat16"),
    "gated, ends within a tile": (3, 1000, (1000, 1000), True, "bfloat16"),
    "odd": (33, 999, (999, 201), False, "float16"),
    "gated, odd": (1, 999, (999, 999), True, "bfloat16"),
    "divided": (8, 4096, (4096, 1024, 1024), False, "bfloat16", 8),
    "divided, many rows": (64, 4096, (4096, 1024, 1024), False, "float16", 8),
    "divided, gated": (8, 4096, (12288, 12288), True, "bfloat16", 8),
    "divided, gated, odd": (33, 999, (999, 999), True, "bfloat16", 3),
}
VECTORS = [name for name in SHAPES if "odd" not in name]  # rows of all arrays start on 16 bytes


def call_of(shape, backend):
    """A function and its arguments, the first to be donated."""
    N, K, widths, gated, dtype, *blocks = shape
    shapes = [((), jnp.int32), ((N, K), dtype), *(((K, width), dtype) for width in widths)]
    shapes += [((N, *blocks), jnp.float32)] * len(blocks)

    def call(number, x, *weights):
        squares = weights[-1] if blocks else None
        return number, row_products(x, weights[: len(widths)], gated=gated, squares=squares, backend=backend)

    return call, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda_as_one_launch(name, backend):
    function, arguments = call_of(SHAPES[name], backend)
    assert aot.lower_text(function, *arguments).count('name = "row_products"') == 1


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize(
    "shape",
    [
        (65, 64, (64, 64), False, "bfloat16"),
        (65, 64, (64, 64), True, "bfloat16"),
        (8, 64, (64, 64), False, "float32"),
        (8, 64, (64, 64), True, "float32"),
        (8, 64, (64,), False, "bfloat16"),
        (8, 64, (64,), False, "bfloat16", 1),
        (65, 64, (64, 64), True, "bfloat16", 1),
        (0, 64, (64, 64), False, "bfloat16"),
        (8, 0, (64, 64), True, "bfloat16"),
    ],
    ids=str,
)
def test_no_kernel_for_what_is_left_to_xla(shape, backend):
    function, arguments = call_of(shape, backend)
    text = aot.lower_text(function, *arguments)
    assert "custom_call" not in text and "dot_general" in text


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_for_sm_90(name, tmp_path):
    """One launch on tensor cores, of float32 sums, and nothing beside it."""
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(SHAPES[name], None)
    compiled = aot.compile_for_h200(function, *arguments, dump=tmp_path)
    assert aot.launches(compiled) == collections.Counter({"custom-call": 1})
    assert compiled.memory_analysis().temp_size_in_bytes < 2**12
    kind = {"bfloat16": "bf16", "float16": "f16"}[SHAPES[name][4]]
    text = aot.ptx(tmp_path)["row_products"]
    assert re.search(rf"mma\S*\.f32\.{kind}\.{kind}", text) and "tf32" not in text


@pytest.mark.parametrize("name", VECTORS)
def test_loads_are_pipelined_on_sm_90(name, tmp_path):
    """All are copies of 16 bytes, and a turn waits for its own while those of all but two stages are on their way.

    That goes for the loop of every output, and there are no others.
    """
    if reason := aot.missing():
        pytest.skip(reason)
    _, _, widths, gated, _, *blocks = SHAPES[name]
    function, arguments = call_of(SHAPES[name], None)
    aot.compile_for_h200(function, *arguments, dump=tmp_path)
    text = aot.ptx(tmp_path)["row_products"]
    loads, products = [found.start() for found in re.finditer("ld.global", text)], text.rindex("mma")
    assert bool(loads) == bool(blocks) and all(load > products for load in loads)  # those of squares
    assert "cp.async.ca" not in text and "cp.async.cg" in text
    assert set(re.findall(r"cp\.async\.cg\.\S+ \[[^\]]+\], \[[^\]]+\], (\w+)", text)) == {"0x10"}
    assert all(".v4" in store for store in re.findall(r"\bst\.global\S*", text))
    sizes, tiles = (module.GATED_SIZES, 3) if gated else (module.SIZES, 2)  # tiles a turn, that of x among them
    loops = in_loops(text)
    assert [re.findall(r"cp\.async\.wait_group\s+(\d+)", loop) for loop in loops] == [
        [str(tiles * (sizes.stages - 2))]
    ] * (1 if gated else len(widths))
    assert all("cp.async.cg" in loop and "mma" in loop for loop in loops)


@pytest.mark.parametrize("name", [name for name in SHAPES if "divided" in name])
def test_no_sum_goes_over_threads_on_sm_90(name, tmp_path):
    """A sum that does takes an order that follows from the tile: a row's bits would tell how many rows there are."""
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(SHAPES[name], None)
    aot.compile_for_h200(function, *arguments, dump=tmp_path)
    text = aot.ptx(tmp_path)["row_products"]
    blocks = SHAPES[name][5]
    assert "shfl" not in text and "redux" not in text
    behind = text[text.rindex("mma") :]
    assert len(re.findall(r"ld\.global", behind)) >= blocks


def in_loops(text):
    """The lines between each label and a branch back to it."""
    lines = text.splitlines()
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith("$L")}
    jumps = [(i, re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) for i, line in enumerate(lines)]
    return ["\n".join(lines[labels[jump[1]] : i]) for i, jump in jumps if jump and labels[jump[1]] < i]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name):
    problem = Problem(np.random.default_rng(7), *SHAPES[name])
    whole = problem.run("triton")
    problem.check(whole)
    for rows in ([0], list(range(problem.N // 2, problem.N))):
        squares = None if problem.squares is None else problem.squares[rows]
        assert_same_bits(problem.run("triton", problem.x[rows], squares=squares), [y[rows] for y in whole])


# What the compiler asked for on a device of compute capability 8.9 with as many tiles as `Sizes` names.
REQUESTS = {(8, False): 102_400, (64, False): 163_840, (8, True): 104_448, (64, True): 122_880}


@pytest.mark.parametrize(("N", "gated"), REQUESTS)
def test_tiles_fit_into_the_memory_that_a_device_has_for_them(N, gated):
    sizes = module.GATED_SIZES if gated else module.SIZES
    widths, each = (256, 256), REQUESTS[N, gated] // (sizes.stages - 1)
    for shared in (module.LEAST_SHARED, *module.SHARED.values()):
        stages = module.Plan(N, 512, widths, gated, None, sizes, shared).stages
        assert 2 <= stages <= sizes.stages and (stages - 1) * each <= shared
        assert stages == sizes.stages or stages * each > shared  # and no more room is left unused
    assert module.Plan(N, 512, widths, gated, None, sizes).stages == sizes.stages  # on an H200

"""head_rotary: heads normed and turned, and that a row's are its own alone."""

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

from pallas_kernels import View, head_rotary, head_tiles

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["interpret", GPU]
EVERY_BACKEND = ["reference", *BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
EPS = 1e-6
WIDTHS = [(8, 4), (24, 12), (40, 20), (64, 32), (128, 64)]  # of a head, and of half of what is turned
WIDTHS += [(8, 1), (24, 8), (40, 10), (64, 3), (9, 4), (128, 32), (256, 32), (96, 5)]  # and more of it is not turned


@functools.cache
def compiled(backend):
    def call(q, k, cos, sin, q_scale, k_scale):
        return head_rotary(q, k, cos, sin, q_scale=q_scale, k_scale=k_scale, eps=EPS, backend=backend)

    return jax.jit(call, compiler_options=quick_compile.options())


@dataclasses.dataclass
class Problem:
    rng: np.random.Generator
    N: int = 8
    Hq: int = 5
    Hkv: int = 2
    head_dim: int = 64
    half: int = 32
    dtype: str = "bfloat16"
    scale_dtype: str | None = "bfloat16"

    def __post_init__(self):
        rng = self.rng
        self.q = rng.normal(size=(self.N, self.Hq, self.head_dim)).astype(jnp.dtype(self.dtype))
        self.k = rng.normal(size=(self.N, self.Hkv, self.head_dim)).astype(jnp.dtype(self.dtype))
        angles = rng.uniform(0, 7, (self.N, self.half))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.q_scale = self.k_scale = None
        if self.scale_dtype is not None:
            draw = rng.uniform(-2, 2, (2, self.head_dim))
            self.q_scale, self.k_scale = draw.astype(jnp.dtype(self.scale_dtype))

    def run(self, backend):
        found = compiled(backend)(self.q, self.k, self.cos, self.sin, self.q_scale, self.k_scale)
        for x, before in zip(found, (self.q, self.k), strict=True):
            assert (x.dtype, x.shape) == (before.dtype, before.shape)
        return [np.asarray(x) for x in found]

    def oracle(self):
        """A pair of channels is a complex number, and its turn a product."""
        turn = self.cos.astype(np.float64) + 1j * self.sin.astype(np.float64)
        found = []
        for x, scale in ((self.q, self.q_scale), (self.k, self.k_scale)):
            out = x.copy()
            for n, head in np.ndindex(x.shape[:2]):
                values = x[n, head].astype(np.float64)
                if scale is not None:
                    values /= np.sqrt(np.square(values).sum() / len(values) + EPS)
                    values = (values * scale.astype(np.float64)).astype(x.dtype).astype(np.float64)
                turned = (values[: self.half] + 1j * values[self.half : 2 * self.half]) * turn[n]
                values[: 2 * self.half] = np.concatenate([turned.real, turned.imag])
                out[n, head] = values.astype(x.dtype)
            found.append(out)
        return found

    def in_rows(self, order):
        """The same, q and k as Views of the columns of one buffer, in which v and a gap are not numbers."""
        parts = {"q": self.q, "k": self.k, "v": np.full_like(self.k, np.nan)}
        parts = {name: parts[name].reshape(self.N, -1) for name in order}
        gap = np.full((self.N, 8), np.nan, self.q.dtype)
        buffer = jnp.asarray(np.concatenate([gap, *parts.values()], axis=1))
        offsets = dict(zip(order, 8 + np.cumsum([0, *(x.shape[1] for x in parts.values())]), strict=False))
        strides = buffer.shape[1], self.head_dim, 1
        views = {name: View(buffer, offsets[name], getattr(self, name).shape, strides) for name in "qk"}
        other = dataclasses.replace(self)
        for name in ("q", "k", "cos", "sin", "q_scale", "k_scale"):
            setattr(other, name, views.get(name, getattr(self, name)))
        return other

    def rows(self, rows):
        """The same of some rows."""
        part = dataclasses.replace(self, N=len(rows))
        for name in ("q_scale", "k_scale"):
            setattr(part, name, getattr(self, name))
        for name in ("q", "k", "cos", "sin"):
            setattr(part, name, getattr(self, name)[rows])
        return part


def assert_near(found, want):
    """Sums in another order, and products that are added without being rounded, may change the last place. Of 16 bits
    they seldom do; without the rounding between norm and turn a quarter would differ."""
    for x, y in zip(found, want, strict=True):
        unit, seldom = float(jnp.finfo(x.dtype).eps), x.size if x.dtype == np.float32 else 2 + x.size // 100
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert (x != y).sum() <= seldom
        # What is turned is a sum of two channels, which are up to sqrt(2) times its length.
        np.testing.assert_allclose(x, y, rtol=0, atol=3 * unit * np.abs(y).max(initial=0))


def assert_same_bits(found, want):
    for x, y in zip(found, want, strict=True):
        kind = f"uint{8 * x.dtype.itemsize}"
        np.testing.assert_array_equal(x.view(kind), y.view(kind))


@every_backend
@each_dtype
@pytest.mark.parametrize(("head_dim", "half"), WIDTHS)
def test_widths(head_dim, half, dtype, backend):
    problem = Problem(np.random.default_rng(half), head_dim=head_dim, half=half, dtype=dtype)
    assert_near(problem.run(backend), problem.oracle())


@every_backend
@pytest.mark.parametrize("N", [1, 8, 9, 300])
@pytest.mark.parametrize(("Hq", "Hkv"), [(32, 8), (1, 1), (9, 3)])
def test_rows_and_heads(Hq, Hkv, N, backend):
    problem = Problem(np.random.default_rng(N), N=N, Hq=Hq, Hkv=Hkv, head_dim=16, half=8)
    assert_near(problem.run(backend), problem.oracle())


@every_backend
@each_dtype
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (40, 10)])
def test_without_a_norm(head_dim, half, dtype, backend):
    """What is not rotated stays as it is, bit for bit."""
    problem = Problem(np.random.default_rng(0), head_dim=head_dim, half=half, dtype=dtype, scale_dtype=None)
    found, want = problem.run(backend), problem.oracle()
    assert_near(found, want)
    assert_same_bits([x[..., 2 * half :] for x in found], [x[..., 2 * half :] for x in (problem.q, problem.k)])


@every_backend
@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_one_of_them_normed(name, backend):
    problem = Problem(np.random.default_rng(1), head_dim=24, half=12)
    setattr(problem, name, None)
    assert_near(problem.run(backend), problem.oracle())


@every_backend
@each_dtype
def test_scales_of_another_dtype(dtype, backend):
    problem = Problem(np.random.default_rng(2), dtype=dtype, scale_dtype="float32")
    assert_near(problem.run(backend), problem.oracle())


@every_backend
def test_what_float16_holds_with_few_digits(backend):
    problem = Problem(np.random.default_rng(3), dtype="float16", scale_dtype="float32")
    problem.q_scale, problem.k_scale = problem.q_scale * np.float32(2e-5), problem.k_scale * np.float32(3e-7)
    found, want = problem.run(backend), problem.oracle()
    assert all((np.abs(x) < 2**-14).any() and x.any() for x in want)
    for x, y in zip(found, want, strict=True):
        assert (x != y).sum() <= 2 + x.size // 100
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=0, atol=2**-24)


@every_backend
def test_eps_is_added_to_the_mean_of_squares(backend):
    """Heads of zeros stay zeros, and tiny ones are not blown up to a length of 1."""
    problem = Problem(np.random.default_rng(4), dtype="float32")
    problem.q[:, 0] = 0
    problem.q[:, 1] *= 1e-4
    assert_near(problem.run(backend), problem.oracle())
    found = problem.run(backend)[0]
    assert not found[:, 0].any() and np.abs(found[:, 1]).max() < 1


@every_backend
@pytest.mark.parametrize(("N", "Hq", "Hkv"), [(0, 4, 2), (3, 0, 0), (3, 4, 0), (3, 0, 2)])
def test_without_rows_or_heads(N, Hq, Hkv, backend):
    problem = Problem(np.random.default_rng(5), N=N, Hq=Hq, Hkv=Hkv)
    assert_near(problem.run(backend), problem.oracle())


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("shape", [(0, 4, 16), (3, 0, 16)])
def test_nothing_is_launched_for_nothing(shape, backend):
    def call(q, k, cos, sin):
        return head_rotary(q, k, cos, sin, backend=backend)

    heads, angles = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((shape[0], 8), jnp.float32)
    assert "custom_call" not in aot.lower_text(call, heads, heads, angles, angles)


@each_backend
@each_dtype
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (24, 12), (40, 10), (256, 32)])
def test_a_row_is_its_own_alone(head_dim, half, dtype, backend):
    """Its bits do not change with the rows beside it: permuted, not numbers, or not there."""
    problem = Problem(np.random.default_rng(6), N=9, Hq=9, Hkv=3, head_dim=head_dim, half=half, dtype=dtype)
    whole = problem.run(backend)
    order = problem.rng.permutation(9)
    assert_same_bits(problem.rows(order).run(backend), [x[order] for x in whole])
    for rows in ([0], [8], [2, 3, 7]):
        assert_same_bits(problem.rows(rows).run(backend), [x[rows] for x in whole])
    kept = np.array([0, 4, 8])
    for name in ("q", "k", "cos", "sin"):
        array = getattr(problem, name)
        poisoned = np.full_like(array, np.nan)
        poisoned[kept] = array[kept]
        setattr(problem, name, poisoned)
    assert_same_bits([x[kept] for x in problem.run(backend)], [x[kept] for x in whole])


@each_backend
def test_a_head_is_its_own_alone(backend):
    problem = Problem(np.random.default_rng(7), Hq=9, Hkv=3, head_dim=24, half=12)
    whole = problem.run(backend)
    problem.q[:, [0, 5, 7]], problem.k[:, 1] = np.nan, np.inf
    found = problem.run(backend)
    for x, y, kept in zip(found, whole, ([1, 2, 3, 4, 6, 8], [0, 2]), strict=True):
        assert_same_bits([np.ascontiguousarray(x[:, kept])], [np.ascontiguousarray(y[:, kept])])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU XLA may add products without rounding them")
@each_dtype
@pytest.mark.parametrize("scale_dtype", [None, "float32"])
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (128, 64), (128, 16)])
def test_interpreted_it_is_the_reference(head_dim, half, scale_dtype, dtype):
    """To the bit, where the order of a sum does not matter: squares of small integers are exact."""
    problem = Problem(np.random.default_rng(8), head_dim=head_dim, half=half, dtype=dtype, scale_dtype=scale_dtype)
    problem.q, problem.k = (problem.rng.integers(-9, 10, x.shape).astype(x.dtype) for x in (problem.q, problem.k))
    assert_same_bits(problem.run("interpret"), problem.run("reference"))


@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (24, 12), (40, 10), (256, 32), (9, 1)])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (9, 3), (32, 8), (17, 12)])
def test_every_cell_is_written_by_one_program(heads, head_dim, half):
    """Interpreted, one that writes past the end of its row goes unseen."""
    sections = head_tiles._sections(head_dim, half)
    parts, programs = head_tiles.parts_of(list(heads), [head_tiles.widest_of(head_dim, half)] * 2)
    written = [np.zeros(count * head_dim, int) for count in heads]
    for program in range(programs):
        nth = next(i for i in (1, 0) if program >= parts[i].first)
        for section in sections:
            cell, channel, mask = head_tiles.places_of(parts[nth], head_dim, program, *section)
            cell, channel = np.asarray(cell), np.asarray(channel)
            live = np.ones(cell.shape, bool) if mask is None else np.asarray(mask)
            np.testing.assert_array_equal(cell[live] % head_dim, channel[live])
            np.add.at(written[nth], cell[live], 1)
    assert all((x == 1).all() for x in written)


@every_backend
@pytest.mark.parametrize("order", ["qkv", "vkq"])
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (24, 12), (40, 10)])
def test_columns_of_wider_rows(head_dim, half, order, backend):
    """What lies beside them is not looked at."""
    problem = Problem(np.random.default_rng(12), N=3, Hq=9, Hkv=3, head_dim=head_dim, half=half)
    want = problem.oracle()
    assert_same_bits(problem.in_rows(order).run(backend), problem.run(backend))
    assert_near(problem.run(backend), want)


@settings(max_examples=15, deadline=None, database=None)
@given(st.data())
def test_random(data):
    head_dim = data.draw(st.integers(2, 70))
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        N=data.draw(st.integers(0, 4)),
        Hq=data.draw(st.integers(0, 17)),
        Hkv=data.draw(st.integers(0, 9)),
        head_dim=head_dim,
        half=data.draw(st.integers(1, head_dim // 2)),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        scale_dtype=data.draw(st.sampled_from([None, "float32", "bfloat16", "float16"])),
    )
    want = problem.oracle()
    assert_near(problem.run("reference"), want)
    assert_near(problem.run("interpret"), want)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(backend):
    with jax.enable_x64(True):
        problem = Problem(np.random.default_rng(9), head_dim=24, half=10, scale_dtype="float64")
        assert_near(problem.run(backend), problem.oracle())


def test_the_reference_has_a_derivative():
    """What is not normed is turned, and its derivative turned back."""
    problem = Problem(np.random.default_rng(10), dtype="float32", scale_dtype=None, half=20)
    weight = problem.rng.normal(size=problem.q.shape).astype(np.float32)

    def total(q):
        return (weight * head_rotary(q, problem.k, problem.cos, problem.sin, backend="reference")[0]).sum()

    back = head_rotary(weight, problem.k, problem.cos, -problem.sin, backend="reference")[0]
    np.testing.assert_allclose(jax.grad(total)(problem.q), back, rtol=1e-5, atol=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------

HALVES = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": np.zeros((2, 3), np.float32)},
            r"q is float32\[2, 3\]: it must be float32, bfloat16 or float16\[N, heads, head_dim\]",
        ),
        ({"q": np.zeros((2, 3, 8))}, r"q is float64\[2, 3, 8\]: it must be float32"),
        ({"q": [1.0]}, r"q is list: it must be float32"),
        (
            {"k": np.zeros((2, 1, 8), np.float16)},
            r"k is float16\[2, 1, 8\]: it must be float32\[2, heads, 8\], as q is float32\[2, 3, 8\]",
        ),
        ({"k": np.zeros((2, 1, 6), np.float32)}, r"k is float32\[2, 1, 6\]: it must be float32\[2, heads, 8\]"),
        (
            {"q": View(np.zeros((2, 30), np.float32), 7, (2, 3, 8), (30, 8, 1))},
            r"q is a View of float32\[2, 3, 8\], offset 7, strides \(30, 8, 1\), in float32\[2, 30\]: it must be "
            r"columns of a buffer \[2, W\], of strides \(W, 8, 1\); View.read\(\) makes",
        ),
        ({"k": View(np.zeros((2, 30), np.float32), 0, (2, 3, 8), (24, 8, 1))}, r"k is a View .* it must be columns"),
        ({"k": View(np.zeros((4, 30), np.float32), 0, (2, 3, 8), (30, 8, 1))}, r"k is a View .* it must be columns"),
        ({"k": View(np.zeros(60, np.float32), 0, (2, 3, 8), (24, 8, 1))}, r"k is a View .* it must be columns"),
        ({"k": np.zeros((3, 1, 8), np.float32)}, r"k is float32\[3, 1, 8\]: it must be float32\[2, heads, 8\]"),
        (
            {"cos": np.zeros((2, 1, 1, 4), np.float32)},
            r"cos is float32\[2, 1, 1, 4\]: it must be float32\[2, half\], half from 1 to 4, .*; reshape what has more",
        ),
        ({"cos": np.zeros((2, 5), np.float32)}, r"cos is float32\[2, 5\]: .* half from 1 to 4"),
        ({"cos": np.zeros((2, 0), np.float32)}, r"cos is float32\[2, 0\]: .* half from 1 to 4"),
        ({"cos": np.zeros((3, 4), np.float32)}, r"cos is float32\[3, 4\]: it must be float32\[2, half\]"),
        ({"cos": np.zeros((2, 4), np.float16)}, r"cos is float16\[2, 4\]: it must be float32\[2, half\]"),
        ({"sin": np.zeros((2, 3), np.float32)}, r"sin is float32\[2, 3\]: it must be float32\[2, 4\], as cos is"),
        ({"sin": np.zeros((2, 4))}, r"sin is float64\[2, 4\]: it must be float32\[2, 4\]"),
        (
            {"q_scale": np.zeros(4, np.float32)},
            r"q_scale is float32\[4\]: it must be floats of shape \(8,\), or None: no norm",
        ),
        ({"k_scale": np.zeros(8, np.int32)}, r"k_scale is int32\[8\]: it must be floats of shape \(8,\)"),
        ({"k_scale": 1.0}, r"k_scale is float: it must be floats of shape \(8,\)"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which head_rotary is not: leave"),
        (
            {"backend": "checked"},
            "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interpret'",
        ),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = {
        "q": np.zeros((2, 3, 8), np.float32),
        "k": np.zeros((2, 1, 8), np.float32),
        "cos": HALVES,
        "sin": HALVES,
    }
    with pytest.raises(ValueError, match=message):
        head_rotary(**call | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    heads, angles = jnp.zeros((2, 3, 8)), jnp.zeros((2, 4))
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        head_rotary(heads, heads, angles, angles, backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

SHAPES = {  # N, Hq, Hkv, head_dim, half, dtype, dtype of scales
    "a round": (8, 32, 8, 128, 64, "bfloat16", "bfloat16"),
    "float32": (8, 32, 8, 128, 64, "float32", "float32"),
    "no norm": (8, 32, 8, 128, 64, "bfloat16", None),
    "a quarter turned": (8, 16, 2, 256, 32, "bfloat16", "float32"),
    "masks": (300, 9, 3, 40, 10, "float16", "bfloat16"),
    "no keys": (8, 3, 0, 24, 12, "bfloat16", "bfloat16"),
}


def call_of(name, backend):
    """A function and its arguments, the first to be donated."""
    N, Hq, Hkv, head_dim, half, dtype, scale_dtype = SHAPES[name]
    shapes = [((), jnp.int32), ((N, Hq, head_dim), dtype), ((N, Hkv, head_dim), dtype)]
    shapes += [((N, half), jnp.float32)] * 2 + ([((head_dim,), scale_dtype)] * 2 if scale_dtype else [])

    def call(number, q, k, cos, sin, q_scale=None, k_scale=None):
        return number, head_rotary(q, k, cos, sin, q_scale=q_scale, k_scale=k_scale, backend=backend)

    return call, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda_as_one_launch(name, backend):
    function, arguments = call_of(name, backend)
    assert aot.lower_text(function, *arguments).count('name = "head_rotary"') == 1


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_for_sm_90(name, tmp_path):
    """One launch. Where a half is of whole loads, all are of 16 bytes, and no thread waits for those of other warps."""
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(name, None)
    compiled = aot.compile_for_h200(function, *arguments, dump=tmp_path)
    launches = aot.launches(compiled)
    launches.pop("copy", None)  # of no keys, which are handed back as they came
    assert launches == collections.Counter({"custom-call": 1})
    if name in ("a round", "float32", "no norm"):
        text = aot.ptx(tmp_path)["head_rotary"]
        assert "bar.sync" not in text and ".shared" not in text
        accesses = re.findall(r"\b(?:ld|st)\.global\S*", text)
        assert accesses and all(".v4" in access for access in accesses), accesses


def test_columns_of_one_product_are_read_where_they_lie(tmp_path):
    """Compiled for sm_90: nothing cuts queries and keys out of the rows that hold them."""
    if reason := aot.missing():
        pytest.skip(reason)

    def call(number, rows, cos, sin, scale):
        q, k = (View(rows, at * 128, (8, heads, 128), (48 * 128, 128, 1)) for at, heads in ((0, 32), (32, 8)))
        return number, head_rotary(q, k, cos, sin, q_scale=scale, k_scale=scale)

    shapes = ((), jnp.int32), ((8, 48 * 128), jnp.bfloat16), *[((8, 64), jnp.float32)] * 2, ((128,), jnp.bfloat16)
    compiled = aot.compile_for_h200(call, *(jax.ShapeDtypeStruct(*shape) for shape in shapes), dump=tmp_path)
    assert aot.launches(compiled) == collections.Counter({"custom-call": 1})
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", aot.ptx(tmp_path)["head_rotary"])
    assert accesses and all(".v4" in access for access in accesses), accesses


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name):
    N, Hq, Hkv, head_dim, half, dtype, scale_dtype = SHAPES[name]
    problem = Problem(np.random.default_rng(11), N, Hq, Hkv, head_dim, half, dtype, scale_dtype)
    assert_near(problem.run("triton"), problem.oracle())

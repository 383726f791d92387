"""pool_scores: scores of paged index keys in every storage, and that no page is read that nobody sees."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import kernel_aot as aot
import ml_dtypes
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import PagedIndex, pool_scores

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["interpret", GPU]
EVERY_BACKEND = ["reference", *BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
STORAGES = {  # dtype of a cell; cells a row, None for a page a row; X
    "bytes, a page a row": (np.uint8, None, 64),
    "a short key": (np.uint8, None, 16),
    "pairs, a page a row": (np.uint16, None, 64),
    "bytes, a key a row": (np.uint8, 64, 64),
    "pairs, a key a row": (np.uint16, 64, 128),
    "pairs, half a key a row": (np.uint16, 16, 64),
    "pairs, short rows": (np.uint16, 8, 32),
    "words, a key a row": (np.uint32, 32, 128),
    "words, short rows": (np.uint32, 4, 64),
}


@dataclasses.dataclass
class Problem:
    """Keys and queries as they are stored; scales are powers of two and all values small integers, so that sums are
    exact in any order, unless `smooth`."""

    rng: np.random.Generator
    B: int = 2
    D: int = 3
    H: int = 4
    P: int = 5
    pools: int = 8
    storage: str = "bytes, a page a row"
    smooth: bool = False

    def __post_init__(self):
        rng, (self.dtype, self.columns, self.X) = self.rng, STORAGES[self.storage]
        self.pages = self.B * self.P + 4
        draw = (lambda *s: rng.standard_normal(s) * 50) if self.smooth else (lambda *s: rng.integers(-4, 5, s))
        self.keys = draw(self.pages, self.pools, self.X).astype(ml_dtypes.float8_e4m3fn)
        self.scales = (2.0 ** rng.integers(-6, 3, (self.pages, self.pools))).astype(np.float32)
        self.query = draw(self.B, self.D, self.H, self.X).astype(ml_dtypes.float8_e4m3fn)
        self.weights = draw(self.B, self.D, self.H).astype(np.float32)
        self.table = rng.permutation(self.pages)[: self.B * self.P].reshape(self.B, self.P).astype(np.int32)
        self.lens = rng.integers(0, self.P * self.pools + 1, (self.B, self.D)).astype(np.int32)

    def live_pages(self):
        """bool[B, P]."""
        return np.arange(self.P) * self.pools < self.lens.max(axis=1, keepdims=True)

    def index(self):
        parts = self.keys.view(np.uint8), self.scales.view(np.uint8)
        stored = np.concatenate([part.reshape(self.pages, -1) for part in parts], axis=1)
        if self.columns is None:
            return PagedIndex(jnp.asarray(stored.view(self.dtype)), 1, 0, self.pools, self.X)
        row = self.columns * np.dtype(self.dtype).itemsize
        rows = -(-stored.shape[1] // row)
        cells = np.full((self.pages, (rows + 5) * row), 0xFF, np.uint8)  # NaN, as a key and as a scale
        cells[:, 3 * row : 3 * row + stored.shape[1]] = stored
        return PagedIndex(jnp.asarray(cells.reshape(-1, row).view(self.dtype)), rows + 5, 3, self.pools, self.X)

    def oracle(self):
        """float64[B, D, n], NaN where no row of the request sees the pool."""
        out = np.full((self.B, self.D, self.P * self.pools), np.nan)
        for b in range(self.B):
            for pool in range(self.lens[b].max()):
                page, place = self.table[b, pool // self.pools], pool % self.pools
                products = self.query[b].astype(np.float64) @ self.keys[page, place].astype(np.float64)
                total = (self.weights[b].astype(np.float64) * np.maximum(products, 0)).sum(axis=-1)
                out[b, :, pool] = total * float(self.scales[page, place])
        return out

    def arguments(self):
        query, weights, table, lens = map(jnp.asarray, (self.query, self.weights, self.table, self.lens))
        return query, weights, self.index(), table, lens

    def run(self, backend):
        call = jax.jit(lambda *a: pool_scores(*a, backend=backend), compiler_options=quick_compile.options())
        found = call(*self.arguments())
        assert found.dtype == jnp.float32 and found.shape == (self.B, self.D, self.P * self.pools)
        return np.where(np.isnan(self.oracle()), np.nan, found)

    def poison(self):
        """NaN in every page that is not read and in the keys behind the last visible one; wild ids in stale tails."""
        read, live = np.zeros((self.pages, self.pools), bool), self.live_pages()
        for b in range(self.B):
            for pool in range(self.lens[b].max()):
                read[self.table[b, pool // self.pools], pool % self.pools] = True
        self.keys = np.where(read[..., None], self.keys, np.array(np.nan, self.keys.dtype))
        self.scales = np.where(read, self.scales, np.float32(np.nan))
        self.table = np.where(live, self.table, np.int32(2**31 - 1))


def check(problem, backend):
    np.testing.assert_array_equal(problem.run(backend), problem.oracle())


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("storage", STORAGES)
def test_storages(storage, backend):
    check(Problem(np.random.default_rng(0), storage=storage), backend)


@each_backend
@pytest.mark.parametrize("storage", STORAGES)
def test_pages_that_nobody_sees_are_not_read(storage, backend):
    problem = Problem(np.random.default_rng(1), storage=storage)
    problem.lens = np.int32([[0, 9, 3], [17, 16, 16]])
    problem.poison()
    check(problem, backend)


@each_backend
def test_lengths_at_the_edges_of_pages_and_tiles(backend):
    """The longest row of each request decides."""
    problem = Problem(np.random.default_rng(2), B=11, D=2, P=3, pools=64)
    problem.lens[:, 0] = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 192]
    problem.lens[:, 1] = 0
    problem.poison()
    check(problem, backend)


@each_backend
@pytest.mark.parametrize(("B", "D", "H", "pools"), [(1, 1, 1, 1), (2, 5, 17, 2), (1, 8, 32, 16), (3, 3, 3, 256)])
def test_sizes(B, D, H, pools, backend):
    check(Problem(np.random.default_rng(B), B=B, D=D, H=H, pools=pools, P=2), backend)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("storage", ["bytes, a page a row", "pairs, half a key a row"])
def test_all_values_of_a_key(storage, backend):
    """Each of the 256 is what it is among 8-bit floats, not a number and the smallest ones too."""
    problem = Problem(np.random.default_rng(0), B=1, D=1, H=2, P=8, pools=64, storage=storage)
    problem.keys[...] = 0
    byte = np.arange(512, dtype=np.uint16).astype(np.uint8).view(problem.keys.dtype)
    problem.table = np.arange(8, dtype=np.int32)[None]
    for pool in range(512):
        problem.keys[pool // 64, pool % 64, pool % problem.X] = byte[pool]
    problem.query = np.ones_like(problem.query)
    problem.query[:, :, 1] = -problem.query[:, :, 1]
    problem.weights[...] = 1, -1
    problem.lens[...] = 512
    value = byte.astype(np.float32)
    found = problem.run(backend)[0, 0]
    np.testing.assert_array_equal(found, value * problem.scales[:8].reshape(-1))


@each_backend
def test_sums_are_as_good_as_float32(backend):
    problem = Problem(np.random.default_rng(3), H=8, storage="pairs, a key a row", smooth=True)
    want = problem.oracle()
    np.testing.assert_allclose(problem.run(backend), want, rtol=1e-5, atol=1e-6 * np.nanmax(np.abs(want)))


@each_backend
def test_pages_may_lie_anywhere(backend):
    problem = Problem(np.random.default_rng(4), storage="words, a key a row", smooth=True)
    before, order = problem.run(backend), problem.rng.permutation(problem.pages)
    problem.keys, problem.scales = problem.keys[np.argsort(order)], problem.scales[np.argsort(order)]
    problem.table = order[problem.table].astype(np.int32)
    np.testing.assert_array_equal(problem.run(backend), before)


@each_backend
def test_bits_of_a_score_do_not_depend_on_other_rows(backend):
    """A row scores the same when it is decoded alone and when it is verified among others."""
    problem = Problem(np.random.default_rng(5), D=6, H=8, P=40, smooth=True)
    problem.lens[...] = 320
    whole = problem.run(backend)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 6)):
        changes = {name: getattr(problem, name)[:, rows] for name in ("query", "weights", "lens")}
        part = dataclasses.replace(problem, D=len(range(6)[rows]))
        for name in ("keys", "scales", "table"):
            setattr(part, name, getattr(problem, name))
        for name, value in changes.items():
            setattr(part, name, value)
        np.testing.assert_array_equal(part.run(backend), whole[:, rows])


@settings(max_examples=12, deadline=None, database=None)
@given(st.data())
def test_random(data):
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        B=data.draw(st.integers(1, 3)),
        D=data.draw(st.integers(1, 4)),
        H=data.draw(st.integers(1, 5)),
        P=data.draw(st.integers(1, 6)),
        pools=data.draw(st.sampled_from([1, 4, 16, 64])),
        storage=data.draw(st.sampled_from(sorted(STORAGES))),
    )
    check(problem, "reference")  # which reads all pages
    problem.poison()
    check(problem, "interpret")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize(("B", "P"), [(0, 3), (2, 0)])
def test_without_cells(B, P, backend):
    index = PagedIndex(jnp.zeros((4, 160), jnp.uint8), 1, 0, 8, 16)
    arrays = jnp.zeros((B, 2, 3, 16), jnp.float8_e4m3fn), jnp.zeros((B, 2, 3)), index
    tables = jnp.zeros((B, P), jnp.int32), jnp.zeros((B, 2), jnp.int32)
    assert pool_scores(*arrays, *tables, backend=backend).shape == (B, 2, P * 8)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(backend):
    with jax.enable_x64(True):
        check(Problem(np.random.default_rng(6), storage="pairs, half a key a row"), backend)


# What is refused ------------------------------------------------------------------------------------------------------

BYTES = np.zeros((4, 160), np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": np.zeros((1, 2, 3, 16), np.float32)}, r"query is float32\[1, 2, 3, 16\]: it must be float8_e4m3fn"),
        ({"query": jnp.zeros((1, 2, 3, 32), jnp.float8_e4m3fn)}, r"it must be float8_e4m3fn\[B, D, H, 16\]"),
        ({"weights": np.zeros((1, 2), np.float32)}, r"weights is float32\[1, 2\]: it must be float32\[1, 2, 3\]"),
        ({"page_table": np.zeros((2, 3), np.int32)}, r"page_table is int32\[2, 3\]: it must be int32\[1, P\]"),
        ({"pool_lens": np.zeros((1, 2))}, r"pool_lens is float64\[1, 2\]: it must be int32\[1, 2\]"),
        (
            {"index": PagedIndex(BYTES.astype(np.int8), 1, 0, 8, 16)},
            r"index.buffer is int8\[4, 160\]: it must be uint8",
        ),
        ({"index": PagedIndex(BYTES, 1, 0, 6, 16)}, "index.pools=6: it must be a power of two"),
        (
            {"index": PagedIndex(BYTES, 1, 0, 8, 8)},
            "index.width=8 in rows of 160 cells of 1 bytes: a key must be of 16",
        ),
        ({"index": PagedIndex(BYTES, 1, 0, 16, 16)}, "and of whole rows where a page does not fit into one"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which pool_scores is not: leave"),
        (
            {"backend": "checked"},
            "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interpret'",
        ),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    call = {
        "query": jnp.zeros((1, 2, 3, 16), jnp.float8_e4m3fn),
        "weights": np.zeros((1, 2, 3), np.float32),
        "index": PagedIndex(BYTES, 1, 0, 8, 16),
        "page_table": np.zeros((1, 3), np.int32),
        "pool_lens": np.zeros((1, 2), np.int32),
    }
    with pytest.raises(ValueError, match=message):
        pool_scores(**call | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        pool_scores(*Problem(np.random.default_rng(0)).arguments(), backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

POOLS = {  # buffer, rows a page, first row; 64 pools of 128 bytes a page
    "uint8": ((4097, 64 * 132), jnp.uint8, 1, 0),
    "uint16": ((2370 * 20000, 64), jnp.uint16, 2370, 2304),  # 6 GB
    "uint32": ((2370 * 200, 32), jnp.uint32, 2370, 2304),
    "uint16, short rows": ((2370 * 200, 16), jnp.uint16, 2370, 2056),
}


def call_of(name, backend):
    """A function and its arguments, the first to be donated."""
    shape, dtype, page_rows, first_row = POOLS[name]
    shapes = [((), jnp.int32), ((8, 4, 32, 128), jnp.float8_e4m3fn), ((8, 4, 32), jnp.float32), (shape, dtype)]
    shapes += [((8, 512), jnp.int32), ((8, 4), jnp.int32)]

    def call(number, query, weights, buffer, table, lens):
        index = PagedIndex(buffer, page_rows, first_row, 64, 128)
        return number, pool_scores(query, weights, index, table, lens, backend=backend)

    return call, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("name", POOLS)
def test_lowers_for_cuda(name, backend):
    function, arguments = call_of(name, backend)
    assert "triton" in aot.lower_text(function, *arguments)


@pytest.mark.parametrize("name", POOLS)
def test_compiles_for_sm_90(name, tmp_path):
    """One launch and one that sorts the query; tensor cores, loads of 16 bytes, nothing of the buffer's size."""
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments = call_of(name, None)
    compiled = aot.compile_for_h200(function, *arguments, dump=tmp_path)
    assert aot.launches(compiled) == collections.Counter({"fusion": 1, "custom-call": 1})
    assert compiled.memory_analysis().temp_size_in_bytes < 2**24
    text = aot.ptx(tmp_path)["pool_scores"]
    assert "wgmma" in text and "ld.global.v4" in text and "e4m3x2" in text


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_long_contexts(storage):
    problem = Problem(np.random.default_rng(7), B=4, D=4, H=32, P=64, pools=64, storage=storage, smooth=True)
    problem.lens = np.int32([[4096, 1, 7, 5], [0, 0, 0, 0], [130, 129, 128, 127], [3000, 3001, 3002, 3003]])
    problem.poison()
    want = problem.oracle()
    np.testing.assert_allclose(problem.run("triton"), want, rtol=1e-5, atol=1e-6 * np.nanmax(np.abs(want)))


@pytest.mark.gpu
def test_pages_past_2_to_the_31_cells():
    """A pool of 10 GB whose pages in use are its last ones."""
    problem = Problem(np.random.default_rng(8), storage="pairs, a key a row")
    index = problem.index()
    far = 5 * 2**30 // index.buffer.shape[1] // index.page_rows  # pages before them
    buffer = jnp.zeros((far * index.page_rows + len(index.buffer), index.buffer.shape[1]), index.buffer.dtype)
    put = jax.jit(lambda b, x: jax.lax.dynamic_update_slice(b, x, (far * index.page_rows, 0)), donate_argnums=0)
    index = dataclasses.replace(index, buffer=put(buffer, index.buffer))
    arguments = [jnp.asarray(x) for x in (problem.query, problem.weights, problem.table + far, problem.lens)]
    found = pool_scores(*arguments[:2], index, *arguments[2:], backend="triton")
    want = problem.oracle()
    np.testing.assert_array_equal(np.where(np.isnan(want), np.nan, found), want)

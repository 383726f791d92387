"""store_rows: K and V rows go to their slots, and no other cell of the cache changes."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_ptx as ptx
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from kernel_attention import Pool, place_of

from pallas_kernels import PagedRows, RowPlace, store_rows

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["reference", "interpret", GPU]
EVERY_BACKEND = [*BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
DTYPES = ["float32", "bfloat16", "float16"]
QUIET = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}  # a NaN, whatever its other bits
# Rows of two of the buffer, between those of other layers; units that no page ends with; a section behind each page.
BETWEEN = Pool(16, before=32, behind=48, section=3)


@functools.cache
def compiled(place, backend):
    def call(buffer, slots, k, v):
        return store_rows(PagedRows(buffer, place), slots, k, v, backend=backend).buffer

    return jax.jit(call, compiler_options=quick_compile.options())


def bits(array):
    return array.view(f"uint{8 * array.dtype.itemsize}")


def poison(rng, dtype, *shape):
    """NaNs of any bits, and among them numbers of any."""
    dtype = jnp.dtype(dtype)
    drawn = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), f"uint{8 * dtype.itemsize}")
    return np.where(rng.random(drawn.size) < 0.7, drawn | QUIET[dtype.name], drawn).reshape(shape).view(dtype)


def stored(before, place, slots, k, v):
    """The buffer, as bits, after: the formula of `RowPlace`, cell by cell. Rows of padding are not stored."""
    after, W = before.copy(), before.shape[1]
    parts = [(k, place.key)] if place.value_dim == 0 else [(k, place.key), (v, place.value)]
    for b, j in np.ndindex(slots.shape):
        page, token = divmod(int(slots[b, j]), place.page_size)
        if page == 0:
            continue
        row = page * place.page_rows + token * place.entry_rows
        for part, first in parts:
            cells = bits(part[b, j].astype(jnp.dtype(place.dtype)))
            for h, x in np.ndindex(cells.shape):
                down, column = divmod(first + h * cells.shape[1] + x, W)
                after[row + down, column] = cells[h, x]
    return after


@dataclasses.dataclass
class Problem:
    """Rows of B requests in a buffer of poison. Every slot but the sink's is another one; of the rows, a share of
    `padding` is meant for the sink. The last row of the last request is stored in the last slot there is."""

    rng: np.random.Generator
    B: int = 2
    D: int = 3
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    page_size: int = 4
    pool: Pool | None = None
    dtype: str = "bfloat16"
    k_dtype: str | None = None
    v_dtype: str | None = None
    padding: float = 0.3

    def __post_init__(self):
        rng, page_size, tokens = self.rng, self.page_size, self.B * self.D
        sizes = dict(kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim, page_size=page_size)
        self.place, _, _, self.W = place_of(self.pool, **sizes, dtype=self.dtype)
        self.pages = 2 + -(-tokens // page_size)
        last = self.pages * page_size - 1
        slots = page_size + rng.permutation(last - page_size)[:tokens]
        slots = np.where(rng.random(tokens) < self.padding, rng.integers(0, page_size, tokens), slots)
        slots[-1:] = last
        self.slots = slots.astype(np.int32).reshape(self.B, self.D)
        number = jnp.dtype(self.dtype)
        shape = self.pages * self.place.page_rows + (3 if self.pool else 0), self.W
        self.before = poison(rng, number, *shape)
        if self.pool and self.pool.bits:
            self.before = bits(self.before)
        self.k = self.draw(self.k_dtype, self.head_dim)
        self.v = self.draw(self.v_dtype, self.value_dim) if self.value_dim else None

    def draw(self, dtype, width):
        """Numbers, of any size that all dtypes have."""
        size = self.B, self.D, self.kv_heads, width
        return (self.rng.normal(size=size) * 2.0 ** self.rng.integers(-6, 12, size)).astype(
            jnp.dtype(dtype or self.dtype)
        )

    def run(self, backend, order=None):
        """Bits of the buffer after; of the rows in another order."""
        rows = [part for part in (self.slots, self.k, self.v) if part is not None]
        if order is not None:
            rows = [part.reshape(-1, *part.shape[2:])[order].reshape(part.shape) for part in rows]
        slots, k, v = (*rows, None)[:3]
        after = np.asarray(compiled(self.place, backend)(jnp.asarray(self.before), slots, k, v))
        assert after.dtype == self.before.dtype and after.shape == self.before.shape
        return bits(after)

    def oracle(self):
        return stored(bits(self.before), self.place, self.slots, self.k, self.v)

    def check(self, backend):
        assert_same(self, self.run(backend), self.oracle(), backend)


def assert_same(problem, found, want, backend):
    """All cells but those of the sink, page 0, bit by bit."""
    found, want = (cells[problem.place.page_rows :] for cells in (found, want))
    if problem.before.dtype == jnp.bfloat16 and backend in ("reference", None) and jax.default_backend() == "cpu":
        # XLA for CPUs scatters by way of float32, and writes each NaN anew.
        found, want = (np.where((cells & 0x7FFF) > 0x7F80, 0x7FC0, cells) for cells in (found, want))
    np.testing.assert_array_equal(found, want, strict=True)


# What comes out -------------------------------------------------------------------------------------------------------

PLACES = {
    "own": {},
    "own, K and V of two sizes": {"head_dim": 24, "value_dim": 40},
    "own, latent": {"kv_heads": 1, "head_dim": 72, "value_dim": 0},
    "pool": {"pool": BETWEEN},
    "pool of floats": {"pool": dataclasses.replace(BETWEEN, bits=False), "dtype": "float16"},
    "pool, a row an entry": {"pool": Pool(64)},
    "pool, a row among others": {"pool": Pool(64, before=64, behind=128)},
    "pool, K and V in one row": {
        "kv_heads": 1,
        "head_dim": 24,
        "value_dim": 40,
        "pool": Pool(64, before=64, behind=64),
    },
    "pool, a head over two rows": {"kv_heads": 3, "head_dim": 24, "value_dim": 40, "pool": Pool(64, before=64)},
    "pool, small units": {"head_dim": 24, "value_dim": 40, "pool": Pool(8, before=8, behind=8, section=1)},
    "pool, latent": {"kv_heads": 1, "head_dim": 72, "value_dim": 0, "pool": Pool(8, before=16, behind=8, section=5)},
    "pool, words": {"dtype": "float32", "pool": BETWEEN},
}


@every_backend
@pytest.mark.parametrize("name", PLACES)
def test_places(name, backend):
    Problem(np.random.default_rng(0), **PLACES[name]).check(backend)


@each_backend
@pytest.mark.parametrize("pool", [None, Pool(8, before=8, behind=8, section=1)], ids=["own", "pool"])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "value_dim"),
    [(1, 24, 24), (2, 40, 40), (3, 64, 64), (8, 128, 128), (1, 128, 64), (5, 40, 24), (1, 576, 0), (1, 8, 8)],
)
def test_widths(kv_heads, head_dim, value_dim, pool, backend):
    """Those that are no powers of two, and K and V of which one is narrower, are masked."""
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    Problem(np.random.default_rng(head_dim), **sizes, pool=pool, B=1, D=4).check(backend)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_rows", [*DTYPES, ("bfloat16", "float32")], ids=str)
def test_dtypes(of_rows, dtype, backend):
    """Of the cache, and of K and V, which are rounded to the nearest even number of it."""
    k_dtype, v_dtype = of_rows if isinstance(of_rows, tuple) else (of_rows, of_rows)
    pool = BETWEEN if dtype == "bfloat16" else None
    rng = np.random.default_rng(1)
    problem = Problem(rng, pool=pool, dtype=dtype, k_dtype=k_dtype, v_dtype=v_dtype, padding=0)
    # Ties, and what has no number in a smaller dtype.
    edges = np.array([0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, np.inf, -np.inf, 1e30, -70000])
    with np.errstate(over="ignore"):
        for part in (problem.k, problem.v):
            part[0, 0, 0, : len(edges)] = edges.astype(part.dtype)
        problem.check(backend)


@each_backend
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
@pytest.mark.parametrize(("B", "D"), [(1, 1), (2, 8), (1, 129), (5, 1)])
def test_rows(B, D, pool, backend):
    Problem(np.random.default_rng(D), B=B, D=D, pool=pool).check(backend)


@each_backend
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_pages(page_size, backend):
    """A page of one slot: the sink is slot 0 alone. Of three: no power of two."""
    for pool in (None, BETWEEN):
        Problem(np.random.default_rng(2), B=3, D=4, page_size=page_size, pool=pool).check(backend)


@every_backend
@pytest.mark.parametrize(("B", "D"), [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
def test_without_rows(B, D, pool, backend):
    problem = Problem(np.random.default_rng(3), B=B, D=D, pool=pool)
    np.testing.assert_array_equal(problem.run(backend), bits(problem.before))


@every_backend
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
def test_hundreds_of_rows_of_padding_meet_in_the_sink(pool, backend):
    """In all its slots, and in one; whatever they hold."""
    problem = Problem(np.random.default_rng(4), B=3, D=200, pool=pool, padding=0.995)
    assert 580 < (problem.slots < problem.page_size).sum() < 600
    problem.slots[0] = np.where(problem.slots[0] < problem.page_size, 0, problem.slots[0])
    problem.k[problem.slots < problem.page_size] = np.nan
    problem.v[problem.slots < problem.page_size] = np.inf
    problem.check(backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
def test_the_kernel_leaves_padding_out(pool, backend):
    """The sink too is left as it was: rows that meet there would wait for each other."""
    problem = Problem(np.random.default_rng(5), B=3, D=20, pool=pool, padding=1)
    np.testing.assert_array_equal(problem.run(backend), problem.oracle(), strict=True)
    problem.slots[:] = np.arange(60).reshape(3, 20) % problem.page_size
    np.testing.assert_array_equal(problem.run(backend), bits(problem.before), strict=True)


@each_backend
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
def test_the_order_of_rows_is_nothing(pool, backend):
    problem = Problem(np.random.default_rng(6), B=4, D=9, pool=pool, dtype="float32")
    whole = problem.run(backend)
    for _ in range(3):
        found = problem.run(backend, problem.rng.permutation(36))
        assert_same(problem, found, whole, backend)


@each_backend
def test_layers_side_by_side(backend):
    """Three in each entry, and pages of another size in the same memory: none touches what is another's."""
    rng = np.random.default_rng(7)
    layers = [  # pages 1 and 2 of 4 slots of 6 rows and a section of 2; page 5 of 2 slots of 8 rows
        RowPlace(2, 16, 16, 4, 26, 6, 0, 32, "bfloat16"),
        RowPlace(1, 16, 0, 4, 26, 6, 64, 80, "bfloat16"),
        RowPlace(1, 8, 8, 4, 26, 6, 80, 88, "bfloat16"),
        RowPlace(2, 32, 16, 2, 16, 8, 16, 80, "bfloat16"),
    ]
    tokens = [4 + np.arange(8)] * 3 + [np.array([10, 11])]
    buffer = bits(poison(rng, "bfloat16", 100, 16))
    want, sink = buffer.copy(), np.zeros(100, bool)
    sink[:26] = True
    for place, slots in zip(layers, tokens, strict=True):
        slots = np.concatenate([rng.permutation(slots), rng.integers(0, place.page_size, 5)]).astype(np.int32)[None]
        k, v = (
            rng.normal(size=(*slots.shape, place.kv_heads, width)).astype(jnp.bfloat16)
            for width in (place.head_dim, place.value_dim)
        )
        buffer = np.asarray(compiled(place, backend)(buffer, slots, k, v if place.value_dim else None))
        want = stored(want, place, slots, k, v)
    np.testing.assert_array_equal(buffer[~sink], want[~sink], strict=True)


@each_backend
def test_v_of_latent_rows_is_not_looked_at(backend):
    problem = Problem(np.random.default_rng(8), kv_heads=1, head_dim=40, value_dim=0, dtype="float32")
    rows = PagedRows(jnp.asarray(problem.before), problem.place)
    for v in (None, problem.k, np.zeros(3, np.int8)):
        after = store_rows(rows, problem.slots, problem.k, v, backend=backend)
        assert after.place == problem.place
        assert_same(problem, bits(np.asarray(after.buffer)), problem.oracle(), backend)


@settings(max_examples=12, deadline=None, database=None)
@given(st.data())
def test_random(data):
    """An entry of K and V in a unit of the pool, or of several."""
    kv_heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)) * 4
    value_dim = data.draw(st.sampled_from([0, head_dim, 4, 12]))
    unit = data.draw(st.sampled_from([4, kv_heads * (head_dim + value_dim)]))
    before, behind = (unit * data.draw(st.integers(0, 2)) for _ in range(2))
    pool = Pool(unit, before=before, behind=behind, section=data.draw(st.integers(0, 2)), bits=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        B=data.draw(st.integers(0, 4)),
        D=data.draw(st.integers(0, 9)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=data.draw(st.integers(1, 5)),
        pool=data.draw(st.sampled_from([None, pool])),
        dtype=dtype,
        k_dtype=data.draw(st.sampled_from(["float32", dtype])),
        padding=data.draw(st.sampled_from([0, 0.4, 1])),
    )
    problem.check("reference")
    problem.check("interpret")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(backend):
    with jax.enable_x64(True):
        for name in ("own", "pool", "pool, K and V in one row", "pool, small units"):
            Problem(np.random.default_rng(9), page_size=3, **PLACES[name]).check(backend)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
def test_a_donated_buffer_is_written_in_place(pool, backend):
    problem = Problem(np.random.default_rng(10), pool=pool, dtype="float32")

    def call(buffer, slots, k, v):
        return store_rows(PagedRows(buffer, problem.place), slots, k, v, backend=backend).buffer

    buffer = jnp.array(problem.before)
    place = buffer.unsafe_buffer_pointer()
    after = jax.jit(call, donate_argnums=0)(buffer, problem.slots, problem.k, problem.v)
    assert buffer.is_deleted() and after.unsafe_buffer_pointer() == place
    assert_same(problem, bits(np.asarray(after)), problem.oracle(), backend)


# What is refused ------------------------------------------------------------------------------------------------------

SLOTS, ROWS = np.zeros((2, 3), np.int32), np.zeros((2, 3, 2, 4), np.float32)
OWN = PagedRows.of(jnp.zeros((8, 16)), kv_heads=2, head_dim=4, value_dim=4, page_size=2)


def placed(W, **change):
    return PagedRows(jnp.zeros((8, W)), dataclasses.replace(OWN.place, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": SLOTS[0]}, r"^slots is int32\[3\]: give int32\[B, D\]"),
        ({"slots": SLOTS.astype(np.int64)}, r"^slots is int64\[2, 3\]: give int32\[B, D\]"),
        ({"slots": SLOTS.astype(np.float32)}, r"^slots is float32\[2, 3\]: give int32\[B, D\]"),
        ({"slots": [[1, 2, 3]]}, r"^slots is list: give int32\[B, D\]"),
        ({"k": ROWS[:1]}, r"^k is float32\[1, 3, 2, 4\]: with slots int32\[2, 3\] give floats \[2, 3, 2, 4\]"),
        ({"k": ROWS[..., :3]}, r"^k is float32\[2, 3, 2, 3\]: .* give floats \[2, 3, 2, 4\]"),
        ({"k": ROWS.reshape(2, 3, 8)}, r"^k is float32\[2, 3, 8\]: .* give floats \[2, 3, 2, 4\]"),
        ({"k": ROWS.astype(np.int32)}, r"^k is int32\[2, 3, 2, 4\]: .* give floats \[2, 3, 2, 4\]"),
        ({"k": None}, r"^k is None: .* give floats \[2, 3, 2, 4\]"),
        ({"k": [1.0]}, r"^k is list: .* give floats"),
        ({"v": None}, r"^v is None: with slots int32\[2, 3\] give floats \[2, 3, 2, 4\]"),
        ({"v": ROWS[:, :2]}, r"^v is float32\[2, 2, 2, 4\]: .* give floats \[2, 3, 2, 4\]"),
        ({"v": 1.0}, r"^v is float: .* give floats"),
        (
            {"rows": placed(16, key=4, value=12)},
            r"^rows has K of 8 elements from element 4 .* in rows of 16: .* choose",
        ),
        (
            {"rows": placed(8, value=16)},
            r"^rows has K of 8 .* V of 8 from 16 on, in rows of 8: V must follow K at once",
        ),
        ({"rows": placed(8, key=8, value=0)}, r"^rows has K of 8 .* from element 8 .* V of 8 from 0 on"),
        ({"rows": placed(32)}, r"^rows has .* in rows of 32: .* fill whole rows; .* or a buffer of narrower rows"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which store_rows is not: leave"),
        ({"backend": "checked"}, "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interp"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"backend": "tpu", "slots": SLOTS[:0], "k": ROWS[:0], "v": ROWS[:0]}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        store_rows(**{"rows": OWN, "slots": SLOTS, "k": ROWS, "v": ROWS} | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        store_rows(OWN, *map(jnp.asarray, (SLOTS, ROWS, ROWS)), backend="triton")


# For CUDA -------------------------------------------------------------------------------------------------------------

SHAPES = {  # settings of `shapes_of`
    "own": {},
    "pool": {"pool": Pool(64, before=2048, behind=4096, section=66)},
    "a chunk": {"B": 1, "D": 2048},
    "one row": {"B": 1, "D": 1, "pool": Pool(64)},
    "words": {"dtype": "float32", "pool": Pool(64, before=64)},
    "cast": {"of_rows": "float32"},
    "cast, half floats": {"of_rows": "bfloat16", "dtype": "float16", "pool": Pool(64, section=2)},
    "cast, other half floats": {"of_rows": "float16"},
    "cast to words": {"of_rows": "bfloat16", "dtype": "float32"},
    "latent": {"sizes": (1, 576, 0), "pool": Pool(64, before=64)},
    "masks": {"sizes": (3, 24, 40), "pool": Pool(8, before=8, behind=8, section=1)},
    "odd": {"sizes": (1, 7, 5), "page_size": 3},
}
# One program of whole threads a row: 8 KV heads of 128 elements.
VECTORS = ["own", "pool", "a chunk", "one row", "words"]
each_shape = pytest.mark.parametrize("name", SHAPES)


def shapes_of(*, B=8, D=4, sizes=(8, 128, 128), page_size=16, pool=None, dtype="bfloat16", of_rows=None, rows=2**16):
    """(place, operands), the first of which, the buffer, is donated."""
    numbers = dict(zip(("kv_heads", "head_dim", "value_dim"), sizes, strict=True))
    place, _, _, width = place_of(pool, **numbers, page_size=page_size, dtype=dtype)
    held = f"uint{8 * jnp.dtype(dtype).itemsize}" if pool and pool.bits else dtype
    arrays = [((rows, width), held), ((B, D), "int32"), ((B, D, *sizes[:2]), of_rows or dtype)]
    if sizes[2]:
        arrays.append(((B, D, sizes[0], sizes[2]), of_rows or dtype))
    return place, [jax.ShapeDtypeStruct(*array) for array in arrays]


def function_of(place, backend):
    def call(buffer, slots, k, v=None):
        return store_rows(PagedRows(buffer, place), slots, k, v, backend=backend).buffer

    return call


@each_shape
def test_lowers_for_cuda_as_one_launch_in_place(name):
    place, arrays = shapes_of(**SHAPES[name])
    text = aot.lower_text(function_of(place, "triton"), *arrays)
    assert text.count('name = "store_rows"') == 1 and "scatter" not in text
    assert len(re.findall(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 0", text)) == 1
    buffer = re.search(r"@main\((%\w+): tensor<\S+> \{[^}]*\}", text)[0]
    assert "tf.aliasing_output = 0" in buffer or "jax.buffer_donor = true" in buffer


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "bfloat16"])
def test_who_names_no_backend_gets_the_scatter(dtype):
    with jax.enable_x64(True):
        for settings_ in ({"dtype": dtype}, {"of_rows": dtype}):
            place, arrays = shapes_of(**settings_)
            text = aot.lower_text(function_of(place, None), *arrays)
            assert "triton" not in text and "scatter" in text


@pytest.mark.parametrize("backend", ["reference", None])
def test_rows_of_padding_are_spread_over_the_sink(backend):
    """The scatter of a device stores rows that meet in one slot one after the other."""
    rows = PagedRows.of(jnp.zeros((12, 2)), kv_heads=1, head_dim=1, value_dim=1, page_size=4)
    slots = jnp.array([[0, 0, 9, 0], [0, 2, 0, 5]], jnp.int32)
    k = jnp.arange(1.0, 9.0).reshape(2, 4, 1, 1)
    found = np.asarray(store_rows(rows, slots, k, k, backend=backend).buffer)[:, 0]
    assert found[[5, 9]].tolist() == [8, 3] and not found[[4, 6, 7, 8, 10, 11]].any()
    assert (found[:4] > 0).all()  # all four slots of the sink have been written


@each_shape
def test_compiles_for_sm_90(name, tmp_path):
    """One launch, and nothing beside it: the buffer is the result. No thread waits for another."""
    if reason := aot.missing():
        pytest.skip(reason)
    place, arrays = shapes_of(**SHAPES[name])
    program = aot.compile_for_h200(function_of(place, "triton"), *arrays, dump=tmp_path)
    assert aot.launches(program) == collections.Counter({"custom-call": 1}), program.as_text()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == arrays[0].size * arrays[0].dtype.itemsize
    assert memory.temp_size_in_bytes < 1024
    text = aot.ptx(tmp_path)["store_rows"]
    assert not re.search(r"\b(atom|red)\.", text)
    if name in VECTORS:
        assert "bar.sync" not in text and ".shared" not in text
        stores, loads = (re.findall(rf"\b{kind}\.global\S*", text) for kind in ("st", "ld"))
        assert stores and all(".v4.b32" in store for store in stores), stores  # 16 bytes a thread
        assert [load for load in loads if ".v4.b32" not in load] == ["ld.global.b32"], loads  # that of the slot


LARGE = {  # of more than 4 GiB, and of more than 2^31 elements
    "own": {"rows": 2**21},
    "pool": {"pool": Pool(64, before=128, section=5), "rows": 2**26},
    "pool, small units": {"pool": Pool(8, before=8, behind=8), "sizes": (2, 24, 40), "rows": 2**31 - 1},
    "pages of three": {"pool": Pool(64, section=1), "page_size": 3, "rows": 2**26},
    "words": {"pool": Pool(64), "dtype": "float32", "rows": 2**26},
    "latent": {"sizes": (1, 576, 0), "pool": Pool(64, before=64), "rows": 2**26},
}


@pytest.mark.parametrize("name", LARGE)
def test_slots_past_2_to_the_31_cells_have_64_bit_offsets(name, tmp_path):
    """All that moves an address by a row or more counts rows, in int32, until the number has 64 bits."""
    if reason := aot.missing():
        pytest.skip(reason)
    place, arrays = shapes_of(**LARGE[name])
    row, result = arrays[0].shape[1] * arrays[0].dtype.itemsize, len(arrays)
    assert arrays[0].size > 2**31
    aot.compile_for_h200(function_of(place, "triton"), *arrays, dump=tmp_path)
    text = aot.ptx(tmp_path)["store_rows"]
    assert ptx.row_offset_bits(text, result, row) == 64
    assert {unit for step, unit in ptx.address_steps(text)[result] if step >= row} == {row}


@pytest.mark.parametrize("name", ["own", "pool"])
def test_in_a_loop_the_buffer_stays_where_it_is(name):
    if reason := aot.missing():
        pytest.skip(reason)
    place, (buffer, *arrays) = shapes_of(**SHAPES[name])

    def call(carry, slots, k, v):
        def turn(carry):
            left, buffer = carry
            return left - 1, store_rows(PagedRows(buffer, place), slots + left, k, v).buffer

        return lax.while_loop(lambda carry: carry[0] > 0, turn, carry)

    memory = aot.compile_for_h200(call, (jax.ShapeDtypeStruct((), jnp.int32), buffer), *arrays).memory_analysis()
    assert memory.alias_size_in_bytes == buffer.size * buffer.dtype.itemsize + 4
    assert memory.temp_size_in_bytes < 2**20


@pytest.mark.gpu
@each_shape
def test_on_a_gpu(name):
    settings_ = dict(SHAPES[name])
    sizes = dict(zip(("kv_heads", "head_dim", "value_dim"), settings_.pop("sizes", (8, 128, 128)), strict=True))
    of_rows = settings_.pop("of_rows", None)
    settings_ = {"D": 4, "padding": 0.9 if name == "a chunk" else 0.3} | settings_
    Problem(np.random.default_rng(11), **sizes, **settings_, k_dtype=of_rows, v_dtype=of_rows).check("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("own", [True, False])
def test_the_last_slot_past_2_to_the_31_cells(own):
    if own:
        place, shape = RowPlace(1, 32, 32, 4, 4, 1, 0, 32, "bfloat16"), (2**25 + 8, 64)
    else:
        place, shape = RowPlace(1, 64, 64, 4, 8, 2, 0, 64, "bfloat16"), (2**26, 64)
    last = shape[0] // place.page_rows * 4 - 1
    buffer = jnp.full(shape, 7, jnp.bfloat16 if own else jnp.uint16)
    k, v = (jnp.full((1, 1, 1, place.head_dim), x, jnp.bfloat16) for x in (1, 2))
    call = jax.jit(function_of(place, "triton"), donate_argnums=0)
    after = call(buffer, jnp.full((1, 1), last, jnp.int32), k, v)
    found = np.asarray(lax.bitcast_convert_type(after[-place.entry_rows :], jnp.bfloat16)).ravel()
    assert (found == np.repeat([1, 2], place.head_dim)).all() and (after[: -place.entry_rows] == 7).all()

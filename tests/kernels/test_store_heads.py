"""store_heads: queries turned, keys turned and stored, values stored; no other cell of the cache changes.

Angles and norms come from the problems of test_head_rotary.py, slots and buffers of poison from those of
test_store_rows.py, and so do their oracles.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
import test_head_rotary
import test_store_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_attention import Pool
from test_store_rows import BETWEEN, PLACES, bits

from pallas_kernels import PagedRows, View, head_rotary, head_tiles, store_heads, store_rows
from pallas_kernels.lanes import power

GPU = pytest.param("triton", marks=pytest.mark.gpu)
KERNELS = ["interpret", GPU]
BACKENDS = ["reference", *KERNELS]
EVERY_BACKEND = [*BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]
each_kernel = pytest.mark.parametrize("backend", KERNELS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
each_pool = pytest.mark.parametrize("pool", [None, BETWEEN], ids=["own", "pool"])
each_divisor = pytest.mark.parametrize("K", [None, 48], ids=["plain", "divided"])
DTYPES = ["float32", "bfloat16", "float16"]
EPS, DIVISOR_EPS = test_head_rotary.EPS, 0.25
ROWS = "q", "k", "v", "cos", "sin", "divisor"  # what has a row of its own for each token


@functools.cache
def compiled(place, backend):
    def call(buffer, slots, q, k, v, cos, sin, q_scale, k_scale, divisor):
        scales = {"q_scale": q_scale, "k_scale": k_scale, "eps": EPS}
        divided = {"divisor": divisor, "divisor_eps": DIVISOR_EPS}
        rows = PagedRows(buffer, place)
        q, rows = store_heads(rows, slots, q, k, v, cos, sin, **scales, **divided, backend=backend)
        assert rows.place == place
        return q, rows.buffer

    return jax.jit(call, compiler_options=quick_compile.options())


@dataclasses.dataclass
class Problem:
    """Rows of B requests, D each, and a buffer of poison; `cache` is the dtype of the latter, K the divisor's width."""

    rng: np.random.Generator
    B: int = 2
    D: int = 3
    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    half: int | None = None
    page_size: int = 4
    pool: Pool | None = None
    dtype: str = "bfloat16"
    cache: str | None = None
    scale_dtype: str | None = "bfloat16"
    K: int | None = None
    divisor_dtype: str | None = None
    padding: float = 0.3

    def __post_init__(self):
        rng, N = self.rng, self.B * self.D
        sizes = self.head_dim, self.half or self.head_dim // 2
        turn = test_head_rotary.Problem(rng, N, self.heads, self.kv_heads, *sizes, self.dtype, self.scale_dtype)
        sizes = self.B, self.D, self.kv_heads, self.head_dim, self.value_dim, self.page_size, self.pool
        dtypes = self.cache or self.dtype, self.dtype, self.dtype
        self.turn, self.store = turn, test_store_rows.Problem(rng, *sizes, *dtypes, self.padding)
        for name in ("q", "k", "cos", "sin", "q_scale", "k_scale"):
            setattr(self, name, getattr(turn, name))
        self.slots, self.before, self.place = self.store.slots, self.store.before, self.store.place
        self.v = None if self.store.v is None else self.store.v.reshape(N, self.kv_heads, self.value_dim)
        self.divisor = None
        if self.K is not None:
            size = rng.normal(size=(N, self.K)) * rng.uniform(0.1, 3, (N, 1))
            self.divisor = size.astype(jnp.dtype(self.divisor_dtype or self.dtype))

    @property
    def live(self):
        return self.slots.reshape(-1) >= self.page_size

    def at(self, order):
        """The same, rows in another order, or some of them, as one request."""
        part = copy.copy(self)
        part.slots, part.B, part.D = self.slots.reshape(-1)[order][None], 1, len(order)
        for name in ROWS:
            array = getattr(self, name)
            setattr(part, name, None if array is None else array[order])
        return part

    def in_rows(self, order):
        """The same; q, k and v are Views of columns of one buffer, with a gap in front that is not numbers."""
        arrays = {name: getattr(self, name) for name in order}
        offsets = 8 + np.cumsum([0, *(x[0].size for x in arrays.values())])
        gap = np.full((len(self.q), 8), np.nan, self.q.dtype)
        buffer = jnp.asarray(np.concatenate([gap, *(x.reshape(len(x), -1) for x in arrays.values())], axis=1))
        part = copy.copy(self)
        for (name, x), offset in zip(arrays.items(), offsets.tolist(), strict=False):
            setattr(part, name, View(buffer, offset, x.shape, (buffer.shape[1], x.shape[2], 1)))
        return part

    def run(self, backend):
        """The queries, and bits of the buffer after."""
        arrays = self.q, self.k, self.v, self.cos, self.sin, self.q_scale, self.k_scale, self.divisor
        q, after = map(np.asarray, compiled(self.place, backend)(jnp.asarray(self.before), self.slots, *arrays))
        assert (q.dtype, q.shape) == (self.q.dtype, self.q.shape)
        assert (after.dtype, after.shape) == (self.before.dtype, self.before.shape)
        return q, bits(after)

    def oracle(self):
        """Queries, keys and values, in the dtype of the rows."""
        q, k, v = self.q, self.k, self.v
        if self.divisor is not None:
            wide = self.divisor.astype(np.float64)
            by = np.sqrt(np.square(wide).sum(axis=1) / wide.shape[1] + DIVISOR_EPS)[:, None, None]
            q, k, v = (None if x is None else (x.astype(np.float64) / by).astype(x.dtype) for x in (q, k, v))
        turn = copy.copy(self.turn)
        turn.q, turn.k, turn.cos, turn.sin, turn.q_scale, turn.k_scale = q, k, self.cos, self.sin, *self.scales
        return (*turn.oracle(), v)

    @property
    def scales(self):
        return self.q_scale, self.k_scale

    def taken(self, after):
        """K and V of all rows, out of the buffer's bits: the formula of `RowPlace`, head by head."""
        place, cells = self.place, after.reshape(-1)
        found = []
        for first, width in ((place.key, place.head_dim), (place.value, place.value_dim)):
            rows = np.zeros((self.slots.size, place.kv_heads, width), after.dtype)
            for n, h in np.ndindex(rows.shape[:2]):
                page, token = divmod(int(self.slots.reshape(-1)[n]), place.page_size)
                start = (page * place.page_rows + token * place.entry_rows) * after.shape[1] + first + h * width
                rows[n, h] = cells[start : start + width]
            found.append(rows.view(jnp.dtype(place.dtype)))
        return found

    def check(self, backend, given=None):
        """Of `given`, the same as Views, if it is not None.

        Every cell that is no live row's is compared bit by bit: the keys and values that were found, stored once more
        by the oracle into the buffer before, give the buffer after.
        """
        q, after = (self if given is None else given).run(backend)
        want_q, want_k, want_v = self.oracle()
        assert_near(q, want_q)
        k, v = self.taken(after)
        cached, live = k.dtype, self.live
        assert_near(k[live], want_k[live].astype(cached), self.dtype)
        if want_v is not None and self.divisor is None:
            np.testing.assert_array_equal(bits(v[live]), bits(want_v[live].astype(cached)))
        elif want_v is not None:
            assert_near(v[live], want_v[live].astype(cached), self.dtype, by_cell=True)
        shape = *self.slots.shape, self.kv_heads, -1
        v = v.reshape(shape) if self.place.value_dim else None
        k = k.reshape(*self.slots.shape, self.kv_heads, self.head_dim)
        again = test_store_rows.stored(bits(self.before), self.place, self.slots, k, v)
        test_store_rows.assert_same(self.store, after, again, backend)
        if backend not in ("reference", None):  # the kernel leaves rows of padding out
            rows = self.place.page_rows
            np.testing.assert_array_equal(after[:rows], bits(self.before)[:rows])


def assert_near(found, want, dtype=None, by_cell=False):
    """As in test_head_rotary.py, of numbers that were rounded to a dtype and then to that of the cache."""
    unit = max(float(jnp.finfo(x).eps) for x in (found.dtype, dtype or found.dtype))
    seldom = found.size if unit < 2**-20 else 2 + found.size // 100
    found, want = found.astype(np.float64), want.astype(np.float64)
    assert (found != want).sum() <= seldom
    most = np.abs(want) if by_cell else np.abs(want).max(initial=0)
    np.testing.assert_array_less(np.abs(found - want), 3 * unit * most + 2.0**-40)


def assert_same_bits(found, want):
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(bits(np.ascontiguousarray(x)), bits(np.ascontiguousarray(y)), strict=True)


# What comes out -------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("name", PLACES)
def test_places(name, backend):
    Problem(np.random.default_rng(0), **PLACES[name]).check(backend)


@every_backend
@pytest.mark.parametrize("name", ["own", "own, latent", "pool", "pool, a head over two rows"])
def test_places_of_divided_rows(name, backend):
    Problem(np.random.default_rng(0), **PLACES[name], K=48).check(backend)


@each_backend
@each_pool
@pytest.mark.parametrize(("B", "D"), [(1, 1), (8, 1), (3, 43)])
def test_rows(B, D, pool, backend):
    Problem(np.random.default_rng(D), B=B, D=D, pool=pool, K=20).check(backend)


@each_backend
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "value_dim"),
    [
        (32, 8, 128, 64, 128),
        (9, 3, 40, 10, 24),
        (1, 1, 256, 32, 64),
        (5, 9, 24, 12, 40),
        (3, 1, 96, 5, 1),
        (2, 1, 9, 4, 576),
        (6, 1, 576, 32, 0),
    ],
)
def test_widths(heads, kv_heads, head_dim, half, value_dim, backend):
    """Keys wider than values, and the other way round; more heads of one kind than a program takes; none of V."""
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, half=half, value_dim=value_dim)
    K = None if head_dim in (24, 576) else 33
    Problem(np.random.default_rng(half), B=1, D=4, **sizes, pool=Pool(1, before=3, behind=2), K=K).check(backend)


@each_backend
@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, cache, backend):
    """Keys and values are rounded to the dtype of the rows, and then to that of the cache."""
    pool = None if cache == "float32" else BETWEEN
    Problem(np.random.default_rng(1), B=4, D=4, pool=pool, dtype=dtype, cache=cache, K=48).check(backend)


@each_backend
@pytest.mark.parametrize(("scale_dtype", "K"), [(None, 48), (None, None), ("float32", 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_norms_and_with_others(dtype, scale_dtype, K, backend):
    problem = Problem(np.random.default_rng(2), dtype=dtype, scale_dtype=scale_dtype, half=4, K=K)
    problem.check(backend)
    if scale_dtype:
        problem.q_scale = None
        problem.check(backend)


@each_backend
@pytest.mark.parametrize("K", [1, 2, 31, 4096, 16384])
def test_divisors(K, backend):
    """Of any width; those that are no powers of two are masked."""
    problem = Problem(np.random.default_rng(K), K=K, pool=BETWEEN, scale_dtype=None)
    problem.divisor[0] *= 0  # sqrt(eps) is left
    problem.check(backend)


@each_backend
@pytest.mark.parametrize("divisor_dtype", DTYPES)
def test_divisors_of_another_dtype(divisor_dtype, backend):
    Problem(np.random.default_rng(3), K=24, divisor_dtype=divisor_dtype, dtype="float16").check(backend)


@each_kernel
def test_what_is_divided_is_rounded_before_it_is_turned(backend):
    """By 8 / 3, numbers of a few digits: nearly all are between those of bfloat16. Turned by nothing they stay."""
    problem = Problem(np.random.default_rng(4), B=4, D=8, scale_dtype=None, K=1, padding=0, cache="float32")
    problem.divisor[:] = np.sqrt(64 / 9 - DIVISOR_EPS).astype(problem.divisor.dtype)
    problem.cos[:], problem.sin[:] = 1, 0
    found = problem.taken(problem.run(backend)[1])
    for x in found:
        assert_same_bits([x.astype(jnp.bfloat16).astype(np.float32)], [x])
    problem.check(backend)


@every_backend
@each_pool
@pytest.mark.parametrize(("B", "D"), [(0, 4), (3, 0), (0, 0)])
def test_without_rows(B, D, pool, backend):
    problem = Problem(np.random.default_rng(5), B=B, D=D, pool=pool, K=48)
    q, after = problem.run(backend)
    assert not q.size
    np.testing.assert_array_equal(after, bits(problem.before))


@every_backend
@each_pool
@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 2), (4, 0), (0, 0)])
def test_without_heads(heads, kv_heads, pool, backend):
    problem = Problem(np.random.default_rng(6), heads=heads, kv_heads=kv_heads, pool=pool, K=4)
    q, after = problem.run(backend)
    assert_near(q, problem.oracle()[0])
    if kv_heads:
        assert_near(problem.taken(after)[0][problem.live], problem.oracle()[1][problem.live])
    else:
        np.testing.assert_array_equal(after, bits(problem.before))


@every_backend
@each_pool
def test_rows_of_padding_meet_in_the_sink(pool, backend):
    """In all its slots, whatever they hold; their queries are turned like others."""
    problem = Problem(np.random.default_rng(7), B=3, D=40, pool=pool, padding=0.95, K=8)
    assert 105 < (~problem.live).sum() < 120
    problem.slots[0] = np.where(problem.slots[0] < problem.page_size, 0, problem.slots[0])
    problem.k[~problem.live], problem.v[~problem.live] = np.nan, np.inf
    problem.check(backend)


@every_backend
@pytest.mark.parametrize(
    ("head_dim", "half", "value_dim", "order", "K"),
    [(128, 64, 128, "qkv", None), (24, 12, 40, "vkq", 48), (40, 10, 24, "kqv", 48), (40, 10, 24, "vqk", None)],
)
def test_columns_of_wider_rows(head_dim, half, value_dim, order, K, backend):
    """What lies beside them is not looked at, and the bits are those of arrays."""
    sizes = dict(heads=9, kv_heads=3, head_dim=head_dim, half=half, value_dim=value_dim)
    problem = Problem(np.random.default_rng(8), B=1, D=3, **sizes, K=K, padding=0)
    inside = problem.in_rows(order)
    problem.check(backend, inside)
    assert_same_bits(
        [x[problem.place.page_rows * (i > 0) :] for i, x in enumerate(inside.run(backend))],
        [x[problem.place.page_rows * (i > 0) :] for i, x in enumerate(problem.run(backend))],
    )


@each_backend
@each_divisor
def test_v_of_latent_rows_is_not_looked_at(K, backend):
    problem = Problem(np.random.default_rng(9), kv_heads=1, head_dim=40, value_dim=0, K=K)
    for problem.v in (None, np.zeros(3, np.int8)):
        q, after = problem.run(backend)
        latent = copy.copy(problem)
        latent.v = None
        assert_near(q, latent.oracle()[0])
        assert_near(latent.taken(after)[0][problem.live], latent.oracle()[1][problem.live])


@settings(max_examples=8, deadline=None, database=None)
@given(st.data())
def test_random(data):
    """An entry of K and V in a unit of the pool, or of several."""
    kv_heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)) * 4
    value_dim = data.draw(st.sampled_from([0, head_dim, 4, 12]))
    unit = data.draw(st.sampled_from([4, kv_heads * (head_dim + value_dim)]))
    before, behind = (unit * data.draw(st.integers(0, 2)) for _ in range(2))
    pool = Pool(unit, before=before, behind=behind, section=data.draw(st.integers(0, 2)), bits=data.draw(st.booleans()))
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
        B=data.draw(st.integers(1, 4)),
        D=data.draw(st.integers(1, 5)),
        heads=data.draw(st.integers(1, 17)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        half=data.draw(st.integers(1, head_dim // 2)),
        page_size=data.draw(st.integers(1, 5)),
        pool=data.draw(st.sampled_from([None, pool])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        cache=data.draw(st.sampled_from(DTYPES)),
        scale_dtype=data.draw(st.sampled_from([None, *DTYPES])),
        K=data.draw(st.sampled_from([None, 1, 8, 37])),
        padding=data.draw(st.sampled_from([0, 0.4, 1])),
    )
    problem.check("reference")
    problem.check("interpret")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_x64(backend):
    with jax.enable_x64(True):
        for name in ("own", "pool, K and V in one row", "pool, small units"):
            problem = Problem(np.random.default_rng(10), page_size=3, **PLACES[name], scale_dtype="float64", K=9)
            problem.divisor = problem.divisor.astype(np.float64)
            problem.check(backend)


# Whose a row's bits are, and the two kernels that this one is ---------------------------------------------------------


@each_kernel
@each_divisor
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_its_own_alone(dtype, K, backend):
    """Its bits do not change with the rows beside it: permuted, not numbers, or not there."""
    sizes = dict(heads=9, kv_heads=3, head_dim=40, half=10, value_dim=24)
    problem = Problem(np.random.default_rng(11), B=1, D=9, **sizes, dtype=dtype, K=K, padding=0)
    q, after = problem.run(backend)
    order = problem.rng.permutation(9)
    assert_same_bits(problem.at(order).run(backend), [q[order], after])
    kept = np.array([0, 4, 8])
    alone = problem.at(kept)
    found, cells = alone.run(backend)
    assert_same_bits([found, *alone.taken(cells)], [q[kept], *alone.taken(after)])
    for name in ROWS:
        if (array := getattr(problem, name)) is not None:
            poisoned = np.full_like(array, np.nan)
            poisoned[kept] = array[kept]
            setattr(problem, name, poisoned)
    found, cells = problem.run(backend)
    assert_same_bits([found[kept], *alone.taken(cells)], [q[kept], *alone.taken(after)])


@each_kernel
@pytest.mark.parametrize(
    ("dtype", "cache"), [*zip(DTYPES, DTYPES, strict=True), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_it_is_head_rotary_and_store_rows(dtype, cache, backend):
    """To the bit."""
    pool = None if cache == dtype == "bfloat16" else BETWEEN
    problem = Problem(np.random.default_rng(12), pool=pool, B=4, D=5, half=6, dtype=dtype, cache=cache)

    @functools.partial(jax.jit, compiler_options=quick_compile.options())
    def turned(q, k, cos, sin, q_scale, k_scale):
        return head_rotary(q, k, cos, sin, q_scale=q_scale, k_scale=k_scale, eps=EPS, backend=backend)

    @functools.partial(jax.jit, compiler_options=quick_compile.options())
    def stored(buffer, slots, k, v):
        return store_rows(PagedRows(buffer, problem.place), slots, k, v, backend=backend).buffer

    q, k = turned(problem.q, problem.k, problem.cos, problem.sin, *problem.scales)
    k, v = (x.reshape(*problem.slots.shape, *x.shape[1:]) for x in (k, problem.v))
    after = stored(jnp.asarray(problem.before), problem.slots, k, v)
    assert_same_bits(problem.run(backend), [np.asarray(q), bits(np.asarray(after))])


@pytest.mark.parametrize(("head_dim", "half", "value_dim"), [(128, 64, 128), (24, 12, 40), (9, 1, 576)])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (1, 17)])
def test_every_cell_is_written_by_one_program(heads, head_dim, half, value_dim):
    """Interpreted, one that writes past the end of its row goes unseen."""
    counts, dims = [*heads, heads[1]], [head_dim, head_dim, value_dim]
    sections = [head_tiles._sections(head_dim, half)] * 2 + [[(0, value_dim)]]
    widths = [head_tiles.widest_of(head_dim, half)] * 2 + [power(value_dim)]
    parts, programs = head_tiles.parts_of(counts, widths)
    written = [np.zeros(count * width, int) for count, width in zip(counts, dims, strict=True)]
    for program in range(programs):
        (nth,) = (i for i, part in enumerate(parts) if part.mine(program))
        for section in sections[nth]:
            cell, channel, mask = head_tiles.places_of(parts[nth], dims[nth], program, *section)
            cell, channel = np.asarray(cell), np.asarray(channel)
            live = np.ones(cell.shape, bool) if mask is None else np.asarray(mask)
            np.testing.assert_array_equal(cell[live] % dims[nth], channel[live])
            np.add.at(written[nth], cell[live], 1)
    assert all((x == 1).all() for x in written)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@each_pool
def test_a_donated_buffer_is_written_in_place(pool, backend):
    problem = Problem(np.random.default_rng(13), pool=pool, dtype="float32", K=8)
    arrays = problem.slots, problem.q, problem.k, problem.v, problem.cos, problem.sin

    def call(buffer, *arrays):
        q, rows = store_heads(PagedRows(buffer, problem.place), *arrays, backend=backend)
        return q, rows.buffer

    buffer = jnp.array(problem.before)
    place = buffer.unsafe_buffer_pointer()
    _, after = jax.jit(call, donate_argnums=0)(buffer, *arrays)
    assert buffer.is_deleted() and after.unsafe_buffer_pointer() == place


def test_the_reference_has_a_derivative():
    """What is not normed is turned, and its derivative turned back; values and divisors have theirs, too."""
    problem = Problem(np.random.default_rng(14), dtype="float32", scale_dtype=None, K=8, padding=0)
    rows = PagedRows(jnp.zeros(problem.before.shape), problem.place)
    weight = problem.rng.normal(size=problem.q.shape).astype(np.float32)
    angles = problem.cos, problem.sin

    def call(q, v, divisor=None):
        arrays = problem.slots, q, problem.k, v, *angles
        return store_heads(rows, *arrays, divisor=divisor, divisor_eps=DIVISOR_EPS, backend="reference")

    found = jax.grad(lambda q: (weight * call(q, problem.v)[0]).sum())(problem.q)
    back = head_rotary(weight, problem.k, problem.cos, -problem.sin, backend="reference")[0]
    np.testing.assert_allclose(found, back, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda v: call(problem.q, v)[1].buffer.sum())(problem.v)
    np.testing.assert_array_equal(found, np.ones_like(problem.v))
    # Heads get smaller by the factor that the root mean square grows by: the sums of x * derivative are opposite.
    divisor = problem.divisor
    parts = jax.grad(lambda q, d: (weight * call(q, problem.v, d)[0]).sum(), (0, 1))(problem.q, divisor)
    mean = np.square(divisor).mean(axis=1)
    share = (problem.q * parts[0]).sum(axis=(1, 2)) * mean / (mean + DIVISOR_EPS)
    np.testing.assert_allclose((divisor * parts[1]).sum(axis=1), -share, rtol=1e-3, atol=1e-4)


# What is refused ------------------------------------------------------------------------------------------------------

OWN = PagedRows.of(jnp.zeros((8, 28)), kv_heads=2, head_dim=8, value_dim=6, page_size=2)
CALL = {
    "rows": OWN,
    "slots": np.zeros((2, 3), np.int32),
    "q": np.zeros((6, 4, 8), np.float32),
    "k": np.zeros((6, 2, 8), np.float32),
    "v": np.zeros((6, 2, 6), np.float32),
    "cos": np.zeros((6, 4), np.float32),
    "sin": np.zeros((6, 4), np.float32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": CALL["q"][0]}, r"^q is float32\[4, 8\]: it must be float32, bfloat16 or float16\[N, heads, head_dim\]"),
        ({"k": CALL["k"][:5]}, r"^k is float32\[5, 2, 8\]: it must be float32\[6, heads, 8\], as q is"),
        (
            {"k": np.zeros((6, 1, 8), np.float32)},
            r"^k is float32\[6, 1, 8\]: it must be float32\[6, 2, 8\], as .* and rows has 2 heads of 8",
        ),
        ({"cos": CALL["cos"][:, :0]}, r"^cos is float32\[6, 0\]: .* half from 1 to 4"),
        ({"sin": CALL["sin"][:3]}, r"^sin is float32\[3, 4\]: it must be float32\[6, 4\], as cos is"),
        ({"q_scale": np.zeros(4, np.float32)}, r"^q_scale is float32\[4\]: it must be floats of shape \(8,\)"),
        ({"k_scale": np.zeros(8, np.int32)}, r"^k_scale is int32\[8\]: it must be floats of shape \(8,\)"),
        (
            {"slots": CALL["slots"][0]},
            r"^slots is int32\[3\]: give int32\[B, D\], B \* D = 6, as k is float32\[6, 2, 8\]",
        ),
        ({"slots": np.zeros((2, 2), np.int32)}, r"^slots is int32\[2, 2\]: give int32\[B, D\], B \* D = 6"),
        ({"slots": CALL["slots"].astype(np.int64)}, r"^slots is int64\[2, 3\]: give int32\[B, D\]"),
        ({"slots": [[0] * 3] * 2}, r"^slots is list: give int32\[B, D\]"),
        ({"v": None}, r"^v is NoneType: it must be float32\[6, 2, 6\], as "),
        ({"v": CALL["k"]}, r"^v is float32\[6, 2, 8\]: it must be float32\[6, 2, 6\], as "),
        ({"v": CALL["v"].astype(np.float16)}, r"^v is float16\[6, 2, 6\]: it must be float32\[6, 2, 6\], as "),
        (
            {"v": View(np.zeros((6, 12), np.float32), 1, (6, 2, 6), (12, 6, 1))},
            r"^v is a View of float32\[6, 2, 6\], offset 1, strides \(12, 6, 1\), in float32\[6, 12\]: it must be "
            r"columns of a buffer \[6, W\], of strides \(W, 6, 1\)",
        ),
        ({"divisor": CALL["q"]}, r"^divisor is float32\[6, 4, 8\]: it must be floats \[6, K\], K from 1 to 16384"),
        ({"divisor": np.zeros((5, 8), np.float32)}, r"^divisor is float32\[5, 8\]: it must be floats \[6, K\]"),
        ({"divisor": np.zeros((6, 0), np.float32)}, r"^divisor is float32\[6, 0\]: .* K from 1 to 16384"),
        ({"divisor": np.zeros((6, 16385), np.float32)}, r"^divisor is float32\[6, 16385\]: .* K from 1 to 16384"),
        ({"divisor": np.zeros((6, 8), np.int32)}, r"^divisor is int32\[6, 8\]: it must be floats \[6, K\]"),
        ({"divisor": 1.0}, r"^divisor is float: it must be floats \[6, K\]"),
        (
            {"rows": dataclasses.replace(OWN, place=dataclasses.replace(OWN.place, key=4, value=20))},
            r"^rows has K of 16 elements from element 4 of an entry on, .* in rows of 28: .* choose",
        ),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which store_heads is not: leave"),
        ({"backend": "checked"}, "backend='checked' runs kernels of the lane language, .* or name 'triton', 'interp"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        store_heads(**CALL | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_triton_declines_arrays_elsewhere():
    with pytest.raises(ValueError, match=r"^backend='triton': it runs on arrays on a CUDA device; found "):
        store_heads(**{name: x if name == "rows" else jnp.asarray(x) for name, x in CALL.items()}, backend="triton")

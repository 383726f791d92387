"""paged_attention: against a float64 oracle at every edge, with poison in all memory that must not be read."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_attention as cases
import kernel_ptx as ptx
import numpy as np
import pytest
from kernel_attention import SMALL, Pool, check, problem, run

from pallas_kernels import PagedRows, RowPlace, paged_attention, paged_kernel
from pallas_kernels.paged_plan import SIZES, Plan

GPU = pytest.param("triton", marks=pytest.mark.gpu)
each_executor = pytest.mark.parametrize("executor", ["reference", "interpret", GPU])
DTYPES = ("float32", "bfloat16")


def sweep(*parameters):
    """Each of them on every executor: on a CPU in one dtype or the other, by turns, on a GPU in both."""
    on_cpu = [
        (*p, DTYPES[(i + j) % 2], e) for i, p in enumerate(parameters) for j, e in enumerate(("reference", "interpret"))
    ]
    return on_cpu + [pytest.param(*p, dtype, "triton", marks=pytest.mark.gpu) for p in parameters for dtype in DTYPES]


def rng_of(*numbers):
    return np.random.default_rng([n if n is not None else 2**20 for n in numbers])


# Lengths -------------------------------------------------------------------------------------------------------------

# Around the edges of pages of 4 tokens, blocks of 16 keys, parts of 32 or more, and of the context, 144.
EDGES = sorted(
    {0, *(n + more for n in (2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128) for more in (-1, 0, 1)), 142, 143, 144}
)
WINDOWS = (None, 1, 4, 5, 40, 1000)


@pytest.mark.parametrize(
    ("D", "window", "causal", "dtype", "executor"),
    sweep(
        *((1 + i % 8, WINDOWS[i % 6], i % 4 != 3) for i in range(12)), (8, None, True), (8, 70, True), (1, None, False)
    ),
)
def test_lengths(D, window, causal, dtype, executor):
    """Requests shorter than D have padded rows, the first one nothing else."""
    call = problem(rng_of(D, window), EDGES, D, columns=36, window=window, causal=causal, dtype=dtype)
    if window in (None, 70, 1000):
        assert cases.plan_of(call, SMALL).parts > 1
    assert (check(call, executor)[0] == 0).all()


@pytest.mark.parametrize(("D", "dtype", "executor"), sweep((1,), (4,)))
def test_long_contexts(D, dtype, executor):
    """With the sizes of parts and blocks that users get."""
    lengths = (0, 1, 16, 255, 256, 257, 511, 512, 513, 2047, 2049, 4092, 4095, 4096)
    call = problem(rng_of(D), lengths, D, columns=256, page_size=16, heads=4, kv_heads=1, dtype=dtype)
    assert cases.plan_of(call).parts == 18
    check(call, executor, SIZES)


@pytest.mark.parametrize(("window", "dtype", "executor"), sweep((None,), (70,)))
def test_a_single_part(window, dtype, executor):
    lengths = (0, 1, 63, 64, 65, 127, 128)
    call = problem(rng_of(1), lengths, 2, columns=8, page_size=16, window=window, dtype=dtype)
    assert cases.plan_of(call).parts == 1
    check(call, executor, SIZES)


@each_executor
@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_that_end_before_or_behind_the_queries(causal, window, executor):
    """Keys from a request's length on are not seen even by later queries; without `causal` all before it are."""
    positions = np.array([[5, 6], [5, 6], [0, 1], [90, 91], [90, 91], [7, -1]])
    call = problem(rng_of(3), (3, 6, 100, 44, 92, 50), 2, columns=30, window=window, positions=positions, causal=causal)
    check(call, executor)


# Shapes --------------------------------------------------------------------------------------------------------------

HEADS = [  # heads, kv_heads, head_dim, value_dim
    (1, 1, 16, 16),
    (3, 3, 24, 40),
    (6, 2, 40, 24),
    (8, 2, 80, 80),
    (8, 1, 128, 64),
    (16, 2, 8, 96),
    (4, 1, 32, 0),
    (6, 3, 40, 0),
    (16, 1, 512, 0),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "value_dim", "dtype", "executor"), sweep(*HEADS))
def test_heads(heads, kv_heads, head_dim, value_dim, dtype, executor):
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    check(problem(rng_of(heads), (0, 1, 33, 64, 95), 3, columns=24, **sizes, dtype=dtype), executor)


@pytest.mark.parametrize(
    ("page_size", "window", "dtype", "executor"),
    sweep((1, None), (1, 3), (4, 21), (6, None), (16, None), (16, 17), (64, 64), (64, None), (128, 129), (128, 1)),
)
def test_page_sizes(page_size, window, dtype, executor):
    columns = max(3, 96 // page_size)
    end = columns * page_size
    lengths = sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, end - page_size, end - 1, end})
    check(
        problem(rng_of(page_size), lengths, 3, columns=columns, page_size=page_size, window=window, dtype=dtype),
        executor,
    )


@pytest.mark.parametrize(
    ("D", "window", "causal", "dtype", "executor"),
    sweep((64, None, True), (65, 10, True), (64, None, False), (40, 200, True)),
)
def test_chunks_of_a_prompt(D, window, causal, dtype, executor):
    """Several tiles a request; chunks in the middle of a text, at its start, and half padding."""
    call = problem(rng_of(D), (0, 1, 5, 64, 70, 150, 200), D, columns=50, window=window, causal=causal, dtype=dtype)
    assert cases.plan_of(call, SMALL).tiles > 4
    check(call, executor)


@pytest.mark.parametrize(("dtype", "executor"), sweep(()))
def test_a_chunk_with_tiles_of_the_usual_size(dtype, executor):
    call = problem(rng_of(9), (0, 64, 700), 64, columns=48, page_size=16, dtype=dtype)
    assert cases.plan_of(call).tiles == 2 and cases.plan_of(call).parts > 1
    check(call, executor, SIZES)


@pytest.mark.parametrize("executor", ["reference", "interpret", GPU])
@pytest.mark.parametrize(("B", "D", "P"), [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_do(B, D, P, executor):
    rows = PagedRows.of(jnp.full((8, 6), jnp.nan), kv_heads=1, head_dim=4, value_dim=2, page_size=2)
    arrays = jnp.zeros((B, P), jnp.int32), jnp.zeros((B, D), jnp.int32), jnp.zeros((B,), jnp.int32)
    out = paged_attention(jnp.ones((B, D, 2, 4)), rows, *arrays, backend=executor)
    assert out.shape == (B, D, 2, 2) and (out == 0).all()


@each_executor
def test_padding_alone(executor):
    call = problem(rng_of(4), (0, 0, 0), 3, columns=20)
    assert np.isnan(call.q).all() and (run(call, executor) == 0).all()


@each_executor
def test_padded_rows_of_a_request_that_has_keys(executor):
    positions = np.array([[3, 4, -1, -1], [-1] * 4, [70, 71, 72, -1]])
    call = problem(rng_of(5), (5, 60, 73), 4, columns=20, positions=positions)
    found = check(call, executor)
    assert (found[0, 2:] == 0).all() and (found[1] == 0).all() and (found[0, :2] != 0).all()


@each_executor
def test_rows_that_attend_to_a_selection_of_slots(executor):
    """Each row is a request of its own, pages are slots, and their order means nothing."""
    call = problem(rng_of(6), (0, 1, 7, 64, 65), columns=65, page_size=1, causal=False, positions=np.zeros((5, 1)))
    found = check(call, executor)
    call.table[4] = call.table[4][::-1]
    assert np.abs(run(call, executor)[4] - found[4]).max() < 1e-5


@each_executor
@pytest.mark.parametrize(
    ("q_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]
)
def test_queries_and_rows_of_other_dtypes(q_dtype, dtype, executor):
    check(problem(rng_of(7), (0, 3, 16, 50), 2, columns=15, q_dtype=q_dtype, dtype=dtype), executor)


@each_executor
def test_scale(executor):
    calls = [problem(rng_of(8), (9, 40), 2, columns=10, scale=scale) for scale in (1.0, 0.25, 0.0)]
    first, second, _ = (check(call, executor) for call in calls)
    assert np.abs(first - second).max() > 1e-3


@each_executor
def test_large_scores(executor):
    """No power overflows, and none of what is not seen makes a NaN."""
    check(problem(rng_of(10), (1, 33, 100), 2, columns=25, scale=300.0), executor)


@pytest.mark.parametrize("backend", ["reference", "interpret", None])
def test_with_x64_on(backend):
    call = problem(rng_of(11), (0, 5, 300), 2, columns=80)
    with jax.enable_x64(True):
        out = paged_attention(*call.arguments, **call.settings, backend=backend)
    assert out.dtype == jnp.float32
    cases.assert_near(np.asarray(out), cases.attention(call))


# Storage -------------------------------------------------------------------------------------------------------------

POOLS = {
    "one layer": Pool(64),
    "a middle layer": Pool(64, before=128, behind=192),
    "V apart from K": Pool(16, before=16, between=32),
    "small units": Pool(8, before=8, behind=8),
    "a section": Pool(64, before=64, behind=64, section=5),
    "a section of small units": Pool(8, before=24, behind=16, section=1),
    "an entry in one unit": Pool(256, before=64, between=16, behind=32),
    "rows across units": Pool(48, before=40, between=9),
    "floats": Pool(64, before=64, section=3, bits=False),
}


@pytest.mark.parametrize(("name", "dtype", "executor"), sweep(*((name,) for name in POOLS)))
def test_pools(name, dtype, executor):
    window = 9 if name == "small units" else None
    lengths = (0, 1, 4, 5, 33, 64, 95, 96)
    sizes = dict(head_dim=24, value_dim=40) if "small" in name else {}
    call = problem(rng_of(len(name)), lengths, 3, columns=24, pool=POOLS[name], window=window, dtype=dtype, **sizes)
    check(call, executor)


@pytest.mark.parametrize(("dtype", "executor"), sweep(()))
def test_latent_rows_in_a_pool(dtype, executor):
    pool = Pool(64, before=64, section=2)
    sizes = dict(heads=8, kv_heads=1, head_dim=576, value_dim=0)
    check(problem(rng_of(12), (0, 1, 40, 64), 2, columns=8, page_size=8, pool=pool, dtype=dtype, **sizes), executor)


@each_executor
def test_the_same_bits_in_a_pool_and_in_a_buffer_of_its_own(executor):
    calls = [problem(rng_of(13), (3, 40, 96), 3, columns=24, pool=pool) for pool in (None, Pool(64), Pool(8, before=8))]
    first, *others = calls
    found = check(first, executor)
    for other in others:  # the numbers of the first one
        for b, p in zip(*np.nonzero(~np.isnan(first.keys[:, :, 0, 0])), strict=True):
            unit, place = other.buffer.shape[1], other.place
            row = other.table[b, p // 4] * place.page_rows + p % 4 * place.entry_rows
            flat = other.buffer.reshape(-1).view(np.float32)
            for rows, start in ((first.keys, place.key), (first.values, place.value)):
                flat[row * unit + start : row * unit + start + 32] = rows[b, p].reshape(-1)
        other.q = first.q
        np.testing.assert_array_equal(run(other, executor), found)


# What a result does not depend on ------------------------------------------------------------------------------------


@each_executor
@pytest.mark.parametrize(("window", "pool"), [(None, None), (9, Pool(16, before=16, section=1))])
def test_where_the_pages_lie(window, pool, executor):
    call = problem(rng_of(14), EDGES, 3, columns=36, window=window, pool=pool)
    pages = 1 + call.table.size
    rows = call.buffer[: pages * call.place.page_rows].reshape(pages, -1)
    to = rng_of(0).permutation(pages)
    moved = np.empty_like(rows)
    moved[to] = rows
    tail = call.buffer[pages * call.place.page_rows :]
    buffer = np.concatenate([moved.reshape(-1, call.buffer.shape[1]), tail])
    inside = (call.table >= 0) & (call.table < pages)
    table = np.where(inside, to[np.where(inside, call.table, 0)], call.table).astype(np.int32)
    there = dataclasses.replace(call, buffer=buffer, table=table)
    np.testing.assert_array_equal(run(there, executor), run(call, executor))


@each_executor
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_the_requests(dtype, executor):
    call = problem(rng_of(15), EDGES, 2, columns=36, dtype=dtype)
    order = rng_of(1).permutation(len(EDGES))
    moved = {name: getattr(call, name)[order] for name in ("q", "table", "positions", "lengths")}
    np.testing.assert_array_equal(run(dataclasses.replace(call, **moved), executor), run(call, executor)[order])


@pytest.mark.parametrize("executor", ["interpret", GPU])
@pytest.mark.parametrize(("window", "sizes"), [(None, SMALL), (50, SMALL), (None, SIZES)])
def test_the_lengths_of_the_other_requests(window, sizes, executor):
    """To the last bit, whether they are empty or fill the context."""
    lengths = np.array([0, 1, 33, 64, 100, 131, 144] if sizes is SMALL else [0, 1, 256, 700, 1024, 1025, 2048])
    call = problem(rng_of(16), lengths, 3, columns=36 if sizes is SMALL else 512, window=window)
    found = run(call, executor, sizes)
    for kept in range(len(lengths)):
        for other in (0, lengths.max()):
            changed = np.where(np.arange(len(lengths)) == kept, lengths, other).astype(np.int32)
            # Others read what is not theirs, NaN too.
            table = np.where(np.arange(len(lengths))[:, None] == kept, call.table, 0)
            there = dataclasses.replace(call, lengths=changed, table=table, positions=cases.queries_of(changed, 3))
            np.testing.assert_array_equal(run(there, executor, sizes)[kept], found[kept])


@pytest.mark.parametrize("executor", ["interpret", GPU])
def test_a_context_may_hold_anything_but_what_is_seen(executor):
    """Two poisons, the same bits."""
    call = problem(rng_of(17), EDGES, 3, columns=36, window=21, pool=Pool(64, before=64, section=1))
    poison = call.buffer.view(np.float32)
    poison = np.isnan(poison) | (poison == np.finfo(np.float32).max)
    for bits in (0, 0x7F7FFFFF, 0xFF800000, 0xFFFFFFFF):
        buffer = np.where(poison, np.uint32(bits), call.buffer)
        np.testing.assert_array_equal(run(dataclasses.replace(call, buffer=buffer), executor), run(call, executor))


# How work is cut -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "requests", "window", "found"),
    [
        ("float32", 48, None, (64, 1)),  # several programs a processor: small ones, nothing on its way beforehand
        ("float32", 48, 256, (64, 1)),
        ("float32", 1, 256, (64, 3)),  # fewer programs than processors
        ("bfloat16", 48, None, (128, 3)),
        ("bfloat16", 1, None, (128, 1)),  # parts of one block
    ],
)
def test_blocks_and_stages_of_crowded_programs(dtype, requests, window, found):
    sizes = dict(kv_heads=2, head_dim=64, value_dim=64, page_size=128)
    rows = PagedRows.of(jnp.zeros((128, 256), dtype), **sizes).place
    how = dict(by_slot=False, window=window, causal=True, scale=1.0, dtype=dtype)
    plan = Plan(B=requests, D=1, H=4, P=20, rows=rows, **how)
    assert (plan.block, plan.stages) == found


@pytest.mark.parametrize("executor", ["interpret", GPU])
def test_crowded_programs_against_the_oracle(executor):
    """Float32 with two query heads a K/V head, as an embedded draft has them: parts of several blocks each."""
    lengths = np.array([0, 1, 127, 128, 129, 700, 1279, 1280] * 6, np.int32)
    call = problem(rng_of(21), lengths, 1, columns=10, page_size=128, heads=2, kv_heads=1, head_dim=64)
    assert cases.plan_of(call).crowded
    check(call, executor, SIZES)


# Random problems -----------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    page_size, columns = draw(st.sampled_from([1, 2, 3, 4, 16])), draw(st.integers(1, 12))
    kv_heads, D = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    unit = draw(st.sampled_from([None, 8, 16, 64]))
    pool = unit and Pool(
        unit,
        before=unit * draw(st.integers(0, 2)),
        between=draw(st.integers(0, 20)),
        behind=draw(st.integers(0, 70)),
        section=draw(st.integers(0, 3)),
        bits=draw(st.booleans()),
    )
    return problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        draw(st.lists(st.integers(0, page_size * columns), min_size=1, max_size=5)),
        D,
        columns=columns,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 40)),
        value_dim=draw(st.integers(0, 40)),
        page_size=page_size,
        window=draw(st.none() | st.integers(1, 50)),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        pool=pool,
    )


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(problems())
def test_any_problem_interpreted(call):
    # In one or two elements the error of bfloat16 may be most of a row that is nearly zero.
    hypothesis.assume(call.q.dtype == np.float32 or call.place.out_dim >= 16)
    check(call, "interpret")


# That a fault would be seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["reference", "interpret"])
@pytest.mark.parametrize(
    "change", ["no window", "a window more", "a window less", "a key more", "a key less", "a head", "scale"]
)
def test_the_oracle_sees_a_wrong_call(change, executor):
    call = problem(rng_of(18), (3, 20, 43), 2, columns=12, window=7, causal="key" not in change)
    wrong = {
        "no window": {"window": None},
        "a window more": {"window": 8},
        "a window less": {"window": 6},
        "a key more": {"lengths": call.lengths + np.int32(1)},
        "a key less": {"lengths": call.lengths - np.int32(1)},
        "a head": {"place": dataclasses.replace(call.place, key=16)},
        "scale": {"scale": 0.26},
    }[change]
    found = run(dataclasses.replace(call, **wrong), executor)
    with pytest.raises(AssertionError, match=r"not finite|off by"):
        cases.assert_near(found, cases.attention(call))


@pytest.mark.parametrize("fault", ["a key behind the last", "a key before the window", "parts of equal weight"])
def test_the_oracle_sees_a_wrong_kernel(fault, monkeypatch):
    """A key that is read shows by its poison, though it is not counted."""
    span, combine = paged_kernel._span, paged_kernel._combine

    def wide(plan, *arguments):
        at, lo, hi, share = span(plan, *arguments)
        return (at, lo - 1 * (lo > 0), hi, share) if "before" in fault else (at, lo, hi + 1, share)

    def even(plan, before, sums, peaks, totals, *rest):
        combine(plan, before, sums, totals, totals, *rest)

    wrong = (paged_kernel, "_combine", even) if "weight" in fault else (paged_kernel, "_span", wide)
    monkeypatch.setattr(*wrong)
    call = problem(rng_of(19), (30, 101, 120), 2, columns=36, window=90)
    function = cases.compiled.__wrapped__(cases.plan_of(call, SMALL), "interpret")
    with pytest.raises(AssertionError, match=r"not finite|off by"):
        cases.assert_near(np.asarray(function(*call.arguments)), cases.attention(call))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 3, 3, 4))}, "q has 3 heads, kv 2"),
        ({"q": jnp.ones((2, 3, 2, 5))}, r"q has shape \(2, 3, 2, 5\): the rows take \[B, D, H, 4\]"),
        ({"q": jnp.ones((2, 3, 4))}, r"q has shape \(2, 3, 4\)"),
        ({"page_table": jnp.zeros((3, 4), jnp.int32)}, r"page_table is int32\[3, 4\]: .* give int32\[2, P\]"),
        ({"page_table": jnp.zeros((2,), jnp.int32)}, r"page_table is int32\[2\]"),
        ({"page_table": jnp.zeros((2, 4))}, r"page_table is float32\[2, 4\]"),
        ({"positions": jnp.zeros((2, 4), jnp.int32)}, r"positions is int32\[2, 4\]: .* give int32\[2, 3\]"),
        ({"positions": jnp.zeros((2,), jnp.int32)}, r"positions is int32\[2\]"),
        ({"cache_seqlens": jnp.zeros((3,), jnp.int32)}, r"cache_seqlens is int32\[3\]: .* give int32\[2\]"),
        ({"cache_seqlens": jnp.zeros((2,), jnp.uint32)}, r"cache_seqlens is uint32\[2\]"),
        ({"backend": "mosaic"}, "backend='mosaic' runs kernels of the lane language, which paged_attention is not"),
        ({"backend": "checked"}, "backend='checked' runs kernels of the lane language"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_refused(change, message):
    rows = PagedRows.of(jnp.zeros((8, 16)), kv_heads=2, head_dim=4, value_dim=4, page_size=2)
    call = {"q": jnp.ones((2, 3, 4, 4)), "rows": rows, "page_table": jnp.zeros((2, 4), jnp.int32)}
    call |= {"positions": jnp.zeros((2, 3), jnp.int32), "cache_seqlens": jnp.zeros((2,), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        paged_attention(**call | change)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="where there is a GPU, triton runs")
def test_triton_is_refused_where_it_cannot_run():
    call = problem(rng_of(20), (3,), columns=2)
    with pytest.raises(
        ValueError, match=r"backend='triton': it runs on arrays on a CUDA device; .* or name 'reference'"
    ):
        paged_attention(*call.arguments, backend="triton")


def test_other_dtypes_take_the_reference():
    call = problem(rng_of(21), (0, 9, 14), 2, columns=4)
    with jax.enable_x64(True):
        rows = PagedRows(jnp.asarray(call.buffer, jnp.float64), dataclasses.replace(call.place, dtype="float64"))
        arguments = jnp.asarray(call.q, jnp.float64), rows, *call.arguments[2:]
        out = paged_attention(*arguments, **call.settings)
        text = aot.lower_text(lambda *x: paged_attention(*x, **call.settings), *arguments)
    assert out.dtype == jnp.float64 and "triton" not in text
    cases.assert_near(np.asarray(out, np.float32), cases.attention(call))


# Programs for CUDA ---------------------------------------------------------------------------------------------------


def shapes(dtype="bfloat16", *, B=8, D=4, P=256, heads=8, sizes=(2, 64, 64), page_size=16, pool=None, rows=2**20):
    """(operands, place) of a call, without arrays; the first is passed through, in place."""
    numbers = dict(zip(("kv_heads", "head_dim", "value_dim"), sizes, strict=True))
    place, _, _, width = cases.place_of(pool, **numbers, page_size=page_size, dtype=dtype)
    stored = f"uint{8 * jnp.dtype(dtype).itemsize}" if pool and pool.bits else dtype
    arrays = ((), "int32"), ((B, D, heads, sizes[1]), dtype), ((rows, width), stored)
    arrays += ((B, P), "int32"), ((B, D), "int32"), ((B,), "int32")
    return [jax.ShapeDtypeStruct(*array) for array in arrays], place


def function_of(place, backend="triton", **settings):
    def call(passed, q, buffer, *arrays):
        return passed, paged_attention(q, PagedRows(buffer, place), *arrays, **settings, backend=backend)

    return call


PROGRAMS = {  # arguments of `shapes`, of the call, launches
    "a decode": ({}, {}, 2),
    "float32": ({"dtype": "float32"}, {}, 2),
    "float16": ({"dtype": "float16"}, {}, 2),
    "a window": ({}, {"window": 128}, 1),
    "the widest window of one part": ({}, {"window": 252}, 1),  # 255 keys of four rows
    "a window of two parts": ({}, {"window": 253}, 2),
    "a block draft": ({"D": 8}, {"causal": False}, 2),
    "a short context": ({"P": 8}, {}, 1),
    "one request": ({"B": 1, "D": 1}, {}, 2),
    "a chunk": ({"B": 1, "D": 512}, {}, 2),
    "a pool": ({"pool": Pool(64, before=128, section=5)}, {}, 2),
    "a pool of float32": ({"dtype": "float32", "pool": Pool(64, before=128)}, {}, 2),
    "small units": ({"pool": Pool(8, before=8, behind=8), "sizes": (2, 24, 40)}, {}, 2),
    "latent rows": ({"heads": 16, "sizes": (1, 576, 0), "pool": Pool(64, before=64, section=2)}, {}, 2),
    "latent rows in float32": ({"dtype": "float32", "heads": 16, "sizes": (1, 576, 0)}, {}, 2),
    "slots": ({"page_size": 1, "P": 2048, "D": 1}, {"causal": False}, 2),
    "odd widths": ({"sizes": (1, 80, 24)}, {}, 2),
}
each_program = pytest.mark.parametrize("name", PROGRAMS)


@each_program
@pytest.mark.parametrize("backend", [None, "triton"])
def test_lowers_for_cuda_without_a_plugin(name, backend):
    sizes, settings, launches = PROGRAMS[name]
    arrays, place = shapes(**sizes)
    text = aot.lower_text(function_of(place, backend, **settings), *arrays)
    assert text.count("@__gpu$xla.gpu.triton") == launches


def test_a_cpu_program_holds_no_trace_of_the_gpu_kernel():
    arrays, place = shapes()
    assert "triton" not in jax.jit(function_of(place, None)).lower(*arrays).as_text()


@each_program
def test_launches_and_no_copies_on_sm_90(name):
    """Whatever the lengths: they are no part of the program."""
    if reason := aot.missing():
        pytest.skip(reason)
    sizes, settings, launches = PROGRAMS[name]
    arrays, place = shapes(**sizes)
    compiled = aot.compile_for_h200(function_of(place, **settings), *arrays)
    assert dict(aot.launches(compiled)) == {"custom-call": launches}, compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < (2**28 + 2**24 if launches == 2 else 1024)


def global_loads(text):
    """PTX whose asynchronous copies from global memory are plain loads: all that is asked of them is their address."""
    text = re.sub(
        r"cp\.async\.c[ag]\.shared\.global\S*\s*\[[^]]*\],\s*(\[[^]]*\])[^;]*;", r"ld.global.b32 %copied, \1;", text
    )
    return re.sub(r"^.*\bstmatrix\..*$", "", text, flags=re.MULTILINE)


LARGE = {  # of more than 4 GiB; contexts of one part, so that no index is a product of two numbers
    "a pool": {"pool": Pool(64, before=128, section=5), "rows": 2**27},
    "small units": {"pool": Pool(8, before=8, behind=8), "rows": 2**31 - 1},
    "a buffer of its own": {"rows": 2**25},
    "float32": {"dtype": "float32", "pool": Pool(64), "rows": 2**27},
}


@pytest.mark.parametrize("name", LARGE)
def test_pools_past_4_gib_have_64_bit_offsets_on_sm_90(name, tmp_path):
    """All that moves an address by a row of the buffer or more counts rows, in int32, until the number has 64 bits."""
    if reason := aot.missing():
        pytest.skip(reason)
    arrays, place = shapes(**LARGE[name], P=16)
    row = arrays[2].shape[1] * arrays[2].dtype.itemsize
    assert arrays[2].shape[0] * row > 2**32
    aot.compile_for_h200(function_of(place), *arrays, dump=tmp_path)
    text = global_loads(aot.ptx(tmp_path)["paged_attention"])
    assert ptx.row_offset_bits(text, 1, row) == 64
    assert {unit for step, unit in ptx.address_steps(text)[1] if step >= row} == {row}


AHEAD, AT_ONCE = ("cp.async.cg.", "cp.async.ca."), ("ld.global.v4.b32", "ld.global.b32")  # of 16 bytes, and of 4
VECTORS = ("a decode", "float32", "a pool", "a pool of float32", "small units", "latent rows", "odd widths")


@pytest.mark.parametrize("name", VECTORS)
def test_rows_are_copied_16_bytes_a_thread_on_sm_90(name, tmp_path):
    """By copies that run ahead of the products, in float32 and in parts of one block by loads; few, of page tables, are
    smaller."""
    if reason := aot.missing():
        pytest.skip(reason)
    sizes, settings, _ = PROGRAMS[name]
    arrays, place = shapes(**sizes)
    aot.compile_for_h200(function_of(place, **settings), *arrays, dump=tmp_path)
    text = aot.ptx(tmp_path)["paged_attention"]
    assert "ld.global.b16" not in text
    wide, small = AT_ONCE if name in ("odd widths", "float32", "a pool of float32") else AHEAD
    assert text.count(wide) > text.count(small)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("pool", [Pool(64), Pool(8, before=8, section=1), Pool(16, behind=700, section=3)])
def test_no_row_of_a_pool_passes_31_bits(pool, page_size):
    """A pool has at most 2^31 - 1 units, and whole pages: so many rows are int32 numbers, up to the last one."""
    sizes = dict(kv_heads=2, head_dim=24, value_dim=40, page_size=page_size)
    place, *_ = cases.place_of(pool, **sizes, dtype="bfloat16")
    last = (2**31 - 1) // place.page_rows - 1
    entry = last * place.page_rows + (page_size - 1) * place.entry_rows
    assert 2**31 - 2 * place.page_rows < entry + (place.end - 1) // pool.unit < 2**31


@pytest.mark.gpu
def test_the_last_page_past_2_to_the_31_elements():
    units, page_size = 2**26, 4
    place = RowPlace(1, 64, 64, page_size, 2 * page_size, 2, 0, 64, "bfloat16")
    last = units // place.page_rows - 1
    buffer = jnp.full((units, 64), jnp.uint16(0xFFFF))  # NaN
    fill = jax.jit(lambda b, rows: b.at[-8:].set(rows), donate_argnums=0)
    rows = jnp.broadcast_to(jnp.arange(1.0, 5)[:, None, None], (4, 2, 64)).reshape(8, 64).astype(jnp.bfloat16)
    buffer = fill(buffer, jax.lax.bitcast_convert_type(rows, jnp.uint16))
    arrays = jnp.array([[last]]), jnp.array([[3]]), jnp.array([4])
    out = paged_attention(jnp.zeros((1, 1, 4, 64), jnp.bfloat16), PagedRows(buffer, place), *arrays, backend="triton")
    assert (out == 2.5).all()

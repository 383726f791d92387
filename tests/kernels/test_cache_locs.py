"""extend_cache_locs: worked examples, edges, views, clear errors."""

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import int32

from pallas_kernels import extend_cache_locs

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)


def agree(out, backend, **call):
    expected = np.array(out)
    oracle.extend_locs(expected, **call)
    np.testing.assert_array_equal(cases.run(extend_cache_locs, out, **call, backend=backend), expected)


# Worked examples -----------------------------------------------------------------------------------------------------

TOKENS = int32([0] * 5, [20, 21, 22, 23, 12], [4, 5, -1, 6, 99])


@each_backend
def test_runs_follow_each_other_and_keep_negative_ids(backend):
    call = {"start": int32(1, 3, 0, 1), "end": int32(4, 3, 0, 5), "req_rows": int32(1, 2, 0, 2), "source": TOKENS}
    locs = cases.run(extend_cache_locs, cases.stale(9), **call, backend=backend)
    assert locs.tolist() == [21, 22, 23, 5, -1, 6, 99, -7, -7]


@each_backend
def test_a_table_of_pages(backend):
    locs = cases.run(
        extend_cache_locs,
        cases.stale(8),
        start=int32(3, 0),
        end=int32(6, 5),
        req_rows=int32(1, 2),
        source=int32([0, 0], [5, 9], [7, -1]),
        granularity="page",
        page_size=4,
        backend=backend,
    )
    assert locs.tolist() == [23, 36, 37, 28, 29, 30, 31, -1]


@quick_backends
def test_an_end_before_its_start_is_an_empty_run(backend):
    call = {"start": int32(4, 1), "end": int32(2, 3), "req_rows": int32(1, 1), "source": TOKENS}
    assert cases.run(extend_cache_locs, cases.stale(3), **call, backend=backend).tolist() == [21, 22, -7]


@quick_backends
def test_positions_the_table_does_not_reach_have_the_sink(backend):
    call = {"start": int32(3, -2), "end": int32(7, 1), "req_rows": int32(1, 1), "source": TOKENS}
    locs = cases.run(extend_cache_locs, cases.stale(8), **call, backend=backend)
    assert locs.tolist() == [23, 12, 0, 0, 0, 0, 20, -7]


@quick_backends
def test_rows_outside_the_table_read_the_sink_row(backend):
    source = int32([7, 8], [20, 21])
    call = {"start": int32(0, 0, 0), "end": int32(2, 2, 2), "req_rows": int32(-1, 2, 1), "source": source}
    assert cases.run(extend_cache_locs, cases.stale(6), **call, backend=backend).tolist() == [7, 8, 7, 8, 20, 21]


@quick_backends
def test_a_destination_shorter_than_its_tokens_is_cut(backend):
    call = {"start": int32(1, 3, 0, 1), "end": int32(4, 3, 0, 5), "req_rows": int32(1, 2, 0, 2), "source": TOKENS}
    assert cases.run(extend_cache_locs, cases.stale(5), **call, backend=backend).tolist() == [21, 22, 23, 5, -1]


# Edges ---------------------------------------------------------------------------------------------------------------


@quick_backends
@pytest.mark.parametrize(("granularity", "page_size"), [("page", 1), ("page", 4), ("token", 4), ("page", 64)])
def test_lengths_around_the_edges_of_pages_and_tables(granularity, page_size, backend):
    p = cases.problem(page_size, 7, columns=5)
    source = p["pages"] if granularity == "page" else cases.as_tokens(p["pages"], page_size)
    start = int32(0, 0, page_size - 1, 1, 1, 0, page_size)
    call = {"end": p["lengths"], "req_rows": p["rows"], "source": source}
    call |= {"granularity": granularity, "page_size": page_size}
    count = int(np.maximum(p["lengths"] - start, 0).sum())
    for moved in (start, start + 1, start * 0):  # the destination has cells to spare, to spare, and too few
        agree(cases.stale(count + 2), backend, start=moved.astype(np.int32), **call)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_without_rows_or_cells_nothing_is_written(backend):
    none = np.zeros(0, np.int32)
    assert extend_cache_locs(none, none, none, TOKENS, cases.stale(2), backend=backend).tolist() == [-7, -7]
    one = int32(1)
    assert extend_cache_locs(one * 0, one, one, TOKENS, cases.stale(0), backend=backend).shape == (0,)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_long_requests_among_more_rows_than_one_vector(backend):
    """Runs of several blocks, and offsets summed over 1,100 rows in two turns."""
    rng, batch = np.random.default_rng(4), 1100
    start = rng.integers(0, 50, batch).astype(np.int32)
    counts = rng.integers(-2, 3, batch)
    counts[[2, 1030, 1099]] = 700, 300, 257
    call = {"start": start, "end": (start + counts).astype(np.int32), "req_rows": np.arange(batch) % 3}
    call |= {"source": rng.integers(0, 9999, (3, 800)).astype(np.int32)}
    agree(cases.stale(int(np.maximum(counts, 0).sum()) + 2), backend, **call)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    call = {"start": int32(1, 3, 0, 1), "end": int32(4, 3, 0, 5), "req_rows": int32(1, 2, 0, 2), "source": TOKENS}
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(v, jnp.int64) for k, v in call.items()}
        locs = cases.run(extend_cache_locs, cases.stale(9), **wide, backend=backend)
    assert locs.tolist() == [21, 22, 23, 5, -1, 6, 99, -7, -7] and locs.dtype == np.int32


# Views ---------------------------------------------------------------------------------------------------------------

VIEWS = {  # name: (buffer, its columns, offset, strides)
    "start": ("runs", 2, 2, (2,)),
    "end": ("runs", 2, 3, (2,)),
    "req_rows": ("rows", None, 3, (1,)),
    "source": ("source", None, 5, (41, 2)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("place", [("out", None, 3, (2,)), ("out", 3, 4, (3,))])
def test_views_of_wider_buffers(place, backend):
    p = cases.problem(4, 7, columns=5)
    arrays = {"start": int32(0, 0, 3, 1, 1, 0, 4), "end": p["lengths"], "req_rows": p["rows"]}
    arrays["source"] = cases.as_tokens(p["pages"], 4)
    expected = np.array(cases.stale(50))
    oracle.extend_locs(expected, **arrays)
    out, expected = (cases.in_buffers({"out": a}, {"out": place}) for a in (cases.stale(50), expected))
    actual = cases.run(extend_cache_locs, **out, **cases.in_buffers(arrays, VIEWS), backend=backend)
    cases.assert_buffers_equal({"out": actual}, expected)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 6}, "page_size=6: it must be a power of two"),
        ({"granularity": "row"}, "granularity='row' is unknown"),
        ({"backend": "cpu"}, "backend='cpu' is unknown"),
        ({"start": np.ones(2)}, "start is float64: it must be an array of integers"),
        ({"start": np.ones((2, 1), np.int32)}, r"start has shape \(2, 1\)"),
        ({"end": int32(1, 1, 1)}, "end has 3 rows for a batch of 2"),
        ({"end": np.ones(2)}, "end is float64"),
        ({"req_rows": int32(1)}, "req_rows has 1 rows for a batch of 2"),
        ({"source": int32(1, 2)}, r"source has shape \(2,\): it must have 2 dimensions"),
        ({"source": np.zeros((2, 0), np.int32)}, r"source has shape \(2, 0\): it needs a row 0"),
        ({"out": None}, "out is NoneType: a destination must be int32"),
        ({"out": jnp.zeros(4)}, r"out is float32\[4\]: a destination must be int32\[N\]"),
        ({"out": cases.stale(2, 2)}, r"out is int32\[2, 2\]: a destination must be int32\[N\]"),
    ],
)
def test_refused(change, message):
    call = {"start": int32(0, 0), "end": int32(1, 1), "req_rows": int32(1, 1), "source": TOKENS, "out": cases.stale(4)}
    with pytest.raises(ValueError, match=message):
        extend_cache_locs(**(call | change))


def test_one_request_is_left_to_the_reference_unless_a_kernel_is_named():
    """Measured faster there on a GPU; the program compiled for one says which it is."""

    def lowered(batch, backend):
        def call(out, start, end, rows, source):
            return extend_cache_locs(start, end, rows, source, out, backend=backend)

        return aot.lower_text(call, *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((9,), *3 * [(batch,)], (3, 40))))

    triton = "__gpu$xla.gpu.triton"
    assert [triton in lowered(*call) for call in ((1, None), (2, None), (1, "triton"))] == [False, True, True]

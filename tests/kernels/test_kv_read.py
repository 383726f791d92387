"""kv_read_table and kv_read_stream: worked examples, edges, views, clear errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import int32, sparse

from pallas_kernels import kv_read_stream, kv_read_table

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
NONE = np.zeros(0, np.int32)


def agree(function, expect, out, backend, **call):
    """What the function writes, after comparing it with the oracle."""
    expected = np.array(out)
    expect(expected, **call)
    actual = cases.run(function, out, **call, backend=backend)
    np.testing.assert_array_equal(actual, expected)
    return actual


# Worked examples -----------------------------------------------------------------------------------------------------

PAGES = {
    "req_rows": int32(1, 2),
    "source": int32([0, 0, 0], [5, 9, 2], [4, 7, 1]),
    "page_size": 4,
    "v2p": sparse(10, {0: 0, 5: 7, 9: -1, 2: 3, 4: 1, 7: 8, 1: 2}),
}


@each_backend
def test_table_of_one_pool(backend):
    call = {"seq_lens": int32(6, 9), "zero_tail": False, "backend": backend}
    table = cases.run(kv_read_table, cases.stale(2, 4), **PAGES, **call)
    assert table.tolist() == [[7, 0, -7, -7], [1, 8, 2, -7]]


@quick_backends
def test_table_zeroes_its_tail_up_to_max_pages(backend):
    call = {"seq_lens": int32(1, 6), "seq_len_delta": 3, "zero_tail": True, "max_pages": 3, "backend": backend}
    table = cases.run(kv_read_table, cases.stale(2, 4), **PAGES, **call)
    assert table.tolist() == [[7, 0, 0, -7], [1, 8, 2, -7]]


@quick_backends
def test_table_without_a_map_holds_virtual_pages(backend):
    call = {"req_rows": int32(1, 0), "source": int32([0, 0, 0], [6, -1, 2]), "page_size": 2, "zero_tail": False}
    table = cases.run(kv_read_table, cases.stale(2, 3), seq_lens=int32(5, 1), **call, backend=backend)
    assert table.tolist() == [[6, 0, 2], [0, -7, -7]]


TOKENS = {
    "req_rows": int32(1),
    "source": int32([0] * 8, [20, 21, 22, 23, 36, 37, 38, 39]),
    "granularity": "token",
    "page_size": 4,
    "full_to_swa": sparse(40, {20: 9, 36: 14, 5: 100}),  # the token is translated, then divided: 9 // 4, 14 // 4
}


@each_backend
def test_static_map_of_tokens(backend):
    call = TOKENS | {"seq_lens": int32(5), "backend": backend}
    assert cases.run(kv_read_table, cases.stale(1, 3), **call, zero_tail=True).tolist() == [[2, 3, 0]]
    stream = cases.run(kv_read_stream, cases.stale(6), **call, indptr=int32(0, 6))
    assert stream.tolist() == [8, 9, 10, 11, 12, -7]


@each_backend
def test_stream_of_two_requests_with_gaps(backend):
    call = PAGES | {"seq_lens": int32(6, 3), "indptr": int32(1, 7, 12), "backend": backend}
    stream = cases.run(kv_read_stream, cases.stale(13), **call)
    assert stream.tolist() == [-7, 28, 29, 30, 31, 0, 1, 4, 5, 6, -7, -7, -7]


@each_backend
def test_stream_from_the_start_of_a_window(backend):
    call = PAGES | {"seq_lens": int32(6, 3), "indptr": int32(1, 7, 12), "backend": backend}
    stream = cases.run(kv_read_stream, cases.stale(13), **call, kv_start=int32(3, 6))
    assert stream.tolist() == [-7, 31, 0, 1, 2, 3, 12, 34, 35, 8, -7, -7, -7]


@quick_backends
@pytest.mark.parametrize(
    ("indptr", "expected"),
    [
        ([0, 4, 6], [28, 29, 30, 31, 4, 5, -7, -7]),  # each request has fewer cells than tokens
        ([0, 6, 9], [28, 29, 30, 31, 0, 1, 4, 5]),  # the stream ends before the last token
        ([8, 20, 30], [-7] * 8),  # all of it past the end
        ([0, 0, 3], [4, 5, 6, -7, -7, -7, -7, -7]),  # a request without cells
    ],
)
def test_stream_shorter_than_its_tokens(indptr, expected, backend):
    call = PAGES | {"seq_lens": int32(6, 3), "indptr": int32(*indptr), "backend": backend}
    assert cases.run(kv_read_stream, cases.stale(8), **call).tolist() == expected


# Edges ---------------------------------------------------------------------------------------------------------------


@quick_backends
@pytest.mark.parametrize(
    ("page_size", "style", "delta"), [(1, "v2p", 0), (4, "full_to_swa", 5), (4, None, 2), (64, "v2p", 65)]
)
def test_lengths_around_the_edges_of_pages_and_tables(page_size, style, delta, backend):
    p = cases.problem(page_size, 7, columns=5)
    maps = {"v2p": p["swa"], "full_to_swa": cases.as_tokens(p["swa"][None], page_size)[0, :-1]}
    call = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "page_size": page_size}
    call |= {} if style is None else {style: maps[style]}
    table = call | {"seq_len_delta": delta, "zero_tail": style is None}  # with a delta some lengths pass the table
    agree(kv_read_table, oracle.read_table, cases.stale(7, 6), backend, **table)
    indptr = (np.concatenate([[0], np.cumsum(p["lengths"])]) + 2 * np.arange(8)).astype(np.int32)
    starts = int32(0, 3, 0, page_size, 1, page_size - 1, 5 * page_size)
    stream = call | {"indptr": indptr} | ({"kv_start": starts} if style else {})
    agree(kv_read_stream, oracle.read_stream, cases.stale(int(indptr[-1]) + 1), backend, **stream)


@quick_backends
def test_token_tables_read_what_page_tables_read(backend):
    p = cases.problem(4, 7, columns=5)
    call = {"seq_lens": p["lengths"], "req_rows": p["rows"], "page_size": 4, "v2p": p["full"]}
    tokens = call | {"source": cases.as_tokens(p["pages"], 4), "granularity": "token"}
    call["source"] = p["pages"]
    indptr = np.concatenate([[0], np.cumsum(p["lengths"])]).astype(np.int32)
    by_page = agree(kv_read_table, oracle.read_table, cases.stale(7, 5), backend, **call, zero_tail=True)
    by_token = cases.run(kv_read_table, cases.stale(7, 5), **tokens, zero_tail=True, backend=backend)
    np.testing.assert_array_equal(by_token, by_page)
    by_page = agree(kv_read_stream, oracle.read_stream, cases.stale(60), backend, **call, indptr=indptr)
    by_token = cases.run(kv_read_stream, cases.stale(60), **tokens, indptr=indptr, backend=backend)
    np.testing.assert_array_equal(by_token, by_page)


@quick_backends
def test_rows_outside_the_source_read_the_sink_row(backend):
    call = PAGES | {"seq_lens": int32(5, 5), "req_rows": int32(-1, 3), "backend": backend}
    assert cases.run(kv_read_table, cases.stale(2, 4), **call, zero_tail=True).tolist() == [[0] * 4] * 2
    stream = cases.run(kv_read_stream, cases.stale(10), **call, indptr=int32(0, 5, 10))
    assert stream.tolist() == [0, 1, 2, 3, 0] * 2


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_without_rows_or_cells_nothing_is_written(backend):
    call = PAGES | {"seq_lens": NONE, "req_rows": NONE, "backend": backend}
    assert kv_read_table(**call, zero_tail=True, out=cases.stale(0, 3)).shape == (0, 3)
    assert kv_read_stream(**call, indptr=int32(0), out=cases.stale(3)).tolist() == [-7, -7, -7]
    call = PAGES | {"seq_lens": int32(5, 5), "backend": backend}
    assert kv_read_table(**call, zero_tail=True, out=cases.stale(2, 0)).shape == (2, 0)
    assert kv_read_table(**call, zero_tail=True, max_pages=0, out=cases.stale(2, 1)).tolist() == [[-7], [-7]]
    assert kv_read_stream(**call, indptr=int32(0, 5, 10), out=cases.stale(0)).shape == (0,)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_long_requests_among_many_take_several_turns(backend):
    """Two programs a request of 256 tokens a turn; some requests take five turns, most none or one."""
    rng, batch = np.random.default_rng(1), 140
    lengths = rng.integers(0, 20, batch).astype(np.int32)
    lengths[[3, 77, 139]] = 1100, 513, 256
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    call = {"seq_lens": lengths, "req_rows": rng.integers(0, 3, batch).astype(np.int32), "indptr": indptr}
    call |= {"source": rng.integers(0, 900, (3, 1200)).astype(np.int32), "page_size": 1}
    call |= {"v2p": rng.integers(-1, 900, 900).astype(np.int32), "kv_start": np.full(batch, 60, np.int32)}
    agree(kv_read_stream, oracle.read_stream, cases.stale(int(indptr[-1]) + 3), backend, **call)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    call = {k: v for k, v in PAGES.items() if k != "page_size"} | {"seq_lens": int32(6, 3)}
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(v, jnp.int64) for k, v in call.items()} | {"page_size": 4, "backend": backend}
        table = cases.run(kv_read_table, cases.stale(2, 4), **wide, zero_tail=False)
        wide |= {k: jnp.asarray(v, jnp.int64) for k, v in {"indptr": [1, 7, 12], "kv_start": [3, 6]}.items()}
        stream = cases.run(kv_read_stream, cases.stale(13), **wide)
    assert table.tolist() == [[7, 0, -7, -7], [1, -7, -7, -7]]
    assert stream.tolist() == [-7, 31, 0, 1, 2, 3, 12, 34, 35, 8, -7, -7, -7]
    assert table.dtype == stream.dtype == np.int32


# Views ---------------------------------------------------------------------------------------------------------------

VIEWS = {  # name: (buffer, its columns, offset, strides)
    "seq_lens": ("requests", None, 3, (3,)),
    "req_rows": ("requests", None, 4, (3,)),
    "kv_start": ("requests", None, 5, (3,)),
    "indptr": ("indptr", 3, 1, (3,)),
    "source": ("source", 9, 11, (9, 1)),
    "v2p": ("maps", 2, 1, (2,)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("place", [("out", None, 5, (13, 2)), ("out", 8, 10, (8, 1))])
def test_table_inside_a_wider_buffer(place, backend):
    p = cases.problem(4, 7, columns=5)
    arrays = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "v2p": p["full"]}
    expected = np.array(cases.stale(7, 5))
    oracle.read_table(expected, **arrays, page_size=4, zero_tail=False)
    views = cases.in_buffers(arrays, {k: v for k, v in VIEWS.items() if k in arrays})
    out, expected = (cases.in_buffers({"out": a}, {"out": place}) for a in (cases.stale(7, 5), expected))
    actual = cases.run(kv_read_table, **out, **views, page_size=4, zero_tail=False, backend=backend)
    cases.assert_buffers_equal({"out": actual}, expected)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("place", [("out", None, 3, (2,)), ("out", 3, 4, (3,))])
def test_stream_inside_a_wider_buffer(place, backend):
    p = cases.problem(4, 7, columns=5)
    indptr = (np.concatenate([[0], np.cumsum(p["lengths"])]) + np.arange(8)).astype(np.int32)
    arrays = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "v2p": p["full"]}
    arrays |= {"indptr": indptr, "kv_start": int32(0, 3, 0, 4, 1, 3, 2)}
    expected = np.array(cases.stale(60))
    oracle.read_stream(expected, **arrays, page_size=4)
    views = cases.in_buffers(arrays, VIEWS)
    out, expected = (cases.in_buffers({"out": a}, {"out": place}) for a in (cases.stale(60), expected))
    actual = cases.run(kv_read_stream, **out, **views, page_size=4, backend=backend)
    cases.assert_buffers_equal({"out": actual}, expected)


# Errors --------------------------------------------------------------------------------------------------------------

ONE, MAP = np.ones(2, np.int32), np.zeros(5, np.int32)
CALL = {"seq_lens": ONE, "req_rows": ONE, "source": np.zeros((3, 4), np.int32), "page_size": 4}


@pytest.mark.parametrize("function", [kv_read_table, kv_read_stream])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, "page_size=48: it must be a power of two"),
        ({"granularity": "pages"}, "granularity='pages' is unknown"),
        ({"backend": "gpu"}, "backend='gpu' is unknown"),
        ({"v2p": MAP, "full_to_swa": MAP}, "v2p and full_to_swa were given: .* one of them at most"),
        ({"v2p": np.zeros((5, 2), np.int32)}, r"v2p has shape \(5, 2\): one table takes one map; give a View"),
        ({"full_to_swa": np.zeros(0, np.int32)}, "full_to_swa has no rows"),
        ({"full_to_swa": np.zeros(5)}, "full_to_swa is float64"),
        ({"seq_lens": np.ones(2)}, "seq_lens is float64: it must be an array of integers"),
        ({"seq_lens": np.ones((2, 1), np.int32)}, r"seq_lens has shape \(2, 1\)"),
        ({"req_rows": np.ones(1, np.int32)}, "req_rows has 1 rows for a batch of 2"),
        ({"source": MAP}, r"source has shape \(5,\): it must have 2 dimensions"),
        ({"source": np.zeros((0, 4), np.int32)}, r"source has shape \(0, 4\): it needs a row 0"),
        ({"out": None}, "out is NoneType: a destination must be int32"),
        ({"out": cases.stale(2, 4, 1)}, r"out is int32\[2, 4, 1\]: a destination must be int32"),
    ],
)
def test_refused(function, change, message):
    own = {"zero_tail": True, "out": cases.stale(2, 4)}
    if function is kv_read_stream:
        own = {"indptr": int32(0, 4, 8), "out": cases.stale(8)}
    with pytest.raises(ValueError, match=message):
        function(**(CALL | own | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len_delta": -2}, "seq_len_delta=-2: it must be >= 0"),
        ({"seq_len_delta": np.ones(2, np.int32)}, r"seq_len_delta is int32\[2\]: it must be one integer"),
        ({"max_pages": 5}, "max_pages=5: it must be between 0 and the width of the page table, 4"),
        ({"max_pages": 1.0}, "max_pages=1.0: it must be an integer"),
        ({"out": cases.stale(3, 4)}, r"out is int32\[3, 4\]: a destination must be int32\[2, P\]"),
        ({"out": cases.stale(8)}, r"out is int32\[8\]: a destination must be int32\[2, P\]"),
        ({"out": jnp.zeros((2, 4))}, r"out is float32\[2, 4\]: a destination must be int32\[2, P\]"),
    ],
)
def test_table_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kv_read_table(**(CALL | {"zero_tail": True, "out": cases.stale(2, 4)} | change))


def test_zero_tail_has_no_default():
    with pytest.raises(TypeError, match="zero_tail"):
        kv_read_table(**CALL, out=cases.stale(2, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": int32(0, 4)}, "indptr has 2 entries for a batch of 2: it needs 3"),
        ({"indptr": np.zeros(3)}, "indptr is float64"),
        ({"kv_start": int32(0, 0, 0)}, "kv_start has 3 rows for a batch of 2"),
        ({"kv_start": np.zeros((2, 1), np.int32)}, r"kv_start has shape \(2, 1\)"),
        ({"out": jnp.zeros(8)}, r"out is float32\[8\]: a destination must be int32\[N\]"),
        ({"out": cases.stale(2, 4)}, r"out is int32\[2, 4\]: a destination must be int32\[N\]"),
    ],
)
def test_stream_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kv_read_stream(**(CALL | {"indptr": int32(0, 4, 8), "out": cases.stale(8)} | change))

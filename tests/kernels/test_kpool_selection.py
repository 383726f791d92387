"""kpool_append_tail and kpool_ragged_layout against loops: worked rows, edges, views, dead cells, clear errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_kpool as kpool
import numpy as np
import pytest
from kernel_cases import STALE, int32

from pallas_kernels import RaggedLayout, View, checked, kpool_append_tail, kpool_ragged_layout
from pallas_kernels import kpool_selection as module

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)

# kpool_append_tail ----------------------------------------------------------------------------------------------------


def oracle_tail(topk_result, *rest, pool, **arguments):
    out = np.empty((len(topk_result), topk_result.shape[1] + pool - 1), np.int32)
    kpool.append_tail(out, topk_result, *rest, pool=pool, **arguments)
    return out


def tail_problem(lengths, K, pool, *, columns=None, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    arguments = {
        "topk_result": rng.integers(0, 10**6, (lengths.size, K)).astype(np.int32),
        "seq_lens": lengths.astype(np.int32),
        "pool_lens": (lengths // pool).astype(np.int32),
    }
    if columns is not None:
        arguments["page_table"] = rng.integers(1, 10**6, (lengths.size, columns)).astype(np.int32)
    return arguments


def append(arguments, pool, backend):
    rows, K = arguments["topk_result"].shape
    return cases.run(kpool_append_tail, cases.stale(rows, K + pool - 1), **arguments, pool=pool, backend=backend)


def check_tail(arguments, pool, backend):
    np.testing.assert_array_equal(append(arguments, pool, backend), oracle_tail(**arguments, pool=pool))


@each_backend
def test_the_tail_stands_right_behind_the_history(backend):
    """E = 5003 of pools of 4 and a budget of 8 tokens: 1250 pools, two of which are selected, and a tail of three."""
    arguments = {
        "topk_result": int32([12, 13, 14, 15, 4996, 4997, 4998, 4999], [4, 5, 6, 7, 9, 9, 9, 9], [9] * 8, [9] * 8),
        "seq_lens": int32(5003, 6, 2, 0),
        "pool_lens": int32(1250, 1, 0, 0),
    }
    assert append(arguments, 4, backend).tolist() == [
        [12, 13, 14, 15, 4996, 4997, 4998, 4999, 5000, 5001, 5002],
        [4, 5, 6, 7, 4, 5, -1, -1, -1, -1, -1],
        [0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1] * 11,
    ]


@quick_backends
@pytest.mark.parametrize(("K", "pool"), [(8, 1), (6, 2), (16, 4), (16, 8)])
def test_every_length(K, pool, backend):
    """There are dsa_len(E) tokens, side by side; -1 is behind them alone."""
    lengths = np.arange(2 * K + 3 * pool)
    for columns in (None, 2 * K + 3 * pool):
        arguments = tail_problem(lengths, K, pool, columns=columns)
        check_tail(arguments, pool, backend)
    count = np.minimum(lengths // pool * pool, K) + lengths % pool
    found = append(arguments, pool, backend) >= 0
    np.testing.assert_array_equal(found, np.arange(found.shape[1]) < count[:, None])


@quick_backends
def test_pools_of_one_token_have_no_tail(backend):
    """What is left is plain selection of tokens: the first min(E, K) columns, -1 behind."""
    arguments = {
        "topk_result": int32(*[[5, 2, 7, 1]] * 4),
        "seq_lens": int32(0, 3, 4, 9),
        "pool_lens": int32(0, 3, 4, 9),
    }
    assert append(arguments, 1, backend).tolist() == [[-1] * 4, [5, 2, 7, -1], [5, 2, 7, 1], [5, 2, 7, 1]]


@each_backend
def test_rows_of_several_programs(backend):
    lengths = [0, 3, 4, 1023, 1026, 2044, 2047, 2048, 2049, 2051, 2052, 2055, 9003]
    for columns in (None, 9003):
        check_tail(tail_problem(lengths, 2048, 4, columns=columns), 4, backend)


@quick_backends
def test_tokens_past_the_table_are_the_sink(backend):
    arguments = tail_problem([5, 6, 7, 13, 15], 4, 4, columns=6)
    check_tail(arguments, 4, backend)
    assert append(arguments, 4, backend)[2, 4:].tolist() == [*arguments["page_table"][2, 4:], 0]


def test_only_the_selected_columns_and_the_tail_of_the_table_are_read():
    lengths = np.array([0, 3, 9, 16, 19, 30])
    arguments = tail_problem(lengths, 16, 4, columns=32)
    history, columns = np.minimum(lengths // 4 * 4, 16)[:, None], np.arange(32)
    dead = {
        "topk_result": columns[:16] >= history,
        "page_table": (columns < lengths[:, None] // 4 * 4) | (columns >= lengths[:, None]),
    }
    with checked.declare(dead=dead, seed=3):
        check_tail(arguments, 4, "checked")


@each_backend
def test_rows_that_make_no_sense_touch_nothing_outside(backend):
    """Lengths that contradict each other: the row has what it can, within its columns."""
    arguments = {
        "topk_result": np.arange(32, dtype=np.int32).reshape(4, 8),
        "seq_lens": int32(-5, 2**31 - 1, 3, 100),
        "pool_lens": int32(0, 1, -2, 3),
        "page_table": np.full((4, 5), 7, np.int32),
    }
    rows = append(arguments, 4, backend)
    assert rows.tolist() == [
        [-1] * 11,
        [8, 9, 10, 11, 7, 0, 0, -1, -1, -1, -1],
        [7, 7, 7, -1, -1, -1, -1, -1, -1, -1, -1],
        [24, 25, 26, 27, 28, 29, 30, 31, 0, 0, 0],
    ]


@quick_backends
def test_views_and_wide_integers(backend):
    arguments = tail_problem([9, 0, 35, 18], 8, 4, columns=40)
    want = oracle_tail(**arguments, pool=4)
    places = {
        "topk_result": ("a", None, 3, (30, 2)),
        "seq_lens": ("a", None, 20, (30,)),
        "pool_lens": ("a", None, 21, (30,)),
        "page_table": ("b", 50, 55, (100, 1)),
    }
    out = cases.in_buffers({"out": np.full((4, 11), STALE, np.int32)}, {"out": ("o", 27, 29, (27, 2))})
    expected = cases.in_buffers({"out": want}, {"out": ("o", 27, 29, (27, 2))})
    call = cases.in_buffers(arguments, places) | {"pool": 4, "backend": backend}
    cases.assert_buffers_equal({"out": cases.run(kpool_append_tail, out["out"], **call)}, expected)
    wide = {name: array.astype(np.int64) for name, array in arguments.items()}
    np.testing.assert_array_equal(append(wide, 4, backend), want)


@quick_backends
def test_no_rows(backend):
    assert append(tail_problem([], 8, 4), 4, backend).shape == (0, 11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": 0}, "pool=0: it must be 1 or more"),
        ({"pool": 3}, "topk_result has 8 columns: it needs whole pools of 3 tokens"),
        ({"topk_result": np.ones((2, 0), np.int32)}, "topk_result has 0 columns: it needs whole pools of 4 tokens"),
        ({"topk_result": np.ones((2, 8))}, "topk_result is float64: it must be an array of integers"),
        ({"seq_lens": int32(1, 2, 3)}, "seq_lens has 3 rows for a batch of 2"),
        ({"pool_lens": int32(1)}, "pool_lens has 1 rows for a batch of 2"),
        ({"out": cases.stale(2, 8)}, r"out is int32\[2, 8\]: a destination must be int32\[2, 11\]"),
        ({"out": View(cases.stale(60), 0, (2, 11), (5, 1))}, "so that entries share cells"),
        ({"page_table": np.ones((2, 0), np.int32)}, "page_table has no columns"),
        ({"page_table": np.ones((3, 4), np.int32)}, "page_table has 3 rows for a batch of 2"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_tail_refused(change, message):
    call = tail_problem([5, 6], 8, 4) | {"out": cases.stale(2, 11), "pool": 4} | change
    with pytest.raises(ValueError, match=message):
        kpool_append_tail(**call)


# kpool_ragged_layout --------------------------------------------------------------------------------------------------


def ragged_problem(pages, rows, columns, *, pool=4, total_rows=None, seed=0):
    rng = np.random.default_rng(seed)
    pages, rows = int32(*pages), int32(*rows)
    return {
        "page_table": rng.integers(-3, 9999, (pages.size, columns)).astype(np.int32),
        "cu_pages_excl": (np.cumsum(pages) - pages).astype(np.int32),
        "pool_pages": pages,
        "cu_q_len_excl": (np.cumsum(rows) - rows).astype(np.int32),
        "q_len": rows,
        "pooled_seq_lens": rng.integers(0, 200, rows.sum() if total_rows is None else total_rows).astype(np.int32),
    }


def ragged_out(pages, rows):
    return RaggedLayout(cases.stale(pages), cases.stale(rows), cases.stale(rows))


def check_ragged(arguments, backend, *, pool=4, page=64, places=None):
    places = int(arguments["pool_pages"].sum()) if places is None else places
    out = ragged_out(places, len(arguments["pooled_seq_lens"]))
    expected = cases.to_dict(out)
    kpool.ragged(expected, **arguments, pool=pool, index_page_size=page)
    options = {"pool": pool, "index_page_size": page, "backend": backend}
    cases.assert_equal(cases.run(kpool_ragged_layout, out, **arguments, **options), expected)


@each_backend
def test_pages_side_by_side(backend):
    """A request of 130 pools in three pages, one with none, one of 3; rows see what was closed before them."""
    arguments = {
        "page_table": int32([8, 9, 10, 11, 4, 5, 6, 7, 20], [0] * 9, [12, 13, 0, 0, 0, 0, 0, 0, 0]),
        "cu_pages_excl": int32(0, 3, 3),
        "pool_pages": int32(3, 0, 1),
        "cu_q_len_excl": int32(0, 2, 3),
        "q_len": int32(2, 1, 2),
        "pooled_seq_lens": int32(129, 130, 0, 3, 70),
    }
    options = {"pool": 4, "index_page_size": 64, "backend": backend}
    found = cases.run(kpool_ragged_layout, ragged_out(5, 5), **arguments, **options)
    assert [x.tolist() for x in found] == [
        [2, 1, 5, 3, STALE],
        [0, 0, 192, 192, 192],
        [129, 130, 192, 195, 256],  # the last row's 70 pools end with its request's page
    ]


@quick_backends
@pytest.mark.parametrize(
    ("pages", "rows"),
    [
        ([1], [1]),
        ([0], [3]),
        ([2, 0, 0], [0, 0, 4]),
        ([0, 5, 0, 1], [2, 0, 0, 1]),
        ([255, 256, 257], [257, 255, 256]),
        ([600], [700]),
        ([1] * 300, [1] * 300),
    ],
)
def test_requests(pages, rows, backend):
    check_ragged(ragged_problem(pages, rows, columns=4 * max(*pages, 1)), backend)


@each_backend
def test_many_blocks_of_a_request(backend):
    """More blocks than a request has programs, so that they stride."""
    others = [3, 0] * 40
    arguments = ragged_problem([2 * module.BLOCK * 5 + 1, *others], [3 * module.BLOCK * 4, *others], columns=40)
    assert arguments["pool_pages"][0] > -(-module.PROGRAMS // 81) * module.BLOCK
    check_ragged(arguments, backend)


@quick_backends
@pytest.mark.parametrize(("pool", "page"), [(1, 64), (2, 16), (8, 64)])
def test_sizes(pool, page, backend):
    check_ragged(ragged_problem([2, 1, 3], [2, 5, 1], 24, pool=pool), backend, pool=pool, page=page)


@quick_backends
def test_cells_of_nobody_stay_and_nothing_passes_an_end(backend):
    arguments = ragged_problem([2, 3], [3, 2], 20, total_rows=9)
    check_ragged(arguments, backend, places=8)
    check_ragged(arguments, backend, places=3)
    check_ragged(arguments | {"pooled_seq_lens": arguments["pooled_seq_lens"][:4]}, backend, places=5)
    check_ragged(arguments | {"pooled_seq_lens": arguments["pooled_seq_lens"][:0]}, backend, places=0)


@quick_backends
def test_pages_past_the_table_are_the_sink(backend):
    check_ragged(ragged_problem([3, 2], [1, 1], columns=6), backend)


def test_only_the_first_attention_page_of_an_index_page_is_read():
    arguments = ragged_problem([3, 0, 2], [2, 1, 4], 16)
    column = np.arange(16)
    dead = (column % 4 != 0) | (column >= 4 * arguments["pool_pages"][:, None])
    with checked.declare(dead={"page_table": dead}, seed=5):
        check_ragged(arguments, "checked")


@quick_backends
def test_ragged_views_and_wide_integers(backend):
    arguments = ragged_problem([2, 0, 3], [1, 4, 2], 14)
    places = {name: ("v", None, 3 + i, (9,)) for i, name in enumerate(list(arguments)[1:5])}
    places |= {"page_table": ("t", 20, 24, (20, 1)), "pooled_seq_lens": ("s", None, 4, (3,))}
    out = ragged_out(6, 7)
    expected = cases.to_dict(out)
    kpool.ragged(expected, **arguments, pool=4)
    held = {"concat_page_table": ("o", None, 2, (4,)), "q_start": ("o", None, 3, (4,)), "q_end": ("o", None, 5, (4,))}
    views, want = cases.in_buffers(out._asdict(), held), cases.in_buffers(expected, held)
    call = cases.in_buffers(arguments, places) | {"pool": 4, "backend": backend}
    found = cases.run(kpool_ragged_layout, RaggedLayout(**views), **call)
    cases.assert_buffers_equal(found._asdict(), want)
    wide = {name: array.astype(np.int64) for name, array in arguments.items()}
    check_ragged(wide, backend)


def test_no_requests():
    empty = np.zeros(0, np.int32)
    found = kpool_ragged_layout(np.zeros((0, 4), np.int32), *[empty] * 4, int32(5), ragged_out(2, 1), pool=4)
    assert [x.tolist() for x in found] == [[STALE] * 2, [STALE], [STALE]]


def test_destinations_are_donated():
    arguments = ragged_problem([2, 1], [1, 2], 8)

    def call(out, arguments):
        return kpool_ragged_layout(**arguments, out=out, pool=4, backend="interpret")

    out = ragged_out(3, 3)
    places = [x.unsafe_buffer_pointer() for x in out]
    after = jax.jit(call, donate_argnums=0)(out, arguments)
    assert [x.unsafe_buffer_pointer() for x in after] == places and all(x.is_deleted() for x in out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": 0}, "pool=0: it must be 1 or more"),
        ({"index_page_size": -1}, "index_page_size=-1: it must be 1 or more"),
        ({"page_table": np.ones((2, 0), np.int32)}, "page_table has no columns"),
        ({"q_len": int32(1)}, "q_len has 1 rows for a batch of 2"),
        ({"cu_pages_excl": np.ones(2)}, "cu_pages_excl is float64"),
        ({"pooled_seq_lens": int32(1, 2)}, r"out.q_start is int32\[3\]: a destination must be int32\[2\]"),
        ({"out": (1, 2, 3)}, "out is a tuple: give a RaggedLayout"),
        ({"out": ragged_out(3, 3)._replace(concat_page_table=jnp.zeros(3))}, r"out.concat_page_table is float32\[3\]"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_ragged_refused(change, message):
    call = ragged_problem([2, 1], [1, 2], 8) | {"out": ragged_out(3, 3), "pool": 4} | change
    with pytest.raises(ValueError, match=message):
        kpool_ragged_layout(**call)

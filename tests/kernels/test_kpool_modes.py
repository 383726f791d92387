"""kpool_decode, kpool_verify, kpool_draft_extend, kpool_write_plan: worked rounds, edges, views, schedules, errors."""

import functools

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_kpool as kpool
import numpy as np
import pytest
from kernel_cases import int32

from pallas_kernels import (
    KernelFault,
    KPoolTables,
    checked,
    kpool_decode,
    kpool_draft_extend,
    kpool_verify,
    kpool_write_plan,
)

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
FUNCTIONS = {"decode": kpool_decode, "verify": kpool_verify, "draft_extend": kpool_draft_extend}
GLM = {"pool": 4, "topk": 2048}


def run(mode, out, backend, **arguments):
    return cases.run(FUNCTIONS[mode], out, backend=backend, **arguments)


def check(mode, out, backend, *, pool, topk, page_size=64, **arguments):
    expected, options = cases.to_dict(out), {"pool": pool, "topk": topk}
    given = dict(arguments)
    packed = mode == "draft_extend" and not given.pop("padded", False)
    kpool.forward(expected, mode=mode, page=page_size, packed=packed, rows=given.pop("rows", 1), **options, **given)
    cases.assert_equal(run(mode, out, backend, page_size=page_size, **options, **arguments), expected)


# Worked rounds -------------------------------------------------------------------------------------------------------

WIDE = np.arange(8 * 131072, dtype=np.int32).reshape(8, 131072)
ROUNDS = {
    "A": {
        "seq_lens": int32(64, 128, 2048, 65530),
        "req_rows": int32(0, 2, 4, 6),
        "decode": [64, 128, 2048, 2050],
        "verify": [
            [65, 66, 67, 68, 69, 70],
            [129, 130, 131, 132, 133, 134],
            [2049, 2050, 2051, 2048, 2049, 2050],
            [2051, 2048, 2049, 2050, 2051, 2048],
        ],
        "draft_extend": [
            [59, 60, 61, 62, 63, 64],
            [123, 124, 125, 126, 127, 128],
            [2043, 2044, 2045, 2046, 2047, 2048],
            [2049, 2050, 2051, 2048, 2049, 2050],
        ],
        "totals": {"decode": 4290, "verify": 25788, "draft_extend": 25692},
        "decode plan": [15, 65567, 131583, 212990],
        "verify plan": [[16, 17], [65568, 65569], [131584, 131585], [212990, 212991]],
        "draft_extend plan": [[14, 15], [65566, 65567], [131582, 131583], [212989, 212990]],
        "starts": [60, 124, 2044, 65528],
    },
    "B": {
        "seq_lens": int32(63, 129, 65539, 100001),
        "req_rows": int32(7, 5, 3, 1),
        "decode": [63, 129, 2051, 2049],
        "verify": [
            [64, 65, 66, 67, 68, 69],
            [130, 131, 132, 133, 134, 135],
            [2048, 2049, 2050, 2051, 2048, 2049],
            [2050, 2051, 2048, 2049, 2050, 2051],
        ],
        "draft_extend": [
            [58, 59, 60, 61, 62, 63],
            [124, 125, 126, 127, 128, 129],
            [2050, 2051, 2048, 2049, 2050, 2051],
            [2048, 2049, 2050, 2051, 2048, 2049],
        ],
        "totals": {"decode": 4292, "verify": 25788, "draft_extend": 25716},
        "decode plan": [229391, 163872, 114688, 57768],
        "verify plan": [[229391, 229392], [163872, 163873], [114688, 114689], [57768, 57769]],
        "draft_extend plan": [[229390, 229391], [163870, 163871], [114687, 114688], [57766, 57767]],
        "starts": [60, 128, 65536, 100000],
    },
    "C": {
        "seq_lens": int32(128, 61, 2051, 1023),
        "req_rows": int32(2, 6, 0, 4),
        "decode": [128, 61, 2051, 1023],
        "verify": [
            [129, 130, 131, 132, 133, 134],
            [62, 63, 64, 65, 66, 67],
            [2048, 2049, 2050, 2051, 2048, 2049],
            [1024, 1025, 1026, 1027, 1028, 1029],
        ],
        "draft_extend": [
            [123, 124, 125, 126, 127, 128],
            [56, 57, 58, 59, 60, 61],
            [2046, 2047, 2048, 2049, 2050, 2051],
            [1018, 1019, 1020, 1021, 1022, 1023],
        ],
        "totals": {"decode": 3263, "verify": 19630, "draft_extend": 19518},
        "decode plan": [65567, 196623, 512, 131327],
        "verify plan": [[65568, 65569], [196623, 196624], [512, 513], [131327, 131328]],
        "draft_extend plan": [[65566, 65567], [196621, 196622], [511, 512], [131326, 131327]],
        "starts": [124, 60, 2048, 1020],
    },
}


@quick_backends
@pytest.mark.parametrize("mode", FUNCTIONS)
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_of_four_requests(name, mode, backend):
    """Six rows a request over tables of 131072 tokens; in two of three requests attention is past its budget."""
    turn, rows = ROUNDS[name], 1 if mode == "decode" else 6
    arguments = {name: turn[name] for name in ("seq_lens", "req_rows")} | {"source": WIDE} | GLM
    if mode != "decode":
        arguments["rows"] = rows
    if mode == "draft_extend":
        arguments["extend_lens"] = int32(6, 6, 6, 6)
    out = kpool.tables(4, rows, columns=131072, page_table_1=None)
    found = run(mode, out, backend, **arguments)
    assert found.dsa_cache_seqlens.reshape(4, -1).tolist() == np.reshape(turn[mode], (4, rows)).tolist()
    assert found.dsa_cu_seqlens_k[-1] == turn["totals"][mode]
    assert found.write_loc.tolist() == np.reshape(turn[f"{mode} plan"], (4, -1)).tolist()
    if mode == "decode":
        assert found.tail_logical_start.tolist() == turn["starts"]
        assert found.cu_seqlens_k.tolist() == [0, *np.cumsum(turn["seq_lens"])]
    for b, row in enumerate(turn["req_rows"]):  # the request's tokens lie one after the other
        pages, request = -(-found.cache_seqlens[b] // 64), slice(b * rows, (b + 1) * rows)
        assert (found.real_page_table[request, :pages] == row * 2048 + np.arange(pages)).all()
        assert (found.real_page_table[request, pages:] == kpool.STALE).all()
        assert (found.page_table[request, : -(-pages // 4)] == row * 512 + np.arange(-(-pages // 4))).all()


@quick_backends
def test_pools_seen_in_the_first_round(backend):
    out = KPoolTables(pool_seqlens=cases.stale(24), seqlens_expanded=cases.stale(24))
    arguments = {"seq_lens": ROUNDS["A"]["seq_lens"], "req_rows": ROUNDS["A"]["req_rows"], "source": WIDE, "rows": 6}
    found = run("verify", out, backend, **arguments, **GLM)
    assert found.pool_seqlens.reshape(4, 6).tolist() == [
        [16, 16, 16, 17, 17, 17],
        [32, 32, 32, 33, 33, 33],
        [512, 512, 512, 513, 513, 513],
        [16382, 16383, 16383, 16383, 16383, 16384],
    ]


@quick_backends
def test_replays_into_the_same_destination(backend):
    """Four verify forwards, each over what the one before left; a table narrower than the last one's lengths."""
    source = np.arange(8 * 16384, dtype=np.int32).reshape(8, 16384)
    wanted = {
        (1, 61, 2047, 8191): {0: [2, 3, 4, 5, 6, 7], 2: [2048, 2049, 2050, 2051, 2048, 2049]},
        (2, 63, 2048, 8193): {0: [3, 4, 5, 6, 7, 8], 3: [2050, 2051, 2048, 2049, 2050, 2051]},
        (64, 128, 2051, 8190): {0: [65, 66, 67, 68, 69, 70], 3: [2051, 2048, 2049, 2050, 2051, 2048]},
        (0, 3, 2045, 9000): {0: [1, 2, 3, 4, 5, 6], 2: [2046, 2047, 2048, 2049, 2050, 2051]},
    }
    out = kpool.tables(4, 6, columns=16384, page_table_1=None)
    for lengths, attended in wanted.items():
        before = cases.to_dict(out)
        arguments = {"seq_lens": int32(*lengths), "req_rows": int32(3, 1, 6, 0), "source": source, "rows": 6}
        out = run("verify", out, backend, **arguments, **GLM)
        rows = out.dsa_cache_seqlens.reshape(4, 6)
        assert {b: rows[b].tolist() for b in attended} == attended
        assert out.paged_mqa_ctx_lens_2d.tolist() == [[length + 6] * 6 for length in lengths]
        kpool.forward(before, mode="verify", page=64, **GLM, **arguments)
        cases.assert_equal(out, before)
        out = jax.tree.map(jnp.asarray, out)


# Schedules -----------------------------------------------------------------------------------------------------------


def schedule_of(pools, processors, backend):
    out = KPoolTables(schedule=cases.stale(processors + 1, 2))
    arguments = {"seq_lens": 4 * np.array(pools, np.int32) + 3, "req_rows": np.zeros(len(pools), np.int32)}
    return run("decode", out, backend, **arguments, source=np.zeros((1, 4), np.int32), **GLM).schedule.tolist()


@each_backend
@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        ([16, 32, 512, 16382], [[0, 0], [3, 13], [3, 30], [3, 47], [4, 0]]),
        ([1, 1], [[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]]),
        ([0, 256, 257], [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0]]),
    ],
)
def test_worked_schedules(pools, wanted, backend):
    assert schedule_of(pools, 4, backend) == wanted


@quick_backends
@pytest.mark.parametrize(("rows", "processors"), [(1, 1), (3, 132), (1500, 7), (1024, 5)])
def test_schedules(rows, processors, backend):
    """More processors than blocks, and more rows than lanes of a vector."""
    pools = np.random.default_rng(rows).choice([0, 1, 255, 256, 257, 511, 512, 513, 5000], rows)
    found = schedule_of(pools, processors, backend)
    assert found == [list(entry) for entry in kpool.share_out(pools.tolist(), processors)]


# Write plans ---------------------------------------------------------------------------------------------------------


def plan_out(batch, rows, pool):
    names = ("req_rows", "write_start", "tail_logical_start", "write_loc", "seqlens_expanded", "pool_seqlens")
    tables = kpool.tables(batch, rows, pool=pool)
    return KPoolTables(**{name: getattr(tables, name) for name in names})


@each_backend
def test_a_plan_crosses_an_index_page(backend):
    table = np.full((12, 8), -9, np.int32)  # only the first row of a request and the first column of a page are read
    table[0, [0, 4]], table[6, [0, 4]] = (8, 12), (20, 24)
    arguments = {"write_start": int32(3, 255), "req_rows": int32(7, 11), "real_page_table": table, "rows": 6, "pool": 4}
    found = cases.run(kpool_write_plan, plan_out(2, 6, 4), **arguments, backend=backend)
    assert found.tail_logical_start.tolist() == [0, 252] and found.req_rows.tolist() == [7, 11]
    assert found.write_loc.tolist() == [[128, 129], [383, 384]]
    assert found.pool_seqlens.tolist() == [1, 1, 1, 1, 2, 2, 64, 64, 64, 64, 65, 65]
    assert found.seqlens_expanded.tolist() == [4, 5, 6, 7, 8, 9, 256, 257, 258, 259, 260, 261]


@quick_backends
@pytest.mark.parametrize("once", [False, True])
def test_a_pool_past_the_table_takes_its_last_page(once, backend):
    table = np.repeat(int32([4, 5, 6, 9], [12, 13, 14, 15]), 1 if once else 3, axis=0)
    arguments = {"write_start": int32(511, 20), "req_rows": int32(1, 1), "real_page_table": table, "rows": 3, "pool": 2}
    found = cases.run(kpool_write_plan, plan_out(2, 3, 2), **arguments, backend=backend)
    assert found.write_loc.tolist() == [[4 * 64 + 63, 4 * 64], [6 * 64 + 10, 6 * 64 + 11]]


@quick_backends
def test_a_plan_is_the_one_of_the_forward(backend):
    """Made of its compact table it is what the verify forward itself writes."""
    source = kpool.slots(np.random.default_rng(5), 5, 700, 256)
    arguments = {"req_rows": int32(3, 1, 0, 4), "rows": 9}
    whole = kpool.tables(4, 9, columns=700, page_table_1=None)
    start = int32(3, 251, 0, 690)
    forward = run("verify", whole, backend, seq_lens=start, source=source, **arguments, **GLM)
    table = jnp.asarray(forward.real_page_table)
    plan = cases.run(
        kpool_write_plan,
        plan_out(4, 9, 4),
        write_start=start,
        real_page_table=table,
        pool=4,
        backend=backend,
        **arguments,
    )
    for name, array in plan._asdict().items():
        if array is not None:
            np.testing.assert_array_equal(array, getattr(forward, name), err_msg=name)


# Edges ---------------------------------------------------------------------------------------------------------------

EDGES = [0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 260, 23, 24, 25, 27, 28, 31]


def problem(mode, batch, rows, seed=0, tokens=300, page=64):
    rng = np.random.default_rng(seed)
    arguments = {
        "seq_lens": np.resize(np.roll(EDGES, seed), batch).astype(np.int32),
        "source": kpool.slots(rng, 9, tokens, page),
    }
    arguments["req_rows"] = np.where(np.arange(batch) % 3 == 1, 0, rng.integers(1, 9, batch)).astype(np.int32)
    arguments |= {"pool": 4, "topk": 24} | ({} if mode == "decode" else {"rows": rows})
    if mode == "draft_extend":
        arguments["extend_lens"] = rng.integers(0, rows + 1, batch).astype(np.int32)
    return arguments


@each_backend
@pytest.mark.parametrize("mode", FUNCTIONS)
def test_edges_of_pools_and_pages(mode, backend):
    rows = 1 if mode == "decode" else 6
    check(mode, kpool.tables(21, rows, columns=300), backend, **problem(mode, 21, rows))


@quick_backends
@pytest.mark.parametrize("mode", FUNCTIONS)
@pytest.mark.parametrize(("pool", "page", "topk"), [(1, 64, 24), (1, 1, 24), (16, 64, 64), (8, 1, 16), (64, 64, 64)])
def test_pools_and_pages(pool, page, topk, mode, backend):
    rows = 1 if mode == "decode" else 5
    arguments = problem(mode, 9, rows, seed=4) | {"pool": pool, "topk": topk, "page_size": page}
    check(mode, kpool.tables(9, rows, columns=300, pool=pool, page=page), backend, **arguments)


@quick_backends
@pytest.mark.parametrize("mode", ["verify", "draft_extend"])
def test_tables_stored_once_a_request(mode, backend):
    arguments = problem(mode, 7, 5, seed=2) | ({"padded": True} if mode == "draft_extend" else {})
    check(mode, kpool.tables(7, 5, height=7, columns=300), backend, **arguments)


@quick_backends
@pytest.mark.parametrize("total", [8, 10, 16])
def test_an_extend_of_requests_of_any_length(total, backend):
    """3, 0, 5 and 0 rows: what lies behind the last of them stays."""
    arguments = problem("draft_extend", 4, 5, seed=1) | {
        "extend_lens": int32(3, 0, 5, 0),
        "seq_lens": int32(12, 31, 80, 2),
    }
    check("draft_extend", kpool.tables(4, 5, lines=total, columns=300), backend, **arguments)


@quick_backends
def test_an_extend_of_no_rows(backend):
    arguments = problem("draft_extend", 4, 5) | {"extend_lens": int32(0, 0, 0, 0)}
    check("draft_extend", kpool.tables(4, 5, columns=300), backend, **arguments)


@quick_backends
@pytest.mark.parametrize("mode", FUNCTIONS)
def test_slots_that_are_not_aligned(mode, backend):
    """Pages are then those of a page's first token, whatever the others are."""
    rows = 1 if mode == "decode" else 4
    arguments = problem(mode, 6, rows, tokens=769)
    arguments["source"] = (np.arange(9)[:, None] * 786 + np.arange(769)).astype(np.int32)
    check(mode, kpool.tables(6, rows, columns=769), backend, **arguments)


@quick_backends
def test_a_table_narrower_than_the_lengths(backend):
    arguments = problem("decode", 2000, 1) | {"seq_lens": np.arange(2000, dtype=np.int32) % 257 + 1}
    check("decode", kpool.tables(2000, 1, columns=1), backend, **arguments)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("mode", FUNCTIONS)
def test_an_empty_batch(mode, backend):
    rows = 1 if mode == "decode" else 6
    found = run(mode, kpool.tables(0, rows, columns=300), backend, **problem(mode, 0, rows))
    assert found.cu_seqlens_k.tolist() == found.dsa_cu_seqlens_k.tolist() == [0]


@quick_backends
def test_what_has_no_destination_is_not_written(backend):
    arguments = problem("verify", 6, 3)
    whole = run("verify", kpool.tables(6, 3, columns=300), backend, **arguments)
    for name, array in kpool.tables(6, 3, columns=300)._asdict().items():
        found = run("verify", KPoolTables(**{name: array}), backend, **arguments)
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)
    assert run("verify", KPoolTables(), backend, **arguments) == KPoolTables()


VIEWS = {  # name: (buffer, its columns, offset, strides)
    "seq_lens": ("requests", None, 3, (3,)),
    "req_rows": ("requests", None, 4, (3,)),
    "extend_lens": ("requests", None, 5, (3,)),
    "source": ("source", 307, 310, (307, 1)),
    "cache_seqlens": ("lengths", None, 1, (2,)),
    "cu_seqlens_k": ("sums", None, 1, (2,)),
    "dsa_cache_seqlens": ("rows", 4, 1, (4,)),
    "seqlens_expanded": ("rows", 4, 2, (4,)),
    "pool_seqlens": ("rows", 4, 3, (4,)),
    "dsa_cu_seqlens_k": ("dsa", None, 2, (3,)),
    "page_table_1": ("wide", 305, 2, (305, 1)),
    "real_page_table": ("tables", 20, 3, (20, 2)),
    "page_table": ("tables", 20, 14, (20, 1)),
    "write_loc": ("plan", None, 2, (5, 2)),
    "write_start": ("plan", None, 3, (5,)),
    "schedule": ("schedule", 3, 1, (3, 1)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("mode", FUNCTIONS)
def test_views_of_wider_buffers(mode, backend):
    rows = 1 if mode == "decode" else 5
    arguments = problem(mode, 7, rows)
    before = cases.to_dict(kpool.tables(7, rows, columns=300))
    expected = {name: array.copy() for name, array in before.items()}
    given = {name: a for name, a in arguments.items() if name != "rows"}
    kpool.forward(expected, mode=mode, page=64, packed=mode == "draft_extend", rows=rows, **given)
    views = cases.in_buffers(arguments, {name: v for name, v in VIEWS.items() if name in arguments})
    places = {name: v for name, v in VIEWS.items() if name in before}
    actual = run(mode, KPoolTables(**cases.in_buffers(before, places)), backend, **views)
    cases.assert_buffers_equal(actual._asdict(), cases.in_buffers(expected, places))


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    arguments = problem("draft_extend", 7, 5)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.int64) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        actual = run("draft_extend", kpool.tables(7, 5, columns=300), backend, **wide)
    narrow = run("draft_extend", kpool.tables(7, 5, columns=300), backend, **arguments)
    cases.assert_equal(actual, narrow._asdict())
    assert {array.dtype for array in actual} == {np.dtype(np.int32)}


@pytest.mark.parametrize("mode", FUNCTIONS)
def test_without_a_wide_table_one_token_in_a_page_is_read(mode):
    rows = 1 if mode == "decode" else 6
    arguments = problem(mode, 9, rows, tokens=600, page=256)
    out = kpool.tables(9, rows, columns=600, page_table_1=None)
    cached = arguments["seq_lens"] + (rows if mode == "verify" else 0)
    live = np.zeros(arguments["source"].shape, bool)
    for row, length in zip(arguments["req_rows"], cached, strict=True):
        live[row, : max(length, 1) : 64] = True
    arguments["seq_lens"] = np.maximum(arguments["seq_lens"], rows)  # so that every plan begins inside the request
    with checked.declare(dead={"source": np.ones_like(live)}), pytest.raises(KernelFault, match="load of dead cells"):
        FUNCTIONS[mode](out=out, **arguments, backend="checked")
    live[:, 64::64] |= live[:, :-64:64][:, : live[:, 64::64].shape[1]]  # a plan's last pool may begin the next page
    with checked.declare(dead={"source": ~live}):
        found = FUNCTIONS[mode](out=out, **arguments, backend="checked")
    expected = cases.to_dict(out)
    given = {name: a for name, a in arguments.items() if name != "rows"}
    kpool.forward(expected, mode=mode, page=64, packed=mode == "draft_extend", rows=rows, **given)
    cases.assert_equal(found, expected)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_the_last_row_of_tables_past_2_to_the_31_cells(backend):
    """Read and written at 64-bit offsets: a 32-bit one would wrap around to cells near the start."""
    rows, columns = 2200, 1_000_003
    source = jnp.full((rows, columns), 7, jnp.int32).at[rows - 1, columns - 1].set(640)
    call = functools.partial(kpool_decode, pool=4, topk=2048, backend=backend)
    out = KPoolTables(page_table_1=jnp.zeros((1, columns), jnp.int32))
    read = call(jnp.array([columns]), jnp.array([rows - 1]), source, out)
    assert read.page_table_1[0, -2:].tolist() == [7, 640]
    del source, read, out

    lengths = jnp.zeros(rows, jnp.int32).at[rows - 1].set(columns)
    step = jax.jit(lambda out, *rest: call(*rest, KPoolTables(page_table_1=out)).page_table_1, donate_argnums=0)
    source = jnp.arange(1, columns + 1, dtype=jnp.int32)[None]
    out = step(jnp.full((rows, columns), -7, jnp.int32), lengths, jnp.zeros(rows, jnp.int32), source)
    assert out[rows - 1, -1] == columns and out[rows - 1, 0] == 1
    assert (out[:-1] == -7).all()


# Errors --------------------------------------------------------------------------------------------------------------

TWO, SOURCE = np.ones(2, np.int32), np.zeros((3, 80), np.int32)
VERIFY = {"seq_lens": TWO, "req_rows": TWO, "source": SOURCE, "rows": 3, "pool": 4, "topk": 8}
WHOLE = kpool.tables(2, 3, columns=80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": 3}, "pool=3: it must be a power of two"),
        ({"pool": 0}, "pool=0: it must be a power of two"),
        ({"page_size": 48}, "page_size=48: it must be a power of two"),
        ({"rows": -1}, "rows=-1: it must be >= 0"),
        ({"rows": None}, "rows=None: it must be an integer"),
        ({"topk": "8"}, "topk='8': it must be an integer"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"seq_lens": np.ones(2)}, "seq_lens is float64"),
        ({"req_rows": np.ones(3, np.int32)}, "req_rows has 3 rows for a batch of 2"),
        ({"source": TWO}, r"source has shape \(2,\)"),
        ({"out": cases.decode_out(2, 4, has_swa=False)}, "out is a DecodeTables: give a KPoolTables"),
        ({"out": WHOLE._replace(cache_seqlens=cases.stale(3))}, r"out.cache_seqlens is int32\[3\]: .* int32\[2\]"),
        ({"out": WHOLE._replace(pool_seqlens=cases.stale(2))}, r"out.pool_seqlens is int32\[2\]: .* int32\[6\]"),
        ({"out": WHOLE._replace(write_loc=cases.stale(2, 2))}, r"out.write_loc is int32\[2, 2\]: .* int32\[2, 1\]"),
        ({"out": WHOLE._replace(schedule=cases.stale(1, 2))}, r"out.schedule is int32\[1, 2\]"),
        ({"out": WHOLE._replace(page_table=cases.stale(2, 2))}, r"out.page_table is int32\[2, 2\]: .* int32\[6, 2\]"),
        (
            {"out": KPoolTables(page_table=cases.stale(4, 2))},
            "out.page_table has 4 rows for a batch of 2: give it 2, one",
        ),
        ({"out": KPoolTables(page_table=jnp.zeros((2, 2)))}, "out.page_table is float32"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kpool_verify(**({"out": WHOLE} | VERIFY | change))


PLAN = {"write_start": TWO, "req_rows": TWO, "real_page_table": np.zeros((6, 4), np.int32), "rows": 3, "pool": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"real_page_table": np.zeros((5, 4), np.int32)},
            "real_page_table has 5 rows for a batch of 2: give it 2 rows",
        ),
        ({"out": WHOLE}, "out.cache_seqlens is not written by this call: leave it None"),
        ({"write_start": np.ones((2, 2), np.int32)}, r"write_start has shape \(2, 2\)"),
        ({"out": plan_out(3, 3, 4)}, r"out.seqlens_expanded is int32\[9\]: a destination must be int32\[6\]"),
    ],
)
def test_a_plan_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kpool_write_plan(**({"out": plan_out(2, 3, 4)} | PLAN | change))

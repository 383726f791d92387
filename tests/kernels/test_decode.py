"""decode_metadata, decode_lengths and draft_extend_metadata: worked examples, edges, forms that agree, clear errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
import quick_compile
from jax import lax
from kernel_cases import int32, sparse

from pallas_kernels import (
    DecodeTables,
    MetadataLayout,
    decode_lengths,
    decode_metadata,
    draft_extend_metadata,
    draft_write_window,
)

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)


def extend_out(batch, pages, has_swa):
    return cases.decode_out(batch, pages, has_swa)._replace(cu_seqlens_q=cases.stale(batch + 1))


def agree(function, expect, out, backend, **call):
    """What the function writes, after comparing it with the oracle."""
    expected = cases.to_dict(out)
    expect(expected, **call)
    actual = cases.run(function, out, **call, backend=backend)
    cases.assert_equal(actual, expected)
    return actual


# Worked examples -----------------------------------------------------------------------------------------------------


@each_backend
def test_verify_of_three_rows_one_padded(backend):
    source = np.zeros((6, 20), np.int32)
    source[2, [0, 4, 8]] = 20, 36, 8
    source[5, [0, 4, 8, 12]] = 4, 12, 16, 24
    out = cases.run(
        decode_metadata,
        cases.decode_out(3, 5, has_swa=True),
        seq_lens=int32(6, 1, 12),
        req_rows=int32(2, 0, 5),
        source=source,
        granularity="token",
        page_size=4,
        seq_len_delta=3,
        full_v2p=sparse(10, {0: 0, 5: 7, 2: 3, 1: 11, 3: 12, 4: 13, 6: 14}),
        swa_v2p=sparse(10, {0: 0, 9: 4, 2: 6}),
        zero_tail=True,
        backend=backend,
    )
    assert out.cache_seqlens.tolist() == [9, 4, 15]
    assert out.cu_seqlens_k.tolist() == [0, 9, 13, 28]
    assert out.page_table.tolist() == [[7, 0, 3, 0, 0], [0, 0, 0, 0, 0], [11, 12, 13, 14, 0]]
    assert out.swa_page_table.tolist() == [[0, 4, 6, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@each_backend
def test_static_swa_map_translates_the_token_then_divides(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(1, 1, has_swa=True),
        seq_lens=int32(1),
        req_rows=int32(1),
        source=int32([0] * 4, [20, 21, 22, 23]),
        granularity="token",
        page_size=4,
        full_to_swa=sparse(24, {20: 9, 5: 100}),
        zero_tail=False,
        backend=backend,
    )
    assert out.swa_page_table.tolist() == [[2]]  # 9 // 4; dividing first would read entry 5
    assert out.page_table.tolist() == [[5]]


@quick_backends
def test_row_longer_than_the_table_is_cut_and_spills_nowhere(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(3, 4, has_swa=False),
        seq_lens=int32(15, 30, 0),
        req_rows=int32(1, 1, 1),
        source=np.arange(2 * 9, dtype=np.int32).reshape(2, 9),
        page_size=4,
        seq_len_delta=3,
        zero_tail=False,
        backend=backend,
    )
    assert out.cache_seqlens.tolist() == [18, 33, 3]
    assert out.page_table.tolist() == [[9, 10, 11, 12], [9, 10, 11, 12], [9, -7, -7, -7]]


@each_backend
def test_unbound_negative_and_unknown_pages_are_the_sink_in_either_table(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(2, 6, has_swa=True),
        seq_lens=int32(9, 2),
        req_rows=int32(1, 2),
        source=int32([0] * 5, [3, -1, 4, 9, 1], [5, 4, 4, 4, 4]),
        page_size=2,
        v2p=int32([0, 0], [6, 2], [7, 7], [8, 1], [5, -1], [-1, 3]),  # page 9 is past it
        zero_tail=False,
        backend=backend,
    )
    assert out.cache_seqlens.tolist() == [9, 2] and out.cu_seqlens_k.tolist() == [0, 9, 11]
    assert out.page_table.tolist() == [[8, 0, 5, 0, 6, -7], [0, -7, -7, -7, -7, -7]]
    assert out.swa_page_table.tolist() == [[1, 0, 0, 0, 2, -7], [3, -7, -7, -7, -7, -7]]


# Lengths after each of three steps of a chain of drafts, and the pages they reach with 4 tokens a page.
CHAIN = [([4, 7], [[5, -7, -7], [4, 7, -7]]), ([5, 8], [[5, 9, -7], [4, 7, -7]]), ([6, 9], [[5, 9, -7], [4, 7, 1]])]
CHAIN_CALL = {"req_rows": int32(1, 2), "source": int32([0, 0, 0], [5, 9, 2], [4, 7, 1]), "page_size": 4}


@quick_backends
@pytest.mark.parametrize("as_array", [False, True])
def test_each_draft_step_adds_one_token(as_array, backend):
    for i, (lengths, table) in enumerate(CHAIN):
        delta = np.array(i + 1) if as_array else i + 1
        call = CHAIN_CALL | {"seq_lens": int32(3, 6), "seq_len_delta": delta, "zero_tail": False, "backend": backend}
        out = cases.run(decode_metadata, cases.decode_out(2, 3, has_swa=False), **call)
        assert out.cache_seqlens.tolist() == lengths and out.cu_seqlens_k.tolist() == [0, lengths[0], sum(lengths)]
        assert out.page_table.tolist() == table


@pytest.mark.parametrize("backend", [b for b in cases.EVERY_BACKEND if b != "checked"])  # it cannot be traced
def test_a_loop_over_draft_steps_takes_the_delta_from_its_counter(backend):
    def step(i, carry):
        out, lengths, tables = carry
        call = {**CHAIN_CALL, "seq_len_delta": i + 1, "zero_tail": False, "backend": backend}
        out = decode_metadata(int32(3, 6), out=out, **call)
        return out, lengths.at[i].set(out.cache_seqlens), tables.at[i].set(out.page_table)

    def draft(out):
        return lax.fori_loop(0, 3, step, (out, jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2, 3), jnp.int32)))[1:]

    lengths, tables = jax.jit(draft, compiler_options=quick_compile.options())(cases.decode_out(2, 3, has_swa=False))
    assert lengths.tolist() == [lengths for lengths, _ in CHAIN]
    assert tables.tolist() == [table for _, table in CHAIN]


@each_backend
def test_draft_extend_counts_new_rows_beside_all_tokens(backend):
    out = cases.run(
        draft_extend_metadata,
        extend_out(3, 4, has_swa=True),
        seq_lens=int32(9, 4, 1),
        extend_seq_lens=int32(4, 1, 0),
        req_rows=int32(2, 1, 0),
        source=int32([0, 0, 0], [6, 3, 2], [5, 1, 4]),
        page_size=4,
        full_v2p=int32(0, 11, 12, 13, 14, 15, 16),
        swa_v2p=int32(0, 21, 22, 23, -1),
        backend=backend,
    )
    assert out.cache_seqlens.tolist() == [9, 4, 1] and out.cu_seqlens_k.tolist() == [0, 9, 13, 14]
    assert out.cu_seqlens_q.tolist() == [0, 4, 5, 5]
    assert out.page_table.tolist() == [[15, 11, 14, -7], [16, -7, -7, -7], [0, -7, -7, -7]]
    assert out.swa_page_table.tolist() == [[0, 21, 0, -7], [0, -7, -7, -7], [0, -7, -7, -7]]


@quick_backends
def test_lengths_alone(backend):
    out = cases.run(decode_lengths, cases.decode_out(3, 2, has_swa=True), seq_lens=int32(6, 0, 12), backend=backend)
    assert out.cache_seqlens.tolist() == [6, 0, 12] and out.cu_seqlens_k.tolist() == [0, 6, 6, 18]
    assert (out.page_table == cases.STALE).all() and (out.swa_page_table == cases.STALE).all()


# Edges ---------------------------------------------------------------------------------------------------------------


@quick_backends
@pytest.mark.parametrize(("page_size", "batch"), [(1, 7), (4, 7), (64, 1)])
def test_lengths_around_the_edges_of_pages_and_tables(page_size, batch, backend):
    p = cases.problem(page_size, batch, columns=5)
    full = 5 * page_size
    common = {"req_rows": p["rows"], "source": p["pages"], "page_size": page_size}
    common |= {"full_v2p": p["full"], "swa_v2p": p["swa"]}
    for shift in range(7 if batch == 1 else 1):  # one row meets each length in turn, without a new compilation
        lengths = cases.edge_lengths(page_size, full, shift + batch)[shift:]
        for zero_tail, delta in ((False, 0), (True, page_size + 1)):  # the second runs past the table
            call = common | {"seq_lens": lengths, "seq_len_delta": delta, "zero_tail": zero_tail}
            agree(decode_metadata, oracle.decode, cases.decode_out(batch, 5, True), backend, **call)
        call = common | {"seq_lens": lengths, "extend_seq_lens": np.minimum(lengths, 3), "zero_tail": batch > 1}
        agree(draft_extend_metadata, oracle.draft_extend, extend_out(batch, 5, True), backend, **call)


def test_edge_lengths_interpreted():
    p = cases.problem(4, 7, columns=5)
    call = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "page_size": 4}
    call |= {"full_v2p": p["full"], "swa_v2p": p["swa"]}
    for delta in (0, 5):
        moved = call | {"seq_len_delta": np.array(delta), "zero_tail": True}
        agree(decode_metadata, oracle.decode, cases.decode_out(7, 5, True), "interpret", **moved)
    extend = call | {"extend_seq_lens": np.minimum(p["lengths"], 3), "zero_tail": False}
    agree(draft_extend_metadata, oracle.draft_extend, extend_out(7, 5, True), "interpret", **extend)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_empty_batch_still_starts_its_prefix_sums(backend):
    source, none = np.zeros((1, 2), np.int32), np.zeros(0, np.int32)
    call = {"page_size": 4, "zero_tail": True, "backend": backend}
    out = decode_metadata(none, none, source, cases.decode_out(0, 3, has_swa=False), **call)
    assert out.cu_seqlens_k.tolist() == [0] and out.page_table.shape == (0, 3)
    packed = cases.packed_out(MetadataLayout(B=0, D=4, P=3, has_swa=False))
    assert decode_metadata(none, none, source, packed, **call).decode_tables().cu_seqlens_k.tolist() == [0]
    out = draft_extend_metadata(none, none, none, source, extend_out(0, 3, has_swa=False), **call)
    assert out.cu_seqlens_k.tolist() == out.cu_seqlens_q.tolist() == [0]
    out = decode_lengths(none, DecodeTables(cases.stale(0), cases.stale(1)), backend=backend)
    assert out.cu_seqlens_k.tolist() == [0]


@quick_backends
@pytest.mark.parametrize("max_pages", [0, 4])
def test_max_pages_bounds_what_is_written(max_pages, backend):
    p = cases.problem(4, 3, columns=6)
    call = {"seq_lens": int32(24, 3, 12), "req_rows": p["rows"], "source": p["pages"], "page_size": 4}
    call |= {"full_v2p": p["full"], "swa_v2p": p["swa"], "max_pages": max_pages, "zero_tail": True}
    actual = agree(decode_metadata, oracle.decode, cases.decode_out(3, 8, True), backend, **call)
    assert (actual.page_table[:, max_pages:] == cases.STALE).all()
    call["extend_seq_lens"] = int32(2, 0, 7)
    actual = agree(draft_extend_metadata, oracle.draft_extend, extend_out(3, 8, True), backend, **call)
    assert (actual.swa_page_table[:, max_pages:] == cases.STALE).all()


@quick_backends
def test_table_wider_than_the_source_reads_the_sink(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(1, 5, has_swa=False),
        seq_lens=int32(17),
        req_rows=int32(1),
        source=int32([0, 0], [3, 4]),
        page_size=4,
        zero_tail=False,
        backend=backend,
    )
    assert out.page_table.tolist() == [[3, 4, 0, 0, 0]]


@quick_backends
def test_request_rows_outside_the_table_read_the_sink_row(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(4, 2, has_swa=False),
        seq_lens=int32(8, 8, 8, 8),
        req_rows=int32(-1, 2, 1000, 1),
        source=int32([0, 0], [3, 4]),
        page_size=4,
        zero_tail=False,
        backend=backend,
    )
    assert out.page_table.tolist() == [[0, 0], [0, 0], [0, 0], [3, 4]]


@each_backend
def test_an_id_whose_token_would_overflow_is_out_of_range(backend):
    out = cases.run(
        decode_metadata,
        cases.decode_out(1, 1, has_swa=True),
        seq_lens=int32(1),
        req_rows=int32(0),
        source=int32([2**26 + 5]),  # times 64 it wraps around to the tokens of page 5
        page_size=64,
        full_v2p=sparse(8, {5: 3}),
        full_to_swa=sparse(8 * 64, {5 * 64: 128}),
        zero_tail=False,
        backend=backend,
    )
    assert out.page_table.tolist() == out.swa_page_table.tolist() == [[0]]


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("batch", [140, 265])
def test_many_rows_and_wide_tables_take_several_turns(batch, backend):
    """More (row, block) pairs than programs, so one or two programs a row loop; only some blocks are live."""
    rng = np.random.default_rng(1)
    columns = 600
    call = {
        "seq_lens": rng.integers(0, columns + 1, batch).astype(np.int32),
        "req_rows": rng.integers(0, 3, batch).astype(np.int32),
        "source": rng.integers(0, 900, (3, columns)).astype(np.int32),
        "full_v2p": rng.integers(-1, 900, 900).astype(np.int32),
        "page_size": 1,
    }
    live = np.arange(columns) < call["seq_lens"][:, None]
    pages = np.maximum(call["full_v2p"][call["source"][call["req_rows"]]], 0)
    zero_tail = batch == 140
    out = cases.decode_out(batch, columns, has_swa=False)
    out = cases.run(decode_metadata, out, **call, zero_tail=zero_tail, backend=backend)
    np.testing.assert_array_equal(out.page_table, np.where(live, pages, 0 if zero_tail else cases.STALE))


@each_backend
def test_prefix_sums_over_more_rows_than_one_vector(backend):
    lengths = np.random.default_rng(2).integers(0, 9, 2500).astype(np.int32)
    out = DecodeTables(cases.stale(2500), cases.stale(2501))
    actual = cases.run(decode_lengths, out, seq_lens=lengths, seq_len_delta=2, backend=backend)
    np.testing.assert_array_equal(actual.cache_seqlens, lengths + 2)
    np.testing.assert_array_equal(actual.cu_seqlens_k, np.concatenate([[0], np.cumsum(lengths + 2)]))


@quick_backends
def test_both_prefix_sums_over_more_rows_than_one_vector(backend):
    rng, batch = np.random.default_rng(3), 1100
    call = {
        "seq_lens": rng.integers(0, 9, batch).astype(np.int32),
        "extend_seq_lens": rng.integers(0, 4, batch).astype(np.int32),
        "req_rows": rng.integers(0, 2, batch).astype(np.int32),
        "source": int32([0, 0], [3, 4]),
        "page_size": 4,
    }
    agree(draft_extend_metadata, oracle.draft_extend, extend_out(batch, 2, False), backend, **call)


# Forms that must agree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_packed_pages_and_pairs_equal_separate_tokens(backend):
    page_size, batch, rows, columns = 4, 6, 3, 5
    p = cases.problem(page_size, batch, columns, seed=3)
    swa = np.concatenate([p["swa"], [-1, -1]]).astype(np.int32)
    common = {"req_rows": p["rows"], "page_size": page_size, "backend": backend}
    tokens = common | {"source": cases.as_tokens(p["pages"], page_size), "granularity": "token"}
    tokens |= {"full_v2p": p["full"], "swa_v2p": swa}
    pages = common | {"source": p["pages"], "v2p": np.stack([p["full"], swa], axis=1)}
    decode = {"seq_lens": p["lengths"], "seq_len_delta": rows, "zero_tail": True}
    window = {"start": p["lengths"], "anchor": p["lengths"] + 100, "limit": columns * page_size - 1}

    tables = cases.run(decode_metadata, cases.decode_out(batch, columns, has_swa=True), **tokens, **decode)
    places = cases.run(draft_write_window, cases.window_out(batch, rows, has_swa=True), **tokens, **window)
    packed = cases.packed_out(MetadataLayout(B=batch, D=rows, P=columns, has_swa=True))
    packed = cases.run(decode_metadata, packed, **pages, **decode)
    assert (packed.decode_tables().cu_seqlens_q == cases.STALE).all()  # of a draft extend only
    packed = cases.run(draft_write_window, packed, **pages, **window)
    cases.assert_equal(tables, packed.decode_tables()._replace(cu_seqlens_q=None)._asdict())
    cases.assert_equal(places, packed.window()._asdict())
    used = np.zeros(packed.layout.size, bool)
    for section in packed.layout.sections.values():
        used[section.offset : section.offset + int(np.prod(section.shape))] = True
    assert (packed.buffer[~used] == cases.STALE).all()  # the gaps between sections


@quick_backends
def test_packed_draft_extend(backend):
    packed = cases.run(
        draft_extend_metadata,
        cases.packed_out(MetadataLayout(B=2, D=1, P=3, has_swa=False)),
        seq_lens=int32(6, 4),
        extend_seq_lens=int32(2, 3),
        req_rows=int32(1, 0),
        source=int32([0, 0, 0], [5, 9, 2]),
        page_size=4,
        zero_tail=True,
        backend=backend,
    )
    tables = packed.decode_tables()
    assert tables.cache_seqlens.tolist() == [6, 4] and tables.cu_seqlens_k.tolist() == [0, 6, 10]
    assert tables.cu_seqlens_q.tolist() == [0, 2, 5] and tables.page_table.tolist() == [[5, 9, 0], [0, 0, 0]]
    assert (packed.window().positions == cases.STALE).all()


@quick_backends
def test_packed_lengths_leave_the_tables_alone(backend):
    packed = cases.packed_out(MetadataLayout(B=2, D=1, P=3, has_swa=True))
    packed = decode_lengths(jnp.array([6, 12]), packed, seq_len_delta=3, backend=backend)
    tables = packed.decode_tables()
    assert tables.cache_seqlens.tolist() == [9, 15] and tables.cu_seqlens_k.tolist() == [0, 9, 24]
    assert (tables.page_table == cases.STALE).all() and (packed.window().positions == cases.STALE).all()


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    p = cases.problem(4, 7, columns=5)
    call = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"]}
    call |= {"full_v2p": p["full"], "swa_v2p": p["swa"]}
    static = {"page_size": 4, "zero_tail": True}
    new = {"extend_seq_lens": np.minimum(p["lengths"], 3)}
    expected = cases.to_dict(extend_out(7, 5, has_swa=True))
    oracle.draft_extend(expected, **call, **new, **static)
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(v, jnp.int64) for k, v in (call | new).items()}
        actual = cases.run(draft_extend_metadata, extend_out(7, 5, has_swa=True), **wide, **static, backend=backend)
    cases.assert_equal(actual, expected)
    assert {x.dtype for x in actual} == {np.dtype(np.int32)}


# Views ---------------------------------------------------------------------------------------------------------------

VIEWS = {  # name: (buffer, its columns, offset, strides)
    "seq_lens": ("requests", None, 3, (3,)),
    "req_rows": ("requests", None, 4, (3,)),
    "extend_seq_lens": ("new", 2, 3, (4,)),
    "source": ("source", 9, 11, (9, 1)),
    "full_v2p": ("maps", 2, 0, (2,)),
    "swa_v2p": ("maps", 2, 1, (2,)),
    "cache_seqlens": ("numbers", None, 2, (1,)),
    "cu_seqlens_k": ("numbers", None, 12, (2,)),
    "cu_seqlens_q": ("numbers", None, 33, (1,)),
    "page_table": ("full", None, 5, (13, 2)),
    "swa_page_table": ("swa", 8, 10, (16, 1)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("function", [decode_metadata, draft_extend_metadata, decode_lengths])
def test_views_of_wider_buffers(function, backend):
    extends = function is draft_extend_metadata
    p = cases.problem(4, 7, columns=5)
    swa = np.concatenate([p["swa"], [-1, -1]]).astype(np.int32)
    arrays = {"seq_lens": p["lengths"]}
    static = {"seq_len_delta": 0}
    if function is not decode_lengths:
        arrays |= {"req_rows": p["rows"], "source": p["pages"], "full_v2p": p["full"], "swa_v2p": swa}
        static = {"page_size": 4, "zero_tail": False}
    arrays |= {"extend_seq_lens": np.minimum(p["lengths"], 3)} if extends else {}
    out = extend_out(7, 5, True) if extends else cases.decode_out(7, 5, True)
    before = {k: v for k, v in cases.to_dict(out).items() if v is not None}
    expected = cases.to_dict(out)
    expect = {decode_metadata: oracle.decode, draft_extend_metadata: oracle.draft_extend}.get(function, oracle.lengths)
    expect(expected, **arrays, **static)

    places = {k: v for k, v in VIEWS.items() if k in before}
    views = cases.in_buffers(arrays, {k: v for k, v in VIEWS.items() if k in arrays})
    actual = cases.run(function, DecodeTables(**cases.in_buffers(before, places)), **views, **static, backend=backend)
    expected = cases.in_buffers({k: v for k, v in expected.items() if v is not None}, places)
    cases.assert_buffers_equal(actual._asdict(), expected)


# Errors --------------------------------------------------------------------------------------------------------------

ONE, TABLE, MAP = np.ones(2, np.int32), np.zeros((3, 4), np.int32), np.zeros(5, np.int32)
DECODE = {"seq_lens": ONE, "req_rows": ONE, "source": TABLE, "page_size": 4, "zero_tail": True}


@pytest.mark.parametrize("function", [decode_metadata, draft_extend_metadata])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 3}, "page_size=3: it must be a power of two"),
        ({"page_size": 0}, "page_size=0: it must be a power of two"),
        ({"page_size": 4.0}, "page_size=4.0: it must be an integer"),
        ({"max_pages": 5}, "max_pages=5: it must be between 0 and the width of the page table, 4"),
        ({"max_pages": -1}, "max_pages=-1: it must be between 0"),
        ({"granularity": "row"}, "granularity='row' is unknown: use 'page' .* or 'token'"),
        ({"backend": "cuda"}, "backend='cuda' is unknown: use one of 'reference'"),
        ({"swa_v2p": MAP}, "swa_v2p was given but out has no SWA section"),
        ({"full_to_swa": MAP}, "full_to_swa was given but out has no SWA section"),
        ({"has_swa": True}, "out has a SWA section but no SWA map was given: give v2p, swa_v2p or full_to_swa"),
        ({"has_swa": True, "swa_v2p": MAP, "full_to_swa": MAP}, "swa_v2p and full_to_swa were given: .* exactly one"),
        ({"v2p": np.zeros((5, 2), np.int32), "full_v2p": MAP}, "v2p and full_v2p were given"),
        ({"v2p": np.zeros((5, 2), np.int32), "full_to_swa": MAP}, "v2p and full_to_swa were given"),
        ({"v2p": np.zeros((5, 3), np.int32)}, r"v2p has shape \(5, 3\): it needs two columns"),
        ({"v2p": MAP}, r"v2p has shape \(5,\): it must have 2 dimensions"),
        ({"full_v2p": np.zeros((5, 2), np.int32)}, r"full_v2p has shape \(5, 2\): it must have 1 dimension"),
        ({"full_v2p": np.zeros(0, np.int32)}, "full_v2p has no rows: it needs at least row 0"),
        ({"full_v2p": np.zeros(5)}, "full_v2p is float64: it must be an array of integers"),
        ({"seq_lens": [1, 2]}, "seq_lens is list: it must be an array of integers"),
        ({"seq_lens": np.ones(2, bool)}, "seq_lens is bool: it must be an array of integers"),
        ({"seq_lens": np.ones((2, 1), np.int32)}, r"seq_lens has shape \(2, 1\): it must have 1 dimension"),
        ({"req_rows": np.ones(3, np.int32)}, "req_rows has 3 rows for a batch of 2"),
        ({"source": MAP}, r"source has shape \(5,\): it must have 2 dimensions"),
        ({"source": np.zeros((3, 0), np.int32)}, r"source has shape \(3, 0\): it needs a row 0"),
        ({"source": np.zeros((0, 3), np.int32)}, r"source has shape \(0, 3\): it needs a row 0"),
        ({"out": cases.window_out(2, 4, has_swa=False)}, "out is a WindowBuffers: give a DecodeTables"),
        ({"out": extend_out(3, 4, has_swa=False)}, r"out.cache_seqlens is int32\[3\]: .* must be int32\[2\]"),
        ({"out": extend_out(2, 4, False)._replace(page_table=None)}, "out.page_table is None: .* call decode_lengths"),
        ({"out": extend_out(2, 4, False)._replace(page_table=jnp.zeros((2, 4)))}, "out.page_table is float32"),
        ({"out": extend_out(2, 4, False)._replace(page_table=jnp.zeros(4, jnp.int32))}, r"page_table is int32\[4\]"),
        ({"out": extend_out(2, 4, False)._replace(swa_page_table=cases.stale(2, 3))}, r"int32\[2,3\]|int32\[2, 3\]"),
        ({"out": cases.packed_out(MetadataLayout(3, 1, 4, False))}, "out.layout.B=3, but seq_lens has 2 rows"),
    ],
)
def test_refused(function, change, message):
    change = dict(change)
    out = change.pop("out", None)
    out = extend_out(2, 4, has_swa=change.pop("has_swa", False)) if out is None else out
    new = {"extend_seq_lens": ONE} if function is draft_extend_metadata else {}
    with pytest.raises(ValueError, match=message):
        function(**(DECODE | new | change), out=out)


@pytest.mark.parametrize("function", [decode_metadata, decode_lengths])
@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (-1, "seq_len_delta=-1: it must be >= 0"),
        (1.0, "seq_len_delta=1.0: it must be an integer"),
        (np.ones(2, np.int32), r"seq_len_delta is int32\[2\]: it must be one integer"),
        (np.ones(1, np.float32), r"seq_len_delta is float32\[1\]: it must be one integer"),
    ],
)
def test_delta_refused(function, delta, message):
    call = DECODE if function is decode_metadata else {"seq_lens": ONE}
    with pytest.raises(ValueError, match=message):
        function(**call, seq_len_delta=delta, out=cases.decode_out(2, 4, has_swa=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extend_seq_lens": np.ones(3, np.int32)}, "extend_seq_lens has 3 rows for a batch of 2"),
        ({"extend_seq_lens": np.ones(2)}, "extend_seq_lens is float64: it must be an array of integers"),
        ({"out": cases.decode_out(2, 4, has_swa=False)}, "out.cu_seqlens_q is None: .* or call decode_metadata"),
        ({"out": extend_out(2, 4, False)._replace(cu_seqlens_q=cases.stale(2))}, r"out.cu_seqlens_q is int32\[2\]"),
    ],
)
def test_draft_extend_refused(change, message):
    call = DECODE | {"extend_seq_lens": ONE, "out": extend_out(2, 4, has_swa=False)} | change
    with pytest.raises(ValueError, match=message):
        draft_extend_metadata(**call)


def test_zero_tail_has_no_default_in_decode_metadata():
    del (call := dict(DECODE))["zero_tail"]
    with pytest.raises(TypeError, match="zero_tail"):
        decode_metadata(**call, out=cases.decode_out(2, 4, has_swa=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_tail": True}, "zero_tail=True: lengths have no tail"),
        ({"backend": "cpu"}, "backend='cpu' is unknown"),
        ({"seq_lens": np.ones(2)}, "seq_lens is float64"),
        ({"out": cases.window_out(2, 4, has_swa=False)}, "out is a WindowBuffers"),
        ({"out": DecodeTables(cases.stale(2), cases.stale(2))}, r"out.cu_seqlens_k is int32\[2\]: .* int32\[3\]"),
    ],
)
def test_decode_lengths_refused(change, message):
    with pytest.raises(ValueError, match=message):
        decode_lengths(**({"seq_lens": ONE, "out": DecodeTables(cases.stale(2), cases.stale(3))} | change))

"""What a caller of the metadata kernels relies on: worked examples, edges, forms that must agree, clear errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels import (
    DecodeTables,
    MetadataLayout,
    PackedMetadata,
    WindowBuffers,
    decode_lengths,
    decode_metadata,
    draft_write_window,
)

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)


def int32(*values):
    return np.array(values, np.int32)


def sparse(rows, entries, fill=-1):
    table = np.full(rows, fill, np.int32)
    for index, value in entries.items():
        table[index] = value
    return table


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
    assert out.swa_page_table[:2].tolist() == [[0, 4, 6, 0, 0], [0, 0, 0, 0, 0]]


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


@each_backend
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
def test_write_window_crosses_pages(backend):
    pages = np.zeros((3, 3), np.int32)
    pages[1], pages[2] = [5, 9, 2], [4, 7, 0]
    out = cases.run(
        draft_write_window,
        cases.window_out(2, 4, has_swa=True),
        start=int32(6, 3),
        req_rows=int32(1, 2),
        source=pages,
        page_size=4,
        anchor=int32(50, 60),
        full_v2p=sparse(10, {9: 5, 2: 3, 4: 1, 7: 8}),
        swa_v2p=sparse(10, {2: 6, 4: 2, 7: 10}),
        backend=backend,
    )
    assert out.virtual_loc.tolist() == [[38, 39, 8, 9], [19, 28, 29, 30]]
    assert out.full_loc.tolist() == [[22, 23, 12, 13], [7, 32, 33, 34]]
    assert out.swa_loc.tolist() == [[0, 0, 24, 25], [11, 40, 41, 42]]
    assert out.positions.tolist() == [[6, 7, 8, 9], [3, 4, 5, 6]]
    assert out.anchor_ids.tolist() == [[50, -7, -7, -7], [60, -7, -7, -7]]


# Edges ---------------------------------------------------------------------------------------------------------------


def problem(page_size, batch, columns, seed=0):
    """Edge lengths, padded rows and bad ids over a random page-granular table."""
    rng = np.random.default_rng(seed)
    virtual_pages = 2 * columns + 3
    rows = np.arange(1, batch + 1, dtype=np.int32)
    rows[1::3] = 0
    return {
        "lengths": cases.edge_lengths(page_size, columns * page_size, batch),
        "rows": rows,
        "pages": cases.request_table(rng, batch + 1, columns, virtual_pages),
        "full": cases.page_map(rng, virtual_pages, 0.1),
        "swa": cases.page_map(rng, virtual_pages - 2, 0.4),
    }


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(("page_size", "batch", "rows"), [(1, 1, 1), (4, 7, 2), (64, 1, 8), (128, 7, 70), (4, 0, 4)])
def test_page_sizes_batches_and_draft_lengths(page_size, batch, rows, backend):
    p = problem(page_size, batch, columns=5)
    limit = 5 * page_size - 1
    for shift in range(7 if batch == 1 else 1):  # one row meets each edge length in turn, without a new compilation
        lengths = cases.edge_lengths(page_size, 5 * page_size, 7)[shift : shift + 1] if batch == 1 else p["lengths"]
        common = {"req_rows": p["rows"], "page_size": page_size}
        maps = {"full_v2p": p["full"], "swa_v2p": p["swa"]}

        out = cases.decode_out(batch, 5, has_swa=True)
        expected = cases.to_dict(out)
        call = common | maps | {"seq_lens": lengths, "source": p["pages"], "seq_len_delta": rows, "zero_tail": False}
        oracle.decode(expected, **call)
        cases.assert_equal(cases.run(decode_metadata, out, **call, backend=backend), expected)

        out = cases.window_out(batch, rows, has_swa=True)
        expected = cases.to_dict(out)
        call = common | maps | {"start": lengths, "source": p["pages"], "limit": limit, "anchor": lengths}
        oracle.window(expected, **call)
        cases.assert_equal(cases.run(draft_write_window, out, **call, backend=backend), expected)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_empty_batch_still_starts_its_prefix_sums(backend):
    source = np.zeros((1, 2), np.int32)
    none = np.zeros(0, np.int32)
    out = decode_metadata(
        none, none, source, cases.decode_out(0, 3, has_swa=False), page_size=4, zero_tail=True, backend=backend
    )
    assert out.cu_seqlens_k.tolist() == [0] and out.page_table.shape == (0, 3)
    packed = cases.packed_out(MetadataLayout(B=0, D=4, P=3, has_swa=False))
    packed = decode_metadata(none, none, source, packed, page_size=4, zero_tail=True, backend=backend)
    packed = draft_write_window(none, none, source, packed, page_size=4, backend=backend)
    assert packed.decode_tables().cu_seqlens_k.tolist() == [0] and packed.window().positions.shape == (0, 4)


@each_backend
def test_max_pages_bounds_what_is_written(backend):
    p = problem(4, 3, columns=6)
    call = {"seq_lens": int32(24, 3, 12), "req_rows": p["rows"], "source": p["pages"], "page_size": 4}
    for max_pages in (0, 4):
        out = cases.decode_out(3, 8, has_swa=True)
        expected = cases.to_dict(out)
        bounded = call | {"full_v2p": p["full"], "swa_v2p": p["swa"], "max_pages": max_pages, "zero_tail": True}
        oracle.decode(expected, **bounded)
        actual = cases.run(decode_metadata, out, **bounded, backend=backend)
        cases.assert_equal(actual, expected)
        assert (actual.page_table[:, max_pages:] == cases.STALE).all()


@each_backend
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


@each_backend
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("limit", [0, 7, 8, 100])
def test_positions_from_the_limit_on_go_to_the_sink(limit, as_array, backend):
    out = cases.run(
        draft_write_window,
        cases.window_out(1, 4, has_swa=False),
        start=int32(6),
        req_rows=int32(1),
        source=int32([0, 0], [3, 4]),
        page_size=4,
        limit=jnp.array(limit) if as_array else limit,
        backend=backend,
    )
    wanted = [18 if limit > 6 else 0, 19 if limit > 7 else 0, 0, 0]  # the source ends at position 8
    assert out.full_loc.tolist() == out.virtual_loc.tolist() == [wanted]
    assert out.positions.tolist() == [[6, 7, 8, 9]]
    assert (out.anchor_ids == cases.STALE).all()  # no anchor was given


@each_backend
def test_request_rows_outside_the_table_read_the_sink_row(backend):
    call = {"req_rows": int32(-1, 2, 1000, 1), "source": int32([0, 0], [3, 4]), "page_size": 4, "backend": backend}
    lengths = np.full(4, 8, np.int32)
    out = cases.run(decode_metadata, cases.decode_out(4, 2, has_swa=False), seq_lens=lengths, zero_tail=False, **call)
    assert out.page_table.tolist() == [[0, 0], [0, 0], [0, 0], [3, 4]]
    window = cases.run(draft_write_window, cases.window_out(4, 1, has_swa=False), start=lengths - 1, **call)
    assert window.full_loc.tolist() == [[3], [3], [3], [19]]  # virtual page 0, offset 3: a slot of the sink page


@each_backend
def test_an_id_whose_token_would_overflow_is_out_of_range(backend):
    page = 2**26 + 5  # times 64 it wraps around to the tokens of page 5
    tables = {"full_v2p": sparse(8, {5: 3}), "full_to_swa": sparse(8 * 64, {5 * 64: 128})}
    call = {"req_rows": int32(0), "source": int32([page]), "page_size": 64, "backend": backend}
    out = cases.run(
        decode_metadata, cases.decode_out(1, 1, has_swa=True), seq_lens=int32(1), zero_tail=False, **call, **tables
    )
    assert out.page_table.tolist() == out.swa_page_table.tolist() == [[0]]
    del tables["full_to_swa"]
    out = cases.run(draft_write_window, cases.window_out(1, 1, has_swa=False), start=int32(0), **call, **tables)
    assert out.full_loc.tolist() == [[0]]


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
    for zero_tail in (False, True):
        out = cases.run(
            decode_metadata, cases.decode_out(batch, columns, False), **call, zero_tail=zero_tail, backend=backend
        )
        np.testing.assert_array_equal(out.page_table, np.where(live, pages, 0 if zero_tail else cases.STALE))


@each_backend
def test_prefix_sums_over_more_rows_than_one_vector(backend):
    lengths = np.random.default_rng(2).integers(0, 9, 2500).astype(np.int32)
    out = DecodeTables(cases.stale(2500), cases.stale(2501))
    actual = cases.run(decode_lengths, out, seq_lens=lengths, seq_len_delta=2, backend=backend)
    np.testing.assert_array_equal(actual.cache_seqlens, lengths + 2)
    np.testing.assert_array_equal(actual.cu_seqlens_k, np.concatenate([[0], np.cumsum(lengths + 2)]))


# Forms that must agree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("zero_tail", [False, True])
def test_packed_pages_and_pairs_equal_separate_tokens(zero_tail, backend):
    page_size, batch, rows, columns = 4, 6, 3, 5
    p = problem(page_size, batch, columns, seed=3)
    swa = np.concatenate([p["swa"], [-1, -1]]).astype(np.int32)
    common = {"req_rows": p["rows"], "page_size": page_size, "backend": backend}
    tokens = common | {"source": cases.as_tokens(p["pages"], page_size), "granularity": "token"}
    tokens |= {"full_v2p": p["full"], "swa_v2p": swa}
    pages = common | {"source": p["pages"], "v2p": np.stack([p["full"], swa], axis=1)}
    decode = {"seq_lens": p["lengths"], "seq_len_delta": rows, "zero_tail": zero_tail}
    window = {"start": p["lengths"], "anchor": p["lengths"] + 100, "limit": columns * page_size - 1}

    tables = cases.run(decode_metadata, cases.decode_out(batch, columns, has_swa=True), **tokens, **decode)
    places = cases.run(draft_write_window, cases.window_out(batch, rows, has_swa=True), **tokens, **window)
    packed = cases.packed_out(MetadataLayout(B=batch, D=rows, P=columns, has_swa=True))
    packed = cases.run(decode_metadata, packed, **pages, **decode)
    packed = cases.run(draft_write_window, packed, **pages, **window)
    cases.assert_equal(tables, packed.decode_tables()._replace(cu_seqlens_q=None)._asdict())
    cases.assert_equal(places, packed.window()._asdict())
    used = np.zeros(packed.layout.size, bool)
    for section in packed.layout.sections.values():
        used[section.offset : section.offset + int(np.prod(section.shape))] = True
    assert (packed.buffer[~used] == cases.STALE).all()  # the gaps between sections


def test_layout_sections_are_aligned_disjoint_and_cover_every_field():
    layout = MetadataLayout(B=3, D=5, P=7, has_swa=True)
    names = {*DecodeTables._fields, *WindowBuffers._fields}
    assert set(layout.sections) == names
    assert set(MetadataLayout(3, 5, 7, False).sections) == names - {"swa_page_table", "swa_loc"}
    end = 0
    for section in layout.sections.values():
        assert section.offset % 32 == 0 and section.offset >= end
        end = section.offset + int(np.prod(section.shape))
    assert layout.size % 32 == 0 and layout.size >= end
    assert hash(layout) == hash(MetadataLayout(3, 5, 7, True))


def test_packed_metadata_is_one_leaf_with_a_static_layout():
    packed = PackedMetadata.zeros(MetadataLayout(B=2, D=2, P=2, has_swa=False))
    leaves, tree = jax.tree.flatten(packed)
    assert len(leaves) == 1 and leaves[0].shape == (packed.layout.size,)
    assert jax.tree.unflatten(tree, leaves).layout == packed.layout
    assert packed.decode_tables().swa_page_table is None and packed.window().swa_loc is None


@each_backend
def test_packed_lengths_leave_the_tables_alone(backend):
    packed = cases.packed_out(MetadataLayout(B=2, D=1, P=3, has_swa=True))
    packed = decode_lengths(jnp.array([6, 12]), packed, seq_len_delta=3, backend=backend)
    tables = packed.decode_tables()
    assert tables.cache_seqlens.tolist() == [9, 15] and tables.cu_seqlens_k.tolist() == [0, 9, 24]
    assert (tables.page_table == cases.STALE).all() and (packed.window().positions == cases.STALE).all()


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    p = problem(4, 7, columns=5)
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(v, jnp.int64) for k, v in p.items()}
        call = {"req_rows": wide["rows"], "source": wide["pages"], "full_v2p": wide["full"], "swa_v2p": wide["swa"]}
        call |= {"page_size": 4}
        decode = call | {"seq_lens": wide["lengths"], "seq_len_delta": 3, "zero_tail": True}
        tables = cases.run(decode_metadata, cases.decode_out(7, 5, has_swa=True), **decode, backend=backend)
        window = call | {"start": wide["lengths"], "anchor": wide["lengths"], "limit": jnp.asarray(9, jnp.int64)}
        places = cases.run(draft_write_window, cases.window_out(7, 3, has_swa=True), **window, backend=backend)
    call = {"req_rows": p["rows"], "source": p["pages"], "full_v2p": p["full"], "swa_v2p": p["swa"], "page_size": 4}
    expected = cases.to_dict(cases.decode_out(7, 5, has_swa=True))
    oracle.decode(expected, seq_lens=p["lengths"], seq_len_delta=3, zero_tail=True, **call)
    cases.assert_equal(tables, expected)
    expected = cases.to_dict(cases.window_out(7, 3, has_swa=True))
    oracle.window(expected, start=p["lengths"], anchor=p["lengths"], limit=9, **call)
    cases.assert_equal(places, expected)
    assert {x.dtype for x in (*tables, *places) if x is not None} == {np.dtype(np.int32)}


# Errors --------------------------------------------------------------------------------------------------------------

ONE, TABLE, MAP = np.ones(2, np.int32), np.zeros((3, 4), np.int32), np.zeros(5, np.int32)
DECODE = {"seq_lens": ONE, "req_rows": ONE, "source": TABLE, "page_size": 4, "zero_tail": True}
WINDOW = {"start": ONE, "req_rows": ONE, "source": TABLE, "page_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 3}, "page_size=3: it must be a power of two"),
        ({"page_size": 0}, "page_size=0"),
        ({"page_size": 4.0}, "page_size=4.0: it must be an integer"),
        ({"seq_len_delta": -1}, "seq_len_delta=-1: it must be >= 0"),
        ({"max_pages": 5}, "max_pages=5: it must be between 0 and the width of the page table, 4"),
        ({"granularity": "row"}, "granularity='row' is unknown"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
        ({"swa_v2p": MAP}, "swa_v2p was given but out has no SWA section"),
        ({"full_to_swa": MAP}, "full_to_swa was given but out has no SWA section"),
        ({"has_swa": True}, "out has a SWA section but no SWA map"),
        ({"has_swa": True, "swa_v2p": MAP, "full_to_swa": MAP}, "exactly one"),
        ({"v2p": np.zeros((5, 2), np.int32), "full_v2p": MAP}, "v2p and full_v2p were given"),
        ({"v2p": np.zeros((5, 3), np.int32)}, "two columns"),
        ({"full_v2p": np.zeros((5, 2), np.int32)}, "full_v2p has shape"),
        ({"full_v2p": np.zeros(0, np.int32)}, "full_v2p has no rows"),
        ({"full_v2p": np.zeros(5)}, "full_v2p is float64: it must be an array of integers"),
        ({"seq_lens": [1, 2]}, "seq_lens is <class 'list'>|seq_lens is list"),
        ({"seq_lens": np.ones((2, 1), np.int32)}, "seq_lens has shape"),
        ({"req_rows": np.ones(3, np.int32)}, "req_rows has 3 rows for a batch of 2"),
        ({"source": MAP}, "source has shape"),
        ({"source": np.zeros((3, 0), np.int32)}, "source has shape"),
        ({"out": cases.window_out(2, 4, has_swa=False)}, "out is a WindowBuffers: give a DecodeTables"),
        ({"out": cases.decode_out(3, 4, has_swa=False)}, r"out.cache_seqlens is int32\[3\]: .* int32\[2\]"),
        ({"out": cases.packed_out(MetadataLayout(3, 1, 4, False))}, "out.layout.B=3"),
        ({"out": DecodeTables(*cases.decode_out(2, 4, False)[:2], jnp.zeros((2, 4)))}, "out.page_table is float32"),
    ],
)
def test_decode_metadata_refuses(change, message):
    change = dict(change)
    out = change.pop("out", None)
    out = cases.decode_out(2, 4, has_swa=change.pop("has_swa", False)) if out is None else out
    with pytest.raises(ValueError, match=message):
        decode_metadata(**(DECODE | change), out=out)


def test_zero_tail_has_no_default():
    del (call := dict(DECODE))["zero_tail"]
    with pytest.raises(TypeError, match="zero_tail"):
        decode_metadata(**call, out=cases.decode_out(2, 4, has_swa=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 1.5}, "limit=1.5: it must be an integer"),
        ({"limit": np.ones(2, np.int32)}, "limit is int32"),
        ({"anchor": np.ones(3, np.int32)}, "anchor has 3 rows for a batch of 2"),
        ({"anchor": ONE, "has_anchor": False}, "anchor was given but out.anchor_ids is None"),
        ({"swa_v2p": MAP}, "swa_v2p was given but out has no SWA section"),
        ({"has_swa": True}, "out has a SWA section but no SWA map"),
        ({"page_size": 12}, "page_size=12"),
    ],
)
def test_draft_write_window_refuses(change, message):
    change = dict(change)
    out = cases.window_out(2, 4, change.pop("has_swa", False), change.pop("has_anchor", True))
    with pytest.raises(ValueError, match=message):
        draft_write_window(**(WINDOW | change), out=out)


def test_lengths_refuse_a_tail_to_clear():
    with pytest.raises(ValueError, match="zero_tail=True: lengths have no tail"):
        decode_lengths(ONE, DecodeTables(cases.stale(2), cases.stale(3)), zero_tail=True)
    with pytest.raises(ValueError, match=r"out.cu_seqlens_k is int32\[2\]: a destination must be int32\[3\]"):
        decode_lengths(ONE, DecodeTables(cases.stale(2), cases.stale(2)))


@pytest.mark.parametrize("sizes", [{"B": -1}, {"P": 2.0}, {"B": 2**16, "P": 2**15}])
def test_layout_refuses_sizes_it_cannot_index(sizes):
    with pytest.raises(ValueError, match="MetadataLayout"):
        MetadataLayout(**({"B": 1, "D": 1, "P": 1, "has_swa": False} | sizes))

"""draft_write_window: worked examples, edges, views, clear errors. Its packed form is in test_decode.py."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import int32, sparse

from pallas_kernels import MetadataLayout, WindowBuffers, draft_write_window

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)

# Worked examples -----------------------------------------------------------------------------------------------------

PAGES = {
    "req_rows": int32(1, 2),
    "source": int32([0, 0, 0], [5, 9, 2], [4, 7, 0]),
    "page_size": 4,
    "full_v2p": sparse(10, {9: 5, 2: 3, 4: 1, 7: 8}),
    "swa_v2p": sparse(10, {2: 6, 4: 2, 7: 10}),
}


@each_backend
def test_write_window_crosses_pages(backend):
    call = PAGES | {"start": int32(6, 3), "anchor": int32(50, 60), "backend": backend}
    out = cases.run(draft_write_window, cases.window_out(2, 4, has_swa=True), **call)
    assert out.virtual_loc.tolist() == [[38, 39, 8, 9], [19, 28, 29, 30]]
    assert out.full_loc.tolist() == [[22, 23, 12, 13], [7, 32, 33, 34]]
    assert out.swa_loc.tolist() == [[0, 0, 24, 25], [11, 40, 41, 42]]
    assert out.positions.tolist() == [[6, 7, 8, 9], [3, 4, 5, 6]]
    assert out.anchor_ids.tolist() == [[50, -7, -7, -7], [60, -7, -7, -7]]


@each_backend
def test_virtual_location_keeps_ids_that_have_no_slot(backend):
    out = cases.run(
        draft_write_window,
        cases.window_out(1, 5, has_swa=True, has_anchor=False),
        start=int32(1),
        req_rows=int32(1),
        source=int32([0] * 6, [8, 9, -1, 21, 6, -2]),
        granularity="token",
        page_size=2,
        v2p=int32([0, 0], [1, 1], [2, 2], [9, -1], [3, 7]),  # token 21 is in page 10
        backend=backend,
    )
    assert out.virtual_loc.tolist() == [[9, -1, 21, 6, -2]]
    assert out.full_loc.tolist() == [[7, 0, 0, 18, 0]]
    assert out.swa_loc.tolist() == [[15, 0, 0, 0, 0]]
    assert out.positions.tolist() == [[1, 2, 3, 4, 5]] and out.anchor_ids is None


@quick_backends
def test_without_maps_slots_are_virtual_tokens(backend):
    call = {"start": int32(2), "req_rows": int32(1), "source": int32([0, 0], [3, -1]), "page_size": 4}
    out = cases.run(draft_write_window, cases.window_out(1, 3, has_swa=False), **call, backend=backend)
    assert out.virtual_loc.tolist() == [[14, 15, -1]] and out.full_loc.tolist() == [[14, 15, 0]]


@each_backend
@pytest.mark.parametrize("limit", [0, 7, 8, 100])
def test_positions_from_the_limit_on_go_to_the_sink(limit, backend):
    call = {"start": int32(6), "req_rows": int32(1), "source": int32([0, 0], [3, 4]), "page_size": 4}
    out = cases.run(
        draft_write_window, cases.window_out(1, 4, has_swa=False), **call, limit=jnp.array(limit), backend=backend
    )
    wanted = [18 if limit > 6 else 0, 19 if limit > 7 else 0, 0, 0]  # the source ends at position 8
    assert out.full_loc.tolist() == out.virtual_loc.tolist() == [wanted]
    assert out.positions.tolist() == [[6, 7, 8, 9]]
    assert (out.anchor_ids == cases.STALE).all()  # no anchor was given


@quick_backends
def test_a_limit_known_at_compile_time(backend):
    call = {"start": int32(6), "req_rows": int32(1), "source": int32([0, 0], [3, 4]), "page_size": 4, "limit": 7}
    out = cases.run(draft_write_window, cases.window_out(1, 4, has_swa=False), **call, backend=backend)
    assert out.full_loc.tolist() == [[18, 0, 0, 0]]


@quick_backends
def test_positions_below_zero_go_to_the_sink(backend):
    call = PAGES | {"start": int32(-2, -5), "backend": backend}
    out = cases.run(draft_write_window, cases.window_out(2, 4, has_swa=True), **call)
    assert out.positions.tolist() == [[-2, -1, 0, 1], [-5, -4, -3, -2]]
    assert out.virtual_loc.tolist() == [[0, 0, 20, 21], [0, 0, 0, 0]]  # page 5 is virtual only
    assert (out.full_loc == 0).all() and (out.swa_loc == 0).all()


# Edges ---------------------------------------------------------------------------------------------------------------


def check(p, page_size, batch, rows, backend, **more):
    call = {"start": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "page_size": page_size}
    call |= {"full_v2p": p["full"], "swa_v2p": p["swa"], "anchor": p["lengths"] + 100} | more
    out = cases.window_out(batch, rows, has_swa=True)
    expected = cases.to_dict(out)
    oracle.window(expected, **call)
    cases.assert_equal(cases.run(draft_write_window, out, **call, backend=backend), expected)


@quick_backends
@pytest.mark.parametrize(("page_size", "batch", "rows"), [(1, 1, 1), (4, 7, 2), (64, 1, 8), (128, 7, 70)])
def test_page_sizes_batches_and_rows(page_size, batch, rows, backend):
    p = cases.problem(page_size, batch, columns=5)
    for shift in range(7 if batch == 1 else 1):  # one row meets each length in turn, without a new compilation
        p["lengths"] = cases.edge_lengths(page_size, 5 * page_size, shift + batch)[shift:]
        check(p, page_size, batch, rows, backend, limit=5 * page_size - 1)


def test_several_programs_interpreted():
    check(cases.problem(4, 7, columns=5), 4, 7, 70, "interpret")


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(("batch", "rows"), [(0, 4), (2, 0)])
def test_without_rows_nothing_is_written(batch, rows, backend):
    none, source = np.zeros(batch, np.int32), np.zeros((1, 2), np.int32)
    packed = cases.packed_out(MetadataLayout(B=batch, D=rows, P=3, has_swa=False))
    actual = draft_write_window(none, none, source, packed, page_size=4, backend=backend)
    assert (actual.buffer == cases.STALE).all() and actual.window().positions.shape == (batch, rows)
    out = cases.window_out(batch, rows, has_swa=False)
    assert draft_write_window(none, none, source, out, page_size=4, backend=backend).full_loc.shape == (batch, rows)


@each_backend
def test_request_rows_outside_the_table_read_the_sink_row(backend):
    call = {"start": int32(7, 7, 7, 7), "req_rows": int32(-1, 2, 1000, 1), "source": int32([0, 0], [3, 4])}
    out = cases.run(draft_write_window, cases.window_out(4, 1, has_swa=False), **call, page_size=4, backend=backend)
    assert out.full_loc.tolist() == [[3], [3], [3], [19]]  # virtual page 0, offset 3: a slot of the sink page


@quick_backends
def test_an_id_whose_token_would_overflow_is_out_of_range(backend):
    call = {"start": int32(0), "req_rows": int32(0), "source": int32([2**26 + 5]), "page_size": 64}
    call |= {"full_v2p": sparse(8, {5: 3}), "backend": backend}  # times 64 it wraps around to the tokens of page 5
    assert cases.run(draft_write_window, cases.window_out(1, 1, has_swa=False), **call).full_loc.tolist() == [[0]]


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    p = cases.problem(4, 7, columns=5)
    call = {"start": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "anchor": p["lengths"]}
    call |= {"full_v2p": p["full"], "swa_v2p": p["swa"], "limit": np.array(9)}
    with jax.enable_x64(True):
        wide = {k: jnp.asarray(v, jnp.int64) for k, v in call.items()}
        out = cases.window_out(7, 3, has_swa=True)
        actual = cases.run(draft_write_window, out, **wide, page_size=4, backend=backend)
    expected = cases.to_dict(out)
    oracle.window(expected, **call, page_size=4)
    cases.assert_equal(actual, expected)
    assert {x.dtype for x in actual} == {np.dtype(np.int32)}


# Views ---------------------------------------------------------------------------------------------------------------

VIEWS = {  # name: (buffer, its columns, offset, strides)
    "start": ("requests", None, 3, (3,)),
    "req_rows": ("requests", None, 4, (3,)),
    "anchor": ("anchors", 4, 2, (4,)),
    "source": ("source", 9, 11, (9, 1)),
    "full_v2p": ("maps", 2, 0, (2,)),
    "swa_v2p": ("maps", 2, 1, (2,)),
    "virtual_loc": ("locations", None, 2, (9, 2)),  # FULL and virtual locations take turns in each row
    "full_loc": ("locations", None, 3, (9, 2)),
    "swa_loc": ("swa", 8, 9, (16, 1)),
    "positions": ("positions", 5, 1, (5, 1)),
    "anchor_ids": ("ids", None, 4, (3, 1)),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_views_of_wider_buffers(backend):
    p = cases.problem(4, 7, columns=5)
    swa = np.concatenate([p["swa"], [-1, -1]]).astype(np.int32)
    arrays = {"start": p["lengths"], "req_rows": p["rows"], "anchor": p["lengths"] + 100, "source": p["pages"]}
    arrays |= {"full_v2p": p["full"], "swa_v2p": swa}
    before = cases.to_dict(cases.window_out(7, 3, has_swa=True))
    expected = cases.to_dict(cases.window_out(7, 3, has_swa=True))
    oracle.window(expected, **arrays, page_size=4)
    views = cases.in_buffers(arrays, {k: v for k, v in VIEWS.items() if k in arrays})
    places = {k: v for k, v in VIEWS.items() if k in before}
    out = WindowBuffers(**cases.in_buffers(before, places))
    actual = cases.run(draft_write_window, out, **views, page_size=4, backend=backend)
    cases.assert_buffers_equal(actual._asdict(), cases.in_buffers(expected, places))


# Errors --------------------------------------------------------------------------------------------------------------

ONE, MAP = np.ones(2, np.int32), np.zeros(5, np.int32)
CALL = {"start": ONE, "req_rows": ONE, "source": np.zeros((3, 4), np.int32), "page_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 1.5}, "limit=1.5: it must be an integer"),
        ({"limit": np.ones(2, np.int32)}, r"limit is int32\[2\]: it must be one integer"),
        ({"anchor": np.ones(3, np.int32)}, "anchor has 3 rows for a batch of 2"),
        ({"anchor": np.ones(2)}, "anchor is float64: it must be an array of integers"),
        ({"anchor": ONE, "has_anchor": False}, "anchor was given but out.anchor_ids is None: give a destination"),
        ({"swa_v2p": MAP}, "swa_v2p was given but out has no SWA section"),
        ({"has_swa": True}, "out has a SWA section but no SWA map"),
        ({"v2p": np.zeros((5, 2), np.int32), "swa_v2p": MAP}, "v2p and swa_v2p were given"),
        ({"v2p": MAP}, r"v2p has shape \(5,\): it must have 2 dimensions"),
        ({"full_v2p": np.zeros(5)}, "full_v2p is float64"),
        ({"page_size": 12}, "page_size=12: it must be a power of two"),
        ({"granularity": "tokens"}, "granularity='tokens' is unknown"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"start": np.ones(2)}, "start is float64"),
        ({"start": np.ones((2, 1), np.int32)}, r"start has shape \(2, 1\): it must have 1 dimension"),
        ({"req_rows": np.ones(1, np.int32)}, "req_rows has 1 rows for a batch of 2"),
        ({"source": MAP}, r"source has shape \(5,\)"),
        ({"source": np.zeros((3, 0), np.int32)}, r"source has shape \(3, 0\)"),
        ({"out": cases.decode_out(2, 4, has_swa=False)}, "out is a DecodeTables: give a WindowBuffers"),
        ({"out": cases.window_out(3, 4, has_swa=False)}, r"out.virtual_loc is int32\[3, 4\]: .* int32\[2, 4\]"),
        ({"out": cases.window_out(2, 4, False)._replace(full_loc=cases.stale(2, 3))}, r"out.full_loc is int32\[2, 3\]"),
        ({"out": cases.window_out(2, 4, False)._replace(positions=None)}, "out.positions is NoneType"),
        ({"out": cases.window_out(2, 4, False)._replace(full_loc=jnp.zeros((2, 4)))}, "out.full_loc is float32"),
        ({"out": cases.packed_out(MetadataLayout(3, 4, 1, False))}, "out.layout.B=3"),
    ],
)
def test_refused(change, message):
    change = dict(change)
    out = cases.window_out(2, 4, change.pop("has_swa", False), change.pop("has_anchor", True))
    with pytest.raises(ValueError, match=message):
        draft_write_window(**({"out": out} | CALL | change))

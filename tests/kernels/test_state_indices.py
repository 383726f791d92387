"""replay_state_indices and commit_track_indices: worked examples, padding, edges, views, clear errors."""

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
import quick_compile
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import int32

from pallas_kernels import CommitSteps, View, checked, commit_track_indices, mosaic, replay_state_indices

each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))

# replay_state_indices ------------------------------------------------------------------------------------------------


def replay(rows, slots, backend, **options):
    """(indices, request rows) after a call."""
    out = cases.stale(len(rows))
    return cases.run(replay_state_indices, out, req_rows=rows, slot_of_req=slots, **options, backend=backend)


def check_replay(rows, slots, backend, **options):
    indices, after = np.full(len(rows), cases.STALE), np.array(rows)
    oracle.replay(indices, after, slots, **options)
    options["valid"] = jnp.asarray(options["valid"])  # so that one program serves every count
    found = replay(rows, slots, backend, **options)
    np.testing.assert_array_equal(found[0], indices)
    np.testing.assert_array_equal(found[1], after)


SLOTS, V2P = int32(0, 4, 2, 9, -1, 3), int32(0, 7, -1, 5, 8)


@each_backend
@pytest.mark.parametrize(
    ("valid", "indices", "rows"),
    [
        (3, [8, -1, -1, -1, -1], [1, 2, 3, 0, 0]),  # slots 4, 2 (unbound) and 9 (past the map)
        (5, [8, -1, -1, -1, 5], [1, 2, 3, 4, 5]),  # ... -1 and 3
        (np.array([False, True, False, False, True]), [-1, -1, -1, -1, 5], [0, 2, 0, 0, 5]),
        (np.array([True, False, False, False, False]), [8, -1, -1, -1, -1], [1, 0, 0, 0, 0]),
    ],
)
def test_slots_are_looked_up_translated_and_then_masked(valid, indices, rows, backend):
    found = replay(int32(1, 2, 3, 4, 5), SLOTS, backend, valid=valid, v2p=V2P)
    assert [x.tolist() for x in found] == [indices, rows]


@quick_backends
def test_without_a_map_the_slot_is_the_index(backend):
    found = replay(int32(1, 3, 4, 0, 2), SLOTS, backend, valid=4)
    assert [x.tolist() for x in found] == [[4, 9, -1, 0, -1], [1, 3, 4, 0, 0]]


@each_backend
def test_rows_outside_the_table_have_no_slot(backend):
    found = replay(int32(-1, 6, 2**31 - 1, -(2**31), 5), SLOTS, backend, valid=5, v2p=V2P)
    assert found[0].tolist() == [-1, -1, -1, -1, 5] and found[1].tolist() == [-1, 6, 2**31 - 1, -(2**31), 5]


@each_backend
def test_padded_rows_may_hold_anything(backend):
    rows, valid = int32(-1, 2**31 - 1, 5, -(2**31), 1), np.array([False, False, True, False, False])
    found = replay(rows, SLOTS, backend, valid=valid, v2p=V2P)
    assert [x.tolist() for x in found] == [[-1, -1, 5, -1, -1], [0, 0, 5, 0, 0]]


def test_two_padded_rows_on_one_slot_read_nothing():
    dead = {"slot_of_req": np.arange(6) != 5, "v2p": np.arange(5) != 3}
    with checked.declare(dead=dead):
        found = replay(int32(1, 5, 1), SLOTS, "checked", valid=np.array([False, True, False]), v2p=V2P)
    assert [x.tolist() for x in found] == [[-1, 5, -1], [0, 5, 0]]


@quick_backends
@pytest.mark.parametrize("valid", [-5, 0, 1, 2, 3, 100, 2**40])
def test_counts_known_at_compile_time(valid, backend):
    indices = replay(int32(1, 5), SLOTS, backend, valid=valid)[0]
    assert indices.tolist() == [4 if valid > 0 else -1, 3 if valid > 1 else -1]


@quick_backends
@pytest.mark.parametrize("batch", [1, 127, 128, 129, 300])
def test_batches(batch, backend):
    rng = np.random.default_rng(batch)
    rows, slots = rng.integers(-1, 42, batch).astype(np.int32), rng.integers(-1, 62, 40).astype(np.int32)
    v2p = rng.integers(-2, 99, 60).astype(np.int32)
    for valid in (0, 1, batch - 1, batch):
        check_replay(rows, slots, backend, valid=valid, v2p=v2p)
    check_replay(rows, slots, backend, valid=rng.random(batch) < 0.6, v2p=v2p)


@settings(max_examples=25, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_random_tables(seed, masked, translated):
    rng = np.random.default_rng(seed)
    rows, slots = rng.integers(-2, 12, 9).astype(np.int32), rng.integers(-2, 9, 10).astype(np.int32)
    options = {"valid": rng.random(9) < rng.random() if masked else int(rng.integers(0, 10))}
    if translated:
        options["v2p"] = rng.integers(-1, 50, 7).astype(np.int32)
    for backend in ("reference", "interpret", "checked"):
        check_replay(rows, slots, backend, **options)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_both_destinations_in_one_buffer(backend):
    def call(buffer):
        rows, out = (View(buffer, offset, (3,), (4,)) for offset in (1, 2))
        out, rows = replay_state_indices(rows, int32(0, 4, 2), out, valid=2, backend=backend)
        return out.buffer, rows.buffer

    buffer = jnp.full(14, -99, jnp.int32).at[jnp.array([1, 5, 9])].set(jnp.array([2, 1, 50]))
    if backend != "checked":
        call = jax.jit(call, compiler_options=quick_compile.options())
    expected = [-99, 2, 2, -99, -99, 1, 4, -99, -99, 0, -1, -99, -99, -99]
    assert [x.tolist() for x in call(buffer)] == [expected, expected]


def test_both_destinations_are_donated():
    def call(out, rows):
        return replay_state_indices(rows, SLOTS, out, valid=1, backend="interpret")

    rows, out = jnp.array([1, 5]), cases.stale(2)
    places = out.unsafe_buffer_pointer(), rows.unsafe_buffer_pointer()
    after = jax.jit(call, donate_argnums=(0, 1))(out, rows)
    assert tuple(x.unsafe_buffer_pointer() for x in after) == places and rows.is_deleted() and out.is_deleted()
    assert [x.tolist() for x in after] == [[4, -1], [1, 0]]


@pytest.mark.parametrize("backend", [None, "triton", MOSAIC])
def test_a_mask_is_one_kernel_for_cuda(backend):
    """Unless nobody is named: then XLA fuses so little work with what surrounds it."""

    def call(destinations, slots, valid):
        return replay_state_indices(destinations[1], slots, destinations[0], valid=valid, backend=backend)

    one = jax.ShapeDtypeStruct((5,), jnp.int32)
    text = aot.lower_text(call, (one, one), one, jax.ShapeDtypeStruct((5,), jnp.bool_))
    if backend is None:
        assert "custom_call" not in text
    else:
        assert text.count("mosaic_gpu_v2" if backend == "mosaic" else "@__gpu$xla.gpu.triton") == 1
        assert next(x for x in text.splitlines() if "@main" in x).count("tf.aliasing_output") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"req_rows": np.ones(2)}, "req_rows is float64: it must be an array of integers"),
        ({"req_rows": np.ones((2, 1), np.int32)}, r"req_rows has shape \(2, 1\)"),
        ({"slot_of_req": np.ones((3, 1), np.int32)}, r"slot_of_req has shape \(3, 1\)"),
        ({"slot_of_req": np.ones(0, np.int32)}, "slot_of_req has no rows: it needs at least row 0"),
        ({"out": cases.stale(3)}, r"out is int32\[3\]: a destination must be int32\[2\]"),
        ({"out": jnp.zeros(2)}, r"out is float32\[2\]: a destination must be int32\[2\]"),
        ({"out": View(cases.stale(9), 5, (2,), (4,))}, "^out ends at cell 9 of a buffer of 9"),
        ({"req_rows": View(cases.stale(9), 5, (2,), (0,))}, r"^req_rows has shape \(2,\) and strides \(0,\)"),
        ({"valid": np.ones(3, bool)}, r"valid is bool\[3\]: a mask must be bool\[2\], one a request"),
        ({"valid": np.ones(2, np.int32)}, r"valid is int32\[2\]: it must be one integer"),
        ({"valid": 1.5}, "valid=1.5: it must be an integer"),
        ({"v2p": np.ones((3, 2), np.int32)}, r"v2p has shape \(3, 2\): one table takes one map"),
        ({"v2p": np.ones(0, np.int32)}, "v2p has no rows"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_replay_refused(change, message):
    call = {"req_rows": int32(1, 2), "slot_of_req": SLOTS, "out": cases.stale(2), "valid": 2} | change
    with pytest.raises(ValueError, match=message):
        replay_state_indices(**call)


# commit_track_indices ------------------------------------------------------------------------------------------------


def steps_out(batch, tracked=True):
    return CommitSteps(cases.stale(batch), cases.stale(batch) if tracked else None)


def commit(accepted, lengths, backend, **options):
    arguments = {"accept_lens": int32(*accepted), "seq_lens": int32(*lengths)} | options
    out = steps_out(len(accepted), options.get("interval") is not None)
    found = cases.run(commit_track_indices, out, **arguments, backend=backend)
    return [None if x is None else x.tolist() for x in found]


@each_backend
def test_grid_points_that_a_round_reaches(backend):
    accepted, lengths = (4, 1, 3, 3, 4, 5, 1), (62, 63, 64, 60, 64, 60, 127)
    found = commit(accepted, lengths, backend, num_draft_tokens=5, interval=64)
    assert found == [[3, 0, 2, 2, 3, 4, 0], [1, 0, -1, -1, -1, 3, 0]]


@each_backend
def test_of_a_tree_the_steps_are_nodes(backend):
    nodes = int32([0, 1, 3, -1], [4, 6, -1, -1], [-1, -1, -1, -1])
    options = {"num_draft_tokens": 4, "interval": 8, "accept_index": nodes}
    assert commit((3, 2, 0), (6, 6, 7), backend, **options) == [[3, 2, -1], [1, 2, -1]]


@quick_backends
def test_nothing_accepted_is_no_step(backend):
    found = commit((0, 0, -3), (63, 64, 64), backend, num_draft_tokens=4, interval=64)
    assert found == [[-1, -1, -1], [-1, -1, -1]]
    assert commit((0, 2), (1, 1), backend, num_draft_tokens=4) == [[-1, 1], None]


@quick_backends
def test_a_step_outside_the_forward_is_none(backend):
    """Lengths that no round has, and nodes of another request, must not become a step."""
    assert commit((5, 9, 2**31 - 1), (0, 0, 0), backend, num_draft_tokens=4)[0] == [-1, -1, -1]
    options = {"num_draft_tokens": 2, "accept_index": int32([2, 3], [0, 1], [-1, 2**31 - 1])}
    assert commit((1, 2, 2), (0, 0, 0), backend, **options)[0] == [-1, -1, -1]


@quick_backends
def test_without_an_interval_nothing_is_tracked(backend):
    found = cases.run(
        commit_track_indices, steps_out(2), accept_lens=int32(2, 1), seq_lens=int32(63, 63), num_draft_tokens=2,
        backend=backend,
    )  # fmt: skip
    assert [x.tolist() for x in found] == [[1, 0], [-1, -1]]


@quick_backends
@pytest.mark.parametrize(("batch", "depth", "interval"), [(1, 1, 1), (129, 4, 2), (300, 9, 16), (128, 8, 64)])
@pytest.mark.parametrize("tree", [False, True])
def test_batches_depths_and_intervals(batch, depth, interval, tree, backend):
    rng = np.random.default_rng(batch)
    arguments = {"accept_lens": rng.integers(0, depth + 1, batch), "seq_lens": rng.integers(0, 200, batch)}
    options = {"num_draft_tokens": depth, "interval": interval}
    if tree:
        nodes = np.argsort(rng.random((batch, depth)), axis=1)
        arguments["accept_index"] = np.sort(nodes, axis=1) + depth * np.arange(batch)[:, None]
        kept = np.arange(depth) < arguments["accept_lens"][:, None]
        arguments["accept_index"] = np.where(kept, arguments["accept_index"], -1)
    expected = oracle.commit_track(**arguments, **options)
    found = cases.run(commit_track_indices, steps_out(batch), **arguments, **options, backend=backend)
    assert [x.tolist() for x in found] == list(map(list, expected))


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_no_requests(backend):
    none = np.zeros(0, np.int32)
    out = commit_track_indices(none, none, steps_out(0), num_draft_tokens=4, interval=8, backend=backend)
    assert out.last_step.shape == out.track_step.shape == (0,)
    found = replay_state_indices(none, SLOTS, cases.stale(0), valid=0, backend=backend)
    assert [x.shape for x in found] == [(0,), (0,)]


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    with jax.enable_x64(True):
        lens, before, nodes = jnp.array([2, 1]), jnp.array([14, 15]), jnp.array([[0, 3, -1, -1], [5, -1, -1, -1]])
        options = {"num_draft_tokens": 4, "interval": 16, "backend": backend}
        found = commit_track_indices(lens, before, steps_out(2), accept_index=nodes, **options)
        rows, slots = jnp.array([1, 2**40, 9]), jnp.array([0, 3, 2**40])
        indices, rows = replay_state_indices(rows, slots, cases.stale(3), valid=jnp.array(2), backend=backend)
    assert [x.tolist() for x in found] == [[3, 1], [3, 1]]
    assert [x.tolist() for x in (indices, rows)] == [[3, -1, -1], [1, 2**31 - 1, 0]]
    assert {x.dtype for x in (*found, indices, rows)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_commit_steps_in_one_buffer(backend):
    arrays = {"accept_lens": int32(2, 1, 0), "seq_lens": int32(6, 7, 8), "accept_index": int32([0, 1], [2, 3], [4, 5])}
    places = {"accept_lens": ("requests", None, 1, (3,)), "seq_lens": ("requests", None, 2, (3,))}
    places["accept_index"] = ("nodes", 5, 6, (5, 1))
    steps = {"last_step": int32(1, 0, -1), "track_step": int32(1, 0, -1)}
    outputs = {"last_step": ("steps", None, 2, (3,)), "track_step": ("steps", None, 3, (3,))}
    out = CommitSteps(**cases.in_buffers({name: np.full(3, cases.STALE) for name in steps}, outputs))
    options = {"num_draft_tokens": 2, "interval": 8, "backend": backend}
    actual = cases.run(commit_track_indices, out, **cases.in_buffers(arrays, places), **options)
    cases.assert_buffers_equal(actual._asdict(), cases.in_buffers(steps, outputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept_lens": np.ones(2)}, "accept_lens is float64: it must be an array of integers"),
        ({"seq_lens": np.ones(3, np.int32)}, "seq_lens has 3 rows for a batch of 2"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0: it must be 1 or more"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens=1.5: it must be an integer known at compile time"),
        ({"interval": 0}, "interval=0: it must be 1 or more"),
        ({"interval": 8, "out": steps_out(2, tracked=False)}, "interval=8 was given but out.track_step is None"),
        (
            {"accept_index": np.ones((2, 3), np.int32)},
            r"accept_index has shape \(2, 3\): .* num_draft_tokens=4 columns",
        ),
        ({"accept_index": np.ones((3, 4), np.int32)}, "accept_index has 3 rows for a batch of 2"),
        ({"out": steps_out(3)}, r"out.last_step is int32\[3\]: a destination must be int32\[2\]"),
        ({"out": steps_out(2)._replace(last_step=None)}, "out.last_step is NoneType"),
        ({"out": steps_out(2)._replace(track_step=jnp.zeros(2))}, "out.track_step is float32"),
        ({"out": cases.stale(2)}, "out is a .*: give CommitSteps"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
    ],
)
def test_commit_refused(change, message):
    call = {"accept_lens": int32(1, 2), "seq_lens": int32(1, 2), "out": steps_out(2), "num_draft_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        commit_track_indices(**call)

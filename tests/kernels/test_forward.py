"""forward_metadata: every mode over every kind of layout against the oracle and its parts, edges, reads, errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_forward as forward
import numpy as np
import pytest
from kernel_cases import int32
from kernel_forward import MODES, STALE

from pallas_kernels import KernelFault, KPoolShape, MetadataLayout, PackedMetadata, checked, forward_metadata
from pallas_kernels import kpool_metadata_fusion_supported as supported

KINDS = ("full", "swa", "pooled")
each_mode = pytest.mark.parametrize("mode", MODES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
POOL, PAGE, TOPK = 4, 16, 24  # pages of 16 tokens of 4 attention pages, which hold 4 tokens, or of 4 pools
STATES = ("slot_of_req", "state_v2p")
SLOTS = 9  # state slots


def call(kind, mode, batch=7, rows=6, columns=5, seed=0, *, granularity="page", maps="pair", states=STATES):
    """Arguments of a call by name: lengths at edges, padded rows, rows and ids that do not exist."""
    p, rng = cases.problem(PAGE, batch, columns, seed), np.random.default_rng(seed)
    p["rows"][3::7] = -3
    p["rows"][5::7] = batch + 9
    source = p["pages"] if granularity == "page" else cases.as_tokens(p["pages"], PAGE)
    arguments = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": source, "mode": mode, "page_size": PAGE}
    if mode == "draft_extend":
        arguments["extend_lens"] = rng.permutation(np.arange(batch) % (rows + 1)).astype(np.int32)
    swa = np.append(p["swa"], [-1, 2]).astype(np.int32)
    if maps == "pair":
        arguments["v2p"] = np.stack([p["full"], swa], axis=1)
    else:
        arguments |= {"full_v2p": p["full"]} | ({"swa_v2p": swa[:-3]} if kind == "swa" else {})
    if kind == "pooled":
        arguments |= {"pool": POOL, "topk": TOPK}
    slots = {
        "slot_of_req": rng.integers(-1, SLOTS + 2, batch + 1).astype(np.int32),
        "state_v2p": rng.integers(-1, 5, SLOTS).astype(np.int32),
    }
    arguments |= {name: slots[name] for name in states}
    return arguments | {"anchor": p["lengths"] + 100, "granularity": granularity}


def destination(kind, mode, batch=7, rows=6, columns=5, *, state=True, pool=POOL, **more):
    pool = pool if kind == "pooled" else None
    return forward.packed(batch, rows, columns, swa=kind == "swa", pool=pool, mode=mode, state=state, **more)


def run(out, backend, **arguments):
    return cases.run(forward_metadata, out, **arguments, backend=backend)


def run_checked(out, dead=None, seed=0, **arguments):
    """A checked run in which cells are dead, or programs run in another order."""
    with checked.declare(dead=dead, seed=seed):
        return forward_metadata(out=out, **arguments, backend="checked")


def expect(out, **arguments):
    """What the oracle makes of a call."""
    expected = forward.sections(out)
    forward.metadata(expected, **{n: np.asarray(a) if isinstance(a, jax.Array) else a for n, a in arguments.items()})
    return expected


def compare(actual, expected):
    """Every section, and every cell between sections, which stays as it was."""
    between = np.array(actual.buffer)
    for name, array in forward.sections(actual).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
        place = actual.layout.sections[name]
        between[place.offset : place.offset + array.size] = STALE
    assert (between == STALE).all()


def check(out, backend, **arguments):
    expected = expect(out, **arguments)
    compare(run(out, backend, **arguments), expected)
    return expected


# Against the oracle --------------------------------------------------------------------------------------------------


@each_backend
@each_kind
@each_mode
def test_every_section(mode, kind, backend):
    expected = check(destination(kind, mode), backend, **call(kind, mode))
    unwritten = {name for name, array in expected.items() if array.size and (array == STALE).all()}
    assert unwritten == (set() if mode == "draft_extend" else {"cu_seqlens_q"})


@quick_backends
@each_kind
@each_mode
@pytest.mark.parametrize("limit", [0, 1, 33, 64, 79, 1000])
def test_a_limit(limit, mode, kind, backend):
    """Before, inside, at and behind the tokens of a request and those of the forward."""
    check(destination(kind, mode), backend, **call(kind, mode, seed=1), limit=jnp.array(limit))


@quick_backends
@each_kind
def test_a_limit_known_at_compile_time(kind, backend):
    check(destination(kind, "draft_extend"), backend, **call(kind, "draft_extend", seed=1), limit=33)


@quick_backends
@each_kind
@each_mode
@pytest.mark.parametrize("granularity", ["page", "token"])
def test_without_clearing_tails_they_stay(granularity, mode, kind, backend):
    arguments = call(kind, mode, seed=2, granularity=granularity, maps="separate")
    check(destination(kind, mode), backend, **arguments, zero_tail=False)


@quick_backends
@each_kind
@each_mode
@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 1, 1), (3, 9, 40), (40, 2, 3), (2, 5, 300)])
def test_batches_rows_and_widths(batch, rows, columns, mode, kind, backend):
    """Some rows of a batch close several pools; wide tables take several blocks and programs."""
    out = destination(kind, mode, batch, rows, columns, processors=7)
    check(out, backend, **call(kind, mode, batch, rows, columns, seed=3))


@each_backend
@each_kind
@pytest.mark.parametrize("states", [(), STATES[:1], STATES[1:], STATES])
def test_each_table_of_states(states, kind, backend):
    check(destination(kind, "verify"), backend, **call(kind, "verify", seed=4, states=states))


@quick_backends
@each_kind
@each_mode
def test_a_layout_without_states(mode, kind, backend):
    out = destination(kind, mode, state=False)
    assert "state_slots" not in check(out, backend, **call(kind, mode, seed=5, states=()))


@quick_backends
@each_kind
@each_mode
def test_without_maps_pages_are_physical(mode, kind, backend):
    arguments = call(kind, mode, seed=6, maps="separate")
    del arguments["full_v2p"]
    check(destination(kind, mode), backend, **arguments)


@each_kind
@each_mode
def test_a_request_takes_turns_over_blocks(mode, kind, monkeypatch):
    monkeypatch.setattr(checked.CheckedLanes, "least", 4)
    for module in ("kpool_tables", "kpool_places", "tables", "window", "state_indices"):
        monkeypatch.setattr(f"pallas_kernels.{module}.BLOCK", 4)
    for module in ("kpool_tables", "tables"):
        monkeypatch.setattr(f"pallas_kernels.{module}.PROGRAMS", 10)
    for module in ("kpool_lengths", "tables"):
        monkeypatch.setattr(f"pallas_kernels.{module}.HEAD_LANES", 4)
    monkeypatch.setattr("pallas_kernels.tables.WARP_LANES", 4)
    for seed in range(3):
        out, arguments = destination(kind, mode, columns=9), call(kind, mode, columns=9, seed=seed)
        compare(run_checked(out, seed=seed, **arguments), expect(out, **arguments))


@pytest.mark.parametrize("backend", cases.BACKENDS)
@each_kind
@each_mode
def test_an_empty_batch(mode, kind, backend):
    arguments = call(kind, mode, batch=0) | {"source": np.zeros((1, 5), np.int32), "v2p": np.zeros((3, 2), np.int32)}
    found = forward.sections(run(destination(kind, mode, batch=0), backend, **arguments))
    sums = {"cu_seqlens_k"} | ({"cu_seqlens_q"} if mode == "draft_extend" else set())
    if kind == "pooled":
        sums.add("dsa_cu_seqlens_k")
        assert not found["schedule"].any()
    assert all(found[name].tolist() == [0] for name in sums)


@quick_backends
@each_kind
@each_mode
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0), (0, 0)])
def test_layouts_without_rows_or_pages(rows, columns, mode, kind, backend):
    """A verify of no rows is what a forward without a window has: lengths, tables and states."""
    arguments = call(kind, mode, rows=rows)
    check(destination(kind, mode, rows=rows, columns=columns), backend, **arguments)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@each_kind
def test_64_bit_inputs_with_x64_on(kind, backend):
    arguments = call(kind, "draft_extend")
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.int64) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        actual = run(destination(kind, "draft_extend"), backend, **wide, limit=np.int64(70))
    assert actual.buffer.dtype == np.int32
    compare(actual, expect(destination(kind, "draft_extend"), **arguments, limit=70))


@pytest.mark.parametrize("backend", cases.BACKENDS)
@each_kind
def test_inputs_that_are_views(kind, backend):
    places = {
        "seq_lens": ("requests", None, 3, (3,)),
        "req_rows": ("requests", None, 4, (3,)),
        "extend_lens": ("new", None, 1, (2,)),
        "source": ("source", 9, 11, (9, 1)),
        "v2p": ("maps", 4, 1, (4, 2)),
        "anchor": ("anchors", 4, 2, (4,)),
        "slot_of_req": ("slots", None, 2, (3,)),
        "state_v2p": ("states", 3, 1, (3,)),
    }
    arguments = call(kind, "draft_extend")
    actual = run(destination(kind, "draft_extend"), backend, **cases.in_buffers(arguments, places))
    compare(actual, expect(destination(kind, "draft_extend"), **arguments))


# Against its parts ---------------------------------------------------------------------------------------------------


@quick_backends
@each_kind
@each_mode
@pytest.mark.parametrize("granularity", ["page", "token"])
def test_one_launch_equals_its_parts(granularity, mode, kind, backend):
    """decode_metadata or its like, draft_write_window and replay_state_indices, called one after the other."""
    out, arguments = destination(kind, mode), call(kind, mode, seed=7, granularity=granularity)
    limit = None if kind == "pooled" else int32(70)
    parts = forward.in_parts(out=out, **arguments, limit=limit, backend=backend)
    compare(run(out, backend, **arguments, limit=limit), parts)


# What a user relies on -----------------------------------------------------------------------------------------------


@each_backend
def test_a_round_at_the_end_of_the_context(backend):
    """Four rows at 6 tokens of at most 8, over pages of 4: keys, pages and locations end at 8; positions go on."""
    out = forward.packed(2, 4, 3, swa=True, state=True)
    found = run(
        out,
        backend,
        mode="verify",
        seq_lens=int32(6, 0),
        req_rows=int32(1, 0),
        source=int32([0, 0, 0], [5, 9, 2]),
        v2p=int32([0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [7, 6], [6, 6], [7, 7], [8, 8], [3, -1]),
        page_size=4,
        limit=jnp.array(8),
        anchor=int32(50, 60),
        slot_of_req=int32(0, 2),
        state_v2p=int32(0, 1, 5),
    )
    tables, window = found.decode_tables(), found.window()
    assert tables.cache_seqlens.tolist() == [8, 4] and tables.cu_seqlens_k.tolist() == [0, 8, 12]
    assert tables.page_table.tolist() == [[7, 3, 0], [0, 0, 0]]
    assert tables.swa_page_table.tolist() == [[6, 0, 0], [0, 0, 0]]
    assert window.positions.tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert window.virtual_loc.tolist() == [[38, 39, 0, 0], [0, 1, 2, 3]]
    assert window.full_loc.tolist() == [[14, 15, 0, 0], [0, 1, 2, 3]]  # of padding, slots of the sink page
    assert window.swa_loc.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert window.anchor_ids.tolist() == [[50, 0, 0, 0], [60, 0, 0, 0]]
    assert found.state_slots().tolist() == [5, -1]


@each_backend
def test_rows_that_are_no_tokens_go_to_the_sink(backend):
    out = forward.packed(3, 3, 2, mode="draft_extend")
    found = run(
        out,
        backend,
        mode="draft_extend",
        seq_lens=int32(3, 5, 0),
        extend_lens=int32(2, 0, 3),
        req_rows=int32(1, 2, 1),
        source=int32([0, 0], [3, 4], [5, 6]),
        page_size=4,
    )
    assert found.decode_tables().cache_seqlens.tolist() == [5, 5, 3]
    assert found.decode_tables().cu_seqlens_q.tolist() == [0, 2, 2, 5]
    assert found.window().full_loc.tolist() == [[15, 16, 0], [0, 0, 0], [12, 13, 14]]
    assert found.window().positions.tolist() == [[3, 4, 5], [5, 6, 7], [0, 1, 2]]


STATE_CASES = [  # (tables, slots of rows 0, 1, 2, 3, 4, 5, -1, 6)
    ({}, [-1, 1, 2, 3, 4, 5, -1, 6]),
    ({"slot_of_req": int32(3, 2, 0, -1, 9, 1)}, [-1, 2, -1, -1, 9, 1, -1, -1]),
    ({"state_v2p": int32(4, 8, -1, 0, 6, -2)}, [-1, 8, -1, 0, 6, -1, -1, -1]),
    ({"slot_of_req": int32(3, 2, 0, -1, 9, 1), "state_v2p": int32(4, 8, 7)}, [-1, 7, -1, -1, -1, 8, -1, -1]),
    ({"slot_of_req": int32(3, 2, 0, 2**31 - 1, 3, 1), "state_v2p": int32(4, 8, -1)}, [-1] * 5 + [8, -1, -1]),
]


@each_backend
@pytest.mark.parametrize(("tables", "wanted"), STATE_CASES)
def test_state_slots(tables, wanted, backend):
    """Row 0 and slot 0 are the sink; a row or slot out of range and an unbound slot have no state."""
    out = forward.packed(8, 0, 0, state=True)
    rows = int32(0, 1, 2, 3, 4, 5, -1, 6)
    of = {"seq_lens": np.zeros(8, np.int32), "req_rows": rows, "source": np.zeros((7, 1), np.int32)}
    assert run(out, backend, mode="verify", page_size=4, **of, **tables).state_slots().tolist() == wanted


@quick_backends
def test_without_an_anchor_ids_stay(backend):
    arguments = call("swa", "verify")
    del arguments["anchor"]
    found = run(destination("swa", "verify"), backend, **arguments)
    assert (found.window().anchor_ids == STALE).all()


@quick_backends
def test_rows_of_a_padded_extend_see_nothing(backend):
    """A request of which two of six rows are tokens, and one of which none is."""
    arguments = call("pooled", "draft_extend", batch=2) | {"seq_lens": int32(7, 9), "extend_lens": int32(2, 0)}
    found = run(destination("pooled", "draft_extend", batch=2), backend, **arguments)
    tables = found.kpool()
    assert tables.seqlens_expanded.tolist() == [8, 9, 0, 0, 0, 0] + [0] * 6
    assert tables.dsa_cu_seqlens_k.tolist() == [0, 8] + [17] * 11
    assert tables.write_start.tolist() == [7, 9]
    assert tables.write_loc.tolist()[1][1] == 0  # no token of the second request is in pool 3
    assert (found.window().full_loc[1] == 0).all()


@quick_backends
def test_a_decode_is_a_verify_of_one_row(backend):
    """It sees what a draft chain at S tokens sees, with the S-th token written instead of the next one."""
    arguments = call("pooled", "chain", rows=1) | {"seq_lens": int32(16, 1, 80, 17, 1, 15, 79)}
    chain = run(destination("pooled", "chain", rows=1), backend, **arguments)
    arguments |= {"mode": "verify", "seq_lens": arguments["seq_lens"] - 1}
    decode = run(destination("pooled", "verify", rows=1), backend, **arguments)
    after, before = chain.kpool(), decode.kpool()
    for name in ("seqlens_expanded", "dsa_cache_seqlens", "real_page_table", "page_table", "pool_seqlens", "schedule"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
    np.testing.assert_array_equal(after.write_start, before.write_start + 1)
    np.testing.assert_array_equal(chain.window().positions, decode.window().positions + 1)


@quick_backends
@each_mode
def test_pools_of_one_token_are_plain_selection(mode, backend):
    """A row attends to min(E, K) tokens, scores each that it sees, and has no tail."""
    arguments, out = call("pooled", mode) | {"pool": 1}, destination("pooled", mode, pool=1)
    after = run(out, backend, **arguments)
    compare(after, expect(out, **arguments))
    found = after.kpool()
    seen = found.seqlens_expanded
    assert (seen > TOPK).any()
    np.testing.assert_array_equal(found.dsa_cache_seqlens, np.minimum(seen, TOPK))
    np.testing.assert_array_equal(found.pool_seqlens, seen)
    np.testing.assert_array_equal(found.tail_logical_start, found.write_start)
    np.testing.assert_array_equal(found.real_page_table, found.page_table)


@quick_backends
@pytest.mark.parametrize("limit", [None, 1000])
def test_pools_that_hold_no_token_of_the_forward_go_to_the_sink(limit, backend):
    """Of the pools of 16 tokens that six rows may close: behind the last row, behind the table, in an unbound page."""
    out = forward.packed(4, 6, 4, pool=4, mode="draft_extend")
    found = run(
        out,
        backend,
        mode="draft_extend",
        seq_lens=int32(30, 30, 62, 14),
        extend_lens=int32(6, 2, 6, 6),
        req_rows=int32(1, 1, 1, 2),
        source=int32([0] * 4, [3, 1, 5, 2], [9, 4, 0, 0]),
        page_size=16,
        pool=4,
        topk=8,
        full_v2p=int32(0, 1, 2, 3, 4, 5),
        **({} if limit is None else {"limit": limit}),
    )
    assert found.kpool().write_loc.tolist() == [[1 * 4 + 3, 5 * 4], [1 * 4 + 3, 0], [2 * 4 + 3, 0], [0, 4 * 4]]


# What is read --------------------------------------------------------------------------------------------------------


def dead_tokens(arguments, out):
    """True for cells of a token-granular source that no section is made of."""
    live = np.zeros(arguments["source"].shape, bool)
    expected, pooled = expect(out, **arguments), out.layout.kpool is not None
    page = PAGE // POOL if pooled else PAGE
    for b, row in enumerate(arguments["req_rows"]):
        row = row if 0 <= row < len(live) else 0
        live[row, : expected["cache_seqlens"][b] : page] = True
        rows = arguments["extend_lens"][b] if "extend_lens" in arguments else out.layout.D
        for position in expected["positions"][b, :rows]:
            live[row, position : position + 1] = True
        for m in range(expected["write_loc"].shape[1] if pooled else 0):
            pool = expected["write_start"][b] // POOL + m
            if pool * POOL < expected["cache_seqlens"][b]:
                live[row, pool // page * PAGE :][:1] = True
    return ~live


@each_kind
@each_mode
def test_of_the_tokens_only_one_in_a_page_is_read(mode, kind):
    arguments = call(kind, mode, granularity="token")
    out = destination(kind, mode)
    dead = dead_tokens(arguments, out)
    assert dead.mean() > 0.5
    compare(run_checked(out, {"source": dead}, **arguments), expect(out, **arguments))
    dead[arguments["req_rows"][2], PAGE] = True  # and the mask does bite
    with pytest.raises(KernelFault, match="load of dead cells of source"):
        run_checked(out, {"source": dead}, **arguments)


@each_kind
@each_mode
def test_of_the_pages_only_live_ones_are_read(mode, kind):
    """Columns past the live ones hold ids of pages that were freed: nobody reads them, whatever they are."""
    arguments = call(kind, mode) | {"seq_lens": int32(17, 3, 33, 30, 16, 1, 20)}
    out, live = destination(kind, mode), np.zeros(arguments["source"].shape, bool)
    expected = expect(out, **arguments)
    for b, row in enumerate(arguments["req_rows"]):
        rows = arguments["extend_lens"][b] if "extend_lens" in arguments else out.layout.D
        last = max(expected["cache_seqlens"][b], arguments["seq_lens"][b] + rows) - 1
        live[row if 0 <= row < len(live) else 0, : last // PAGE + 1] = True
    poisoned = np.where(live, arguments["source"], 2**31 - 1).astype(np.int32)
    assert not live.all()
    compare(run_checked(out, {"source": ~live}, **arguments | {"source": poisoned}), expected)


@each_kind
def test_behind_the_limit_nothing_is_read(kind):
    arguments = call(kind, "verify") | {"limit": 20}
    out, live = destination(kind, "verify"), np.zeros(arguments["source"].shape, bool)
    live[:, :2] = True
    poisoned = np.where(live, arguments["source"], 2**31 - 1).astype(np.int32)
    expected = expect(out, **arguments)
    compare(run_checked(out, {"source": ~live}, **arguments | {"source": poisoned}), expected)


def test_of_the_tables_of_states_only_what_requests_have_is_read():
    out, rows = forward.packed(5, 0, 0, state=True), int32(0, 2, 4, 9, 3)
    of = {"seq_lens": np.zeros(5, np.int32), "req_rows": rows, "source": np.zeros((1, 1), np.int32)}
    tables = {"slot_of_req": int32(1, 1, 3, 0, 7, 1), "state_v2p": int32(5, 5, 5, 6, 5)}
    dead = {"slot_of_req": ~np.isin(np.arange(6), [2, 3, 4]), "state_v2p": np.arange(5) != 3}
    found = run_checked(out, dead, mode="verify", page_size=4, **of, **tables)
    assert found.state_slots().tolist() == [-1, 6, -1, -1, -1]
    dead["slot_of_req"][2] = True
    with pytest.raises(KernelFault, match="load of dead cells of slot_of_req"):
        run_checked(out, dead, mode="verify", page_size=4, **of, **tables)


@pytest.mark.parametrize(
    ("pool", "page_size", "topk", "wanted"),
    [
        (1, 64, 2048, False),
        (2, 64, 2048, True),
        (4, 64, 2048, True),
        (16, 64, 2048, True),
        (3, 64, 2048, False),
        (6, 64, 2048, False),
        (4, 128, 2048, False),
        (4, 64, 2049, False),
    ],
)
def test_supported_geometry(pool, page_size, topk, wanted):
    assert supported(pool, page_size, topk) is wanted


# Errors --------------------------------------------------------------------------------------------------------------

TWO, SOURCE = np.ones(2, np.int32), np.zeros((3, 4), np.int32)
CALL = {"seq_lens": TWO, "req_rows": TWO, "source": SOURCE, "mode": "verify", "page_size": 16}
POOLED = {"out": forward.packed(2, 3, 4, pool=4), "pool": 4, "topk": 8}
SWA = {"out": forward.packed(2, 3, 4, swa=True)}
STATE = {"out": forward.packed(2, 3, 4, state=True)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "decode"}, "mode='decode' is unknown: use one of 'verify', 'draft_extend', 'chain'"),
        ({"extend_lens": TWO}, "extend_lens goes with mode='draft_extend' alone"),
        ({"mode": "draft_extend"}, "extend_lens goes with mode='draft_extend' alone, where it is needed"),
        ({"extend_lens": np.ones(3, np.int32), "mode": "draft_extend"}, "extend_lens has 3 rows for a batch of 2"),
        ({"limit": 1.5}, "limit=1.5: it must be an integer"),
        ({"limit": TWO}, r"limit is int32\[2\]: it must be one integer"),
        ({"anchor": np.ones(3, np.int32)}, "anchor has 3 rows for a batch of 2"),
        ({"granularity": "tokens"}, "granularity='tokens' is unknown"),
        ({"page_size": 24}, "page_size=24: it must be a power of two"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"seq_lens": np.ones(2)}, "seq_lens is float64"),
        ({"seq_lens": np.ones(3, np.int32)}, "out.layout.B=2, but seq_lens has 3 rows"),
        ({"req_rows": np.ones(1, np.int32)}, "req_rows has 1 rows for a batch of 2"),
        ({"source": np.zeros((3, 0), np.int32)}, r"source has shape \(3, 0\)"),
        ({"v2p": TWO}, r"v2p has shape \(2,\): it must have 2 dimensions"),
        ({"v2p": np.ones((4, 2), np.int32), "full_v2p": TWO}, "v2p and full_v2p were given"),
        ({"swa_v2p": TWO}, "swa_v2p was given but out has no SWA section"),
        (SWA, "out has a SWA section but no SWA map was given"),
        ({"out": cases.decode_out(2, 4, has_swa=False)}, "out is a DecodeTables: give a PackedMetadata"),
        ({"out": PackedMetadata(jnp.zeros(8, jnp.int32), STATE["out"].layout)}, r"out.buffer is int32\[8\]: .* needs"),
        ({"slot_of_req": TWO}, "slot_of_req was given but out has no state_slots: make its layout with has_state=True"),
        ({"state_v2p": TWO}, "state_v2p was given but out has no state_slots"),
        (STATE | {"slot_of_req": TWO[:0]}, "slot_of_req has no rows: it needs at least row 0, the sink row"),
        (STATE | {"slot_of_req": np.ones((2, 2), np.int32)}, r"slot_of_req has shape \(2, 2\)"),
        (STATE | {"state_v2p": np.ones((2, 2), np.int32)}, r"state_v2p has shape \(2, 2\): one table takes one map"),
        (STATE | {"state_v2p": TWO[:0]}, "state_v2p has no rows"),
        ({"pool": 4}, r"pool was given but out.layout has no kpool: give it KPoolShape\(...\)"),
        ({"topk": 4}, "topk was given but out.layout has no kpool"),
        (POOLED | {"topk": None}, "out.layout has kpool: give pool and topk, too"),
        (POOLED | {"pool": None}, "out.layout has kpool: give pool and topk, too"),
        (POOLED | {"pool": 3}, "pool=3: it must be a power of two"),
        (POOLED | {"pool": 32}, "page_size=16: it must be a multiple of pool=32"),
        (POOLED | {"pool": 2}, r"mode='verify' with pool=2 needs KPoolShape\(pool=2, rows=3\)"),
        (POOLED | {"mode": "chain"}, r"mode='chain' with pool=4 needs KPoolShape\(pool=4, rows=1\)"),
        (POOLED | {"topk": 2.5}, "topk=2.5: it must be an integer"),
        (POOLED | {"out": cases.packed_out(MetadataLayout(2, 3, 4, True, KPoolShape(4, 3)))}, "no SWA sections"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        forward_metadata(**({"out": forward.packed(2, 3, 4)} | CALL | change))

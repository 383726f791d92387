"""kpool_metadata, the launch of a whole forward: every mode against the oracle, edges, what it reads, errors."""

import jax
import jax.numpy as jnp
import kernel_cases as cases
import kernel_kpool as kpool
import numpy as np
import pytest
from kernel_cases import int32

from pallas_kernels import KernelFault, KPoolShape, MetadataLayout, checked, kpool_metadata
from pallas_kernels import kpool_metadata_fusion_supported as supported

MODES = ("decode", "verify", "draft_extend", "mtp_precompute")
each_mode = pytest.mark.parametrize("mode", MODES)
each_backend = pytest.mark.parametrize("backend", cases.EVERY_BACKEND)
quick_backends = pytest.mark.parametrize("backend", cases.QUICK)
POOL, PAGE, TOPK = 4, 16, 24  # pages of 16 tokens of 4 attention pages, which hold 4 tokens, or of 4 pools


def call(mode, batch=7, rows=6, columns=5, seed=0, granularity="page"):
    """Arguments of a call by name, and P: lengths at edges, padded rows, bad ids."""
    p = cases.problem(PAGE, batch, columns, seed)
    source = p["pages"] if granularity == "page" else cases.as_tokens(p["pages"], PAGE)
    pairs = np.stack([p["full"], np.full_like(p["full"], 1000)], axis=1)
    arguments = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": source, "v2p": pairs, "mode": mode}
    if mode == "draft_extend":
        arguments["extend_lens"] = np.random.default_rng(seed).integers(0, rows + 1, batch).astype(np.int32)
    return arguments | {"anchor": p["lengths"] + 100, "granularity": granularity}


def destination(mode, batch=7, rows=6, columns=5, **more):
    lengths = rows if mode in ("verify", "draft_extend") else 1
    return kpool.packed(batch, rows, columns, POOL, lengths=lengths, **more)


def run(out, backend, **arguments):
    static = {"pool": POOL, "topk": TOPK, "page_size": PAGE, "backend": backend}
    return cases.run(kpool_metadata, out, **(static | arguments))


def expect(out, mode, **arguments):
    """What the oracle makes of a call."""
    expected, shape = kpool.sections(out), out.layout.kpool
    options = {"pool": shape.pool, "topk": TOPK, "page_size": PAGE, "zero_tail": True}
    arguments = {n: np.asarray(a) if isinstance(a, jax.Array) else a for n, a in arguments.items()}
    kpool.metadata(expected, mode=mode, **(options | arguments))
    return expected


def run_checked(out, dead=None, seed=0, **arguments):
    """A checked run in which cells are dead, or programs run in another order."""
    with checked.declare(dead=dead, seed=seed):
        return kpool_metadata(out=out, pool=POOL, topk=TOPK, page_size=PAGE, backend="checked", **arguments)


def compare(actual, expected):
    for name, array in kpool.sections(actual).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def check(out, backend, **arguments):
    expected = expect(out, **arguments)
    compare(run(out, backend, **arguments), expected)
    return expected


# Against the oracle --------------------------------------------------------------------------------------------------


@each_backend
@each_mode
def test_every_section(mode, backend):
    expected = check(destination(mode), backend, **call(mode))
    unwritten = {name for name, array in expected.items() if array.size and (array == kpool.STALE).all()}
    assert unwritten == (set() if mode == "draft_extend" else {"cu_seqlens_q"})


@quick_backends
@each_mode
@pytest.mark.parametrize("limit", [0, 33, 64, 79, 1000])
def test_a_limit(limit, mode, backend):
    check(destination(mode), backend, **call(mode, seed=1), limit=jnp.array(limit))


@quick_backends
@each_mode
@pytest.mark.parametrize("granularity", ["page", "token"])
def test_without_clearing_tails_they_stay(granularity, mode, backend):
    check(destination(mode), backend, **call(mode, seed=2, granularity=granularity), zero_tail=False)


@quick_backends
@each_mode
@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 1, 1), (3, 9, 40), (40, 2, 3), (2, 5, 300)])
def test_batches_rows_and_widths(batch, rows, columns, mode, backend):
    """Some rows of a batch close several pools; wide tables take several blocks and programs."""
    out = destination(mode, batch, rows, columns, processors=7)
    check(out, backend, **call(mode, batch, rows, columns, seed=3))


@each_mode
def test_a_request_takes_turns_over_blocks(mode, monkeypatch):
    monkeypatch.setattr(checked.CheckedLanes, "least", 4)
    monkeypatch.setattr("pallas_kernels.kpool_tables.BLOCK", 8)
    monkeypatch.setattr("pallas_kernels.kpool_tables.PROGRAMS", 10)
    monkeypatch.setattr("pallas_kernels.kpool_lengths.HEAD_LANES", 8)
    monkeypatch.setattr("pallas_kernels.kpool_places.BLOCK", 8)
    for seed in range(3):
        out, arguments = destination(mode, columns=9), call(mode, columns=9, seed=seed)
        compare(run_checked(out, seed=seed, **arguments), expect(out, **arguments))


@pytest.mark.parametrize("backend", cases.BACKENDS)
@each_mode
def test_an_empty_batch(mode, backend):
    arguments = call(mode, batch=0) | {"source": np.zeros((1, 5), np.int32), "v2p": np.zeros((3, 2), np.int32)}
    found = kpool.sections(run(destination(mode, batch=0), backend, **arguments))
    sums = {"cu_seqlens_k", "dsa_cu_seqlens_k"} | ({"cu_seqlens_q"} if mode == "draft_extend" else set())
    assert all(found[name].tolist() == [0] for name in sums)
    assert not found["schedule"].any()


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_64_bit_inputs_with_x64_on(backend):
    arguments = call("draft_extend")
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.int64) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        actual = run(destination("draft_extend"), backend, **wide, limit=np.int64(70))
    assert actual.buffer.dtype == np.int32
    compare(actual, expect(destination("draft_extend"), **arguments, limit=70))


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_inputs_that_are_views(backend):
    places = {
        "seq_lens": ("requests", None, 3, (3,)),
        "req_rows": ("requests", None, 4, (3,)),
        "extend_lens": ("new", None, 1, (2,)),
        "source": ("source", 9, 11, (9, 1)),
        "v2p": ("maps", 4, 1, (4, 2)),
        "anchor": ("anchors", 4, 2, (4,)),
    }
    arguments = call("draft_extend")
    actual = run(destination("draft_extend"), backend, **cases.in_buffers(arguments, places))
    compare(actual, expect(destination("draft_extend"), **arguments))


# What a user relies on -----------------------------------------------------------------------------------------------


@quick_backends
def test_rows_of_a_padded_extend_see_nothing_less_than_nothing(backend):
    """A padded request of one token, and one with two of its three rows: max(S - q + j + 1, 0)."""
    arguments = call("draft_extend", batch=2, rows=6) | {"seq_lens": int32(1, 9), "extend_lens": int32(6, 2)}
    found = run(destination("draft_extend", batch=2), backend, **arguments).kpool()
    assert found.seqlens_expanded.tolist() == [0, 0, 0, 0, 0, 1, 8, 9, 0, 0, 0, 0]
    assert found.dsa_cu_seqlens_k.tolist() == [0, 0, 0, 0, 0, 0, 1, 9, 18, 18, 18, 18, 18]
    assert found.write_start.tolist() == [-5, 7]


@quick_backends
def test_decode_reads_what_precompute_reads_one_token_earlier(backend):
    """A draft chain that starts at S tokens and a decode of the S-th see the same, and write one place apart."""
    chain = run(destination("mtp_precompute"), backend, **call("mtp_precompute")).kpool()
    decode = run(destination("decode"), backend, **call("decode")).kpool()
    for name in ("seqlens_expanded", "dsa_cache_seqlens", "real_page_table", "page_table", "pool_seqlens", "schedule"):
        np.testing.assert_array_equal(getattr(chain, name), getattr(decode, name), err_msg=name)
    np.testing.assert_array_equal(chain.write_start, decode.write_start + 1)


@quick_backends
@each_mode
def test_pools_of_one_token_are_plain_selection(mode, backend):
    """A row attends to min(E, K) tokens, scores each that it sees, and has no tail."""
    arguments = call(mode)
    out = kpool.packed(7, 6, 5, 1, lengths=6 if mode in ("verify", "draft_extend") else 1)
    after = run(out, backend, **arguments, pool=1)
    compare(after, expect(out, **arguments))
    found = after.kpool()
    seen = found.seqlens_expanded
    assert (seen > TOPK).any()
    np.testing.assert_array_equal(found.dsa_cache_seqlens, np.minimum(seen, TOPK))
    np.testing.assert_array_equal(found.pool_seqlens, seen)
    np.testing.assert_array_equal(found.tail_logical_start, found.write_start)
    np.testing.assert_array_equal(found.real_page_table, found.page_table)


def dead_tokens(arguments, out):
    """True for cells of a token-granular source that no section is made of."""
    live = np.zeros(arguments["source"].shape, bool)
    expected, page = expect(out, **arguments), PAGE // POOL
    for b, row in enumerate(arguments["req_rows"]):
        row = row if 0 <= row < len(live) else 0
        live[row, : expected["cache_seqlens"][b] : page] = True
        for position in expected["positions"][b]:
            live[row, max(position, 0) : position + 1] = True
        for m in range(expected["write_loc"].shape[1]):
            column = (expected["write_start"][b] // POOL + m) // page * POOL
            live[row, min(max(column, 0) * page, live.shape[1] - page)] = True
    return ~live


@each_mode
def test_of_the_tokens_only_one_in_a_page_is_read(mode):
    arguments = call(mode, granularity="token")
    out = destination(mode)
    dead = dead_tokens(arguments, out)
    assert dead.mean() > 0.5
    compare(run_checked(out, {"source": dead}, **arguments), expect(out, **arguments))
    dead[arguments["req_rows"][2], PAGE // POOL] = True  # and the mask does bite
    with pytest.raises(KernelFault, match="load of dead cells of source"):
        run_checked(out, {"source": dead}, **arguments)


@each_mode
def test_of_the_pages_only_live_ones_are_read(mode):
    """Columns past the live ones hold ids of pages that were freed: nobody reads them, whatever they are."""
    arguments = call(mode) | {"seq_lens": int32(17, 3, 33, 30, 16, 1, 20)}
    out = destination(mode)
    expected, pages = expect(out, **arguments), np.arange(5)
    live = np.zeros(arguments["source"].shape, bool)
    for b, row in enumerate(arguments["req_rows"]):
        last = max(expected["cache_seqlens"][b] - 1, expected["positions"][b].max(), 0)
        live[row] |= pages <= max(last, expected["write_start"][b] + POOL * expected["write_loc"].shape[1]) // PAGE
    poisoned = np.where(live, arguments["source"], 2**31 - 1).astype(np.int32)
    compare(run_checked(out, {"source": ~live}, **arguments | {"source": poisoned}), expected)


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
CALL = {"seq_lens": TWO, "req_rows": TWO, "source": SOURCE, "mode": "verify", "pool": 4, "topk": 8, "page_size": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "prefill"}, "mode='prefill' is unknown: use one of 'decode', 'verify'"),
        ({"pool": 3}, "pool=3: it must be a power of two"),
        ({"pool": 32}, "page_size=16: it must be a multiple of pool=32"),
        ({"pool": 2}, r"out.layout.kpool is KPoolShape\(pool=4, rows=3, sms=3\).* needs KPoolShape\(pool=2, rows=3\)"),
        ({"mode": "decode"}, r"mode='decode' with pool=4 and D=3 needs KPoolShape\(pool=4, rows=1\)"),
        ({"page_size": 24}, "page_size=24: it must be a power of two"),
        ({"topk": 2.5}, "topk=2.5: it must be an integer"),
        ({"extend_lens": TWO}, "extend_lens goes with mode='draft_extend' alone"),
        ({"mode": "draft_extend"}, "extend_lens goes with mode='draft_extend' alone, where it is needed"),
        ({"extend_lens": np.ones(3, np.int32), "mode": "draft_extend"}, "extend_lens has 3 rows for a batch of 2"),
        ({"limit": 1.5}, "limit=1.5: it must be an integer"),
        ({"anchor": np.ones(3, np.int32)}, "anchor has 3 rows for a batch of 2"),
        ({"granularity": "tokens"}, "granularity='tokens' is unknown"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"seq_lens": np.ones(2)}, "seq_lens is float64"),
        ({"seq_lens": np.ones(3, np.int32)}, "out.layout.B=2, but seq_lens has 3 rows"),
        ({"v2p": TWO}, r"v2p has shape \(2,\): it must have 2 dimensions"),
        ({"v2p": np.ones((4, 2), np.int32), "full_v2p": TWO}, "v2p and full_v2p were given"),
        ({"out": cases.decode_out(2, 4, has_swa=False)}, "out is a DecodeTables: give a PackedMetadata"),
        ({"out": cases.packed_out(MetadataLayout(2, 3, 4, False))}, r"it needs kpool=KPoolShape\(...\) and no SWA"),
        ({"out": cases.packed_out(MetadataLayout(2, 3, 4, True, KPoolShape(4, 3)))}, "no SWA sections"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kpool_metadata(**({"out": kpool.packed(2, 3, 4, 4)} | CALL | change))

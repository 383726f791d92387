"""One call of every operation in each form that lowers differently: for compiling, for the sanitizer, for pointers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    CommitSteps,
    DecodeTables,
    KPoolShape,
    KPoolTables,
    MetadataLayout,
    PackedMetadata,
    RaggedLayout,
    View,
    WindowBuffers,
    commit_context_rows,
    commit_track_indices,
    decode_lengths,
    decode_metadata,
    draft_extend_metadata,
    draft_write_window,
    extend_cache_locs,
    forward_metadata,
    kpool_append_tail,
    kpool_decode,
    kpool_draft_extend,
    kpool_ragged_layout,
    kpool_verify,
    kpool_write_plan,
    kv_read_stream,
    kv_read_table,
    page_zero,
    replay_state_indices,
    state_scatter,
)

B, D, P, R, NV, N = 5, 4, 300, 7, 99, 700
PAGE = 64
L, SLOTS, STATE = 2, 9, (3, 1500)  # layers, state slots, a state of several programs with a part left over
UNITS, U, SLOT_UNITS = 700, 64, 71  # a pool; a slot's units, of which a state takes 70
KINDS = (3, 100)  # units a page of each kind
HEADS, WIDTH = 3, 80  # of a context row: heads, and the width of one, which fills no vector
POOL, TOPK = 4, 2048  # tokens a pool, tokens of a row's selected pools
LAYOUT = MetadataLayout(B, D, P, has_swa=True)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


PACKED = PackedMetadata(int32(LAYOUT.size), LAYOUT)
TABLES = DecodeTables(int32(B), int32(B + 1), int32(B, P), int32(B, P))
BUFFERS = WindowBuffers(*(int32(B, D) for _ in range(5)))
ROWS = (int32(B), int32(B), int32(R, P))
PAIRS = (*ROWS, int32(NV, 2))
# FULL and SWA tables interleaved in one buffer, 40 cells before the first and the rest of each row between two.
WIDE = (int32(B), int32(B + 1), int32(B * 700 + 40))


def decode(out, seq_lens, rows, source, v2p, backend):
    return decode_metadata(
        seq_lens, rows, source, out, page_size=PAGE, seq_len_delta=D, v2p=v2p, zero_tail=True, backend=backend
    )


def decode_static(out, seq_lens, rows, source, full, slots, backend):
    maps = {"full_v2p": full, "full_to_swa": slots}
    return decode_metadata(
        seq_lens, rows, source, out, page_size=PAGE, granularity="token", zero_tail=False, backend=backend, **maps
    )


def decode_views(out, seq_lens, rows, source, v2p, delta, backend):
    lengths, prefix, wide = out
    tables = [View(wide, offset=40 + column, shape=(B, P), strides=(700, 2)) for column in (0, 1)]
    out = decode_metadata(
        seq_lens,
        rows,
        View(source, offset=1, shape=(R, P - 1), strides=(P, 1)),
        DecodeTables(lengths, prefix, *tables),
        page_size=PAGE,
        seq_len_delta=delta,
        full_v2p=View(v2p, offset=0, shape=(NV,), strides=(2,)),
        swa_v2p=View(v2p, offset=1, shape=(NV,), strides=(2,)),
        zero_tail=False,
        backend=backend,
    )
    return out.cache_seqlens, out.cu_seqlens_k, out.page_table.buffer


def lengths(out, seq_lens, backend):
    return decode_lengths(seq_lens, out, backend=backend)


def extend(out, seq_lens, rows, source, v2p, new, backend):
    return draft_extend_metadata(seq_lens, new, rows, source, out, page_size=PAGE, v2p=v2p, backend=backend)


def window(out, start, rows, source, v2p, anchor, limit, backend):
    options = {"page_size": PAGE, "v2p": v2p, "anchor": anchor, "limit": limit, "backend": backend}
    return draft_write_window(start, rows, source, out, **options)


def window_separate(out, start, rows, source, full, swa, backend):
    maps = {"full_v2p": full, "swa_v2p": swa}
    return draft_write_window(
        start, rows, source, out, page_size=1, granularity="token", limit=512, backend=backend, **maps
    )


def verify(out, lens, rows, source, v2p, anchor, limit, backend):
    out = decode(out, lens, rows, source, v2p, backend)
    return window(out, lens, rows, source, v2p, anchor, limit, backend)


def read_table(out, seq_lens, rows, source, v2p, backend):
    return kv_read_table(seq_lens, rows, source, out, page_size=PAGE, zero_tail=False, v2p=v2p, backend=backend)


def read_stream(out, seq_lens, rows, source, indptr, start, v2p, backend):
    options = {"page_size": PAGE, "kv_start": start, "v2p": v2p, "backend": backend}
    return kv_read_stream(seq_lens, rows, source, indptr, out, **options)


def cache_locs(out, start, end, rows, source, backend):
    return extend_cache_locs(start, end, rows, source, out, backend=backend)


def replay(out, slots, v2p, valid, backend):
    indices, rows = out
    return replay_state_indices(rows, slots, indices, valid=valid, v2p=v2p, backend=backend)


def commit_track(out, accept_lens, seq_lens, accept_index, backend):
    options = {"num_draft_tokens": D, "interval": 64, "accept_index": accept_index, "backend": backend}
    return commit_track_indices(accept_lens, seq_lens, out, **options)


def chain(out, accept_lens, seq_lens, backend):
    return commit_track_indices(accept_lens, seq_lens, out, num_draft_tokens=D, interval=8, backend=backend)


def scatter(out, src, step, index, backend):
    return state_scatter(src, step, index, out, backend=backend)


def scatter_to_pool(pool, src, step, index, backend):
    out = View(pool, U, (1, SLOTS, 70, U), (0, SLOT_UNITS * U, U, 1))
    return state_scatter(src, step, index, out, backend=backend).buffer


def context(out, k, v, norm, cos, sin, full, swa, commit, backend):
    locs, kinds = (full, swa), (0, 1, 0)[: len(out)]
    return commit_context_rows(k, v, norm, cos, sin, locs, kinds, commit, out, eps=1e-6, backend=backend)


def context_to_pool(pool, product, *rest, backend):
    """Layers in entries of two kinds, no two of which share a unit; K and V in one product's result."""
    row = HEADS * 64  # cells of K or V
    k, v = (
        View(product, i * row, (B, D, L, HEADS, 64), (D * L * 2 * row, L * 2 * row, 2 * row, 64, 1)) for i in (0, 1)
    )
    out = [View(pool, at * U, (UNITS // size, 2 * HEADS, U), (size * U, U, 1)) for at, size in ((2, 28), (8, 14))]
    return context(out, k, v, *rest, backend)[0].buffer


def zero(pool, pages, backend):
    return page_zero(pool, pages, page_units=KINDS, backend=backend)


def append_tail(out, selected, seq_lens, pool_lens, table, backend):
    return kpool_append_tail(selected, seq_lens, pool_lens, out, pool=POOL, page_table=table, backend=backend)


def append_positions(out, selected, seq_lens, pool_lens, backend):
    return kpool_append_tail(selected, seq_lens, pool_lens, out, pool=POOL, backend=backend)


def ragged(out, table, first_page, pages, first_row, rows, seen, backend):
    return kpool_ragged_layout(table, first_page, pages, first_row, rows, seen, out, pool=POOL, backend=backend)


def forward(mode, out, seq_lens, rows, source, v2p, anchor, limit, *more, backend):
    """A forward; `more`: extend_lens of a draft extend, and the two tables of states of a layout that has them."""
    options = {"mode": mode, "page_size": PAGE, "v2p": v2p, "anchor": anchor, "limit": limit, "backend": backend}
    if mode == "draft_extend":
        options["extend_lens"], *more = more
    if more:
        options["slot_of_req"], options["state_v2p"] = more
    if out.layout.kpool is not None:
        options |= {"pool": POOL, "topk": TOPK, "page_size": POOL * PAGE}
    return forward_metadata(seq_lens, rows, source, out, **options)


def forward_static(out, seq_lens, rows, source, full, swa, backend):
    """Separate maps, token granularity, nothing that a call may leave out."""
    options = {"full_v2p": full, "swa_v2p": swa, "page_size": PAGE, "granularity": "token", "zero_tail": False}
    return forward_metadata(seq_lens, rows, source, out, mode="verify", limit=512, backend=backend, **options)


def forward_out(rows=D, pages=P, *, swa=False, lengths=None, state=False):
    """A packed destination; `lengths`: rows that have lengths, of a layout with pooled attention."""
    kpool = None if lengths is None else KPoolShape(POOL, lengths)
    layout = MetadataLayout(B, rows, pages, swa, kpool, state)
    return PackedMetadata(int32(layout.size), layout)


FORWARD = {mode: functools.partial(forward, mode) for mode in ("verify", "draft_extend", "chain")}


def pooled_tables(rows, lines, height):
    """Every destination of kpool_decode and its like."""
    shapes = [B, B + 1, lines, lines, lines + 1, lines, (height, N), (height, 11), (height, 3), (B, rows), B, B, B]
    return KPoolTables(*(int32(*np.atleast_1d(s).tolist()) for s in [*shapes, (B, -(-rows // POOL)), (5, 2)]))


def slots_decode(out, seq_lens, rows, source, backend):
    return kpool_decode(seq_lens, rows, source, out, pool=POOL, topk=TOPK, backend=backend)


def slots_verify(out, seq_lens, rows, source, backend):
    return kpool_verify(seq_lens, rows, source, out, rows=D, pool=POOL, topk=TOPK, backend=backend)


def slots_extend(out, seq_lens, new, rows, source, backend):
    return kpool_draft_extend(seq_lens, new, rows, source, out, rows=D, pool=POOL, topk=TOPK, backend=backend)


def write_plan(out, start, rows, table, backend):
    return kpool_write_plan(start, rows, table, out, rows=D, pool=POOL, backend=backend)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def _turn(width):
    """The other operands of context rows of heads so wide."""
    angles = array(jnp.float32, B, D, width // 2)
    return array(jnp.bfloat16, L, width), angles, angles, int32(B, D), int32(B, D), int32(B)


PLAN = pooled_tables(D, B * D, B)._replace(
    **dict.fromkeys(["cache_seqlens", "cu_seqlens_k", "dsa_cache_seqlens", "dsa_cu_seqlens_k", "page_table_1"]),
    **dict.fromkeys(["real_page_table", "page_table", "paged_mqa_ctx_lens_2d"]),
)
WINDOW = (*PAIRS, int32(B), int32())
STATES = (int32(R), int32(SLOTS))
CALLS = {  # name: (function whose last argument is a backend, its other arguments with the destination first, launches)
    "decode, packed": (decode, (PACKED, *PAIRS), 1),
    "decode, separate": (decode, (TABLES, *PAIRS), 1),
    "decode, static SWA map": (decode_static, (TABLES, *ROWS, int32(NV), int32(NV * PAGE)), 1),
    "decode, views": (decode_views, (WIDE, int32(B), int32(B), int32(R * P), int32(NV * 2), int32()), 1),
    "lengths, packed": (lengths, (PACKED, int32(B)), 1),
    "lengths, separate": (lengths, (DecodeTables(int32(B), int32(B + 1)), int32(B)), 1),
    "extend, packed": (extend, (PACKED, *PAIRS, int32(B)), 1),
    "extend, separate": (extend, (TABLES._replace(cu_seqlens_q=int32(B + 1)), *PAIRS, int32(B)), 1),
    "window, packed": (window, (PACKED, *WINDOW), 1),
    "window, separate": (window, (BUFFERS, *WINDOW), 1),
    "window, separate maps": (window_separate, (BUFFERS._replace(anchor_ids=None), *ROWS, int32(NV), int32(NV)), 1),
    "verify, packed": (verify, (PACKED, *WINDOW), 2),
    "read table": (read_table, (int32(B, P), *ROWS, int32(NV)), 1),
    "read stream": (read_stream, (int32(N), *ROWS, int32(B + 1), int32(B), int32(NV)), 1),
    "cache locations": (cache_locs, (int32(N), int32(B), int32(B), int32(B), int32(R, P)), 1),
    "replay": (replay, ((int32(B), int32(B)), int32(R), int32(NV), int32()), 1),
    "commit track": (commit_track, (CommitSteps(int32(B), int32(B)), int32(B), int32(B), int32(B, D)), 1),
    "commit track, chain": (chain, (CommitSteps(int32(B), int32(B)), int32(B), int32(B)), 1),
    "state scatter": (
        scatter,
        (array(jnp.float32, L, SLOTS, *STATE), array(jnp.float32, L, B, D, *STATE), int32(B), int32(B)),
        1,
    ),
    "state scatter, pool": (
        scatter_to_pool,
        (array(jnp.bfloat16, UNITS, U), array(jnp.bfloat16, 1, B, D, 70, U), int32(B), int32(B)),
        1,
    ),
    "context rows": (
        context,
        (
            (array(jnp.float32, SLOTS, 2 * HEADS * WIDTH),) * L,
            *[array(jnp.float32, B, D, L, HEADS, WIDTH)] * 2,
            *_turn(WIDTH),
        ),
        1,
    ),
    "context rows, pool": (
        context_to_pool,
        (array(jnp.uint16, UNITS, U), array(jnp.bfloat16, B * D, L * 2 * HEADS * 64), *_turn(64)),
        1,
    ),
    "forward, verify": (FORWARD["verify"], (forward_out(swa=True), *WINDOW), 1),
    "forward, verify, states": (FORWARD["verify"], (forward_out(swa=True, state=True), *WINDOW, *STATES), 1),
    "forward, verify, FULL": (FORWARD["verify"], (forward_out(state=True), *WINDOW), 1),
    "forward, verify, static": (forward_static, (forward_out(swa=True), *ROWS, int32(NV), int32(NV)), 1),
    "forward, extend, states": (
        FORWARD["draft_extend"],
        (forward_out(swa=True, state=True), *WINDOW, int32(B), *STATES),
        1,
    ),
    "forward, chain": (FORWARD["chain"], (forward_out(swa=True), *WINDOW), 1),
    "forward, lengths and states": (FORWARD["verify"], (forward_out(0, 0, state=True), *WINDOW, *STATES), 1),
    "forward, pooled decode": (FORWARD["verify"], (forward_out(1, lengths=1), *WINDOW), 1),
    "forward, pooled verify, states": (
        FORWARD["verify"],
        (forward_out(lengths=D, state=True), *WINDOW, *STATES),
        1,
    ),
    "forward, pooled extend": (FORWARD["draft_extend"], (forward_out(lengths=D), *WINDOW, int32(B)), 1),
    "forward, pooled, no rows": (FORWARD["verify"], (forward_out(0, lengths=0), *WINDOW), 1),
    "forward, pooled chain": (FORWARD["chain"], (forward_out(lengths=1), *WINDOW), 1),
    "kpool decode": (slots_decode, (pooled_tables(1, B, B), int32(B), int32(B), int32(R, N)), 1),
    "kpool verify": (slots_verify, (pooled_tables(D, B * D, B * D), int32(B), int32(B), int32(R, N)), 1),
    "kpool extend": (slots_extend, (pooled_tables(D, 17, 17), int32(B), int32(B), int32(B), int32(R, N)), 1),
    "kpool plan": (write_plan, (PLAN, int32(B), int32(B), int32(B * D, 11)), 1),
    "page zero": (zero, (array(jnp.bfloat16, UNITS, U), int32(2, 40)), 1),
    "page zero, float32": (zero, (array(jnp.float32, UNITS, U), int32(2, 40)), 1),
    "append tail": (append_tail, (int32(B, TOPK + 3), int32(B, TOPK), int32(B), int32(B), int32(B, 9999)), 1),
    "append tail, positions": (append_positions, (int32(B, TOPK + 3), int32(B, TOPK), int32(B), int32(B)), 1),
    "ragged layout": (ragged, (RaggedLayout(*map(int32, (N, N, N))), int32(B, P * POOL), *[int32(B)] * 4, int32(N)), 1),
}


def _states(rng, shape):
    """States that can be told apart, some rows skipped; no two rows have one slot."""
    steps, slots = rng.integers(-1, D + 1, B), rng.permutation(SLOTS + 2)[:B] - 1
    return rng.integers(-99, 99, shape), steps, slots


def _pages(rng):
    """Pages of two kinds, the larger ones behind the smaller ones, a few entries 0, below it or past the pool."""
    small, large = rng.permutation(100)[:40], np.zeros(40)
    large[rng.permutation(40)[:5]] = [3, 5, 4, 7, -1]
    return (np.stack([small, large]),)


def _tails(rng):
    """Rows that see more pools than are selected, as many, fewer and none."""
    lengths = np.array([3, 2047, 2048, 9998, 5003])
    return rng.integers(0, 9999, (B, TOPK)), lengths, lengths // POOL, rng.integers(0, 9999, (B, 9999))


def _ragged(rng):
    """Requests of several blocks of pages and of none, which do not fill the destinations."""
    pages, rows = np.array([290, 0, 260, 1, 40]), np.array([257, 3, 0, 300, 1])
    table = rng.integers(-2, NV, (B, P * POOL))
    return table, pages.cumsum() - pages, pages, rows.cumsum() - rows, rows, rng.integers(0, 300 * 64, N)


def _context(rng, *rows):
    """Some rows committed of each request; locations of theirs differ."""
    width = rows[0][-1] if len(rows) > 1 else 64
    locs = [rng.permutation(B * D + 2)[: B * D].reshape(B, D) - 1 for _ in range(2)]
    angles = rng.integers(-1, 2, (2, B, D, width // 2))
    return (
        *(rng.integers(-9, 9, shape) for shape in rows),
        rng.integers(-3, 3, (L, width)),
        *angles,
        *locs,
        range(-1, B - 1),
    )


CONTENTS = {  # where wild numbers are not allowed
    "commit track": lambda rng: (
        rng.integers(-1, D + 2, B),
        rng.integers(0, 200, B),
        np.sort(rng.integers(0, D, (B, D))) + D * np.arange(B)[:, None],
    ),
    "commit track, chain": lambda rng: (rng.integers(-1, D + 2, B), rng.integers(0, 200, B)),
    "replay": lambda rng: (rng.integers(-2, NV + 2, R), rng.integers(-1, 50, NV), 4),
    "state scatter": lambda rng: _states(rng, (L, B, D, *STATE)),
    "state scatter, pool": lambda rng: _states(rng, (1, B, D, 70, U)),
    "context rows": lambda rng: _context(rng, *[(B, D, L, HEADS, WIDTH)] * 2),
    "context rows, pool": lambda rng: _context(rng, (B * D, L * 2 * HEADS * 64)),
    "kpool extend": lambda rng: (
        rng.integers(0, 2 * N, B),
        rng.integers(0, D + 1, B),
        rng.integers(0, R, B),
        rng.integers(0, 9999, (R, N)),
    ),
    "page zero": _pages,
    "page zero, float32": _pages,
    "append tail": _tails,
    "append tail, positions": lambda rng: _tails(rng)[:3],
    "ragged layout": _ragged,
}


def values(name: str, seed: int = 0):
    """Arguments with contents for a call: -7 in the destination, ids in range and out of it elsewhere."""
    _, (out, *arguments), _ = CALLS[name]
    rng = np.random.default_rng(seed)
    filled = jax.tree.map(lambda x: jnp.full(x.shape, -7, jnp.int32).astype(x.dtype), out)
    if name == "replay":  # whose second destination is a source, too
        filled = filled[0], jnp.asarray(rng.integers(-1, R + 1, B), jnp.int32)
    contents = CONTENTS[name](rng) if name in CONTENTS else [_contents(rng, x.shape) for x in arguments]
    return filled, *(jnp.asarray(np.asarray(c), x.dtype) for c, x in zip(contents, arguments, strict=True))


def _contents(rng, shape):
    if shape == (B + 1,):  # indptr
        return np.arange(B + 1) * (N // B)
    if shape in [(), (B,)]:  # lengths, request rows, a limit
        return rng.integers(0, 2 * N, shape)
    return rng.integers(-2, NV + 9, shape)

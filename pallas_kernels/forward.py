"""forward_metadata: everything that one forward of a model needs of its requests' lengths and pages, in one launch.

The launch is made of the pieces of the single operations (see fused.py), each with programs of its own:

    lengths and prefix sums | page tables | write window | state slots | what pooled attention needs besides

so no piece waits for another, and what a call does not need has no program.
"""

import dataclasses

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import PackedMetadata
from pallas_kernels.kpool_call import Call, check_pool
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.operands import Inputs
from pallas_kernels.span import Span
from pallas_kernels.state_indices import StateSlots
from pallas_kernels.tables import Rows
from pallas_kernels.views import Array

MODES = ("verify", "draft_extend", "chain")


def forward_metadata(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: PackedMetadata,
    *,
    mode: str,
    page_size: int,
    granularity: str = "page",
    extend_lens: Array | None = None,
    anchor: Array | None = None,
    v2p: Array | None = None,
    full_v2p: Array | None = None,
    swa_v2p: Array | None = None,
    limit=None,
    zero_tail: bool = True,
    pool: int | None = None,
    topk: int | None = None,
    slot_of_req: Array | None = None,
    state_v2p: Array | None = None,
    backend: str | None = None,
) -> PackedMetadata:
    """Write all metadata of a forward: lengths, tables, write window, state slots, and what pooled attention needs.

    With L = seq_lens[b], the tokens that request b has before the forward, D rows of the window (`out.layout`) and
    q = extend_lens[b]:

        mode             rows that are tokens    keys N    n    row j < n sees E tokens
        'verify'         all D                   L + D     D    L + j + 1
        'draft_extend'   the first q             L + q     D    L + j + 1 for j < q, else 0
        'chain'          all D, one by one       L         1    L

    N and E are cut at `limit`. What is written:

        cache_seqlens, cu_seqlens_k    N and its prefix sums
        cu_seqlens_q                   prefix sums of extend_lens; of a draft extend only
        page_table, swa_page_table     physical pages of the first N tokens, as decode_metadata writes them
        positions                      L + j
        virtual_loc, full_loc, swa_loc where the D rows go, as draft_write_window writes them; of rows that are no
                                       tokens, the sink
        anchor_ids                     anchor[b] in column 0 and 0 in the others, if `anchor` is given
        state_slots                    state_v2p[slot_of_req[r]] of request row r, of a layout with has_state; -1 for
                                       r <= 0 and where the slot is 0 or less, out of range or unbound

    A layout with kpool has n rows with lengths. For the `pool` tokens of a pool, attention pages of
    page = page_size // pool tokens, which is also the pools of an index page, and slot(t) the FULL slot of token t:

        seqlens_expanded[b * n + j]    E
        pool_seqlens                   E // pool
        dsa_cache_seqlens              min(E // pool * pool, topk) + E % pool
        dsa_cu_seqlens_k               prefix sums of dsa_cache_seqlens
        real_page_table[b, c]          slot(c * page) // page, of the first N tokens
        write_start[b]                 L
        tail_logical_start[b]          L rounded down to a multiple of pool
        write_loc[b, m]                place of the key of pool g = L // pool + m in the index cache: index page
                                       slot(g // page * page_size) // page_size times page, plus g % page
        schedule                       where each processor starts to score the pools of all rows (see Schedule)

    A table has one row a request, which its n rows share. What has no physical page is 0, the sink; so is the write_loc
    of a pool that starts at or behind N or behind the end of the source.

    Args:
      seq_lens: int[B].
      req_rows, source, granularity, v2p, full_v2p, swa_v2p: as in decode_metadata.
      page_size: tokens of a page of the allocator; it holds one index page, and pool attention pages.
      zero_tail: whether to clear the columns of the tables past the first N tokens, as in decode_metadata.
      out: PackedMetadata. Donate it to the surrounding jit and it is written in place.
      mode: what the forward is, as above. A decode of one row is a verify of D = 1.
      extend_lens: int[B], rows of each request of a draft extend, at most D.
      anchor: int[B], the token each request starts from.
      limit: end of the context in tokens, a Python integer or an integer array of one element.
      pool: tokens a pool, a power of two: `out.layout.kpool.pool`.
      topk: tokens in closed pools that a row attends to at most. Both go with a layout with kpool.
      slot_of_req: int[R], state slot of each request row; without it, the request row itself.
      state_v2p: int[NS], physical slot of each slot, -1 where unbound; without it they are equal.
      backend: as in decode_metadata.

    Returns:
      `out` with these sections written; nothing else changes.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the decode metadata, write window and state indices of SGLang's unified KV memory and the KPool metadata of
    its DSA attention, their contracts restated; one launch for all is our own.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import MetadataLayout
    >>> layout = MetadataLayout(B=1, D=3, P=2, has_swa=False, has_state=True)
    >>> of = jnp.array([6]), jnp.array([1]), jnp.array([[0, 0], [5, 9]])
    >>> out = forward_metadata(*of, PackedMetadata.zeros(layout), mode="verify", page_size=8, limit=8)
    >>> out.decode_tables().cache_seqlens.tolist(), out.decode_tables().page_table.tolist()
    ([8], [[5, 0]])
    >>> out.window().full_loc.tolist(), out.state_slots().tolist()
    ([[46, 47, 0]], [1])

    With pooled attention, and nothing that ends the context:

    >>> from pallas_kernels import KPoolShape
    >>> layout = MetadataLayout(B=1, D=3, P=2, has_swa=False, kpool=KPoolShape(pool=4, rows=3, sms=2))
    >>> of = jnp.array([14]), jnp.array([1]), jnp.array([[0, 0], [5, 9]])
    >>> out = forward_metadata(*of, PackedMetadata.zeros(layout), mode="verify", page_size=16, pool=4, topk=8)
    >>> tables = out.kpool()
    >>> tables.seqlens_expanded.tolist(), tables.dsa_cache_seqlens.tolist(), tables.pool_seqlens.tolist()
    ([15, 16, 17], [11, 8, 9], [3, 4, 4])
    >>> tables.real_page_table.tolist(), tables.page_table.tolist(), tables.write_loc.tolist()
    ([[20, 21, 22, 23, 36, 0, 0, 0]], [[5, 9]], [[23]])
    """
    backends.check(backend)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, MODES))}")
    if (extend_lens is not None) != (mode == "draft_extend"):
        raise ValueError(f"extend_lens goes with mode='draft_extend' alone, where it is needed; mode={mode!r}")
    if not isinstance(out, PackedMetadata):
        raise ValueError(f"out is a {type(out).__name__}: give a PackedMetadata")
    operands.check_integers("seq_lens", seq_lens, 1)
    layout, batch = out.layout, seq_lens.shape[0]
    buffers.check(out, PackedMetadata, batch)
    rows = 1 if mode == "chain" else layout.D
    pool_shift, topk = _check_pooled(layout, mode, rows, pool, topk, page_size)
    for name, array in (("slot_of_req", slot_of_req), ("state_v2p", state_v2p)):
        if array is not None and not layout.has_state:
            raise ValueError(f"{name} was given but out has no state_slots: make its layout with has_state=True")

    absent = {"cu_seqlens_q"} if extend_lens is None else set()
    absent |= {"anchor_ids"} if anchor is None else set()
    flat, destination = buffers.flatten(out, tuple(name for name in layout.sections if name not in absent))
    inputs = Inputs()
    span = Span(
        B=batch,
        rows=rows,
        tokens=inputs.add("seq_lens", seq_lens, 1, batch),
        new=None if extend_lens is None else inputs.add("extend_lens", extend_lens, 1, batch),
        first=int(mode != "chain"),
        start=0,
        cached=layout.D if mode == "verify" else 0,
        limit=None if limit is None else inputs.scalar("limit", limit),
        before=True,
    )
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    full, swa = operands.make_maps(inputs, v2p, full_v2p, swa_v2p, None, layout.has_swa)
    anchors = None if anchor is None else inputs.add("anchor", anchor, 1, batch)
    slots = Slots(req, table, full, pool_shift, table.shift - pool_shift)
    call = Call("forward_metadata", inputs, destination, span, slots)
    counts = call.counts()
    if layout.kpool is not None:
        pieces = [counts, call.lengths(topk), call.schedule(), call.plan(reached=True), call.tables(1, zero_tail)]
    else:
        maps = tuple(pair for pair in (("page_table", full), ("swa_page_table", swa)) if pair[1] is not None)
        columns = Rows(req, table, maps, layout.P, bool(zero_tail)) if layout.P else None
        pieces = [dataclasses.replace(counts, rows=columns)]
    pieces.append(call.window(anchors, swa))
    if layout.has_state:
        of_req = None if slot_of_req is None else inputs.add("slot_of_req", slot_of_req, 1)
        if of_req is not None and of_req.shape[0] == 0:
            raise ValueError("slot_of_req has no rows: it needs at least row 0, the sink row")
        states = operands.make_map(inputs, state_v2p, None, name="state_v2p")
        pieces.append(StateSlots(batch, destination["state_slots"], req, of_req, states))
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)


def _check_pooled(layout, mode: str, rows: int, pool, topk, page_size) -> tuple[int, int | None]:
    """(log2 of pool, topk), or raise ValueError; (0, None) for a layout without kpool."""
    given = {name: value for name, value in (("pool", pool), ("topk", topk)) if value is not None}
    if layout.kpool is None:
        if given:
            raise ValueError(f"{min(given)} was given but out.layout has no kpool: give it KPoolShape(...)")
        return 0, None
    if len(given) < 2:
        raise ValueError("out.layout has kpool: give pool and topk, too")
    shift = check_pool(pool)
    if operands.page_shift(page_size) < shift:
        raise ValueError(f"page_size={page_size}: it must be a multiple of pool={pool}, the tokens of a pool")
    if (layout.kpool.pool, layout.kpool.rows) != (pool, rows) or layout.has_swa:
        raise ValueError(
            f"out.layout is {layout}: mode={mode!r} with pool={pool} needs KPoolShape(pool={pool}, rows={rows}) and no "
            "SWA sections"
        )
    return shift, operands.check_static("topk", topk)

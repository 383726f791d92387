"""forward_metadata: everything that one forward of a model needs of its requests' lengths and pages, in one launch.

The launch is made of the pieces of the single operations (see fused.py), each with programs of its own:

    lengths and prefix sums | page tables | write window | state slots | what pooled attention needs besides

so no piece waits for another, and what a call does not need has no program.
"""

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import PackedMetadata
from pallas_kernels.kpool_call import Call, check_pool
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.operands import Inputs
from pallas_kernels.span import Span
from pallas_kernels.state_indices import StateSlots
from pallas_kernels.tables import Count, Rows, Tables
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

        mode             rows that are tokens    keys N            row j of a pooled layer sees E tokens
        'verify'         all D                   L + D             L + j + 1
        'draft_extend'   the first q             L + q             L + j + 1 for j < q, else 0
        'chain'          all D, one by one       L                 L, for the one row with lengths

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

    and for a layout with kpool the sections that kpool_metadata writes, its tables for the first N tokens, and its
    write_loc 0, the sink, for pools that start at or behind N.

    Args:
      seq_lens: int[B].
      req_rows, source, page_size, granularity, v2p, full_v2p, swa_v2p, zero_tail: as in decode_metadata.
      out: PackedMetadata. Donate it to the surrounding jit and it is written in place.
      mode: what the forward is, as above. A decode of one row is a verify of D = 1.
      extend_lens: int[B], rows of each request of a draft extend, at most D.
      anchor: int[B], the token each request starts from.
      limit: end of the context in tokens, a Python integer or an integer array of one element.
      pool, topk: as in kpool_metadata; they go with a layout with kpool.
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
        cut=limit is not None,
    )
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    full, swa = operands.make_maps(inputs, v2p, full_v2p, swa_v2p, None, layout.has_swa)
    anchors = None if anchor is None else inputs.add("anchor", anchor, 1, batch)
    slots = Slots(req, table, full, pool_shift, table.shift - pool_shift)
    call = Call("forward_metadata", inputs, destination, span, slots)
    if layout.kpool is not None:
        pieces = [call.counts(), call.lengths(topk), call.schedule(), call.plan(reached=True)]
        pieces.append(call.tables(1, zero_tail))
    else:
        counts = [Count.cached(span, "cache_seqlens", "cu_seqlens_k")]
        counts += [] if span.new is None else [Count(span.new, 0, None, "cu_seqlens_q")]
        maps = tuple(pair for pair in (("page_table", full), ("swa_page_table", swa)) if pair[1] is not None)
        columns = Rows(req, table, maps, layout.P, bool(zero_tail)) if layout.P else None
        pieces = [Tables(call.name, batch, (), destination, tuple(counts), columns)]
    pieces.append(call.window(anchors, swa, fill=True))
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

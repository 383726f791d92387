"""Metadata of attention over selected pools: everything that one forward needs, in one launch.

The pieces of the launch are in kpool_lengths.py, kpool_tables.py and kpool_places.py. The functions of kpool_modes.py
write some of it into arrays of their own.
"""

from pallas_kernels import backend as backends
from pallas_kernels import buffers, kpool_lengths, kpool_places, kpool_tables, operands
from pallas_kernels.buffers import PackedMetadata
from pallas_kernels.kpool_call import Call, check_pool
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.operands import Inputs
from pallas_kernels.span import Span
from pallas_kernels.views import Array

MODES = ("decode", "verify", "draft_extend", "mtp_precompute")
WINDOW = ("virtual_loc", "full_loc", "positions", "anchor_ids")
PACKED = ("cache_seqlens", "cu_seqlens_k", "cu_seqlens_q", *kpool_lengths.OUTPUTS, *kpool_tables.TABLES)
PACKED += (*WINDOW, *kpool_places.PLAN, "schedule")


def kpool_metadata_fusion_supported(pool: int, page_size: int, topk: int) -> bool:
    """Whether all metadata of a forward can come from one launch.

    Args:
      pool: tokens a pool.
      page_size: tokens an attention page.
      topk: tokens in closed pools that a row attends to at most.

    Source: the eligibility rule of SGLang's fused KPool metadata.

    >>> kpool_metadata_fusion_supported(4, 64, 2048), kpool_metadata_fusion_supported(1, 64, 2048)
    (True, False)
    """
    return pool > 1 and page_size == 64 and page_size % pool == 0 and topk % pool == 0


def kpool_metadata(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: PackedMetadata,
    *,
    mode: str,
    pool: int,
    topk: int,
    page_size: int,
    granularity: str = "page",
    extend_lens: Array | None = None,
    anchor: Array | None = None,
    v2p: Array | None = None,
    full_v2p: Array | None = None,
    limit=None,
    zero_tail: bool = True,
    backend: str | None = None,
):
    """All metadata of a forward over pooled attention, in one launch: lengths, tables, write window, plan, schedule.

    With S = seq_lens[b], q = extend_lens[b], D rows of the window and n rows with lengths (`out.layout`), row j of
    request b sees E tokens. E is never more than `limit`:

        mode                S counts               E                         cached   position of row 0
        'decode'            the new token, too     S                (n = 1)  S        S - 1
        'verify'            committed tokens       S + j + 1        (n = D)  S + D    S
        'draft_extend'      the new rows, too      S - q + j + 1    (n = D)  S        S - q
        'mtp_precompute'    committed tokens       S                (n = 1)  S        S

    In a draft extend E is at least 0, and 0 for the rows j >= q, which have the sink in all locations. Then, for the
    `pool` tokens of a pool, pages of page_size // pool tokens as attention sees them, and slot(t) the FULL slot of
    token t:

        cache_seqlens, cu_seqlens_k    tokens cached, and their prefix sums
        cu_seqlens_q                   prefix sums of extend_lens; of a draft extend only
        seqlens_expanded[b * n + j]    E
        pool_seqlens                   E // pool
        dsa_cache_seqlens              min(E // pool * pool, topk) + E % pool
        dsa_cu_seqlens_k               prefix sums of dsa_cache_seqlens
        page_table[b, c]               slot(c * page_size) // page_size              of the tokens cached
        real_page_table[b, c]          slot(c * page) // page with page = page_size // pool, of the tokens cached
        virtual_loc, full_loc, positions, anchor_ids    as draft_write_window writes them
        write_start[b]                 position of row 0
        tail_logical_start[b]          write_start rounded down to a multiple of pool
        write_loc[b, m]                place of the key of pool g = write_start // pool + m in the index cache: index
                                       page slot(g // page * page_size) // page_size times page, plus g % page
        schedule                       where each processor starts to score the pools of all rows (see Schedule)

    A page table has one row a request: row r of the forward has row r // n. What has no physical page is 0, the sink.
    With `limit`, so is the write_loc of a pool that starts at or past it or past the end of the source. Without, such
    a pool takes the source's last page.

    Args:
      seq_lens: int[B].
      req_rows, source, page_size, granularity, v2p, full_v2p: as in decode_metadata. page_size: tokens of a page of the
        allocator, which holds one index page: pool times those of an attention page.
      out: PackedMetadata of a layout with kpool. Donate it to the surrounding jit and it is written in place.
      mode: what the forward is, as above.
      pool: tokens a pool, a power of two: `out.layout.kpool.pool`.
      topk: tokens in closed pools that a row attends to at most.
      extend_lens: int[B], rows of each request of a draft extend, at most D.
      anchor, limit: as in draft_write_window.
      zero_tail: whether to clear the columns of the tables past the tokens cached, as in decode_metadata.
      backend: as in decode_metadata.

    Returns:
      `out` with these sections written; swa sections do not exist and nothing else changes.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the KPool metadata of SGLang's DSA attention, its contract restated; one launch for all is our own.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import KPoolShape, MetadataLayout
    >>> layout = MetadataLayout(B=1, D=3, P=2, has_swa=False, kpool=KPoolShape(pool=4, rows=3, sms=2))
    >>> out = kpool_metadata(jnp.array([14]), jnp.array([1]), jnp.array([[0, 0], [5, 9]]), PackedMetadata.zeros(layout),
    ...     mode="verify", pool=4, topk=8, page_size=16)
    >>> tables = out.kpool()
    >>> tables.seqlens_expanded.tolist(), tables.dsa_cache_seqlens.tolist(), tables.pool_seqlens.tolist()
    ([15, 16, 17], [11, 8, 9], [3, 4, 4])
    >>> tables.real_page_table.tolist(), tables.page_table.tolist(), tables.write_loc.tolist()
    ([[20, 21, 22, 23, 36, 0, 0, 0]], [[5, 9]], [[23]])
    """
    backends.check(backend)
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, MODES))}")
    operands.check_integers("seq_lens", seq_lens, 1)
    batch = seq_lens.shape[0]
    if not isinstance(out, PackedMetadata):
        raise ValueError(f"out is a {type(out).__name__}: give a PackedMetadata")
    buffers.check(out, PackedMetadata, batch)
    layout, pool_shift = out.layout, check_pool(pool)
    page = operands.page_shift(page_size) - pool_shift
    if page < 0:
        raise ValueError(f"page_size={page_size}: it must be a multiple of pool={pool}, the tokens of a pool")
    rows = layout.D if mode in ("verify", "draft_extend") else 1
    if layout.kpool is None or layout.has_swa:
        raise ValueError(f"out.layout is {layout}: it needs kpool=KPoolShape(...) and no SWA sections")
    if (layout.kpool.pool, layout.kpool.rows) != (pool, rows):
        raise ValueError(
            f"out.layout.kpool is {layout.kpool}: mode={mode!r} with pool={pool} and D={layout.D} needs "
            f"KPoolShape(pool={pool}, rows={rows})"
        )
    if (extend_lens is not None) != (mode == "draft_extend"):
        raise ValueError(f"extend_lens goes with mode='draft_extend' alone, where it is needed; mode={mode!r}")
    inputs, names = Inputs(), [n for n in PACKED if n != "cu_seqlens_q" or mode == "draft_extend"]
    flat, destination = buffers.flatten(out, tuple(n for n in names if n != "anchor_ids" or anchor is not None))
    tokens = inputs.add("seq_lens", seq_lens, 1, batch)
    new = None if extend_lens is None else inputs.add("extend_lens", extend_lens, 1, batch)
    span = Span(
        B=batch,
        rows=rows,
        tokens=tokens,
        new=new,
        first=int(mode in ("verify", "draft_extend")),
        start=-1 if mode == "decode" else 0,
        cached=rows if mode == "verify" else 0,
        limit=None if limit is None else inputs.scalar("limit", limit),
    )
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    full, _ = operands.make_maps(inputs, v2p, full_v2p, None, None, False)
    call = Call("kpool_metadata", inputs, destination, span, Slots(req, table, full, pool_shift, page))
    anchors = None if anchor is None else inputs.add("anchor", anchor, 1, batch)
    pieces = [call.counts(), call.lengths(operands.check_static("topk", topk)), call.schedule()]
    pieces += [call.window(anchors), call.plan(), call.tables(1, zero_tail)]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)

"""Metadata of attention over selected pools: everything that one forward needs, in one launch.

The pieces of the launch are in kpool_lengths.py, kpool_tables.py and kpool_places.py.
"""

import dataclasses

from pallas_kernels import backend as backends
from pallas_kernels import buffers, kpool_lengths, kpool_places, kpool_tables, operands
from pallas_kernels.buffers import Destination, KPoolTables, PackedMetadata
from pallas_kernels.fused import Fused
from pallas_kernels.kpool_lengths import RowLengths, Schedule, Span
from pallas_kernels.kpool_places import Places
from pallas_kernels.kpool_tables import PageTables
from pallas_kernels.operands import Inputs, PageMap, Source
from pallas_kernels.tables import Count, Tables
from pallas_kernels.views import Array, Section

MODES = ("decode", "verify", "draft_extend", "mtp_precompute")
PACKED = ("cache_seqlens", "cu_seqlens_k", "cu_seqlens_q", *kpool_lengths.OUTPUTS, *kpool_tables.TABLES)
PACKED += (*kpool_places.WINDOW, *kpool_places.PLAN, "schedule")
PLAN = (*kpool_places.PLAN, "seqlens_expanded", "pool_seqlens", "schedule")


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
    layout, (pool_shift, page) = out.layout, _check_pages(pool, operands.page_shift(page_size))
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
    call = _Call("kpool_metadata", inputs, destination, span, req, table, full, pool_shift, page)
    anchors = None if anchor is None else inputs.add("anchor", anchor, 1, batch)
    pieces = [call.counts(), call.lengths(topk), call.schedule(), call.places(anchors), call.tables(1, zero_tail)]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)


def kpool_decode(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: KPoolTables,
    *,
    pool: int,
    topk: int,
    page_size: int = 64,
    backend: str | None = None,
):
    """Lengths and tables of a decode step over pooled attention, into any choice of arrays: one row a request.

        cache_seqlens[b] = seqlens_expanded[b] = S = seq_lens[b], the token being decoded included
        dsa_cache_seqlens[b] = min(S // pool * pool, topk) + S % pool        pool_seqlens[b] = S // pool
        page_table_1[b, t] = slot(t)                                   for t < S
        real_page_table[b, c] = slot(c * page_size) // page_size       for c * page_size < S
        page_table[b, c] = real_page_table[b, c * pool] // pool        for c * page_size * pool < S
        write_start[b] = S - 1 and the plan for one new token, see kpool_write_plan
        cu_seqlens_k, dsa_cu_seqlens_k, schedule: see kpool_metadata

    The other columns of the tables stay as they are.

    Args:
      seq_lens: int[B].
      req_rows: int[B], row of `source` of each request.
      source: int[R, columns], slot of each token of a request.
      out: KPoolTables; what is None is not written. Page tables have B rows and any number of columns.
      pool: tokens a pool, a power of two; 1 for plain selection of tokens.
      topk: tokens in closed pools that a row attends to at most.
      page_size: tokens an attention page, and pools an index page; a power of two.
      backend: as in decode_metadata.

    Returns:
      KPoolTables, in place where it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the fused KPool decode metadata of SGLang's DSA attention, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> out = KPoolTables(dsa_cache_seqlens=jnp.zeros(2, jnp.int32), real_page_table=jnp.zeros((2, 3), jnp.int32))
    >>> source = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    >>> tables = kpool_decode(jnp.array([11, 4]), jnp.array([1, 0]), source, out, pool=2, topk=8, page_size=4)
    >>> tables.dsa_cache_seqlens.tolist(), tables.real_page_table.tolist()
    ([9, 4], [[8, 9, 10], [0, 0, 0]])
    """
    options = {"pool": pool, "topk": topk, "page_size": page_size, "backend": backend}
    return _write("kpool_decode", seq_lens, None, req_rows, source, out, 1, first=0, start=-1, cached=0, **options)


def kpool_verify(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: KPoolTables,
    *,
    rows: int,
    pool: int,
    topk: int,
    page_size: int = 64,
    backend: str | None = None,
):
    """Lengths and tables of a verify forward over pooled attention: `rows` rows a request.

    As kpool_decode with S = seq_lens[b] + rows tokens cached, of which seq_lens[b] are committed. Row j of request b
    is row b * rows + j; it sees seq_lens[b] + j + 1 tokens. write_start is seq_lens[b].

    Args:
      seq_lens: int[B], tokens committed.
      rows: rows a request.
      out: KPoolTables as in kpool_decode. Page tables have B rows, or B * rows, which are equal for a request.
      req_rows, source, pool, topk, page_size, backend: as in kpool_decode.

    Returns:
      KPoolTables, in place where it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the fused KPool verify metadata of SGLang's DSA attention, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> out = KPoolTables(seqlens_expanded=jnp.zeros(3, jnp.int32), dsa_cache_seqlens=jnp.zeros(3, jnp.int32))
    >>> source = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    >>> tables = kpool_verify(jnp.array([9]), jnp.array([1]), source, out, rows=3, pool=4, topk=8, page_size=4)
    >>> tables.seqlens_expanded.tolist(), tables.dsa_cache_seqlens.tolist()
    ([10, 11, 12], [10, 11, 8])
    """
    rows = _check_rows(rows)
    options = {"pool": pool, "topk": topk, "page_size": page_size, "backend": backend}
    return _write("kpool_verify", seq_lens, None, req_rows, source, out, rows, first=1, start=0, cached=rows, **options)


def kpool_draft_extend(
    seq_lens: Array,
    extend_lens: Array,
    req_rows: Array,
    source: Array,
    out: KPoolTables,
    *,
    rows: int,
    pool: int,
    topk: int,
    padded: bool = False,
    page_size: int = 64,
    backend: str | None = None,
):
    """Lengths and tables of a draft extend over pooled attention: extend_lens[b] rows of request b.

    As kpool_decode with S = seq_lens[b] tokens cached, the q = extend_lens[b] new ones included. Row j of request b
    sees max(S - q + j + 1, 0) tokens. write_start is S - q.

    Args:
      seq_lens: int[B], tokens, the new ones included.
      extend_lens: int[B], rows of each request, 0 to `rows`.
      rows: rows a request at most.
      padded: whether row j of request b is row b * rows + j; those from extend_lens[b] on see nothing. Otherwise the
        rows of one request follow those of the one before, and what lies behind the last one stays as it is.
      out: KPoolTables as in kpool_decode. What has a row a row has B * rows of them, or, not padded, any number.
      req_rows, source, pool, topk, page_size, backend: as in kpool_decode.

    Returns:
      KPoolTables, in place where it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the fused KPool draft-extend metadata of SGLang's DSA attention, its contract restated; the design is ours.

    >>> import jax.numpy as jnp
    >>> out = KPoolTables(seqlens_expanded=jnp.full(5, -7, jnp.int32), real_page_table=jnp.full((5, 2), -7, jnp.int32))
    >>> source, rows = jnp.arange(64, dtype=jnp.int32).reshape(2, 32), jnp.array([1, 0])
    >>> lengths = jnp.array([6, 3]), jnp.array([3, 1])
    >>> tables = kpool_draft_extend(*lengths, rows, source, out, rows=3, pool=2, topk=4, page_size=4)
    >>> tables.seqlens_expanded.tolist(), tables.real_page_table.tolist()
    ([4, 5, 6, 3, -7], [[8, 9], [8, 9], [8, 9], [0, -7], [-7, -7]])
    """
    options = {"pool": pool, "topk": topk, "page_size": page_size, "backend": backend, "packed": not padded}
    arguments = (seq_lens, extend_lens, req_rows, source, out, _check_rows(rows))
    return _write("kpool_draft_extend", *arguments, first=1, start=0, cached=0, **options)


def kpool_write_plan(
    write_start: Array,
    req_rows: Array,
    real_page_table: Array,
    out: KPoolTables,
    *,
    rows: int,
    pool: int,
    page_size: int = 64,
    backend: str | None = None,
):
    """Where the keys of the pools go that `rows` new tokens a request may close, from a table of attention pages.

    With w = write_start[b] and g = w // pool + m, for m < cdiv(rows, pool):

        write_start[b] = w        tail_logical_start[b] = w // pool * pool        req_rows[b] = req_rows[b]
        write_loc[b, m] = page(g // page_size * pool) // pool * page_size + g % page_size
        seqlens_expanded[b * rows + j] = w + j + 1        pool_seqlens[b * rows + j] = (w + j + 1) // pool

    where page(c) is the attention page of column c of the request's row, the last column's for a larger c. The plan of
    a negative w means nothing. `schedule` is that of kpool_metadata.

    Args:
      write_start: int[B], position of the first new token.
      req_rows: int[B], request rows; they are handed on.
      real_page_table: int[B, columns], or int[B * rows, columns], of which row b * rows belongs to request b.
      out: KPoolTables with some of these fields; write_loc is int32[B, cdiv(rows, pool)].
      rows: new tokens a request.
      pool, page_size, backend: as in kpool_decode.

    Returns:
      KPoolTables, in place where it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the KPool write plan of SGLang's DSA attention, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> out = KPoolTables(tail_logical_start=jnp.zeros(1, jnp.int32), write_loc=jnp.zeros((1, 2), jnp.int32))
    >>> table = jnp.array([[8, 0, 0, 0, 12, 0, 0, 0]])
    >>> plan = kpool_write_plan(jnp.array([255]), jnp.array([7]), table, out, rows=6, pool=4)
    >>> plan.tail_logical_start.tolist(), plan.write_loc.tolist()
    ([252], [[191, 192]])
    """
    backends.check(backend)
    rows = _check_rows(rows)
    operands.check_integers("write_start", write_start, 1)
    batch = write_start.shape[0]
    pool_shift, page = _check_pages(pool, operands.page_shift(page_size) + operands.page_shift(pool))
    _check_out(out, batch, rows, pool, packed=False, allowed=PLAN, name="write_start")
    flat, destination = buffers.flatten(out, PLAN)
    if not flat:
        return out
    inputs = Inputs()
    span = Span(batch, rows, inputs.add("write_start", write_start, 1, batch), None, 1, 0, 0, None)
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, real_page_table, "page", page_size)
    if table.place.shape[0] not in (batch, batch * rows):
        raise ValueError(
            f"real_page_table has {table.place.shape[0]} rows: give {batch}, one a request, or {batch * rows}"
        )
    table = _every(table, table.place.shape[0] // max(batch, 1), batch)
    call = _Call("kpool_write_plan", inputs, destination, span, req, table, PageMap("identity"), pool_shift, page)
    pieces = [call.lengths(0), call.schedule(), call.places(None, by_request=True)]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The operands of a launch, and the pieces that can be made of them; a piece with nothing to write is None."""

    name: str
    inputs: Inputs
    destination: Destination
    span: Span
    req_rows: Section
    source: Source
    page_map: PageMap
    pool: int
    page: int

    def has(self, *names: str) -> bool:
        return any(name in self.destination for name in names)

    def named(self, name: str) -> str | None:
        return name if self.has(name) else None

    def counts(self) -> Tables | None:
        counts = [Count(self.span.tokens, self.span.cached, *map(self.named, ("cache_seqlens", "cu_seqlens_k")))]
        if self.has("cu_seqlens_q"):
            counts.append(Count(self.span.new, 0, None, "cu_seqlens_q"))
        piece = Tables(self.name, self.span.B, (), self.destination, tuple(counts))
        return piece if piece.has_head else None

    def lengths(self, topk: int, packed: bool = False) -> RowLengths | None:
        piece = RowLengths(self.destination, self.span, self.pool, topk, packed)
        return piece if self.has(*kpool_lengths.OUTPUTS) else None

    def schedule(self) -> Schedule | None:
        return Schedule(self.destination, self.span, self.pool) if self.has("schedule") else None

    def places(self, anchor: Section | None, by_request: bool = False) -> Places | None:
        operands = (self.req_rows, self.source, self.page_map, self.pool, self.page, anchor, by_request)
        piece = Places(self.destination, self.span, *operands)
        return piece if self.has(*kpool_places.WINDOW, *kpool_places.PLAN) else None

    def tables(self, copies: int | None, zero_tail: bool) -> PageTables | None:
        operands = (self.req_rows, self.source, self.page_map, self.pool, self.page)
        piece = PageTables(self.destination, self.span, *operands, copies, bool(zero_tail))
        return piece if piece.tables else None

    def run(self, pieces: list, backend: str | None, flat: tuple) -> tuple:
        operation = Fused(self.name, tuple(self.inputs.labels), tuple(piece for piece in pieces if piece is not None))
        return backends.run(operation, backend, self.inputs.arrays, flat)


def _write(
    name: str,
    seq_lens: Array,
    extend_lens: Array | None,
    req_rows: Array,
    source: Array,
    out: KPoolTables,
    rows: int,
    *,
    first: int,
    start: int,
    cached: int,
    pool: int,
    topk: int,
    page_size: int,
    backend: str | None,
    packed: bool = False,
):
    """Check the arguments of a kernel that writes KPoolTables from slots, and run it."""
    backends.check(backend)
    operands.check_integers("seq_lens", seq_lens, 1)
    batch = seq_lens.shape[0]
    pool_shift, page = _check_pages(pool, operands.page_shift(page_size) + operands.page_shift(pool))
    copies = _check_out(out, batch, rows, pool, packed=packed, allowed=KPoolTables._fields)
    flat, destination = buffers.flatten(out, KPoolTables._fields)
    if not flat:
        return out
    inputs = Inputs()
    tokens = inputs.add("seq_lens", seq_lens, 1, batch)
    new = None if extend_lens is None else inputs.add("extend_lens", extend_lens, 1, batch)
    span = Span(batch, rows, tokens, new, first, start, cached, None)
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, "token", page_size)
    call = _Call(name, inputs, destination, span, req, table, PageMap("identity"), pool_shift, page)
    topk = operands.check_static("topk", topk)
    pieces = [call.counts(), call.lengths(topk, packed), call.schedule(), call.places(None)]
    pieces += [call.tables(copies, zero_tail=False)]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)


def _check_rows(rows: int) -> int:
    rows = operands.check_static("rows", rows)
    if rows < 0:
        raise ValueError(f"rows={rows}: it must be >= 0")
    return rows


def _check_pages(pool: int, shift: int) -> tuple[int, int]:
    """log2 of the tokens of a pool and of an attention page, with 2**shift tokens in a page of the allocator."""
    size = operands.check_static("pool", pool)
    if size < 1 or size & (size - 1) or size > 1 << shift:
        raise ValueError(f"pool={size}: it must be a power of two, and page_size a multiple of it")
    return size.bit_length() - 1, shift - (size.bit_length() - 1)


def _check_out(
    out: KPoolTables, batch: int, rows: int, pool: int, *, packed: bool, allowed: tuple[str, ...], name="seq_lens"
) -> int | None:
    """Rows a request of the page tables (None when packed), or raise ValueError for a destination of another shape."""
    if not isinstance(out, KPoolTables):
        raise ValueError(f"out is a {type(out).__name__}: give a KPoolTables")
    given = {field: array for field, array in out._asdict().items() if array is not None}
    if extra := given.keys() - set(allowed):
        raise ValueError(f"out.{min(extra)} is not written by this call: leave it None")

    def size(field: str, dimension: int, otherwise):
        shape = getattr(given.get(field), "shape", ())
        return shape[dimension] if len(shape) > dimension else otherwise

    lengths = [f for f in ("seqlens_expanded", "dsa_cache_seqlens", "pool_seqlens") if f in given]
    total = batch * rows
    if packed:
        total = size(lengths[0], 0, total) if lengths else size("dsa_cu_seqlens_k", 0, total + 1) - 1
    tables = [field for field in kpool_tables.TABLES if field in given]
    height = size(tables[0], 0, total) if tables else total
    if not packed and height not in (batch, total):
        wanted = f"{batch}, one a request" + (f", or {total}" if total != batch else "")
        raise ValueError(f"out.{tables[0]} has {height} rows for a batch of {batch}: give it {wanted}")
    shapes = {
        "cache_seqlens": (batch,),
        "cu_seqlens_k": (batch + 1,),
        "dsa_cu_seqlens_k": (total + 1,),
        "paged_mqa_ctx_lens_2d": (batch, rows),
        "req_rows": (batch,),
        "write_start": (batch,),
        "tail_logical_start": (batch,),
        "write_loc": (batch, -(-rows // pool)),
        "schedule": (max(size("schedule", 0, 2), 2), 2),
    }
    shapes |= dict.fromkeys(lengths, (total,))
    shapes |= {field: (height, size(field, 1, "columns")) for field in tables}
    for field, array in given.items():
        buffers.check_array(f"out.{field}", array, shapes[field])
    if packed:
        return None
    return 1 if height == batch else rows


def _every(source: Source, step: int, rows: int) -> Source:
    """Rows 0, step, 2 * step, ... of a source, `rows` of them."""
    place = source.place
    strides = (place.strides[0] * step, place.strides[1])
    return dataclasses.replace(source, place=dataclasses.replace(place, shape=(rows, place.shape[1]), strides=strides))

"""kpool_decode, kpool_verify, kpool_draft_extend and kpool_write_plan: lengths and tables in arrays of their own.

All are pieces of the launch of forward.py: what `out` lacks is not written.
"""

import dataclasses

from pallas_kernels import backend as backends
from pallas_kernels import buffers, kpool_places, operands
from pallas_kernels.buffers import KPoolTables
from pallas_kernels.kpool_call import Call, check_out, check_pool, check_rows
from pallas_kernels.kpool_slots import Slots
from pallas_kernels.operands import Inputs, PageMap
from pallas_kernels.span import Span
from pallas_kernels.views import Array

PLAN = (*kpool_places.PLAN, "seqlens_expanded", "pool_seqlens", "schedule")


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
        cu_seqlens_k, dsa_cu_seqlens_k, schedule: see forward_metadata

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
    rows = check_rows(rows)
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
    arguments = (seq_lens, extend_lens, req_rows, source, out, check_rows(rows))
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
    a negative w means nothing. `schedule` is that of forward_metadata.

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
    rows = check_rows(rows)
    operands.check_integers("write_start", write_start, 1)
    batch = write_start.shape[0]
    pool_shift, page = check_pool(pool), operands.page_shift(page_size)
    check_out(out, batch, rows, pool, packed=False, allowed=PLAN, name="write_start")
    flat, destination = buffers.flatten(out, PLAN)
    if not flat:
        return out
    inputs = Inputs()
    span = Span(batch, rows, inputs.add("write_start", write_start, 1, batch), None, 1, 0, 0, None)
    req = inputs.add("req_rows", req_rows, 1, batch)
    source = operands.make_source(inputs, real_page_table, "page", page_size)
    height, columns = source.place.shape
    if height not in (batch, batch * rows):
        raise ValueError(
            f"real_page_table has {height} rows for a batch of {batch}: give it {batch} rows, or rows={rows} times "
            "as many"
        )
    strides = (source.place.strides[0] * (height // max(batch, 1)), source.place.strides[1])
    place = dataclasses.replace(source.place, shape=(batch, columns), strides=strides)
    slots = Slots(req, dataclasses.replace(source, place=place), PageMap("identity"), pool_shift, page, by_request=True)
    call = Call("kpool_write_plan", inputs, destination, span, slots)
    pieces = [call.lengths(0), call.schedule(), call.plan()]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)


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
    pool_shift, page = check_pool(pool), operands.page_shift(page_size)
    copies = check_out(out, batch, rows, pool, packed=packed, allowed=KPoolTables._fields)
    flat, destination = buffers.flatten(out, KPoolTables._fields)
    if not flat:
        return out
    inputs = Inputs()
    tokens = inputs.add("seq_lens", seq_lens, 1, batch)
    new = None if extend_lens is None else inputs.add("extend_lens", extend_lens, 1, batch)
    span = Span(batch, rows, tokens, new, first, start, cached, None)
    req = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, "token", page_size)
    slots = Slots(req, table, PageMap("identity"), pool_shift, page)
    call = Call(name, inputs, destination, span, slots)
    topk = operands.check_static("topk", topk)
    pieces = [call.counts(), call.lengths(topk, packed), call.schedule(packed), call.plan(), call.tables(copies, False)]
    return buffers.unflatten(out, call.run(pieces, backend, flat), destination)

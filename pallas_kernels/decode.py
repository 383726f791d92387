"""decode_metadata, decode_lengths and draft_extend_metadata: what attention needs to read the caches, in one launch.

Kernel and reference are `Tables` in tables.py.
"""

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import DecodeTables, PackedMetadata
from pallas_kernels.operands import Inputs
from pallas_kernels.tables import Count, Rows, Tables
from pallas_kernels.views import Array

LENGTHS = ("cache_seqlens", "cu_seqlens_k")
TABLES = ("page_table", "swa_page_table")


def decode_metadata(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: DecodeTables | PackedMetadata,
    *,
    page_size: int,
    zero_tail: bool,
    granularity: str = "page",
    seq_len_delta=0,
    max_pages: int | None = None,
    v2p: Array | None = None,
    full_v2p: Array | None = None,
    swa_v2p: Array | None = None,
    full_to_swa: Array | None = None,
    backend: str | None = None,
):
    """Write what attention needs to read the caches of a batch: lengths, prefix sums, FULL and SWA page tables.

    For row b and column c, with n[b] = seq_lens[b] + seq_len_delta and t the virtual token at position c * page_size:

        cache_seqlens[b] = n[b]
        cu_seqlens_k     = [0, n[0], n[0] + n[1], ...]
        page_table[b, c]     = physical FULL page of t       for c < min(cdiv(n[b], page_size), max_pages)
        swa_page_table[b, c] = physical SWA page of t        for the same c
        both tables[b, c]    = 0 with zero_tail, untouched without     for the other c < max_pages

    Columns from max_pages on are never written. Whatever has no physical page becomes page 0, the sink: negative
    entries, pages the map says are unbound (-1), ids past the end of a map, columns past the end of the source. A
    request row outside the source reads row 0, the sink row.

    Args:
      seq_lens: int[B], tokens committed to each request's cache.
      req_rows: int[B], row of `source` of each request. Padded rows use row 0.
      source: the request table. granularity 'page': int[R, columns], the virtual page of each page of the sequence.
        granularity 'token': int[R, columns], the virtual token id of each position.
      out: destination, DecodeTables or PackedMetadata. Donate it to the surrounding jit and it is written in place.
        Tables that are Views lie inside wider buffers, of which nothing else is written.
      page_size: tokens a page, a power of two.
      zero_tail: whether to clear columns past the live ones. Needed by a reader with a fixed grid, which may fetch an
        entry before it masks it; a stale entry could name a page that has been freed since.
      seq_len_delta: tokens added to each length: 0 to decode, D to verify D rows a request, i + 1 for step i of a chain
        of draft steps. A Python integer, or an array of one integer where it changes between calls.
      max_pages: columns the tables may use, at most (and by default) their width. Lengths are not cut with them.
      v2p: int[NV, 2], physical FULL and SWA page of each virtual page, -1 where unbound; or instead
      full_v2p: int[NV], physical FULL page of each virtual page; without it they are equal; and one of
      swa_v2p: int[NV'], physical SWA page of each virtual page.
      full_to_swa: int[N], physical SWA token of each virtual token: the token is translated, then divided.
      backend: 'reference' (jnp), 'interpret', 'checked' (eager, every access checked), 'triton', 'mosaic', or None: the
        faster compiled kernel on CUDA, the reference elsewhere.

    Each array may be a View of a wider buffer. A map for SWA is needed exactly when `out` has a SWA table (v2p may be
    used without one). Integer inputs of 64 bits are taken as int32; what does not fit is out of range.

    Returns:
      The same type as `out`.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the decode-metadata kernel of SGLang's unified KV memory, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> out = DecodeTables(*(jnp.full(s, -7, jnp.int32) for s in (2, 3, (2, 3))))
    >>> pages = jnp.array([[0, 0, 0], [5, 9, 2]])
    >>> tables = decode_metadata(jnp.array([6, 1]), jnp.array([1, 0]), pages, out, page_size=4, zero_tail=True)
    >>> tables.page_table.tolist(), tables.cu_seqlens_k.tolist()
    ([[5, 9, 0], [0, 0, 0]], [0, 6, 7])
    """
    backends.check(backend)
    return _write_tables(
        "decode_metadata",
        [("seq_lens", seq_lens, seq_len_delta, *LENGTHS)],
        req_rows,
        source,
        out,
        page_size=page_size,
        zero_tail=zero_tail,
        granularity=granularity,
        max_pages=max_pages,
        maps=(v2p, full_v2p, swa_v2p, full_to_swa),
        backend=backend,
    )


def decode_lengths(
    seq_lens: Array,
    out: DecodeTables | PackedMetadata,
    *,
    seq_len_delta=0,
    zero_tail: bool | None = None,
    backend: str | None = None,
):
    """The lengths of `decode_metadata` without its tables, for a caller whose tables are built elsewhere.

    Args:
      seq_lens: int[B], tokens committed to each request's cache.
      out: destination; only its cache_seqlens and cu_seqlens_k are written, and its tables may be None.
      seq_len_delta: tokens added to each length, as in decode_metadata.
      zero_tail: here so that True can be refused: there is no table whose tail could be cleared.
      backend: as in decode_metadata.

    Returns:
      The same type as `out`, in place when it is donated.

    Raises:
      ValueError: for zero_tail=True, a negative delta, or a destination of another shape or dtype.

    Source: the lengths-only form of the decode-metadata kernel of SGLang's unified KV memory.

    >>> import jax.numpy as jnp
    >>> out = DecodeTables(jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32))
    >>> lengths = decode_lengths(jnp.array([6, 12]), out, seq_len_delta=3)
    >>> lengths.cache_seqlens.tolist(), lengths.cu_seqlens_k.tolist()
    ([9, 15], [0, 9, 24])
    """
    backends.check(backend)
    if zero_tail:
        raise ValueError("zero_tail=True: lengths have no tail to clear; leave it out, or call decode_metadata")
    return _write_lengths("decode_lengths", [("seq_lens", seq_lens, seq_len_delta, *LENGTHS)], out, backend)


def draft_extend_metadata(
    seq_lens: Array,
    extend_seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: DecodeTables | PackedMetadata,
    *,
    page_size: int,
    zero_tail: bool = False,
    granularity: str = "page",
    max_pages: int | None = None,
    v2p: Array | None = None,
    full_v2p: Array | None = None,
    swa_v2p: Array | None = None,
    full_to_swa: Array | None = None,
    backend: str | None = None,
):
    """What a ragged forward of new tokens needs: `decode_metadata` with a delta of 0, and cu_seqlens_q.

        cache_seqlens, cu_seqlens_k, page_table, swa_page_table    as decode_metadata writes them for seq_lens
        cu_seqlens_q = [0, e[0], e[0] + e[1], ...]                  with e = extend_seq_lens

    Args:
      seq_lens: int[B], tokens of each request, the new ones included.
      extend_seq_lens: int[B], how many of them are new: rows that the request computes in this forward.
      req_rows, source, page_size, zero_tail, granularity, max_pages, v2p, full_v2p, swa_v2p, full_to_swa, backend: as
        in decode_metadata.
      out: destination, DecodeTables with cu_seqlens_q, or PackedMetadata.

    Returns:
      The same type as `out`, in place when it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the draft-extend metadata of SGLang's unified KV memory, its contract restated; tables are translated too.

    >>> import jax.numpy as jnp
    >>> out = DecodeTables(*(jnp.zeros(s, jnp.int32) for s in (2, 3, (2, 2))), cu_seqlens_q=jnp.zeros(3, jnp.int32))
    >>> pages = jnp.array([[0, 0], [5, 9]])
    >>> new = draft_extend_metadata(jnp.array([6, 1]), jnp.array([3, 1]), jnp.array([1, 0]), pages, out, page_size=4)
    >>> new.cu_seqlens_q.tolist(), new.cu_seqlens_k.tolist(), new.page_table.tolist()
    ([0, 3, 4], [0, 6, 7], [[5, 9], [0, 0]])
    """
    backends.check(backend)
    if isinstance(out, DecodeTables) and out.cu_seqlens_q is None:
        raise ValueError("out.cu_seqlens_q is None: give an int32[B + 1] destination, or call decode_metadata")
    return _write_tables(
        "draft_extend_metadata",
        [("seq_lens", seq_lens, 0, *LENGTHS), ("extend_seq_lens", extend_seq_lens, 0, None, "cu_seqlens_q")],
        req_rows,
        source,
        out,
        page_size=page_size,
        zero_tail=zero_tail,
        granularity=granularity,
        max_pages=max_pages,
        maps=(v2p, full_v2p, swa_v2p, full_to_swa),
        backend=backend,
    )


# The arrays of Counts before they are placed: (argument, array, delta, destination of lengths, of prefix sums).
_Argument = tuple[str, Array, object, str | None, str | None]


def _write_tables(
    name: str,
    counts: list[_Argument],
    req_rows: Array,
    source: Array,
    out,
    *,
    page_size: int,
    zero_tail: bool,
    granularity: str,
    max_pages: int | None,
    maps: tuple,
    backend: str | None,
):
    """Check the arguments of a kernel that writes DecodeTables, and run it. The tables follow the first of `counts`."""
    _, lengths, *_ = counts[0]
    operands.check_integers(counts[0][0], lengths, 1)
    batch = lengths.shape[0]
    buffers.check(out, DecodeTables, batch)
    if isinstance(out, DecodeTables) and out.page_table is None:
        raise ValueError("out.page_table is None: give an int32[B, P] destination, or call decode_lengths")
    written = tuple(field for count in counts for field in count[3:])
    flat, destination = buffers.flatten(out, written + TABLES)
    columns = operands.check_max_pages(max_pages, destination["page_table"].shape[1])
    inputs = Inputs()
    placed = _place(inputs, counts, batch)
    rows = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    full, swa = operands.make_maps(inputs, *maps, "swa_page_table" in destination)
    if columns == 0:
        return _write_lengths(name, counts, out, backend)
    pairs = tuple(pair for pair in zip(TABLES, (full, swa), strict=True) if pair[1] is not None)
    operation = Tables(
        name, batch, tuple(inputs.labels), destination, placed, Rows(rows, table, pairs, columns, bool(zero_tail))
    )
    return buffers.unflatten(out, backends.run(operation, backend, inputs.arrays, flat), destination)


def _write_lengths(name: str, counts: list[_Argument], out, backend: str | None):
    """Check the arguments of a kernel that writes lengths and prefix sums alone, and run it."""
    operands.check_integers(counts[0][0], counts[0][1], 1)
    batch = counts[0][1].shape[0]
    buffers.check(out, DecodeTables, batch)
    flat, destination = buffers.flatten(out, tuple(field for count in counts for field in count[3:]))
    inputs = Inputs()
    operation_counts = _place(inputs, counts, batch)
    operation = Tables(name, batch, tuple(inputs.labels), destination, operation_counts)
    return buffers.unflatten(out, backends.run(operation, backend, inputs.arrays, flat), destination)


def _place(inputs: Inputs, counts: list[_Argument], batch: int) -> tuple[Count, ...]:
    return tuple(
        Count(inputs.add(argument, array, 1, batch), inputs.scalar("seq_len_delta", delta, 0), *names)
        for argument, array, delta, *names in counts
    )

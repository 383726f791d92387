"""Lengths, prefix sums and page tables of one forward, in one launch.

About 264 programs (two for each of an H200's 132 multiprocessors) stride over (row, block of 256 columns); one more
writes the lengths and their prefix sums. A program stops at its row's live pages, so a wide table costs no time, and
its chain of dependent loads is as short as the job allows: (length, request row) -> source -> map -> store.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels import buffers, lanes, operands, reference
from pallas_kernels.buffers import DecodeTables, Destination, PackedMetadata
from pallas_kernels.operands import PageMap, Source

PROGRAMS = 264
BLOCK = 256  # table columns a program handles at once
HEAD_LANES = 1024  # rows whose lengths are summed at once

LENGTHS = ("cache_seqlens", "cu_seqlens_k")
TABLES = ("page_table", "swa_page_table")


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static description of a call. Without a source only the lengths are written."""

    B: int
    seq_len_delta: int
    destination: Destination
    source: Source | None = None
    full: PageMap | None = None
    swa: PageMap | None = None
    max_pages: int = 0
    zero_tail: bool = False


def decode_metadata(
    seq_lens,
    req_rows,
    source,
    out: DecodeTables | PackedMetadata,
    *,
    page_size: int,
    zero_tail: bool,
    granularity: str = "page",
    seq_len_delta: int = 0,
    max_pages: int | None = None,
    v2p=None,
    full_v2p=None,
    swa_v2p=None,
    full_to_swa=None,
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
      page_size: tokens a page, a power of two.
      zero_tail: whether to clear columns past the live ones. Needed by a reader with a fixed grid, which may fetch an
        entry before it masks it; a stale entry could name a page that has been freed since.
      seq_len_delta: tokens added to each length: 0 to decode, D to verify D rows a request.
      max_pages: columns the tables may use, at most (and by default) their width. Lengths are not cut with them.
      v2p: int[NV, 2], physical FULL and SWA page of each virtual page, -1 where unbound; or instead
      full_v2p: int[NV], physical FULL page of each virtual page; without it they are equal; and one of
      swa_v2p: int[NV'], physical SWA page of each virtual page.
      full_to_swa: int[N], physical SWA token of each virtual token: the token is translated, then divided.
      backend: 'reference' (jnp), 'interpret', 'triton', or None: the kernel on CUDA, the reference elsewhere.

    A map for SWA is needed exactly when `out` has a SWA table (v2p may be used without one). Integer inputs of 64 bits
    are narrowed to 32.

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
    operands.check_integers("seq_lens", seq_lens, 1)
    batch = seq_lens.shape[0]
    operands.check_integers("req_rows", req_rows, 1, batch)
    buffers.check(out, DecodeTables, batch)
    flat, destination = buffers.flatten(out, LENGTHS + TABLES)
    tables, full, swa = operands.make_maps(v2p, full_v2p, swa_v2p, full_to_swa, "swa_page_table" in destination)
    spec = _Spec(
        B=batch,
        seq_len_delta=_check_delta(seq_len_delta),
        destination=destination,
        source=operands.make_source(source, granularity, page_size),
        full=full,
        swa=swa,
        max_pages=_check_max_pages(max_pages, destination["page_table"].shape[1]),
        zero_tail=bool(zero_tail),
    )
    if spec.max_pages == 0:
        return _lengths_only(seq_lens, out, spec.seq_len_delta, backend)
    inputs = tuple(map(operands.as_int32, (seq_lens, req_rows, source, *tables)))
    return buffers.unflatten(out, _decode(spec, backend, inputs, flat), destination)


def decode_metadata_reference(*args, **kwargs):
    """`decode_metadata` with backend='reference': the same arguments and result, computed with plain jnp."""
    return decode_metadata(*args, **kwargs, backend="reference")


def decode_lengths(
    seq_lens,
    cache_seqlens,
    cu_seqlens_k,
    *,
    seq_len_delta: int = 0,
    zero_tail: bool | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The lengths of `decode_metadata` without its tables, for a caller whose tables are built elsewhere.

    Args:
      seq_lens: int[B], tokens committed to each request's cache.
      cache_seqlens: int32[B], destination of seq_lens + seq_len_delta.
      cu_seqlens_k: int32[B + 1], destination of their exclusive prefix sums.
      seq_len_delta: tokens added to each length.
      zero_tail: here so that True can be refused: there is no table whose tail could be cleared.
      backend: as in decode_metadata.

    Returns:
      (cache_seqlens, cu_seqlens_k); in place when the destinations are donated.

    Raises:
      ValueError: for zero_tail=True, a negative delta, or a destination of another shape or dtype.

    >>> import jax.numpy as jnp
    >>> out = jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32)
    >>> [x.tolist() for x in decode_lengths(jnp.array([6, 12]), *out, seq_len_delta=3)]
    [[9, 15], [0, 9, 24]]
    """
    _check_lengths(seq_lens, zero_tail, backend)
    batch = seq_lens.shape[0]
    buffers.check_array("cache_seqlens", cache_seqlens, (batch,))
    buffers.check_array("cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    out = DecodeTables(cache_seqlens, cu_seqlens_k, None, None)
    return _lengths_only(seq_lens, out, _check_delta(seq_len_delta), backend)[:2]


def decode_lengths_packed(
    seq_lens,
    out: PackedMetadata,
    *,
    seq_len_delta: int = 0,
    zero_tail: bool | None = None,
    backend: str | None = None,
) -> PackedMetadata:
    """`decode_lengths` into the two length sections of a packed buffer; its other sections stay as they are.

    >>> packed = PackedMetadata.zeros(buffers.MetadataLayout(B=2, D=1, P=1, has_swa=False))
    >>> decode_lengths_packed(jnp.array([6, 12]), packed).decode_tables().cu_seqlens_k.tolist()
    [0, 6, 18]
    """
    _check_lengths(seq_lens, zero_tail, backend)
    if not isinstance(out, PackedMetadata):
        raise ValueError(f"out is a {type(out).__name__}: give a PackedMetadata, or call decode_lengths")
    buffers.check(out, PackedMetadata, seq_lens.shape[0])
    return _lengths_only(seq_lens, out, _check_delta(seq_len_delta), backend)


def decode_lengths_reference(*args, **kwargs):
    """`decode_lengths` with backend='reference'."""
    return decode_lengths(*args, **kwargs, backend="reference")


def _lengths_only(seq_lens, out, seq_len_delta: int, backend: str | None):
    flat, destination = buffers.flatten(out, LENGTHS)
    spec = _Spec(seq_lens.shape[0], seq_len_delta, destination)
    return buffers.unflatten(out, _decode(spec, backend, (operands.as_int32(seq_lens),), flat), destination)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(spec: _Spec, backend: str | None, inputs: tuple, flat: tuple) -> tuple:
    plain = reference.lengths if spec.source is None else reference.decode
    if spec.B == 0:  # a grid of no rows; cu_seqlens_k still has its one entry
        backend = "reference"
    return backends.run(backend, functools.partial(_launch, spec), functools.partial(plain, spec), inputs, flat)


def _launch(spec: _Spec, inputs: tuple, flat: tuple, *, interpret: bool) -> tuple:
    """One pallas_call over all rows, its outputs aliasing the destination buffers."""
    blocks = -(-spec.max_pages // BLOCK)
    splits = min(blocks, -(-PROGRAMS // spec.B))  # programs a row

    def kernel(*refs):
        ins, outs = refs[: len(inputs)], refs[len(inputs) + len(flat) :]
        program = pl.program_id(0)
        if splits == 0:
            _write_lengths(spec, ins, outs)
            return
        pl.when(program == 0)(lambda: _write_lengths(spec, ins, outs))
        pl.when(program > 0)(lambda: _write_tables(spec, program - 1, splits, ins, outs))

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(1 + spec.B * splits,),
            name="decode_metadata" if splits else "decode_lengths",
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
            input_output_aliases={len(inputs) + i: i for i in range(len(flat))},
            compiler_params=lanes.compiler_params(),
            interpret=interpret,
        )(*inputs, *flat)
    )


def _write_lengths(spec: _Spec, ins: tuple, outs: tuple) -> None:
    """All lengths and their prefix sums, by one program, since a sum over rows crosses programs."""
    lengths, prefix = (spec.destination[name] for name in LENGTHS)
    count = lanes.width(spec.B, HEAD_LANES)
    total = None
    for first in range(0, spec.B, count):
        row = lanes.iota(count) + first
        valid = row < spec.B
        length = jnp.where(valid, lanes.load(ins[0], (row,), valid, 0) + spec.seq_len_delta, 0)
        sums = lax.cumsum(length, axis=0)
        if total is None:
            lanes.store(outs[prefix.buffer], (row + prefix.offset,), jnp.zeros_like(row), row == 0)
        else:
            sums += total
        lanes.store(outs[lengths.buffer], (row + lengths.offset,), length, valid)
        lanes.store(outs[prefix.buffer], (row + (prefix.offset + 1),), sums, valid)
        if first + count < spec.B:
            added = jnp.sum(length, dtype=jnp.int32)
            total = added if total is None else total + added


def _write_tables(spec: _Spec, program, splits: int, ins: tuple, outs: tuple) -> None:
    """Blocks part, part + splits, part + 2 * splits, ... of one row's tables."""
    seq_lens, req_rows, source, *tables = ins
    shift, pages = spec.source.shift, spec.max_pages
    part = lanes.div(program, spec.B)
    batch_row = program - part * spec.B
    length = lanes.load_scalar(seq_lens, (batch_row,)) + spec.seq_len_delta
    source_row = spec.source.row(lanes.load_scalar(req_rows, (batch_row,)))
    live = jnp.minimum(lanes.cdiv(length, 1 << shift), pages)
    blocks = -(-pages // BLOCK) if spec.zero_tail else lanes.cdiv(live, BLOCK)

    def write(block):
        column = block * BLOCK + lanes.iota(BLOCK)
        used = column < live
        position = column << shift
        source_column = spec.source.column(position)
        inside = used & (source_column < spec.source.columns)
        entry = lanes.load(source, (source_row, source_column), inside, -1)
        page, offset = spec.source.split(entry, position)
        maps = [(n, m) for n, m in zip(TABLES, (spec.full, spec.swa), strict=True) if m is not None]
        values = [(name, page_map.lookup(tables, page, offset, shift, inside)) for name, page_map in maps]
        written = column < pages if spec.zero_tail else used
        for name, value in values:  # after both loads: a store would hold back the second one
            section = spec.destination[name]
            cell = section.offset + batch_row * section.shape[1] + column
            lanes.store(outs[section.buffer], (cell,), jnp.maximum(value, 0), written)

    if splits * BLOCK >= pages:
        pl.when(part < blocks)(lambda: write(part))
    else:
        turns = lanes.cdiv(jnp.maximum(blocks - part, 0), splits)
        lax.fori_loop(0, turns, lambda turn, _: write(part + turn * splits), None)


def _check_lengths(seq_lens, zero_tail, backend) -> None:
    backends.check(backend)
    operands.check_integers("seq_lens", seq_lens, 1)
    if zero_tail:
        raise ValueError("zero_tail=True: lengths have no tail to clear; leave it out, or call decode_metadata")


def _check_delta(value) -> int:
    delta = operands.check_static("seq_len_delta", value)
    if delta < 0:
        raise ValueError(f"seq_len_delta={delta}: it must be >= 0 (0 to decode, D to verify D rows)")
    return delta


def _check_max_pages(value: int | None, columns: int) -> int:
    pages = columns if value is None else operands.check_static("max_pages", value)
    if not 0 <= pages <= columns:
        raise ValueError(f"max_pages={pages}: it must be between 0 and the width of the page table, {columns}")
    return pages

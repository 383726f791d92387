"""Builders: lengths, tables and maps in, metadata out. They take arrays, never a pool or an allocator.

A builder reads the mapping tables when the compiled step runs: a page bound, retired or moved between two calls shows
in the next one. `page_rows` is the page-granular request table (virtual page of each `page_size` tokens, row 0 all
zeros for padded lanes), `v2p` the interleaved map (column 0 FULL, column 1 SWA, -1 unbound). Both are described at
`jaxspec.cache.Pages`; any arrays of that form do.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.metadata.ids import Ids, marked, unmarked
from jaxspec.metadata.kpool import KPool, KPoolMetadata, from_packed, ordinary
from jaxspec.metadata.types import DecodeMetadata, DraftExtendMetadata, VerifyMetadata, WriteWindow
from pallas_kernels import MetadataLayout, PackedMetadata, decode_metadata, draft_write_window
from pallas_kernels import draft_extend_metadata as write_draft_extend
from pallas_kernels import kpool_metadata as write_kpool

Array = jax.Array

SCOPE = "metadata"  # the name in traced and compiled programs of what the builders do


def verify_layout(
    *,
    batch_size: int,
    num_rows: int,
    pages_per_row: int,
    swa: bool,
    kpool: KPool | None = None,
    lengths: int | None = None,
) -> MetadataLayout:
    """Layout of the packed int32 buffer that the metadata of a forward of `num_rows` rows a request is written to.

    With `kpool`, `lengths` rows a request have lengths of their own, all of them by default.
    """
    shape = None if kpool is None else kpool.shape(num_rows if lengths is None else lengths)
    more = {} if shape is None else {"kpool": shape}
    return MetadataLayout(B=batch_size, D=num_rows, P=pages_per_row, has_swa=swa, **more)


def _window(packed: PackedMetadata, page_rows: Array | Ids) -> WriteWindow:
    buffers = packed.window()
    return WriteWindow(
        virtual_loc=marked(buffers.virtual_loc, "virtual", page_rows),
        full_loc=marked(buffers.full_loc, "full", page_rows),
        swa_loc=marked(buffers.swa_loc, "swa", page_rows),
        positions=buffers.positions,
    )


@jax.named_scope(SCOPE)
def verify_metadata(
    seq_lens: Array,
    req_rows: Array,
    page_rows: Array | Ids,
    v2p: Array,
    anchor: Array,
    packed: PackedMetadata,
    *,
    page_size: int,
    limit: Array | int,
    state_slots: Array | Ids | None = None,
    kpool: KPool | None = None,
    backend: str | None = None,
) -> tuple[VerifyMetadata, PackedMetadata]:
    """Metadata of a target verify: D = `packed.layout.D` rows a request, the first at the committed length.

    Args:
      seq_lens: int32[B], committed tokens of each request, those of this forward excluded; 0 for padded lanes.
      req_rows: int32[B], row of each lane in `page_rows`; 0 for padded lanes.
      page_rows: int32[R, P], virtual pages, marked as `Ids` if all that is made of them shall be marked too.
      v2p: int32[NV, 2], physical FULL and SWA page of each virtual page.
      anchor: int32[B], the newest token, which has no K/V yet; it becomes column 0 of `ids`.
      packed: the buffer to write to; donated, it is updated in place.
      page_size: tokens a page, a power of two.
      limit: context limit in tokens; rows at or past it go to the sink and are no keys of any row.
      state_slots: int32[B], where the requests' states are, -1 for padded lanes; see `jaxspec.recur`.
      kpool: how sparse layers select and who prepares it; None without such layers. `packed` must have its sections.
      backend: who runs the kernels, see `pallas_kernels`.

    Returns:
      The metadata, whose tables and window are views of the second result, and the packed buffer after. Key lengths are
      those of the buffer, L + D, cut at the limit.

    Source: the captured translated verify metadata of SGLang's PR #44973, tails cleared; with `kpool` the KPool
    metadata fusion for GLM-5.3-Flash.
    """
    B, D = packed.layout.B, packed.layout.D
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    virtual = unmarked(page_rows, "virtual")
    if _is_fused(kpool):
        more = dict(pool=kpool.pool, topk=kpool.topk, anchor=anchor, limit=limit, zero_tail=True)
        packed = write_kpool(seq_lens, req_rows, virtual, packed, mode="verify", **more, **maps)
    else:
        packed = decode_metadata(seq_lens, req_rows, virtual, packed, seq_len_delta=D, zero_tail=True, **maps)
        packed = draft_write_window(seq_lens, req_rows, virtual, packed, anchor=anchor, limit=limit, **maps)
    tables, row = packed.decode_tables(), jnp.arange(D, dtype=jnp.int32)
    lengths, sums = _cut(tables.cache_seqlens, limit)
    fields = _Fields(kpool, packed, req_rows, page_size, limit)
    metadata = VerifyMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=sums,
        page_table=marked(tables.page_table, "full", page_rows),
        swa_page_table=marked(tables.swa_page_table, "swa", page_rows),
        window=_window(packed, page_rows),
        logit_rows=None,
        state_slots=state_slots,
        kpool=fields.build(
            visible=jnp.minimum(seq_lens[:, None] + 1 + row, limit),
            start=seq_lens,
            cached=seq_lens + D,
            count=jnp.where(req_rows > 0, jnp.clip(limit - seq_lens, 0, D), 0),
        ),
        cu_seqlens_q=jnp.arange(B + 1, dtype=jnp.int32) * D,
        ids=jnp.where(row == 0, packed.window().anchor_ids, 0),
    )
    return metadata, packed


@jax.named_scope(SCOPE)
def draft_extend_metadata(
    seq_lens: Array,
    extend_lens: Array,
    req_rows: Array,
    page_rows: Array | Ids,
    v2p: Array,
    packed: PackedMetadata,
    *,
    page_size: int,
    limit: Array | int | None = None,
    count: Array | None = None,
    state_slots: Array | Ids | None = None,
    kpool: KPool | None = None,
    backend: str | None = None,
) -> tuple[DraftExtendMetadata, PackedMetadata]:
    """Metadata of a ragged run of new tokens: a chunk of a prompt, or rows that a draft model has still to see.

    Args:
      seq_lens: int32[B], tokens already in the cache.
      extend_lens: int32[B], new tokens, 0 .. D; rows past them are padding and go to the sink.
      limit: context limit in tokens, as in `verify_metadata`; None where no row can reach it.
      count: int32[B], how many of the new tokens are known to stay; `extend_lens` by default.
      req_rows, page_rows, v2p, packed, page_size, state_slots, kpool, backend: as in `verify_metadata`.

    Returns:
      The metadata, with `logit_rows` naming the last row of each request that stays (0 where there is none), and the
      packed buffer.
    """
    count = extend_lens if count is None else count
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    virtual, ends = unmarked(page_rows, "virtual"), seq_lens + extend_lens
    if _is_fused(kpool):
        more = dict(pool=kpool.pool, topk=kpool.topk, extend_lens=extend_lens, limit=limit, zero_tail=True)
        packed = write_kpool(ends, req_rows, virtual, packed, mode="draft_extend", **more, **maps)
    else:
        packed = write_draft_extend(ends, extend_lens, req_rows, virtual, packed, zero_tail=True, **maps)
        packed = draft_write_window(seq_lens, req_rows, virtual, packed, limit=limit, **maps)
    tables, window = packed.decode_tables(), _window(packed, page_rows)
    row = jnp.arange(packed.layout.D, dtype=jnp.int32)
    real = row < extend_lens[:, None]
    end = 2**31 - 1 if limit is None else limit
    lengths, sums = tables.cache_seqlens, tables.cu_seqlens_k
    if limit is not None:
        lengths, sums = _cut(lengths, limit)
    fields = _Fields(kpool, packed, req_rows, page_size, end)

    metadata = DraftExtendMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=sums,
        page_table=marked(tables.page_table, "full", page_rows),
        swa_page_table=marked(tables.swa_page_table, "swa", page_rows),
        window=jax.tree.map(lambda loc: jnp.where(real, loc, 0), window).replace(positions=window.positions),
        logit_rows=jnp.maximum(count - 1, 0)[:, None],
        state_slots=state_slots,
        kpool=fields.build(
            visible=jnp.where(real, jnp.minimum(seq_lens[:, None] + 1 + row, end), 0),
            start=seq_lens,
            cached=ends,
            count=jnp.minimum(count, jnp.maximum(end - seq_lens, 0)),
        ),
        extend_lens=extend_lens,
        cu_seqlens_q=tables.cu_seqlens_q,
    )
    return metadata, packed


@jax.named_scope(SCOPE)
def write_chain(
    seq_lens, req_rows, page_rows, v2p, packed: PackedMetadata, *, page_size, limit, kpool: KPool, backend
) -> PackedMetadata:
    """The packed buffer with the metadata of a draft chain over sparse layers; see `chain_metadata`."""
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    virtual = unmarked(page_rows, "virtual")
    if kpool.fused:
        more = dict(pool=kpool.pool, topk=kpool.topk, limit=limit, zero_tail=True)
        return write_kpool(seq_lens, req_rows, virtual, packed, mode="mtp_precompute", **more, **maps)
    packed = decode_metadata(seq_lens, req_rows, virtual, packed, zero_tail=True, **maps)
    return draft_write_window(seq_lens, req_rows, virtual, packed, limit=limit, **maps)


@jax.named_scope(SCOPE)
def read_chain(
    seq_lens, req_rows, page_rows, packed: PackedMetadata, *, page_size, limit, kpool: KPool, state_slots
) -> DecodeMetadata:
    """The metadata in a buffer that `write_chain` has written, or in a copy of it."""
    tables, fields = packed.decode_tables(), _Fields(kpool, packed, req_rows, page_size, limit)
    return DecodeMetadata(
        cache_seqlens=tables.cache_seqlens,
        cu_seqlens_k=tables.cu_seqlens_k,
        page_table=marked(tables.page_table, "full", page_rows),
        swa_page_table=marked(tables.swa_page_table, "swa", page_rows),
        window=_window(packed, page_rows),
        logit_rows=None,
        state_slots=state_slots,
        kpool=fields.build(
            visible=jnp.minimum(seq_lens, limit)[:, None],
            start=seq_lens,
            cached=seq_lens,
            count=jnp.zeros_like(seq_lens),
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Where the KPool metadata of a forward come from: the packed buffer, or separate operations."""

    kpool: KPool | None
    packed: PackedMetadata
    req_rows: Array
    page_size: int
    limit: Array | int

    def build(self, *, visible: Array, start: Array, cached: Array, count: Array) -> KPoolMetadata | None:
        if self.kpool is None:
            return None
        rest = jnp.minimum(cached, self.limit), self.packed.decode_tables().page_table, self.req_rows, count
        if self.kpool.fused:
            return from_packed(self.kpool, self.packed, *rest)
        return ordinary(self.kpool, visible, start, cached, *rest, page_size=self.page_size)


def _cut(lengths: Array, limit: Array | int) -> tuple[Array, Array]:
    """Lengths up to the context's end, and their exclusive prefix sums.

    Rows past the limit are not stored, so the cells at their positions hold anything: they are no keys.
    """
    lengths = jnp.minimum(lengths, limit)
    return lengths, jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def _is_fused(kpool: KPool | None) -> bool:
    return kpool is not None and kpool.fused


@jax.named_scope(SCOPE)
def draft_window(
    start: Array,
    req_rows: Array,
    page_rows: Array | Ids,
    v2p: Array,
    packed: PackedMetadata,
    *,
    page_size: int,
    limit: Array | int,
    backend: str | None = None,
) -> tuple[WriteWindow, PackedMetadata]:
    """Write window of all steps of a draft model's chain, computed once a round.

    Args:
      start: int32[B], position of the first row.
      packed: the draft's own buffer; D is the number of rows the chain writes.
      req_rows, page_rows, v2p, page_size, limit, backend: as in `verify_metadata`.
    """
    packed = draft_write_window(
        start,
        req_rows,
        unmarked(page_rows, "virtual"),
        packed,
        page_size=page_size,
        granularity="page",
        v2p=v2p,
        limit=limit,
        backend=backend,
    )
    return _window(packed, page_rows), packed


@jax.named_scope(SCOPE)
def decode_step(verify: VerifyMetadata, window: WriteWindow, step: Array) -> DecodeMetadata:
    """Metadata of one step of a draft chain, from what the round has already built.

    The chain reads the verify tables (they cover every position it can reach), so a step computes no table of its own.

    Args:
      verify: metadata of this round's verify.
      window: the chain's window, from `draft_window`.
      step: int32[], which column of `window` this step writes.
    """
    chosen = jnp.arange(window.positions.shape[1], dtype=jnp.int32) == step
    # A masked sum, not a dynamic slice: XLA runs the latter as a copy that keeps a loop out of a command buffer.
    window = jax.tree.map(lambda loc: jnp.where(chosen, loc, 0).sum(axis=1, keepdims=True, dtype=jnp.int32), window)
    lengths = window.positions[:, 0] + 1
    return DecodeMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)]),
        page_table=verify.page_table,
        swa_page_table=verify.swa_page_table,
        window=window,
        logit_rows=None,
        state_slots=None,
    )

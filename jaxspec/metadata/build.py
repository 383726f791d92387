"""Builders: lengths, tables and maps in, metadata out. They take arrays, never a pool or an allocator.

A builder reads the mapping tables when the compiled step runs: a page bound, retired or moved between two calls shows
in the next one. `page_rows` is the page-granular request table (virtual page of each `page_size` tokens, row 0 all
zeros for padded lanes), `v2p` the interleaved map (column 0 FULL, column 1 SWA, -1 unbound). Both are described at
`jaxspec.cache.Pages`; any arrays of that form do.
"""

import jax
import jax.numpy as jnp

from jaxspec.metadata.ids import Ids, marked, unmarked
from jaxspec.metadata.types import DecodeMetadata, DraftExtendMetadata, VerifyMetadata, WriteWindow
from pallas_kernels import MetadataLayout, PackedMetadata, decode_metadata, draft_write_window
from pallas_kernels import draft_extend_metadata as write_draft_extend

Array = jax.Array


def verify_layout(*, batch_size: int, num_rows: int, pages_per_row: int, swa: bool) -> MetadataLayout:
    """Layout of the packed int32 buffer that the metadata of a forward of `num_rows` rows a request is written to."""
    return MetadataLayout(B=batch_size, D=num_rows, P=pages_per_row, has_swa=swa)


def _window(packed: PackedMetadata, page_rows: Array | Ids) -> WriteWindow:
    buffers = packed.window()
    return WriteWindow(
        virtual_loc=marked(buffers.virtual_loc, "virtual", page_rows),
        full_loc=marked(buffers.full_loc, "full", page_rows),
        swa_loc=marked(buffers.swa_loc, "swa", page_rows),
        positions=buffers.positions,
    )


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
      backend: who runs the two kernels, see `pallas_kernels`.

    Returns:
      The metadata, whose tables and window are views of the second result, and the packed buffer after. Key lengths are
      those of the buffer, L + D, cut at the limit.

    Source: the captured translated verify metadata of SGLang's PR #44973, tails cleared.
    """
    B, D = packed.layout.B, packed.layout.D
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    virtual = unmarked(page_rows, "virtual")
    packed = decode_metadata(seq_lens, req_rows, virtual, packed, seq_len_delta=D, zero_tail=True, **maps)
    packed = draft_write_window(seq_lens, req_rows, virtual, packed, anchor=anchor, limit=limit, **maps)
    tables = packed.decode_tables()
    first = jnp.arange(D, dtype=jnp.int32) == 0
    # Rows past the limit are not stored, so the cells at their positions hold anything: they are no keys.
    lengths = jnp.minimum(tables.cache_seqlens, limit)
    metadata = VerifyMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)]),
        page_table=marked(tables.page_table, "full", page_rows),
        swa_page_table=marked(tables.swa_page_table, "swa", page_rows),
        window=_window(packed, page_rows),
        logit_rows=None,
        state_slots=state_slots,
        cu_seqlens_q=jnp.arange(B + 1, dtype=jnp.int32) * D,
        ids=jnp.where(first, packed.window().anchor_ids, 0),
    )
    return metadata, packed


def draft_extend_metadata(
    seq_lens: Array,
    extend_lens: Array,
    req_rows: Array,
    page_rows: Array | Ids,
    v2p: Array,
    packed: PackedMetadata,
    *,
    page_size: int,
    state_slots: Array | Ids | None = None,
    backend: str | None = None,
) -> tuple[DraftExtendMetadata, PackedMetadata]:
    """Metadata of a ragged run of new tokens: a chunk of a prompt, or rows that a draft model has still to see.

    Args:
      seq_lens: int32[B], tokens already in the cache.
      extend_lens: int32[B], new tokens, 0 .. D; rows past them are padding and go to the sink.
      req_rows, page_rows, v2p, packed, page_size, state_slots, backend: as in `verify_metadata`.

    Returns:
      The metadata, with `logit_rows` naming the last real row of each request (0 where there is none), and the packed
      buffer.
    """
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    virtual = unmarked(page_rows, "virtual")
    packed = write_draft_extend(seq_lens + extend_lens, extend_lens, req_rows, virtual, packed, zero_tail=True, **maps)
    packed = draft_write_window(seq_lens, req_rows, virtual, packed, **maps)
    tables, window = packed.decode_tables(), _window(packed, page_rows)
    real = jnp.arange(packed.layout.D, dtype=jnp.int32) < extend_lens[:, None]

    metadata = DraftExtendMetadata(
        cache_seqlens=tables.cache_seqlens,
        cu_seqlens_k=tables.cu_seqlens_k,
        page_table=marked(tables.page_table, "full", page_rows),
        swa_page_table=marked(tables.swa_page_table, "swa", page_rows),
        window=jax.tree.map(lambda loc: jnp.where(real, loc, 0), window).replace(positions=window.positions),
        logit_rows=jnp.maximum(extend_lens - 1, 0)[:, None],
        state_slots=state_slots,
        extend_lens=extend_lens,
        cu_seqlens_q=tables.cu_seqlens_q,
    )
    return metadata, packed


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

"""Builders: lengths, tables and maps in, metadata out. They take arrays, never a pool or an allocator.

A builder reads the mapping tables when the compiled step runs: a page bound, retired or moved between two calls shows
in the next one. `page_rows` is the page-granular request table (virtual page of each `page_size` tokens, row 0 all
zeros for padded lanes), `v2p` the interleaved map (column 0 FULL, column 1 SWA, -1 unbound). Both are described at
`jaxspec.cache.Pages`; any arrays of that form do.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.metadata.ids import Ids, marked, unmarked
from jaxspec.metadata.kpool import KPool, KPoolMetadata, from_packed, ordinary_metadata
from jaxspec.metadata.types import DecodeMetadata, DraftExtendMetadata, VerifyMetadata, WriteWindow
from pallas_kernels import (
    MetadataLayout,
    PackedMetadata,
    decode_metadata,
    draft_write_window,
    forward_metadata,
    replay_state_indices,
)
from pallas_kernels import draft_extend_metadata as write_draft_extend

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
    states: bool = False,
) -> MetadataLayout:
    """Layout of the packed int32 buffer that the metadata of a forward of `num_rows` rows a request is written to.

    With `kpool`, `lengths` rows a request have lengths of their own, all of them by default. With `states` the slots of
    the requests' states are among the metadata.
    """
    shape = None if kpool is None else kpool.shape(num_rows if lengths is None else lengths)
    return MetadataLayout(B=batch_size, D=num_rows, P=pages_per_row, has_swa=swa, kpool=shape, has_state=states)


class StateTable(NamedTuple):
    """Where the states of requests are that do not lie at their request rows.

    slot_of_req   int32[R]  virtual state slot of each request row, 0 for none
    v2p           int32[NS] physical slot of each virtual one, -1 where unbound
    """

    slot_of_req: Array
    v2p: Array


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
    states: StateTable | None = None,
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
      states: where the requests' states are, if `packed` has a place for their slots; see `jaxspec.recur`.
      kpool: how sparse layers select and who prepares it; None without such layers. `packed` must have its sections.
      backend: who runs the kernels, those of attention too, see `pallas_kernels`.

    Returns:
      The metadata, whose tables and window are views of the second result, and the packed buffer after. Key lengths are
      those of the buffer, L + D, cut at the limit.

    Source: the captured translated verify metadata of SGLang's PR #44973, tails cleared; with `kpool` the KPool
    metadata fusion for GLM-5.3-Flash.
    """
    B, D = packed.layout.B, packed.layout.D
    of = seq_lens, req_rows, unmarked(page_rows, "virtual")
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    row = jnp.arange(D, dtype=jnp.int32)
    if _is_one_launch(kpool):
        more = _more(packed, kpool, states)
        packed = forward_metadata(*of, packed, mode="verify", anchor=anchor, limit=limit, **more, **maps)
        lengths, sums, ids = *_lengths(packed), packed.window().anchor_ids
        window, slots = _window(packed, page_rows), packed.state_slots()
    else:
        packed = decode_metadata(*of, packed, seq_len_delta=D, zero_tail=True, **maps)
        packed = draft_write_window(*of, packed, anchor=anchor, limit=limit, **maps)
        lengths, sums = _cut(_lengths(packed)[0], limit)
        ids = jnp.where(row == 0, packed.window().anchor_ids, 0)
        window, slots = _window(packed, page_rows), _state_slots(packed, req_rows, states, backend)
    metadata = VerifyMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=sums,
        **_tables(packed, page_rows),
        window=window,
        logit_rows=None,
        state_slots=marked(slots, "state", page_rows),
        kpool=_pooled(
            kpool,
            packed,
            visible=jnp.minimum(seq_lens[:, None] + 1 + row, limit),
            start=seq_lens,
            end=lengths,
            req_rows=req_rows,
            count=jnp.where(req_rows > 0, jnp.clip(limit - seq_lens, 0, D), 0),
            page_size=page_size,
        ),
        backend=backend,
        cu_seqlens_q=jnp.arange(B + 1, dtype=jnp.int32) * D,
        ids=ids,
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
    states: StateTable | None = None,
    kpool: KPool | None = None,
    backend: str | None = None,
) -> tuple[DraftExtendMetadata, PackedMetadata]:
    """Metadata of a ragged run of new tokens: a chunk of a prompt, or rows that a draft model has still to see.

    Args:
      seq_lens: int32[B], tokens already in the cache.
      extend_lens: int32[B], new tokens, 0 .. D; rows past them are padding and go to the sink.
      limit: context limit in tokens, as in `verify_metadata`; None where no row can reach it.
      count: int32[B], how many of the new tokens are known to stay; `extend_lens` by default.
      req_rows, page_rows, v2p, packed, page_size, states, kpool, backend: as in `verify_metadata`.

    Returns:
      The metadata, with `logit_rows` naming the last row of each request that stays (0 where there is none), and the
      packed buffer.
    """
    count = extend_lens if count is None else count
    virtual = unmarked(page_rows, "virtual")
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    row = jnp.arange(packed.layout.D, dtype=jnp.int32)
    real = row < extend_lens[:, None]
    if _is_one_launch(kpool):
        more = dict(extend_lens=extend_lens, limit=limit, **_more(packed, kpool, states))
        packed = forward_metadata(seq_lens, req_rows, virtual, packed, mode="draft_extend", **more, **maps)
        lengths, sums = _lengths(packed)
        window, slots = _window(packed, page_rows), packed.state_slots()
    else:
        ends = seq_lens + extend_lens
        packed = write_draft_extend(ends, extend_lens, req_rows, virtual, packed, zero_tail=True, **maps)
        packed = draft_write_window(seq_lens, req_rows, virtual, packed, limit=limit, **maps)
        lengths, sums = _lengths(packed) if limit is None else _cut(_lengths(packed)[0], limit)
        window = _window(packed, page_rows)
        window = jax.tree.map(lambda loc: jnp.where(real, loc, 0), window).replace(positions=window.positions)
        slots = _state_slots(packed, req_rows, states, backend)
    end = 2**31 - 1 if limit is None else limit
    metadata = DraftExtendMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=sums,
        **_tables(packed, page_rows),
        window=window,
        logit_rows=jnp.maximum(count - 1, 0)[:, None],
        state_slots=marked(slots, "state", page_rows),
        kpool=_pooled(
            kpool,
            packed,
            visible=jnp.where(real, jnp.minimum(seq_lens[:, None] + 1 + row, end), 0),
            start=seq_lens,
            end=lengths,
            req_rows=req_rows,
            count=jnp.minimum(count, jnp.maximum(end - seq_lens, 0)),
            page_size=page_size,
        ),
        backend=backend,
        extend_lens=extend_lens,
        cu_seqlens_q=packed.decode_tables().cu_seqlens_q,
    )
    return metadata, packed


@jax.named_scope(SCOPE)
def write_chain(
    seq_lens, req_rows, page_rows, v2p, packed: PackedMetadata, *, page_size, limit, kpool: KPool, backend
) -> PackedMetadata:
    """The packed buffer with the metadata of a draft chain over sparse layers; see `chain_metadata`."""
    of = seq_lens, req_rows, unmarked(page_rows, "virtual")
    maps = dict(page_size=page_size, granularity="page", v2p=v2p, backend=backend)
    if kpool.fused:
        return forward_metadata(*of, packed, mode="chain", limit=limit, **_more(packed, kpool, None), **maps)
    packed = decode_metadata(*of, packed, zero_tail=True, **maps)
    return draft_write_window(*of, packed, limit=limit, **maps)


@jax.named_scope(SCOPE)
def read_chain(
    seq_lens, req_rows, page_rows, packed: PackedMetadata, *, page_size, limit, kpool: KPool, state_slots, backend
) -> DecodeMetadata:
    """The metadata in a buffer that `write_chain` has written, or in a copy of it."""
    lengths, sums = _lengths(packed) if kpool.fused else _cut(_lengths(packed)[0], limit)
    return DecodeMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=sums,
        **_tables(packed, page_rows),
        window=_window(packed, page_rows),
        logit_rows=None,
        state_slots=state_slots,
        kpool=_pooled(
            kpool,
            packed,
            visible=jnp.minimum(seq_lens, limit)[:, None],
            start=seq_lens,
            end=lengths,
            req_rows=req_rows,
            count=jnp.zeros_like(seq_lens),
            page_size=page_size,
        ),
        backend=backend,
    )


def _is_one_launch(kpool: KPool | None) -> bool:
    """Whether one kernel writes all metadata of a forward; the others are there to be compared with it."""
    return kpool is None or kpool.fused


def _more(packed: PackedMetadata, kpool: KPool | None, states: StateTable | None) -> dict:
    """What `forward_metadata` takes beside lengths, rows, pages and maps."""
    more = {"zero_tail": True} if kpool is None else {"zero_tail": True, "pool": kpool.pool, "topk": kpool.topk}
    if packed.layout.has_state and states is not None:
        more |= {"slot_of_req": states.slot_of_req, "state_v2p": states.v2p}
    return more


def _lengths(packed: PackedMetadata) -> tuple[Array, Array]:
    tables = packed.decode_tables()
    return tables.cache_seqlens, tables.cu_seqlens_k


def _tables(packed: PackedMetadata, page_rows: Array | Ids) -> dict:
    tables = packed.decode_tables()
    return {
        "page_table": marked(tables.page_table, "full", page_rows),
        "swa_page_table": marked(tables.swa_page_table, "swa", page_rows),
    }


def _pooled(kpool: KPool | None, packed: PackedMetadata, *, req_rows, count, **ordinary) -> KPoolMetadata | None:
    """The KPool metadata of a forward: from the packed buffer, or by separate operations."""
    if kpool is None:
        return None
    rest = packed.decode_tables().page_table, req_rows, count
    if kpool.fused:
        return from_packed(kpool, packed, *rest)
    return ordinary_metadata(kpool, *rest, **ordinary)


def _state_slots(packed: PackedMetadata, req_rows: Array, states: StateTable | None, backend) -> Array | None:
    """As `forward_metadata` writes them, by an operation of their own."""
    if not packed.layout.has_state:
        return None
    if states is None:
        return jnp.where(req_rows > 0, req_rows, -1)
    valid = (req_rows > 0) & (states.slot_of_req[req_rows] > 0)
    out = jnp.zeros_like(req_rows)
    slots, _ = replay_state_indices(req_rows, states.slot_of_req, out, valid=valid, v2p=states.v2p, backend=backend)
    return slots


def _cut(lengths: Array, limit: Array | int) -> tuple[Array, Array]:
    """Lengths up to the context's end, and their exclusive prefix sums.

    Rows past the limit are not stored, so the cells at their positions hold anything: they are no keys.
    """
    lengths = jnp.minimum(lengths, limit)
    return lengths, jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


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
        backend=verify.backend,
    )

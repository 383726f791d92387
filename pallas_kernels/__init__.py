"""Fused kernels around the caches of speculative decoding, in Pallas, each with a jnp reference.

    decode_metadata         lengths, prefix sums, FULL and SWA page tables of a decode or verify forward
    decode_lengths          the lengths alone
    draft_extend_metadata   the same as decode_metadata for a ragged forward, and the prefix sums of its rows
    kv_read_table           the page table of one pool
    kv_read_stream          the slots of one pool that a batch reads, ragged
    draft_write_window      virtual, FULL and SWA write locations, positions, anchor tokens
    extend_cache_locs       virtual token ids of a ragged run of positions
    replay_state_indices    state slot of each request, -1 for padding
    commit_track_indices    which of the states kept by a verify forward are committed and tracked
    forward_metadata        all metadata of a forward, one launch
    kpool_decode            lengths and tables of a decode step over pooled attention, into arrays of their own
    kpool_verify            the same for a verify forward
    kpool_draft_extend      the same for a draft extend
    kpool_write_plan        where the keys of pools that a forward closes go
    kpool_append_tail       the tokens behind a row's last closed pool, put behind those of its selected pools
    kpool_ragged_layout     the index pages of a prefill side by side, and the pools that each query row sees
    top_ids                 the ids of the best scores of each row
    pool_scores             scores of pooled keys, read page by page
    row_products            a few rows times matrices of a layer, gated or side by side
    row_sums                the parts of a split product and a residual summed, and what a norm of them needs
    head_rotary             norms and rotates the heads of queries and keys
    store_heads             head_rotary and store_rows in one launch
    store_rows              the K and V rows of a forward, each where its slot lies
    page_zero               zeroes pages of several sizes in one buffer
    state_scatter           moves the accepted state of each request to its slot
    commit_context_rows     norms, rotates and stores the accepted context rows of a draft's layers
    paged_attention         D query rows a request over the pages of its context, read where they lie

Destinations are arrays, Views of wider buffers, or PackedMetadata (one buffer of a MetadataLayout), and results alias
them when they are donated. Each kernel is written once in the language of lanes.py, or in Pallas Triton where it
works on tiles (dispatch.py); `backend` says who runs it. This package knows nothing of jaxspec.
"""

from pallas_kernels.backend import BACKENDS, KERNELS, BackendChoice, explain_backends
from pallas_kernels.buffers import (
    DecodeTables,
    KPoolShape,
    KPoolTables,
    MetadataLayout,
    PackedMetadata,
    WindowBuffers,
)
from pallas_kernels.cache_locs import extend_cache_locs
from pallas_kernels.checked import KernelFault
from pallas_kernels.context_rows import commit_context_rows
from pallas_kernels.decode import decode_lengths, decode_metadata, draft_extend_metadata
from pallas_kernels.forward import forward_metadata
from pallas_kernels.head_rotary import head_rotary
from pallas_kernels.kpool_call import kpool_metadata_fusion_supported
from pallas_kernels.kpool_modes import kpool_decode, kpool_draft_extend, kpool_verify, kpool_write_plan
from pallas_kernels.kpool_selection import RaggedLayout, kpool_append_tail, kpool_ragged_layout
from pallas_kernels.kv_read import kv_read_stream, kv_read_table
from pallas_kernels.page_zero import page_zero
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_rows import PagedRows, RowPlace
from pallas_kernels.pool_scores import PagedIndex, pool_scores
from pallas_kernels.row_products import row_products
from pallas_kernels.row_sums import row_sums
from pallas_kernels.state_indices import CommitSteps, commit_track_indices, replay_state_indices
from pallas_kernels.state_scatter import state_scatter
from pallas_kernels.store_heads import store_heads
from pallas_kernels.store_rows import store_rows
from pallas_kernels.top_ids import top_ids
from pallas_kernels.views import View
from pallas_kernels.window import draft_write_window

__all__ = [
    "BACKENDS",
    "KERNELS",
    "BackendChoice",
    "CommitSteps",
    "DecodeTables",
    "KPoolShape",
    "KPoolTables",
    "KernelFault",
    "MetadataLayout",
    "PackedMetadata",
    "PagedIndex",
    "PagedRows",
    "RaggedLayout",
    "RowPlace",
    "View",
    "WindowBuffers",
    "commit_context_rows",
    "commit_track_indices",
    "decode_lengths",
    "decode_metadata",
    "draft_extend_metadata",
    "draft_write_window",
    "explain_backends",
    "extend_cache_locs",
    "forward_metadata",
    "head_rotary",
    "kpool_append_tail",
    "kpool_decode",
    "kpool_draft_extend",
    "kpool_metadata_fusion_supported",
    "kpool_ragged_layout",
    "kpool_verify",
    "kpool_write_plan",
    "kv_read_stream",
    "kv_read_table",
    "page_zero",
    "paged_attention",
    "pool_scores",
    "replay_state_indices",
    "row_products",
    "row_sums",
    "state_scatter",
    "store_heads",
    "store_rows",
    "top_ids",
]

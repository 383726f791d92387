"""The metadata of a forward, as pytrees.

B requests, D rows per request in this forward, P pages a row. All integers are int32. A *location* is a token slot:
page * page_size + offset. Virtual locations name a token of a request whatever the pools do; physical ones index the
buffers of their storage kind. 0 is the sink in each of the three spaces.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.metadata.kpool import KPoolMetadata

Array = jax.Array
_keyword_dataclass = functools.partial(flax.struct.dataclass, kw_only=True)


@flax.struct.dataclass
class WriteWindow:
    """Where the D rows of this forward go.

    Attributes:
      virtual_loc: int32[B, D], virtual token location.
      full_loc: int32[B, D], slot in buffers of kind "full"; 0 for rows that must not land anywhere.
      swa_loc: int32[B, D] or None, slot in buffers of kind "swa"; None when the model has no such layer.
      positions: int32[B, D], absolute position in the sequence, in tokens. Rows past the context limit keep their
        position.
    """

    virtual_loc: Array
    full_loc: Array
    swa_loc: Array | None
    positions: Array


@_keyword_dataclass
class ForwardMetadata:
    """What every forward carries; a model reads no more than this class names.

    Attributes:
      cache_seqlens: int32[B], keys of each request, the rows of this forward included; of a draft chain over sparse
        layers those before its first row.
      cu_seqlens_k: int32[B + 1], exclusive prefix sums of cache_seqlens.
      page_table: int32[B, P], physical FULL page of each column; columns past a row's length are unspecified or 0,
        always in range.
      swa_page_table: int32[B, P] or None, the same for SWA pages; retired and unbound columns are 0.
      window: where the rows of this forward go.
      logit_rows: int32[B, K] or None, which of the D rows need logits; None means all of them.
      state_slots: int32[B] or None, where each request's state is; -1 for padded lanes. None when no layer of the model
        keeps anything a request.
      kpool: what compressed sparse attention needs besides; None when the model has no such layer.
      backend: who attends, see `pallas_kernels.paged_attention` (static).
    """

    cache_seqlens: Array
    cu_seqlens_k: Array
    page_table: Array
    swa_page_table: Array | None
    window: WriteWindow
    logit_rows: Array | None
    state_slots: Array | None
    kpool: KPoolMetadata | None = None
    backend: str | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def query_positions(self) -> Array:
        """int32[B, D], position of each row of the forward, -1 of those that are padding."""
        return self.window.positions


@_keyword_dataclass
class DecodeMetadata(ForwardMetadata):
    """One row a request (D = 1): plain decoding, or one step of a draft model."""


@_keyword_dataclass
class VerifyMetadata(ForwardMetadata):
    """D rows a request, the same D for all: the anchor token and D - 1 drafts.

    Attributes:
      cu_seqlens_q: int32[B + 1], 0, D, 2 D, ..., B D.
      ids: int32[B, D]; column 0 is the anchor, the other columns are 0 until drafts are put there.
    """

    cu_seqlens_q: Array
    ids: Array


@_keyword_dataclass
class DraftExtendMetadata(ForwardMetadata):
    """A ragged run of new tokens a request, padded to D rows: a prefill chunk, or what a draft model must catch up on.

    Attributes:
      extend_lens: int32[B], rows of each request that are real; the rest write to the sink.
      cu_seqlens_q: int32[B + 1], exclusive prefix sums of extend_lens.
    """

    extend_lens: Array
    cu_seqlens_q: Array

    @property
    def query_positions(self) -> Array:
        positions = self.window.positions
        real = jnp.arange(positions.shape[1], dtype=jnp.int32) < self.extend_lens[:, None]
        return jnp.where(real, positions, -1)

"""The interface between a drafter and the step."""

from typing import Any, Protocol

import flax.struct
import jax

from jaxspec.config import SpecConfig
from jaxspec.metadata import DraftExtendMetadata, KPool, VerifyMetadata
from jaxspec.verification import Sampling

Array = jax.Array


@flax.struct.dataclass
class DraftContext:
    """What a drafter may look at when it proposes.

    Attributes:
      tokens: int32[R, T], prompt and emitted tokens of each request row; row 0 is the sink. Cells past the anchor are
        stale.
      req_rows: int32[B], row of each lane; 0 for padding.
      seq_lens: int32[B], committed length L; the anchor is the token at position L. 0 for padding.
      anchor: int32[B], the newest token.
      metadata: metadata of this round's verify, whose page tables cover every position a draft can reach.
      page_rows: int32[R, P], virtual pages of each request row.
      v2p: int32[NV, 2], physical pages.
      sampling: how the B requests sample, where the verifier asks what the drafts were drawn from; None where drafts
        are best greedy, which is everywhere else. See `propose_token`.
      kpool: how the target's sparse layers select, and whether their metadata are fused; None without such layers
        (static).
    """

    tokens: Array
    req_rows: Array
    seq_lens: Array
    anchor: Array
    metadata: VerifyMetadata
    page_rows: Array
    v2p: Array
    sampling: Sampling | None = None
    kpool: KPool | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class ExtendContext:
    """What a drafter that feeds on the target's hidden rows gets after the target has run.

    Attributes:
      tokens: int32[B, C], the token that follows each row: the row at position p comes with token p + 1. Behind a chunk
        that is not the last of its prompt that is the next token of the prompt.
      hidden: [B, C, H], the target's hidden rows; for a drafter with `taps` [B, C, m * H], those behind m layers.
      count: int32[B], rows that are known to stay, the first ones; 0 for lanes without any.
      seq_lens: int32[B], position of the first row.
      req_rows, page_rows, v2p, sampling, kpool: as in `DraftContext`. What is drawn here is verified by the round at
        length seq_lens + count.
      metadata: of the target's forward: `DraftExtendMetadata` of a prompt's chunk, `VerifyMetadata` of a round.
      context_len: most tokens a sequence may hold (static).
    """

    tokens: Array
    hidden: Array
    count: Array
    seq_lens: Array
    req_rows: Array
    page_rows: Array
    v2p: Array
    metadata: DraftExtendMetadata | VerifyMetadata
    context_len: int = flax.struct.field(pytree_node=False)
    sampling: Sampling | None = None
    kpool: KPool | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class Drafts:
    """Proposals for one round.

    Attributes:
      tokens: int32[B, D - 1], ids in range everywhere.
      count: int32[B], how many are real, 0 .. D - 1; the rest are never accepted.
      probs: float32[B, D - 1, V], what each draft was drawn from, over the target's vocabulary; needed where the
        context brought a `Sampling`, else None.
    """

    tokens: Array
    count: Array
    probs: Array | None = None


class Drafter(Protocol):
    """A drafter: static and hashable, its arrays live in `params` and in the state it returns from `init`.

    A drafter that keeps K and V of its own may have them in a unified pool: then it has an attribute `cache_layers`, a
    `LayerSpec` for each of its layers, and its state a field `cache`, which holds its view of the pool while the
    drafter runs, to be written and handed back, and None otherwise.

    Where its layers lie may depend on the target and the memory. Such a drafter has a method `placed(target, config)`,
    the drafter that knows: the step calls it, and `SpecStep.drafter` is the result. It may be called again. Where its
    `placement` is "private", `cache_layers` is empty, and `init` is called with `num_pages`, how many virtual pages
    there are, for buffers that stay in the drafter's state; see `jaxspec.cache.placement`.

    A drafter that feeds on the target's hidden rows has a method `extend` in place of `prefill`; see `extends`. If what
    it wants are the rows behind certain layers, it names those as `taps`, counted from 0. In `lane_fields` it may name
    the fields of its state whose first axis is that of the B lanes, an empty tuple if there are none: then a prefill
    may call `extend` for fewer requests than there are lanes, in any order, with these fields for those alone.

    A drafter that can say what it drew its drafts from has an attribute `has_probs = True` and answers a context that
    brings a `Sampling` with `Drafts.probs`; see `propose_token`. Without it sampled requests are verified by "match".

    Its `algorithm`, if it has that attribute, is the row of the table in `jaxspec.admit` that it is judged by; without
    one it is judged as "draft_lm".
    """

    def init(self, config: SpecConfig) -> Any:
        """The drafter's own state, a pytree of arrays; () if it has none."""

    def prefill(self, params: Any, state: Any, tokens: Array, metadata: DraftExtendMetadata) -> Any:
        """Sees a chunk of the prompts just before the target does; tokens is int32[B, C]."""

    def propose(self, params: Any, state: Any, context: DraftContext, num_drafts: int) -> tuple[Any, Drafts]:
        """Proposes `num_drafts` = D - 1 tokens to follow each anchor."""


def extends(drafter: Any) -> bool:
    """Whether a drafter feeds on the target's hidden rows.

    Such a drafter has `extend(params, state, context) -> state`, with an `ExtendContext`. It is called after each chunk
    of the prompts has been through the target, and in every round after the verify, when it is known which rows stay;
    what it makes of them is what its next `propose` starts from.
    """
    return hasattr(drafter, "extend")

"""Block drafts: DSPARK and DFLASH propose all tokens of a round in one forward.

The draft knows the text by the target's features alone. Of each committed row it keeps, a layer, K and V made of what
the target's residual stream was behind the layers that it taps: *context rows*, at the text's own positions. A round's
block is the anchor and one row of the mask token for each further draft, at positions L, L + 1, ...; its own K and V
are *noise*: they go where the target's rows of the same positions go, the block attends to them and to the context,
and after the verify context rows take the place of those that were accepted.

    position        0 .. L - 1       L         L + 1     L + 2         L
    round           context rows     anchor    mask      mask          and two drafts accepted:
    its extend      ...              context   context   context       the next round's L is L + 3

Rows of the block that were rejected stay behind as noise, at positions that the next block writes before it reads.

All of it goes through the tables and the write window of the round's verify: the drafter launches no metadata. Keys end
with the context: rows behind its last position, which no target row will verify, are not stored.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.attention.paged import attend_stored, store
from jaxspec.cache import KVCache, LayerSpec, PoolCache, init_cache
from jaxspec.cache.context import commit_context
from jaxspec.cache.pages import read_first
from jaxspec.cache.placement import PRIVATE, Placement, place_draft
from jaxspec.config import SpecConfig
from jaxspec.drafting.base import DraftContext, Drafts, ExtendContext
from jaxspec.drafting.proposals import propose_token
from jaxspec.errors import InputError
from jaxspec.metadata import Ids, WriteWindow
from jaxspec.metadata.ids import unmarked
from jaxspec.models.block_draft import BlockDraft, rounded
from jaxspec.models.contract import Model
from jaxspec.models.qwen3 import rotary_angles
from jaxspec.models.rows import Rows
from jaxspec.verification import Sampling

Array = jax.Array
VIRTUAL = "virtual"


@flax.struct.dataclass
class BlockState:
    """What a block drafter carries from round to round: its context rows.

    Attributes:
      cache: buffers of its own; with unified memory its view of the pool while it runs, else None, unless its pool is
        private.
      backend: who runs the kernel that commits (static).
    """

    cache: KVCache | PoolCache | None
    backend: str | None = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class BlockDrafter:
    """What `DSparkDrafter` and `DFlashDrafter` have in common. A round of fewer drafts than a block has runs a shorter
    block.

    Attributes:
      draft: the network.
      placement: where its rows lie; decided by `placed`.
    """

    draft: BlockDraft
    placement: Placement | None = None
    algorithm: ClassVar[str]
    has_probs: ClassVar[bool] = True
    lane_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        if self.draft.config.algorithm != self.algorithm:
            raise ValueError(
                f"algorithm={self.draft.config.algorithm!r}: a {type(self).__name__} runs drafts of "
                f"algorithm={self.algorithm!r}"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose residual stream the draft feeds on."""
        return self.draft.config.target_layer_ids

    @property
    def dtype(self) -> str:
        """Of the draft's K and V."""
        return jnp.dtype(self.draft.dtype).name

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """What the draft keeps in the target's entries for a token; nothing where its pool is its own."""
        return self.draft.layers if self.placement is None else self.placement.lanes

    def placed(self, target: Model, config: SpecConfig) -> "BlockDrafter":
        """The drafter with its layers where this target and this memory want them.

        Raises:
          InputError: the draft does not share the target's vocabulary, or proposes fewer tokens or reaches less far
            than the configuration asks.
        """
        shape, D = self.draft.config, config.num_draft_tokens
        if shape.num_drafts < D - 1:
            raise InputError(
                f"num_draft_tokens={D}: a block of the draft proposes {shape.num_drafts} tokens; use at most "
                f"{shape.num_drafts + 1}"
            )
        if shape.vocab_size != target.vocab_size:
            raise InputError(
                f"the draft has {shape.vocab_size} tokens, the target {target.vocab_size}: they must share a vocabulary"
            )
        if shape.max_position_embeddings < config.context_len:
            raise InputError(
                f"the draft's context of {shape.max_position_embeddings} is below context_len={config.context_len}"
            )
        placement = place_draft(self.draft.layers, self.dtype, target.layers, target.dtype, memory=config.memory)
        return dataclasses.replace(self, placement=placement)

    def init(self, config: SpecConfig, num_pages: int | None = None) -> BlockState:
        """No context yet.

        Args:
          config: shapes.
          num_pages: virtual pages, of a private pool.
        """
        cache, num_pages = None, config.full_pages() if config.memory == "static" else num_pages
        if num_pages is not None:
            sizes = {"page_size": config.page_size, "num_pages": num_pages, "num_swa_pages": 1}
            layers = (dataclasses.replace(spec, storage="full") for spec in self.draft.layers)
            cache = init_cache(layers, dtype=self.dtype, **sizes)
        return BlockState(cache=cache, backend=config.kernel_backend)

    def extend(self, params, state: BlockState, context: ExtendContext) -> BlockState:
        """Commits the context rows of target rows that stay: those of a prompt's chunk, or of a round."""
        draft, window = self.draft, context.metadata.window
        # Nothing that is written here hangs on what the target's last layers read. The tokens do.
        _, cache = read_first(context.tokens, state.cache)
        cache = commit_context(
            cache,
            *draft.context(params, context.hidden),
            draft.key_norms(params),
            *rotary_angles(window.positions, draft.config.head_dim, draft.config.rope_theta),
            **self._slots(window),
            count=context.count,
            eps=draft.config.rms_norm_eps,
            backend=state.backend,
        )
        return state.replace(cache=cache)

    def propose(self, params, state: BlockState, context: DraftContext, num_drafts: int) -> tuple[BlockState, Drafts]:
        draft, metadata, limit = self.draft, context.metadata, context.tokens.shape[1]
        rows = num_drafts if draft.config.sample_from_anchor else num_drafts + 1
        slots, tables = self._slots(metadata.window), self._tables(context)
        positions = metadata.window.positions[:, :rows]
        lengths = jnp.minimum(context.seq_lens + rows, limit)

        def attend(layer, q, k, v, cache, heads=None):
            spec = cache.layers[layer]
            space = VIRTUAL if self._private else spec.storage
            there = unmarked(slots[f"{space}_loc"], space)[:, :rows]
            q, cache = store(cache, layer, there, q, k, v, heads=heads, backend=metadata.backend)
            how = dict(causal=draft.causal(layer), backend=metadata.backend)
            out = attend_stored(cache, layer, q, unmarked(tables[space], space), positions, lengths, **how)
            return out, cache

        first = jnp.arange(rows, dtype=jnp.int32) == 0
        tokens = jnp.where(first, context.anchor[:, None], draft.config.mask_token_id)
        kernels = Rows(metadata.backend, turns=True)
        hidden, cache = draft.rows(params, tokens, positions, attend, state.cache, kernels)
        logits = draft.logits(params, hidden[:, rows - num_drafts :])
        tokens, probs = self.choose(params, logits, context.anchor, context.sampling, context.seq_lens)
        count = jnp.full(context.anchor.shape, num_drafts, jnp.int32)
        return state.replace(cache=cache), Drafts(tokens=tokens, count=count, probs=probs)

    def choose(
        self, params, logits: Array, anchor: Array, sampling: Sampling | None, seq_lens: Array
    ) -> tuple[Array, Array | None]:
        """Drafts of a block, one after the other: each draw looks at one row of logits a request.

        Args:
          params: the draft's.
          logits: float32[B, D - 1, V], of the rows that predict them.
          anchor: int32[B].
          sampling, seq_lens: as in `DraftContext`.

        Returns:
          int32[B, D - 1], and float32[B, D - 1, V] or None, as in `Drafts`.
        """
        tokens, probs, token = [], [], anchor
        for index in range(logits.shape[1]):
            row = self.informed(params, logits[:, index], token)
            token, chances = propose_token(row, sampling, seq_lens, index)
            tokens.append(token)
            probs.append(chances)
        return jnp.stack(tokens, axis=1), None if sampling is None else jnp.stack(probs, axis=1)

    def informed(self, params, logits: Array, previous: Array) -> Array:
        """Logits float32[B, V] of one row, given the token int32[B] before it."""
        del params, previous
        return logits

    @property
    def _private(self) -> bool:
        return self.placement is not None and self.placement.where == PRIVATE

    def _slots(self, window: WriteWindow) -> dict[str, Array | Ids | None]:
        """Where the rows of a forward go in the draft's pages, int32[B, D], by the names that `commit_context` has."""
        if self._private:
            return {"virtual_loc": window.virtual_loc}
        return {"full_loc": window.full_loc, "swa_loc": window.swa_loc}

    def _tables(self, context: DraftContext) -> dict[str, Array | Ids | None]:
        """Page tables of the draft's pages, int32[B, P]."""
        if self._private:
            return {VIRTUAL: unmarked(context.page_rows, VIRTUAL)[context.req_rows]}
        return {"full": context.metadata.page_table, "swa": context.metadata.swa_page_table}


@dataclasses.dataclass(frozen=True)
class DSparkDrafter(BlockDrafter):
    """Proposes with a DSPARK draft: a block, and a Markov head that walks over it.

    The head adds to the logits of each row a bias that the token before it decides, so the drafts of a block are chosen
    one after the other, greedily or by the request's sampling; the forward itself is one.
    """

    algorithm: ClassVar[str] = "dspark"

    def informed(self, params, logits, previous):
        return rounded(logits + self.draft.markov(params, previous), self.draft.dtype)


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(BlockDrafter):
    """Proposes with a DFLASH draft: a block whose rows know nothing of what the others have chosen."""

    algorithm: ClassVar[str] = "dflash"

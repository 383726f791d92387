"""Multi-token prediction: the target's own extra blocks as drafter.

A block takes a token and the hidden row of the token before it: the row at position p comes of token p + 1 and of the
target's hidden row p. So where the target's rows 0 .. L - 1 are valid the block's are too, and its row L - 1 has seen
the anchor, token L. The same rule holds in prefill, extend and chain.

After each verify the blocks run over all D rows (draft extend): rows of rejected drafts are garbage that the next one
overwrites, rows of accepted ones replace what the chain had written from guesses. The row of the last emitted token
then holds the first proposal.

* One block, used again and again: it proposes the first draft there, and further ones from its own hidden row in a
  chain, one forward each. The rows of a chain attend to what the extend has selected for its last row, and to each
  other; the indexer does not run.
* A block for each depth: block s sees tokens shifted by s more, and all drafts come out of the extend.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.attention.kpool import Selection, attend_pooled, attend_selected, slots_of
from jaxspec.cache import KPoolSpec, KVCache, PoolCache, init_cache
from jaxspec.config import SpecConfig
from jaxspec.drafting.base import DraftContext, Drafts, ExtendContext
from jaxspec.drafting.proposals import Chain, propose_token
from jaxspec.errors import InputError
from jaxspec.metadata import (
    DraftExtendMetadata,
    KPool,
    chain_metadata,
    draft_extend_metadata,
    verify_layout,
)
from jaxspec.metadata.ids import unmarked
from jaxspec.models.contract import MTPBlocks
from pallas_kernels import PackedMetadata

Array = jax.Array


@flax.struct.dataclass
class MTPState:
    """What an `MTPDrafter` carries from round to round.

    Attributes:
      cache: buffers of its own, in the target's FULL pages; with unified memory its view of the pool while it runs,
        else None.
      tokens: int32[B, N], drafts that are known already: one, or with a block for each depth one a block.
      probs: float32[B, N, V], what they were drawn from; None where no verifier asks.
      hidden: [B, H], the block's hidden row behind the first of them.
      selected: int32[B, K + pool - 1], positions that the last row attended to; -1 behind.
      extend: buffer of the extend's metadata.
      chain: buffer of the chain's metadata.
      backend: who runs the kernels (static).
    """

    cache: KVCache | PoolCache | None
    tokens: Array
    probs: Array | None
    hidden: Array
    selected: Array
    extend: PackedMetadata
    chain: PackedMetadata
    backend: str | None = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class MTPDrafter:
    """Proposes with the target's prediction blocks, drawing from their distribution under the request's settings where
    the verifier asks for it, and greedily otherwise.

    The blocks' rows are addressed by the target's FULL page table; with unified memory they are lanes of its entries.

    Attributes:
      blocks: the blocks. With one, drafts beyond the first come from a chain; with several there is one a depth, and
        no more drafts than blocks.
    """

    blocks: MTPBlocks
    algorithm: ClassVar[str] = "mtp"
    has_probs: ClassVar[bool] = True
    lane_fields: ClassVar[tuple[str, ...]] = ("tokens", "probs", "hidden", "selected")

    def __post_init__(self):
        if not self.blocks.layers or not all(isinstance(spec, KPoolSpec) for spec in self.blocks.layers):
            raise ValueError(
                f"layers={self.blocks.layers}: an MTP drafter takes blocks with a sparse layer (KPoolSpec) each, at "
                "least one"
            )

    @property
    def cache_layers(self) -> tuple[KPoolSpec, ...]:
        """What the blocks keep for a token: lanes of a unified pool's FULL entries."""
        return self.blocks.layers

    def init(self, config: SpecConfig) -> MTPState:
        B, D, depth = config.batch_size, config.num_draft_tokens, len(self.blocks.layers)
        if 1 < depth < D - 1:
            raise InputError(
                f"num_draft_tokens={D}: {depth} blocks, one a depth, propose {depth} drafts; use at most {depth + 1}"
            )
        layers = tuple(spec.with_rows(D) for spec in self.blocks.layers)
        cache = None
        if config.memory == "static":
            sizes = {"page_size": config.page_size, "num_pages": config.full_pages(), "num_swa_pages": 1}
            cache = init_cache(layers, num_states=config.rows, dtype=self.blocks.dtype, **sizes)
        spec = layers[0]
        shape = {"batch_size": B, "pages_per_row": config.pages_per_row, "swa": False}
        kpool = KPool(spec.pool, spec.topk)
        known = max(D - 1, 1) if depth > 1 else 1
        return MTPState(
            cache=cache,
            tokens=jnp.zeros((B, known), jnp.int32),
            probs=jnp.zeros((B, known, self.blocks.vocab_size), jnp.float32) if config.asks_probs else None,
            hidden=jnp.zeros((B, self.blocks.hidden_size), self.blocks.dtype),
            selected=jnp.full((B, spec.topk + spec.pool - 1), -1, jnp.int32),
            extend=PackedMetadata.zeros(verify_layout(num_rows=D, kpool=kpool, **shape)),
            chain=PackedMetadata.zeros(verify_layout(num_rows=max(D - 2, 1), kpool=kpool, lengths=1, **shape)),
            backend=config.kernel_backend,
        )

    def extend(self, params, state: MTPState, context: ExtendContext) -> MTPState:
        """Runs the blocks over rows that the target has verified, or over a chunk of the prompts."""
        metadata, packed = context.metadata, state.extend
        if not isinstance(metadata, DraftExtendMetadata):  # of a prompt's chunk the target's serve as they are
            D = context.tokens.shape[1]
            metadata, packed = draft_extend_metadata(
                context.seq_lens,
                jnp.where(context.req_rows > 0, D, 0),
                context.req_rows,
                context.page_rows,
                context.v2p,
                packed,
                page_size=state.cache.page_size,
                limit=context.context_len,
                count=context.count,
                kpool=context.kpool,
                backend=state.backend,
            )
            metadata = metadata.replace(state_slots=context.metadata.state_slots)
        last = jnp.maximum(context.count - 1, 0)
        cache, tokens, hidden = state.cache, context.tokens, context.hidden
        drafts, laws = [], []
        for block in range(state.tokens.shape[1] if len(self.blocks.layers) > 1 else 1):
            selections: list[Selection] = []

            def attend(layer, q, k, v, index, cache, *, scale=None, selections=selections):
                out, cache, selection = attend_pooled(cache, layer, q, k, v, index, metadata, scale=scale)
                selections.append(selection)
                return out, cache

            positions = metadata.window.positions
            logits, hidden, cache = self.blocks.apply(
                params, block, tokens, hidden, positions, attend, cache, last[:, None]
            )
            draft, law = propose_token(logits[:, 0], context.sampling, context.seq_lens + context.count, block)
            drafts.append(draft)
            laws.append(law)
            # Block s + 1 looks one token further: the last row's next token is the draft.
            row = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            tokens = jnp.where(row == last[:, None], drafts[-1][:, None], jnp.roll(tokens, -1, axis=1))
        live = context.count > 0

        def of_last_row(rows: Array) -> Array:
            index = last.reshape(-1, *[1] * (rows.ndim - 1))
            return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")[:, 0]

        return state.replace(
            cache=cache,
            tokens=jnp.where(live[:, None], jnp.stack(drafts, axis=1), state.tokens),
            probs=None
            if context.sampling is None
            else jnp.where(live[:, None, None], jnp.stack(laws, axis=1), state.probs),
            hidden=jnp.where(live[:, None], of_last_row(hidden), state.hidden),
            selected=jnp.where(live[:, None], of_last_row(selections[0].tokens), state.selected),
            extend=packed,
        )

    def propose(self, params, state: MTPState, context: DraftContext, num_drafts: int) -> tuple[MTPState, Drafts]:
        B = context.req_rows.shape[0]
        count = jnp.full((B,), num_drafts, jnp.int32)
        if len(self.blocks.layers) > 1:
            probs = None if state.probs is None else state.probs[:, :num_drafts]
            return state, Drafts(state.tokens[:, :num_drafts], count, probs)
        if num_drafts == 1:
            return state, Drafts(state.tokens, count, state.probs)
        rows = chain_metadata(
            context.seq_lens,
            context.req_rows,
            context.page_rows,
            context.v2p,
            state.chain,
            page_size=state.cache.page_size,
            limit=context.tokens.shape[1],
            kpool=context.kpool,
            state_slots=context.metadata.state_slots,
            backend=state.backend,
        )
        metadata, packed = rows.metadata, rows.packed
        written = unmarked(metadata.window.full_loc, "full")
        table, seed = unmarked(metadata.page_table, "full"), metadata.kpool.dsa_cache_seqlens
        slots = _append(slots_of(state.selected[:, None], table, state.cache.page_size)[:, 0], seed, written)

        def step(i, carry):
            chain, hidden, cache = carry
            # A masked sum, not a dynamic slice, which would keep the loop out of a command buffer.
            mine = jnp.arange(written.shape[1], dtype=jnp.int32) == i

            def column_of(array):
                return jnp.where(mine, array, 0).sum(axis=1, keepdims=True, dtype=jnp.int32)

            def attend(layer, q, k, v, index, cache, *, scale=None):
                del index  # nothing is selected anew
                v = jnp.zeros((*k.shape[:3], 0), k.dtype) if v is None else v
                cache = cache.write(layer, column_of(written), k, v, metadata.backend)
                attended = (seed + i + 1)[:, None]
                how = dict(scale=scale, backend=metadata.backend)
                return attend_selected(cache, layer, q, slots[:, None], attended, **how), cache

            positions = column_of(metadata.window.positions)
            first_row = jnp.zeros((B, 1), jnp.int32)
            logits, hidden, cache = self.blocks.apply(
                params, 0, chain.last[:, None], hidden[:, None], positions, attend, cache, first_row
            )
            drawn = propose_token(logits[:, 0], context.sampling, context.seq_lens, i + 1)
            return chain.add(*drawn, i + 1), hidden[:, 0], cache

        first = None if state.probs is None else state.probs[:, 0]
        carry = Chain.start(state.tokens[:, 0], first, num_drafts), state.hidden, state.cache
        chain, _, cache = jax.lax.fori_loop(0, num_drafts - 1, step, carry)
        return state.replace(cache=cache, chain=packed), Drafts(chain.tokens, count, chain.probs)


def _append(slots: Array, count: Array, more: Array) -> Array:
    """int32[B, M + N]: the first `count` of int32[B, M], then the N more, packed; 0 behind."""
    M, N = slots.shape[1], more.shape[1]
    column = jnp.arange(M + N, dtype=jnp.int32)
    behind = column - count[:, None]
    wide = jnp.pad(slots, ((0, 0), (0, N)))
    chosen = jnp.take_along_axis(more, jnp.clip(behind, 0, N - 1), axis=1, mode="promise_in_bounds")
    return jnp.where(behind < 0, wide, jnp.where(behind < N, chosen, 0))

"""A small language model as drafter.

One rule ties tokens to cache rows, in prefill, extend and decode alike: row p of the draft's cache holds token p of the
sequence, as in the target. Committed length L means that the target's rows 0 .. L - 1 are valid and the anchor is token
L.

When a round accepts all its drafts, the last of them was proposed but never fed to the draft model, so row L - 1 is
missing. Each round therefore starts with a two-row extend over tokens L - 1 and L: it writes the missing row (or the
same row again) and yields the first proposal. Further proposals take one row each.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, LayerSpec, PoolCache, init_cache
from jaxspec.config import SpecConfig
from jaxspec.drafting.base import DraftContext, Drafts
from jaxspec.drafting.proposals import Chain, propose_token
from jaxspec.metadata import DraftExtendMetadata, WriteWindow, decode_step, draft_window, verify_layout
from jaxspec.models.contract import Model
from pallas_kernels import PackedMetadata

Array = jax.Array


@flax.struct.dataclass
class DraftLMState:
    """The draft model's cache and the buffer of its write window.

    cache: buffers of its own, in the target's FULL pages; with unified memory its view of the pool while it runs, else
      None.
    backend: who runs the metadata kernel, from `SpecConfig.kernel_backend` (static).
    """

    cache: KVCache | PoolCache | None
    packed: PackedMetadata
    backend: str | None = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class DraftLM:
    """Proposes with a small model that shares the target's vocabulary, drawing from its distribution under the
    request's settings where the verifier asks for it, and greedily otherwise.

    The draft's rows are addressed by the target's FULL page table, so it needs no allocator; its layers must be stored
    in "full" pages (windows still clip what they see). With unified memory they are lanes of the target's entries.

    Attributes:
      model: the draft model.
    """

    model: Model
    algorithm: ClassVar[str] = "draft_lm"
    has_probs: ClassVar[bool] = True

    def __post_init__(self):
        if self.model.has_state:
            raise ValueError(
                "the draft model has layers that keep something of a request, states or rings of compressed keys: a "
                "draft language model's layers may keep rows of K and V only; choose another draft model"
            )
        if any(spec.storage != "full" for spec in self.model.layers):
            raise ValueError(
                "draft layers must be stored in 'full' pages: build the draft with from_qwen3(module, swa_pages=False)"
            )

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """What the draft keeps for a token: lanes of a unified pool's FULL entries."""
        return self.model.layers

    def init(self, config: SpecConfig) -> DraftLMState:
        cache = None
        if config.memory == "static":
            sizes = {"page_size": config.page_size, "num_pages": config.full_pages(), "num_swa_pages": 1}
            cache = init_cache(self.model.layers, dtype=self.model.dtype, **sizes)
        layout = verify_layout(
            batch_size=config.batch_size,
            num_rows=config.num_draft_tokens,
            pages_per_row=config.pages_per_row,
            swa=False,
        )
        return DraftLMState(cache=cache, packed=PackedMetadata.zeros(layout), backend=config.kernel_backend)

    def prefill(self, params, state: DraftLMState, tokens: Array, metadata: DraftExtendMetadata) -> DraftLMState:
        _, _, cache = self.model.apply(params, tokens, metadata.window.positions, state.cache, metadata)
        return state.replace(cache=cache)

    def propose(self, params, state: DraftLMState, context: DraftContext, num_drafts: int):
        B = context.req_rows.shape[0]
        start = jnp.maximum(context.seq_lens - 1, 0)
        window, packed = draft_window(
            start,
            context.req_rows,
            context.page_rows,
            context.v2p,
            state.packed,
            page_size=state.cache.page_size,
            limit=context.tokens.shape[1],
            backend=state.backend,
        )
        previous = context.tokens[context.req_rows, start]
        ids = jnp.stack([previous, context.anchor], axis=1)
        # A padded lane has L = 0: its rows sit at positions 0 and 1 of the sink page, like any padding.
        extend = _two_rows(context, window)
        logits, _, cache = self.model.apply(params, ids, extend.window.positions, state.cache, extend)
        sampling, lens = context.sampling, context.seq_lens
        chain = Chain.start(*propose_token(logits[:, 0], sampling, lens, 0), num_drafts)

        def extend_chain(step, carry):
            chain, cache = carry
            metadata = decode_step(context.metadata, window, step)
            logits, _, cache = self.model.apply(params, chain.last[:, None], metadata.window.positions, cache, metadata)
            return chain.add(*propose_token(logits[:, 0], sampling, lens, step - 1), step - 1), cache

        chain, cache = jax.lax.fori_loop(2, num_drafts + 1, extend_chain, (chain, cache))
        drafts = Drafts(chain.tokens, jnp.full((B,), num_drafts, jnp.int32), chain.probs)
        return state.replace(cache=cache, packed=packed), drafts


def _two_rows(context: DraftContext, window: WriteWindow) -> DraftExtendMetadata:
    """Metadata of the extend over tokens L - 1 and L."""
    B = context.req_rows.shape[0]
    lengths = window.positions[:, 1] + 1
    return DraftExtendMetadata(
        cache_seqlens=lengths,
        cu_seqlens_k=jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)]),
        page_table=context.metadata.page_table,
        swa_page_table=None,
        window=jax.tree.map(lambda loc: loc[:, :2], window.replace(swa_loc=None)),
        logit_rows=jnp.ones((B, 1), jnp.int32),
        state_slots=None,
        extend_lens=jnp.full((B,), 2, jnp.int32),
        cu_seqlens_q=jnp.arange(B + 1, dtype=jnp.int32) * 2,
        backend=context.metadata.backend,
    )

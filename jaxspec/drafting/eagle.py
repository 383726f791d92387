"""EAGLE-3: a draft of one layer that goes on from features of the target, in a chain.

Its row at position p comes of token p + 1 and of the target's features at p. So where the target's rows 0 .. L - 1 are
valid the draft's are too, and its row L - 1 has seen the anchor, token L. The same rule holds in prefill, extend and
chain.

After each verify the draft runs over all D rows (draft extend), where the target's forward put its own: rows of
rejected drafts are garbage that the next one overwrites, rows of accepted ones replace what the chain had made of its
own guesses. The row of the last emitted token holds the first proposal. Each further one is a row that the chain adds:
at position L + i it takes proposal i + 1 and the hidden row before it. Extend and chain use the metadata of the round's
verify, and build none.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.attention import attend
from jaxspec.cache import KVCache, LayerSpec, PoolCache, init_cache
from jaxspec.cache.placement import Placement, place_draft
from jaxspec.config import SpecConfig
from jaxspec.drafting.base import DraftContext, Drafts, ExtendContext
from jaxspec.drafting.proposals import Chain, propose_token
from jaxspec.errors import InputError
from jaxspec.metadata import decode_step
from jaxspec.models.contract import Model
from jaxspec.models.eagle import Eagle3
from jaxspec.verification import Sampling, greedy_token

Array = jax.Array


@flax.struct.dataclass
class Eagle3State:
    """What an `Eagle3Drafter` carries from round to round.

    Attributes:
      cache: buffers of its own, in the target's FULL pages; with unified memory its view of the pool while it runs,
        else None.
      token: int32[B], the first proposal.
      probs: float32[B, V], what it was drawn from; None where nobody asks.
      hidden: [B, Hd], the draft's row behind it, for the chain to go on with.
    """

    cache: KVCache | PoolCache | None
    token: Array
    probs: Array | None
    hidden: Array


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """Proposes with an EAGLE-3 draft.

    Its rows are addressed by the target's FULL page table; with unified memory they are lanes of its entries.

    Attributes:
      draft: the network; its params are what `load_draft` gives.
      placement: where its rows lie, as `placed` has decided.
    """

    draft: Eagle3
    placement: Placement | None = None
    algorithm: ClassVar[str] = "eagle"
    has_probs: ClassVar[bool] = True
    lane_fields: ClassVar[tuple[str, ...]] = ("token", "probs", "hidden")

    def __post_init__(self):
        if not isinstance(self.draft, Eagle3):
            raise ValueError(f"draft is a {type(self.draft).__name__}: an Eagle3Drafter runs EAGLE-3 drafts (Eagle3)")

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual streams it feeds on."""
        return self.draft.config.target_layer_ids

    @property
    def dtype(self) -> str:
        """What it computes in, and keeps its rows in."""
        return self.draft.dtype

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """What the draft keeps for a token: lanes of a unified pool's FULL entries."""
        if self.placement is None:
            return self.draft.layers
        return self.placement.lanes

    def placed(self, target: Model, config: SpecConfig) -> "Eagle3Drafter":
        """The drafter with its rows where this target and this memory have them.

        Raises:
          InputError: the draft's vocabulary or context does not match.
        """
        shape = self.draft.config
        if shape.vocab_size != target.vocab_size:
            raise InputError(
                f"the EAGLE-3 draft is for {shape.vocab_size} tokens, and the target has {target.vocab_size}: use a "
                "draft that was made for it"
            )
        if shape.max_position_embeddings < config.context_len:
            raise InputError(
                f"the EAGLE-3 draft's context of {shape.max_position_embeddings} is below "
                f"context_len={config.context_len}"
            )
        placement = place_draft(self.draft.layers, self.dtype, target.layers, target.dtype, memory=config.memory)
        return dataclasses.replace(self, placement=placement)

    def init(self, config: SpecConfig, num_pages: int | None = None) -> Eagle3State:
        """Nothing seen yet.

        Raises:
          InputError: `num_pages`, the virtual pages of a private pool, is given: the draft has none.
        """
        if num_pages is not None:
            raise InputError(
                f"memory={config.memory!r}: {self.placement.reason}, so it cannot be lanes of a unified pool, as an "
                "EAGLE-3 draft must be; choose memory='static'"
            )
        B, cache = config.batch_size, None
        if config.memory == "static":
            sizes = {"page_size": config.page_size, "num_pages": config.full_pages(), "num_swa_pages": 1}
            cache = init_cache(self.draft.layers, dtype=self.dtype, **sizes)
        return Eagle3State(
            cache=cache,
            token=jnp.zeros((B,), jnp.int32),
            probs=jnp.zeros((B, self.draft.config.vocab_size), jnp.float32) if config.asks_probs else None,
            hidden=jnp.zeros((B, self.draft.config.hidden_size), self.dtype),
        )

    def extend(self, params, state: Eagle3State, context: ExtendContext) -> Eagle3State:
        """Runs the draft over rows that the target has verified, or over a chunk of the prompts."""

        def store_and_attend(layer, q, k, v, cache):
            return attend(cache, layer, q, k, v, context.metadata)

        hidden, positions = self.draft.fuse(params, context.hidden), context.metadata.window.positions
        rows, hidden, cache = self.draft.rows(params, context.tokens, hidden, positions, store_and_attend, state.cache)
        last = jnp.maximum(context.count - 1, 0)[:, None, None]

        def of_last_row(rows: Array) -> Array:
            return jnp.take_along_axis(rows, last, axis=1, mode="promise_in_bounds")[:, 0]

        scores = self.draft.logits(params, of_last_row(rows))
        token, probs = self._choose(params, scores, context.sampling, context.seq_lens + context.count, 0)

        def update(old: Array, new: Array) -> Array:
            return jnp.where((context.count > 0).reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return state.replace(
            cache=cache,
            token=update(state.token, token),
            probs=None if probs is None else update(state.probs, probs),
            hidden=update(state.hidden, of_last_row(hidden)),
        )

    def propose(self, params, state: Eagle3State, context: DraftContext, num_drafts: int) -> tuple[Eagle3State, Drafts]:
        def step(i, carry):
            chain, hidden, cache = carry
            metadata = decode_step(context.metadata, context.metadata.window, i)

            def store_and_attend(layer, q, k, v, cache):
                return attend(cache, layer, q, k, v, metadata)

            rows, hidden, cache = self.draft.rows(
                params, chain.last[:, None], hidden[:, None], metadata.window.positions, store_and_attend, cache
            )
            scores = self.draft.logits(params, rows[:, 0])
            drawn = self._choose(params, scores, context.sampling, context.seq_lens, i + 1)
            return chain.add(*drawn, i + 1), hidden[:, 0], cache

        carry = Chain.start(state.token, state.probs, num_drafts), state.hidden, state.cache
        chain, _, cache = jax.lax.fori_loop(0, num_drafts - 1, step, carry)
        count = jnp.full(state.token.shape, num_drafts, jnp.int32)
        return state.replace(cache=cache), Drafts(chain.tokens, count, chain.probs)

    def _choose(
        self, params, scores: Array, sampling: Sampling | None, seq_lens: Array, index: Array | int
    ) -> tuple[Array, Array | None]:
        """A proposal of each request by the draft's scores float32[B, Vd], and what it was drawn from; see
        `propose_token`. Ids are the target's."""
        if sampling is None:
            return self.draft.target_ids(params, greedy_token(scores)), None
        return propose_token(self.draft.spread(params, scores), sampling, seq_lens, index)

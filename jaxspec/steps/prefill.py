"""Prefill: the prompts enter the cache in chunks, and each request emits its first token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import SpecConfig
from jaxspec.drafting import ExtendContext, extends
from jaxspec.metadata import draft_extend_metadata, verify_layout
from jaxspec.steps.fusion import kpool_of
from jaxspec.steps.memory import lend, page_rows, state_table, take_back
from jaxspec.steps.round import OK, OUT_OF_PAGES, emit, log_run
from jaxspec.steps.settings import lane_settings
from jaxspec.steps.state import WAITING, SpecState, lanes_to_rows, requests_of
from jaxspec.steps.upkeep import free_pages
from jaxspec.verification import greedy_token, sample_token
from pallas_kernels import PackedMetadata

Array = jax.Array


def prefill(spec, params, state: SpecState) -> tuple[SpecState, Array]:
    """Brings every waiting request into the cache: target and drafter see the prompts, the target's first token is
    emitted.

    The prompts advance together, `prefill_chunk` tokens a forward, in a device loop; a request whose prompt is through
    waits for the others. Pages are checked for all prompts before the first chunk.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state: from `init_state`.

    Returns:
      The state, in which formerly waiting requests are running (or finished, if one token was all they wanted), and
      int32[], 0, or 1 if there are not enough pages; then the state is as it was.
    """
    config = spec.config
    enough = _fits(spec, state)

    def unfinished(carry):
        state, _ = carry
        return enough & (requests_of(state).status == WAITING).any()

    def chunk(carry):
        state, packed = carry
        waiting = requests_of(state).status[1:] == WAITING
        rows = jnp.where(waiting, jnp.arange(1, config.rows, dtype=jnp.int32), 0)
        return prefill_chunk(spec, params, state, packed, rows)

    state, _ = jax.lax.while_loop(unfinished, chunk, (state, chunk_metadata(spec, config.batch_size)))
    return state, jnp.where(enough, OK, OUT_OF_PAGES).astype(jnp.int32)


def pages_per_chunk(config: SpecConfig) -> int:
    """Most pages that one request can lack for a chunk."""
    return min(-(-config.prefill_chunk // config.page_size) + 1, config.pages_per_row)


def _fits(spec, state: SpecState) -> Array:
    """bool[], whether the free pages hold all waiting prompts and their states; sliding-window pages are counted at
    their peak."""
    config, window = spec.config, spec.target.swa_window
    requests = requests_of(state)
    wanted = jnp.where(requests.status == WAITING, -(-requests.prompt_len // config.page_size), 0)
    windowed = 0 if window is None else jnp.minimum(wanted, config.swa_pages_per_row(window)).sum()
    return state.pages.fits(wanted.sum(), windowed, (wanted > 0).sum())


def chunk_metadata(spec, width: int) -> PackedMetadata:
    """The buffer that the metadata of a chunk of `width` requests are written to."""
    config = spec.config
    return PackedMetadata.zeros(
        verify_layout(
            batch_size=width,
            num_rows=config.prefill_chunk,
            pages_per_row=config.pages_per_row,
            swa=spec.target.swa_window is not None,
            kpool=kpool_of(spec.target, config),
            states=spec.target.has_state,
        )
    )


class _Lanes(NamedTuple):
    """Which of the N requests of a chunk is in which of the B lanes.

    Attributes:
      rows: int32[N], request row of each, 0 for none. With N = B they are in their own lanes.
      present: bool[B], lanes whose request takes part.
      place: int32[B], where among the N; any of them for a lane that takes no part.
    """

    rows: Array
    present: Array
    place: Array

    @classmethod
    def of(cls, rows: Array, batch_size: int) -> "_Lanes":
        if rows.size == batch_size:
            return cls(rows, rows > 0, jnp.arange(batch_size, dtype=jnp.int32))
        same = rows == jnp.arange(1, batch_size + 1, dtype=jnp.int32)[:, None]
        return cls(rows, same.any(axis=1), jnp.argmax(same, axis=1).astype(jnp.int32))

    @property
    def narrow(self) -> bool:
        """Whether the chunk has fewer places than there are lanes."""
        return self.rows.size < self.present.size

    def numbers(self, values: Array) -> Array:
        """int32[R] -> int32[N], of each request's row; 0 where there is none. Of all lanes a slice, which XLA fuses."""
        return jnp.where(self.rows > 0, values[self.rows] if self.narrow else values[1:], 0)

    def add(self, values: Array, more: Array) -> Array:
        """int32[R], to which int32[N] is added, 0 where there is no request."""
        return values.at[self.rows].add(more) if self.narrow else values + lanes_to_rows(more)

    def gather(self, lanes: Array) -> Array:
        """[B, ...] -> [N, ...]; where there is no request, what lane 0 has."""
        return lanes[jnp.maximum(self.rows - 1, 0)] if self.narrow else lanes

    def spread(self, values: Array) -> Array:
        """[N, ...] -> [B, ...]; in lanes that take no part something else."""
        return values[self.place] if self.narrow else values

    def update(self, lanes: Array, values: Array) -> Array:
        """[B, ...] with the [N, ...] values of the requests that take part."""
        if not self.narrow:
            return values
        return jnp.where(self.present.reshape(-1, *[1] * (lanes.ndim - 1)), self.spread(values), lanes)


def prefill_chunk(
    spec, params, state: SpecState, packed: PackedMetadata, rows: Array
) -> tuple[SpecState, PackedMetadata]:
    """Brings the next chunk of some waiting requests' prompts into the cache. There must be pages for it.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state: before.
      packed: `chunk_metadata` for N requests.
      rows: int32[N], request rows of waiting requests, all different, 0 for none. With N = B request row b + 1 or 0 is
        in lane b; with N < B any order will do, and the forward is as much smaller. A drafter with an `extend` must
        then say in `lane_fields` which parts of its state are by lane.

    Returns:
      The state, in which a request whose prompt is through has emitted its first token and runs, or is finished; the
      others are as they were. And the buffer.
    """
    config, C = spec.config, spec.config.prefill_chunk
    requests, lanes = requests_of(state), _Lanes.of(rows, spec.config.batch_size)
    seq_lens = lanes.numbers(requests.seq_len)
    extend_lens = jnp.minimum(lanes.numbers(requests.prompt_len) - seq_lens, C)

    pages, cache, _ = state.pages.allocate(
        state.cache, rows, seq_lens + extend_lens, max_new=pages_per_chunk(config), backend=config.kernel_backend
    )
    metadata, packed = draft_extend_metadata(
        seq_lens,
        extend_lens,
        rows,
        page_rows(config, pages),
        pages.v2p,
        packed,
        page_size=config.page_size,
        states=state_table(pages) if spec.target.has_state else None,
        kpool=kpool_of(spec.target, config),
        backend=config.kernel_backend,
    )
    column = jnp.arange(C, dtype=jnp.int32)
    real = column < extend_lens[:, None]
    tokens = jnp.where(real, state.tokens[rows[:, None], jnp.where(real, seq_lens[:, None] + column, 0)], 0)
    # The drafter first: nothing reads what it writes after the target has begun to write. The other way round nothing
    # would keep XLA from reading for the target after the drafter's writes, out of a copy of the pool that they share.
    draft_state, after = state.draft, extends(spec.drafter)
    if spec.drafter is not None and not after:
        draft_state = spec.drafter.prefill(params.draft, lend(cache, draft_state), tokens, metadata)
        cache, draft_state = take_back(cache, draft_state)
    logits, hidden, cache = spec.target.apply(params.target, tokens, metadata.window.positions, cache, metadata)

    requests = requests.replace(seq_len=lanes.add(requests.seq_len, extend_lens))
    through = lanes.present & (requests.seq_len[1:] == requests.prompt_len[1:])
    sampling = lane_settings(state)
    if sampling is None:
        run = greedy_token(logits)
    else:
        sampling = jax.tree.map(lanes.gather, sampling)
        run = sample_token(logits[:, 0], sampling, seq_lens + extend_lens - 1)[:, None]
    count = through.astype(jnp.int32)
    emitted = emit(spec, state, requests, through, requests.seq_len[1:], lanes.spread(run), count)
    if after and config.num_draft_tokens > 1:
        # What this drafter writes is made of the hidden rows, so of all that the target has read.
        following = emitted.history[rows[:, None], jnp.where(real, seq_lens[:, None] + column + 1, 0)]
        context = ExtendContext(
            tokens=jnp.where(real, following, 0),
            hidden=hidden,
            count=extend_lens,
            seq_lens=seq_lens,
            req_rows=rows,
            page_rows=page_rows(config, pages),
            v2p=pages.v2p,
            metadata=metadata,
            context_len=config.context_len,
            sampling=sampling if config.asks_probs else None,
            kpool=kpool_of(spec.target, config),
        )
        by_lane = {name: getattr(draft_state, name) for name in getattr(spec.drafter, "lane_fields", ())}
        draft_state = draft_state.replace(**jax.tree.map(lanes.gather, by_lane)) if by_lane else draft_state
        draft_state = spec.drafter.extend(params.draft, lend(cache, draft_state), context)
        cache, draft_state = take_back(cache, draft_state)
        after = {name: getattr(draft_state, name) for name in by_lane}
        draft_state = draft_state.replace(**jax.tree.map(lanes.update, by_lane, after)) if by_lane else draft_state
    wanted = None if state.logprobs is None else lanes.spread(logits)
    logprobs = log_run(state.logprobs, requests.seq_len[1:], emitted.num_tokens, wanted, emitted.tokens)
    taking_part = jnp.where(lanes.present, jnp.arange(1, config.rows, dtype=jnp.int32), 0)
    pages = free_pages(spec, emitted.requests, pages, taking_part, max_advance=C)
    return state.with_(
        requests=emitted.requests,
        pages=pages,
        tokens=emitted.history,
        stops=emitted.stops,
        logprobs=logprobs,
        cache=cache,
        draft=draft_state,
    ), packed

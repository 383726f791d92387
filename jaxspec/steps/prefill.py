"""Prefill: the prompts enter the cache in chunks, and each request emits its first token."""

import jax
import jax.numpy as jnp

from jaxspec.drafting import ExtendContext, extends
from jaxspec.metadata import draft_extend_metadata, verify_layout
from jaxspec.steps.fusion import kpool_of
from jaxspec.steps.memory import lend, page_rows, state_table, take_back
from jaxspec.steps.round import OK, OUT_OF_PAGES, emit, free_pages, log_run
from jaxspec.steps.settings import lane_settings
from jaxspec.steps.state import WAITING, SpecState, lanes_to_rows, requests_of
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
    layout = verify_layout(
        batch_size=config.batch_size,
        num_rows=config.prefill_chunk,
        pages_per_row=config.pages_per_row,
        swa=spec.target.swa_window is not None,
        kpool=kpool_of(spec.target, config),
        states=spec.target.has_state,
    )
    enough = _fits(spec, state)

    def unfinished(carry):
        state, _ = carry
        return enough & (requests_of(state).status == WAITING).any()

    def chunk(carry):
        return _prefill_chunk(spec, params, *carry)

    state, _ = jax.lax.while_loop(unfinished, chunk, (state, PackedMetadata.zeros(layout)))
    return state, jnp.where(enough, OK, OUT_OF_PAGES).astype(jnp.int32)


def _fits(spec, state: SpecState) -> Array:
    """bool[], whether the free pages hold all waiting prompts and their states; sliding-window pages are counted at
    their peak."""
    config, window = spec.config, spec.target.swa_window
    requests = requests_of(state)
    wanted = jnp.where(requests.status == WAITING, -(-requests.prompt_len // config.page_size), 0)
    windowed = 0 if window is None else jnp.minimum(wanted, config.swa_pages_per_row(window)).sum()
    return state.pages.fits(wanted.sum(), windowed, (wanted > 0).sum())


def _prefill_chunk(spec, params, state: SpecState, packed: PackedMetadata) -> tuple[SpecState, PackedMetadata]:
    config, C = spec.config, spec.config.prefill_chunk
    requests = requests_of(state)
    waiting = requests.status[1:] == WAITING
    rows = jnp.where(waiting, jnp.arange(1, config.rows, dtype=jnp.int32), 0)
    seq_lens = jnp.where(waiting, requests.seq_len[1:], 0)
    extend_lens = jnp.where(waiting, jnp.minimum(requests.prompt_len[1:] - seq_lens, C), 0)

    max_new = min(-(-C // config.page_size) + 1, config.pages_per_row)
    pages, cache, _ = state.pages.allocate(
        state.cache, rows, seq_lens + extend_lens, max_new=max_new, backend=config.kernel_backend
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

    requests = requests.replace(seq_len=requests.seq_len + lanes_to_rows(extend_lens))
    through = waiting & (requests.seq_len[1:] == requests.prompt_len[1:])
    sampling = lane_settings(state)
    if sampling is None:
        run = greedy_token(logits)
    else:
        run = sample_token(logits[:, 0], sampling, requests.seq_len[1:] - 1)[:, None]
    count = through.astype(jnp.int32)
    emitted = emit(spec, state, requests, through, requests.seq_len[1:], run, count)
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
        draft_state = spec.drafter.extend(params.draft, lend(cache, draft_state), context)
        cache, draft_state = take_back(cache, draft_state)
    logprobs = log_run(state.logprobs, requests.seq_len[1:], emitted.num_tokens, logits, emitted.tokens)
    pages = free_pages(spec, emitted.requests, pages, rows, max_advance=C)
    return state.with_(
        requests=emitted.requests,
        pages=pages,
        tokens=emitted.history,
        stops=emitted.stops,
        logprobs=logprobs,
        cache=cache,
        draft=draft_state,
    ), packed

"""One speculative round: prepare, draft, verify, commit. Pure functions of the state; `run_round` is their sequence.

Notation: L is a request's committed length, the anchor is the token at position L. A round verifies the D rows L .. L + D - 1 (anchor
and drafts), emits between 1 and D tokens and raises L by as many. Worked round, D = 4, L = 10, drafts x y z, target choices x y w .:
two drafts are accepted, x y w are emitted, L becomes 13, and row 13, which holds K/V of the rejected z, is overwritten next round.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.cache import allocate, release, retire
from jaxspec.drafting import DraftContext, Drafts
from jaxspec.metadata import VerifyMetadata, verify_metadata
from jaxspec.steps.state import CONTEXT, FINISHED, LENGTH, RUNNING, STOP, UNFINISHED, SpecState, pages_of, requests_of
from jaxspec.verification import greedy_accept, greedy_token, trim_run

Array = jax.Array

OK, OUT_OF_PAGES = 0, 1


@flax.struct.dataclass
class RoundPlan:
    """Who takes part in a round, and the metadata of its verify.

    Attributes:
      status: int32[], OK or OUT_OF_PAGES; in the latter case no request takes part.
      req_rows: int32[B], request row of each lane, 0 where it does not take part.
      seq_lens: int32[B], committed length L; 0 where the lane does not take part.
      anchor: int32[B], token at position L.
      metadata: `VerifyMetadata` of the round.
    """

    status: Array
    req_rows: Array
    seq_lens: Array
    anchor: Array
    metadata: VerifyMetadata


@flax.struct.dataclass
class Verdict:
    """What the target said.

    Attributes:
      targets: int32[B, D], its choice after each row.
      accepted: int32[B], leading drafts that agree, 0 .. D - 1.
    """

    targets: Array
    accepted: Array


@flax.struct.dataclass
class StepOutput:
    """What a round did.

    Attributes:
      status: int32[], OK or OUT_OF_PAGES (then nothing else in the state has changed but what the sink holds).
      tokens: int32[B, D], emitted tokens, 0 past `num_tokens`.
      num_tokens: int32[B], tokens emitted by each lane, 0 for lanes that took no part.
      num_drafts: int32[B], drafts that were proposed.
      accepted: int32[B], drafts that were accepted, before stop ids and length limits.
      finish_reason: int32[B], 0 while the request runs, else 1 stop id, 2 max_new_tokens, 3 context_len.
      unfinished: bool[], whether any request is still running.
    """

    status: Array
    tokens: Array
    num_tokens: Array
    num_drafts: Array
    accepted: Array
    finish_reason: Array
    unfinished: Array


def prepare(spec, state: SpecState) -> tuple[SpecState, RoundPlan]:
    """Gives every running request pages for its D rows and builds the round's metadata.

    Args:
      spec: the `SpecStep` (static).
      state: the state before the round.

    Returns:
      The state with pages handed out (or as it was, if there are not enough) and the plan.
    """
    config = spec.config
    swa = spec.target.swa_window is not None
    requests, pages = requests_of(state), pages_of(state)
    lane_rows = jnp.arange(1, config.rows, dtype=jnp.int32)
    running = requests.status[1:] == RUNNING
    rows = jnp.where(running, lane_rows, 0)
    reach = jnp.minimum(requests.seq_len[1:] + config.num_draft_tokens, config.context_len)
    max_new = min(-(-config.num_draft_tokens // config.page_size) + 1, config.pages_per_row)
    pages, enough = allocate(pages, rows, reach, page_size=config.page_size, max_new=max_new, swa=swa)

    rows = jnp.where(enough, rows, 0)
    seq_lens = jnp.where(rows > 0, requests.seq_len[1:], 0)
    anchor = state.tokens[rows, seq_lens]
    metadata, packed = verify_metadata(
        seq_lens, rows, pages.page_table, pages.v2p, anchor, state.metadata, page_size=config.page_size,
        limit=config.context_len, backend=config.kernel_backend,
    )
    plan = RoundPlan(
        status=jnp.where(enough, OK, OUT_OF_PAGES).astype(jnp.int32), req_rows=rows, seq_lens=seq_lens, anchor=anchor,
        metadata=metadata,
    )
    return state.with_(pages=pages, metadata=packed), plan


def draft(spec, params, state: SpecState, plan: RoundPlan) -> tuple[SpecState, Drafts]:
    """Asks the drafter for D - 1 tokens to follow each anchor.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state, plan: from `prepare`.

    Returns:
      The state with the drafter's own part updated, and the proposals. Without a drafter, or with D = 1, there are none.
    """
    B, num_drafts = spec.config.batch_size, spec.config.num_draft_tokens - 1
    if spec.drafter is None or num_drafts == 0:
        return state, Drafts(tokens=jnp.zeros((B, num_drafts), jnp.int32), count=jnp.zeros((B,), jnp.int32))
    context = DraftContext(
        tokens=state.tokens, req_rows=plan.req_rows, seq_lens=plan.seq_lens, anchor=plan.anchor, metadata=plan.metadata,
        page_rows=state.page_table, v2p=state.v2p,
    )
    draft_state, drafts = spec.drafter.propose(params.draft, state.draft, context, num_drafts)
    count = jnp.where(plan.req_rows > 0, drafts.count, 0)
    return state.replace(draft=draft_state), drafts.replace(count=count)


def verify(spec, params, state: SpecState, plan: RoundPlan, drafts: Drafts) -> tuple[SpecState, Verdict]:
    """Runs the target over anchor and drafts, and accepts greedily.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state, plan: from `prepare`.
      drafts: from `draft`, or a script's own.

    Returns:
      The state with K and V of all D rows written (those of rejected drafts are overwritten later), and the verdict.
    """
    ids = plan.metadata.ids.at[:, 1:].set(drafts.tokens)
    metadata = plan.metadata.replace(ids=ids)
    logits, _, cache = spec.target.apply(params.target, ids, metadata.window.positions, state.cache, metadata)
    targets = greedy_token(logits)
    return state.replace(cache=cache), Verdict(targets=targets, accepted=greedy_accept(drafts.tokens, drafts.count, targets))


def commit(spec, state: SpecState, plan: RoundPlan, drafts: Drafts, verdict: Verdict) -> tuple[SpecState, StepOutput]:
    """Emits the accepted run, ends requests that are done, retires and frees their pages.

    Args:
      spec: the `SpecStep` (static).
      state, plan, drafts, verdict: from the phases before.

    Returns:
      The state after the round, and what happened.
    """
    requests = requests_of(state)
    count = jnp.where(plan.req_rows > 0, verdict.accepted + 1, 0)
    state, tokens, keep = emit(spec, state, plan.req_rows, plan.seq_lens + 1, verdict.targets, count)

    rows = plan.req_rows
    entry = jnp.stack([jnp.where(rows > 0, verdict.accepted, 0), keep], axis=-1)
    nth = jnp.minimum(requests.verify_count[rows], state.round_log.shape[1] - 1)
    ended = requests_of(state)
    state = state.with_(
        requests=ended.replace(
            seq_len=ended.seq_len.at[rows].add(keep), verify_count=ended.verify_count.at[rows].add((rows > 0).astype(jnp.int32))
        ),
        round_log=state.round_log.at[rows, jnp.where(rows > 0, nth, 0)].set(entry),
    )
    state = free_pages(spec, state, rows, max_advance=spec.config.num_draft_tokens)
    requests = requests_of(state)
    return state, StepOutput(
        status=plan.status,
        tokens=tokens,
        num_tokens=keep,
        num_drafts=drafts.count,
        accepted=jnp.where(rows > 0, verdict.accepted, 0),
        finish_reason=requests.finish_reason[1:],
        unfinished=(requests.status == RUNNING).any(),
    )


def emit(spec, state: SpecState, rows: Array, position: Array, run: Array, count: Array) -> tuple[SpecState, Array, Array]:
    """Appends a run of tokens to its requests and ends those that reach a stop id or a limit.

    Args:
      spec: the `SpecStep` (static).
      state: the state before.
      rows: int32[B], request rows; 0 emits nothing.
      position: int32[B], where the first token of the run goes.
      run: int32[B, D]; count: int32[B], real tokens in it, 0 only where the row is 0.

    Returns:
      The state after (status, tokens and output counts; lengths and pages are the caller's), the emitted tokens int32[B, D] with 0
      past their number, and that number int32[B].
    """
    requests = requests_of(state)
    wanted = requests.max_new_tokens[rows] - requests.num_output[rows]
    room = spec.config.context_len - position
    keep, stopped = trim_run(run, count, state.stop_ids[rows], jnp.minimum(wanted, room))
    column = jnp.arange(run.shape[1], dtype=jnp.int32)
    live = column < keep[:, None]
    tokens = jnp.where(live, run, 0)
    history = state.tokens.at[jnp.where(live, rows[:, None], 0), jnp.where(live, position[:, None] + column, 0)].set(tokens)

    reason = jnp.where(stopped, STOP, jnp.where(keep >= wanted, LENGTH, jnp.where(keep >= room, CONTEXT, UNFINISHED)))
    reason = jnp.where(rows > 0, reason, UNFINISHED).astype(jnp.int32)
    status = jnp.where(reason == UNFINISHED, RUNNING, FINISHED)
    status = jnp.where(rows > 0, status, requests.status[0]).astype(jnp.int32)
    requests = requests.replace(
        status=requests.status.at[rows].set(status),
        finish_reason=requests.finish_reason.at[rows].set(reason),
        num_output=requests.num_output.at[rows].add(keep),
    )
    return state.with_(requests=requests, tokens=history), tokens, keep


def free_pages(spec, state: SpecState, rows: Array, *, max_advance: int) -> SpecState:
    """Retires the SWA pages that `rows` have moved past (by at most `max_advance` tokens since last time), frees finished requests."""
    config, window = spec.config, spec.target.swa_window
    requests, pages = requests_of(state), pages_of(state)
    if window is not None:
        first_key = requests.seq_len[rows] - window + 1
        max_retired = min(-(-max_advance // config.page_size) + 1, config.pages_per_row)
        pages = retire(pages, rows, first_key, page_size=config.page_size, max_retired=max_retired)
    pages = release(pages, (requests.status == FINISHED) & (pages.num_pages > 0), swa=window is not None)
    return state.with_(pages=pages)


def run_round(spec, params, state: SpecState) -> tuple[SpecState, StepOutput]:
    """prepare, draft, verify, commit."""
    state, plan = prepare(spec, state)
    state, drafts = draft(spec, params, state, plan)
    state, verdict = verify(spec, params, state, plan, drafts)
    return commit(spec, state, plan, drafts, verdict)

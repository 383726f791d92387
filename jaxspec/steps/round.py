"""One speculative round: prepare, draft, verify, extend, commit. Pure functions of the state; `run_round` is their
sequence.

Notation: L is a request's committed length, the anchor is the token at position L. A round verifies the D rows at
positions L .. L + D - 1 (anchor and drafts), emits between 1 and D tokens and raises L by as many.

Worked round, D = 4, L = 10, drafts x y z, target choices x y w .: two drafts are accepted, x y w are emitted, L becomes
13, and row 13, which holds K/V of the rejected z, is overwritten next round.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxspec.cache.layers import ACCUMULATED
from jaxspec.cache.pages import run_if
from jaxspec.drafting import DraftContext, Drafts, ExtendContext, extends
from jaxspec.metadata import VerifyMetadata, verify_metadata
from jaxspec.metadata.ids import unmarked
from jaxspec.recurrent import commit as commit_states
from jaxspec.recurrent import take_pending
from jaxspec.steps.fusion import kpool_of
from jaxspec.steps.memory import lend, page_rows, state_table, take_back
from jaxspec.steps.settings import lane_settings
from jaxspec.steps.state import (
    CONTEXT,
    FINISHED,
    LENGTH,
    RUNNING,
    UNFINISHED,
    Requests,
    SpecState,
    lanes_to_rows,
    requests_of,
)
from jaxspec.steps.upkeep import free_pages, hand_out, is_short, running_rows
from jaxspec.verification import (
    StopMatcher,
    chain_nodes,
    end_run,
    greedy_accept,
    greedy_token,
    verify_block,
    verify_match,
    verify_rejection,
)

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
      targets: int32[B, D], the run, up to `accepted`: the drafts that are kept and one token of the target's own behind
        the last of them. Behind that ids in range; of a greedy step the target's choice after each row.
      accepted: int32[B], leading drafts that are kept, 0 .. D - 1.
      rule: int32[B], what decided, see `jaxspec.verification`; None where every request is greedy.
      logits: float32[B, D, V] or None, kept where log-probabilities are wanted.
      hidden: [B, D, H] or None, the target's hidden rows, kept for a drafter that feeds on them.
      pending: for each recurrent layer, its state after each of the D rows; see `jaxspec.recurrent.commit`.
    """

    targets: Array
    accepted: Array
    rule: Array | None = None
    logits: Array | None = None
    hidden: Array | None = None
    pending: dict[int, tuple[Array, ...]] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class StepOutput:
    """What a round did.

    Attributes:
      status: int32[], OK or OUT_OF_PAGES; then tables, lengths and tokens are as they were, and so is every cell of the
        cache outside the sink. The metadata buffers are scratch and may differ.
      tokens: int32[B, D], emitted tokens, 0 past `num_tokens`.
      num_tokens: int32[B], tokens emitted by each lane, 0 for lanes that took no part.
      num_drafts: int32[B], drafts that were proposed.
      accepted: int32[B], drafts that were accepted, before stops and length limits.
      finish_reason: int32[B], 0 while the request runs, else 1 stop id, 2 max_new_tokens, 3 context_len, 4 stop string,
        5 an id outside the vocabulary, which a stop id has taken the place of.
      unfinished: bool[], whether any request is still running.
      rule: int32[B], what decided, an index of `jaxspec.verification.RULE_NAMES`, 0 for lanes that took no part; None
        where the configuration is greedy.
    """

    status: Array
    tokens: Array
    num_tokens: Array
    num_drafts: Array
    accepted: Array
    finish_reason: Array
    unfinished: Array
    rule: Array | None = None


def prepare(spec, state: SpecState) -> tuple[SpecState, RoundPlan]:
    """Gives every running request pages for its D rows and builds the round's metadata.

    Args:
      spec: the `SpecStep` (static).
      state: the state before the round.

    Returns:
      The state with pages handed out (or as it was, if there are not enough) and the plan.
    """
    requests = requests_of(state)

    def provide(pages, cache, _):
        return hand_out(spec, requests, pages, cache)

    memory = state.pages, state.cache, jnp.bool_(True)
    if spec.config.memory == "unified":
        pages, cache, enough = run_if(is_short(spec, requests, state.pages), provide, *memory)
    else:
        pages, cache, enough = provide(*memory)
    return _plan(spec, state.replace(pages=pages, cache=cache), enough)


def _plan(spec, state: SpecState, enough: Array) -> tuple[SpecState, RoundPlan]:
    """The metadata of a round of all running requests, or of none where bool[] `enough` is False."""
    config, requests, pages = spec.config, requests_of(state), state.pages
    rows = jnp.where(enough, running_rows(requests), 0)
    seq_lens = jnp.where(rows > 0, requests.seq_len[1:], 0)
    anchor = state.tokens[rows, seq_lens]
    metadata, packed = verify_metadata(
        seq_lens,
        rows,
        page_rows(config, pages),
        pages.v2p,
        anchor,
        state.metadata,
        page_size=config.page_size,
        limit=config.context_len,
        states=state_table(pages) if spec.target.has_state else None,
        kpool=kpool_of(spec.target, config),
        backend=config.kernel_backend,
    )
    plan = RoundPlan(
        status=jnp.where(enough, OK, OUT_OF_PAGES).astype(jnp.int32),
        req_rows=rows,
        seq_lens=seq_lens,
        anchor=anchor,
        metadata=metadata,
    )
    return state.replace(metadata=packed), plan


def draft(spec, params, state: SpecState, plan: RoundPlan) -> tuple[SpecState, Drafts]:
    """Asks the drafter for D - 1 tokens to follow each anchor.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state, plan: from `prepare`.

    Returns:
      The state with the drafter's own part updated, and the proposals. Without a drafter, or with D = 1, there are
      none.
    """
    B, num_drafts = spec.config.batch_size, spec.config.num_draft_tokens - 1
    if spec.drafter is None or num_drafts == 0:
        shape = B, num_drafts, spec.target.vocab_size
        probs = jnp.zeros(shape, jnp.float32) if spec.config.asks_probs else None
        return state, Drafts(jnp.zeros((B, num_drafts), jnp.int32), jnp.zeros((B,), jnp.int32), probs)
    context = DraftContext(
        tokens=state.tokens,
        req_rows=plan.req_rows,
        seq_lens=plan.seq_lens,
        anchor=plan.anchor,
        metadata=plan.metadata,
        page_rows=page_rows(spec.config, state.pages),
        v2p=state.pages.v2p,
        sampling=lane_settings(state) if spec.config.asks_probs else None,
        kpool=kpool_of(spec.target, spec.config),
    )
    draft_state, drafts = spec.drafter.propose(params.draft, lend(state.cache, state.draft), context, num_drafts)
    cache, draft_state = take_back(state.cache, draft_state)
    # A draft past the context limit has no row, so there is nothing to verify it with.
    room = jnp.maximum(spec.config.context_len - 1 - plan.seq_lens, 0)
    count = jnp.where(plan.req_rows > 0, jnp.minimum(drafts.count, room), 0)
    return state.replace(cache=cache, draft=draft_state), drafts.replace(count=count)


def verify(spec, params, state: SpecState, plan: RoundPlan, drafts: Drafts) -> tuple[SpecState, Verdict]:
    """Runs the target over anchor and drafts, and decides which of them stay.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state, plan: from `prepare`.
      drafts: from `draft`, or a script's own.

    Returns:
      The state with K and V of all D rows written (those of rejected drafts are overwritten later) and the recurrent
      layers' states as they were, and the verdict.
    """
    ids = plan.metadata.ids.at[:, 1:].set(drafts.tokens)
    metadata = plan.metadata.replace(ids=ids)
    logits, hidden, cache = spec.target.apply(params.target, ids, metadata.window.positions, state.cache, metadata)
    targets, accepted, rule = _judge(spec, state, plan, drafts, logits)
    cache, pending = take_pending(cache)
    recurrent = {layer for layer, spec in enumerate(spec.target.layers) if spec.carries == ACCUMULATED}
    if set(pending) != recurrent:
        raise TypeError(
            f"the model has called jaxspec.recur for layers {sorted(pending)}; those with a state are "
            f"{sorted(recurrent)}: call it once for each of them"
        )
    return state.replace(cache=cache), Verdict(
        targets=targets,
        accepted=accepted,
        rule=rule,
        logits=logits if spec.config.logprobs else None,
        hidden=hidden if extends(spec.drafter) else None,
        pending=pending,
    )


def _judge(spec, state: SpecState, plan: RoundPlan, drafts: Drafts, logits: Array):
    """`targets`, `accepted` and `rule` of a `Verdict`."""
    sampling, verifier = lane_settings(state), spec.config.sampling
    if sampling is None:
        targets = greedy_token(logits)
        return targets, greedy_accept(drafts.tokens, drafts.count, targets), None
    nodes = chain_nodes(plan.anchor, drafts.tokens, drafts.count, plan.req_rows > 0)
    if verifier == "match":
        verified = verify_match(nodes, logits, sampling, plan.seq_lens)
    elif drafts.probs is None:
        raise TypeError(
            f"sampling={verifier!r} asks what drafts were drawn from, and drafts.probs is None: fill it, or say "
            "sampling='match'"
        )
    else:
        rule = verify_block if verifier == "block" else verify_rejection
        verified = rule(nodes, logits, sampling, plan.seq_lens, drafts.probs)
    return verified.tokens, verified.accepted, verified.rule


def extend(spec, params, state: SpecState, plan: RoundPlan, verdict: Verdict) -> SpecState:
    """Shows the verified rows to a drafter that feeds on the target's hidden rows.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state, plan, verdict: from the phases before.

    Returns:
      The state with the drafter's own part updated; as it was for any other drafter, or where nothing is drafted.
    """
    if not extends(spec.drafter) or spec.config.num_draft_tokens == 1:
        return state
    context = ExtendContext(
        tokens=jnp.clip(verdict.targets, 0, spec.target.vocab_size - 1),  # where it is no id, `commit` ends the request
        hidden=verdict.hidden,
        count=jnp.where(plan.req_rows > 0, verdict.accepted + 1, 0),
        seq_lens=plan.seq_lens,
        req_rows=plan.req_rows,
        page_rows=page_rows(spec.config, state.pages),
        v2p=state.pages.v2p,
        metadata=plan.metadata,
        context_len=spec.config.context_len,
        sampling=lane_settings(state) if spec.config.asks_probs else None,
        kpool=kpool_of(spec.target, spec.config),
    )
    draft_state = spec.drafter.extend(params.draft, lend(state.cache, state.draft), context)
    cache, draft_state = take_back(state.cache, draft_state)
    return state.replace(cache=cache, draft=draft_state)


def commit(spec, state: SpecState, plan: RoundPlan, drafts: Drafts, verdict: Verdict) -> tuple[SpecState, StepOutput]:
    """Emits the accepted run, stores the recurrent states that belong to it, ends requests that are done, retires and
    frees their pages.

    Args:
      spec: the `SpecStep` (static).
      state, plan, drafts, verdict: from the phases before.

    Returns:
      The state after the round, and what happened.
    """
    state, out = _settle(spec, state, plan, drafts, verdict)
    return state.replace(pages=free_pages(spec, requests_of(state), state.pages, plan.req_rows)), out


def _settle(spec, state: SpecState, plan: RoundPlan, drafts: Drafts, verdict: Verdict) -> tuple[SpecState, StepOutput]:
    """`commit` but for the pages."""
    requests = requests_of(state)
    rows = plan.req_rows
    active = rows > 0
    count = jnp.where(active, verdict.accepted + 1, 0)
    emitted = emit(spec, state, requests, active, plan.seq_lens + 1, verdict.targets, count)
    requests, keep = emitted.requests, emitted.num_tokens

    accepted = jnp.where(active, verdict.accepted, 0)
    nth = jnp.where(active, jnp.minimum(requests.verify_count[1:], state.round_log.shape[1] - 1), 0)
    requests = requests.replace(
        seq_len=requests.seq_len + lanes_to_rows(keep),
        verify_count=requests.verify_count + lanes_to_rows(active.astype(jnp.int32)),
    )
    cache = state.cache
    if verdict.pending:
        slots = unmarked(plan.metadata.state_slots, "state")
        cache = commit_states(cache, verdict.pending, slots, keep - 1, backend=spec.config.kernel_backend)
    state = state.with_(
        requests=requests,
        cache=cache,
        tokens=emitted.history,
        stops=emitted.stops,
        logprobs=log_run(state.logprobs, plan.seq_lens + 1, keep, verdict.logits, emitted.tokens),
        round_log=state.round_log.at[rows, nth].set(jnp.stack([accepted, keep], axis=-1)),
    )
    return state, StepOutput(
        status=plan.status,
        tokens=emitted.tokens,
        num_tokens=keep,
        num_drafts=drafts.count,
        accepted=accepted,
        finish_reason=requests.finish_reason[1:],
        unfinished=(requests.status == RUNNING).any(),
        rule=verdict.rule,
    )


class Emitted(NamedTuple):
    """Result of `emit`.

    Attributes:
      requests, history, stops: what the state holds as such, after.
      tokens: int32[B, D], 0 past `num_tokens`.
      num_tokens: int32[B].
    """

    requests: Requests
    history: Array
    stops: StopMatcher | None
    tokens: Array
    num_tokens: Array


def emit(
    spec, state: SpecState, requests: Requests, active: Array, position: Array, run: Array, count: Array
) -> Emitted:
    """Appends a run of tokens to its requests and ends those that reach a stop or a limit.

    One number a lane, how many of its tokens survive, cuts everything that is kept of the run.

    Args:
      spec: the `SpecStep` (static).
      state: the state, of which token history, stop ids and stop strings are read.
      requests: the numbers before; status, finish reason and output count change, lengths are the caller's.
      active: bool[B], lanes that take part; the others emit nothing.
      position: int32[B], where the first token of the run goes.
      run: int32[B, D]; count: int32[B], real tokens in it, 0 where a lane is not active.
    """
    wanted = requests.max_new_tokens[1:] - requests.num_output[1:]
    room = spec.config.context_len - position
    stops = state.stops
    ending = end_run(
        run,
        count,
        state.stop_ids[1:],
        jnp.minimum(wanted, room),
        vocab_size=spec.target.vocab_size,
        stops=None if stops is None else stops.replace(state=stops.state[1:]),
    )
    keep = ending.keep
    column = jnp.arange(run.shape[1], dtype=jnp.int32)
    live = column < keep[:, None]
    tokens = jnp.where(live, ending.tokens, 0)
    lane_rows = jnp.arange(1, spec.config.rows, dtype=jnp.int32)
    history = state.tokens.at[
        jnp.where(live, lane_rows[:, None], 0), jnp.where(live, position[:, None] + column, 0)
    ].set(tokens)

    limit = jnp.where(keep >= wanted, LENGTH, jnp.where(keep >= room, CONTEXT, UNFINISHED))
    reason = jnp.where(ending.reason == UNFINISHED, limit, ending.reason)
    status = jnp.where(reason == UNFINISHED, RUNNING, FINISHED)

    def update(field, value):
        return lanes_to_rows(jnp.where(active, value, field[1:]).astype(jnp.int32))

    requests = requests.replace(
        status=update(requests.status, status),
        finish_reason=update(requests.finish_reason, reason),
        num_output=requests.num_output + lanes_to_rows(keep),
    )
    if stops is not None:
        stops = stops.replace(state=lanes_to_rows(ending.state))
    return Emitted(requests, history, stops, tokens, keep)


def log_run(history: Array | None, position: Array, count: Array, logits: Array | None, run: Array) -> Array | None:
    """Puts the log-probabilities of a run of tokens where the tokens are; nothing where they were not asked for.

    Args:
      history: float32[R, T] or None.
      position: int32[B], where the first token of the run goes.
      count: int32[B], tokens of the run that were emitted.
      logits: float32[B, D, V], what each token was chosen from.
      run: int32[B, D].
    """
    if history is None:
        return None
    chosen = jnp.take_along_axis(logits, run[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    column = jnp.arange(run.shape[1], dtype=jnp.int32)
    live = column < count[:, None]
    row = jnp.where(live, jnp.arange(1, history.shape[0], dtype=jnp.int32)[:, None], 0)
    return history.at[row, jnp.where(live, position[:, None] + column, 0)].set(jnp.where(live, chosen, 0))


def run_round(spec, params, state: SpecState) -> tuple[SpecState, StepOutput]:
    """prepare, draft, verify, extend, commit."""
    state, plan = prepare(spec, state)
    state, drafts = draft(spec, params, state, plan)
    state, verdict = verify(spec, params, state, plan, drafts)
    state = extend(spec, params, state, plan, verdict)
    return commit(spec, state, plan, drafts, verdict)


def run_provided_round(spec, params, state: SpecState) -> SpecState:
    """A round of requests that have the pages for it. None are handed out, and none taken back."""
    state, plan = _plan(spec, state, jnp.bool_(True))
    state, drafts = draft(spec, params, state, plan)
    state, verdict = verify(spec, params, state, plan, drafts)
    state = extend(spec, params, state, plan, verdict)
    return _settle(spec, state, plan, drafts, verdict)[0]

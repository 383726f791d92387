"""One dispatch of `generate_many`: newcomers enter, their prompts are read, rounds run, and a report is made of it all.

    refill -> chunks of the newcomers' prompts -> up to K rounds of the others -> out of pages? the youngest leaves

Rounds end early where newcomers could enter, and after one round while a prompt is not through, so that a long prompt
and the running requests advance beside each other.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import SpecConfig
from jaxspec.steps import Params
from jaxspec.steps.prefill import pages_per_chunk, prefill_chunk
from jaxspec.steps.refill import (
    RefillPlan,
    Slots,
    Window,
    admissible,
    ended_since,
    in_work,
    nth_rows,
    refill,
    retract,
    staged,
)
from jaxspec.steps.round import OK
from jaxspec.steps.rounds import run_rounds
from jaxspec.steps.state import RUNNING, WAITING, Requests, SpecState, requests_of

Array = jax.Array

# Columns of a report: those of its first row, and those of a request's row before its lists.
TAKEN, SHORT, ROUNDS, CHUNKS = range(4)
AGE, COUNT, VERIFIED, REASON, RETRACTED, MATCHED = range(6)
_HEAD = 6


class Shape(NamedTuple):
    """Lengths of the lists in a report's rows: M tokens, K rounds, and whether log-probabilities are there."""

    tokens: int
    rounds: int
    logprobs: bool

    @classmethod
    def of(cls, config: SpecConfig, plan: RefillPlan) -> "Shape":
        return cls(min(1 + plan.rounds * config.num_draft_tokens, config.context_len), plan.rounds, config.logprobs)


def dispatch(spec, params: Params, slots: Slots, window: Window, plan: RefillPlan) -> tuple[Slots, Array]:
    """Advances all slots, and reports.

    Args:
      spec, plan: see `RefillPlan` (static).
      params: weights.
      slots: before; donated.
      window: the queue from a place on that is not behind what was taken. The plan says how many entries it has.

    Returns:
      The slots after, and the report, int32[R, columns]: a row for each slot and in row 0 what concerns them all; see
      `read_report`.
    """
    N = plan.newcomers
    slots = refill(spec, slots, window, plan)
    before = requests_of(slots.step)

    def next_rows(state: SpecState) -> Array:
        return nth_rows(requests_of(state).status[1:] == WAITING, N)

    def unread(carry):
        state, _, chunks = carry
        rows = next_rows(state)
        return (rows > 0).any() & (chunks < plan.chunks) & _chunk_fits(spec, state, rows)

    def read(carry):
        state, packed, chunks = carry
        return *prefill_chunk(spec, params, state, packed, next_rows(state)), chunks + 1

    state, packed, chunks = lax.while_loop(unread, read, (slots.step, slots.chunk, jnp.int32(0)))
    short = (chunks < plan.chunks) & (next_rows(state) > 0).any()
    most = jnp.where((next_rows(state) > 0).any(), 1, plan.rounds)

    # Counted once: a round has enough to do without. What ends from here on makes room for as many.
    wanted = jnp.minimum(staged(slots, window), N)
    at_work = in_work(requests_of(state)).sum()
    enter = admissible(spec, slots.replace(step=state), window, plan) + at_work

    def going(state: SpecState, rounds: Array) -> Array:
        requests = requests_of(state)
        ready = (wanted > 0) & (enter - in_work(requests).sum() >= wanted)
        return (requests.status == RUNNING).any() & (rounds < most) & ~ready

    state, status, rounds = run_rounds(spec, params, state, jnp.int32(OK), going)
    short |= status != OK
    here, ages = requests_of(state), slots.age
    slots, out = retract(slots.replace(step=state, chunk=packed), short, ended_since(before, here))
    lists = _lists(before, here, state, Shape.of(spec.config, plan))
    matched = jnp.zeros_like(ages) if state.stops is None else state.stops.state
    head = [ages, here.num_output - before.num_output, here.verify_count - before.verify_count, here.finish_reason]
    report = jnp.concatenate([jnp.stack([*head, out.astype(jnp.int32), matched], axis=1), lists], axis=1)
    common = jnp.stack([slots.queue[0], short.astype(jnp.int32), rounds, chunks])
    return slots, report.at[0].set(jnp.pad(common, (0, report.shape[1] - common.size)))


@functools.lru_cache(maxsize=64)
def compiled_dispatch(options: tuple):
    """`dispatch` compiled: one program for each step and plan, whatever requests come."""
    return jax.jit(dispatch, static_argnums=(0, 4), donate_argnums=2, compiler_options=dict(options) or None)


def _chunk_fits(spec, state: SpecState, rows: Array) -> Array:
    """bool[], whether there are pages for the next chunk of these rows' prompts."""
    config, requests, pages = spec.config, requests_of(state), state.pages
    ends = jnp.minimum(requests.seq_len[rows] + config.prefill_chunk, requests.prompt_len[rows])
    lacking = jnp.where(rows > 0, jnp.maximum(-(-ends // config.page_size) - pages.num_pages[rows], 0), 0)
    total, states = lacking.sum(dtype=jnp.int32), (rows > 0) & (pages.num_pages[rows] == 0)
    return pages.fits(total, total, states.sum(dtype=jnp.int32)) & (lacking <= pages_per_chunk(config)).all()


def _lists(before: Requests, after: Requests, state: SpecState, shape: Shape) -> Array:
    """int32[R, lists]: of each request the drafts accepted and the tokens emitted in its rounds since `before`, its
    tokens, and the bits of their log-probabilities."""

    def pick(table: Array, first: Array, count: Array, most: int) -> Array:
        column = jnp.arange(most, dtype=jnp.int32)
        index = jnp.where(column < count[:, None], first[:, None] + column, 0)
        return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")

    # The log of rounds is as long as a request may be, so no round is past its end.
    rounds = before.verify_count, after.verify_count - before.verify_count, shape.rounds
    tokens = after.prompt_len + before.num_output, after.num_output - before.num_output, shape.tokens
    parts = [pick(state.round_log[..., i], *rounds) for i in range(2)] + [pick(state.tokens, *tokens)]
    if shape.logprobs:
        parts.append(lax.bitcast_convert_type(pick(state.logprobs, *tokens), jnp.int32))
    return jnp.concatenate(parts, axis=1)


@dataclasses.dataclass(frozen=True)
class SlotReport:
    """What a request did in a dispatch.

    Attributes:
      age: its place in the queue + 1.
      token_ids, accepted, emitted: its new tokens; of each of its rounds the drafts accepted and the tokens emitted.
      logprobs: of the new tokens; None where they are not kept.
      reason: 0, or why it has ended; see `jaxspec.steps.state.FINISH_NAMES`.
      retracted: whether it was turned out; what it has emitted is void.
      matched: state of its stop strings.
    """

    age: int
    token_ids: list[int]
    accepted: list[int]
    emitted: list[int]
    logprobs: list[float] | None
    reason: int
    retracted: bool
    matched: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a dispatch did.

    Attributes:
      taken: requests that were taken from the queue, since the beginning.
      short: whether pages ran out.
      rounds, chunks: rounds, and forwards of prefill.
      slots: one for each slot that ever had a request.
    """

    taken: int
    short: bool
    rounds: int
    chunks: int
    slots: list[SlotReport]


def read_report(table: np.ndarray, shape: Shape) -> Report:
    """Opens a report of `dispatch`, int32[R, columns]."""
    common = table[0].tolist()
    slots = []
    edges = np.cumsum([_HEAD, shape.rounds, shape.rounds, shape.tokens])
    for row in table[1:]:
        age, count, verified, reason, retracted, matched = row[:_HEAD].tolist()
        if age == 0:
            continue
        accepted, emitted, tokens, bits = (row[start:] for start in edges)
        slots.append(
            SlotReport(
                age=age,
                token_ids=tokens[:count].tolist(),
                accepted=accepted[:verified].tolist(),
                emitted=emitted[:verified].tolist(),
                logprobs=bits[:count].view(np.float32).tolist() if shape.logprobs else None,
                reason=reason,
                retracted=bool(retracted),
                matched=matched,
            )
        )
    return Report(common[TAKEN], bool(common[SHORT]), common[ROUNDS], common[CHUNKS], slots)

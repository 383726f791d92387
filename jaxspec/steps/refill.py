"""Slots that are refilled: new requests take the places of finished ones, inside the compiled program.

The host shows the device a window of the queue of waiting prompts; the device takes from its front as many as it has
slots and pages for, so a slot need not wait until the host has seen that it is free. Worked example, 2 slots, queue
a b c d, of which a and b were taken: the window is c d .., its base 2. When a ends, c moves into its slot and `taken`
becomes 3; the host learns of it from the next report, and moves the base.

Every request has an *age*, its place in the queue + 1, which is the order in which requests were let in. If pages run
out the youngest one gives back all that it has, and the host puts it into the queue again. Until then newcomers are
held back: one is let in only if the pages that all requests can need in the next rounds are free, and after a request
was turned out nobody is let in before another has ended.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import run_if
from jaxspec.config import SpecConfig
from jaxspec.drafting import extends
from jaxspec.steps.prefill import chunk_metadata
from jaxspec.steps.settings import SETTING_NAMES
from jaxspec.steps.state import EMPTY, FINISHED, RUNNING, WAITING, Requests, SpecState, requests_of
from pallas_kernels import PackedMetadata

Array = jax.Array

# The columns of a window's entries; a prompt's tokens follow.
PROMPT_LEN, LIMIT, STOP_STATE, FIRST_SETTING = range(4)
HEAD = FIRST_SETTING + len(SETTING_NAMES)


@dataclasses.dataclass(frozen=True)
class RefillPlan:
    """What fixes the program of a dispatch, besides the step.

    Attributes:
      rounds: K, rounds a dispatch runs at most.
      newcomers: N, requests that a dispatch lets in at most, and requests a forward of prefill.
      chunks: forwards of prefill that a dispatch runs at most.
    """

    rounds: int
    newcomers: int
    chunks: int

    @property
    def window(self) -> int:
        """Entries of a window: a dispatch in flight may take N that the host does not know of, the next one N more, and
        then N more are there to end its rounds for."""
        return 3 * self.newcomers


@flax.struct.dataclass
class Window:
    """Part of the queue.

    Attributes:
      entries: int32[W, HEAD + T], a request each: its numbers, and the tokens of its prompt.
      bounds: int32[2], place in the queue of the first entry, and how many entries there are.
    """

    entries: Array
    bounds: Array


@flax.struct.dataclass
class Slots:
    """A batch whose requests come and go.

    Attributes:
      step: the state of the step.
      chunk: the buffer that a chunk's metadata are written to.
      age: int32[R], place in the queue + 1 of the request in each row, 0 where there never was one.
      queue: int32[2], how many requests were taken from the queue, and whether newcomers are held back.
    """

    step: SpecState
    chunk: PackedMetadata
    age: Array
    queue: Array


def empty_slots(spec, state: SpecState, plan: RefillPlan) -> Slots:
    """Slots without requests, of a state that `init_state` has made for no prompt.

    Example:
      >>> import jaxspec
      >>> target = jaxspec.load_model("target").model
      >>> config = jaxspec.SpecConfig(batch_size=2, num_draft_tokens=4, context_len=64, max_new_tokens=8)
      >>> step = jaxspec.make_spec_step(target, jaxspec.NgramDrafter(), config)
      >>> state = jaxspec.init_state(target, step.drafter, config, [])
      >>> empty_slots(step, state, RefillPlan(rounds=8, newcomers=1, chunks=1)).age.tolist()
      [0, 0, 0]
    """
    return Slots(
        step=state,
        chunk=chunk_metadata(spec, plan.newcomers),
        age=jnp.zeros((spec.config.rows,), jnp.int32),
        queue=jnp.zeros((2,), jnp.int32),
    )


def most_newcomers(spec, wanted: int) -> int:
    """`wanted`, or B for a drafter that cannot say which parts of its state are by lane."""
    narrow = not extends(spec.drafter) or hasattr(spec.drafter, "lane_fields")
    return min(wanted, spec.config.batch_size) if narrow else spec.config.batch_size


def entry(
    config: SpecConfig, prompt: np.ndarray, limit: int, settings: np.ndarray | None, stop_state: int
) -> np.ndarray:
    """int32[HEAD + T], a request as a window has it.

    Args:
      config: shapes.
      prompt: its tokens.
      limit: tokens it may emit.
      settings: int32[4], the bits of how it samples; None for a greedy configuration.
      stop_state: where its stop strings begin, see `StopMatcher`.
    """
    cells = np.zeros(HEAD + config.context_len, np.int32)
    cells[[PROMPT_LEN, LIMIT, STOP_STATE]] = prompt.size, min(limit, config.context_len), stop_state
    if settings is not None:
        cells[FIRST_SETTING:HEAD] = settings
    cells[HEAD : HEAD + prompt.size] = prompt
    return cells


def nth_rows(lanes: Array, count: int) -> Array:
    """int32[N], request rows of the first N lanes of bool[B] that are true, 0 where there are fewer. With N = B each is
    in its own lane.

    Example:
      >>> nth_rows(jnp.array([False, True, True, False]), 3).tolist()
      [2, 3, 0]
      >>> nth_rows(jnp.array([False, True, True, False]), 4).tolist()
      [0, 2, 3, 0]
    """
    rows = jnp.arange(1, lanes.size + 1, dtype=jnp.int32)
    if count == lanes.size:
        return jnp.where(lanes, rows, 0)
    rank = jnp.cumsum(lanes, dtype=jnp.int32) - 1
    mine = lanes & (rank == jnp.arange(count, dtype=jnp.int32)[:, None])
    return jnp.where(mine, rows, 0).sum(axis=1, dtype=jnp.int32)


def in_work(requests: Requests) -> Array:
    """bool[R], rows whose request is not finished."""
    return (requests.status == WAITING) | (requests.status == RUNNING)


def admissible(spec, slots: Slots, window: Window, plan: RefillPlan) -> Array:
    """int32[], how many requests from the front of the queue may be let in now: at most N, those included whose prompts
    are not through yet, and as there are slots and pages.

    The pages of a newcomer are counted with those of K rounds behind its prompt, and so are those of the requests that
    are here. If there are none the first newcomer is let in in any case: alone it fits, which was checked before.
    """
    config, state, N = spec.config, slots.step, plan.newcomers
    requests, pages = requests_of(state), state.pages
    busy, waiting = in_work(requests)[1:], requests.status[1:] == WAITING
    nth = jnp.arange(N, dtype=jnp.int32)
    index = slots.queue[0] - window.bounds[0] + nth
    exists = (index < window.bounds[1]) & (nth < N - waiting.sum()) & (nth < (~busy).sum())
    entries = window.entries[jnp.where(exists, index, 0)]

    ahead = plan.rounds * config.num_draft_tokens
    per_row = 0 if spec.target.swa_window is None else config.swa_pages_per_row(spec.target.swa_window)

    def wanted(length, prompt_len, limit):
        """Pages that hold the prompt and the next rounds."""
        last = prompt_len + jnp.where(limit > 1, limit - 2 + config.num_draft_tokens, 0)
        reach = jnp.maximum(jnp.minimum(length + ahead, last), prompt_len)
        return -(-jnp.minimum(reach, config.context_len) // config.page_size)

    there = wanted(jnp.maximum(requests.seq_len, requests.prompt_len), requests.prompt_len, requests.max_new_tokens)
    lacking = jnp.where(busy, jnp.maximum(there - pages.num_pages, 0)[1:], 0)
    bound = (pages.num_pages - pages.swa_start)[1:]
    windowed = jnp.where(busy, jnp.minimum(lacking, jnp.maximum(per_row - bound, 0)), 0)
    stateless = busy & (pages.num_pages[1:] == 0)
    new = jnp.where(exists, wanted(entries[:, PROMPT_LEN], entries[:, PROMPT_LEN], entries[:, LIMIT]), 0)
    fits = pages.fits(
        lacking.sum() + jnp.cumsum(new),
        windowed.sum() + jnp.cumsum(jnp.minimum(new, per_row)),
        stateless.sum() + jnp.cumsum(exists),
    )
    alone = ~busy.any()
    fits = exists & jnp.where(alone, fits | (nth == 0), fits & (slots.queue[1] == 0))
    return jnp.cumprod(fits.astype(jnp.int32)).sum(dtype=jnp.int32)


def staged(slots: Slots, window: Window) -> Array:
    """int32[], requests of the window that were not taken yet."""
    return window.bounds[0] + window.bounds[1] - slots.queue[0]


def refill(spec, slots: Slots, window: Window, plan: RefillPlan) -> Slots:
    """Lets in as many requests as may be, into the first slots that are free. Their prompts are still to be seen.

    What the last request of a slot left needs no clearing: its pages were given back, lengths and counts start from 0,
    and a recurrent layer takes no stored state at position 0.
    """
    state, N = slots.step, plan.newcomers
    requests = requests_of(state)
    count = admissible(spec, slots, window, plan)
    free = ~in_work(requests)[1:]
    rank = jnp.cumsum(free, dtype=jnp.int32) - 1
    rows = nth_rows(free & (rank < count), N)
    valid = rows > 0
    place = slots.queue[0] + jnp.where(valid, rank[jnp.maximum(rows - 1, 0)], 0)
    cells = window.entries[jnp.where(valid, place - window.bounds[0], 0)]
    cells = jnp.where(valid[:, None], cells, 0)

    new = dict.fromkeys((field.name for field in dataclasses.fields(Requests)), jnp.zeros((N,), jnp.int32))
    new["status"] = jnp.where(valid, WAITING, EMPTY)
    new["prompt_len"], new["max_new_tokens"] = cells[:, PROMPT_LEN], cells[:, LIMIT]
    requests = requests.replace(
        **{name: getattr(requests, name).at[rows].set(value.astype(jnp.int32)) for name, value in new.items()}
    )
    settings, stops = state.settings, state.stops
    if settings is not None:
        settings = settings.at[:, rows].set(jnp.where(valid, cells[:, FIRST_SETTING:HEAD].T, settings[:, :1]))
    if stops is not None:
        stops = stops.replace(state=stops.state.at[rows].set(cells[:, STOP_STATE]))
    state = state.with_(
        requests=requests, tokens=state.tokens.at[rows].set(cells[:, HEAD:]), settings=settings, stops=stops
    )
    return slots.replace(
        step=state,
        age=slots.age.at[rows].set(jnp.where(valid, place + 1, 0)),
        queue=slots.queue.at[0].add(count),
    )


def retract(slots: Slots, short: Array, ended: Array) -> tuple[Slots, Array]:
    """Turns the youngest request out if pages ran out.

    Args:
      slots: before.
      short: bool[], whether they did.
      ended: bool[], whether a request has ended since the last call.

    Returns:
      The slots after, and bool[R], the row that lost its request.
    """
    state = slots.step
    requests = requests_of(state)
    age = jnp.where(in_work(requests), slots.age, 0)
    out = short & (age > 0) & (age == age.max())
    (pages,) = run_if(short, lambda pages: (pages.release(out),), state.pages)
    held = jnp.where(short, 1, jnp.where(ended, 0, slots.queue[1]))
    requests = requests.replace(status=jnp.where(out, EMPTY, requests.status))
    return slots.replace(
        step=state.with_(requests=requests, pages=pages),
        age=jnp.where(out, 0, slots.age),
        queue=slots.queue.at[1].set(held),
    ), out


def ended_since(before: Requests, after: Requests) -> Array:
    """bool[], whether a request that was in work has finished."""
    return (in_work(before) & (after.status == FINISHED)).any()

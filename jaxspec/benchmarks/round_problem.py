"""What `bench round` runs: requests put into a state, a loop of rounds that leaves it as it was, bytes that it reads.

One call is one dispatch of so many rounds in a loop on the device, as in `jaxspec.generate`. The lengths have grown
when they are through; what tells them is then put back, inside the call, so that every call does the same work in the
same places:

    put back    lengths, page tables and free pages, token history, and K and V of sliding-window layers, whose pages
                change hands
    not         K and V of the other layers and of the draft: rows past a request's length, which are written anew

Once a call, a copy of some MB at most.

Simulated acceptance is a table of numbers, drafts accepted in each round by each lane, drawn from a seed. It stands in
for the verdict after the target has run, so the work of a round is whole: drafting, the target over all D rows, its
choice behind each of them, the commit. What is accepted is then made up, and so is every figure that depends on it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import InputError, Params, SpecConfig, init_state, make_spec_step
from jaxspec.benchmarks.shapes import bytes_read, is_random, make_draft, make_target
from jaxspec.cache.layers import POSITION
from jaxspec.drafting import DraftLM, Drafts, NgramDrafter
from jaxspec.models import Checkpoint
from jaxspec.steps import SpecState, SpecStep, commit, draft, extend, prepare, requests_of, verify
from jaxspec.steps.round import OK, Verdict
from jaxspec.steps.state import RUNNING, lanes_to_rows

Array = jax.Array
DRAFTERS = ("ngram", "draft_lm", "none")


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and who drafts for it; weights are arrays, or their shapes."""

    name: str
    target: Checkpoint
    draft: Checkpoint | None
    drafter: NgramDrafter | DraftLM | None

    @property
    def params(self) -> Params:
        return Params(self.target.params, () if self.draft is None else self.draft.params)


def make_models(name: str, drafter: str, dtype: str, seed: int | None) -> Models:
    """Loads or draws the weights, of a draft model in the same dtype; without a seed random ones are shapes."""
    target = make_target(name, dtype, seed)
    if drafter == "draft_lm":
        model = make_draft(name, dtype, None if seed is None else seed + 1)
        return Models(name, target, model, DraftLM(model.draft_model))
    return Models(name, target, None, NgramDrafter() if drafter == "ngram" else None)


def make_config(B: int, D: int, context: int, rounds: int, page_size: int) -> SpecConfig:
    """Shapes of a step whose requests have `context` committed tokens before so many rounds, and room for all that
    these may emit."""
    room = (rounds + 1) * D + 1
    return SpecConfig(
        batch_size=B,
        num_draft_tokens=D,
        context_len=context + room,
        max_new_tokens=room,
        page_size=page_size,
    )


# The state


def make_state(spec: SpecStep, models: Models, prompts: Sequence[Sequence[int]], seed: int) -> SpecState:
    """A state in which every request is running, its prompt committed.

    Weights of its own fill the cache by a prefill. For random ones rows are drawn, which spares the prefill: no figure
    depends on what they hold.
    """
    state = init_state(spec.target, spec.drafter, spec.config, prompts)
    if not is_random(models.name):
        state, status = spec.prefill(models.params, state)
        if int(status) != OK:
            raise RuntimeError("there are not enough pages for the prompts, although the pool was made for them")
        return state
    key = jax.random.key(seed)
    state = settle(spec, state.replace(cache=_fill(key, state.cache)))
    if spec.drafter is not None and isinstance(spec.drafter, DraftLM):
        own = _fill(jax.random.fold_in(key, 1), state.draft.cache)
        state = state.replace(draft=state.draft.replace(cache=own))
    return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def settle(spec: SpecStep, state: SpecState) -> SpecState:
    """Waiting requests running, as after a prefill: pages handed out for the prompt, one token emitted, id 1."""
    requests, config = requests_of(state), spec.config
    rows = jnp.arange(1, config.rows, dtype=jnp.int32)
    lengths = requests.prompt_len
    pages, cache, _ = state.pages.allocate(state.cache, rows, lengths[1:], max_new=config.pages_per_row)
    ones = lanes_to_rows(jnp.ones_like(rows))
    requests = requests.replace(status=RUNNING * ones, seq_len=lengths, num_output=ones)
    return state.with_(requests=requests, pages=pages, cache=cache, tokens=state.tokens.at[rows, lengths[1:]].set(1))


def _fill(key: Array, cache: Any) -> Any:
    """The cache with random rows, in place."""
    buffers = [_draw_over(jax.random.fold_in(key, n), buffer) for n, buffer in enumerate(cache.buffers)]
    return cache.replace(buffers=tuple(buffers))


@functools.partial(jax.jit, donate_argnums=1)
def _draw_over(key: Array, buffer: Array) -> Array:
    return jax.random.normal(key, buffer.shape, buffer.dtype)


# The rounds


@flax.struct.dataclass
class Told:
    """What a call says of its rounds.

    Attributes:
      status: int32[], OK unless pages ran out.
      rounds: int32[], rounds that ran.
      emitted: int32[B, rounds], tokens that each emitted.
      proposed: int32[], drafts that were proposed by all of them.
    """

    status: Array
    rounds: Array
    emitted: Array
    proposed: Array


def simulate(rate: float, rounds: int, B: int, num_drafts: int, seed: int) -> np.ndarray:
    """int32[rounds, B], leading drafts that count as accepted, each with probability `rate`.

    Example:
      >>> simulate(1.0, 2, 1, 7, seed=0).tolist(), simulate(0.0, 2, 1, 7, seed=0).tolist()
      ([[7], [7]], [[0], [0]])
    """
    kept = np.random.default_rng(seed).random((rounds, B, num_drafts)) < rate
    return np.cumprod(kept, axis=-1, dtype=np.int32).sum(axis=-1, dtype=np.int32)


def one_round(spec: SpecStep, params: Params, state: SpecState, accepted: Array | None):
    """`jaxspec.steps.run_round`, or the same with a verdict that accepts int32[B] `accepted` drafts whatever they are.

    A drafter that proposes nothing then counts as one that proposes what it left in their place.
    """
    state, plan = prepare(spec, state)
    state, drafts = draft(spec, params, state, plan)
    proposed = drafts.count.sum(dtype=jnp.int32)
    if accepted is not None:
        drafts = drafts.replace(count=jnp.where(plan.req_rows > 0, drafts.tokens.shape[1], 0).astype(jnp.int32))
    state, verdict = verify(spec, params, state, plan, drafts)
    if accepted is not None:
        verdict = overrule(verdict, drafts, accepted)
    state = extend(spec, params, state, plan, verdict)
    return *commit(spec, state, plan, drafts, verdict), proposed


def overrule(verdict: Verdict, drafts: Drafts, accepted: Array) -> Verdict:
    """The verdict that keeps so many drafts; the token behind them is still the target's."""
    column = jnp.arange(verdict.targets.shape[1], dtype=jnp.int32)
    said = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    return verdict.replace(targets=jnp.where(column < accepted[:, None], said, verdict.targets), accepted=accepted)


def rounds_of(spec: SpecStep, rounds: int, table: np.ndarray | None) -> Callable:
    """`f(params, state) -> (state, Told)`, compiled: so many rounds, the state donated and as it was.

    Args:
      table: of `simulate`; None leaves the verdict to the target.
    """

    def call(params: Params, before: SpecState) -> tuple[SpecState, Told]:
        def unfinished(carry):
            state, status, done, _ = carry
            return (status == OK) & (requests_of(state).status == RUNNING).any() & (done < rounds)

        def turn(carry):
            state, _, done, proposed = carry
            accepted = None if table is None else jnp.asarray(table)[done]
            state, out, more = one_round(spec, params, state, accepted)
            return state, out.status, done + 1, proposed + more

        start = before, jnp.int32(OK), jnp.int32(0), jnp.int32(0)
        after, status, done, proposed = lax.while_loop(unfinished, turn, start)
        emitted = after.round_log[1:, :rounds, 1]
        return put_back(spec, before, after), Told(status, done, emitted, proposed)

    return jax.jit(call, donate_argnums=1, compiler_options=dict(spec.options) or None)


def put_back(spec: SpecStep, before: SpecState, after: SpecState) -> SpecState:
    """The state after rounds, as it was before them but for rows that the next ones write again."""
    buffers = tuple(
        old if layer.carries == POSITION and layer.storage == "swa" else new
        for layer, old, new in zip(spec.target.layers, before.cache.buffers, after.cache.buffers, strict=True)
    )
    return after.replace(
        cache=after.cache.replace(buffers=buffers),
        pages=before.pages,
        tokens=before.tokens,
        packed=before.packed,
        round_log=before.round_log,
    )


# Bytes


def weight_bytes(models: Models, B: int, D: int) -> int:
    """Bytes of weights that a round reads, each forward its own: the target's one, the draft model's D - 1."""
    total = bytes_read(models.target.params, models.target.config, B * D)
    if models.draft is not None:
        total += max(D - 1, 0) * bytes_read(models.draft.params, models.draft.config, B)
    return total


def kv_bytes(models: Models, emitted: np.ndarray, context: int, D: int) -> float:
    """Bytes of K and V that a round reads and writes, the mean over rounds; each key that some row sees once a forward.

    Args:
      emitted: int[B, rounds], tokens of each round, which tell how the lengths grow from `context` on.
    """
    lengths = context + np.cumsum(emitted, axis=1) - emitted  # before each round
    total = _layer_bytes(models.target.model, lengths, D)
    if models.draft is not None:
        # Two rows, then one at a time.
        for row in range(max(D - 1, 0)):
            total += _layer_bytes(models.draft.draft_model, lengths + row - (row == 0), 1 + (row == 0))
    return total / emitted.shape[1]


def _layer_bytes(model: Any, lengths: np.ndarray, rows: int) -> int:
    """Of one forward of so many rows a request: keys up to the last row, those that a window hides left out."""
    total = 0
    for layer in model.layers:
        keys = lengths + rows
        if layer.window is not None:
            keys = np.minimum(keys, layer.window + rows - 1)
        token = (layer.key_width + layer.value_width) * jnp.dtype(model.dtype).itemsize
        total += token * int((keys + rows).sum())
    return total


def bytes_needed(models: Models, configs: Sequence[SpecConfig]) -> int:
    """Bytes of the weights and of the largest state; weights may be shapes. Makes no arrays."""
    held = _nbytes(models.params)
    states = []
    for config in configs:
        spec = make_spec_step(models.target.model, models.drafter, config)
        state = jax.eval_shape(lambda spec=spec: init_state(spec.target, spec.drafter, spec.config, []))
        states.append(_nbytes(state))
    return held + max(states)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def refuse_simulation(drafter: str, D: int) -> None:
    """Raises InputError where there are no drafts that could be accepted."""
    if drafter == "none" or D == 1:
        raise InputError(
            f"simulated_acceptance with drafter={drafter}, num_draft_tokens={D}: there are no drafts to accept; leave "
            "it out"
        )

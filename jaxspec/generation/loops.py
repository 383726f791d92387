"""Three ways to drive the same round until every request is done. All give equal ids.

device    one dispatch: prefill and a device `while_loop`; the host reads nothing before the end
chunked   K rounds a dispatch; the host reads one packed report a dispatch late, so the device never waits for it
python    one round a dispatch, read at once: for debugging
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.steps import Params, SpecState, SpecStep, prefill, requests_of
from jaxspec.steps.round import OK
from jaxspec.steps.rounds import run_rounds
from jaxspec.steps.state import RUNNING
from jaxspec.steps.step import jit_with_state

Array = jax.Array
# Called with the index of a prompt, its new tokens, and whether it has finished.
OnTokens = Callable[[int, list[int], bool], None]


def _rounds(
    spec: SpecStep, params: Params, state: SpecState, status: Array, limit: int | None = None
) -> tuple[SpecState, Array]:
    """Rounds until all requests are done, pages run out, or `limit` rounds have run."""

    def going(state: SpecState, rounds: Array) -> Array:
        running = (requests_of(state).status == RUNNING).any()
        return running if limit is None else running & (rounds < limit)

    state, status, _ = run_rounds(spec, params, state, status, going)
    return state, status


def run_to_end(spec: SpecStep, params: Params, state: SpecState) -> tuple[SpecState, Array]:
    """A whole generation as one function: prefill, then rounds until nothing is left to do. Returns state and
    status."""
    state, status = prefill(spec, params, state)
    return _rounds(spec, params, state, status)


def _report(before: Array, state: SpecState, status: Array, width: int) -> Array:
    """int32[B, 3 + width]: new tokens' count, finish reason, status of the dispatch, then the tokens emitted since
    `before`."""
    requests = requests_of(state)
    column = jnp.arange(width, dtype=jnp.int32)
    count = requests.num_output - before
    source = jnp.where(column < count[:, None], (requests.prompt_len + before)[:, None] + column, 0)
    tokens = jnp.take_along_axis(state.tokens, source, axis=1, mode="promise_in_bounds")
    head = jnp.stack([count, requests.finish_reason, jnp.broadcast_to(status, count.shape)], axis=1)
    return jnp.concatenate([head, tokens], axis=1)[1:]


def prefill_reported(spec: SpecStep, params: Params, state: SpecState) -> tuple[SpecState, Array]:
    """Prefill, and a report of the first tokens."""
    before = requests_of(state).num_output
    state, status = prefill(spec, params, state)
    return state, _report(before, state, status, 1)


@functools.cache
def rounds_reported(rounds: int):
    """A function that runs up to `rounds` rounds and reports what they emitted."""

    def some_rounds(spec: SpecStep, params: Params, state: SpecState) -> tuple[SpecState, Array]:
        before = requests_of(state).num_output
        state, status = _rounds(spec, params, state, jnp.int32(OK), limit=rounds)
        return state, _report(
            before, state, status, min(rounds * spec.config.num_draft_tokens, spec.config.context_len)
        )

    return some_rounds


class Driver:
    """Dispatches compiled functions over one state and counts them."""

    def __init__(self, spec: SpecStep, params: Params, state: SpecState):
        self.spec, self.params, self.state, self.dispatches = spec, params, state, 0

    def __call__(self, function):
        """Runs `function` on the state and returns its second result."""
        self.state, result = jit_with_state(function, self.spec.options)(self.spec, self.params, self.state)
        self.dispatches += 1
        return result

    def compile(self, *functions) -> None:
        """Compiles functions ahead of their first call, so that a timing starts with the work."""
        for function in functions:
            jit_with_state(function, self.spec.options).lower(self.spec, self.params, self.state).compile()


def reports(driver: Driver, rounds: int, lag: int) -> Iterator[np.ndarray]:
    """Reports of prefill and of every dispatch of `rounds` rounds, each read `lag` dispatches late, until all is
    done."""
    waiting = [driver(prefill_reported)]
    while True:
        waiting[-1].copy_to_host_async()
        while len(waiting) > lag:
            report = np.asarray(waiting.pop(0))
            yield report
            if _done(report):
                for rest in waiting:
                    yield np.asarray(rest)
                return
        waiting.append(driver(rounds_reported(rounds)))


def _done(report: np.ndarray) -> bool:
    """Whether every request has finished or pages ran out; an empty lane reports reason 0 and no tokens, like a running
    one."""
    return bool((report[:, 2] != OK).any()) or bool((report[:, 0] == 0).all())

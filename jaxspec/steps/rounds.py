"""Rounds one after the other on the device, for as long as a caller's condition holds."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.steps.round import OK, OUT_OF_PAGES, run_provided_round, run_round
from jaxspec.steps.state import SpecState, requests_of
from jaxspec.steps.upkeep import hand_out, is_short, reclaim, running_rows

Array = jax.Array
Going = Callable[[SpecState, Array], Array]
Carry = tuple[SpecState, Array, Array]


def run_rounds(spec, params, state: SpecState, status: Array, going: Going) -> Carry:
    """Rounds until `going` says no or pages run out.

    With static memory each of them is `run_round`. With unified memory they run in stretches: pages are handed out and
    taken back between two of them, and the rounds of a stretch do neither. A round that asked whether it must would
    wait for the answer, and on the device a branch not taken costs as much as several launches.

    Args:
      spec: the `SpecStep` (static).
      params: `Params`.
      state: before.
      status: int32[]; no round runs unless it is OK.
      going: of the state and int32[], how many rounds have run: bool[], whether one more shall. It may depend on
        anything but pages (static).

    Returns:
      The state; int32[], OK or OUT_OF_PAGES; int32[], how many rounds have run. What has ended owns no pages. A round
      that found no pages changes no request and is not counted.
    """
    more = _stretch if spec.config.memory == "unified" else _round

    def ready(carry: Carry) -> Array:
        state, status, rounds = carry
        return (status == OK) & going(state, rounds)

    def step(carry: Carry) -> Carry:
        return more(spec, params, carry, going)

    state, status, rounds = lax.while_loop(ready, step, (state, status, jnp.int32(0)))
    if spec.config.memory == "unified":
        requests = requests_of(state)
        state = state.replace(pages=reclaim(spec, requests, state.pages, running_rows(requests)))
    return state, status, rounds


def _round(spec, params, carry: Carry, going: Going) -> Carry:
    state, _, rounds = carry
    state, out = run_round(spec, params, state)
    return state, out.status, rounds + (out.status == OK)


def _stretch(spec, params, carry: Carry, going: Going) -> Carry:
    """Pages for all running requests if one of them needs some, and rounds until one needs more: the state, whether
    there were pages, and the count with these rounds."""
    state, _, rounds = carry
    requests = requests_of(state)
    short = is_short(spec, requests, state.pages)
    pages = reclaim(spec, requests, state.pages, running_rows(requests))
    pages, cache, enough = hand_out(spec, requests, pages, state.cache, short)

    # Where pages are not enough some request stays short, so no round runs. That is asked of the state itself: a loop
    # that was captured inside another and ended by a flag that it carried took turns too many on an H200 (jax 0.11.2).
    def provided(carry: tuple[SpecState, Array]) -> Array:
        state, rounds = carry
        return going(state, rounds) & ~is_short(spec, requests_of(state), state.pages)

    def one(carry: tuple[SpecState, Array]) -> tuple[SpecState, Array]:
        state, rounds = carry
        return run_provided_round(spec, params, state), rounds + 1

    state, rounds = lax.while_loop(provided, one, (state.replace(pages=pages, cache=cache), rounds))
    return state, jnp.where(enough, OK, OUT_OF_PAGES).astype(jnp.int32), rounds

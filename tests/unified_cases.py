"""The step that tests of unified memory share. Its pool cannot hold the most pages of both kinds at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from tiny_models import CONTEXT, FAST_COMPILE, WINDOW, make_step, prompt

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.steps.step import jit_with_state

NEW, CHUNK, PAGE, D, BATCH = 40, 20, 4, 4, 3
TIGHT = {"num_pages": 61, "num_swa_pages": 13}
PROMPTS = [prompt(n) for n in (41, 44, 40)]


def initial(spec, prompts, *, seed=None, **settings):
    """A fresh state. The seed only changes the state, so all of a step's runs share one program."""
    return jaxspec.init_state(
        spec.target, spec.drafter, dataclasses.replace(spec.config, pool_seed=seed), prompts, **settings
    )


def run(spec, params, prompts, **settings):
    """One generation by the device loop."""
    state = initial(spec, prompts, **settings)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    return read_requests(state, prompts)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=FAST_COMPILE)
def observed_round(spec, params, state):
    """A round that also shows its plan and the page tables that the forward ran with."""
    state, plan = jaxspec.prepare(spec, state)
    pages = jax.tree.map(jnp.copy, state.pages)
    state, drafts = jaxspec.draft(spec, params, state, plan)
    state, verdict = jaxspec.verify(spec, params, state, plan, drafts)
    state, output = jaxspec.commit(spec, state, plan, drafts, verdict)
    return state, (plan, pages, output)


@functools.cache
def tight_step():
    """The step and its weights."""
    spec, params = make_step("draft_lm", batch=BATCH, page=PAGE, D=D, new=NEW, memory="unified", logprobs=True, **TIGHT)
    return spec, jax.device_put(params)


def prompts_for(batch, page):
    """Prompts around the edges of the page, the window, the prefill chunk and the context."""
    edges = [page + 1, CONTEXT - 6, WINDOW, page, CHUNK + 1, CONTEXT - 1, 1, page - 1]
    return [prompt(min(max(length, 1), CONTEXT - 1)) for length in edges[:batch]]

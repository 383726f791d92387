"""Greedy speculative decoding emits the tokens of plain decoding, whatever the shapes, the pages and the company in the batch."""

import jax
import pytest
import tiny_models
from tiny_models import CONTEXT, TARGET, WINDOW, drafter_and_params, prompt

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.steps.step import jit_with_state

NEW = 40


def make_config(batch, page, D, **others):
    return jaxspec.SpecConfig(
        batch_size=batch, num_draft_tokens=D, context_len=CONTEXT, max_new_tokens=NEW, page_size=page,
        **{"prefill_chunk": 48, **others},
    )


def prompts_for(batch, page):
    """Prompts around the edges of the page, the window and the context."""
    lengths = [page + 1, WINDOW, CONTEXT - 1 - 5, page, 1, WINDOW + 1, page - 1 or 2, CONTEXT - 1]
    return [prompt(min(length, CONTEXT - 1)) for length in lengths[:batch]]


def run(spec, params, prompts, **state):
    """One generation by the device loop, through the program that `jaxspec.generate` compiles for this spec."""
    before = jaxspec.init_state(spec.target, spec.drafter, state.pop("config", spec.config), prompts, **state)
    after, _ = jit_with_state(run_to_end, spec.options)(spec, params, before)
    return read_requests(after, prompts)


def expected(greedy, prompts):
    greedy.prepare(prompts)
    return [greedy(p, NEW) for p in prompts]


# (drafter, batch, page size, D): every pair of values of two of them occurs in one of these rows.
PAIRWISE = [("ngram", 3, 4, 4), ("draft_lm", 8, 16, 8), ("self", 1, 64, 2)]


def check_combination(greedy, drafter_name, batch, page, D):
    drafter, params = drafter_and_params(drafter_name)
    spec = jaxspec.make_spec_step(TARGET, drafter, make_config(batch, page, D))
    prompts = prompts_for(batch, page)
    want = expected(greedy, prompts)
    results = run(spec, params, prompts)
    assert [r.token_ids for r in results] == want
    return results


@pytest.mark.parametrize(("drafter", "batch", "page", "D"), PAIRWISE)
def test_equals_plain_decoding(greedy, drafter, batch, page, D):
    check_combination(greedy, drafter, batch, page, D)

"""`generate_many` as an evaluation uses it: many prompts of mixed lengths in slots that are kept busy."""

import json

import jax
import numpy as np
import pytest
from tiny_models import FAST_COMPILE, TARGET, drafter_and_params, prompt

import jaxspec
from jaxspec.benchmarks.unified_ab import draw_prompts

D = 4


def mixed(count, seed=0):
    """Lengths of prompts, 4 to 64, and limits, 8 to 59 new tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(4, 65, count).tolist(), rng.integers(8, 60, count).tolist()


def check(target, params, prompts, limits, slots, *, alone, newcomers=None):
    """Runs all of them, asserts how busy the slots were while prompts were waiting, and of so many prompts that their
    tokens are those that they get alone; returns the figures."""
    how = {"drafter": jaxspec.NgramDrafter(), "num_draft_tokens": D}
    run = jaxspec.generate_many(
        target, params, prompts, max_new_tokens=limits, slots=slots, newcomers_per_dispatch=newcomers, **how
    )
    results, progress = run.results(), run.progress
    assert progress.finished == len(prompts) and progress.slots == slots
    assert progress.tokens == sum(len(result.token_ids) for result in results)
    assert [len(result.token_ids) for result in results] == limits  # no stop ids: all go on to their limits
    assert progress.queued_slot_utilization >= 0.95, progress
    config = jaxspec.SpecConfig(1, D, context_len=128, max_new_tokens=max(limits))
    for index in np.random.default_rng(1).choice(len(prompts), alone, replace=False).tolist():
        want = jaxspec.generate(
            target, params, [prompts[index]], max_new_tokens=limits[index], drafter=how["drafter"], config=config
        )
        assert results[index] == want.requests[0], f"prompt {index}"
    return progress


def test_twelve_slots(monkeypatch):
    """Of which one may wait for another to be free, for prompts enter two at a time."""
    monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
    lengths, limits = mixed(60)
    check(TARGET, drafter_and_params("ngram")[1], [prompt(n) for n in lengths], limits, 12, alone=3, newcomers=2)


@pytest.mark.gpu
def test_256_prompts_in_48_slots():
    """Of a model that knows its texts, in the numbers of an evaluation; how many tokens come a second is printed."""
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU")
    target, (lengths, limits) = jaxspec.load_model("target"), mixed(256)
    drawn = draw_prompts(target, len(lengths), max(lengths), seed=0)
    prompts = [ids[:length] for ids, length in zip(drawn, lengths, strict=True)]
    progress = check(target.model, jaxspec.Params(target.params), prompts, limits, 48, alone=8)
    figures = {name: getattr(progress, name) for name in ("queued_slot_utilization", "slot_utilization")}
    figures |= {name: getattr(progress, name) for name in ("accept_length", "rounds", "chunks", "dispatches")}
    print(json.dumps({**figures, "retractions": progress.retractions, "tokens/s": progress.tokens_per_second}))

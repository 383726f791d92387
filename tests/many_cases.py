"""What the tests of `generate_many` share: prompts of all lengths, and what `generate` makes of each of them alone."""

import dataclasses
import functools

import block_cases
import numpy as np
from tiny_models import CONTEXT, TARGET, VOCAB, drafter_and_params, prompt

import jaxspec
from jaxspec.models.block_draft import BlockDraft

LENGTHS = [1, 9, 44, 21, 8, 13, 60, 5, 20, 30]
PROMPTS = [prompt(n) for n in LENGTHS]
LIMITS = [20, 7, 24, 1, 0, 12, 23, 24, 3, 16]
NEW = 24


def make_config(slots=1, *, D=4, **others):
    """Shapes of the tiny models' runs."""
    shape = {"context_len": CONTEXT, "max_new_tokens": NEW, "page_size": 4, "prefill_chunk": 20}
    return jaxspec.SpecConfig(batch_size=slots, num_draft_tokens=D, **(shape | others))


def one_by_one(target, params, prompts, limits, config, **settings):
    """What `generate` gives for each prompt in a batch of one, with memory enough; settings are one a prompt."""
    roomy = {"num_pages": None, "num_swa_pages": None, "memory": "static", "pool_bytes": None}
    config = dataclasses.replace(config, batch_size=1, **roomy)
    common = {name: settings.pop(name) for name in ("drafter", "stop_ids") if name in settings}
    results = []
    for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        own = {name: values[i] for name, values in settings.items()}
        results += jaxspec.generate(
            target, params, [ids], max_new_tokens=limit, config=config, **common, **own
        ).requests
    return results


# Shapes of block drafts, see `block_cases.SHAPES`: the first lies in the target's entries of a unified pool, the second
# has rows that do not fit there and keeps a pool of its own.
BLOCKS = {"dspark": "table", "dflash": "slim"}


def _pairs():
    """A Markov head that knows what follows what in the texts, and weighs about what the logits of the block do: such a
    draft is right at times, and at others without its context."""
    follows = np.zeros((VOCAB, VOCAB), np.float32)
    for ids, result in zip(PROMPTS, alone("plain"), strict=True):
        text = [*ids[-1:], *result.token_ids]
        np.add.at(follows, (text[1:], text[:-1]), 4)
    return follows


@functools.cache
def drafter_of(name):
    """A drafter for the tiny target, and the weights of a step with it."""
    if name not in BLOCKS:
        return drafter_and_params(name)
    config, weights = block_cases.draft(name, "windows", BLOCKS[name])
    if name == "dspark":
        weights = weights | {"draft": weights["draft"] | {"markov_w2": _pairs()}}
    kind = {"dspark": jaxspec.DSparkDrafter, "dflash": jaxspec.DFlashDrafter}[name]
    return kind(BlockDraft(config)), jaxspec.Params(block_cases.target_params(), weights)


@functools.cache
def alone(drafter="draft_lm"):
    """Greedy results of `PROMPTS`."""
    who, params = drafter_of(drafter)
    return one_by_one(TARGET, params, PROMPTS, LIMITS, make_config(D=1 if who is None else 4), drafter=who)


def run_many(config, order=None, *, drafter="draft_lm", prompts=PROMPTS, limits=LIMITS, **settings):
    """A run over the tiny target's prompts in some order; the results in the order of `prompts`, and the figures."""
    who, params = drafter_of(drafter)
    order = range(len(prompts)) if order is None else order
    shuffled = {"prompts": [prompts[i] for i in order], "max_new_tokens": [limits[i] for i in order]}
    run = jaxspec.generate_many(TARGET, params, **shuffled, drafter=who, config=config, **settings)
    results = run.results()
    return [results[place] for place in np.argsort(order)], run.progress

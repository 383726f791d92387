"""Small random models and prompts that the tests of the step share. Everything is drawn by numpy from fixed seeds."""

import functools

import jax
import numpy as np

import jaxspec
from jaxspec import models

WINDOW = 8
VOCAB = 61
CONTEXT = 160

CONFIG = models.Qwen3Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, windows=(WINDOW, None), max_position_embeddings=256, tie_word_embeddings=False,
)
MODULE = models.Qwen3(CONFIG)
TARGET = jaxspec.from_qwen3(MODULE)
# The same module as a draft: its sliding layer lives in FULL pages, so that it can follow the target's FULL page table.
DRAFT = jaxspec.from_qwen3(MODULE, swa_pages=False)
DRAFTERS = ("ngram", "draft_lm", "self")


@functools.cache
def target_params():
    """Random weights, matrices scaled up: with the usual scale a greedy text soon repeats one token for ever."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, models.random_params(CONFIG, seed=0))


@functools.cache
def draft_params():
    """The target's weights with noise: a draft that is right about half of the time."""
    noise = models.random_params(CONFIG, seed=1)
    return jax.tree.map(lambda x, n: x + 0.25 * n if x.ndim == 2 else x, target_params(), noise)


def drafter_and_params(name):
    """A drafter and the `Params` of a step: "plain", "ngram", "draft_lm" (often wrong) or "self" (the target drafts for itself)."""
    drafter = {"plain": None, "ngram": jaxspec.NgramDrafter(), "draft_lm": jaxspec.DraftLM(DRAFT), "self": jaxspec.DraftLM(DRAFT)}
    draft = {"draft_lm": draft_params, "self": target_params}.get(name, tuple)()
    return drafter[name], jaxspec.Params(target_params(), draft)


@functools.cache
def prompt(length):
    """Token ids of a prompt; the second half repeats pieces of the first, which gives n-gram lookup something to find."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length)
    if length >= 12:
        start = rng.integers(0, length // 4)
        half = length - length // 2
        ids[-half:] = np.resize(ids[start : start + length // 4], half)
    return tuple(int(i) for i in ids)

"""Small random models and prompts that the tests of the step share. Everything is drawn by numpy from fixed seeds."""

import dataclasses
import functools

import jax
import numpy as np

import jaxspec
from jaxspec import models
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.eagle_config import Eagle3Config

WINDOW = 8
VOCAB = 61
CONTEXT = 160

CONFIG = models.Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    windows=(WINDOW, None),
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
MODULE = models.Qwen3(CONFIG)
TARGET = jaxspec.from_qwen3(MODULE)
# The same module as a draft: its sliding layer lives in FULL pages, so that it can follow the target's page table.
DRAFT = jaxspec.from_qwen3(MODULE, swa_pages=False)
DRAFTERS = ("ngram", "draft_lm", "self")
# The same weights with other windows: a target that keeps no sliding-window pages, and a draft that looks back further
# than the target's pages of that kind reach.
FULL_MODULE = models.Qwen3(dataclasses.replace(CONFIG, windows=(None, None)))
FULL_TARGET = jaxspec.from_qwen3(FULL_MODULE)
WIDE_DRAFT = jaxspec.from_qwen3(
    models.Qwen3(dataclasses.replace(CONFIG, windows=(2 * WINDOW + 4, None))), swa_pages=False
)

# A hybrid with one layer of each kind.
HYBRID_CONFIG = models.HybridConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("linear_attention", "sliding_attention", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    sliding_window=WINDOW,
    partial_rotary_factor=0.5,
    max_position_embeddings=256,
)
HYBRID_MODULE = models.Hybrid(HYBRID_CONFIG)
HYBRID_TARGET = models.from_hybrid(HYBRID_MODULE)

# Layers of both kinds, and one prediction block.
GLM_CONFIG = models.GlmConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    layer_types=("linear_attention", "deepseek_sparse_attention"),
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    v_head_dim=8,
    linear_num_heads=1,
    linear_head_dim=8,
    index_n_heads=1,
    index_head_dim=16,
    index_topk=8,
    index_kpool=4,
    num_nextn_predict_layers=1,
    max_position_embeddings=512,
)

# XLA options for programs that run a few milliseconds: they compile in a third of the time.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no such option
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False


def trained_draft(kind):
    """Configuration of a draft that is trained for the tiny target: "dspark", "dflash" or "eagle3"."""
    shape = {"target_layer_ids": (0, 1), "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    if kind == "eagle3":
        return Eagle3Config(target_hidden_size=32, **shape)
    more = {"markov_rank": 4} if kind == "dspark" else {"sample_from_anchor": False}
    return BlockDraftConfig(kind, block_size=4, mask_token_id=1, num_hidden_layers=2, **shape, **more)


@functools.cache
def target_params():
    """Random weights, matrices scaled up: with the usual scale a greedy text soon repeats one token for ever."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, models.random_params(CONFIG, seed=0))


@functools.cache
def hybrid_params():
    """Random weights of the hybrid, scaled up like the target's."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, models.random_params(HYBRID_CONFIG, seed=0))


@functools.cache
def draft_params():
    """The target's weights with noise: a draft that is right in part of the rounds."""
    noise = models.random_params(CONFIG, seed=1)
    return jax.tree.map(lambda x, n: x + 0.25 * n if x.ndim == 2 else x, target_params(), noise)


def drafter_and_params(name, target=TARGET):
    """A drafter and the weights of a step of `target`.

    "plain" has none, "ngram" looks up, "draft_lm" is another model that is often wrong, "wide" the same with a larger
    window, and with "self" the target drafts for itself.
    """
    weights = hybrid_params() if target == HYBRID_TARGET else target_params()
    if name in ("plain", "ngram"):
        return (jaxspec.NgramDrafter() if name == "ngram" else None), jaxspec.Params(weights)
    model = WIDE_DRAFT if name == "wide" else DRAFT
    return jaxspec.DraftLM(model), jaxspec.Params(weights, target_params() if name == "self" else draft_params())


def make_step(drafter, *, target=TARGET, batch=1, page=4, D=4, new=40, **others):
    """A step of the tiny target, and its weights."""
    drafter, params = drafter_and_params(drafter, target)
    config = jaxspec.SpecConfig(
        **{
            "batch_size": batch,
            "num_draft_tokens": D,
            "context_len": CONTEXT,
            "max_new_tokens": new,
            "page_size": page,
            "prefill_chunk": 20,
            **others,
        }
    )
    return jaxspec.make_spec_step(target, drafter, config, options=FAST_COMPILE), params


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def round_in_phases(spec, params, state):
    """A round by its phases, and what they handed on: (state, (plan, drafts, verdict, output))."""
    state, plan = jaxspec.prepare(spec, state)
    state, drafts = jaxspec.draft(spec, params, state, plan)
    state, verdict = jaxspec.verify(spec, params, state, plan, drafts)
    state = jaxspec.extend(spec, params, state, plan, verdict)
    state, output = jaxspec.commit(spec, state, plan, drafts, verdict)
    return state, (plan, drafts, verdict, output)


@functools.cache
def prompt(length):
    """Token ids of a prompt; the second half repeats a piece of the first, so that n-gram lookup finds something."""
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCAB, length)
    if length >= 12:
        start = rng.integers(0, length // 4)
        half = length - length // 2
        ids[-half:] = np.resize(ids[start : start + length // 4], half)
    return tuple(int(i) for i in ids)

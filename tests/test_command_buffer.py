"""Compiled for an H200, a whole generation is one captured command buffer, and its state stays where it is.

Needs no GPU, but the wheels of a CUDA plugin and ptxas.
"""

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tiny_models import CONFIG, HYBRID_CONFIG, prompt

import jaxspec
from jaxspec import models
from jaxspec.generation.loops import run_to_end
from jaxspec.steps.step import compiler_options, jit_with_state

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

MODULE = models.Qwen3(dataclasses.replace(CONFIG, num_hidden_layers=1, windows=(None,)))
MODEL = jaxspec.from_qwen3(MODULE)
# Slower kernels, compiled sooner; which of them there are, and how the host starts them, stays the same.
FAST = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}


@pytest.fixture(autouse=True)
def plugin():
    if reason := aot.missing():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        ("ngram", None),
        ("draft_lm", None),
        ("draft_lm", "block"),
        pytest.param("draft_lm", "rejection", marks=pytest.mark.slow),
        pytest.param("ngram", "match", marks=pytest.mark.slow),
    ],
)
def test_a_generation_is_one_command_buffer(drafter, verifier, tmp_path):
    weights = models.random_params(MODULE.config, seed=0)
    drafter, params = {
        "ngram": (jaxspec.NgramDrafter(), jaxspec.Params(weights)),
        "draft_lm": (jaxspec.DraftLM(MODEL), jaxspec.Params(weights, weights)),
    }[drafter]
    shape = {"context_len": 64, "max_new_tokens": 8, "page_size": 8, "prefill_chunk": 16}
    config = jaxspec.SpecConfig(batch_size=2, num_draft_tokens=3, sampling=verifier, **shape)
    spec = jaxspec.make_spec_step(MODEL, drafter, config, options=compiler_options("cuda"))
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(9)])
    lowered = aot.lower_for_h200(jit_with_state(run_to_end, spec.options), spec, params, state)
    compiled = aot.compile_lowered(lowered, dump=tmp_path, **FAST)
    assert aot.thunks(tmp_path) == ["kCommandBuffer"]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_a_hybrids_generation_is_one_command_buffer(tmp_path):
    """Recurrent layers and a unified pool included, with the kernels that run on a GPU."""
    module = models.Hybrid(dataclasses.replace(HYBRID_CONFIG, layer_types=("linear_attention",), sliding_window=None))
    config = jaxspec.SpecConfig(
        batch_size=2,
        num_draft_tokens=3,
        context_len=64,
        max_new_tokens=8,
        page_size=8,
        prefill_chunk=16,
        memory="unified",
        kernel_backend="triton",
    )
    spec = jaxspec.make_spec_step(
        models.from_hybrid(module), jaxspec.NgramDrafter(), config, options=compiler_options("cuda")
    )
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(9)])
    params = jaxspec.Params(models.random_params(module.config, seed=0))
    lowered = aot.lower_for_h200(jit_with_state(run_to_end, spec.options), spec, params, state)
    compiled = aot.compile_lowered(lowered, dump=tmp_path, **FAST)
    assert aot.thunks(tmp_path) == ["kCommandBuffer"]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def halve(x):
    """A loop whose end the device decides."""
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        (compiler_options("cuda"), True),
        ({}, False),
        (compiler_options("cuda") | {"xla_gpu_enable_command_buffer": ""}, False),
    ],
    ids=["this project's", "XLA's own", "capture off"],
)
def test_a_loop_outside_a_command_buffer_would_be_seen(options, captured, tmp_path):
    lowered = aot.lower_for_h200(jax.jit(halve, donate_argnums=0, compiler_options=options), jnp.ones(1024))
    aot.compile_lowered(lowered, dump=tmp_path)
    found = aot.thunks(tmp_path)
    assert (found == ["kCommandBuffer"]) == captured
    assert ("kWhile" in found) == (not captured)

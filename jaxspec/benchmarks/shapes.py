"""Models to time a round with: public shapes under random weights, and the embedded target under its own.

    8b          Qwen3-8B
    1b          Qwen3-1.7B
    embedded    the target that ships with the library

What a round costs depends on shapes alone, what it accepts on the weights: drafts for random weights are never right.
Random weights are drawn on the device, an array at a time and in the dtype they stay in, so what is there at once are
the weights and the bits of one array.

Source: the public configurations of Qwen3-8B, Qwen3-1.7B and Qwen3-0.6B.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.benchmarks.unified_ab import draw_prompts
from jaxspec.models import Checkpoint, Qwen3Config, load
from jaxspec.models.checkpoint import make_module

EMBEDDED, EMBEDDED_DRAFT = "target", "draft"  # their names among the embedded models
_QWEN3 = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
}
SHAPES = {
    "8b": Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32, **_QWEN3
    ),
    "1b": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
}
# What drafts for them: Qwen3-0.6B.
DRAFT_SHAPE = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
    **_QWEN3,
)
CONFIGS = (*SHAPES, "embedded")


def is_random(name: str) -> bool:
    """Whether the weights of a configuration are random."""
    return name in SHAPES


def make_target(name: str, dtype: str, seed: int | None) -> Checkpoint:
    """The target of a configuration.

    Args:
      name: one of `CONFIGS`.
      dtype: of the weights, and what is computed in.
      seed: of random weights; None makes shapes of them and no arrays.
    """
    return random_model(name, SHAPES[name], dtype, seed) if is_random(name) else load(EMBEDDED, dtype)


def make_draft(name: str, dtype: str, seed: int | None) -> Checkpoint:
    """The draft model of a configuration: of the shape of Qwen3-0.6B and random, or the embedded one."""
    return random_model("draft", DRAFT_SHAPE, dtype, seed) if is_random(name) else load(EMBEDDED_DRAFT, dtype)


def random_model(name: str, config: Qwen3Config, dtype: str, seed: int | None) -> Checkpoint:
    """A model of a shape with weights that mean nothing, or with their shapes; it has no folder and no tokenizer."""
    params = weight_shapes(config, dtype) if seed is None else random_weights(config, dtype, seed)
    return Checkpoint(make_module(config, jnp.dtype(dtype)), params, config, Path(name))


def draw_ids(name: str, target: Checkpoint, count: int, length: int, seed: int) -> Sequence[Sequence[int]]:
    """Prompts for a configuration's target: code for weights that know some, else random ids."""
    if not is_random(name):
        return draw_prompts(target, count, length, seed)
    return np.random.default_rng(seed).integers(target.config.vocab_size, size=(count, length)).tolist()


def weight_shapes(config: Qwen3Config, dtype: str) -> dict[str, Any]:
    """Shapes and dtype of a model's parameters, as the module takes them; makes no arrays.

    Example:
      >>> tree = weight_shapes(SHAPES["8b"], "bfloat16")
      >>> round(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e9, 2)
      16.38
    """
    row = jnp.zeros((1, 1), jnp.int32)
    init = functools.partial(
        make_module(config, jnp.dtype(dtype)).init, attend=lambda layer, q, k, v, cache: (q, cache)
    )
    tree = jax.eval_shape(init, jax.random.key(0), row, row)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), tree)


def random_weights(config: Qwen3Config, dtype: str, seed: int) -> dict[str, Any]:
    """Parameters drawn on the device: matrices of the scale of what they multiply, norms of 1.

    Example:
      >>> config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                      num_attention_heads=2, num_key_value_heads=1, head_dim=8)
      >>> random_weights(config, "bfloat16", 0)["params"]["layers_0"]["k_proj"].shape
      (16, 8)
    """
    leaves, tree = jax.tree.flatten_with_path(weight_shapes(config, dtype))
    key, made = jax.random.key(seed), []
    for number, (path, leaf) in enumerate(leaves):
        if leaf.ndim == 1:
            made.append(jnp.ones(leaf.shape, leaf.dtype))
            continue
        rows_are_ids = path[-1].key in ("embed_tokens", "lm_head")  # [V, H], the others [in, out]
        width = leaf.shape[1] if rows_are_ids else leaf.shape[0]
        part = jax.random.fold_in(key, number)
        # One at a time: bits that are drawn take more room than what is made of them.
        made.append(jax.block_until_ready(_draw(part, leaf.shape, leaf.dtype, width**-0.5)))
    return jax.tree.unflatten(tree, made)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape, dtype)


def bytes_read(params: Any, config: Qwen3Config, rows: int) -> int:
    """Bytes of weights that a forward of so many rows reads: all but the embedding, of which it reads a row each.

    The embedding counts in full where it is the head as well. `params` are arrays, or their shapes.
    """
    tree = params["params"]
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    if config.tie_word_embeddings:
        return total
    table = tree["embed_tokens"]
    return total - (table.shape[0] - rows) * table.shape[1] * table.dtype.itemsize


def memory_there() -> float:
    """Bytes that jax may use: of the device, or on a CPU what the machine has free; infinite where nobody says."""
    if limit := (jax.devices()[0].memory_stats() or {}).get("bytes_limit"):
        return limit
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kib * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return float("inf")

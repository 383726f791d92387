"""The network of an EAGLE-3 draft: one decoder layer that goes on from what some of the target's layers made of a text.

A row at position p takes token p + 1 and what is known of the text up to p: where the target has been there the
*features* of its row p, joined by `fc`; in a chain the hidden row that the draft itself made at p. Attention sees the
token's embedding and that hidden row side by side, so its input is 2 Hd wide; the residual stream is the hidden row
alone. The row's output predicts token p + 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import LayerSpec
from jaxspec.errors import InputError
from jaxspec.models.draft_tensors import DraftFormat, DraftTensor
from jaxspec.models.eagle_config import ARCHITECTURE, Eagle3Config
from jaxspec.models.qwen3 import rotary_angles, rotate
from jaxspec.models.rows import Attend, dot, rms_norm

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 draft: static and hashable, like `Model`.

    Its params are `{"draft": tree, "embed_tokens": [V, H]}`, the target's embedding, and `lm_head` [V, H] where the
    target has one of its own. The tree may hold an embedding of its own [V, Hd], and holds, where the configuration
    names a size, a head of its own `lm_head` [Vd, Hd] and `d2t` int32[Vd]: its id i is the target's i + d2t[i], or i
    where there is no `d2t`.

    Attributes:
      config: the draft's shape.
      dtype: what it computes in, as a string.

    Example:
      >>> config = Eagle3Config(vocab_size=64, hidden_size=16, target_hidden_size=16, intermediate_size=32,
      ...                       num_attention_heads=2, num_key_value_heads=1, head_dim=8, target_layer_ids=(0, 1, 3))
      >>> Eagle3(config).layers
      (LayerSpec(num_kv_heads=1, head_dim=8, window=None, storage='full', value_dim=None),)

    Source: "EAGLE-3" (arXiv 2503.01840); names and conventions as in the public drafts for Llama-like targets.
    """

    config: Eagle3Config
    dtype: str = "float32"

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What the draft keeps for a token."""
        return (LayerSpec(self.config.num_key_value_heads, self.config.head_dim),)

    def fuse(self, params: Mapping[str, Any], features: Array) -> Array:
        """Features of tokens as hidden rows: [..., m * H], those of the m layers side by side -> [..., Hd].

        Raises:
          ValueError: they have another width. It is checked because a draft that is fed something else runs, and all
            that shows is that nothing is ever accepted.
        """
        config, tree = self.config, params["draft"]
        if features.shape[-1] != config.feature_size:
            raise ValueError(
                f"features has shape {features.shape}: the draft joins {len(config.target_layer_ids)} layers of "
                f"{config.target_hidden_size} channels, so its last axis must be {config.feature_size}"
            )
        if config.feature_norm == "joint":
            features = self._norm(tree["input_norm"], features)
        elif config.feature_norm == "each":
            parts = jnp.split(features, len(config.target_layer_ids), axis=-1)
            parts = [self._norm(tree[f"fc_norm_{index}"], part) for index, part in enumerate(parts)]
            features = jnp.concatenate(parts, axis=-1)
        fused = dot(features, tree["fc"], self.dtype)
        return fused + tree["fc_bias"].astype(self.dtype) if config.bias else fused

    def rows(
        self,
        params: Mapping[str, Any],
        tokens: Array,
        hidden: Array,
        positions: Array,
        attend: Attend,
        cache: Any = None,
    ) -> tuple[Array, Array, Any]:
        """Runs the layer.

        Args:
          params: see the class.
          tokens: int32[B, C], the token after each row: that of position p + 1 with the row of position p.
          hidden: [B, C, Hd], from `fuse`, or what an earlier call gave to go on with.
          positions: int32[B, C], p.
          attend: called once, as `attend(0, q, k, v, cache) -> (out, cache)`, keys rotated; as a model calls it.
          cache: handed to `attend`.

        Returns:
          [B, C, Hd] rows for `logits`, after the last norm; [B, C, Hd] rows for the next step of a chain; the cache.
        """
        config, tree = self.config, params["draft"]
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        layer, hidden = tree["layer"], hidden.astype(self.dtype)
        embedding = tree.get("embed_tokens", params["embed_tokens"])
        token = jnp.take(embedding, tokens, axis=0, mode="clip").astype(self.dtype)
        both = self._norm(layer["input_layernorm"], token), self._norm(layer["hidden_norm"], hidden)
        both = jnp.concatenate(both, axis=-1)
        cos, sin = rotary_angles(positions, head_dim, config.rope_theta)

        def project(name, count):
            return dot(both, layer[name], self.dtype).reshape(*both.shape[:-1], count, head_dim)

        q, k = rotate(project("q_proj", heads), cos, sin), rotate(project("k_proj", kv_heads), cos, sin)
        out, cache = attend(0, q, k, project("v_proj", kv_heads), cache)
        x = hidden + dot(out.reshape(*out.shape[:-2], heads * head_dim), layer["o_proj"], self.dtype)
        normed = self._norm(layer["post_attention_layernorm"], x)
        inner = nn.silu(dot(normed, layer["gate_proj"], self.dtype)) * dot(normed, layer["up_proj"], self.dtype)
        x = x + dot(inner, layer["down_proj"], self.dtype)
        normed = self._norm(tree["norm"], x)
        return normed, normed if config.norm_output else x, cache

    def logits(self, params: Mapping[str, Any], rows: Array) -> Array:
        """float32[..., Vd], scores of the draft's ids, of rows [..., Hd] that `rows` gave."""
        head = params["draft"].get("lm_head")
        if head is None:
            head = params.get("lm_head", params["embed_tokens"])
        return dot(rows, head, self.dtype, transposed=True, out_dtype=jnp.float32)

    def target_ids(self, params: Mapping[str, Any], ids: Array) -> Array:
        """int32, the target's ids for ids of the draft."""
        offsets = params["draft"].get("d2t")
        return ids if offsets is None else ids + offsets.at[ids].get(mode="promise_in_bounds")

    def spread(self, params: Mapping[str, Any], logits: Array) -> Array:
        """float32[..., V], logits [..., Vd] by the target's ids; -inf for ids that the draft cannot propose."""
        if "d2t" not in params["draft"]:
            return logits
        ids = self.target_ids(params, jnp.arange(self.config.head_size, dtype=jnp.int32))
        wide = jnp.full((*logits.shape[:-1], self.config.vocab_size), -jnp.inf, logits.dtype)
        return wide.at[..., ids].set(logits, mode="promise_in_bounds", unique_indices=True)

    def _norm(self, scale: Array, x: Array) -> Array:
        return rms_norm(x, scale, self.config.rms_norm_eps, self.dtype)


def eagle3_tensors(config: Eagle3Config) -> dict[str, DraftTensor]:
    """Every tensor of the file under its public name."""
    hidden, inner, of_target = config.hidden_size, config.intermediate_size, config.target_hidden_size
    q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    tensors = {
        "fc.weight": DraftTensor(("fc",), (hidden, config.feature_size), transposed=True),
        "norm.weight": DraftTensor(("norm",), (hidden,)),
        "embed_tokens.weight": DraftTensor(
            ("embed_tokens",), (config.vocab_size, hidden), optional=hidden == of_target
        ),
    }
    if config.bias:
        tensors["fc.bias"] = DraftTensor(("fc_bias",), (hidden,))
    if config.feature_norm == "joint":
        tensors["input_norm.weight"] = DraftTensor(("input_norm",), (config.feature_size,))
    if config.feature_norm == "each":
        for index in range(len(config.target_layer_ids)):
            tensors[f"fc_norm.{index}.weight"] = DraftTensor((f"fc_norm_{index}",), (of_target,))
    if config.draft_vocab_size is not None:
        tensors["lm_head.weight"] = DraftTensor(("lm_head",), (config.head_size, hidden))
        same = config.head_size == config.vocab_size
        tensors["d2t"] = DraftTensor(("d2t",), (config.head_size,), optional=same, integer=True)
    shapes = {
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_width, 2 * hidden),
        "self_attn.k_proj": (kv_width, 2 * hidden),
        "self_attn.v_proj": (kv_width, 2 * hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name, shape in shapes.items():
        path = "layer", name.rpartition(".")[2]
        tensors[f"layers.0.{name}.weight"] = DraftTensor(path, shape, transposed=len(shape) == 2)
    return tensors


def _alias(name: str) -> str:
    """Names of older files."""
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    for index, height in enumerate(("low", "mid", "high")):
        if name == f"aux_norm_{height}.weight":
            return f"fc_norm.{index}.weight"
    return name


def _check(config: Eagle3Config, tree: Mapping[str, Any]) -> None:
    if "d2t" not in tree:
        return
    offsets = np.asarray(tree["d2t"]).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise InputError(
            f"d2t leads to id {outside[0]}, outside the target's {config.vocab_size}: it holds what is added to an id "
            "of the draft, not the target's id"
        )
    if len(np.unique(ids)) < len(ids):
        raise InputError("d2t leads from two ids of the draft to one of the target: each must have its own")


EAGLE3_FORMAT = DraftFormat(
    kind="eagle3",
    architectures=(ARCHITECTURE,),
    read=Eagle3Config.from_dict,
    tensors=eagle3_tensors,
    build=lambda config, dtype: Eagle3(config, jnp.dtype(dtype).name),
    alias=_alias,
    ignored=("t2d",),
    check=_check,
)

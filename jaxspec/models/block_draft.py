"""The network of a block draft: one forward proposes all tokens of a round.

It has two inputs. *Features* of committed tokens, the target's residual stream behind a few of its layers, become keys
and values in every layer of the draft, without passing through the layers: the context. A *block* of rows, the newest
token and masks behind it, goes through the layers as in any decoder, and attends to the context and to itself.

As in `Qwen3`, everything that is per row is computed here, and how rows see each other is one argument, `attend`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import LayerSpec
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.qwen3 import Qwen3Layer, rotary_angles
from jaxspec.models.rows import PLAIN, Attend, Rows, dot, rms_norm

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockDraft:
    """A block draft, DSPARK or DFLASH: static and hashable, a function of its parameters.

    Parameters are `{"draft": tree, "embed_tokens": [V, H]}`, and `"lm_head": [V, H]` where the target has a head of its
    own: embedding and head are the target's arrays. The tree holds `fc` [m * H, H], `hidden_norm` [H], `norm` [H] and,
    under `layers_0`, `layers_1`, ..., the arrays of a `Qwen3` layer, matrices as [in, out]; of a DSPARK draft also
    `markov_w1` and `markov_w2` [V, r].

    Fields:
      config: the draft's shape.
      dtype: what it is computed in, float32 or bfloat16. Norms and rotary embedding are float32 either way.

    Example:
      >>> config = BlockDraftConfig("dspark", block_size=3, target_layer_ids=(0, 2), mask_token_id=0, vocab_size=64,
      ...                           hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
      ...                           num_key_value_heads=1, head_dim=8, markov_rank=4)
      >>> draft = BlockDraft(config)
      >>> draft.layers[0].window, draft.causal(0)
      (None, False)

    Source: "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036) for the network; the Markov head
    as of the public DSPARK drafts.
    """

    config: BlockDraftConfig
    dtype: Any = jnp.float32

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps for a token, of the context and of a block alike."""
        config = self.config
        return tuple(
            LayerSpec(config.num_key_value_heads, config.head_dim, window, storage="full") for window in config.windows
        )

    def causal(self, layer: int) -> bool:
        """Whether a row of a block sees no row behind it; otherwise it sees the whole block."""
        return self.config.causal[layer]

    def context(self, params: Any, features: Array) -> tuple[Array, Array]:
        """Keys and values of committed tokens, those of all layers by one product.

        Args:
          params: see the class.
          features: [B, C, m * H], the target's streams in the order of `target_layer_ids`.

        Returns:
          k and v, each `dtype` [B, C, N, Hkv, hd]. Keys are neither normed nor rotated yet: `key_norms`, then the
          rotary embedding at the token's own position.
        """
        config, tree = self.config, params["draft"]
        rows = dot(features, tree["fc"], self.dtype)
        rows = rms_norm(rows, tree["hidden_norm"], config.rms_norm_eps, self.dtype)
        blocks = [tree[f"layers_{layer}"] for layer in range(config.num_hidden_layers)]
        stacked = [block[name].astype(self.dtype) for name in ("k_proj", "v_proj") for block in blocks]
        both = dot(rows, jnp.concatenate(stacked, axis=1), self.dtype)
        shape = (2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        both = both.reshape(*features.shape[:2], *shape)
        return both[:, :, 0], both[:, :, 1]

    def key_norms(self, params: Any) -> Array:
        """The scales of the layers' key norms, [N, hd]."""
        tree = params["draft"]
        return jnp.stack([tree[f"layers_{layer}"]["k_norm"] for layer in range(self.config.num_hidden_layers)])

    def rows(
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        attend: Attend,
        cache: Any = None,
        kernels: Rows = PLAIN,
    ) -> tuple[Array, Any]:
        """Runs the layers over a block.

        Args:
          params: see the class.
          tokens: int32[B, q], ids in [0, V): the newest token of each text, then `mask_token_id`.
          positions: int32[B, q], consecutive; the first is that of the newest token.
          attend: called once a layer, in order, as `attend(layer, q, k, v, cache) -> (out, cache)`, like that of
            `Qwen3`, keys normed and rotated unless `kernels.turns`. It decides what a row sees: the context in front of
            the block, cut by the layer's window, and the block, up to the row itself where `causal(layer)`.
          cache: handed from call to call.
          kernels: who computes the products, norms and rotation of rows, as `rows` of `Qwen3`.

        Returns:
          hidden `dtype` [B, q, H], the stream after the final norm, and the last cache.
        """
        config, tree = self.config, params["draft"]
        x = jnp.take(params["embed_tokens"], tokens, axis=0, mode="clip").astype(self.dtype)
        cos, sin = rotary_angles(positions, config.head_dim, config.rope_theta)
        for layer in range(config.num_hidden_layers):
            block = Qwen3Layer(config, layer, self.dtype)
            params = {"params": tree[f"layers_{layer}"]}
            x, cache = block.apply(params, x, cos, sin, attend, cache, kernels)
        return rms_norm(x, tree["norm"], config.rms_norm_eps, self.dtype), cache

    def logits(self, params: Any, hidden: Array) -> Array:
        """float32[B, q, V] of hidden rows [B, q, H] by the target's head, each the nearest number of `dtype`."""
        head = params.get("lm_head", params["embed_tokens"])
        return rounded(dot(hidden, head, self.dtype, transposed=True, out_dtype=jnp.float32), self.dtype)

    def markov(self, params: Any, previous: Array) -> Array:
        """What the token before adds to the logits of a DSPARK draft: float32[B, V] for ids int32[B] in [0, V)."""
        tree = params["draft"]
        row = jnp.take(tree["markov_w1"], previous, axis=0, mode="clip")
        return dot(row, tree["markov_w2"], self.dtype, transposed=True, out_dtype=jnp.float32)


def rounded(values: Array, dtype: Any) -> Array:
    """float32 values, each the nearest number of `dtype`.

    Not a cast there and back, which XLA may leave out: drafts are drawn from what verification is told of them.

    Example:
      >>> rounded(jnp.array([1.001, -3.0]), jnp.bfloat16).tolist()
      [1.0, -3.0]
    """
    info = jnp.finfo(dtype)
    if info.nmant >= jnp.finfo(jnp.float32).nmant:
        return values
    return lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)

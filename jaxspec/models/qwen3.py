"""Qwen3, the dense decoder, as a flax module that leaves attention and its cache to the caller.

The module computes everything that is per row: embedding, norms, projections, rotary embedding, MLP and logits. How
rows see each other is one argument, `attend`: the paged cache when decoding, `dense_attend` when a whole text
is scored at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention.heads import Heads
from jaxspec.models.config import Qwen3Config
from jaxspec.models.rows import PLAIN, Attend, Rows, dot, rms_norm


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [B, T, 1, head_dim / 2], of the rotary embedding at `positions` int32 [B, T].

    The frequencies `theta ** (-2 i / head_dim)` are constants rounded through float32 as public software rounds them:
    at position 4000 one last place of a frequency already turns a channel pair by 2e-4 radians.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1) / np.power(np.float32(theta), exponent)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x [B, T, heads, head_dim]`: channel i of the first half is paired with channel i of the second."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _matrix_init(key, shape, dtype=jnp.float32):
    return 0.02 * jax.random.normal(key, shape, dtype)


class Qwen3Layer(nn.Module):
    """One decoder layer: attention with normed queries and keys, then the gated MLP, each added to the residual."""

    config: Qwen3Config
    layer: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, cos, sin, attend: Attend, cache, rows: Rows):
        config, dtype, eps = self.config, self.dtype, self.config.rms_norm_eps
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width, inner = config.hidden_size, config.intermediate_size

        def scale(name, size):
            return self.param(name, nn.initializers.ones_init(), (size,))

        def weight(name, height, width):
            return self.param(name, _matrix_init, (height, width))

        norm = scale("input_layernorm", width), eps
        sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        weights = tuple(weight(name, width, size) for name, size in sizes.items())
        norms = scale("q_norm", head_dim), scale("k_norm", head_dim)
        projected, turns = rows.projected(x, norm, weights, head_dim, Heads(cos, sin, norms, eps), dtype)
        out, cache = rows.attend(self.layer, projected, turns, attend, cache)
        out = out.reshape(*x.shape[:-1], heads * head_dim)
        norm = scale("post_attention_layernorm", width), eps
        x, normed = rows.added(x, out, weight("o_proj", heads * head_dim, width), norm, dtype)
        gated = rows.gated(normed, weight("gate_proj", width, inner), weight("up_proj", width, inner), dtype)
        return x + dot(gated, weight("down_proj", inner, width), dtype), cache


class Qwen3(nn.Module):
    """Qwen3 dense: token rows in, logits and final hidden rows out.

    Fields:
      config: the model's shape.
      dtype: what the matrix products and the residual stream are computed in (float32 or bfloat16). Norms, rotary
        embedding and logits are float32 either way. Parameters keep the dtype they come in.

    Parameters, one array each and none stacked over layers: `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H]
    (absent if tied) and, under `layers_0`, `layers_1`, ..., the names of the public checkpoint with matrices as
    [in, out].

    Example:
      >>> config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
      ...                      num_attention_heads=2, num_key_value_heads=1, head_dim=8, windows=(4, None))
      >>> model, tokens = Qwen3(config), jnp.arange(6, dtype=jnp.int32)[None]
      >>> attend = dense_attend(config.windows)
      >>> params = model.init(jax.random.key(0), tokens, tokens, attend)
      >>> logits, hidden, _ = model.apply(params, tokens, tokens, attend)
      >>> logits.shape, hidden.shape
      ((1, 6, 64), (1, 6, 16))

    Source: "Qwen3 Technical Report" (arXiv 2505.09388); tensor names and conventions as in Hugging Face transformers.
    """

    config: Qwen3Config
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Any = None,
        logit_rows: jax.Array | None = None,
        taps: tuple[int, ...] = (),
        rows: Rows = PLAIN,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the model over B requests of T rows.

        Args:
          tokens: int32 [B, T], ids 0 to V - 1; padded rows hold any such id.
          positions: int32 [B, T], each token's place in its text, counted from 0.
          attend: called once a layer, in order, as `attend(layer, q, k, v, cache) -> (out, cache)` with q and out
            [B, T, Hq, hd] and k, v [B, T, Hkv, hd] in `dtype`, keys already rotated (unless `rows.turns`). It alone
            mixes rows, so what a padded row holds reaches another row only through it.
          cache: handed to the first call of `attend`, then from call to call; any pytree, or None.
          logit_rows: int32 [B, K], rows 0 to T - 1 whose logits are wanted; None means all T.
          taps: m layers, 0 to L - 1 (static), whose features are wanted in place of the normed stream.
          rows: who computes the products, norms and rotation of rows, and whether `attend` does the latter (static).

        Returns:
          logits float32 [B, K or T, V]; hidden `dtype` [B, T, H], the stream after the final norm, or, with taps,
          [B, T, m * H], the streams behind those layers side by side in the order of `taps`, not normed; the last
          cache.
        """
        config, dtype = self.config, self.dtype
        embedding = self.param("embed_tokens", _matrix_init, (config.vocab_size, config.hidden_size))
        x = jnp.take(embedding, tokens, axis=0, mode="clip").astype(dtype)
        cos, sin = rotary_angles(positions, config.head_dim, config.rope_theta)
        streams = []
        for layer in range(config.num_hidden_layers):
            x, cache = Qwen3Layer(config, layer, dtype, name=f"layers_{layer}")(x, cos, sin, attend, cache, rows)
            streams.append(x)
        scale = self.param("norm", nn.initializers.ones_init(), (config.hidden_size,))
        hidden = rms_norm(x, scale, config.rms_norm_eps, dtype)
        head = embedding
        if not config.tie_word_embeddings:
            head = self.param("lm_head", _matrix_init, (config.vocab_size, config.hidden_size))
        wanted = hidden
        if logit_rows is not None:
            wanted = jnp.take_along_axis(hidden, logit_rows[:, :, None], axis=1, mode="clip")
        logits = dot(wanted, head, dtype, transposed=True, out_dtype=jnp.float32)
        return logits, features(streams, taps) if taps else hidden, cache


def features(streams: Sequence[jax.Array], taps: tuple[int, ...]) -> jax.Array:
    """What is tapped of a forward: of the streams [B, T, H] behind each layer those of `taps`, [B, T, m * H]."""
    return jnp.concatenate([streams[layer] for layer in taps], axis=-1)


def dense_attend(windows: tuple[int | None, ...]) -> Attend:
    """An `attend` for whole texts: row i of a request is its position i, and no cache is kept.

    Query i sees the keys j <= i, in a layer with window W only the W keys `i - W < j <= i`. Scores are scaled by
    `head_dim ** -0.5`; softmax is float32. Texts of different lengths go padded at their end: causality keeps the
    padding from every earlier row. The cache argument is returned as it came.

    Example:
      With window 2, query 3 sees keys 2 and 3; with window None, keys 0, 1, 2, 3.
    """

    def attend(layer, q, k, v, cache):
        batch, rows, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        query, key = jnp.arange(rows)[:, None], jnp.arange(rows)[None, :]
        visible = key <= query
        if windows[layer] is not None:
            visible &= key > query - windows[layer]
        # Query heads g * group ... (g + 1) * group - 1 share K/V head g.
        grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("bighd,bjgd->bghij", grouped, k, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bghij,bjgd->bighd", weights, v, precision=precision, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), cache

    return attend

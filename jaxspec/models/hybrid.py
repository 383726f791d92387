"""The hybrid decoder as a flax module: attention and Gated DeltaNet layers, in the numbers of Qwen3-Next.

As in `Qwen3`, everything that is per row is computed here and what joins rows is the caller's: `attend` for the
attention layers, `recur` for the linear ones. A linear layer hands `recur` a function of its state, so that where the
state lies, and which of its versions are kept, is the caller's affair alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.hybrid_config import LINEAR, HybridConfig
from jaxspec.models.qwen3 import features, rotary_angles, rotate
from jaxspec.models.rows import Attend, dot, rms_norm
from jaxspec.recurrent.conv import short_conv
from jaxspec.recurrent.delta import gated_delta

# update(parts or None, real bool[B, T] or None, keep) -> (out [B, T, HV, V], parts after)
Update = Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]
# recur(layer, update, cache) -> (out [B, T, HV, V], cache)
Recur = Callable[[int, Update, Any], tuple[jax.Array, Any]]

_DECAYS = (1.0, 16.0)  # of a fresh model: A, and the step it is multiplied by
_STEPS = (1e-3, 1e-1)


def dense_recur(layer: int, update: Update, cache: Any) -> tuple[jax.Array, Any]:
    """A `recur` for whole texts: every request starts from a state of zeros, which is forgotten afterwards.

    Texts of different lengths go padded at their end: no row sees a later one.

    Raises:
      ValueError: there is a cache, so that more than a whole text is run and the state would have to be in it.
    """
    if cache is not None:
        raise ValueError(f"layer {layer} carries a state and a cache is given: give the recur that keeps it there")
    out, _ = update(None, None, "last")
    return out, None


def _matrix_init(key, shape, dtype=jnp.float32):
    return 0.02 * jax.random.normal(key, shape, dtype)


def _conv_init(key, shape, dtype=jnp.float32):
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _decay_init(key, shape, dtype=jnp.float32):
    """Logarithm of A, which is uniform."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *_DECAYS))


def _step_init(key, shape, dtype=jnp.float32):
    """What softplus turns into a step, whose logarithm is uniform."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, *np.log(_STEPS)))
    return step + jnp.log(-jnp.expm1(-step))


class HybridLayer(nn.Module):
    """One decoder layer: attention or Gated DeltaNet, then the gated MLP, each added to the residual."""

    config: HybridConfig
    layer: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, cos, sin, attend: Attend, recur: Recur, cache):
        config = self.config
        normed = self._norm("input_layernorm", x)
        if config.layer_types[self.layer] == LINEAR:
            mixed, cache = self._delta_net(normed, recur, cache)
        else:
            mixed, cache = self._attention(normed, cos, sin, attend, cache)
        x = x + mixed
        normed = self._norm("post_attention_layernorm", x)
        gate = self._project("gate_proj", normed, config.intermediate_size)
        up = self._project("up_proj", normed, config.intermediate_size)
        return x + self._project("down_proj", nn.silu(gate) * up, config.hidden_size), cache

    def _attention(self, x, cos, sin, attend, cache):
        config = self.config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def split_heads(value, count, width):
            return value.reshape(*value.shape[:-1], count, width)

        def turn(value):  # the first channels of a head; the others know no position
            turned = rotate(value[..., : config.rotary_dim], cos, sin)
            return jnp.concatenate([turned, value[..., config.rotary_dim :]], axis=-1)

        both = split_heads(self._project("q_proj", x, 2 * heads * head_dim), heads, 2 * head_dim)
        q, gate = jnp.split(both, 2, axis=-1)
        k = split_heads(self._project("k_proj", x, kv_heads * head_dim), kv_heads, head_dim)
        v = split_heads(self._project("v_proj", x, kv_heads * head_dim), kv_heads, head_dim)
        out, cache = attend(self.layer, turn(self._norm("q_norm", q)), turn(self._norm("k_norm", k)), v, cache)
        out = out * nn.sigmoid(gate)
        return self._project("o_proj", out.reshape(*x.shape[:-1], heads * head_dim), config.hidden_size), cache

    def _delta_net(self, x, recur, cache):
        config, dtype = self.config, self.dtype
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        shared = values // keys  # value heads that share a key head
        rows = x.shape[:-1]

        # The columns of both projections are grouped by key head: its q and k, then v and z of its value heads; and
        # beta and the step of its value heads.
        grouped = self._project("in_proj_qkvz", x, keys * (2 * key_dim + 2 * shared * value_dim))
        grouped = grouped.reshape(*rows, keys, -1)
        ends = np.cumsum([key_dim, key_dim, shared * value_dim])
        q, k, v, z = jnp.split(grouped, ends, axis=-1)
        inputs = jnp.concatenate([part.reshape(*rows, -1) for part in (q, k, v)], axis=-1)
        scalars = self._project("in_proj_ba", x, 2 * values, jnp.float32).reshape(*rows, keys, 2 * shared)
        b, a = (part.reshape(*rows, values) for part in jnp.split(scalars, 2, axis=-1))

        conv = self.param("conv1d", _conv_init, (config.conv_channels, config.linear_conv_kernel_dim))
        decay = jnp.exp(self.param("A_log", _decay_init, (values,)).astype(jnp.float32))
        step = nn.softplus(a + self.param("dt_bias", _step_init, (values,)).astype(jnp.float32))
        log_decay, beta = -decay * step, nn.sigmoid(b)

        def update(parts, real, keep, *, delta=gated_delta):
            """`parts` None is a state of zeros; `delta` is what runs the delta rule."""
            if parts is None:
                window = jnp.zeros((rows[0], config.linear_conv_kernel_dim - 1, config.conv_channels), dtype)
                parts = window, jnp.zeros((rows[0], values, value_dim, key_dim), jnp.float32)
            seen, window = short_conv(inputs, parts[0], conv, real=real, keep=keep)
            q, k, v = jnp.split(seen, np.cumsum([keys * key_dim, keys * key_dim]), axis=-1)
            q, k = (part.reshape(*rows, keys, key_dim) for part in (q, k))
            v = v.reshape(*rows, values, value_dim)
            out, state = delta(q, k, v, log_decay, beta, parts[1], real=real, keep=keep)
            return out, (window, state)

        out, cache = recur(self.layer, update, cache)
        scale = self.param("norm", nn.initializers.ones_init(), (value_dim,))
        out = rms_norm(out, scale, config.rms_norm_eps, jnp.float32)
        out = out * nn.silu(z.reshape(out.shape).astype(jnp.float32))
        return self._project("out_proj", out.astype(dtype).reshape(*rows, -1), config.hidden_size), cache

    def _norm(self, name, value):
        scale = self.param(name, nn.initializers.zeros_init(), (value.shape[-1],))
        return rms_norm(value, 1 + scale.astype(jnp.float32), self.config.rms_norm_eps, self.dtype)

    def _project(self, name, value, width, out_dtype=None):
        weight = self.param(name, _matrix_init, (value.shape[-1], width))
        return dot(value, weight, self.dtype, out_dtype=out_dtype)


class Hybrid(nn.Module):
    """The hybrid decoder: token rows in, logits and final hidden rows out.

    Fields:
      config: the model's shape.
      dtype: what the matrix products and the residual stream are computed in (float32 or bfloat16). Norms, rotary
        embedding, the delta rule and its state, and logits are float32 either way.

    Parameters, one array each: `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H] (absent if tied) and, under
    `layers_0`, `layers_1`, ..., the last words of the public names: matrices as [in, out], `conv1d` as [C, W]. Norm
    scales are stored less 1, but for a linear layer's `norm`.

    Example:
      >>> config = HybridConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2,
      ...                       layer_types=("linear_attention", "full_attention"), num_key_value_heads=1, head_dim=8,
      ...                       linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
      ...                       linear_value_head_dim=8)
      >>> from jaxspec.models import dense_attend
      >>> model, tokens = Hybrid(config), jnp.arange(6, dtype=jnp.int32)[None]
      >>> attend = dense_attend(config.windows)
      >>> params = model.init(jax.random.key(0), tokens, tokens, attend)
      >>> logits, hidden, _ = model.apply(params, tokens, tokens, attend)
      >>> logits.shape, hidden.shape
      ((1, 6, 64), (1, 6, 16))

    Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464); tensor names and conventions
    as of Qwen3-Next in Hugging Face transformers.
    """

    config: HybridConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Any = None,
        logit_rows: jax.Array | None = None,
        recur: Recur = dense_recur,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the model over B requests of T rows.

        Args:
          tokens, positions, attend, cache, logit_rows, taps: as `Qwen3` takes them; attention layers alone call
            `attend`.
          recur: called once a linear layer, in order among the calls of `attend`, as
            `recur(layer, update, cache) -> (out, cache)`. It runs `out, parts = update(parts, real, keep)` on what the
            layer carries: parts is (convolution window `dtype` [B, W - 1, C], state float32 [B, HV, V, K]), None for
            zeros; real is bool [B, T], None for all rows; keep is "last", or "rows" for what is carried after each row,
            with an axis T behind B. out is [B, T, HV, V].

        Returns:
          logits float32 [B, K or T, V]; hidden `dtype` [B, T, H], the stream after the final norm, or what is tapped
          [B, T, m * H]; the last cache.
        """
        config, dtype = self.config, self.dtype
        embedding = self.param("embed_tokens", _matrix_init, (config.vocab_size, config.hidden_size))
        x = jnp.take(embedding, tokens, axis=0, mode="clip").astype(dtype)
        cos, sin = rotary_angles(positions, config.rotary_dim, config.rope_theta)
        streams = []
        for layer in range(config.num_hidden_layers):
            block = HybridLayer(config, layer, dtype, name=f"layers_{layer}")
            x, cache = block(x, cos, sin, attend, recur, cache)
            streams.append(x)
        scale = self.param("norm", nn.initializers.zeros_init(), (config.hidden_size,))
        hidden = rms_norm(x, 1 + scale.astype(jnp.float32), config.rms_norm_eps, dtype)
        head = embedding
        if not config.tie_word_embeddings:
            head = self.param("lm_head", _matrix_init, (config.vocab_size, config.hidden_size))
        wanted = hidden
        if logit_rows is not None:
            wanted = jnp.take_along_axis(hidden, logit_rows[:, :, None], axis=1, mode="clip")
        logits = dot(wanted, head, dtype, transposed=True, out_dtype=jnp.float32)
        return logits, features(streams, taps) if taps else hidden, cache

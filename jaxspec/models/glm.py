"""The decoder of GLM-5.3-Flash as flax modules: delta attention, sparse latent attention, and blocks that look ahead.

As in `Qwen3` and `Hybrid`, everything that is per row is computed here and what joins rows is the caller's: `recur` for
the linear layers, and for the sparse ones an `attend` that gets, beside queries and latent rows, what the layer's
indexer says of each row. Which tokens a row looks at is then the caller's affair: all of them, or the best pools.

Latent attention is computed in its absorbed form: a head's query is brought into the space of the latent rows, which
are keys and values at once, and what attention gives is brought back into the head's own channels. No layer knows
positions other than by the order of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention.pooling import IndexRows, compress, quantize_query
from jaxspec.attention.selection import pool_scores, select_pools
from jaxspec.models.glm_config import SPARSE, GlmConfig
from jaxspec.models.hybrid import Recur, dense_recur
from jaxspec.models.qwen3 import features
from jaxspec.models.rows import dot, rms_norm
from jaxspec.recurrent.conv import short_conv
from jaxspec.recurrent.delta import gated_delta
from jaxspec.recurrent.gates import kda_gate

# attend(layer, q [B, T, heads, L], k [B, T, 1, L], None, IndexRows, cache, scale=) -> (out [B, T, heads, L], cache)
AttendPooled = Callable[..., tuple[jax.Array, Any]]

_INDEX_EPS = 1e-6  # of the layer norm of index keys
_FORGET = (1e-3, 1.0)  # what a row of a fresh model forgets: the logarithms of its decays, less the sign


def dense_attend_pooled(config: GlmConfig, *, sparse: bool = True) -> AttendPooled:
    """An `attend` for whole texts without a cache: each request's rows are its keys.

    Args:
      config: of the model.
      sparse: a row sees the tokens of its best pools and the live tail, with index keys and scores rounded as they are
        in a cache; False lets it see every earlier row, and the index is not looked at.

    Returns:
      The function. Its scores are [B, heads, T, T]; texts of different lengths go padded at their end. The cache
      argument is returned as it came.

    Example:
      With pool 4 and a budget of 8 tokens, row 17 of a text sees two of the pools 0 to 3 and tokens 16 and 17.
    """

    def attend(layer, q, k, v, index, cache, *, scale):
        rows = q.shape[1]
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        visible = np.tri(rows, dtype=bool)[None]
        if sparse:
            visible = visible & _selected(config, index, rows)
        latent = k[:, :, 0]
        scores = jnp.einsum("bihl,bjl->bhij", q, latent, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(visible[:, None], scores * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(latent.dtype)
        out = jnp.einsum("bhij,bjl->bihl", weights, latent, precision=precision, preferred_element_type=jnp.float32)
        return out.astype(q.dtype), cache

    return attend


def _selected(config, index, rows):
    """Which tokens of the pools that a row picks, or of its live tail, bool [B, T, T]; later ones may be among them."""
    pool, whole, batch = config.index_kpool, rows // config.index_kpool, index.key.shape[0]
    closed = np.arange(1, rows + 1) // pool
    tail = np.arange(rows) // pool >= closed[:, None]
    if not whole:
        return jnp.asarray(tail)[None]

    def pools(x):
        return x[:, : whole * pool].astype(jnp.bfloat16).reshape(batch, whole, pool, -1)

    keys, scales = compress(pools(index.key), pools(index.score), index.ape)
    queries, factors = quantize_query(index.query)
    scores = pool_scores(queries, index.weight * factors * config.index_head_dim**-0.5, keys, scales)
    closed = jnp.broadcast_to(jnp.asarray(closed, jnp.int32), (batch, rows))
    chosen = select_pools(scores, closed, config.index_topk // pool)
    chosen = jnp.where(chosen < 0, whole, chosen)
    each, row = np.arange(batch)[:, None, None], np.arange(rows)[None, :, None]
    picked = jnp.zeros((batch, rows, whole + 1), bool).at[each, row, chosen].set(True, mode="promise_in_bounds")
    picked = picked.at[..., whole].set(False)  # where the places without a pool went
    return jnp.repeat(picked, pool, axis=-1)[..., :rows] | tail


def _matrix_init(key, shape, dtype=jnp.float32):
    return 0.02 * jax.random.normal(key, shape, dtype)


def _conv_init(key, shape, dtype=jnp.float32):
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _forget_init(lower_bound):
    """Channels that forget at speeds of all magnitudes, for A = 1."""

    def init(key, shape, dtype=jnp.float32):
        forget = jnp.exp(jax.random.uniform(key, shape, dtype, *np.log(_FORGET)))
        if lower_bound is None:
            return forget + jnp.log(-jnp.expm1(-forget))
        share = forget / -lower_bound
        return jnp.log(share) - jnp.log1p(-share)

    return init


class _Rows(nn.Module):
    """What the modules here have in common: norms and projections."""

    config: GlmConfig
    dtype: Any = jnp.float32

    def _norm(self, name, value):
        scale = self.param(name, nn.initializers.ones_init(), (value.shape[-1],))
        return rms_norm(value, scale, self.config.rms_norm_eps, self.dtype)

    def _project(self, name, value, width, out_dtype=None):
        weight = self.param(name, _matrix_init, (value.shape[-1], width))
        return dot(value, weight, self.dtype, out_dtype=out_dtype)


class GlmIndexer(_Rows):
    """What a sparse layer's indexer says of each row: `IndexRows` from the layer's input and its query latents."""

    @nn.compact
    def __call__(self, x, latents) -> IndexRows:
        config = self.config
        heads, width = config.index_n_heads, config.index_head_dim
        query = self._project("wq_b", latents, heads * width).reshape(*x.shape[:-1], heads, width)
        wide = self.param("weights_proj", _matrix_init, (x.shape[-1], heads))
        weight = dot(x, wide, jnp.float32) * heads**-0.5
        key = self._project("wk", x, width).astype(jnp.float32)
        key = key - jnp.mean(key, axis=-1, keepdims=True)
        key = key * lax.rsqrt(jnp.mean(key * key, axis=-1, keepdims=True) + _INDEX_EPS)
        key = key * self.param("k_norm", nn.initializers.ones_init(), (width,)).astype(jnp.float32)
        key = key + self.param("k_norm_bias", nn.initializers.zeros_init(), (width,)).astype(jnp.float32)
        score = self._project("index_kpool_compress_gate", x, width)
        ape = self.param("index_kpool_compress_ape", nn.initializers.zeros_init(), (config.index_kpool, width))
        return IndexRows(query, weight, key.astype(self.dtype), score, ape.astype(jnp.float32))


class GlmLayer(_Rows):
    """One decoder layer: delta attention or sparse latent attention, then the gated MLP, each added to the residual.

    Fields:
      kind: "linear_attention" or "deepseek_sparse_attention".
      layer: what `attend` and `recur` are told.
    """

    kind: str = SPARSE
    layer: int = 0

    @nn.compact
    def __call__(self, x, attend: AttendPooled, recur: Recur | None, cache):
        normed = self._norm("input_layernorm", x)
        if self.kind == SPARSE:
            mixed, cache = self._latent_attention(normed, attend, cache)
        else:
            mixed, cache = self._delta_attention(normed, recur, cache)
        x = x + mixed
        normed = self._norm("post_attention_layernorm", x)
        gate = self._project("gate_proj", normed, self.config.intermediate_size)
        up = self._project("up_proj", normed, self.config.intermediate_size)
        return x + self._project("down_proj", nn.silu(gate) * up, x.shape[-1]), cache

    def _latent_attention(self, x, attend, cache):
        config, dtype = self.config, self.dtype
        heads, inner, outer = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        rows = x.shape[:-1]
        latents = self._norm("q_a_layernorm", self._project("q_a_proj", x, config.q_lora_rank))
        query = self._project("q_b_proj", latents, heads * inner).reshape(*rows, heads, inner)
        row = self._norm("kv_a_layernorm", self._project("kv_a_proj_with_mqa", x, config.kv_lora_rank))
        # An indexer learns what attention looks at, and moves nothing of the layer that it serves.
        index = GlmIndexer(config, dtype, name="indexer")(lax.stop_gradient(x), lax.stop_gradient(latents))

        # What makes a head's keys and values of a latent row; neither is ever computed.
        both = self.param("kv_b_proj", _matrix_init, (config.kv_lora_rank, heads * (inner + outer)))
        both = both.astype(dtype).reshape(config.kv_lora_rank, heads, inner + outer)
        precision = lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
        query = jnp.einsum("bthn,lhn->bthl", query, both[:, :, :inner], precision=precision)
        out, cache = attend(self.layer, query, row[:, :, None], None, index, cache, scale=config.softmax_scale)
        out = jnp.einsum("bthl,lhv->bthv", out.astype(dtype), both[:, :, inner:], precision=precision)
        return self._project("o_proj", out.reshape(*rows, heads * outer), x.shape[-1]), cache

    def _delta_attention(self, x, recur, cache):
        config, dtype = self.config, self.dtype
        heads, width, taps = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
        rows, channels = x.shape[:-1], heads * width
        inputs = jnp.concatenate([self._project(f"{name}_proj", x, channels) for name in "qkv"], axis=-1)
        conv = jnp.concatenate([self.param(f"{name}_conv1d", _conv_init, (channels, taps)) for name in "qkv"])
        beta = nn.sigmoid(self._project("b_proj", x, heads, jnp.float32))
        forget = self._project("f_b_proj", self._project("f_a_proj", x, width), channels, jnp.float32)
        A_log = self.param("A_log", nn.initializers.zeros_init(), (heads,))
        dt_bias = self.param("dt_bias", _forget_init(config.gate_lower_bound), (channels,))
        log_decay = kda_gate(
            forget.reshape(*rows, heads, width), A_log, dt_bias.reshape(heads, width), config.gate_lower_bound
        )

        def update(parts, real, keep, *, delta=gated_delta):
            """`parts` None is a state of zeros; `delta` is what runs the delta rule."""
            if parts is None:
                window = jnp.zeros((rows[0], taps - 1, 3 * channels), dtype)
                parts = window, jnp.zeros((rows[0], heads, width, width), jnp.float32)
            seen, window = short_conv(inputs, parts[0], conv, real=real, keep=keep)
            q, k, v = (part.reshape(*rows, heads, width) for part in jnp.split(seen, 3, axis=-1))
            out, state = delta(q, k, v, log_decay, beta, parts[1], real=real, keep=keep)
            return out, (window, state)

        out, cache = recur(self.layer, update, cache)
        scale = self.param("o_norm", nn.initializers.ones_init(), (width,))
        out = rms_norm(out, scale, config.rms_norm_eps, jnp.float32)
        gate = self._project("g_b_proj", self._project("g_a_proj", x, width), channels, jnp.float32)
        out = out * nn.sigmoid(gate.reshape(out.shape))
        return self._project("o_proj", out.astype(dtype).reshape(*rows, channels), x.shape[-1]), cache


class Glm(_Rows):
    """The decoder: token rows in, logits and final hidden rows out.

    Fields:
      config: the model's shape.
      dtype: what the matrix products and the residual stream are computed in (float32 or bfloat16). Norms, decays, the
        delta rule and its state, the indexer's weights and logits are float32 either way.

    Parameters, one array each: `embed_tokens` [V, H], `norm` [H], `lm_head` [V, H] (absent if tied) and, under
    `layers_0`, `layers_1`, ..., the last words of the public names, those of an indexer under `indexer`, the bias of
    its norm as `k_norm_bias`: matrices as [in, out], convolutions as [C, W].

    Example:
      >>> config = GlmConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2,
      ...                    layer_types=("linear_attention", "deepseek_sparse_attention"), q_lora_rank=8,
      ...                    kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8, linear_num_heads=2, linear_head_dim=8,
      ...                    index_n_heads=1, index_head_dim=16, index_topk=8, index_kpool=4)
      >>> model, tokens = Glm(config), jnp.arange(6, dtype=jnp.int32)[None]
      >>> attend = dense_attend_pooled(config)
      >>> run = lambda key: model.init_with_output(key, tokens, tokens, attend)[0]
      >>> logits, hidden, _ = jax.eval_shape(run, jax.random.key(0))
      >>> logits.shape, hidden.shape
      ((1, 6, 64), (1, 6, 16))

    Source: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv 2510.26692), "DeepSeek-V2"
    (arXiv 2405.04434) for latent attention; tensor names and the indexer as of GLM-5.3-Flash in Hugging Face
    transformers.
    """

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: AttendPooled,
        cache: Any = None,
        logit_rows: jax.Array | None = None,
        recur: Recur = dense_recur,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the model over B requests of T rows.

        Args:
          tokens: int32 [B, T], ids in [0, V).
          positions: int32 [B, T]; not looked at, as no layer knows positions.
          attend: called once a sparse layer as `attend(layer, q, k, None, index, cache, scale=) -> (out, cache)`: q
            [B, T, heads, L] absorbed queries, k [B, T, 1, L] latent rows, which are the values too, index the
            `IndexRows` of the layer, scale a factor on the scores; out [B, T, heads, L].
          cache: handed from call to call; None where nothing is kept.
          logit_rows: int32 [B, K], which rows of each request to compute logits of; None for all.
          recur: called once a linear layer, as `Hybrid` calls it; what it carries is (convolution window `dtype`
            [B, W - 1, C], state float32 [B, HV, K, K]).
          taps: as `Qwen3` takes them.

        Returns:
          logits float32 [B, K or T, V]; hidden `dtype` [B, T, H], the stream after the final norm, or what is tapped
          [B, T, m * H]; the last cache.
        """
        del positions
        config, dtype = self.config, self.dtype
        embedding = self.param("embed_tokens", _matrix_init, (config.vocab_size, config.hidden_size))
        x = jnp.take(embedding, tokens, axis=0, mode="clip").astype(dtype)
        streams = []
        for layer, kind in enumerate(config.layer_types):
            x, cache = GlmLayer(config, dtype, kind, layer, name=f"layers_{layer}")(x, attend, recur, cache)
            streams.append(x)
        hidden = self._norm("norm", x)
        head = embedding
        if not config.tie_word_embeddings:
            head = self.param("lm_head", _matrix_init, (config.vocab_size, config.hidden_size))
        logits = _logits(hidden, head, logit_rows, dtype)
        return logits, features(streams, taps) if taps else hidden, cache


class GlmMTP(_Rows):
    """A block that predicts one token further: from a token and the hidden row before it to the token after it.

    Fields:
      config, dtype: as in `Glm`.
      depth: which of the blocks it is, from 0; the layer that `attend` is told.

    Row p is given the token at p + 1 and a hidden row of p, and predicts the token at p + 2. Its own hidden row goes in
    place of the model's where the block, or the next one, continues from its own prediction.

    Parameters: `enorm`, `hnorm`, `norm` [H], `eh_proj` [2 H, H] and, under `block`, those of a sparse layer. Embedding
    and head are the model's.

    Source: "DeepSeek-V3" (arXiv 2412.19437) for multi-token prediction; stored as GLM-5.3-Flash stores it.
    """

    depth: int = 0

    @nn.compact
    def __call__(
        self,
        embedding: jax.Array,
        head: jax.Array,
        tokens: jax.Array,
        hidden: jax.Array,
        attend: AttendPooled,
        cache: Any = None,
        logit_rows: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the block over B requests of T rows.

        Args:
          embedding, head: [V, H], the model's.
          tokens: int32 [B, T], those that follow the rows.
          hidden: [B, T, H], the model's hidden rows, or rows that a block returned.
          attend, cache, logit_rows: as `Glm` takes them; one call of `attend`.

        Returns:
          logits float32 [B, K or T, V]; hidden `dtype` [B, T, H], after the norm before the head; the last cache.
        """
        config, dtype = self.config, self.dtype
        embedded = self._norm("enorm", jnp.take(embedding, tokens, axis=0, mode="clip").astype(dtype))
        pair = jnp.concatenate([embedded, self._norm("hnorm", hidden)], axis=-1)
        x = self._project("eh_proj", pair, config.hidden_size)
        x, cache = GlmLayer(config, dtype, SPARSE, self.depth, name="block")(x, attend, None, cache)
        hidden = self._norm("norm", x)
        return _logits(hidden, head, logit_rows, dtype), hidden, cache


def _logits(hidden, head, logit_rows, dtype):
    if logit_rows is not None:
        hidden = jnp.take_along_axis(hidden, logit_rows[:, :, None], axis=1, mode="clip")
    return dot(hidden, head, dtype, transposed=True, out_dtype=jnp.float32)

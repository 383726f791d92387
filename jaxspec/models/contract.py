"""What a model is to the step: a function, and what its layers keep.

Any function with this signature plugs in, whatever framework it comes from:

    logits, hidden, cache = apply(params, tokens, positions, cache, metadata)

    params     the model's weights, any pytree
    tokens     int32[B, D], ids in [0, vocab_size); padded rows hold some id in range
    positions  int32[B, D], absolute positions, consecutive in a row. Padded rows may lie past context_len: compute
               rotary angles, or clip before looking a position up in a table
    cache      `KVCache` or, with unified memory, `PoolCache`; written and read through
               `jaxspec.attend(cache, layer, q, k, v, metadata)`, once an attention layer,
               `jaxspec.attention.attend_pooled(cache, layer, q, k, v, index, metadata)`, once a layer that selects, and
               `jaxspec.recurrent.recur(cache, layer, update, metadata)`, once a layer whose state accumulates
    metadata   `ForwardMetadata` of this forward; `metadata.logit_rows` (int32[B, K] or None) names the rows
               whose logits are wanted
    logits     float32[B, D or K, V]
    hidden     [B, D, H], the residual stream after the final norm, all rows; of a model that is tapped
               [B, D, m * H], what its `tapped` says
    cache      the cache after the writes

It must be pure, and a row's result may depend only on that row's request. Rows that are padding may yield
anything, NaN included.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.attention import attend
from jaxspec.attention.kpool import attend_pooled
from jaxspec.cache import KPoolSpec, KVCache, LayerSpec, PoolCache, StatePart, StateSpec
from jaxspec.cache.layers import ACCUMULATED, POSITION
from jaxspec.errors import InputError
from jaxspec.models.glm import Glm, GlmMTP
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.hybrid_config import LINEAR
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.rows import Rows
from jaxspec.recurrent import recur

Array = jax.Array


# apply(params, tokens, positions, cache, metadata) -> (logits, hidden, cache)
Apply = Callable[[Any, Array, Array, KVCache | PoolCache, Any], tuple[Array, Array, KVCache | PoolCache]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as the step sees it: static and hashable, so that two equal models share one compiled step.

    Attributes:
      apply: the function above. Give it value equality (a frozen dataclass with `__call__`) if you build it more than
        once.
      layers: what each layer keeps, in layer order: `LayerSpec` of a token, or `StateSpec` of a request.
      vocab_size: V.
      context_len: most tokens a sequence may hold, prompt and completion together.
      dtype: dtype of the cache, as a string.
      tap: `tap(layers)` is an `apply` that returns as hidden what `tapped` describes; None where drafters cannot look
        at the layers. Give it value equality, like `apply`.
    """

    apply: Apply
    layers: tuple[LayerSpec | StateSpec, ...]
    vocab_size: int
    context_len: int
    dtype: str = "float32"
    tap: Callable[[tuple[int, ...]], Apply] | None = None

    def __post_init__(self):
        pools = {(spec.pool, spec.topk) for spec in self.layers if isinstance(spec, KPoolSpec)}
        if len(pools) > 1:
            raise ValueError(
                f"layers: (pool, topk) of the sparse ones are {sorted(pools)}; a model has one pair, since all of them "
                "share a forward's metadata"
            )

    def tapped(self, layers: tuple[int, ...]) -> "Model":
        """The same model, with other hidden rows: features that a drafter feeds on.

        Args:
          layers: m layers, counted from 0, at least one.

        Returns:
          A model whose hidden is [B, D, m * H]: the residual streams behind those layers, side by side in the order
          given, before any norm of the next layer or of the head. Logits and cache are the same.

        Raises:
          InputError: the model has no `tap`, or it has no such layer.
        """
        layers = tuple(layers)
        if self.tap is None:
            raise InputError(
                f"layers={layers}: this target cannot be tapped for hidden rows of its layers: give its Model a `tap`"
            )
        unknown = [layer for layer in layers if not 0 <= layer < len(self.layers)]
        if unknown or not layers:
            raise InputError(
                f"layers={layers}: the target has {len(self.layers)}, counted from 0; name at least one "
                "and none beyond them"
            )
        return dataclasses.replace(self, apply=self.tap(layers))

    @property
    def swa_window(self) -> int | None:
        """The largest window among layers stored in SWA pages; None if there is none."""
        windows = [spec.window for spec in self.layers if spec.carries == POSITION and spec.storage == "swa"]
        return max(windows) if windows else None

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps something of each request: a recurrent one its state, one with compressed keys its
        ring."""
        return any(spec.carries == ACCUMULATED or isinstance(spec, KPoolSpec) for spec in self.layers)

    @property
    def sparse(self) -> KPoolSpec | None:
        """How the sparse layers select tokens, the same for all of them; None if there is none."""
        return next((spec for spec in self.layers if isinstance(spec, KPoolSpec)), None)


@dataclasses.dataclass(frozen=True)
class FlaxApply:
    """Binds a module to the contract; with `taps` its hidden rows are the features of those layers."""

    module: Qwen3 | Hybrid | Glm
    taps: tuple[int, ...] = ()

    def __call__(self, params, tokens, positions, cache, metadata):
        def store_and_attend(layer, q, k, v, cache, heads=None):
            return attend(cache, layer, q, k, v, metadata, heads=heads)

        def select_and_attend(layer, q, k, v, index, cache, *, scale):
            return attend_pooled(cache, layer, q, k, v, index, metadata, scale=scale)[:2]

        def advance(layer, update, cache):
            return recur(cache, layer, update, metadata)

        dense = isinstance(self.module, Qwen3)
        carried = {"rows": Rows(metadata.backend, turns=True)} if dense else {"recur": advance}
        joined = select_and_attend if isinstance(self.module, Glm) else store_and_attend
        rows = metadata.logit_rows
        return self.module.apply(params, tokens, positions, joined, cache, logit_rows=rows, taps=self.taps, **carried)


@dataclasses.dataclass(frozen=True)
class FlaxTap:
    """`Model.tap` of a module."""

    module: Qwen3 | Hybrid | Glm

    def __call__(self, layers: tuple[int, ...]) -> FlaxApply:
        return FlaxApply(self.module, layers)


def from_qwen3(module: Qwen3, *, swa_pages: bool = True) -> Model:
    """The contract for a Qwen3 module.

    Args:
      module: the flax module.
      swa_pages: keep sliding layers in SWA pages, which are retired behind the window. False keeps them in FULL pages,
        as a draft does that follows the target's FULL page table.
    """
    return _model(module, tuple(_attention_layer(module.config, window, swa_pages) for window in module.config.windows))


def from_hybrid(module: Hybrid) -> Model:
    """The contract for a hybrid module: sliding layers in SWA pages; a linear layer's state is its convolution window,
    in the module's dtype, and its temporal state, in float32."""
    config = module.config
    window = StatePart(
        "conv", (config.linear_conv_kernel_dim - 1, config.conv_channels), jax.numpy.dtype(module.dtype).name
    )
    temporal = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    state = StateSpec((window, StatePart("temporal", temporal)))
    layers = (
        state if kind == LINEAR else _attention_layer(config, window, True)
        for kind, window in zip(config.layer_types, config.windows, strict=True)
    )
    return _model(module, tuple(layers))


def from_glm(module: Glm) -> Model:
    """The contract for a Glm module: a sparse layer keeps one latent row a token, key and value at once, and what its
    indexer needs; a linear one its convolution window, in the module's dtype, and its temporal state, in float32."""
    config = module.config
    window = (config.linear_conv_kernel_dim - 1, config.conv_channels)
    temporal = (config.linear_num_heads, config.linear_head_dim, config.linear_head_dim)
    state = StateSpec((StatePart("conv", window, jax.numpy.dtype(module.dtype).name), StatePart("temporal", temporal)))
    layers = (state if kind == LINEAR else _latent_layer(config) for kind in config.layer_types)
    return _model(module, tuple(layers))


@dataclasses.dataclass(frozen=True)
class MTPBlocks:
    """A target's prediction blocks: static and hashable, like `Model`.

    Attributes:
      apply: `(params, block, tokens, hidden, positions, attend, cache, logit_rows) -> (logits, hidden, cache)`: block
        number `block` (static) over tokens int32[B, C] and hidden [B, C, H];
        `attend(layer, q, k, v, index, cache, scale=)` is called once, for layer `block`; logits float32[B, K, V] of the
        rows that logit_rows int32[B, K] names; hidden [B, C, H], what the next step of a chain takes.
      layers: what each block keeps for a token.
      hidden_size: H.
      vocab_size: V.
      dtype: of the hidden rows and the cache, as a string.
    """

    apply: Callable[..., tuple[Array, Array, Any]]
    layers: tuple[KPoolSpec, ...]
    hidden_size: int
    vocab_size: int
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class GlmBlocksApply:
    """Binds the MTP blocks of a Glm module to what `MTPBlocks.apply` is called with.

    Its params are `{"blocks": {"blocks_0": tree, ...}, "embed_tokens": [V, H]}`, and `lm_head` where the model has one
    of its own. Without logit_rows logits are those of all rows.
    """

    module: Glm

    def __call__(self, params, block, tokens, hidden, positions, attend, cache=None, logit_rows=None):
        del positions  # no layer knows them
        embedding = params["embed_tokens"]
        return GlmMTP(self.module.config, self.module.dtype, block).apply(
            {"params": params["blocks"][f"blocks_{block}"]},
            embedding,
            params.get("lm_head", embedding),
            tokens,
            hidden,
            attend,
            cache,
            logit_rows,
        )


def blocks_of_glm(module: Glm) -> MTPBlocks:
    """The MTP blocks that a Glm module's configuration names."""
    config = module.config
    return MTPBlocks(
        apply=GlmBlocksApply(module),
        layers=(_latent_layer(config),) * config.num_nextn_predict_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=jax.numpy.dtype(module.dtype).name,
    )


def _latent_layer(config):
    return KPoolSpec(
        num_kv_heads=1,
        head_dim=config.kv_lora_rank,
        value_dim=0,
        pool=config.index_kpool,
        topk=config.index_topk,
        index_dim=config.index_head_dim,
    )


def _attention_layer(config, window, swa_pages):
    storage = "swa" if window is not None and swa_pages else "full"
    return LayerSpec(config.num_key_value_heads, config.head_dim, window, storage=storage)


def _model(module, layers):
    config = module.config
    return Model(
        apply=FlaxApply(module),
        layers=layers,
        vocab_size=config.vocab_size,
        context_len=config.max_position_embeddings,
        dtype=jax.numpy.dtype(module.dtype).name,
        tap=FlaxTap(module),
    )

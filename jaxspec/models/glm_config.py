"""The shape of a model like GLM-5.3-Flash, read from and written to a `config.json` in its public naming.

Such a model mixes Kimi Delta Attention, which carries a state of fixed size, with latent attention that looks at a few
tokens only, picked by the compressed keys of an indexer (KPool). One or more blocks that predict tokens further ahead
(MTP) lie behind its layers. What the public model has besides, a mixture of experts and several residual streams, is
refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InputError
from jaxspec.models.config import (
    DEFAULT_CONTEXT,
    check_eos_ids,
    check_sizes,
    eos_ids,
    is_int,
    read_size,
    refuse_unsupported,
)
from jaxspec.models.hybrid_config import LINEAR

SPARSE = "deepseek_sparse_attention"

# What the public configuration class assumes for a key that is absent from the file.
_DEFAULT_EPS = 1e-5
_DEFAULT_CONV = 4
_INTERVAL = 4


@dataclasses.dataclass(frozen=True)
class GlmConfig:
    """Sizes and constants of one model: hashable, so a jitted function may take it as a static argument.

    Fields:
      vocab_size: V, token ids are 0 to V - 1.
      hidden_size: H, width of the residual stream.
      intermediate_size: width of the gated MLP.
      layer_types: one entry a layer: "linear_attention" (Kimi Delta Attention) or "deepseek_sparse_attention" (latent
        attention to what an indexer picks).
      num_attention_heads: query heads of the sparse layers.
      q_lora_rank: channels from which the queries of attention and of the indexer are made.
      kv_lora_rank: L, channels of the row that a sparse layer keeps for a token, its key and its value at once.
      qk_nope_head_dim, v_head_dim: channels of a head's query, and of what it gives.
      linear_num_heads, linear_head_dim: HV and K of the linear layers; queries, keys and values are alike.
      linear_conv_kernel_dim: W, taps of the short convolution, at least 2.
      gate_lower_bound: the least logarithm of a decay, below 0; None where the decay has no bound.
      index_n_heads, index_head_dim: HI and X of the indexer; X is a power of two, at least 16.
      index_topk: tokens that a query looks at, a multiple of index_kpool.
      index_kpool: p, neighbouring tokens that share one index key, a power of two, at least 2.
      num_nextn_predict_layers: MTP blocks stored behind the layers; may be 0.
      index_share_for_mtp_iteration: further steps of an MTP block look at what its first one picked.
      rms_norm_eps, max_position_embeddings, tie_word_embeddings, eos_token_ids: as in `Qwen3Config`.

    Raises:
      InputError: a field breaks a rule above.

    Example:
      >>> config = GlmConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_attention_heads=2,
      ...                    layer_types=("linear_attention",) * 3 + ("deepseek_sparse_attention",), q_lora_rank=24,
      ...                    kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16, linear_num_heads=2,
      ...                    linear_head_dim=16, index_n_heads=2, index_head_dim=32, index_topk=16, index_kpool=4)
      >>> config.num_hidden_layers, config.sparse_layers, config.conv_channels
      (4, (3,), 96)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    linear_num_heads: int
    linear_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    linear_conv_kernel_dim: int = _DEFAULT_CONV
    gate_lower_bound: float | None = -5.0
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    rms_norm_eps: float = _DEFAULT_EPS
    max_position_embeddings: int = DEFAULT_CONTEXT
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        check_sizes(self, _SIZES)
        if not self.layer_types:
            raise InputError("layer_types is empty: a model has at least one layer")
        unknown = sorted({str(kind) for kind in self.layer_types} - {LINEAR, SPARSE})
        if unknown:
            raise InputError(f"layer_types holds {unknown}: only {LINEAR!r} and {SPARSE!r} are supported")
        if self.linear_conv_kernel_dim < 2:
            raise InputError("linear_conv_kernel_dim is 1: a convolution of one tap looks at no earlier token; give 2")
        if self.gate_lower_bound is not None and not (_is_number(self.gate_lower_bound) and self.gate_lower_bound < 0):
            raise InputError(f"gate_lower_bound is {self.gate_lower_bound!r}: it must be a number below 0, or null")
        for name, least in (("index_kpool", 2), ("index_head_dim", 16)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise InputError(f"{name} is {value}: it must be a power of two, at least {least}")
        if self.index_topk % self.index_kpool:
            raise InputError(
                f"index_topk is {self.index_topk}: tokens are picked by whole pools, so it must be a multiple of "
                f"index_kpool ({self.index_kpool})"
            )
        if not is_int(self.num_nextn_predict_layers) or self.num_nextn_predict_layers < 0:
            raise InputError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers!r}: it must be an integer of at least 0"
            )
        if not (_is_number(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise InputError(f"rms_norm_eps is {self.rms_norm_eps!r}: it must be a number above 0")
        check_eos_ids(self.eos_token_ids, self.vocab_size)

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers; MTP blocks are not counted."""
        return len(self.layer_types)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind == SPARSE)

    @property
    def conv_channels(self) -> int:
        """C, channels of the short convolutions: queries, keys and values of a linear layer, side by side."""
        return 3 * self.linear_num_heads * self.linear_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores of attention: that of a head's own width, not of the latent row's."""
        return self.qk_nope_head_dim**-0.5

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GlmConfig:
        """Reads the parsed `config.json` of a text-only folder.

        Layers: `layer_types`, or every fourth one sparse and the rest linear. MLPs are dense if `mlp_layer_types` says
        so, or `first_k_dense_replace` reaches the last layer. MTP blocks are stored as layers behind the last one.

        Raises:
          InputError: another architecture, a setting this library does not compute (experts, several residual streams,
            rotary embedding, an indexer without compression among them), a missing or malformed key.

        Source: the public configuration of GLM-5.3-Flash (`glm5_next_text`).
        """
        if config.get("model_type") != "glm5_next_text":
            raise InputError(
                f"model_type is {config.get('model_type')!r}: a text model like GLM-5.3-Flash has 'glm5_next_text'"
            )
        architectures = config.get("architectures")
        if architectures and "Glm5NextForCausalLM" not in architectures:
            raise InputError(f"architectures is {architectures!r}: only ['Glm5NextForCausalLM'] is supported")
        refuse_unsupported(config)
        layers = read_size(config, "num_hidden_layers")
        _refuse_experts(config, layers)
        _refuse_other_attention(config, layers)
        linear = config.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise InputError(f"linear_attn_config is {linear!r}: it must be an object with num_heads and head_dim")
        if "gate_lower_bound" not in linear:  # readers differ in what they take for granted
            raise InputError("linear_attn_config has no gate_lower_bound: give a number below 0, or null for none")
        return cls(
            **{name: read_size(config, name) for name in _REQUIRED},
            layer_types=_layer_types(config, layers),
            linear_num_heads=_read_linear(linear, "num_heads"),
            linear_head_dim=_read_linear(linear, "head_dim"),
            linear_conv_kernel_dim=linear.get("short_conv_kernel_size", _DEFAULT_CONV),
            gate_lower_bound=linear["gate_lower_bound"],
            num_nextn_predict_layers=config.get("num_nextn_predict_layers", 0),
            index_share_for_mtp_iteration=bool(config.get("index_share_for_mtp_iteration", False)),
            rms_norm_eps=config.get("rms_norm_eps", _DEFAULT_EPS),
            max_position_embeddings=config.get("max_position_embeddings", DEFAULT_CONTEXT),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids(config),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict` reads back to this model."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        layers = self.num_hidden_layers
        return {
            "architectures": ["Glm5NextForCausalLM"],
            "model_type": "glm5_next_text",
            **{name: getattr(self, name) for name in _REQUIRED},
            "num_hidden_layers": layers,
            "num_key_value_heads": self.num_attention_heads,
            "layer_types": list(self.layer_types),
            "linear_attn_config": {
                "num_heads": self.linear_num_heads,
                "head_dim": self.linear_head_dim,
                "short_conv_kernel_size": self.linear_conv_kernel_dim,
                "gate_lower_bound": self.gate_lower_bound,
            },
            "qk_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": 0,
            "mla_use_nope": True,
            "indexer_types": ["full"] * layers,
            "index_kpool_always_select_tail": True,
            "index_kpool_compress": True,
            "index_share_for_mtp_iteration": self.index_share_for_mtp_iteration,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "first_k_dense_replace": layers,
            "mlp_layer_types": ["dense"] * layers,
            "n_routed_experts": None,
            "mhc": False,
            "swiglu_limit": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": None,
            "eos_token_id": eos,
        }


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_kpool",
)
_SIZES = (*_REQUIRED, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "max_position_embeddings")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_linear(linear, name: str) -> int:
    try:
        return read_size(linear, name)
    except InputError as error:
        raise InputError(f"linear_attn_config: {error}") from None


def _layer_types(config, layers: int) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(SPARSE if layer % _INTERVAL == _INTERVAL - 1 else LINEAR for layer in range(layers))
    return _one_a_layer(config, "layer_types", layers)


def _one_a_layer(config, name: str, layers: int) -> tuple[str, ...]:
    value = config[name]
    if not isinstance(value, list | tuple) or len(value) != layers:
        raise InputError(f"{name} is {value!r} for num_hidden_layers {layers}: it must be a list, one a layer")
    return tuple(value)


def _refuse_experts(config, layers: int) -> None:
    if config.get("mlp_layer_types") is not None:
        kinds = _one_a_layer(config, "mlp_layer_types", layers)
    else:
        dense = config.get("first_k_dense_replace", 0)
        if not is_int(dense) or dense < 0:
            raise InputError(f"first_k_dense_replace is {dense!r}: it must be an integer of at least 0")
        kinds = ("dense",) * min(dense, layers) + ("sparse",) * (layers - dense)
    mixtures = [layer for layer, kind in enumerate(kinds) if kind != "dense"]
    if mixtures:
        shown = ", ".join(map(str, mixtures[:5])) + (f" and {len(mixtures) - 5} more" if len(mixtures) > 5 else "")
        raise InputError(
            f"the MLP of layers {shown} is a mixture of experts: only dense MLPs are supported, which mlp_layer_types "
            "or first_k_dense_replace says"
        )
    if config.get("swiglu_limit") is not None:
        raise InputError(f"swiglu_limit is {config['swiglu_limit']!r}: only an MLP without a limit is supported")


def _refuse_other_attention(config, layers: int) -> None:
    """Raises for everything that changes numbers and that this library has one way of."""
    if config.get("mhc", True):
        raise InputError("mhc is not false: only a model of one residual stream is supported")
    for name, wanted, absent in _ONLY:
        value = config.get(name, absent)
        if value != wanted:
            raise InputError(f"{name} is {value!r}: only {wanted!r} is supported")
    if config.get("indexer_types") is not None and set(_one_a_layer(config, "indexer_types", layers)) != {"full"}:
        raise InputError(f"indexer_types is {config['indexer_types']!r}: only an indexer in each layer is supported")


_ONLY = (  # key, the one supported value, what its absence means
    ("qk_rope_head_dim", 0, 0),
    ("mla_use_nope", True, True),
    ("index_kpool_always_select_tail", True, None),
    ("index_kpool_compress", True, None),
    ("index_topk_freq", 1, 1),
    ("index_topk_pattern", None, None),
)

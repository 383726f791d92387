"""The shape of a hybrid model, read from and written to a `config.json` in the naming of Qwen3-Next.

A hybrid mixes layers that attend to all earlier tokens, layers that attend to a window of them, and Gated DeltaNet
layers, which carry a state of fixed size instead of keys and values. The public format has full and linear layers;
"sliding_attention", with `sliding_window`, is added here in the spelling that other families use for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InputError
from jaxspec.models.config import (
    DEFAULT_CONTEXT,
    DEFAULT_EPS,
    DEFAULT_THETA,
    FULL,
    SLIDING,
    check_eos_ids,
    check_sizes,
    eos_ids,
    is_int,
    read_rope,
    read_size,
    refuse_unsupported,
)

LINEAR = "linear_attention"

# What the public configuration class assumes for a key that is absent from the file.
_DEFAULT_ROTARY = 0.25
_DEFAULT_INTERVAL = 4
_DEFAULT_CONV = 4
_DEFAULT_EXPERTS = 512


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Sizes and constants of one hybrid model: hashable, so a jitted function may take it as a static argument.

    Fields:
      vocab_size: V, token ids are 0 to V - 1.
      hidden_size: H, width of the residual stream.
      intermediate_size: width of the gated MLP.
      layer_types: one entry a layer: "full_attention", "sliding_attention" or "linear_attention" (Gated DeltaNet).
      num_attention_heads, num_key_value_heads: heads of the attention layers; the first is a multiple of the second.
      head_dim: channels of such a head.
      linear_num_key_heads, linear_num_value_heads: HK and HV of the linear layers; HV is a multiple of HK.
      linear_key_head_dim, linear_value_head_dim: K and V, channels of such a head.
      linear_conv_kernel_dim: W, taps of the short convolution, at least 2.
      sliding_window: W of the sliding layers: a query sees W keys, its own included; None without such layers.
      partial_rotary_factor: share of head_dim that the rotary embedding turns; a whole even number of channels.
      rms_norm_eps, rope_theta, max_position_embeddings, tie_word_embeddings, eos_token_ids: as in `Qwen3Config`.

    Raises:
      InputError: a field breaks a rule above.

    Example:
      >>> config = HybridConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_attention_heads=4,
      ...                       layer_types=("linear_attention", "sliding_attention", "full_attention"),
      ...                       num_key_value_heads=2, head_dim=8, sliding_window=16, linear_num_key_heads=2,
      ...                       linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
      >>> config.num_hidden_layers, config.windows, config.conv_channels
      (3, (None, 16, None), 64)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = _DEFAULT_CONV
    sliding_window: int | None = None
    partial_rotary_factor: float = _DEFAULT_ROTARY
    rms_norm_eps: float = DEFAULT_EPS
    rope_theta: float = DEFAULT_THETA
    max_position_embeddings: int = DEFAULT_CONTEXT
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        check_sizes(self, _SIZES)
        if not self.layer_types:
            raise InputError("layer_types is empty: a model has at least one layer")
        unknown = sorted({str(kind) for kind in self.layer_types} - {FULL, SLIDING, LINEAR})
        if unknown:
            raise InputError(f"layer_types holds {unknown}: only {FULL!r}, {SLIDING!r} and {LINEAR!r} are supported")
        for many, few in _MULTIPLES:
            if getattr(self, many) % getattr(self, few):
                raise InputError(
                    f"{many} is {getattr(self, many)}: it must be a multiple of {few} ({getattr(self, few)})"
                )
        if self.linear_conv_kernel_dim < 2:
            raise InputError("linear_conv_kernel_dim is 1: a convolution of one tap looks at no earlier token; give 2")
        window = self.sliding_window
        if SLIDING in self.layer_types:
            if not is_int(window) or window < 1:
                raise InputError(f"layers slide but sliding_window is {window!r}: it must be at least 1 key")
        elif window is not None:
            raise InputError(f"sliding_window is {window!r} but no layer slides: leave it out, or name such a layer")
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise InputError(f"{name} is {value!r}: it must be a number above 0")
        if self.partial_rotary_factor > 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InputError(
                f"partial_rotary_factor is {self.partial_rotary_factor}: of head_dim {self.head_dim} it turns "
                f"{self.rotary_dim} channels, which must be an even number from 2 to head_dim"
            )
        check_eos_ids(self.eos_token_ids, self.vocab_size)

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One entry a layer: the window of a sliding layer, None for every other one."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that the rotary embedding turns, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_channels(self) -> int:
        """C, channels of the short convolution: queries, keys and values of the linear layer, side by side."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HybridConfig:
        """Reads the parsed `config.json` of a Qwen3-Next folder.

        Layers: `layer_types`, or every `full_attention_interval`-th one full and the rest linear. A layer's MLP is
        dense if `mlp_only_layers` names it, `num_experts` is 0 or `decoder_sparse_step` passes it over.

        Raises:
          InputError: another architecture, a setting this library does not compute (a mixture of experts among them),
            a missing or malformed key.

        Source: the public Qwen3-Next configuration of Hugging Face transformers.
        """
        if config.get("model_type") != "qwen3_next":
            raise InputError(f"model_type is {config.get('model_type')!r}: a hybrid model's is 'qwen3_next'")
        architectures = config.get("architectures")
        if architectures and "Qwen3NextForCausalLM" not in architectures:
            raise InputError(f"architectures is {architectures!r}: only ['Qwen3NextForCausalLM'] is supported")
        refuse_unsupported(config)
        layers = read_size(config, "num_hidden_layers")
        kinds = _layer_types(config, layers)
        _refuse_experts(config, layers)
        theta, share = read_rope(config, _DEFAULT_ROTARY)
        conv = config.get("linear_conv_kernel_dim", _DEFAULT_CONV)
        return cls(
            **{name: read_size(config, name) for name in _REQUIRED},
            layer_types=kinds,
            linear_conv_kernel_dim=conv,
            # Writers keep the key where no layer slides.
            sliding_window=config.get("sliding_window") if SLIDING in kinds else None,
            partial_rotary_factor=share,
            rms_norm_eps=config.get("rms_norm_eps", DEFAULT_EPS),
            rope_theta=theta,
            max_position_embeddings=config.get("max_position_embeddings", DEFAULT_CONTEXT),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids(config),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that public software reads back to this model, or refuses if it has sliding layers."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **{name: getattr(self, name) for name in _REQUIRED},
            "num_hidden_layers": self.num_hidden_layers,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "partial_rotary_factor": self.partial_rotary_factor,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "layer_types": list(self.layer_types),
            **({} if self.sliding_window is None else {"sliding_window": self.sliding_window}),
            "num_experts": 0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(self.num_hidden_layers)),
            "bos_token_id": None,
            "eos_token_id": eos,
        }


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_SIZES = (*_REQUIRED, "linear_conv_kernel_dim", "max_position_embeddings")
_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)


def _layer_types(config, layers: int) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval", _DEFAULT_INTERVAL)
        if not is_int(interval) or interval < 1:
            raise InputError(f"full_attention_interval is {interval!r}: it must be an integer of at least 1")
        return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise InputError(f"layer_types is {kinds!r} for num_hidden_layers {layers}: it must be a list, one a layer")
    return tuple(kinds)


def _refuse_experts(config, layers: int) -> None:
    experts = config.get("num_experts", _DEFAULT_EXPERTS)
    step = config.get("decoder_sparse_step", 1)
    for name, value, least in (("num_experts", experts, 0), ("decoder_sparse_step", step, 1)):
        if not is_int(value) or value < least:
            raise InputError(f"{name} is {value!r}: it must be an integer of at least {least}")
    dense = config.get("mlp_only_layers") or ()
    mixtures = [i for i in range(layers) if experts and (i + 1) % step == 0 and i not in dense]
    if mixtures:
        shown = ", ".join(map(str, mixtures[:5])) + (f" and {len(mixtures) - 5} more" if len(mixtures) > 5 else "")
        raise InputError(
            f"the MLP of layers {shown} is a mixture of {experts} experts: only dense MLPs are supported, "
            "which num_experts 0 or mlp_only_layers says"
        )

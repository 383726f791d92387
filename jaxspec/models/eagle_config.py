"""The shape of an EAGLE-3 draft, read from and written to the `config.json` of the public format.

Which of the target's layers feed it: an id k that the file names means the residual stream after layer k. The default,
where it names none, is the public software's [2, L // 2, L - 3], and those three count differently: they are what
enters a layer, so the stream after the layer before. `Eagle3Config` knows the first kind only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InputError
from jaxspec.models.config import (
    DEFAULT_EPS,
    check_heads,
    check_sizes,
    is_int,
    read_rope,
    read_size,
    refuse_unsupported,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
DEFAULT_TAPS = 3

# What the public configuration class of Llama assumes for a key that is absent from the file.
_DEFAULT_CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Sizes and constants of an EAGLE-3 draft: hashable, so a jitted function may take it as a static argument.

    Fields:
      vocab_size: V, of the target.
      draft_vocab_size: ids that the draft may propose, which its own head scores; None where the target's head scores
        all of V.
      hidden_size: Hd, width of the draft's rows.
      target_hidden_size: H, width of the target's.
      intermediate_size: width of the gated MLP.
      num_attention_heads, num_key_value_heads, head_dim: as in `Qwen3Config`.
      target_layer_ids: layers of the target whose residual stream, after the layer, is a feature of a token; m of them,
        in the order in which they are joined.
      feature_norm: "none"; "each", a norm for each of the m features; or "joint", one norm over all m * H channels.
      norm_output: whether a chain goes on with the row after the last norm, and not before it.
      bias: whether the product that joins the features adds a bias.
      rms_norm_eps, rope_theta, max_position_embeddings: as in `Qwen3Config`.

    Raises:
      InputError: a field breaks a rule above, or the target's head or embedding would not fit the rows.

    Example:
      >>> config = Eagle3Config(vocab_size=64, hidden_size=16, target_hidden_size=16, intermediate_size=32,
      ...                       num_attention_heads=2, num_key_value_heads=1, head_dim=8, target_layer_ids=(0, 2, 3))
      >>> config.head_size, config.feature_size, config.to_dict()["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
      (64, 48, [0, 2, 3])
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int | None = None
    feature_norm: str = "none"
    norm_output: bool = False
    bias: bool = False
    rms_norm_eps: float = DEFAULT_EPS
    rope_theta: float = 10_000.0
    max_position_embeddings: int = _DEFAULT_CONTEXT

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        check_sizes(self, _SIZES)
        check_heads(self)
        if not self.target_layer_ids or not all(is_int(layer) and layer >= 0 for layer in self.target_layer_ids):
            raise InputError(
                f"target_layer_ids is {self.target_layer_ids!r}: name at least one layer of the target, from 0"
            )
        if self.feature_norm not in _NORMS:
            raise InputError(f"feature_norm is {self.feature_norm!r}: it must be one of {', '.join(_NORMS)}")
        own = self.draft_vocab_size
        if own is not None and (not is_int(own) or not 1 <= own <= self.vocab_size):
            raise InputError(
                f"draft_vocab_size is {own!r}: it must be 1 to vocab_size ({self.vocab_size}), or null for the "
                "target's own head"
            )
        if own is None and self.hidden_size != self.target_hidden_size:
            raise InputError(
                f"hidden_size is {self.hidden_size} and the target's {self.target_hidden_size}: the target's head does "
                "not fit; give draft_vocab_size and a head of the draft's own"
            )

    @property
    def head_size(self) -> int:
        """Vd, ids that the draft scores."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def feature_size(self) -> int:
        """m * H, width of a token's features."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], target: Any) -> Eagle3Config:
        """Reads the parsed `config.json` of an EAGLE-3 folder.

        Args:
          config: the parsed file.
          target: configuration of the model that it shall draft for.

        Raises:
          InputError: another architecture, a setting that this library does not compute, a missing or malformed key, or
            sizes that do not match the target's.

        Source: the public EAGLE-3 drafts for Llama-like targets ("EAGLE-3", arXiv 2503.01840).
        """
        if config.get("architectures") != [ARCHITECTURE]:
            raise InputError(f"architectures is {config.get('architectures')!r}: an EAGLE-3 draft has {[ARCHITECTURE]}")
        refuse_unsupported(config)
        layers = config.get("num_hidden_layers", 1)
        if layers != 1:
            raise InputError(f"num_hidden_layers is {layers!r}: an EAGLE-3 draft has one layer")
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise InputError(f"eagle_config is {nested!r}: it must be an object")
        settings = {**config, **nested}
        if not settings.get("use_aux_hidden_state", True):
            raise InputError("use_aux_hidden_state is false: only drafts that layers of the target feed are supported")
        theta, share = read_rope(config, 1.0)
        if share != 1.0:
            raise InputError(f"partial_rotary_factor is {share!r}: only 1.0 is supported")
        heads, hidden = read_size(config, "num_attention_heads"), read_size(config, "hidden_size")
        head_dim, kv_heads = config.get("head_dim"), config.get("num_key_value_heads")
        if head_dim is None:
            if hidden % heads:
                raise InputError(
                    f"head_dim is absent and hidden_size {hidden} is no multiple of num_attention_heads {heads}: "
                    "give head_dim"
                )
            head_dim = hidden // heads
        of_target = config.get("target_hidden_size")
        read = cls(
            vocab_size=read_size(config, "vocab_size"),
            hidden_size=hidden,
            target_hidden_size=hidden if of_target is None else of_target,
            intermediate_size=read_size(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            target_layer_ids=_layer_ids(settings, target.num_hidden_layers),
            draft_vocab_size=config.get("draft_vocab_size"),
            feature_norm=_feature_norm(settings),
            norm_output=bool(settings.get("norm_output", False)),
            bias=bool(config.get("bias", False)),
            rms_norm_eps=config.get("rms_norm_eps", DEFAULT_EPS),
            rope_theta=theta,
            max_position_embeddings=config.get("max_position_embeddings", _DEFAULT_CONTEXT),
        )
        read.check_target(target)
        return read

    def check_target(self, target: Any) -> None:
        """Raises InputError unless the draft's sizes are those of a target with this configuration."""
        for name, own, wanted in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
        ):
            if own != wanted:
                raise InputError(
                    f"{name} is {own} and the target's {name.removeprefix('target_')} {wanted}: the draft belongs to "
                    "another model"
                )
        if max(self.target_layer_ids) >= target.num_hidden_layers:
            raise InputError(
                f"target_layer_ids is {list(self.target_layer_ids)} and the target has {target.num_hidden_layers} "
                "layers: the draft belongs to another model"
            )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that public software reads back to this draft."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "bias": self.bias,
            "fc_norm": self.feature_norm == "each",
            "norm_output": self.norm_output,
            "num_aux_hidden_states": len(self.target_layer_ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.target_layer_ids),
                "use_aux_hidden_state": True,
                "norm_before_fc": self.feature_norm == "joint",
            },
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
        }


_NORMS = ("none", "each", "joint")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _layer_ids(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers after which the features are taken, of a target of so many layers."""
    ids = settings.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not isinstance(ids, list | tuple):
        raise InputError(f"eagle_aux_hidden_state_layer_ids is {ids!r}: it must be a list of layers")
    count = settings.get("num_aux_hidden_states", DEFAULT_TAPS if ids is None else len(ids))
    if ids is None:
        if count != DEFAULT_TAPS:
            raise InputError(
                f"num_aux_hidden_states is {count!r} and eagle_aux_hidden_state_layer_ids is absent: the default names "
                f"{DEFAULT_TAPS} layers, so name them"
            )
        # What enters a layer is the stream after the one before.
        ids = [entered - 1 for entered in (2, layers // 2, layers - 3)]
        if min(ids) < 0:
            raise InputError(
                f"eagle_aux_hidden_state_layer_ids is absent, and its default reaches before the first of the target's "
                f"{layers} layers: name them"
            )
    if len(ids) != count:
        raise InputError(
            f"num_aux_hidden_states is {count!r} and eagle_aux_hidden_state_layer_ids names {len(ids)} layers: the "
            "two must agree"
        )
    return tuple(ids)


def _feature_norm(settings: Mapping[str, Any]) -> str:
    each = bool(settings.get("fc_norm", False) or settings.get("use_aux_norm", False))
    joint = bool(settings.get("norm_before_fc", False))
    if each and joint:
        raise InputError("fc_norm and norm_before_fc are both true: features are normed each, or all together")
    return "each" if each else "joint" if joint else "none"

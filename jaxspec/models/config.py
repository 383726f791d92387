"""The shape of a Qwen3 model, read from and written to the `config.json` of a Hugging Face folder.

Only what changes the numbers is kept. Whatever the file asks for and this library does not compute (another RoPE type,
attention biases, quantised weights) is an error here, at reading, and never a silently different model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.errors import InputError

FULL = "full_attention"
SLIDING = "sliding_attention"

# What the public configuration class assumes for a key that is absent from the file.
DEFAULT_EPS = 1e-6
DEFAULT_THETA = 10_000.0
DEFAULT_CONTEXT = 32_768
_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes and constants of one Qwen3 dense model: hashable, so a jitted function may take it as a static argument.

    Fields:
      vocab_size: V, token ids are 0 to V - 1.
      hidden_size: H, width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_hidden_layers: number of decoder layers.
      num_attention_heads, num_key_value_heads: query heads and K/V heads; the first is a multiple of the second.
      head_dim: channels a head; even. `num_attention_heads * head_dim` may differ from H.
      rms_norm_eps: added to the mean square in every RMS norm.
      rope_theta: base of the rotary embedding.
      max_position_embeddings: the context limit in tokens.
      tie_word_embeddings: True when the head's matrix is the embedding.
      windows: one entry a layer; None is full attention, W lets a query see W keys, its own included.
      eos_token_ids: ids that end a text; may be empty.

    Raises:
      InputError: a field breaks a rule above.

    Example:
      >>> config = Qwen3Config(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
      ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=8, windows=(16, None))
      >>> config.to_dict()["layer_types"]
      ['sliding_attention', 'full_attention']
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = DEFAULT_EPS
    rope_theta: float = DEFAULT_THETA
    max_position_embeddings: int = DEFAULT_CONTEXT
    tie_word_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.num_hidden_layers)
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        check_sizes(self, _SIZES)
        check_heads(self)
        if len(self.windows) != self.num_hidden_layers:
            raise InputError(
                f"windows has {len(self.windows)} entries for {self.num_hidden_layers} layers: give one a layer"
            )
        for layer, window in enumerate(self.windows):
            if window is not None and (not is_int(window) or window < 1):
                raise InputError(f"the window of layer {layer} is {window!r}: it must be None or at least 1 key")
        check_eos_ids(self.eos_token_ids, self.vocab_size)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Reads the parsed `config.json` of a Qwen3 folder.

        Layers: `layer_types` decides when it is there; otherwise, with `use_sliding_window` true, the layers with
        index >= `max_window_layers` slide. RoPE: `rope_parameters`, or the older top-level `rope_theta` with
        `rope_scaling` absent or null. `head_dim` absent or null means hidden_size / num_attention_heads.

        Raises:
          InputError: another architecture, a setting this library does not compute, a missing or malformed key, or
            sliding layers while the window is off, null or absent.

        Source: the public Qwen3 configuration of Hugging Face transformers.
        """
        _check_architecture(config)
        refuse_unsupported(config)
        heads = read_size(config, "num_attention_heads")
        hidden = read_size(config, "hidden_size")
        layers = read_size(config, "num_hidden_layers")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise InputError(
                    f"head_dim is absent and hidden_size {hidden} is no multiple of num_attention_heads {heads}: "
                    "give head_dim"
                )
            head_dim = hidden // heads
        kv_heads = config.get("num_key_value_heads")
        theta, share = read_rope(config, 1.0)
        if share != 1.0:
            raise InputError(f"partial_rotary_factor is {share!r}: only 1.0 is supported")
        return cls(
            vocab_size=read_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=read_size(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", DEFAULT_EPS),
            rope_theta=theta,
            max_position_embeddings=config.get("max_position_embeddings", DEFAULT_CONTEXT),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, layers),
            eos_token_ids=eos_ids(config),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that public software reads back to this model.

        Raises:
          InputError: layers slide with different windows; the file format has room for one.
        """
        widths = sorted({window for window in self.windows if window is not None})
        if len(widths) > 1:
            raise InputError(f"the layers slide with windows {widths}: config.json holds one sliding_window for all")
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_sliding_window": bool(widths),
            "sliding_window": widths[0] if widths else None,
            # Readers that know no layer_types fall back on this; it is exact only if the sliding layers come last.
            "max_window_layers": next((i for i, w in enumerate(self.windows) if w is not None), self.num_hidden_layers),
            "layer_types": [FULL if window is None else SLIDING for window in self.windows],
            "bos_token_id": None,
            "eos_token_id": eos,
        }


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of a parsed config.json or generation_config.json, which is an id, a list of ids or null."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def is_int(value: Any) -> bool:
    """Whether it is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_eos_ids(ids: Iterable[Any], vocab_size: int) -> None:
    """Raises InputError unless all of them are in the vocabulary."""
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise InputError(f"eos_token_id {token!r} is outside the vocabulary of {vocab_size} ids")


def check_sizes(config: Any, names: Iterable[str]) -> None:
    """Raises InputError unless these fields of a configuration are integers of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not is_int(value) or value < 1:
            raise InputError(f"{name} is {value!r}: it must be an integer of at least 1")


def check_heads(config: Any) -> None:
    """Raises InputError unless query heads share K/V heads evenly, and norm and rotary embedding are possible."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"num_attention_heads is {config.num_attention_heads}: it must be a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    if config.head_dim % 2:
        raise InputError(f"head_dim is {config.head_dim}: rotary embedding pairs channels, so it must be even")
    for name in ("rms_norm_eps", "rope_theta"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise InputError(f"{name} is {value!r}: it must be a number above 0")


def read_size(config: Mapping[str, Any], name: str) -> int:
    """The integer of at least 1 that a parsed config.json has under `name`.

    Raises:
      InputError: it has none.
    """
    value = config.get(name)
    if not is_int(value) or value < 1:
        found = f"is {value!r}" if name in config else "is missing"
        raise InputError(f"{name} {found} in config.json: it must be an integer of at least 1")
    return value


def _check_architecture(config) -> None:
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if model_type is None and not architectures:
        raise InputError("config.json has neither model_type nor architectures: a Qwen3 folder names 'qwen3' there")
    if model_type not in (None, "qwen3"):
        raise InputError(f"model_type is {model_type!r}: 'qwen3' (Qwen3 dense) and 'qwen3_next' are supported")
    if architectures and "Qwen3ForCausalLM" not in architectures:
        raise InputError(f"architectures is {architectures!r}: only ['Qwen3ForCausalLM'] is supported")


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises InputError, if a parsed config.json asks for biases, another activation or quantised weights."""
    if config.get("attention_bias"):
        raise InputError("attention_bias is true: only attention without biases is supported")
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(f"hidden_act is {config['hidden_act']!r}: only 'silu' is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise InputError(f"quantization_config names the method {method!r}: only unquantised weights are supported")


def read_rope(config: Mapping[str, Any], rotary_share: float) -> tuple[float, float]:
    """The rotary embedding's base, and the share of a head's channels it turns: `rotary_share` where none is named.

    Raises:
      InputError: another RoPE than the default one, or one that differs by layer type.
    """
    share = config.get("partial_rotary_factor")
    for key in ("rope_parameters", "rope_scaling"):
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise InputError(f"{key} is {settings!r}: it must be an object with rope_type and rope_theta")
        if FULL in settings or SLIDING in settings:
            raise InputError(f"{key} differs by layer type: only one RoPE for all layers is supported")
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise InputError(f"{key} asks for rope type {kind!r}: only 'default' is supported")
        share = settings.get("partial_rotary_factor", share)
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    theta = config.get("rope_theta", DEFAULT_THETA) if theta is None else theta
    return theta, rotary_share if share is None else share


def _windows(config, layers: int) -> tuple[int | None, ...]:
    enabled = bool(config.get("use_sliding_window", False))
    types = config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise InputError(f"layer_types has {len(types)} entries for num_hidden_layers {layers}: one a layer")
        unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
        if unknown:
            raise InputError(f"layer_types holds {unknown}: only {FULL!r} and {SLIDING!r} are supported")
        slides = [kind == SLIDING for kind in types]
        if any(slides) and not enabled:
            raise InputError(
                "layer_types has sliding layers but use_sliding_window is not true: set it, or make the layers full"
            )
    else:
        first = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if enabled and (not is_int(first) or first < 0):
            raise InputError(f"max_window_layers is {first!r}: it must be an integer of at least 0")
        slides = [enabled and layer >= first for layer in range(layers)]
    if not any(slides):
        return (None,) * layers
    window = config.get("sliding_window")
    if not is_int(window) or window < 1:
        raise InputError(f"{sum(slides)} layers slide but sliding_window is {window!r}: it must be at least 1 key")
    return tuple(window if slide else None for slide in slides)

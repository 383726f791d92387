"""The public format of block drafts: what config.json says, and what the tensors are called.

What a file asks for and this library does not compute is an error at reading: a wrong draft never shows in greedy text,
only in how little of it is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InputError
from jaxspec.models.block_config import DFLASH, DSPARK, BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.config import (
    DEFAULT_CONTEXT,
    DEFAULT_EPS,
    FULL,
    SLIDING,
    is_int,
    read_rope,
    read_size,
    refuse_unsupported,
)
from jaxspec.models.draft_tensors import DraftFormat, DraftTensor

# What a folder names as its architecture, and which algorithm that is.
ARCHITECTURES = {"DFlashDraftModel": DFLASH, "DSparkDraftModel": DSPARK, "Qwen3DSparkModel": DSPARK}

_DEFAULT_BLOCK = 16  # of DFLASH, where the file has no block_size
# Keys with a dspark_ form of another name.
_PREFIXED = {"mask_token_id": "dspark_noise_token_id"}
# Settings of relatives of these drafts that this library does not compute, and what each says if it is not in use.
_UNUSED = {
    "rope_is_neox_style": (None, True),
    "final_logit_softcapping": (None, 0),
    "v_scale": (None, 1),
    "output_multiplier": (None, 1),
    "projector_type": (None, DFLASH, DSPARK),
    "sliding_window_non_causal": (None, False),
}


def read_block_config(config: Mapping[str, Any], num_target_layers: int | None = None) -> BlockDraftConfig:
    """Reads the parsed `config.json` of a draft's folder.

    A key that is about drafting is looked for with the prefix `dspark_` (of a DSPARK draft), then in `dspark_config`
    (likewise), `dflash_config`, `text_config` and at the top level; null is absent. Sizes of the backbone are read at
    the top level.

    Args:
      config: the parsed file.
      num_target_layers: of the target, for a DFLASH draft that names neither layers nor this number.

    Raises:
      InputError: another architecture, a setting this library does not compute, a missing or malformed key.

    Source: the public formats of DFLASH (z-lab) and DSPARK (DeepSpec) drafts.
    """
    algorithm = _algorithm(config)
    refuse_unsupported(config)

    def find(name, default=None):
        return _find(config, algorithm, name, default)

    for name, idle in _UNUSED.items():
        if find(name) not in idle:
            raise InputError(f"{name} is {find(name)!r}: drafts with it are not supported, only those without")
    theta, share = read_rope(config, 1.0)
    if share != 1.0:
        raise InputError(f"partial_rotary_factor is {share!r}: only 1.0 is supported in a draft")
    layers, heads = read_size(config, "num_hidden_layers"), read_size(config, "num_attention_heads")
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    hidden, vocab = read_size(config, "hidden_size"), read_size(config, "vocab_size")
    if config.get("draft_vocab_size") not in (None, vocab):
        raise InputError(
            f"draft_vocab_size is {config['draft_vocab_size']!r} and vocab_size {vocab}: a block draft proposes "
            "from all of the target's vocabulary"
        )
    if head_dim is None and hidden % heads:
        raise InputError(
            f"head_dim is absent and hidden_size {hidden} is no multiple of num_attention_heads {heads}: give head_dim"
        )
    windows = _windows(find, layers)
    is_causal, from_anchor = find("is_causal"), find("sample_from_anchor")
    for name, value in (("is_causal", is_causal), ("sample_from_anchor", from_anchor)):
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}: it must be true, false or absent")
    target_layers = find("num_target_layers")
    dspark = algorithm == DSPARK
    return BlockDraftConfig(
        algorithm=algorithm,
        block_size=find("block_size", None if dspark else _DEFAULT_BLOCK),
        target_layer_ids=_target_layers(find, algorithm, layers, target_layers or num_target_layers),
        mask_token_id=_mask_token(find),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=read_size(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        rms_norm_eps=config.get("rms_norm_eps", DEFAULT_EPS),
        rope_theta=theta,
        max_position_embeddings=config.get("max_position_embeddings", DEFAULT_CONTEXT),
        windows=windows,
        causal=() if is_causal is None else (is_causal,) * layers,
        markov_rank=_markov_rank(find) if dspark else 0,
        sample_from_anchor=dspark and from_anchor is not False,
        num_target_layers=target_layers,
    )


def block_tensors(config: BlockDraftConfig) -> dict[str, DraftTensor]:
    """Every tensor of the file under its public name."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        "fc.weight": DraftTensor(("fc",), (hidden, len(config.target_layer_ids) * hidden), transposed=True),
        "hidden_norm.weight": DraftTensor(("hidden_norm",), (hidden,)),
        "norm.weight": DraftTensor(("norm",), (hidden,)),
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in shapes.items():
            path = f"layers_{layer}", name.rpartition(".")[2]
            tensors[f"layers.{layer}.{name}.weight"] = DraftTensor(path, shape, transposed=len(shape) == 2)
    if config.algorithm == DSPARK:
        for name in ("markov_w1", "markov_w2"):
            shape = config.vocab_size, config.markov_rank
            tensors[f"markov_head.{name}.weight"] = DraftTensor((name,), shape)
    return tensors


def default_target_layers(count: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a DFLASH draft of `count` layers taps where its file names none.

    Example:
      >>> default_target_layers(5, 36), default_target_layers(1, 36)
      ((1, 9, 17, 25, 33), (18,))
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4  # from layer 1 to the third from the end
    return tuple(round(1 + span * i / (count - 1)) for i in range(count))


def default_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What to tell of defaults that stand for something in a parsed `config.json` that a draft was trained with."""
    named = _find(config, _algorithm(config), "target_layer_ids")
    return () if named is not None else ("target_layer_ids is absent: those of the default are taken",)


def _find(config, algorithm, name, default=None):
    """The first value that is not null, in the order that `read_block_config` says."""
    places = [config.get("dflash_config"), config.get("text_config"), config]
    if algorithm == DSPARK:
        prefixed = _PREFIXED.get(name, f"dspark_{name}")
        places = [{name: config.get(prefixed)}, config.get("dspark_config"), *places]
    for place in places:
        if place is not None and not isinstance(place, Mapping):
            raise InputError(f"config.json holds {place!r} where an object with the draft's settings belongs")
        if place and place.get(name) is not None:
            return place[name]
    return default


def _algorithm(config) -> str:
    names = config.get("architectures") or ()
    found = {ARCHITECTURES[name] for name in names if name in ARCHITECTURES}
    if len(found) != 1:
        raise InputError(f"architectures is {list(names)!r}: a block draft names one of {', '.join(ARCHITECTURES)}")
    if config.get("speculators_model_type"):
        raise InputError(
            "speculators_model_type is set: folders packaged for speculators are not read; convert the draft to the "
            "format of its authors"
        )
    (algorithm,) = found
    # With a Markov head block_size counts drafts, without one rows: guessing would be wrong by one, without a word.
    if algorithm == DFLASH and (_find(config, DSPARK, "markov_rank") or 0):
        raise InputError(
            f"architectures is {list(names)!r} but config.json has a markov_rank: say which it is, DFlashDraftModel "
            "(block_size counts rows, no Markov head) or DSparkDraftModel (block_size counts drafts)"
        )
    return algorithm


def _windows(find, layers: int) -> tuple[int | None, ...]:
    types = find("layer_types") or [FULL] * layers
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise InputError(f"layer_types is {types!r}: it must have one entry for each of {layers} layers")
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown:
        raise InputError(f"layer_types holds {unknown}: only {FULL!r} and {SLIDING!r} are supported")
    window = find("sliding_window")
    if SLIDING in types and (not is_int(window) or window < 1):
        raise InputError(f"layers slide but sliding_window is {window!r}: it must be at least 1 key")
    return tuple(window if kind == SLIDING else None for kind in types)


def _target_layers(find, algorithm, layers, num_target_layers) -> tuple[int, ...]:
    ids = find("target_layer_ids")
    if ids is not None:
        if not isinstance(ids, list | tuple):
            raise InputError(f"target_layer_ids is {ids!r}: it must be a list of layers of the target")
        return tuple(ids)
    if algorithm == DSPARK or not is_int(num_target_layers):
        raise InputError("target_layer_ids is missing in config.json: the draft was trained on certain target layers")
    return default_target_layers(layers, num_target_layers)


def _mask_token(find) -> int:
    mask = find("mask_token_id")
    if mask is None:
        named = find("mask_token")
        hint = f"; mask_token is {named!r}, give the id it has in the target's tokenizer" if named else ""
        raise InputError(f"mask_token_id is missing in config.json{hint}")
    return mask


def _markov_rank(find) -> int:
    kind = find("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise InputError(f"markov_head_type is {kind!r}: only 'vanilla' Markov heads are supported")
    return find("markov_rank", 0)


def _read(settings: Mapping[str, Any], target: Any) -> BlockDraftConfig:
    config = read_block_config(settings, target.num_hidden_layers)
    config.check_target(target)
    return config


def _format(algorithm: str, ignored: tuple[str, ...]) -> DraftFormat:
    older = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return DraftFormat(
        kind=algorithm,
        architectures=tuple(name for name, kind in ARCHITECTURES.items() if kind == algorithm),
        read=_read,
        tensors=block_tensors,
        build=BlockDraft,
        alias=lambda name: older.get(name, name),
        ignored=ignored,
        notes=default_notes,
    )


# Some files repeat what is the target's. A confidence head decides how much of a block is verified; here all of it is.
_TARGETS = ("embed_tokens.weight", "lm_head.weight")
DFLASH_FORMAT = _format(DFLASH, _TARGETS)
DSPARK_FORMAT = _format(DSPARK, (*_TARGETS, "confidence_head.proj.weight", "confidence_head.proj.bias"))

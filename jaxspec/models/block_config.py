"""The shape of a block draft, DSPARK or DFLASH, read from and written to the `config.json` of its folder.

As for the models, only what changes the numbers is kept, and what a file asks for and this library does not compute is
an error at reading. A wrong draft never shows in greedy text, only in how little of it is accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InputError
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

DSPARK, DFLASH = "dspark", "dflash"

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
}


@dataclasses.dataclass(frozen=True)
class BlockDraftConfig:
    """Sizes and constants of a block draft: hashable.

    Fields:
      algorithm: "dspark" or "dflash".
      block_size: as the public format has it, and there it means two things: of a DSPARK draft the tokens that a block
        proposes, of a DFLASH draft the rows of a block, one more than it proposes. `num_drafts` is what to use.
      target_layer_ids: the m target layers, counted from 0, whose streams are the features, in this order.
      mask_token_id: the token that stands in a block where a draft is to be found; an id of the target's embedding.
      vocab_size: V, that of the target: the rows of its embedding, those that only pad it included.
      hidden_size: H, that of the target, whose embedding and head the draft uses.
      intermediate_size: width of the draft's own gated MLPs.
      num_hidden_layers: N, the draft's own layers.
      num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta, max_position_embeddings: as in
        `Qwen3Config`, of the draft.
      windows: one entry a layer; None is full attention, W lets a query see W keys, its own included.
      causal: one entry a layer; whether a row sees none of the rows behind it in its block. A sliding layer is causal.
        Empty: sliding layers are, the others are not.
      markov_rank: r, of a DSPARK draft; 0 for DFLASH.
      sample_from_anchor: whether the row of the anchor already predicts; never of a DFLASH draft.
      num_target_layers: layers of the target it was trained for; None where the file does not say.

    Raises:
      InputError: a field breaks a rule above.

    Example:
      >>> shape = {"target_layer_ids": (1, 4), "mask_token_id": 0, "vocab_size": 64, "hidden_size": 16,
      ...          "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
      ...          "num_key_value_heads": 1, "head_dim": 8}
      >>> dspark = BlockDraftConfig("dspark", block_size=7, markov_rank=4, **shape)
      >>> dflash = BlockDraftConfig("dflash", block_size=8, sample_from_anchor=False, **shape)
      >>> (dspark.num_drafts, dspark.num_rows), (dflash.num_drafts, dflash.num_rows)
      ((7, 7), (7, 8))

    Source: public drafts `DFlashDraftModel` and `Qwen3DSparkModel`; "DFlash: Block Diffusion for Flash Speculative
    Decoding" (arXiv 2602.06036).
    """

    algorithm: str
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = DEFAULT_EPS
    rope_theta: float = 10_000.0
    max_position_embeddings: int = DEFAULT_CONTEXT
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    markov_rank: int = 0
    sample_from_anchor: bool = True
    num_target_layers: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.num_hidden_layers)
        slides = tuple(window is not None for window in self.windows)
        object.__setattr__(self, "causal", tuple(self.causal) or slides)
        if self.algorithm not in (DSPARK, DFLASH):
            raise InputError(f"algorithm is {self.algorithm!r}: it must be {DSPARK!r} or {DFLASH!r}")
        for name in _SIZES:
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise InputError(f"{name} is {value!r}: it must be an integer of at least 1")
        if self.num_drafts < 1:
            raise InputError("block_size is 1: a DFLASH block is the newest token and a mask, or more; give at least 2")
        self._check_heads()
        self._check_layers(slides)
        self._check_target()
        if self.algorithm == DSPARK and (not is_int(self.markov_rank) or self.markov_rank < 1):
            raise InputError(
                f"markov_rank is {self.markov_rank!r}: a DSPARK draft has a Markov head, of rank 1 at least"
            )
        if self.algorithm == DFLASH and (self.markov_rank or self.sample_from_anchor):
            raise InputError(
                f"markov_rank={self.markov_rank}, sample_from_anchor={self.sample_from_anchor}: a DFLASH draft has no "
                "Markov head and drops the row of the newest token; give 0 and False"
            )

    def _check_heads(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads is {self.num_attention_heads}: it must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}: rotary embedding pairs channels, so it must be even")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise InputError(f"{name} is {value!r}: it must be a number above 0")

    def _check_layers(self, slides):
        for name in ("windows", "causal"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise InputError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_hidden_layers} layers: give one a "
                    "layer"
                )
        for layer, (window, causal) in enumerate(zip(self.windows, self.causal, strict=True)):
            if window is not None and (not is_int(window) or window < 1):
                raise InputError(f"the window of layer {layer} is {window!r}: it must be None or at least 1 key")
            if slides[layer] and not causal:
                raise InputError(
                    f"layer {layer} slides and is not causal: a layer that looks both ways in its block sees all of "
                    "the text; make it full, or causal"
                )

    def _check_target(self):
        ids = self.target_layer_ids
        if not ids or any(not is_int(layer) or layer < 0 for layer in ids) or len(set(ids)) != len(ids):
            raise InputError(
                f"target_layer_ids is {list(ids)!r}: it must name layers of the target, counted from 0, each once, at "
                "least one"
            )
        if not is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(f"mask_token_id is {self.mask_token_id!r}: it must be an id of 0 to {self.vocab_size - 1}")

    @property
    def num_drafts(self) -> int:
        """gamma, tokens that a block proposes."""
        return self.block_size if self.algorithm == DSPARK else self.block_size - 1

    @property
    def num_rows(self) -> int:
        """Rows of a block that proposes `num_drafts` tokens: one more if that of the anchor predicts nothing."""
        return self.num_drafts + (not self.sample_from_anchor)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, num_target_layers: int | None = None) -> BlockDraftConfig:
        """Reads the parsed `config.json` of a draft folder.

        A key that is about drafting is looked for with the prefix `dspark_` (of a DSPARK draft), then in
        `dspark_config` (likewise), `dflash_config`, `text_config` and at the top level; null is absent. Sizes of the
        backbone are read at the top level.

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
        is_causal = find("is_causal")
        if is_causal not in (None, True, False):
            raise InputError(f"is_causal is {is_causal!r}: it must be true, false or absent")
        target_layers = find("num_target_layers")
        dspark = algorithm == DSPARK
        return cls(
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
            sample_from_anchor=bool(find("sample_from_anchor", True)) if dspark else False,
            num_target_layers=target_layers,
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict` and public software read back to this draft.

        Raises:
          InputError: the layers slide with different windows, or differ in `causal` otherwise than by sliding; the
            file format has room for one.
        """
        widths = sorted({window for window in self.windows if window is not None})
        if len(widths) > 1:
            raise InputError(f"the layers slide with windows {widths}: config.json holds one sliding_window for all")
        slides = tuple(window is not None for window in self.windows)
        if self.causal != slides and len(set(self.causal)) > 1:
            raise InputError(f"causal is {list(self.causal)}: config.json says it of all layers, or of sliding ones")
        ids = list(self.target_layer_ids)
        drafting: dict[str, Any] = {"target_layer_ids": ids, "mask_token_id": self.mask_token_id}
        if self.causal != slides:
            drafting["is_causal"] = self.causal[0]
        dspark = {
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "sample_from_anchor": self.sample_from_anchor,
            "dspark_block_size": self.block_size,
            "dspark_markov_rank": self.markov_rank,
            "dspark_noise_token_id": self.mask_token_id,
            "dspark_target_layer_ids": ids,
        }
        return {
            "architectures": ["DSparkDraftModel" if self.algorithm == DSPARK else "DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": drafting,
            **(dspark if self.algorithm == DSPARK else {}),
            **({} if self.num_target_layers is None else {"num_target_layers": self.num_target_layers}),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "use_sliding_window": bool(widths),
            "sliding_window": widths[0] if widths else None,
            "layer_types": [SLIDING if slide else FULL for slide in slides],
        }


_SIZES = (
    "block_size",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def default_target_layers(count: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a DFLASH draft of `count` layers taps where its file names none.

    Example:
      >>> default_target_layers(5, 36), default_target_layers(1, 36)
      ((1, 9, 17, 25, 33), (18,))
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4  # from layer 1 to the third from the end
    return tuple(int(1 + span * i / (count - 1) + 0.5) for i in range(count))


def _find(config, algorithm, name, default=None):
    """The first value that is not null, in the order that `from_dict` says."""
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

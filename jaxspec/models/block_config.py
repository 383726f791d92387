"""The shape of a block draft, DSPARK or DFLASH. As for the models, only what changes the numbers is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.errors import InputError
from jaxspec.models.config import (
    DEFAULT_CONTEXT,
    DEFAULT_EPS,
    DEFAULT_THETA,
    FULL,
    SLIDING,
    check_heads,
    check_sizes,
    is_int,
)

DSPARK, DFLASH = "dspark", "dflash"


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
    rope_theta: float = DEFAULT_THETA
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
        check_sizes(self, _SIZES)
        if self.num_drafts < 1:
            raise InputError("block_size is 1: a DFLASH block is the newest token and a mask, or more; give at least 2")
        check_heads(self)
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

    def check_target(self, target: Any) -> None:
        """Raises InputError unless the draft's sizes are those of a target with this configuration."""
        sizes = (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
        )
        for name, own, wanted in sizes:
            if own not in (None, wanted):
                raise InputError(f"{name} is {own} and that of the target {wanted}: the draft belongs to another model")
        if max(self.target_layer_ids) >= target.num_hidden_layers:
            raise InputError(
                f"target_layer_ids is {list(self.target_layer_ids)} and the target has {target.num_hidden_layers} "
                "layers, counted from 0: the draft belongs to another model"
            )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `read_block_config` and public software read back to this draft.

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

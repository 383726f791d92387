"""A drafter by its name, for a target that was loaded: what the command line and the benchmarks offer."""

from typing import Any

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.draft_lm import DraftLM
from jaxspec.drafting.mtp import MTPDrafter
from jaxspec.drafting.ngram import NgramDrafter
from jaxspec.errors import InputError
from jaxspec.models import Checkpoint, load

DRAFTERS = ("draft_lm", "mtp", "ngram", "none")


def make_drafter(
    name: str, target: Checkpoint, *, draft_model: str | None = None, dtype: str = "float32"
) -> tuple[Drafter | None, Any]:
    """The drafter of that name and its weights.

    Args:
      name: one of `DRAFTERS`; "none" drafts nothing.
      target: whose prediction blocks "mtp" drafts with.
      draft_model: what "draft_lm" drafts with, an embedded model's name or a folder; "draft" by default.
      dtype: what the draft model computes in.

    Raises:
      InputError: `draft_model` beside another drafter; a target without prediction blocks; a model that cannot draft.
    """
    if name != "draft_lm" and draft_model is not None:
        raise InputError(f"draft_model={draft_model}: of no use with drafter={name}; leave one of them out")
    if name == "draft_lm":
        draft = load(draft_model or "draft", dtype)
        return DraftLM(draft.draft_model), draft.params
    if name == "mtp":
        return MTPDrafter(target.mtp), target.mtp_params
    return (NgramDrafter() if name == "ngram" else None), ()


def fitting_drafters(target: Checkpoint) -> list[str]:
    """Who drafts well for a target, the best first: its own prediction blocks, or else the embedded draft model, where
    it shares the vocabulary, and n-grams."""
    if target.blocks:
        return ["mtp"]
    return [*(["draft_lm"] if load("draft").config.vocab_size == target.config.vocab_size else []), "ngram"]


def page_size_for(target: Checkpoint) -> int:
    """Tokens a page where nobody asks for another size: 64; for a target with compressed keys as many pools, which is
    what fused metadata take."""
    sparse = target.model.sparse
    return 64 if sparse is None else 64 * sparse.pool

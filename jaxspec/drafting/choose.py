"""A drafter by its name, for a target that was loaded: what the command line and the benchmarks offer."""

import logging
from pathlib import Path
from typing import Any

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.block import DFlashDrafter, DSparkDrafter
from jaxspec.drafting.draft_lm import DraftLM
from jaxspec.drafting.eagle import Eagle3Drafter
from jaxspec.drafting.mtp import MTPDrafter
from jaxspec.drafting.ngram import NgramDrafter
from jaxspec.errors import InputError
from jaxspec.models import Checkpoint, embedded_names, embedded_path, load
from jaxspec.models.draft_checkpoint import embedded_draft, load_draft

_LOG = logging.getLogger(__name__)

TRAINED = {"dflash": DFlashDrafter, "dspark": DSparkDrafter, "eagle3": Eagle3Drafter}  # for one target
DRAFTERS = ("dflash", "draft_lm", "dspark", "eagle3", "mtp", "ngram", "none")


def make_drafter(
    name: str, target: Checkpoint, *, draft_model: str | None = None, dtype: str = "float32"
) -> tuple[Drafter | None, Any]:
    """The drafter of that name and its weights.

    Args:
      name: one of `DRAFTERS`; "none" drafts nothing.
      target: whose prediction blocks "mtp" drafts with, and whose features, embedding and head those that are trained
        for one target.
      draft_model: what "draft_lm" drafts with, an embedded model's name or a folder, "draft" by default; or the folder
        of a draft that is trained for this target, by default the one that ships with the library.
      dtype: what the draft computes in.

    Raises:
      InputError: `draft_model` beside another drafter; a target without prediction blocks, or that no draft of the kind
        ships for; a model that cannot draft.
    """
    if name not in ("draft_lm", *TRAINED) and draft_model is not None:
        raise InputError(f"draft_model={draft_model}: of no use with drafter={name}; leave one of them out")
    if name in TRAINED:
        folder = shipped_draft(name, target) if draft_model is None else draft_model
        if folder is None:
            raise InputError(
                f"drafter={name}: no draft of this kind ships with the library for {target.name!r}; give the folder of "
                "one as draft_model"
            )
        draft = load_draft(folder, target, dtype, kind=name)
        for note in draft.notes:
            _LOG.info("%s: %s", name, note)
        return TRAINED[name](draft.draft), draft.params
    if name == "draft_lm":
        draft = load(draft_model or "draft", dtype)
        return DraftLM(draft.draft_model), draft.params
    if name == "mtp":
        return MTPDrafter(target.mtp), target.mtp_params
    return (NgramDrafter() if name == "ngram" else None), ()


def shipped_draft(kind: str, target: Checkpoint) -> Path | None:
    """Folder of the draft of a kind that ships for a target, or None; a folder of one's own that happens to be called
    as an embedded model is another target."""
    embedded = target.name in embedded_names() and target.folder == embedded_path(target.name)
    return embedded_draft(kind, target.name) if embedded else None


def fitting_drafters(target: Checkpoint) -> list[str]:
    """Who can draft for a target without a word from the user: drafts that ship for it and its own prediction blocks,
    or else the embedded draft model, where it shares the vocabulary, and n-grams."""
    trained = [name for name in ("dspark", "eagle3") if shipped_draft(name, target)]
    if target.blocks:
        return [*trained, "mtp"]
    return [*trained, *(["draft_lm"] if load("draft").config.vocab_size == target.config.vocab_size else []), "ngram"]


def page_size_for(target: Checkpoint) -> int:
    """Tokens a page where nobody asks for another size: 64; for a target with compressed keys as many pools, which is
    what fused metadata take."""
    sparse = target.model.sparse
    return 64 if sparse is None else 64 * sparse.pool

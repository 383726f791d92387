"""Drafters: who proposes the tokens that the target verifies."""

from jaxspec.drafting.base import DraftContext, Drafter, Drafts, ExtendContext, extends
from jaxspec.drafting.block import DFlashDrafter, DSparkDrafter
from jaxspec.drafting.draft_lm import DraftLM
from jaxspec.drafting.eagle import Eagle3Drafter
from jaxspec.drafting.mtp import MTPDrafter
from jaxspec.drafting.ngram import NgramDrafter
from jaxspec.drafting.proposals import propose_token

__all__ = [
    "DFlashDrafter",
    "DSparkDrafter",
    "DraftContext",
    "DraftLM",
    "Drafter",
    "Drafts",
    "Eagle3Drafter",
    "ExtendContext",
    "MTPDrafter",
    "NgramDrafter",
    "extends",
    "propose_token",
]

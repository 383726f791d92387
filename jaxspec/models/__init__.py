"""Models: the Qwen3, the hybrid and the GLM family, drafts trained for one of them, checkpoints, the embedded ones."""

from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.checkpoint import Checkpoint, embedded_names, embedded_path, load, random_params, save
from jaxspec.models.config import Qwen3Config
from jaxspec.models.contract import Model, MTPBlocks, from_glm, from_hybrid, from_qwen3
from jaxspec.models.draft_checkpoint import (
    DraftCheckpoint,
    embedded_draft,
    load_draft,
    random_draft_params,
    save_draft,
)
from jaxspec.models.glm import Glm, GlmMTP, dense_attend_pooled
from jaxspec.models.glm_config import GlmConfig
from jaxspec.models.hybrid import Hybrid, dense_recur
from jaxspec.models.hybrid_config import HybridConfig
from jaxspec.models.qwen3 import Qwen3, dense_attend

__all__ = [
    "BlockDraft",
    "BlockDraftConfig",
    "Checkpoint",
    "DraftCheckpoint",
    "Glm",
    "GlmConfig",
    "GlmMTP",
    "Hybrid",
    "HybridConfig",
    "MTPBlocks",
    "Model",
    "Qwen3",
    "Qwen3Config",
    "dense_attend",
    "dense_attend_pooled",
    "dense_recur",
    "embedded_draft",
    "embedded_names",
    "embedded_path",
    "from_glm",
    "from_hybrid",
    "from_qwen3",
    "load",
    "load_draft",
    "random_draft_params",
    "random_params",
    "save",
    "save_draft",
]

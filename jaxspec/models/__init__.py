"""Models: the Qwen3 and the hybrid family, their checkpoints and the embedded ones."""

from jaxspec.models.checkpoint import Checkpoint, embedded_names, embedded_path, load, random_params, save
from jaxspec.models.config import Qwen3Config
from jaxspec.models.contract import Model, from_hybrid, from_qwen3
from jaxspec.models.hybrid import Hybrid, dense_recur
from jaxspec.models.hybrid_config import HybridConfig
from jaxspec.models.qwen3 import Qwen3, dense_attend

__all__ = [
    "Checkpoint",
    "Hybrid",
    "HybridConfig",
    "Model",
    "Qwen3",
    "Qwen3Config",
    "dense_attend",
    "dense_recur",
    "embedded_names",
    "embedded_path",
    "from_hybrid",
    "from_qwen3",
    "load",
    "random_params",
    "save",
]

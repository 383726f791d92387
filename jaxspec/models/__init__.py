"""Models: the Qwen3 family, its checkpoints and the embedded ones."""

from jaxspec.models.checkpoint import Checkpoint, embedded_names, embedded_path, load, random_params, save
from jaxspec.models.config import Qwen3Config
from jaxspec.models.contract import Model, from_qwen3
from jaxspec.models.qwen3 import Qwen3, dense_attend

__all__ = [
    "Checkpoint",
    "Model",
    "Qwen3",
    "Qwen3Config",
    "dense_attend",
    "embedded_names",
    "embedded_path",
    "from_qwen3",
    "load",
    "random_params",
    "save",
]

"""Models: the Qwen3 family, its checkpoints and the embedded ones."""

from jaxspec.models.config import Qwen3Config
from jaxspec.models.qwen3 import Qwen3, dense_attend

__all__ = ["Qwen3", "Qwen3Config", "dense_attend"]

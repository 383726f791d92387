"""Whole generations: prompts in, completions and acceptance figures out."""

from jaxspec.generation.generate import LOOPS, generate
from jaxspec.generation.results import Generation, RequestResult

__all__ = ["LOOPS", "Generation", "RequestResult", "generate"]

"""Whole generations: prompts in, completions and acceptance figures out."""

from jaxspec.generation.generate import LOOPS, generate
from jaxspec.generation.many import ManyRun, generate_many
from jaxspec.generation.progress import Finished, ManyProgress
from jaxspec.generation.results import Generation, RequestResult

__all__ = ["LOOPS", "Finished", "Generation", "ManyProgress", "ManyRun", "RequestResult", "generate", "generate_many"]

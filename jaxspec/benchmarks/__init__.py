"""Experiments that answer one question each, over the public API; `python -m jaxspec bench NAME` runs them.

A benchmark is a module with a SUMMARY, a frozen dataclass `Settings` whose fields are made by
`jaxspec.benchmarks.base.setting`, and `run(settings, task) -> Report`. A field that is not made so,
`kpool_metadata_fusion: bool = False`, is what the environment asks for. An entry in `BENCHMARKS` is all that the
command line needs to know of it.
"""

from jaxspec.benchmarks import (
    acceptance,
    attention,
    fusion_ab,
    generations,
    launches,
    metadata,
    pool_size,
    rounds,
    unified_ab,
)

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    "acceptance": acceptance,
    "attention": attention,
    "fusion-ab": fusion_ab,
    "generate": generations,
    "launches": launches,
    "metadata": metadata,
    "pool-size": pool_size,
    "round": rounds,
    "unified-ab": unified_ab,
}

"""Experiments that answer one question each, over the public API; `python -m jaxspec bench NAME` runs them.

A benchmark is a module with a SUMMARY, a frozen dataclass `Settings` whose fields are made by
`jaxspec.benchmarks.base.setting`, and `run(settings, task) -> Report`. An entry in `BENCHMARKS` is all that the command
line needs to know of it.
"""

from jaxspec.benchmarks import pool_size, unified_ab

__all__ = ["BENCHMARKS"]

BENCHMARKS = {"pool-size": pool_size, "unified-ab": unified_ab}

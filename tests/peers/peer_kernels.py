"""Loads the reference peer's Triton kernels from an unpacked wheel, without the rest of its package.

The wheel's own `__init__` modules register every operator it has and ask for libraries that these kernels do not need.
So the packages on the way to a kernel become empty ones, whose path is all that they have, and the two modules that the
kernels take helpers from become stand-ins. Both are put into `sys.modules`: load in a process that does nothing else.
"""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from peer_job import Refused

OPS = "sglang.kernels.ops"
MODULES = {
    "tables": f"{OPS}.attention.metadata",
    "kpool": f"{OPS}.attention.dsa.kpool_metadata.verify",
    "splits": f"{OPS}.attention.dsa.kpool_metadata.scan",  # the one before imports it
    "window": f"{OPS}.speculative.cache_locs",
    "state": f"{OPS}.mamba.mamba_state_indices_triton",
}


class Kernels(NamedTuple):
    """The host functions that launch a kernel each.

    tables   lengths, prefix sums, FULL and SWA page tables
    kpool    lengths and tables of a verify forward over pooled attention
    window   write locations of a verify forward
    state    state slots of the requests
    """

    tables: Callable
    kpool: Callable
    window: Callable
    state: Callable


def files(folder: Path) -> list[Path]:
    """The files of the wheel that are read."""
    return [folder.joinpath(*name.split(".")).with_suffix(".py") for name in MODULES.values()]


def check(folder: Path) -> None:
    """Raises Refused unless the folder is there and has the kernels."""
    if not folder.is_dir():
        raise Refused(f"--peer={folder} is no folder: give an unpacked sglang wheel, see README.md beside this script")
    missing = [str(path.relative_to(folder)) for path in files(folder) if not path.is_file()]
    if missing:
        raise Refused(f"--peer={folder} lacks {', '.join(missing)}: give an unpacked sglang 0.5.23 wheel")


def version(folder: Path) -> str | None:
    """The wheel's version by its metadata; None if that was left behind."""
    found = sorted(folder.glob("sglang-*.dist-info/METADATA"))
    lines = found[0].read_text(encoding="utf-8").splitlines() if found else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Version:")), None)


def load(folder: Path) -> Kernels:
    """Imports the kernels; needs torch and triton.

    Raises:
      Refused: the folder has no such kernels, or they cannot be imported.
    """
    check(folder)
    for module in MODULES.values():
        parts = module.split(".")
        for end in range(1, len(parts)):
            _package(parts[:end], folder.joinpath(*parts[:end]))
    _package(["sglang", "srt"])
    false = lambda *_: False  # noqa: E731
    systems = dict.fromkeys(("is_cpu", "is_hip", "is_musa", "is_npu", "is_xpu"), false)
    _module("sglang.srt.utils", **systems, is_cuda=lambda: True, next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    _module("sglang.srt.platforms", current_platform=types.SimpleNamespace(is_out_of_tree=false))
    names = {
        "tables": "normal_decode_set_metadata",
        "kpool": "fused_dsa_target_verify_metadata_kpool",
        "window": "assign_extend_cache_locs_uniform_func",
        "state": "fused_replay_state_indices",
    }
    try:
        return Kernels(**{key: getattr(importlib.import_module(MODULES[key]), name) for key, name in names.items()})
    except (ImportError, AttributeError) as error:
        raise Refused(f"the kernels of --peer={folder} cannot be loaded: {error}") from None


def _package(parts: list[str], *path: Path) -> None:
    _module(".".join(parts), __path__=[str(place) for place in path])


def _module(name: str, **attributes) -> None:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module

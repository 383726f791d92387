"""Reading what came out of compiling for an H200 on a machine that has none; `pallas_kernels.aot` compiles.

`lower_text` needs jax alone. With a folder to dump into, XLA leaves there what `thunks` (what the host starts, in
order) and `ptx` (the kernels' code) read.
"""

import os
import re
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import aot
from pallas_kernels.aot import launches, lower_for_h200, missing, ptxas

__all__ = [
    "compile_for_h200",
    "compile_lowered",
    "launches",
    "lower_for_h200",
    "lower_text",
    "missing",
    "ptx",
    "ptxas",
    "thunks",
]


def lower_text(function, *arguments) -> str:
    """StableHLO of function for CUDA, the first argument donated; needs no plugin."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(mesh):
        return jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def compile_for_h200(function, *arguments, dump: Path | None = None):
    """The compiled program, the first argument donated. Given an empty folder, XLA and Mosaic dump into it."""
    return compile_lowered(lower_for_h200(jax.jit(function, donate_argnums=0), *arguments), dump=dump)


def compile_lowered(lowered, *, dump: Path | None = None, **options):
    """`aot.compile_lowered`; given an empty folder, XLA and Mosaic dump into it."""
    if dump is None:
        return aot.compile_lowered(lowered, **options)
    dump.mkdir(exist_ok=True)
    options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "^ptx$"}
    mosaic = {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTX": "1"}
    before = {name: os.environ.get(name) for name in mosaic}
    os.environ.update(mosaic)
    try:
        return aot.compile_lowered(lowered, **options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def thunks(dump: Path) -> list[str]:
    """What the host starts when it runs the program, in order: kCustomKernel, kCopy, kWhile, kCommandBuffer, ...

    What runs inside a loop or a command buffer is not listed.
    """
    # The second file is written only where the passes changed something, so the later one counts.
    path = max(dump.glob("*.thunk_sequence*.txt"), key=lambda path: len(path.name))
    return re.findall(r"^\d+: (k\w+)", path.read_text(), re.MULTILINE)


def ptx(dump: Path) -> dict[str, str]:
    """PTX of the program's kernels by name."""
    texts = [path.read_text() for path in sorted(dump.glob("*.ptx"))]
    return {re.search(r"\.entry (\w+)\(", text).group(1): text for text in texts}

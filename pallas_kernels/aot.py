"""Compiling for an H200 on a machine that has none, and counting what a compiled program starts.

No part of the public functions. It needs the wheels of a jax CUDA plugin and a CUDA compiler; `missing()` says what is
not there.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# The newest CUDA that each plugin is built for. XLA captures a loop only where driver and runtime are 12.3 or newer.
CUDA = {12: "12.9.0", 13: "13.0.0"}

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: %(major)s minor: %(minor)s }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "%(version)s"
  runtime_version: "%(version)s"
  compile_time_toolkit_version: "%(version)s"
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
}
"""


def plugin() -> int | None:
    """The CUDA version of the installed plugin; jax takes the newer one of two."""
    for major in sorted(CUDA, reverse=True):
        try:
            if importlib.util.find_spec(f"jax_plugins.xla_cuda{major}"):
                return major
        except ModuleNotFoundError:
            return None
    return None


def wheels() -> list[Path]:
    """Folders of the compiler's wheel: nvidia-cuda-nvcc of CUDA 13, nvidia-cuda-nvcc-cu12."""
    return [Path(sysconfig.get_path("purelib"), "nvidia", name) for name in ("cu13", "cuda_nvcc")]


TOOLKITS = [Path("/usr/local/cuda"), Path("/opt/cuda")]  # where XLA looks, too


def ptxas() -> Path | None:
    """The assembler: the one on PATH, the toolkit's or the wheel's."""
    if found := shutil.which("ptxas"):
        return Path(found)
    places = (folder / "bin" / "ptxas" for folder in (*TOOLKITS, *wheels()))
    return next((place for place in places if os.access(place, os.X_OK)), None)


def libdevice() -> Path | None:
    """CUDA's library of device functions, in the toolkit or the wheel. Without it Mosaic ends the process."""
    places = (folder / "nvvm/libdevice/libdevice.10.bc" for folder in (*TOOLKITS, *wheels()))
    return next((place for place in places if place.exists()), None)


def missing() -> str | None:
    """What compiling for CUDA still needs on this machine, or None."""
    wheels = "nvidia-cuda-nvcc-cu12" if plugin() == 12 else "nvidia-cuda-nvcc and nvidia-nvvm"
    wanted = [
        ("the wheels of a jax CUDA plugin (pip install --no-deps)", plugin()),
        (f"ptxas (on PATH, in {TOOLKITS[0]} or from {wheels})", ptxas()),
        (f"libdevice (in {TOOLKITS[0]} or from {wheels})", libdevice()),
    ]
    if absent := [name for name, there in wanted if not there]:
        return f"compiling for sm_90 needs {' and '.join(absent)}"
    try:
        device()
    except NotImplementedError:
        return "compiling for sm_90 needs JAX_PLATFORMS=cpu: the CUDA plugin refused to register without its libraries"
    return None


@functools.cache
def device():
    """An H200 to compile for."""
    major, minor, _ = CUDA[plugin()].split(".")
    target = H200 % {"version": CUDA[plugin()], "major": major, "minor": minor}
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target).devices[0]


def lower_for_h200(jitted, *arguments):
    """A jitted function lowered for arguments that lie on the H200. What is not an array is passed on as it is."""
    place = SingleDeviceSharding(device())

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if hasattr(x, "shape") else x

    with jax.default_device(device()):
        return jitted.lower(*jax.tree.map(shape, arguments))


def compile_lowered(lowered, **options):
    """Compiles with further XLA options, and with the ptxas that `ptxas` finds."""
    # XLA itself would take the wheel's or the toolkit's before that. Mosaic looks on PATH first.
    return lowered.compile(compiler_options={"xla_gpu_cuda_data_dir": str(ptxas().parent.parent), **options})


# Counting. What a kind of instruction stands for is a launch, but for these.
NO_WORK = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}
_NO_WORK_EITHER = NO_WORK | {"after-all", "add-dependency", "opt-barrier", "copy-done", "async-done", "async-update"}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = .*? ([a-z][a-z0-9-]*)\(")


def launches(compiled) -> collections.Counter:
    """Number of the entry computation's instructions by kind, without those that do no work."""
    entry, parts = _computations(compiled.as_text())
    kinds = (found[1] for line in parts[entry] if (found := _INSTRUCTION.match(line)))
    return collections.Counter(kind for kind in kinds if kind not in NO_WORK)


class Launch(NamedTuple):
    """An instruction that starts work on the device.

    Attributes:
      kind: fusion, custom-call, copy, ...
      name: names of the functions and scopes that it comes from, as "jit(f)/scope/add"; empty where XLA made it.
      times: how often it runs in one call of the program.
    """

    kind: str
    name: str
    times: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program starts on the device.

    Attributes:
      launches: all of them, those inside loops, conditionals and command buffers too.
      open_loops: loops whose turns are known at run time only. They are counted as if they took one turn.
    """

    launches: tuple[Launch, ...]
    open_loops: int


def read_program(compiled) -> Program:
    """Reads a compiled program's instructions; of the branches of a conditional the one that starts most."""
    entry, parts = _computations(compiled.as_text())

    def one(line: str) -> Program:
        found = _INSTRUCTION.match(line)
        if found is None or found[1] in _NO_WORK_EITHER:
            return Program((), 0)
        kind = found[1]
        if kind == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            if turns:
                body = of(_called(line, "body"))
                times = int(turns[1])
                inner = tuple(launch._replace(times=launch.times * times) for launch in body.launches)
                return Program(inner, body.open_loops)
            body, condition = of(_called(line, "body")), of(_called(line, "condition"))
            return Program(body.launches + condition.launches, body.open_loops + condition.open_loops + 1)
        if kind == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = names[1].replace("%", "").split(", ") if names else _either(line)
            return max(map(of, names), key=lambda program: sum(launch.times for launch in program.launches))
        if kind == "call":
            return of(_called(line, "to_apply"))
        name = re.search(r'op_name="([^"]*)"', line)
        return Program((Launch(kind, name[1] if name else "", 1),), 0)

    @functools.cache
    def of(name: str) -> Program:
        programs = [one(line) for line in parts[name]]
        return Program(sum((p.launches for p in programs), ()), sum(p.open_loops for p in programs))

    return of(entry)


def _called(line: str, role: str) -> str:
    return re.search(rf"\b{role}=%?([\w.\-]+)", line)[1]


def _either(line: str) -> list[str]:
    return [_called(line, "true_computation"), _called(line, "false_computation")]


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The entry's name, and the lines of all computations by name."""
    parts: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            lines = parts[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return entry, parts

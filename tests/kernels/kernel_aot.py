"""Lowering and compiling for an H200 on a machine that has none, and reading what came out.

`lower_text` needs jax alone. `compile_for_h200` needs the wheels of a CUDA plugin and a CUDA compiler; `missing()` says
what is not there. With a folder to dump into, XLA leaves there what `thunks` (what the host starts, in order) and `ptx`
(the kernels' code) read.
"""

import collections
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

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

NO_WORK = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}


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


def lower_text(function, *arguments) -> str:
    """StableHLO of function for CUDA, the first argument donated; needs no plugin."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(mesh):
        return jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def compile_for_h200(function, *arguments, dump: Path | None = None):
    """The compiled program, the first argument donated. Given an empty folder, XLA and Mosaic dump into it."""
    return compile_lowered(lower_for_h200(jax.jit(function, donate_argnums=0), *arguments), dump=dump)


def lower_for_h200(jitted, *arguments):
    """A jitted function lowered for arguments that lie on the H200. What is not an array is passed on as it is."""
    place = SingleDeviceSharding(device())

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if hasattr(x, "shape") else x

    with jax.default_device(device()):
        return jitted.lower(*jax.tree.map(shape, arguments))


def compile_lowered(lowered, *, dump: Path | None = None, **options):
    """Compiles with further XLA options, and with the ptxas that `ptxas` finds."""
    # XLA itself would take the wheel's or the toolkit's before that. Mosaic looks on PATH first.
    options["xla_gpu_cuda_data_dir"] = str(ptxas().parent.parent)
    if dump is None:
        return lowered.compile(compiler_options=options)
    dump.mkdir(exist_ok=True)
    options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "^ptx$"}
    mosaic = {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTX": "1"}
    before = {name: os.environ.get(name) for name in mosaic}
    os.environ.update(mosaic)
    try:
        return lowered.compile(compiler_options=options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def launches(compiled) -> collections.Counter:
    """Number of the entry computation's instructions by kind, without those that do no work."""
    entry = re.search(r"^ENTRY .*?\{\n(.*?)^\}", compiled.as_text(), re.MULTILINE | re.DOTALL).group(1)
    kinds = re.findall(r"^\s*(?:ROOT )?%?\S+ = .*? ([a-z][a-z0-9-]*)\(", entry, re.MULTILINE)
    return collections.Counter(kind for kind in kinds if kind not in NO_WORK)


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

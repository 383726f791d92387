"""Lowering and compiling for an H200 on a machine that has none."""

import collections
import glob
import importlib.util
import re
import shutil
import site

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
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


def missing() -> str | None:
    """What compiling for CUDA still needs on this machine, or None."""
    try:
        plugin = any(importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13))
    except ModuleNotFoundError:
        plugin = False
    places = ["/usr/local/cuda*/bin/ptxas", *(f"{p}/nvidia/*/bin/ptxas" for p in site.getsitepackages())]
    ptxas = shutil.which("ptxas") or any(glob.glob(place) for place in places)
    wanted = [("the jax CUDA plugin wheels (pip install --no-deps)", plugin), ("ptxas", ptxas)]
    absent = [name for name, there in wanted if not there]
    if absent:
        return f"compiling for sm_90 needs {' and '.join(absent)}"
    try:
        _device()
    except NotImplementedError:
        return "compiling for sm_90 needs JAX_PLATFORMS=cpu: the CUDA plugin refused to register without its libraries"
    return None


def _device():
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200).devices[0]


def lower_text(function, *arguments) -> str:
    """StableHLO of function for CUDA, the first argument donated; needs no plugin."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(mesh):
        return jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def compile_for_h200(function, *arguments):
    """The compiled program, the first argument donated."""
    device = _device()
    place = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with jax.default_device(device):
        lowered = jax.jit(function, donate_argnums=0).lower(*shapes)
    return lowered.compile()


def launches(compiled) -> collections.Counter:
    """Number of the entry computation's instructions by kind, without those that do no work."""
    entry = re.search(r"^ENTRY .*?\{\n(.*?)^\}", compiled.as_text(), re.MULTILINE | re.DOTALL).group(1)
    kinds = re.findall(r"^\s*(?:ROOT )?%?\S+ = .*? ([a-z][a-z0-9-]*)\(", entry, re.MULTILINE)
    return collections.Counter(kind for kind in kinds if kind not in NO_WORK)

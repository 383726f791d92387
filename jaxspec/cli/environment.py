"""What the machine offers: versions, devices, and whether a GPU lies idle."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

import jaxspec

_CUDA13_DRIVER = 580  # the oldest driver that runs CUDA 13; CUDA 12 runs on those before


def describe() -> dict[str, Any]:
    """Versions of what a result depends on, and the devices jax sees."""
    packages = ("jax", "jaxlib", "flax", "numpy", "tokenizers")
    return {
        "versions": {
            "jaxspec": jaxspec.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in packages},
            **{name: version for name in _CUDA_PLUGINS if (version := _version(name))},
        },
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def idle_gpu_advice(root: Path = Path("/")) -> str | None:
    """One line with the command that mends it, if an NVIDIA GPU is visible that jax does not use; else None.

    Args:
      root: where dev/ and proc/ are looked for.
    """
    if _has_cuda_device():
        return None
    driver = nvidia_driver(root)
    if driver is None:
        return None
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted and not {"cuda", "gpu"} & set(wanted.split(",")):
        return f"an NVIDIA GPU is visible but JAX_PLATFORMS={wanted} keeps jax from it: unset JAX_PLATFORMS"
    major = int(driver.partition(".")[0] or 0)
    extra = "cuda13" if major >= _CUDA13_DRIVER else "cuda12"
    plugin = next((name for name in _CUDA_PLUGINS if _version(name)), None)
    state = f"{plugin} finds no device" if plugin else "jax has no CUDA plugin"
    known = f" (driver {driver})" if driver else ""
    return f"an NVIDIA GPU is visible{known} but {state}: pip install '.[{extra}]'"


def _has_cuda_device() -> bool:
    try:
        return any(device.platform == "gpu" for device in jax.devices())
    except RuntimeError:  # JAX_PLATFORMS names a backend that cannot start
        return False


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA driver, "" if a GPU is visible but its driver's version is not, None if there is no GPU."""
    version = root / "proc/driver/nvidia/version"
    if version.is_file():
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", version.read_text(errors="replace"))
        return found[1] if found else ""
    asked = _nvidia_smi()
    if asked is not None:
        return asked
    return "" if (root / "dev/nvidia0").exists() else None


def _nvidia_smi() -> str | None:
    """The driver's version as nvidia-smi prints it, one line a GPU; None without the tool or without a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines and re.fullmatch(r"[\d.]+", lines[0]) else None

"""`python -m jaxspec doctor`: what is installed, which devices jax sees, and which kernel backends would run."""

import sys
from typing import Any

import jax
from absl import flags

from jaxspec.cli import environment, switches
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.models import embedded_names
from pallas_kernels import explain_backends

SUMMARY = "Says which versions, devices, kernel backends and embedded models there are."


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_string(
        "json", None, "File to write the findings to as JSON; - is standard output.", flag_values=values
    )


def run(values: flags.FlagValues) -> int:
    """Prints the findings. Exit status 1 if jax finds no device at all."""
    output = JsonFile(values.json)
    try:
        jax.devices()
    except RuntimeError as error:
        print(f"error: jax finds no device: {' '.join(str(error).split())}", file=sys.stderr)
        if advice := environment.idle_gpu_advice():
            print(advice, file=sys.stderr)
        return 1
    findings = examine(switches.kpool_metadata_fusion())
    output.write(findings)
    if not output.to_stdout:
        print("\n".join(_lines(findings)))
    return 0


def examine(fusion: bool) -> dict[str, Any]:
    """What the command knows, ready for JSON.

    Args:
      fusion: whether the environment asks for fused metadata.
    """
    return {
        **environment.describe(),
        "kernels": [choice._asdict() for choice in explain_backends()],
        "kpool_metadata_fusion": {"switch": switches.KPOOL_METADATA_FUSION, "requested": fusion},
        "embedded_models": list(embedded_names()),
        "advice": environment.idle_gpu_advice(),
    }


def _lines(findings: dict[str, Any]):
    yield "  ".join(f"{name} {version}" for name, version in findings["versions"].items())
    yield f"devices: {', '.join(findings['devices'])} ({findings['backend']})"
    for kernel in findings["kernels"]:
        yield f"kernel {kernel['kernel']}: {kernel['backend']} ({kernel['reason']})"
    yield f"metadata of sparse layers: {_fusion(findings)}"
    yield f"embedded models: {', '.join(findings['embedded_models']) or 'none'}"
    if findings["advice"]:
        yield findings["advice"]


def _fusion(findings: dict[str, Any]) -> str:
    switch, requested = (findings["kpool_metadata_fusion"][key] for key in ("switch", "requested"))
    if not requested:
        return f"separate operations ({switch}=1 asks for one kernel a forward)"
    if findings["backend"] not in ("gpu", "cuda"):
        return f"separate operations ({switch}=1, but one kernel takes a CUDA device; found {findings['backend']})"
    return f"one kernel a forward where a model's geometry allows it ({switch}=1)"

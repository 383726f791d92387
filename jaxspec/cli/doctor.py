"""`python -m jaxspec doctor`: what is installed, which devices jax sees, and which kernel backends would run."""

import sys
from typing import Any

import jax
from absl import flags

from jaxspec.cli import environment
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
    findings = examine()
    output.write(findings)
    if not output.to_stdout:
        print("\n".join(_lines(findings)))
    return 0


def examine() -> dict[str, Any]:
    """What the command knows, ready for JSON."""
    return {
        **environment.describe(),
        "kernels": [choice._asdict() for choice in explain_backends()],
        "embedded_models": list(embedded_names()),
        "advice": environment.idle_gpu_advice(),
    }


def _lines(findings: dict[str, Any]):
    yield "  ".join(f"{name} {version}" for name, version in findings["versions"].items())
    yield f"devices: {', '.join(findings['devices'])} ({findings['backend']})"
    for kernel in findings["kernels"]:
        yield f"kernel {kernel['kernel']}: {kernel['backend']} ({kernel['reason']})"
    yield f"embedded models: {', '.join(findings['embedded_models']) or 'none'}"
    if findings["advice"]:
        yield findings["advice"]

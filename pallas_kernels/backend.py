"""Which implementation runs: the compiled Triton kernel, its interpreter, or the jnp reference."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

BACKENDS = ("reference", "interpret", "triton")
KERNELS = ("decode_metadata", "decode_lengths", "draft_write_window")
MIN_CAPABILITY = (8, 0)  # of the CUDA device, for compiled Pallas Triton


class BackendChoice(NamedTuple):
    """What `backend=None` means on this machine for one kernel."""

    kernel: str
    backend: str
    reason: str


def check(backend: str | None) -> None:
    """Raise ValueError unless `backend` is None or one of `BACKENDS`."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}, "
            "or None to follow the platform that is compiled for"
        )


def run(backend: str | None, kernel: Callable, reference: Callable, *operands):
    """Call `kernel(*operands, interpret=...)` or `reference(*operands)`.

    With `backend=None` the choice is made when the program is lowered, not when it is traced: CUDA gets the kernel,
    any other platform the reference. So a program compiled for a GPU on a machine without one holds the kernel, and
    a CPU program never lowers it. The branch that is not taken leaves nothing behind: no launch, no copy.
    """
    check(backend)
    if backend == "reference" or (backend is None and _too_old(_capability())):
        return reference(*operands)
    if backend is None:
        return lax.platform_dependent(*operands, cuda=lambda *a: kernel(*a, interpret=False), default=reference)
    return kernel(*operands, interpret=backend == "interpret")


# On an H200, 1000 turns in one command buffer, packed verify metadata, six shapes from B = 1 to 256: decode_metadata
# and draft_write_window together add 1.9 to 2.9 us to a turn, the references as XLA fuses them 9.9 to 14.1 us.
_PAIR = "with its companion 4.5 to 5.4 times faster than XLA's fusion of the references on an H200"
_MEASURED = {
    "decode_metadata": _PAIR,
    "decode_lengths": "one launch; not timed on its own",
    "draft_write_window": _PAIR,
}


def explain_backends() -> list[BackendChoice]:
    """For each kernel the backend that `backend=None` takes for the default device, and why.

    >>> [c.kernel for c in explain_backends()]
    ['decode_metadata', 'decode_lengths', 'draft_write_window']
    """
    capability = _capability()
    if capability is None or _too_old(capability):
        device = jax.devices()[0]
        found = f"{device.device_kind} ({device.platform})"
        if capability is not None:
            found = f"{device.device_kind} (compute capability {capability[0]}.{capability[1]})"
        reason = f"compiled Pallas Triton needs a CUDA device of compute capability 8.0 or newer; found {found}"
        return [BackendChoice(kernel, "reference", reason) for kernel in KERNELS]
    return [BackendChoice(kernel, "triton", f"a CUDA device; {_MEASURED[kernel]}") for kernel in KERNELS]


def _capability() -> tuple[int, int] | None:
    """Compute capability of the default CUDA device; None when the default device is no CUDA device."""
    device = jax.devices()[0]
    version = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or version is None or "cuda" not in device.client.platform_version.lower():
        return None
    major, _, minor = str(version).partition(".")
    return int(major), int(minor or 0)


def _too_old(capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability < MIN_CAPABILITY

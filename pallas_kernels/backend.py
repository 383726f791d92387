"""Which executor runs an operation: the compiled kernels, the interpreter, the checked run, or the jnp reference."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import checked, mosaic, triton
from pallas_kernels.lanes import Operation

BACKENDS = ("reference", "interpret", "checked", "triton", "mosaic")
KERNELS = (
    "decode_metadata",
    "decode_lengths",
    "draft_extend_metadata",
    "kv_read_table",
    "kv_read_stream",
    "draft_write_window",
    "extend_cache_locs",
    "replay_state_indices",
    "commit_track_indices",
    "state_scatter",
    "commit_context_rows",
    "paged_attention",
    "page_zero",
    "forward_metadata",
    "kpool_decode",
    "kpool_verify",
    "kpool_draft_extend",
    "kpool_write_plan",
    "kpool_append_tail",
    "kpool_ragged_layout",
    "top_ids",
    "pool_scores",
    "row_products",
    "head_rotary",
    "store_rows",
    "store_heads",
    "row_sums",
)
# Those that `dispatch` runs: Triton or the reference.
TILED = ("paged_attention", "pool_scores", "row_products", "head_rotary", "store_rows", "store_heads", "row_sums")
CAPABILITY = {"triton": (8, 0), "mosaic": (9, 0)}  # oldest CUDA device of each compiled backend
_UNAVAILABLE = {"triton": triton.unavailable, "mosaic": mosaic.unavailable}


class BackendChoice(NamedTuple):
    """What `backend=None` means on this machine for one kernel."""

    kernel: str
    backend: str
    reason: str


# On an H200 (jax 0.11.2): 1000 calls in one command buffer less an empty loop, medians of nine, page-granular tables,
# at (B, live tokens, D) = (1, 2048, 4), (48, 2560, 8), (256, 8192, 4), (16, 131072, 6). Below 0.3 us is noise. Mosaic
# was right everywhere and up to 0.9 us a call behind Triton; the reference is what XLA makes of the jnp code.
_MEASURED = {
    "decode_metadata": "1.1 to 1.9 us a call on an H200, XLA's fusion of the reference 3.2 to 5.7",
    "decode_lengths": "0.7 to 0.9 us a call on an H200, XLA's fusion of the reference 1.3 to 2.4",
    "draft_extend_metadata": "1.1 to 2.0 us a call on an H200, XLA's fusion of the reference 6.1 to 9.5",
    "kv_read_table": "1.3 to 2.0 us a call on an H200, as XLA's fusion of the reference",
    "kv_read_stream": "1.7 to 4.8 us a call on an H200, the reference 70 to 280; for one request it is the reference, "
    "1.1 against 1.8",
    "draft_write_window": "0.9 to 1.1 us a call on an H200, XLA's fusion of the reference 6.6 to 7.2",
    "extend_cache_locs": "1.7 to 2.5 us a call on an H200, the reference 51 to 89; for one request it is the "
    "reference, 0.9 against 1.7",
    "replay_state_indices": "XLA's fusion of the reference 0.1 to 2.0 us a call on an H200, the kernel 1.9 to 2.3",
    "commit_track_indices": "XLA's fusion of the reference 0.4 to 1.0 us a call on an H200, the kernel 0.8 to 1.4",
    "state_scatter": "1.7 to 7.1 us a call on an H200 (64 KB each of 1 to 256 requests), the reference 5.5 to 1804",
    "forward_metadata": "1.1 to 1.9 us a step on an H200 (FULL and SWA pages), XLA's fusion of the reference 5.2 to "
    "6.1",
    # benchmarks/h200/attention.json: medians of ten calls of a loop, less one without attention.
    "paged_attention": "260 us a call on an H200 (8 requests of 32,768 keys, one row each, bfloat16), XLA's gather "
    "839; 15 (1,024 keys each), XLA's gather 38",
    # 20 calls in one command buffer.
    "top_ids": "11.9 to 50.6 us a call on an H200 (8 to 128 rows of 2,048 to 32,768 scores, budget 512), lax.top_k and "
    "a sort 26.6 to 282.4; 45.2 against 282.4 for 96 rows of 32,768, 50.6 against 82.7 for 8",
    # benchmarks of the products alone, 80 in one command buffer less one without them.
    "row_products": "50 us a call on an H200 (8 rows, a gated pair of 4096 x 12288), XLA's two products and what joins "
    "them 57",
    # From traces of a round of 36 layers.
    "head_rotary": "2.0 us a call on an H200 (8 rows of 32 and 8 heads of 128, bfloat16), XLA's three kernels 4.9",
    "store_rows": "1.6 us a call on an H200 (8 rows of 2048), XLA's scatter 2.6, but joined with what makes the rows",
    "store_heads": "2.2 us a call on an H200 (8 rows of 32 and 8 heads of 128, bfloat16), head_rotary and scatter 4.6",
    "row_sums": "2.1 us a call on an H200 (8 parts of 8 rows of 4096), XLA's sum 2.0 and norm 1.9",
    "page_zero": "2.2 us a call on an H200 (3 pages of each of two kinds), the reference 63; 2.1 when there is nothing "
    "to do, the reference less than 0.1",
}

# Their operations say so too, at every shape.
_LEFT_TO_XLA = ("replay_state_indices", "commit_track_indices", "store_rows")


def check(backend: str | None) -> None:
    """Raise ValueError unless `backend` is None or one of `BACKENDS`."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}, "
            "or None to follow the platform that is compiled for"
        )


def run(operation: Operation, backend: str | None, inputs: tuple, outputs: tuple) -> tuple:
    """The outputs after the operation, computed by a backend.

    With `backend=None` the choice is made when the program is lowered, not when it is traced: CUDA gets the kernel,
    any other platform the reference. So a program compiled for a GPU on a machine without one holds the kernel, and
    a CPU program never lowers it. The branch that is not taken leaves nothing behind: no launch, no copy.
    """
    if backend in _UNAVAILABLE and (reason := declined(backend, (*inputs, *outputs))):
        raise ValueError(f"backend={backend!r}: {reason}; leave backend out, or name 'reference' or 'interpret'")
    if backend == "checked":
        return checked.launch(operation, tuple(inputs), outputs)
    return _compiled(operation, backend, tuple(inputs), outputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(operation: Operation, backend: str | None, inputs: tuple, outputs: tuple) -> tuple:
    chosen = backend or _fastest(_capability())[0]
    by_itself = backend is None and operation.reference_is_faster
    nothing = operation.programs == 0 or not any(x.size for x in outputs)
    if chosen == "reference" or by_itself or nothing:
        return operation.reference(inputs, outputs)
    launch = {"triton": triton.launch, "mosaic": mosaic.launch, "interpret": _interpret}[chosen]
    kernel = functools.partial(_launch, launch, operation)
    if backend is None:
        return lax.platform_dependent(inputs, outputs, cuda=kernel, default=operation.reference)
    return kernel(inputs, outputs)


_interpret = functools.partial(triton.launch, interpret=True)


def _launch(launch, operation: Operation, inputs: tuple, outputs: tuple) -> tuple:
    """The outputs after the launch, in which one cell stands for each array without any.

    Pallas divides by the dimensions of a Triton kernel's arrays, and a masked lane of a Mosaic kernel reads cell 0.
    """
    cells = [[x if x.size else jnp.zeros((1,) * x.ndim, x.dtype) for x in arrays] for arrays in (inputs, outputs)]
    results = launch(operation, *map(tuple, cells))
    return tuple(after if before.size else before for before, after in zip(outputs, results, strict=True))


def declined(backend: str, arrays: tuple = ()) -> str | None:
    """Why a compiled backend will not run on these arrays here, or None.

    Traced arrays have no device yet and are not asked for one: a program may be compiled for a GPU that is not there.
    """
    if reason := _UNAVAILABLE[backend]():
        return reason
    capability = _capability()
    if capability is not None and capability < CAPABILITY[backend]:
        return (
            f"it needs a CUDA device of compute capability {_dotted(CAPABILITY[backend])} or newer; found {_device()}"
        )
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return None
    elsewhere = {d for a in arrays if isinstance(a, jax.Array) for d in a.devices() if d.platform != "gpu"}
    if elsewhere or capability is None:
        found = ", ".join(sorted(str(d) for d in elsewhere)) or _device()
        return f"it runs on arrays on a CUDA device; found {found}"
    return None


def explain_backends() -> list[BackendChoice]:
    """For each kernel the backend that `backend=None` takes for the default device, and why.

    >>> [c.kernel for c in explain_backends()][:3]
    ['decode_metadata', 'decode_lengths', 'draft_extend_metadata']
    """
    capability = _capability()
    if capability is None:
        reason = f"the compiled kernels need a CUDA device; found {_device()}"
        return [BackendChoice(kernel, "reference", reason) for kernel in KERNELS]
    backend, reason = _fastest(capability)
    said = {kernel for kernel in _MEASURED if backend == "triton" or kernel in _LEFT_TO_XLA}
    measured = {kernel: f"; {_MEASURED[kernel]}" if kernel in said else "" for kernel in KERNELS}
    left = (*_LEFT_TO_XLA, *(TILED if backend != "triton" else ()))
    chosen = {kernel: "reference" if kernel in left else backend for kernel in KERNELS}
    return [BackendChoice(kernel, chosen[kernel], reason + measured[kernel]) for kernel in KERNELS]


def _fastest(capability: tuple[int, int] | None) -> tuple[str, str]:
    """(backend, reason) for CUDA: Triton, whose launches are shorter on an H200; Mosaic where there is no Triton."""
    reasons = []
    for backend in ("triton", "mosaic"):
        reason = _UNAVAILABLE[backend]()
        if reason is None and capability is not None and capability < CAPABILITY[backend]:
            reason = f"{backend} needs compute capability {_dotted(CAPABILITY[backend])} or newer; found {_device()}"
        if reason is None:
            return backend, "a CUDA device" + "".join(f"; {r}" for r in reasons)
        reasons.append(reason)
    return "reference", "; ".join(reasons)


def _capability() -> tuple[int, int] | None:
    """Compute capability of the default CUDA device; None when the default device is no CUDA device."""
    device = jax.devices()[0]
    version = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or version is None or "cuda" not in device.client.platform_version.lower():
        return None
    major, _, minor = str(version).partition(".")
    return int(major), int(minor or 0)


def _device() -> str:
    device, capability = jax.devices()[0], _capability()
    return f"{device.device_kind} ({f'compute capability {_dotted(capability)}' if capability else device.platform})"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

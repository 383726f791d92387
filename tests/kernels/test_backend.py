"""Every operation refuses a compiled backend that cannot run on its arrays, and says why."""

import jax
import kernel_calls
import pytest

from pallas_kernels import KERNELS, mosaic
from pallas_kernels.backend import TILED

OPERATIONS = ["decode, packed", "lengths, separate", "extend, separate", "window, packed"]
OPERATIONS += ["read table", "read stream", "cache locations"]
OPERATIONS += ["replay", "commit track", "state scatter", "context rows", "page zero"]
OPERATIONS += ["append tail", "ragged layout"]
OPERATIONS += ["forward, pooled verify, states", "kpool decode", "kpool verify", "kpool extend", "kpool plan"]
APART = {"top_ids", *TILED}  # without a destination; modules of their own say what they refuse
each_operation = pytest.mark.parametrize("name", OPERATIONS)


def on_the_cpu(name, backend):
    """The operation on arrays in the host's memory, also where there is a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return kernel_calls.CALLS[name][0](*kernel_calls.values(name), backend=backend)


def test_every_operation_is_here():
    assert len(OPERATIONS) == len(set(KERNELS) - APART)


@each_operation
def test_triton(name):
    message = "^backend='triton': it runs on arrays on a CUDA device; found .*; leave backend out, or name 'reference'"
    with pytest.raises(ValueError, match=message):
        on_the_cpu(name, "triton")


@each_operation
@pytest.mark.skipif(bool(mosaic.unavailable()), reason="this jax has no Mosaic GPU")
def test_mosaic(name):
    with pytest.raises(ValueError, match=r"^backend='mosaic': it runs on arrays on a CUDA device; found "):
        on_the_cpu(name, "mosaic")


@each_operation
def test_mosaic_on_a_jax_too_old(name, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    message = r"^backend='mosaic': Mosaic GPU kernels need jax 0\.11\.2 or newer; this is 0\.11\.1; leave backend out"
    with pytest.raises(ValueError, match=message):
        on_the_cpu(name, "mosaic")

"""Fixtures that more than one test module uses, and what compiling for an H200 without one needs."""

import glob
import os

import jax
import pytest
import tiny_models
import unified_cases
from oracles import GreedyOracle

from jaxspec.steps import compiler_options

if not glob.glob("/dev/nvidia[0-9]*"):
    # Lets jax's CUDA plugin register where there is no GPU and no cuDNN; read when jax starts its backends.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


# A process may have 65,530 mappings on most machines, and dies of one more; each compiled program takes some.
MANY_MAPPINGS = 30_000


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten():
    """Drops the compiled programs after a module once there are many: they are thousands in a run, and gigabytes."""
    yield
    try:
        with open("/proc/self/maps") as lines:
            many = sum(1 for _ in lines) > MANY_MAPPINGS
    except OSError:
        return  # not Linux
    if many:
        jax.clear_caches()


@pytest.fixture
def untuned(monkeypatch):
    """Steps whose products have the tiles that XLA guesses.

    On a GPU it tries dozens for each product otherwise, of which some of float32 take minutes to compile: too long for
    a test that compiles many programs, or one of large products. Without a GPU nothing is other than it was.
    """
    if options := compiler_options():
        guessed = options | {"xla_gpu_autotune_level": 0}
        monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: guessed)


@pytest.fixture(scope="session")
def greedy():
    """`greedy(prompt, count)`: what the tiny target says after a prompt, computed without a cache."""
    return GreedyOracle(tiny_models.MODULE, tiny_models.target_params(), tiny_models.CONTEXT)


@pytest.fixture(scope="session")
def tight():
    """(step, weights) of the tests of unified memory."""
    return unified_cases.tight_step()

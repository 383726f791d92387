"""Fixtures that more than one test module uses, and what compiling for an H200 without one needs."""

import glob
import os

import jax
import pytest
import tiny_models
import unified_cases
from oracles import GreedyOracle

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


@pytest.fixture(scope="session")
def greedy():
    """`greedy(prompt, count)`: what the tiny target says after a prompt, computed without a cache."""
    return GreedyOracle(tiny_models.MODULE, tiny_models.target_params(), tiny_models.CONTEXT)


@pytest.fixture(scope="session")
def tight():
    """(step, weights) of the tests of unified memory."""
    return unified_cases.tight_step()

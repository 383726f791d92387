"""Fixtures that more than one test module uses, and what compiling for an H200 without one needs."""

import glob
import os

import pytest
import tiny_models
import unified_cases
from oracles import GreedyOracle

if not glob.glob("/dev/nvidia[0-9]*"):
    # Lets jax's CUDA plugin register where there is no GPU and no cuDNN; read when jax starts its backends.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


@pytest.fixture(scope="session")
def greedy():
    """`greedy(prompt, count)`: what the tiny target says after a prompt, computed without a cache."""
    return GreedyOracle(tiny_models.MODULE, tiny_models.target_params(), tiny_models.CONTEXT)


@pytest.fixture(scope="session")
def tight():
    """(step, weights) of the tests of unified memory."""
    return unified_cases.tight_step()

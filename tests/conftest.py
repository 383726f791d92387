"""Fixtures that more than one test module uses."""

import pytest
import tiny_models
from oracles import GreedyOracle


@pytest.fixture(scope="session")
def greedy():
    """`greedy(prompt, count)`: what the tiny target says after a prompt, computed without a cache."""
    return GreedyOracle(tiny_models.MODULE, tiny_models.target_params(), tiny_models.CONTEXT)

"""Problems that are trained on Ray and in this process."""

import pytest

from tests.sim.engines.ray.problems import Problem


@pytest.fixture(scope="session")
def together(ray_session):
    """A perceptron, whose clients are trained together."""
    with Problem("mlp", clients=12, examples=20) as problem:
        yield problem


@pytest.fixture(scope="session")
def one_by_one(ray_session):
    """LeNet, whose clients are trained one by one."""
    with Problem("lenet", clients=6, examples=8) as problem:
        yield problem

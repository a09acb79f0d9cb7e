"""One Ray for all tests of a process: four cores, of which some are pretended, as its GPU is."""

import pytest

from tests.engines.ray.problems import Problem

STORE_BYTES = 200 << 20


@pytest.fixture(scope="session")
def ray_session():
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    from fedcore.engines.ray import Session

    with Session(cpus=6, num_gpus=1, object_store_memory=STORE_BYTES) as session:
        yield session


@pytest.fixture(scope="session")
def together(ray_session):
    """A perceptron, whose clients are trained together, on two workers and in this process."""
    with Problem("mlp", clients=12, examples=20) as problem:
        yield problem


@pytest.fixture(scope="session")
def one_by_one(ray_session):
    """LeNet, whose clients are trained one by one."""
    with Problem("lenet", clients=6, examples=8) as problem:
        yield problem

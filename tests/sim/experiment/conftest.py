import pytest

from fedcore.sim.experiment import Experiment, load_preset


@pytest.fixture
def small() -> Experiment:
    """The quickstart with two rounds and two seeds."""
    return load_preset("quickstart", ["rounds=2", "seeds=[0, 1]"])

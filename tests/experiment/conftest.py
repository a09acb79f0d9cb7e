from collections.abc import Iterator

import pytest
import torch

from fedcore.experiment import Experiment, load_preset


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """As in the processes of a run; two threads that spin for work also starve each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> Experiment:
    """The quickstart in a second: two rounds, two seeds."""
    return load_preset("quickstart", ["rounds=2", "seeds=[0, 1]"])

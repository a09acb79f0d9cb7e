"""Values of a server are immutable."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from fedcore import Compute, Server
from fedcore.options import Limits
from fedcore.server.broadcast import WholeVectors
from fedcore.server.report import Report
from fedcore.server.step import History, Population
from fedcore.server.update import SentSlices, Slices


def server():
    return Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.1, compute=Compute(accumulator="exact"))


VALUES = {
    "Broadcast": lambda: server().broadcast([0]),
    "History": History,
    "Limits": Limits,
    "PartialSum": lambda: server().open_round().partial_sum(),
    "Population": Population,
    "Report": lambda: Report(0),
    "SentSlices": lambda: SentSlices((), (), None, None),
    "Settings": lambda: server().settings,
    "Slices": lambda: Slices(()),
    "WholeVectors": lambda: WholeVectors(np.zeros(2, np.float32), None, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_no_field_can_be_set(name):
    value = VALUES[name]()
    assert type(value).__name__ == name
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)

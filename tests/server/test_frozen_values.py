"""The values that a server hands out, or goes on from, are never changed in place."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from fedcore import Server
from fedcore.server.history import History
from fedcore.server.limits import Limits
from fedcore.server.population import Population
from fedcore.server.report import RoundReport
from fedcore.server.sent_vectors import Whole
from fedcore.server.slices import SentSlices, Slices


def server():
    return Server("FedAvg", np.zeros(2, np.float32), clients=2, lr=0.1, accumulate="exact")


VALUES = {
    "Broadcast": lambda: server().broadcast([0]),
    "History": History,
    "Limits": Limits,
    "Partial": lambda: server().open_round().partial(),
    "Population": Population,
    "RoundReport": lambda: RoundReport(0),
    "SentSlices": lambda: SentSlices((), (), None, None),
    "Settings": lambda: server()._settings,
    "Slices": lambda: Slices(()),
    "Whole": lambda: Whole(np.zeros(2, np.float32), None, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_no_field_can_be_set(name):
    value = VALUES[name]()
    assert type(value).__name__ == name
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)

"""The messages that go to the clients of a round."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedcore.adapters.flower.records import write_vector
from fedcore.server import Broadcast

METHOD = "fedcore"
"""The record of what a method orders (``Assignment.numbers``), and the beginning of the names of its vectors; a reply's
record of this name says what the client did."""


def model_alone(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Each client with what Flower's own FedAvg would send it: for clients of plain steps at a rate of their own."""
    for client in sent.ids:
        yield int(client), RecordDict({arrays_key: model, config_key: config})


def instructions(
    sent: Broadcast, model: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> Iterator[tuple[int, RecordDict]]:
    """Each client with the content of its message; made one by one, so that one offset is alive at a time.

    The model and what is the same for all are shared between the contents.
    """
    config["lr"] = sent.lr
    shared: dict[str, tuple[Any, ArrayRecord]] = {}
    for client in sent.ids:
        assignment = sent.of(client)
        order = ConfigRecord(assignment.numbers())
        content = RecordDict({arrays_key: model, config_key: config, METHOD: order})
        for name, vector in assignment.vectors().items():
            if name not in shared or vector is not shared[name][0]:
                shared[name] = vector, write_vector(np.asarray(vector))
            content[f"{METHOD}.{name}"] = shared[name][1]
        yield int(client), content

"""What goes to the clients of a round."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedcore.adapters.flower.records import write_vector
from fedcore.adapters.order import fields_of
from fedcore.server import Broadcast

METHOD = "fedcore"
"""The record of what a method orders (``order.FIELDS``); a reply's record of this name says what the client did."""
OFFSET = "fedcore.offset"
X_PREV = "fedcore.x_prev"


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
    order = ConfigRecord(fields_of(sent))
    x_prev = None if sent.x_prev is None else write_vector(sent.x_prev)
    shared: tuple[Any, ArrayRecord] | None = None
    for client in sent.ids:
        content = RecordDict({arrays_key: model, config_key: config, METHOD: order})
        if sent.has_offset:
            offset = sent.offset(client)
            if shared is None or offset is not shared[0]:
                shared = offset, write_vector(np.asarray(offset))
            content[OFFSET] = shared[1]
        if x_prev is not None:
            content[X_PREV] = x_prev
        yield int(client), content

"""Flower's Message API: ``flwr.serverapp.strategy.FedAvg``, and fedcore's strategy of that name, with real messages."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedcore.adapters import flower
from tests.adapters.flower.local_grid import LocalGrid
from tests.conformance.cases import Case, Reply
from tests.conformance.rows import numpy_of

NAME = "Flower: `serverapp.strategy.FedAvg`"
PACKAGE, EXTRA = "flwr", "flower"

STAYS = ("no numbers of examples",)
DEVIATES = {
    "no numbers of examples": "rejected",
    "one number of examples is missing": "rejected",
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "a bool buffer": "dtypes",
    "packed uint8, the same for all clients": "dtypes",
    "packed uint8, different for one client": "rejected",
    "a missing tensor": "rejected",
    "a reply with an unreadable tensor": "rejected",
    "a duplicate reply": "no duplicates",
    "a late reply": "late update",
}
WRONG = {
    "bfloat16": "The average raises UFuncTypeError: NumPy has no such dtype.",
    "a NaN in one reply": "The average is NaN.",
    "all clients without examples": "The round ends in a ZeroDivisionError.",
}
CANNOT = {"a sparse tensor": "A message contains only dense arrays."}


def theirs(case: Case) -> Mapping[str, Any]:
    """Run a round of Flower's own strategy."""
    return _round(FedAvg, case)


def ours(case: Case) -> Mapping[str, Any]:
    """Run a round of fedcore's strategy in its place."""
    return _round(flower.FedAvg, case)


def _round(strategy_of: type[Strategy], case: Case) -> Mapping[str, Any]:
    names = [one.client for one in case.replies]
    nodes = {name: 17 + i for i, name in enumerate(dict.fromkeys(names))}
    k = len(nodes)
    strategy = strategy_of(fraction_evaluate=0.0, min_train_nodes=k, min_available_nodes=k)
    grid = LocalGrid({node: (ClientApp(), {}) for node in nodes.values()})
    x0 = ArrayRecord({name: Array(numpy_of(tensor)) for name, tensor in case.x0.items()})
    messages = {}
    for message in strategy.configure_train(1, x0, ConfigRecord(), grid):
        message.metadata.__dict__["_message_id"] = f"message {len(messages)}"
        messages[message.metadata.dst_node_id] = message
    replies = []
    for one in case.models():
        message = messages[nodes[one.client]]
        if one.is_late:
            message = Message(message.content, message.metadata.dst_node_id, "train")
            message.metadata.__dict__["_message_id"] = "a message of an earlier round"
        replies.append(Message(_content(one), reply_to=message))
    arrays, _ = strategy.aggregate_train(1, replies)
    return {name: _numbers(array) for name, array in arrays.items()}


def _content(one: Reply) -> RecordDict:
    arrays = {name: Array(numpy_of(tensor)) for name, tensor in one.tensors.items()}
    if one.breaks:
        second = list(arrays)[1]
        arrays[second] = Array(arrays[second].dtype, arrays[second].shape, arrays[second].stype, b"")
    counts = {} if one.examples is None else {"num-examples": one.examples}
    return RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({**counts, "loss": 1.0})})


def _numbers(array: Array) -> np.ndarray:
    numbers = array.numpy()
    return numbers.view(ml_dtypes.bfloat16) if array.dtype == "bfloat16" else numbers

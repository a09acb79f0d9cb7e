"""Flower: a strategy over ``LocalGrid``; replies are written as records past the checks of the sender's side."""

from contextlib import suppress
from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedcore.adapters import flower, npy
from fedcore.adapters.flower import Task
from tests.adapters.drivers import LR, MODEL, Driver, method, sizes_by_id
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.malformed import ODD

KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}
W = MODEL["w"]
BYTES = [
    lambda: npy.write(W)[:-1],
    lambda: npy.write(W) + b"\x00",
    lambda: npy.write(W).replace(b"<f4", b"|O8"),
    lambda: npy.write(W).replace(b"(2, 3)", b"(3, 2)"),
    lambda: npy.write(W).replace(b"(2, 3)", b"(9, 9)"),
    lambda: npy.write(W).replace(b"(2, 3), }", b"(2**63,)}"),
    lambda: npy.write(np.full((2, 3), np.nan, np.float32)),
    lambda: b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535,
    lambda: b"\x80\x04\x95" + bytes(100),
    lambda: (-1,),
    lambda: (2**62, 2**62),
    lambda: "bfloat16",
    lambda: "pickle",
]
"""Wrong fields of an array."""


def array(values):
    values = np.array(values)
    np.save(file := BytesIO(), values)
    return {"dtype": str(values.dtype), "shape": values.shape, "stype": "numpy.ndarray", "data": file.getvalue()}


def record_of(part):
    """A part as Flower's object, past the checks that it makes on the sender's side."""
    if type(part) is not dict:
        return part
    fields = {str(key): value for key, value in part.items()}
    if "dtype" in fields or "data" in fields:
        made = Array.__new__(Array)
        made.__dict__.update(fields)
        return made
    kind, items = fields.get("kind"), fields.get("items")
    if type(kind) is not str or kind not in KINDS:
        return part
    return unchecked(KINDS[kind](), {k: record_of(v) for k, v in items.items()} if type(items) is dict else items)


def unchecked(record, data):
    record.__dict__["_data"] = data
    return record


def content_of(part):
    content = unchecked(RecordDict(), {k: record_of(v) for k, v in part.items()} if type(part) is dict else part)
    with suppress(Exception):
        return recorddict_from_proto(recorddict_to_proto(content))  # as it travels, if it can
    return content


class ShuffledGrid(LocalGrid):
    """Replies arrive one or a few at a pull, in a random order."""

    order = None

    def pull_messages(self, message_ids):
        if self.order is None:
            return super().pull_messages(message_ids)
        there = [number for number in message_ids if number in self.replies]
        some = self.order.permutation(len(there))[: int(self.order.integers(0, len(there) + 1))]
        return super().pull_messages([there[i] for i in some])


def strategy_of(algorithm, **options):
    """The strategy of an algorithm with its options."""

    class Mine(flower.ServerStrategy, method=type(algorithm)):
        def __init__(self, **how):
            super().__init__(**how)
            self.algorithm = algorithm

    return Mine(**{"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1, "poll": 0.001, **options})


class Flower(Driver):
    has_late_replies = True
    odd = (*ODD, *BYTES)

    def ids(self, n):
        return [2**63 + 10 * i for i in range(n)]

    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, **options):
        ids = self.ids(n)
        strategy = strategy_of(method(algorithm), lr=lr, min_train_nodes=n, **sizes_by_id(options, ids))
        self.strategy = strategy
        grid = ShuffledGrid({node: (self._app(i, work), {}) for i, node in enumerate(ids)})
        grid.order = order
        initial = ArrayRecord({name: Array(np.asarray(x)) for name, x in x0.items()})
        result = strategy.start(grid, initial, rounds, timeout=30)
        return strategy.server, strategy.reports, {name: array.numpy() for name, array in result.arrays.items()}

    def _app(self, i, work):
        def app(message, context):
            task = Task.of(message)
            answer = work(task.round, i, task.tensors, task)
            if answer is None:
                raise RuntimeError("no answer")
            return Message(self.message(answer, task.tensors), reply_to=message)

        return app

    def form(self, update, sent):
        form = {"arrays": {"kind": "arrays", "items": {name: array(y) for name, y in update.value.items()}}}
        if update.control is not None:
            form["fedcore.control"] = {"kind": "arrays", "items": {"0": array(update.control)}}
        claims = {"steps": update.steps, "lr": update.lr, "loss": update.loss}
        done = {name: value for name, value in claims.items() if value is not None}
        metrics = {"num-examples": update.examples, "loss": 1.0}
        return form | {"metrics": {"kind": "metrics", "items": metrics}, "fedcore": {"kind": "config", "items": done}}

    def built(self, form):
        return content_of(form)

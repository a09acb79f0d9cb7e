"""A round's replies as Flower delivers them, and Flower's FedAvg on them."""

import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity


def quiet():
    """Silence Flower's logs, and let its code run outside an app."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def replies(clients, sizes):
    """Return the records of ``clients`` replies, with one array per size and distinct payloads."""
    quiet()
    rng = np.random.default_rng(0)
    return [[ArrayRecord([rng.random(n, dtype=np.float32) for n in sizes]) for _ in range(clients)]]


def model_and_clients(clients, sizes):
    """Return a model, and the number of nodes that reply with copies of it."""
    return [replies(1, sizes)[0][0], clients]


class Fixed(Grid):
    """A Grid whose nodes 1..S reply immediately, node i with the i-th record."""

    run = set_run = create_message = None

    def __init__(self, records):
        self.records, self.asked = records, {}
        rest = [{"metrics": MetricRecord({"num-examples": 10 + node % 3})} for node in self.get_node_ids()]
        output = ConfigRecord({"steps": 4})
        self.contents = [
            RecordDict({"arrays": record, **more, "fedcore": output})
            for record, more in zip(records, rest, strict=True)
        ]

    def get_node_ids(self):
        return list(range(1, len(self.records) + 1))

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"{len(self.asked)}"
            message.metadata.__dict__["_message_id"] = number
            self.asked[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        return [self.reply(self.asked.pop(number)) for number in list(message_ids) if number in self.asked]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message):
        return Message(self.contents[message.metadata.dst_node_id - 1], reply_to=message)


class NoOp(Fixed):
    """A Grid whose nodes do not train; a pulled reply consists of new bytes, as with a network."""

    def __init__(self, model, clients):
        super().__init__([model] * clients)

    def reply(self, message):
        content, copies = self.contents[message.metadata.dst_node_id - 1], ArrayRecord()
        for name, array in content["arrays"].items():
            copies[name] = Array(array.dtype, array.shape, array.stype, bytes(bytearray(array.data)))
        return Message(RecordDict({**content, "arrays": copies}), reply_to=message)


def flower_fedavg(records):
    """Return a function that aggregates one reply per node with Flower; all replies are in memory."""
    strategy, grid = FedAvg(), Fixed(records)
    replies = grid.send_and_receive(strategy.configure_train(1, records[0], ConfigRecord(), grid))
    return lambda: strategy.aggregate_train(1, replies)[0]


def flower_rounds(model, clients):
    """Return a function that runs two rounds of Flower's FedAvg with no-op clients."""
    grid = NoOp(model, clients)
    return lambda: FedAvg(fraction_evaluate=0.0).start(grid, model, 2)

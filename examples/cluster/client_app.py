"""A Flower client with the notebook's local step."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

optimum = np.random.default_rng(0).normal(size=(10, 1000)).astype(np.float32)
app = ClientApp()


@app.train()
def train(message, context):
    x, lr = message.content["arrays"]["x"].numpy(), message.content["config"]["lr"]
    y = x - np.float32(lr) * (x - optimum[context.node_config["partition-id"]])
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord({"x": Array(y)}), "metrics": metrics}), reply_to=message)

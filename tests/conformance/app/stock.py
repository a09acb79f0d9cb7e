"""A ServerApp of Flower's or fedcore's strategy, and a ClientApp without fedcore."""

from importlib import import_module

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from tests.conformance.clients import ROUNDS, SIZES, first_model, trained

client = ClientApp()
server = ServerApp()


def record(model):
    return ArrayRecord({name: Array(values) for name, values in model.items()})


@client.train()
def train(message, context):
    number = int(context.node_config["partition-id"])
    y = trained({name: array.numpy() for name, array in message.content["arrays"].items()}, number)
    content = {"arrays": record(y), "metrics": MetricRecord({"num-examples": SIZES[number]})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    import torch  # not by the clients: each message starts a process

    from tests.conformance.processes import keep

    config, k = context.run_config, len(SIZES)
    strategy = getattr(import_module(config["module"]), config["strategy"])
    strategy = strategy(fraction_evaluate=0.0, min_train_nodes=k, min_available_nodes=k)
    result = strategy.start(grid, record(first_model()), ROUNDS)
    # FedAdam of Flower makes float64 of float32.
    keep({name: torch.from_numpy(array.numpy()).float() for name, array in result.arrays.items()}, config["folder"])

"""APPFL: the aggregator as the server agent calls it, which ``appfl/test_appfl.py`` runs; clients report no rates."""

import logging

import numpy as np
import torch

from fedcore.adapters.appfl import Aggregator
from tests.adapters.drivers import LR, MODEL, Driver, arranged, plain_task
from tests.adapters.malformed import ODD


class Net(torch.nn.Module):
    """The model, which the aggregator loads from this file: floats in "running..." and integers are buffers."""

    def __init__(self, x0):
        super().__init__()
        for name, x in x0.items():
            tensor = torch.from_numpy(np.array(x))
            if tensor.is_floating_point() and not name.startswith("running"):
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


class Appfl(Driver):
    odd = ODD

    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, client_sizes=None, **options):
        ids = self.ids(n)
        options |= {"model_path": __file__, "model_name": "Net", "model_kwargs": {"x0": x0}, "algorithm": algorithm}
        if client_sizes is not None:
            options["client_sizes"] = dict(zip(ids, client_sizes, strict=True))
        weights = {"client_weights_mode": "sample_size"}
        aggregator = Aggregator({"lr": lr, "num_clients": n, **weights, **options}, logging.getLogger("appfl"))
        model = aggregator.get_parameters()
        while aggregator.server is None or aggregator.server.round_number < rounds:
            t = 0 if aggregator.server is None else aggregator.server.round_number
            sent = {name: tensor.numpy() for name, tensor in model.items()}
            models, metadata = {}, {}
            for i in arranged(range(n), order):
                if (answer := work(t, i, sent, plain_task(t, lr))) is None:
                    continue
                message = self.message(answer, sent)
                fields = {str(k): v for k, v in message.items()} if type(message) is dict else {"model": message}
                more = fields.get("metadata")
                for name, value in more.items() if type(more) is dict else ():
                    metadata.setdefault(str(name), {})[ids[i]] = value
                aggregator.set_client_sample_size(ids[i], fields.get("examples"))
                models[ids[i]] = fields.get("model")
            model = aggregator.aggregate(models, **metadata)
        return aggregator.server, aggregator.reports, {name: tensor.numpy() for name, tensor in model.items()}

    def form(self, update, sent):
        model = {name: torch.from_numpy(np.array(y)) for name, y in update.value.items()}
        return {"model": model, "metadata": {"steps": update.steps, "loss": 1.0}, "examples": update.examples}

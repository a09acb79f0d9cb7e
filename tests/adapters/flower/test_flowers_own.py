"""FedAvg inside Flower against Flower's own, on client apps that know neither."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcore.adapters import flower
from tests.adapters.flower.local_grid import LocalGrid

ROUNDS = 3
MODEL = {"w": np.ones((7, 12), np.float32), "b": np.zeros(7, np.float32), "scale": np.float32([2, 3])}


def app_of(seed):
    """A client app that goes half-way to a model of its own, with seed + 1 examples."""
    rng, app = np.random.default_rng(seed), ClientApp()
    target = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in MODEL.items()}

    @app.train()
    def train(message, context):
        sent = message.content["arrays"]
        record = ArrayRecord({name: Array((sent[name].numpy() + target[name]) / 2) for name in sent})
        metrics = MetricRecord({"num-examples": seed + 1})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app


def run(strategy, nodes):
    """The model of each round."""
    models = []

    def keep(_, arrays):
        models.append(np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()]))

    grid = LocalGrid({17 + seed: (app_of(seed), {}) for seed in range(nodes)})
    first = ArrayRecord({name: Array(x) for name, x in MODEL.items()})
    strategy.start(grid, first, ROUNDS, evaluate_fn=keep)
    return np.array(models)


@pytest.mark.parametrize(("nodes", "fold"), [(1, None), (4, None), (5, None), (5, 2)])
def test_fedavg_is_flower_s_own(nodes, fold):
    how = dict(fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=nodes)
    theirs = run(FedAvg(**how), nodes)
    ours = run(flower.FedAvg(lr=0.1, fold=fold, poll=0.001, **how), nodes)
    assert len(theirs) == 1 + ROUNDS
    assert np.abs(np.diff(theirs, axis=0)).max(axis=0).min() > 1e-3  # each element went somewhere
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

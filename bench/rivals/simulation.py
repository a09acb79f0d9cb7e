"""Rounds of simulated federated averaging in pfl-research and in a plain torch loop."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

LR = 0.01
SHAPES = {"lenet": (1, 28, 28), "cnn-cifar10": (3, 32, 32), "mlp": (1, 8, 8), "logistic": (60,)}


def problem(model, clients, examples, batch, epochs, rounds):
    """Return the examples of all clients in sequence, and the arguments as an array, for any process.

    The examples are noise, since the time of a step does not depend on their values.
    """
    rng = np.random.default_rng(0)
    x = rng.random((clients * examples, *SHAPES[model]), np.float32)
    return x, rng.integers(10, size=len(x)), [model, clients, batch, epochs, rounds]


def module(model):
    """Return a network with the layers of this name in ``fedcore.sim.nets``."""
    if model == "logistic":
        return nn.Sequential(nn.Linear(60, 10))
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    channels, features = {"lenet": (1, 256), "cnn-cifar10": (3, 400)}[model]
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def torch_loop(x, y, numbers):
    """Return a function that trains all clients with one model and optimiser, and averages per parameter."""
    model, clients, batch, epochs, rounds = numbers
    net = module(model)
    parameters = list(net.parameters())
    sent, mean = ([p.detach().clone() for p in parameters] for _ in range(2))
    optimiser = torch.optim.SGD(parameters, lr=LR)
    data = [
        (torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(*(np.split(v, clients) for v in (x, y)), strict=True)
    ]

    def client_round(inputs, labels):
        for _ in range(epochs):
            for chosen in torch.randperm(len(labels)).split(batch):
                optimiser.zero_grad()
                cross_entropy(net(inputs[chosen]), labels[chosen]).backward()
                optimiser.step()

    def run():
        for _ in range(rounds):
            for m in mean:
                m.zero_()
            for inputs, labels in data:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, sent)
                client_round(inputs, labels)
                with torch.no_grad():
                    torch._foreach_add_(mean, parameters, alpha=1 / clients)
            torch._foreach_copy_(sent, mean)

    return run


def pfl_rounds(x, y, numbers):
    """Return a function that runs pfl's federated averaging, with prepared tensors and without evaluation."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    name, clients, batch, epochs, rounds = numbers

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = module(name)

        def loss(self, inputs, labels, eval=False):
            return cross_entropy(self.net(inputs), labels)

        def metrics(self, inputs, labels, eval=False):
            return {}

    users = [
        PyTorchTensorDataset([torch.from_numpy(a), torch.from_numpy(b)], user_id=str(user))
        for user, (a, b) in enumerate(zip(*(np.split(v, clients) for v in (x, y)), strict=True))
    ]

    def federated():
        return FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(clients))))

    inner = Model()
    model = PyTorchModel(inner, torch.optim.SGD, torch.optim.SGD(inner.parameters(), lr=1.0))
    backend, algorithm = SimulatedBackend(federated(), federated()), FederatedAveraging()
    train = NNTrainHyperParams(local_num_epochs=epochs, local_learning_rate=LR, local_batch_size=batch)
    done = 0

    def run():
        nonlocal done
        done += rounds  # continue after the last round; pfl evaluates only in its first round
        params = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=None
        )
        algorithm.run(params, backend, model, train, send_metrics_to_platform=False)

    return run

"""The clients of the runs with real processes: least squares on each one's own examples, the same on every run."""

import numpy as np

SIZES, ROUNDS, BATCH, LR = (20, 1000), 3, 10, 0.1
STEPS = tuple(size // BATCH for size in SIZES)


def first_model():
    """x0, whose tensors are named as those of ``torch.nn.Linear(8, 4)``."""
    random = np.random.default_rng(7)
    return {"weight": random.normal(size=(4, 8)).astype(np.float32), "bias": random.normal(size=4).astype(np.float32)}


def batches_of(client):
    """A client's examples and targets."""
    random = np.random.default_rng(client)
    data = (random.normal(client, 1, (SIZES[client], width)).astype(np.float32) for width in (8, 4))
    return zip(*(np.split(array, STEPS[client]) for array in data), strict=True)


def trained(x, client):
    """A client's model after one pass over its examples, from x; half the mean square is the loss."""
    weight, bias = (np.array(x[name], np.float32) for name in ("weight", "bias"))
    for examples, targets in batches_of(client):
        error = (examples @ weight.T + bias - targets) / np.float32(targets.size)
        weight -= np.float32(LR) * (error.T @ examples)
        bias -= np.float32(LR) * error.sum(axis=0)
    return {"weight": weight, "bias": bias}


def averaged(weights):
    """FedAvg's last model by definition, with the clients' weights."""
    x, shares = first_model(), np.array(weights) / sum(weights)
    for _ in range(ROUNDS):
        replies = [trained(x, client) for client in range(len(SIZES))]
        x = {name: sum(share * one[name] for share, one in zip(shares, replies, strict=True)) for name in x}
    return x


def net(dtype="float32"):
    """x0 as a module of torch, which is imported here: each of Flower's messages starts a process that needs none."""
    import torch

    module = torch.nn.Linear(8, 4)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in first_model().items()})
    return module.to(getattr(torch, dtype))


def trained_tensors(x, client):
    """``trained`` for tensors of torch, in their dtype."""
    import torch

    y = trained({name: tensor.float().numpy() for name, tensor in x.items()}, client)
    return {name: torch.from_numpy(array).to(x[name].dtype) for name, array in y.items()}

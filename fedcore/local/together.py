"""The models that can be trained together, many clients at once, and whether that gains on this machine."""

import copy
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import nn

from fedcore.assignment import Assignment
from fedcore.errors import RangeError
from fedcore.local.batched_sgd import MOST_PARAMETERS, batched_sgd
from fedcore.local.convnet import ConvNet
from fedcore.local.flat import FlatModel
from fedcore.local.layers import Net
from fedcore.local.perceptron import Perceptron
from fedcore.local.sgd import sgd
from fedcore.local_rules import Table

TURNS = 7
"""How often each way is timed: the least of them is little of what else the machine does."""
STEPS = 4
"""Local steps in a turn."""


def net_of(module: nn.Module, shape: tuple[int, ...]) -> Net | None:
    """The network of a module whose clients can be trained together; None if they are trained one by one.

    Args:
        module: of float32 tensors.
        shape: an example's.
    """
    net = Perceptron.of(module, shape) or ConvNet.of(module, shape)
    return net if net is not None and net.n <= MOST_PARAMETERS else None


def can_be_measured(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Tell whether ``gains`` has an answer: for convolutional networks that can be trained together.

    Perceptrons of that size always gain. How convolutions compare depends on the machine and on torch's libraries.

    Args:
        module: of float32 tensors.
        shape: an example's.
    """
    return isinstance(net_of(module, shape), ConvNet)


def gains(module: nn.Module, shape: tuple[int, ...], *, batch: int) -> bool:
    """Measure whether clients are trained faster together than one by one.

    Args:
        module: of float32 tensors, on the CPU; it stays as it is.
        shape: an example's.
        batch: the size of a minibatch.

    Raises:
        RangeError: the model cannot be trained together.

    Determinism: none, so whoever asks has to keep the answer: the two ways differ in rounding.
    Cost: a hundred local steps of one client, on as many threads as torch has.
    """
    net = net_of(module, shape)
    if net is None:
        raise RangeError("module: expected a network that net_of knows, got one whose clients are trained one by one")
    model, clients = FlatModel(copy.deepcopy(module)), net.most_clients(batch)
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.random((batch, *shape), np.float32))
    labels = torch.zeros(batch, dtype=torch.int64)
    table = Table(np.tile(np.arange(batch), (STEPS, 1)), np.full(STEPS, batch))
    assignment, ys = Assignment(round=0, lr=1e-6), np.tile(model.flat.numpy(), (clients, 1))

    def one_by_one() -> None:
        sgd(model, inputs, labels, table.indices, assignment)

    def together() -> None:
        batched_sgd(net, ys, inputs, labels, [table] * clients, [assignment] * clients)

    apart, at_once = _seconds(one_by_one), _seconds(together)  # the first turns of both also warm up
    for _ in range(TURNS):
        apart, at_once = min(apart, _seconds(one_by_one)), min(at_once, _seconds(together))
    return at_once / clients < apart


def _seconds(work: Callable[[], None]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun

"""The models that can be trained together, many clients at once, and which way gains on this machine."""

import copy
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedcore.assignment import Assignment
from fedcore.errors import RangeError
from fedcore.local.batched_sgd import MOST_PARAMETERS, batched_sgd
from fedcore.local.convnet import ConvNet
from fedcore.local.flat import FlatModel
from fedcore.local.functional import Functional
from fedcore.local.layers import Net
from fedcore.local.perceptron import Perceptron
from fedcore.local.sgd import sgd
from fedcore.local.torch_device import CPU, repeatable, synchronize
from fedcore.local_rules import Table
from fedcore.typing import F32

Way = bool | Literal["vmap"]
"""The way in which clients are trained: False for one by one, True together by products of the network's own where
there are such, "vmap" together by torch's batching of functions."""

TURNS = 7
"""How often each way is timed: the least of them is little of what else the machine does."""
STEPS = 4
"""Local steps in a turn."""
COHORT = 16
"""The most clients that a turn has, unless it is said how many."""


def net_of(module: nn.Module, shape: tuple[int, ...], way: Way = True, device: torch.device = CPU) -> Net | None:
    """The network of a module whose clients can be trained together; None if they are trained one by one.

    Args:
        module: of float32 tensors, on the CPU or the device.
        shape: an example's.
        way: False gives None. True gives the products of a perceptron or a convolutional network, on the CPU of at
            most ``MOST_PARAMETERS`` parameters; and on a GPU ``Functional`` for others.
        device: where clients are trained.

    Raises:
        RangeError: the way is none, or "vmap" and the model is none that torch can batch.
    """
    if way not in (True, False, "vmap"):
        raise RangeError(f"together: expected True, False or 'vmap', got {way!r}")
    if way is False:
        return None
    if way == "vmap":
        batched = Functional.of(module, shape, device)
        if batched is None:
            raise RangeError(
                "together: expected a model without buffers, dropout and hooks, whose scores of an example are no "
                "matter of the others, for 'vmap', got another one: train it one by one"
            )
        return batched
    net = Perceptron.of(module, shape) or ConvNet.of(module, shape)
    if device.type == "cpu":
        return net if net is not None and net.n <= MOST_PARAMETERS else None
    return net or Functional.of(module, shape, device)


def can_be_measured(module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> bool:
    """Tell whether ``fastest`` has an answer: for whatever can be trained together and is no perceptron.

    Perceptrons of that size always gain. How convolutions compare depends on the machine and on torch's libraries.

    Args:
        module: of float32 tensors.
        shape: an example's.
        device: where clients are trained.
    """
    net = net_of(module, shape, device=device)
    return net is not None and not isinstance(net, Perceptron)


def fastest(module: nn.Module, shape: tuple[int, ...], *, batch: int, device: torch.device = CPU) -> Way:
    """Measure in which way clients are trained fastest: one by one, by products, and on a GPU also by "vmap".

    Args:
        module: of float32 tensors, on the CPU; it stays as it is.
        shape: an example's.
        batch: the size of a minibatch.
        device: where clients are trained.

    Raises:
        RangeError: the model cannot be trained together.

    Determinism: none, so whoever asks has to keep the answer: the ways differ in rounding.
    Cost: a hundred local steps of one client for each way, on as many threads as torch has.
    """
    took = seconds_of_ways(module, shape, batch=batch, device=device)
    if len(took) == 1:
        raise RangeError("module: expected a network that net_of knows, got one whose clients are trained one by one")
    return min(took, key=took.__getitem__)


def seconds_of_ways(
    module: nn.Module,
    shape: tuple[int, ...],
    *,
    batch: int,
    device: torch.device = CPU,
    vmap: bool | None = None,
    cohort: int = COHORT,
) -> dict[Way, float]:
    """The seconds that a client's step takes in each way that there is; the arguments are those of ``fastest``.

    Args:
        vmap: whether "vmap" is among the ways; None for on a GPU alone.
        cohort: the most clients in a call.
    """
    nets: dict[Way, Net] = {}
    if (own := net_of(module, shape, device=device)) is not None and not isinstance(own, Functional):
        nets[True] = own
    batched = Functional.of(module, shape, device) if (device.type != "cpu" if vmap is None else vmap) else None
    if batched is not None:
        nets["vmap"] = batched
    model = FlatModel(copy.deepcopy(module), device)
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.random((batch, *shape), np.float32)).to(device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    table = Table(np.tile(np.arange(batch), (STEPS, 1)), np.full(STEPS, batch))
    assignment = Assignment(round=0, lr=1e-6)
    x = model.flat.cpu().numpy().copy()

    def one_by_one() -> None:
        sgd(model, inputs, labels, table.indices, assignment)

    def together(net: Net, ys: F32) -> None:
        batched_sgd(net, ys, inputs, labels, [table] * len(ys), [assignment] * len(ys))

    ways: dict[Way, tuple[Callable[[], None], int]] = {False: (one_by_one, 1)}
    for way, net in nets.items():
        clients = min(cohort, net.most_clients(batch, device))
        ways[way] = partial(together, net, np.tile(x, (clients, 1))), clients
    took: dict[Way, float] = dict.fromkeys(ways, float("inf"))
    for turn in range(TURNS + 1):
        for way, (work, clients) in ways.items():
            seconds = _seconds(work, device) / (clients * STEPS)
            took[way] = min(took[way], seconds) if turn else float("inf")  # the first turn warms up
    return took


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    begun = perf_counter()
    with repeatable(device):
        work()
    synchronize(device)
    return perf_counter() - begun

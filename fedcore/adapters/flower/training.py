"""A client's whole round on a torch module, by ``fedcore.simulation.sgd``: a ClientApp of a few lines."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Message
from torch import nn

from fedcore.adapters.flower.client import Task
from fedcore.simulation.local_rules import minibatches
from fedcore.simulation.sgd import FlatModel, LocalOptions, sgd


def train(
    message: Message,
    module: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    batch: int,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    client: int = 0,
    options: LocalOptions | None = None,
    metrics: dict[str, Any] | None = None,
    arrays: str = "arrays",
) -> Message:
    """Load the model of a message, do the method's local steps on cross entropy, and make the reply.

    Args:
        message: of one of fedcore's strategies.
        module: on the CPU, with tensors named as the model's arrays; it is taken over (see ``FlatModel``) and holds y
            afterwards.
        inputs, labels: the client's examples: float32[m, ...], int64[m].
        batch: the size of a minibatch.
        epochs, steps: local passes, or local steps. One of the two.
        seed, client: the run's seed and the client's index, on which and on the round the minibatches depend.
        options: weight decay, momentum and clipping; SCAFFOLD needs ``control="sent"`` for the last two.
        metrics, arrays: as for ``Task.reply`` and ``Task.of``.

    Raises:
        ArrayError, DtypeError, ShapeError, ConfigError: message or module are not what is said above.
        RangeError: a number is out of range; the method derives gradients from plain steps, and ``options`` has
            momentum or clipping; or it has clients keep their own rows, which is left to a loop of one's own.
        UnknownNameError: there is no such local rule.
    """
    task = Task.of(message, arrays=arrays)
    task.require_followed(plain=options is None or options.plain)
    model = _at(task, module, task.x)
    previous = None if task.x_prev is None else _at(task, copy.deepcopy(module), task.x_prev)
    batches = minibatches(
        len(labels),
        task.local_rule.batch(batch),
        epochs=epochs,
        steps=steps,
        seed=seed,
        round=task.round,
        client=client,
    )
    work = sgd(
        model,
        inputs,
        labels,
        task.local_rule.along(batches, len(labels)),
        task,
        x=task.x[: task.layout.n_parameters],
        previous=previous,
        options=options,
    )
    return task.reply(module, steps=work.steps, examples=len(labels), metrics=metrics, control=work.control)


def _at(task: Task, module: nn.Module, x: npt.NDArray[np.float32]) -> FlatModel:
    """The module in training mode with the values of a vector, and with the task's integer counters."""
    model = FlatModel(module)
    model.layout.flatten(task.tensors)  # refuses a module of other tensors
    model.load(x)
    buffers = dict(module.named_buffers())
    for piece in model.layout.outside:
        buffers[piece.name].copy_(torch.from_numpy(task.tensors[piece.name].copy()))
    module.train()
    return model

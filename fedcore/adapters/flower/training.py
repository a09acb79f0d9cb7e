"""Local training of a torch module for a ClientApp, with ``fedcore.sim.sgd``."""

import copy
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Message
from torch import nn

from fedcore.adapters.flower.client import Task
from fedcore.algorithms.local_rules import along, batch_of, minibatches
from fedcore.sim.sgd import FlatModel, LocalOptions, carry, mean_loss, sgd


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
    """Load the model of a message, do the method's local steps on the cross entropy, and return the reply.

    Args:
        message: a message of a fedcore strategy.
        module: a module on the CPU whose tensors have the names of the model's arrays, in any order. Tensors that the
            message lacks, such as personal ones, start from the module's values. The function moves the tensors into
            one vector (see ``FlatModel``); they hold y afterwards.
        inputs, labels: the client's examples, float32[m, ...] and int64[m].
        batch: the size of a minibatch.
        epochs, steps: the number of local passes or of local steps; give one of the two.
        seed, client: the run's seed and the client's index. The minibatches depend on both and on the round.
        options: weight decay, momentum and clipping. With SCAFFOLD, the last two need ``control="sent"``.
        metrics, arrays: as for ``Task.reply`` and ``Task.of``.

    Raises:
        ArrayError, DtypeError, ShapeError, ConfigError: the message or the module does not fit.
        RangeError: ``options`` has momentum or clipping, but the method derives gradients from plain steps; or the
            method's clients keep their own rows, which needs a custom training loop.
    """
    task = Task.of(message, arrays=arrays)
    task.require_followed(plain=options is None or options.plain)
    model = FlatModel(module)
    own = model.layout
    named = {own.aliases.get(k, k): one for part in (module.state_dict(), task.tensors) for k, one in part.items()}
    model.load(own.flatten(named), own.read_counters(named))
    module.train()
    previous = None if task.x_prev is None else FlatModel(copy.deepcopy(module))
    if previous is not None:
        carry(task.x_prev, task.layout, own, previous.flat.numpy())
    order = dict(epochs=epochs, steps=steps, seed=seed, round=task.round, client=client)
    batches = minibatches(len(labels), batch_of(task.local_rule, batch), **order)  # type: ignore[arg-type]
    batches, x = along(task.local_rule, batches, len(labels)), model.parameters.numpy().copy()
    loss = mean_loss(model, inputs, labels) if task.needs_loss else None
    followed = replace(task, offset=carry(task.offset, task.layout, own))
    work = sgd(model, inputs, labels, batches, followed, x=x, previous=previous, options=options)
    control = carry(work.control, own, task.layout)
    return task.reply(module, steps=work.steps, metrics=metrics, examples=len(labels), control=control, loss=loss)

"""A client's local work: stochastic gradient descent along the direction that its method asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from fedcore.assignment import Assignment
from fedcore.local.flat import FlatModel
from fedcore.local.local_step import LocalOptions, mean_rate, rate, rate_of, steps_of
from fedcore.local.torch_device import chosen, on_host
from fedcore.typing import F32


@dataclass(frozen=True)
class Work:
    """The work that a client did.

    Attributes:
        steps: K_i.
        lr: eta_i, the mean of its steps' rates.
        control: float32[n_parameters], the mean of its gradients, where that was asked.
    """

    steps: int
    lr: float
    control: npt.NDArray[np.float32] | None


@np.errstate(over="ignore", invalid="ignore")  # the server refuses who diverges, and says it in words
def sgd(
    model: FlatModel,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    batches: Iterable[npt.NDArray[np.int64]],
    assignment: Assignment,
    *,
    x: F32 | None = None,
    previous: FlatModel | None = None,
    options: LocalOptions | None = None,
) -> Work:
    """The assignment's steps, one a minibatch, which both gradients see; y is the model, and x_prev ``previous``.

    grad is the gradient of the minibatch's mean cross entropy, plus weight_decay times the point.

    Args:
        model: holds x_t, and afterwards y: ``model.flat`` is changed in place.
        inputs: float32[m, ...] on the model's device, read-only.
        labels: int64[m], likewise.
        batches: indices into the two, int64[b] each.
        assignment: what the client is asked to do. Its ``x_prev`` is not read here, nor is its local rule.
        x: float32[n_parameters], x_t; needed where ``mu`` is not 0.
        previous: a copy of the model that holds x_{t-1}; needed where ``b`` is not 0. Its parameters stay; its
            BatchNorm statistics are nobody's.
        options: weight decay, momentum and clipping; None for none. The last two only where the assignment does not ask
            for ``plain`` steps, from which the server derives the client's gradient.

    Cost: a step adds to the forward and backward pass two gathers, the pass that clears ``grad``, and one pass of
        ``kernels.direction_step``, whatever the number of the model's tensors. Minibatches, offset and x come to a GPU
        in one copy each, before the first step, and no step waits for it.
    """
    options = options or LocalOptions()
    steps = 0
    control, lr = torch.zeros_like(model.parameters) if assignment.second else None, rate(assignment)
    descent = steps_of(
        model.parameters,
        model.grad,
        a=assignment.a,
        b=assignment.b,
        mu=assignment.mu,
        offset=assignment.offset,
        x=x,
        grad_prev=None if previous is None or not assignment.b else previous.grad,
        control=control,
        velocity=torch.zeros_like(model.parameters) if options.momentum else None,
        options=options,
    )
    there = model.device
    for batch in map(torch.from_numpy, batches) if there.type == "cpu" else chosen(list(batches), there):
        examples = inputs.index_select(0, batch), labels.index_select(0, batch)
        _gradient(model, examples, options)
        if previous is not None and assignment.b:
            _gradient(previous, examples, options)
            previous.grad.add_(previous.parameters, alpha=options.weight_decay)
        descent.step(rate_of(lr, steps))
        steps += 1
    found = None if control is None else on_host(control)
    if found is not None and steps:
        found /= np.float32(steps)
    return Work(steps, mean_rate(lr, steps), found)


def _gradient(model: FlatModel, examples: tuple[torch.Tensor, torch.Tensor], options: LocalOptions) -> None:
    """The mean cross entropy's gradient into ``model.grad``, clipped."""
    model.grad.zero_()
    cross_entropy(model.module(examples[0]), examples[1]).backward()  # type: ignore[no-untyped-call]
    if options.clip is None:
        return
    if model.device.type == "cpu":
        model.grad.mul_(min(1.0, options.clip / max(float(model.grad.norm()), 1e-30)))
    else:  # which the host need not wait for
        model.grad.mul_((options.clip / model.grad.norm().clamp(min=1e-30)).clamp(max=1.0))

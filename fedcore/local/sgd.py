"""A client's local work: stochastic gradient descent along the direction that its method asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from fedcore.local.descent import Descent, LocalRate, Options, mean_rate, rate_of
from fedcore.local.flat import FlatModel


@dataclass(frozen=True)
class Work:
    """What a client did.

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
    *,
    lr: LocalRate,
    a: float = 1.0,
    b: float = 0.0,
    mu: float = 0.0,
    offset: npt.NDArray[np.float32] | None = None,
    x: npt.NDArray[np.float32] | None = None,
    previous: FlatModel | None = None,
    second: bool = False,
    options: Options | None = None,
) -> Work:
    """y <- y - lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)), once a minibatch, which both gradients see.

    grad is the gradient of the minibatch's mean cross entropy, plus weight_decay times the point.

    Args:
        model: holds x_t, and afterwards y: ``model.flat`` is changed in place.
        inputs: float32[m, ...], read-only.
        labels: int64[m], read-only.
        batches: indices into the two, int64[b] each.
        lr: the local rate, eta, or the rate of step k, counted from 0.
        a, b, mu, offset: the coefficients, and float32[n_parameters] or None, as ``fedcore.Broadcast`` gives them.
        x: float32[n_parameters], x_t; needed where ``mu`` is not 0.
        previous: a copy of the model that holds x_{t-1}; needed where ``b`` is not 0. Its parameters stay; its
            BatchNorm statistics are nobody's.
        second: whether to return the mean of the gradients at the y's, before any correction.
        options: weight decay, momentum and clipping; None for none. The last two only where the broadcast does not ask
            for ``plain`` steps, from which the server derives the client's gradient.

    Cost: a step adds to the forward and backward pass two gathers, the pass that clears ``grad``, and one pass of
        ``kernels.direction_step``, whatever the number of the model's tensors.
    """
    options = options or Options()
    steps = 0
    parameters = model.parameters.numpy()
    control = np.zeros_like(parameters) if second else None
    descent = Descent(
        parameters,
        model.grad.numpy(),
        a=a,
        b=b,
        mu=mu,
        offset=offset,
        x=x,
        grad_prev=None if previous is None or not b else previous.grad.numpy(),
        control=control,
        velocity=np.zeros_like(parameters) if options.momentum else None,
        options=options,
    )
    for batch in batches:
        chosen = torch.from_numpy(batch)
        examples = inputs.index_select(0, chosen), labels.index_select(0, chosen)
        _gradient(model, examples, options)
        if previous is not None and b:
            _gradient(previous, examples, options)
            previous.grad.add_(previous.parameters, alpha=options.weight_decay)
        descent.step(rate_of(lr, steps))
        steps += 1
    if control is not None and steps:
        control /= np.float32(steps)
    return Work(steps, mean_rate(lr, steps), control)


def _gradient(model: FlatModel, examples: tuple[torch.Tensor, torch.Tensor], options: Options) -> None:
    """The mean cross entropy's gradient into ``model.grad``, clipped."""
    model.grad.zero_()
    cross_entropy(model.module(examples[0]), examples[1]).backward()  # type: ignore[no-untyped-call]
    if options.clip is not None:
        model.grad.mul_(min(1.0, options.clip / max(float(model.grad.norm()), 1e-30)))

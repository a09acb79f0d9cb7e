"""A client's local work: stochastic gradient descent along the direction that its method asks for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from fedcore.errors import RangeError
from fedcore.kernels import direction_step
from fedcore.local.flat import FlatModel


@dataclass(frozen=True)
class Options:
    """What a client adds to its method's plain steps.

    Attributes:
        weight_decay: counts as part of the gradient, so corrections see it.
        momentum: m <- momentum m + d, y <- y - lr m with d the method's direction.
        clip: the largest length of a minibatch gradient, weight decay not counted; None for no limit.
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight_decay < float("inf"):
            raise RangeError(f"weight_decay: expected a finite number >= 0, got {self.weight_decay!r}")
        if not 0 <= self.momentum < 1:
            raise RangeError(f"momentum: expected a number in [0, 1), got {self.momentum!r}")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise RangeError(f"clip: expected a finite number > 0, got {self.clip!r}")

    @property
    def plain(self) -> bool:
        """Whether the mean raw gradient follows from y: weight decay is part of it, momentum and clipping are not."""
        return not self.momentum and self.clip is None


@dataclass(frozen=True)
class Work:
    """What a client did: its steps K_i, and float32[n_parameters], the mean of its gradients, where that was asked."""

    steps: int
    control: npt.NDArray[np.float32] | None


def sgd(
    model: FlatModel,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    batches: Iterable[npt.NDArray[np.int64]],
    *,
    lr: float,
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
        lr: the local rate, eta.
        a, b, mu, offset: the coefficients, and float32[n_parameters] or None, as ``fedcore.Broadcast`` gives them.
        x: float32[n_parameters], x_t; needed where ``mu`` is not 0.
        previous: a copy of the model that holds x_{t-1}; needed where ``b`` is not 0. Its parameters stay; its
            BatchNorm statistics are nobody's.
        second: whether to return the mean of the gradients at the y's, before any correction.
        options: weight decay, momentum and clipping; None for none.

    Cost: a step adds to the forward and backward pass two gathers, the pass that clears ``grad``, and one pass of
        ``kernels.direction_step``, whatever the number of the model's tensors.
    """
    options = options or Options()
    steps = 0
    parameters, grad = model.parameters.numpy(), model.grad.numpy()
    control = np.zeros_like(parameters) if second else None
    velocity = np.zeros_like(parameters) if options.momentum else None
    for batch in batches:
        chosen = torch.from_numpy(batch)
        examples = inputs.index_select(0, chosen), labels.index_select(0, chosen)
        _gradient(model, examples, options)
        if previous is not None and b:
            _gradient(previous, examples, options)
            previous.grad.add_(previous.parameters, alpha=options.weight_decay)
        if control is not None:
            control += grad
            if options.weight_decay:
                control += np.float32(options.weight_decay) * parameters
        terms: dict[str, Any] = {
            "a": a,
            "b": b,
            "mu": mu,
            "weight_decay": options.weight_decay,
            "grad_prev": None if previous is None or not b else previous.grad.numpy(),
            "offset": offset,
            "x": x,
        }
        if velocity is None:
            direction_step(parameters, grad, lr=lr, **terms)
        else:
            before = parameters.copy()
            direction_step(parameters, grad, lr=1.0, **terms)
            velocity *= np.float32(options.momentum)
            velocity += before - parameters
            np.subtract(before, np.float32(lr) * velocity, out=parameters)
        steps += 1
    if control is not None and steps:
        control /= np.float32(steps)
    return Work(steps, control)


def _gradient(model: FlatModel, examples: tuple[torch.Tensor, torch.Tensor], options: Options) -> None:
    """The mean cross entropy's gradient into ``model.grad``, clipped."""
    model.grad.zero_()
    cross_entropy(model.module(examples[0]), examples[1]).backward()  # type: ignore[no-untyped-call]
    if options.clip is not None:
        model.grad.mul_(min(1.0, options.clip / max(float(model.grad.norm()), 1e-30)))

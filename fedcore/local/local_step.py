"""The arithmetic of a local step once the gradient is there, on one flat vector or on those of many clients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from fedcore.arguments import real
from fedcore.assignment import Assignment
from fedcore.kernels import direction_step
from fedcore.local.torch_device import moved, on_host
from fedcore.typing import F32


@dataclass(frozen=True)
class LocalOptions:
    """The options that a client adds to its method's plain steps.

    Attributes:
        weight_decay: counts as part of the gradient, so corrections see it.
        momentum: m <- momentum m + d, y <- y - lr m with d the method's direction.
        clip: the largest length of a minibatch gradient, weight decay not counted; None for no limit.
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        real("weight_decay", self.weight_decay, "[0, inf)")
        real("momentum", self.momentum, "[0, 1)")
        if self.clip is not None:
            real("clip", self.clip, "(0, inf)")

    @property
    def plain(self) -> bool:
        """Tell whether the mean raw gradient follows from y: weight decay is a part of it, but no momentum or clip."""
        return not self.momentum and self.clip is None


LocalRate = float | Callable[[int], float]
"""The rate of all steps, or that of step k, counted from 0."""


def rate(assignment: Assignment) -> LocalRate:
    """The rate of an assignment's steps."""
    return assignment.lr_of_step or assignment.lr


def rate_of(lr: LocalRate, step: int) -> float:
    """The rate of a step."""
    return lr(step) if callable(lr) else lr


def mean_rate(lr: LocalRate, steps: int) -> float:
    """The mean of the first ``steps`` rates, by which x - y is so many mean gradients; the first one for no steps."""
    return sum(map(lr, range(steps))) / steps if callable(lr) and steps else rate_of(lr, 0)


class Steps(Protocol):
    """A client's steps, or those of many clients at once."""

    def step(self, lr: float) -> None:
        """Take one step of rate ``lr`` along the gradients that the buffers hold now."""


def steps_of(
    y: Tensor,
    grad: Tensor,
    *,
    a: float,
    b: float,
    mu: float,
    offset: Tensor | F32 | None,
    x: Tensor | F32 | None,
    grad_prev: Tensor | None,
    control: Tensor | None,
    velocity: Tensor | None,
    options: LocalOptions,
) -> Steps:
    """The steps of a model where it lies: ``Descent`` in host memory, ``DeviceDescent`` elsewhere.

    Args:
        y, grad, grad_prev, control, velocity: float32[n] on one device, as for ``Descent``.
        offset, x: float32[n] there, or in host memory, from which they are brought once.
        a, b, mu, options: as for ``Descent``.
    """
    numbers = {"a": a, "b": b, "mu": mu}
    if uses_kernel(y):
        own = [None if vector is None else on_host(vector) for vector in (grad_prev, control, velocity)]
        lent = [on_host(vector) if isinstance(vector, Tensor) else vector for vector in (offset, x)]
        return Descent(
            on_host(y),
            on_host(grad),
            **numbers,
            offset=lent[0],
            x=lent[1],
            grad_prev=own[0],
            control=own[1],
            velocity=own[2],
            options=options,
        )
    there = [moved(vector, y.device) if isinstance(vector, np.ndarray) else vector for vector in (offset, x)]
    return DeviceDescent(
        y,
        grad,
        **numbers,
        offset=there[0],
        x=there[1],
        grad_prev=grad_prev,
        control=control,
        velocity=velocity,
        options=options,
    )


def uses_kernel(y: Tensor) -> bool:
    """Tell whether ``kernels.direction_step`` takes a model's steps: that of host memory, which is always there."""
    return y.device.type == "cpu"


class Descent:
    """y <- y - lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)), or along its momentum.

    Everything is elementwise, so the vectors may be those of many clients, one behind another.

    Args:
        y: float32[n], changed in place.
        grad: float32[n], the buffer in which each step finds the gradient at y.
        grad_prev: float32[n], the buffer with the gradient at x_{t-1}, its weight decay added; None where b is 0.
        offset, x: float32[n] or None, as for ``kernels.direction_step``.
        a, b, mu: its numbers.
        control: float32[n], to which each step adds the gradient, weight decay counted; or None.
        velocity: float32[n], m of the local momentum, changed in place; None where there is none.
        options: weight decay and momentum (clipping is done to the gradient before).

    Cost: a step is one pass of ``kernels.direction_step``; with ``control`` one more, with momentum four more.
    """

    def __init__(
        self,
        y: F32,
        grad: F32,
        *,
        a: float,
        b: float,
        mu: float,
        offset: F32 | None,
        x: F32 | None,
        grad_prev: F32 | None,
        control: F32 | None,
        velocity: F32 | None,
        options: LocalOptions,
    ) -> None:
        self._y, self._grad, self._options = y, grad, options
        self._terms = (grad_prev, offset, x, a, b, mu)
        self._control, self._velocity = control, velocity

    def step(self, lr: float) -> None:
        """Take one step of rate ``lr`` along what ``grad`` and ``grad_prev`` hold now."""
        y, grad, decay = self._y, self._grad, self._options.weight_decay
        if self._control is not None:
            self._control += grad
            if decay:
                self._control += np.float32(decay) * y
        if self._velocity is None:
            self._along_direction(lr)
            return
        before = y.copy()
        self._along_direction(1.0)
        self._velocity *= np.float32(self._options.momentum)
        self._velocity += before - y
        np.subtract(before, np.float32(lr) * self._velocity, out=y)

    def _along_direction(self, lr: float) -> None:
        grad_prev, offset, x, a, b, mu = self._terms
        direction_step(
            self._y,
            self._grad,
            lr=lr,
            a=a,
            b=b,
            mu=mu,
            weight_decay=self._options.weight_decay,
            grad_prev=grad_prev,
            offset=offset,
            x=x,
        )


class DeviceDescent:
    """``Descent`` by torch's own operations, on whatever device: the same formula, rounded in another order.

    The arguments are those of ``Descent``, as tensors on one device.

    Cost: a step launches two to eight operations, and waits for none.
    """

    def __init__(
        self,
        y: Tensor,
        grad: Tensor,
        *,
        a: float,
        b: float,
        mu: float,
        offset: Tensor | None,
        x: Tensor | None,
        grad_prev: Tensor | None,
        control: Tensor | None,
        velocity: Tensor | None,
        options: LocalOptions,
    ) -> None:
        self._y, self._grad, self._options = y, grad, options
        self._a, self._b, self._mu = a, b, mu
        self._offset, self._x, self._grad_prev = offset, x, grad_prev
        self._control, self._velocity = control, velocity

    def step(self, lr: float) -> None:
        """Take one step of rate ``lr`` along what ``grad`` and ``grad_prev`` hold now."""
        y, grad = self._y, self._grad
        if self._options.weight_decay:
            grad.add_(y, alpha=self._options.weight_decay)
        if self._control is not None:
            self._control.add_(grad)
        along = self._direction()
        if self._velocity is not None:
            along = self._velocity.mul_(self._options.momentum).add_(along)
        y.add_(along, alpha=-lr)

    def _direction(self) -> Tensor:
        """a (grad + weight_decay y) + b grad_prev + offset + mu (y - x); ``grad`` is no more needed."""
        along = self._grad if self._a == 1 else self._grad.mul_(self._a)
        if self._grad_prev is not None:
            along.add_(self._grad_prev, alpha=self._b)
        if self._offset is not None:
            along.add_(self._offset)
        if self._x is not None and self._mu:
            along.add_(self._y - self._x, alpha=self._mu)
        return along

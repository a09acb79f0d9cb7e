"""The local work of one client: SGD along its method's direction."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedcore.arguments import real
from fedcore.arrays import F32
from fedcore.errors import ArrayError, DtypeError, ShapeError
from fedcore.kernels import direction_step
from fedcore.model import Layout
from fedcore.server.instructions import Instructions as Assignment
from fedcore.simulation.torch_device import CPU, chosen, moved, on_host

__all__ = ["FlatModel", "LocalOptions", "Work", "sgd"]


class FlatModel:
    """A module whose parameters, float buffers and gradients are views of flat vectors.

    It is loaded with one copy and stepped with one operation. The module's parameters and float buffers become views of
    ``flat``, and their gradients views of ``grad``, into which the backward pass adds. ``module.zero_grad()`` and
    ``module.to(...)`` would undo that; use ``grad.zero_()``.

    Args:
        module: on the CPU, or on the device already; its tensors float32 or integer.
        device: the model's device.

    Attributes:
        module: the module itself.
        layout: ``Layout.of(module)``.
        flat: torch.float32[n], the parameters, then the float buffers.
        parameters: torch.float32[n_parameters], the first part of ``flat``.
        grad: torch.float32[n_parameters].

    Raises:
        DtypeError: a tensor is neither float32 nor an integer.
        ArrayError: a tensor is neither on the CPU nor on the device.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.module = module
        self.layout = Layout.of(module)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in self.layout.names:
            if tensors[name].dtype != torch.float32:
                raise DtypeError(f"{name}: expected float32 or an integer dtype, got {tensors[name].dtype}")
            if tensors[name].device not in (CPU, device):
                raise ArrayError(f"{name}: expected a tensor on the CPU, got one on {tensors[name].device}")
        if device.type != "cpu":
            module.to(device)
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.flat = torch.empty(self.layout.n, device=device)
        self.parameters = self.flat[: self.layout.n_parameters]
        self.grad = torch.zeros(self.layout.n_parameters, device=device)
        for piece in self.layout.slices:
            tensor, view = tensors[piece.name], self.flat[piece.start : piece.stop].view(piece.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if piece.kind == "parameter":
                tensor.grad = self.grad[piece.start : piece.stop].view(piece.shape)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.flat.device

    def load(self, x: npt.NDArray[np.float32]) -> None:
        """Copy a flat vector into the model.

        Args:
            x: float32[n] in host memory, read-only.

        Raises:
            DtypeError, ShapeError: ``x`` is not float32[n].

        Cost: reads and writes 4 n bytes.
        """
        if x.dtype != np.float32:
            raise DtypeError(f"x: expected float32[{self.layout.n}], got {x.dtype}")
        if x.shape != (self.layout.n,):
            raise ShapeError(f"x: expected float32[{self.layout.n}], got shape {x.shape}")
        if self.device.type == "cpu":
            np.copyto(self.flat.numpy(), x)
        else:
            self.flat.copy_(moved(x, self.device))


@dataclass(frozen=True)
class LocalOptions:
    """A client's options beside its method's plain steps.

    Attributes:
        weight_decay: part of the gradient, so corrections include it.
        momentum: m <- momentum m + d, y <- y - lr m with d the method's direction.
        clip: the largest length of a minibatch gradient without weight decay. Default: no limit.
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
        """Whether the mean gradient follows from y: with weight decay it does, with momentum or clip it does not."""
        return not self.momentum and self.clip is None


LocalRate = float | Callable[[int], float]
"""The rate of all steps, or a function of the step, counted from 0."""


def rate(assignment: Assignment) -> LocalRate:
    """The rate of an assignment's steps."""
    return assignment.lr_of_step or assignment.lr


def rate_of(lr: LocalRate, step: int) -> float:
    """The rate of a step."""
    return lr(step) if callable(lr) else lr


def mean_rate(lr: LocalRate, steps: int) -> float:
    """The mean of the first ``steps`` rates; without steps the first rate."""
    return sum(map(lr, range(steps))) / steps if callable(lr) and steps else rate_of(lr, 0)


class Descent:
    """y <- y - lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)), or along its momentum.

    The operations are elementwise, so the vectors may be those of many clients, one behind another. On a GPU torch's
    operations take the steps, with the same formula rounded in another order.

    Args:
        y: float32[n], changed in place.
        grad: float32[n], the buffer in which each step finds the gradient at y; on a GPU the step overwrites it.
        numbers: a, b and mu.
        options: weight decay and momentum; the caller clips the gradient.
        offset, x: float32[n], on y's device or in host memory.
        grad_prev: float32[n], the buffer with the gradient at x_{t-1}, its weight decay added.
        control: float32[n], to which each step adds the gradient, weight decay included.
        velocity: float32[n], m of the local momentum, changed in place.

    Cost: on a CPU one pass of ``kernels.direction_step``, with ``control`` one more, with momentum four more; on a GPU
        two to eight operations, without waiting.
    """

    def __init__(
        self,
        y: Tensor,
        grad: Tensor,
        numbers: tuple[float, float, float],
        options: LocalOptions,
        *,
        offset: Tensor | F32 | None = None,
        x: Tensor | F32 | None = None,
        grad_prev: Tensor | None = None,
        control: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> None:
        def placed(vector: Tensor | F32 | None) -> Any:
            if on_cpu:
                return on_host(vector) if isinstance(vector, Tensor) else vector
            return moved(vector, y.device) if isinstance(vector, np.ndarray) else vector

        on_cpu = y.device.type == "cpu"
        (self._a, self._b, self._mu), self._options = numbers, options
        self._y, self._grad, self._offset, self._x = placed(y), placed(grad), placed(offset), placed(x)
        self._grad_prev, self._control, self._velocity = placed(grad_prev), placed(control), placed(velocity)
        self._on_cpu = on_cpu

    def step(self, lr: float) -> None:
        """Take one step of rate ``lr`` along the gradients that the buffers hold now."""
        if self._on_cpu:
            self._step_on_cpu(lr)
        else:
            self._step_on_gpu(lr)

    def _step_on_cpu(self, lr: float) -> None:
        y, decay = self._y, self._options.weight_decay
        if self._control is not None:
            self._control += self._grad
            if decay:
                self._control += np.float32(decay) * y
        before = None if self._velocity is None else y.copy()
        direction_step(
            y,
            self._grad,
            lr=lr if before is None else 1.0,
            a=self._a,
            b=self._b,
            mu=self._mu,
            weight_decay=decay,
            grad_prev=self._grad_prev,
            offset=self._offset,
            x=self._x,
        )
        if before is not None:
            self._velocity *= np.float32(self._options.momentum)
            self._velocity += before - y
            np.subtract(before, np.float32(lr) * self._velocity, out=y)

    def _step_on_gpu(self, lr: float) -> None:
        y, along = self._y, self._grad
        if self._options.weight_decay:
            along.add_(y, alpha=self._options.weight_decay)
        if self._control is not None:
            self._control.add_(along)
        if self._a != 1:
            along.mul_(self._a)
        if self._grad_prev is not None:
            along.add_(self._grad_prev, alpha=self._b)
        if self._offset is not None:
            along.add_(self._offset)
        if self._x is not None and self._mu:
            along.add_(y - self._x, alpha=self._mu)
        if self._velocity is not None:
            along = self._velocity.mul_(self._options.momentum).add_(along)
        y.add_(along, alpha=-lr)


@dataclass(frozen=True)
class Work:
    """The local work of a client.

    Attributes:
        steps: K_i.
        lr: eta_i, the mean of its steps' rates.
        control: float32[n_parameters], the mean of its gradients, if the assignment wants it.
    """

    steps: int
    lr: float
    control: npt.NDArray[np.float32] | None


@np.errstate(over="ignore", invalid="ignore")  # the server rejects a diverged update, and reports it
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
    """Take the assignment's steps, one for each minibatch; y is the model, and x_prev ``previous``.

    grad is the gradient of the minibatch's mean cross entropy, plus weight_decay times the point.

    Args:
        model: holds x_t, and afterwards y: ``model.flat`` is changed in place.
        inputs: float32[m, ...] on the model's device, read-only.
        labels: int64[m], likewise.
        batches: indices into the two, int64[b] each.
        assignment: the instructions to the client. Its ``x_prev`` and its local rule are not read here.
        x: float32[n_parameters], x_t; needed if ``mu`` is not 0.
        previous: a copy of the model that holds x_{t-1}; needed if ``b`` is not 0. Its parameters stay; its BatchNorm
            statistics have no meaning.
        options: weight decay, momentum and clipping. Default: none. Momentum and clipping exclude an assignment of
            ``plain`` steps, from which the server derives the client's gradient.

    Cost: a step adds to the forward and backward pass two gathers, the pass that clears ``grad``, and one pass of
        ``kernels.direction_step``, for any number of tensors. Minibatches, offset and x are copied to a GPU once each,
        before the first step, and no step waits for it.
    """
    options = options or LocalOptions()
    steps = 0
    control, lr = torch.zeros_like(model.parameters) if assignment.second else None, rate(assignment)
    if not assignment.b:
        previous = None
    descent = Descent(
        model.parameters,
        model.grad,
        (assignment.a, assignment.b, assignment.mu),
        options,
        offset=assignment.offset,
        x=x,
        grad_prev=None if previous is None else previous.grad,
        control=control,
        velocity=torch.zeros_like(model.parameters) if options.momentum else None,
    )
    device = model.device
    for batch in map(torch.from_numpy, batches) if device.type == "cpu" else chosen(list(batches), device):
        examples = inputs.index_select(0, batch), labels.index_select(0, batch)
        _gradient(model, examples, options)
        if previous is not None:
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
    else:  # without waiting for the device
        model.grad.mul_((options.clip / model.grad.norm().clamp(min=1e-30)).clamp(max=1.0))

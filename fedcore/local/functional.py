"""Many models of any stateless network at once, by torch's own batching of functions: vmap over functional_call."""

import copy
import logging
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedcore.layout import Layout
from fedcore.local.layers import DEVICE_BYTES, Block, Gradients, Linear, has_hooks
from fedcore.local.torch_device import CPU, repeatable

LOGGER = logging.getLogger("fedcore.local")
TRIAL = 3
"""Examples of the trial; the last of them only fills a minibatch up."""


class Functional:
    """A network whose clients' models are one batched call of torch's own, each convolution a grouped one.

    Attributes:
        layers: its tensors, each as a layer of so many rows without a bias.
        n: its parameters.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        self._module, self._shape = _same_parameters(module).train(), shape
        self._shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
        starts = {piece.name: piece.start for piece in Layout.of(module).slices}
        self.layers = tuple(
            Linear(math.prod(size[:1]), math.prod(size[1:]), starts[name], None, relu=False)
            for name, size in self._shapes.items()
        )
        self.n = Layout.of(module).n
        self._reached = _numbers_reached(module, shape)

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> "Functional | None":
        """The network of a module; None if two clients' gradients, tried once, are not those of each alone.

        It has no buffers, no hooks, no weights that two layers share or that are not to be trained; it draws no random
        numbers, and what it makes of an example is no matter of the minibatch around it. The first are looked up, the
        others are tried, by two clients of which one's minibatch is filled up.

        Args:
            module: of float32 tensors, on the CPU or the device; it stays as it is.
            shape: an example's.
            device: where it is tried.

        Cost: the time of some steps of two clients; the first in a process has torch load its rules of batching, five
            seconds of CPU.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if len(parameters) > len(dict(module.named_parameters())) or any(True for _ in module.buffers()):
            return None
        if not parameters or not all(tensor.requires_grad for tensor in parameters.values()):
            return None
        if any(has_hooks(part) for part in module.modules()):
            return None
        try:
            net = cls(module, shape)
            return net if _is_each_ones_own(net, copy.deepcopy(module).to(device).train(), shape, device) else None
        except Exception as error:  # of torch, or of the module's own code: whatever it is, it cannot be called so
            LOGGER.info("clients are not trained by vmap: %s: %s", type(error).__name__, error)
            return None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: as many as ``DEVICE_BYTES`` hold."""
        return max(1, DEVICE_BYTES // (4 * (4 * self.n + 3 * b * self._reached)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """The function that takes the gradients of m models on minibatches of b examples."""
        module = _same_parameters(self._module)  # a call puts tensors into it: each thread has its own

        def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            scores: Tensor = functional_call(module, parameters, (inputs,))
            return (cross_entropy(scores, labels, reduction="none") * weights).sum()

        take: Any = vmap(grad(loss), randomness="error")

        def gradients(models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
            found = take(self._named(models), inputs.view(m, b, *self._shape), labels.squeeze(2), weights.squeeze(2))
            for name, part in self._named(out).items():
                part.copy_(found[name])

        return gradients

    def _named(self, models: Block) -> dict[str, Tensor]:
        """The parameters of m models by name, float32[m, ...], views of a block."""
        pairs = zip(self._shapes.items(), models.parts, strict=True)
        return {name: part.view(len(part), *size) for (name, size), part in pairs}


def _numbers_reached(module: nn.Module, shape: tuple[int, ...]) -> int:
    """The numbers that an example becomes on its way through the network, all layers' together."""
    numbers = [math.prod(shape)]

    def count(_: nn.Module, __: Any, out: Any) -> None:
        numbers.append(out.numel() if isinstance(out, Tensor) else 0)

    probe = _same_parameters(module).eval()
    for part in probe.modules():
        part.register_forward_hook(count)
    with torch.no_grad():
        probe(torch.zeros(1, *shape, device=next(probe.parameters()).device))
    return sum(numbers)


def _same_parameters(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are the module's own: not a copy of their memory."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in module.parameters()})


def _is_each_ones_own(net: Functional, module: nn.Module, shape: tuple[int, ...], device: torch.device) -> bool:
    """Tell whether two clients' gradients, taken at once, are those that torch takes of each alone."""
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.standard_normal((2, TRIAL, *shape), np.float32)).to(device)
    labels = torch.zeros(2, TRIAL, 1, dtype=torch.int64, device=device)
    sizes, weights = (TRIAL - 1, TRIAL), torch.zeros(2, TRIAL, 1, device=device)
    for client, size in enumerate(sizes):
        weights[client, :size] = 1 / size
    tensors = dict(module.named_parameters())
    models, out = Block(net, 2, device), Block(net, 2, device)
    with repeatable(device):
        with torch.no_grad():
            for name, part in net._named(models).items():
                part.copy_(tensors[name].expand_as(part))
            net.gradients(2, TRIAL, device)(models, inputs.flatten(2), labels, weights, out)
        for client, size in enumerate(sizes):
            module.zero_grad()
            with torch.enable_grad():
                loss = cross_entropy(module(inputs[client, :size]), labels[client, :size, 0])
                loss.backward()  # type: ignore[no-untyped-call]
            for name, part in net._named(out).items():
                due = tensors[name].grad
                if due is None or not bool((part[client] - due).norm() <= 1e-3 * due.norm() + 1e-6):
                    return False
    return True

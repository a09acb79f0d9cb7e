"""Layers of a network as places in its flat vector, and many models of one network in one block of memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedcore.layout import Layout
from fedcore.local.torch_device import CPU

DEVICE_BYTES = 2 << 30
"""What one call may weigh on a GPU: a small share of any. A choice; no GPU has measured it yet."""


@dataclass(frozen=True)
class Linear:
    """A fully connected layer: its sizes, where its weights and biases begin in the flat vector, and whether ReLU
    follows."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    relu: bool


class Net(Protocol):
    """A network whose clients can be trained together."""

    @property
    def layers(self) -> Sequence[Linear]:
        """The layers, from the input on."""

    @property
    def n(self) -> int:
        """The number of its parameters."""

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call on a device, whose minibatches have b examples; at least 1."""

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> "Gradients":
        """The function that takes the gradients of m models on minibatches of b examples, all on the device."""


class Block:
    """m vectors of a network's parameters, layer by layer: all first weights, then all first biases, and so on.

    So every layer's weights of all models are one contiguous tensor, as a batched product wants them, and whatever is
    elementwise is one operation on ``flat``.

    Attributes:
        flat: float32[m n].
        weights: float32[m, outputs, inputs] for each layer, views of ``flat``.
        biases: float32[m, outputs] or None for each layer, views of ``flat``.
        parts: all of them, float32[m, length] each.
    """

    def __init__(self, net: Net, m: int, device: torch.device = CPU) -> None:
        self.flat = torch.zeros(m * net.n, device=device)
        self.parts: list[Tensor] = []
        self._columns: list[slice] = []
        self.weights: list[Tensor] = []
        self.biases: list[Tensor | None] = []
        for layer in net.layers:
            self.weights.append(self._part(m, layer.weight, layer.outputs * layer.inputs).view(m, layer.outputs, -1))
            self.biases.append(None if layer.bias is None else self._part(m, layer.bias, layer.outputs))

    def _part(self, m: int, start: int, length: int) -> Tensor:
        part = self.flat[m * start : m * (start + length)].view(m, length)
        self.parts.append(part)
        self._columns.append(slice(start, start + length))
        return part

    def fill(self, rows: Tensor) -> "Block":
        """Take over the vectors float32[m, n], a row each."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            part.copy_(rows[:, columns])
        return self

    def empty_into(self, rows: Tensor) -> None:
        """Write the vectors into float32[m, n], a row each."""
        for columns, part in zip(self._columns, self.parts, strict=True):
            rows[:, columns] = part


Gradients = Callable[[Block, Tensor, Tensor, Tensor, Block], None]
"""A function of m models, inputs float32[m, b, features], labels int64[m, b, 1], and weights float32[m, b, 1]: 1 / (the
size of the minibatch), or 0 for an example that only fills it up. It writes the gradient of each model's mean cross
entropy on its own minibatch into the last argument, and reads the others."""


def plain_sequence(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of an ``nn.Sequential`` by name, all to be trained and nothing hooked to them; else None."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    if any(has_hooks(part) for part in module.modules()):
        return None
    return list(module._modules.items()) if all(tensor.requires_grad for tensor in module.parameters()) else None


def linear_layers(children: Sequence[tuple[str, nn.Module]], width: int, starts: dict[str, int]) -> list[Linear] | None:
    """Fully connected layers with or without ReLU behind them; None if there is anything else.

    Args:
        children: modules by name.
        width: the numbers of an example that reach the first.
        starts: where each tensor of theirs begins in the flat vector.
    """
    layers: list[Linear] = []
    for name, child in children:
        if type(child) is nn.ReLU and layers and not layers[-1].relu:
            layers.append(replace(layers.pop(), relu=True))
        elif type(child) is nn.Linear and child.in_features == width and f"{name}.weight" in starts:
            bias = None if child.bias is None else starts[f"{name}.bias"]
            layers.append(Linear(child.out_features, width, starts[f"{name}.weight"], bias, relu=False))
            width = child.out_features
        else:
            return None
    return layers


def parameters(layers: Sequence[Linear]) -> int:
    """The number of weights and biases."""
    return sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in layers)


def is_flatten(module: nn.Module) -> bool:
    """Tell whether a module makes each example flat."""
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def starts(module: nn.Module) -> dict[str, int]:
    """The place where each tensor of a module begins in its flat vector."""
    return {piece.name: piece.start for piece in Layout.of(module).slices}


def has_hooks(module: nn.Module) -> bool:
    """Tell whether anything is hooked to a module."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)

"""Many models of one perceptron in one block of memory, and the gradients of all of them at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcore.layout import Layout


@dataclass(frozen=True)
class Linear:
    """A fully connected layer: its sizes, where its weights and biases begin in the flat vector, and whether ReLU
    follows."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    relu: bool


class Perceptron:
    """The layers of a multi-layer perceptron, as places in its flat vector.

    Attributes:
        layers: from the input on.
        n: its parameters.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self.n = sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in self.layers)

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "Perceptron | None":
        """The perceptron that a module is; None if it is anything else, or does anything else besides.

        It is one if it is an ``nn.Sequential`` of ``Flatten`` (which may be missing where examples are flat), and of
        ``Linear`` layers with or without ``ReLU`` behind them: no dropout, no normalisation, no weights that two layers
        share or that are not to be trained, no hooks.

        Args:
            module: of float32 tensors.
            shape: an example's.
        """
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            return None
        children = list(module._modules.items())
        if any(_has_hooks(part) for part in module.modules()) or not children:
            return None
        if type(children[0][1]) is nn.Flatten and (children[0][1].start_dim, children[0][1].end_dim) == (1, -1):
            children.pop(0)
        elif len(shape) != 1:
            return None
        starts = {piece.name: piece.start for piece in Layout.of(module).slices}
        layers: list[Linear] = []
        width = math.prod(shape)
        for name, child in children:
            if type(child) is nn.ReLU and layers and not layers[-1].relu:
                last = layers.pop()
                layers.append(Linear(last.outputs, last.inputs, last.weight, last.bias, relu=True))
            elif type(child) is nn.Linear and child.in_features == width and f"{name}.weight" in starts:
                bias = None if child.bias is None else starts[f"{name}.bias"]
                layers.append(Linear(child.out_features, width, starts[f"{name}.weight"], bias, relu=False))
                width = child.out_features
            else:
                return None
        net = cls(layers)
        trained = all(tensor.requires_grad for tensor in module.parameters())
        return net if layers and trained and net.n == Layout.of(module).n else None


class Block:
    """m vectors of a perceptron's parameters, layer by layer: all first weights, then all first biases, and so on.

    So every layer's weights of all models are one contiguous tensor, as a batched product wants them, and whatever is
    elementwise is one operation on ``flat``.

    Attributes:
        flat: float32[m n].
        weights: float32[m, outputs, inputs] for each layer, views of ``flat``.
        biases: float32[m, outputs] or None for each layer, views of ``flat``.
        parts: all of them, float32[m, length] each.
    """

    def __init__(self, net: Perceptron, m: int) -> None:
        self.flat = torch.zeros(m * net.n)
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


def gradients(net: Perceptron, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
    """The gradient of each model's mean cross entropy on its own minibatch.

    Args:
        net: the layers of all of them.
        models: m models. Read-only.
        inputs: float32[m, b, features]. Read-only.
        labels: int64[m, b, 1]. Read-only.
        weights: float32[m, b, 1], 1 / (the size of the minibatch), or 0 for an example that only fills it up.
        out: written.

    Determinism: a model's gradient depends on its own rows and on b alone, as far as torch's batched products do.
    Cost: three batched products a layer, two for the first.
    """
    reached = [inputs]
    for layer, weight, bias in zip(net.layers, models.weights, models.biases, strict=True):
        a = reached[-1]
        if layer.outputs >= a.shape[1] and layer is not net.layers[-1]:
            z = torch.bmm(a, weight.transpose(1, 2))
        else:  # a product with short rows takes twice the time, a softmax along them twenty times
            z = torch.bmm(weight, a.transpose(1, 2)).transpose(1, 2)
        if bias is not None:
            z += bias.unsqueeze(1)
        reached.append(z.relu_() if layer.relu else z)
    d = torch.softmax(reached[-1].transpose(1, 2), 1).transpose(1, 2)
    d.scatter_add_(2, labels, d.new_full((1, 1, 1), -1.0).expand_as(labels))
    d *= weights
    for i in reversed(range(len(net.layers))):
        if net.layers[i].relu:
            d = torch.ops.aten.threshold_backward(d, reached[i + 1], 0)
        torch.bmm(d.transpose(1, 2), reached[i], out=out.weights[i])
        if (bias_gradient := out.biases[i]) is not None:
            torch.sum(d, 1, out=bias_gradient)
        if i:
            d = torch.bmm(d, models.weights[i])


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)

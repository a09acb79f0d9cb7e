"""A perceptron as places in its flat vector, and the gradients of many models of it at once."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedcore.layout import Layout
from fedcore.local.layers import (
    DEVICE_BYTES,
    Block,
    Gradients,
    Linear,
    is_flatten,
    linear_layers,
    parameters,
    plain_sequence,
    starts,
)
from fedcore.local.torch_device import CPU

BYTES = 4 << 20
"""What the models and gradients of one call may weigh, so that they stay in cache from step to step, and what the
examples of one step may. With 32 clients the time is least at 3 to 6 MiB: 50,890 parameters take 159, 148 and 182 us a
client and step at 1.5, 3 and 6 MiB; 199,210 take 338, 328 and 380 at 3, 6 and 12 MiB."""


class Perceptron:
    """The layers of a multi-layer perceptron, as places in its flat vector.

    Attributes:
        layers: from the input on.
        n: its parameters.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self.n = parameters(layers)

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
        children = plain_sequence(module)
        if not children:
            return None
        if is_flatten(children[0][1]):
            children.pop(0)
        elif len(shape) != 1:
            return None
        layers = linear_layers(children, math.prod(shape), starts(module))
        return cls(layers) if layers and parameters(layers) == Layout.of(module).n else None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: as many as ``BYTES`` hold."""
        room = BYTES if device.type == "cpu" else DEVICE_BYTES
        return max(1, min(room // (8 * self.n), room // (4 * b * self.layers[0].inputs)))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """The function that takes the gradients of m models on minibatches of b examples."""
        return partial(gradients, self)


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

"""Forward and backward passes of many models at once, each layer a batched product with a matrix of columns.

Everything that passes between layers is float32[m, rows, columns] of m models: the rows of an image are its pixels in
all channels, or the units of a layer, and a column is an example. A layer is Z = W P + b: for a fully connected one P
is what reached it, for a convolution the windows of what reached it, in a column for each position and example.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fedcore.local.layers import Block, Linear, Net
from fedcore.local.torch_device import CPU
from fedcore.local.windows import Windows

_where_positive = torch.ops.aten.threshold_backward
"""(d, z, 0) is d where z > 0 and 0 elsewhere."""


@dataclass(frozen=True, eq=False)
class Convolution(Linear):
    """A convolution and the max pooling behind it; its ``inputs`` are the taps of a kernel in all channels.

    Attributes:
        windows: of the images that reach it.
    """

    windows: Windows

    @property
    def rows(self) -> int:
        """The rows that leave it."""
        return self.outputs * self.windows.height * self.windows.width

    @cached_property
    def kernels(self) -> tuple[Tensor, Tensor]:
        """For the kernels of all outputs in each of their q places, as the rows float32[q outputs, taps] of a matrix:
        which weight each element is, with one past the end for zero, and which element each weight became, q times."""
        taps, (q, count) = len(self.windows.table), self.windows.places.shape
        places = torch.from_numpy(self.windows.places)[:, None].expand(-1, self.outputs, -1)
        spread = torch.full((q, self.outputs, taps), self.outputs * count)
        spread.scatter_(2, places, torch.arange(self.outputs * count).view(1, self.outputs, count).expand(q, -1, -1))
        went = torch.arange(q * self.outputs).view(q, -1, 1) * taps + places
        return spread.view(-1), went.view(-1)


class Columns:
    """The gradients of m models on minibatches of b examples, in scratch memory of its own.

    Args:
        net: its layers are ``Convolution`` and ``Linear``, the image float32[channels, height, width] being flat.
        m, b: models, and examples in a minibatch.
        device: where all of them lie.

    Determinism: a model's gradient depends on its own rows and on b alone, as far as torch's batched products do.
    Cost: two batched products a layer and one more for all but the first; for a convolution a copy of its windows and
        the sum of their gradients.
    """

    def __init__(self, net: Net, m: int, b: int, device: torch.device = CPU) -> None:
        self._m, self._b = m, b
        rows = [layer.windows.pixels if isinstance(layer, Convolution) else layer.inputs for layer in net.layers]
        rows.append(net.layers[-1].rows if isinstance(net.layers[-1], Convolution) else net.layers[-1].outputs)
        # One more row than there are, of zeros: what a convolution's padding reads.
        self._reached = [torch.zeros(m * k + 1, b, device=device) for k in rows]
        self._layers: list[_Convolved | _Connected] = []
        for layer, (before, after) in zip(net.layers, pairwise(range(len(rows))), strict=True):
            x, y = self._reached[before], self._reached[after][:-1].view(m, layer.outputs, -1)
            if isinstance(layer, Convolution):
                self._layers.append(_Convolved(layer, x, y))
            else:
                self._layers.append(_Connected(layer, x[:-1].view(m, layer.inputs, b), y))

    def gradients(self, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
        """The gradients, as ``layers.Gradients`` says."""
        m, b = self._m, self._b
        self._reached[0][:-1].view(m, -1, b).copy_(inputs.transpose(1, 2))
        parameters = list(zip(self._layers, models.weights, models.biases, out.weights, out.biases, strict=True))
        for layer, weight, bias, _, _ in parameters:
            layer.forward(weight, bias)
        d = torch.softmax(self._reached[-1][:-1].view(m, -1, b), 1)
        labels = labels.transpose(1, 2)
        d.scatter_add_(1, labels, d.new_full((1, 1, 1), -1.0).expand_as(labels))
        d *= weights.transpose(1, 2)
        for i in reversed(range(len(parameters))):
            layer, weight, _, weight_gradient, bias_gradient = parameters[i]
            layer.backward(d, weight_gradient, bias_gradient)
            if i:
                d = layer.below(weight)


class _Connected:
    """A fully connected layer: reads x float32[m, inputs, b] and writes y float32[m, outputs, b]."""

    def __init__(self, layer: Linear, x: Tensor, y: Tensor) -> None:
        self._layer, self._x, self._y = layer, x, y
        self._d = y

    def forward(self, weight: Tensor, bias: Tensor | None) -> None:
        if bias is None:
            torch.bmm(weight, self._x, out=self._y)
        else:
            torch.baddbmm(bias.unsqueeze(2), weight, self._x, out=self._y)
        if self._layer.relu:
            self._y.relu_()

    def backward(self, d: Tensor, weight_gradient: Tensor, bias_gradient: Tensor | None) -> None:
        self._d = d = d.view(self._y.shape)
        if self._layer.relu:
            _where_positive.grad_input(d, self._y, 0, grad_input=d)
        torch.bmm(d, self._x.transpose(1, 2), out=weight_gradient)
        if bias_gradient is not None:
            torch.sum(d, 2, out=bias_gradient)

    def below(self, weight: Tensor) -> Tensor:
        return torch.bmm(weight.transpose(1, 2), self._d)


class _Convolved:
    """A convolution with its pooling: reads images x float32[m rows + 1, b], a row a pixel and the last one zero, and
    writes y float32[m, outputs, positions b]."""

    def __init__(self, layer: Convolution, x: Tensor, y: Tensor) -> None:
        windows, (m, outputs, _), b, device = layer.windows, y.shape, x.shape[1], x.device
        self._layer, self._x, self._y = layer, x, y
        table = torch.from_numpy(windows.table).to(device)
        taps, positions = table.shape
        model = torch.arange(m, device=device)[:, None, None]
        self._table = torch.where(table < windows.pixels, table + model * windows.pixels, m * windows.pixels).view(-1)
        self._windows = torch.empty(m, taps, positions * b, device=device)
        covering, begins = (torch.from_numpy(indices).to(device) for indices in windows.covering)
        self._covering = (covering + model[:, 0] * table.numel()).view(-1)
        self._begins = (begins + model[:, 0] * len(covering)).view(-1)
        q, count = windows.places.shape
        self._z = torch.empty(m, q, outputs, positions * b, device=device)
        self._d = torch.empty_like(self._z) if q > 1 else self._z
        self._rise = torch.empty(q - 1, *y.shape, device=device)
        self._kernels = torch.zeros(m, outputs * count + 1, device=device)
        self._spread, self._went = (indices.to(device) for indices in layer.kernels)
        self._spread_kernels = torch.empty(m, q * outputs, taps, device=device)
        self._spread_gradients = torch.empty(m, q * outputs, taps, device=device)

    def forward(self, weight: Tensor, bias: Tensor | None) -> None:
        m, q = len(self._y), self._z.shape[1]
        torch.index_select(self._x, 0, self._table, out=self._windows.view(-1, self._x.shape[1]))
        self._kernels[:, :-1].copy_(weight.view(m, -1))
        torch.index_select(self._kernels, 1, self._spread, out=self._spread_kernels.view(m, -1))
        torch.bmm(self._spread_kernels, self._windows, out=self._z.view(m, -1, self._z.shape[3]))
        largest = self._z[:, 0]
        for k in range(1, q):
            torch.sub(self._z[:, k], largest, out=self._rise[k - 1])
            torch.maximum(self._z[:, k], largest, out=self._y)
            largest = self._y
        if bias is not None:
            torch.add(largest, bias.unsqueeze(2), out=self._y)
        elif q == 1:
            self._y.copy_(largest)
        if self._layer.relu:
            self._y.relu_()

    def backward(self, d: Tensor, weight_gradient: Tensor, bias_gradient: Tensor | None) -> None:
        m, q = len(self._y), self._z.shape[1]
        d = d.view(self._y.shape)
        if self._layer.relu:
            _where_positive.grad_input(d, self._y, 0, grad_input=d)
        if bias_gradient is not None:
            torch.sum(d, 2, out=bias_gradient)
        for k in reversed(range(1, q)):  # to where the largest was found first
            _where_positive.grad_input(d, self._rise[k - 1], 0, grad_input=self._d[:, k])
            d -= self._d[:, k]
        self._d[:, 0].copy_(d)
        d = self._d.view(m, -1, self._d.shape[3])
        torch.bmm(d, self._windows.transpose(1, 2), out=self._spread_gradients)
        went = self._spread_gradients.view(m, -1).index_select(1, self._went)
        torch.sum(went.view(m, q, -1), 1, out=weight_gradient.view(m, -1))

    def below(self, weight: Tensor) -> Tensor:
        m, b = len(self._y), self._x.shape[1]
        torch.bmm(self._spread_kernels.transpose(1, 2), self._d.view(m, -1, self._d.shape[3]), out=self._windows)
        return embedding_bag(self._covering, self._windows.view(-1, b), self._begins, mode="sum")

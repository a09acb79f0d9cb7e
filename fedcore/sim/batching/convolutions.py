"""Convolutional networks of many clients at once: each layer is a batched product with a matrix of columns.

The activations of m models are float32[m, rows, columns], with a column for each example. The rows of an image are its
pixels in all channels; the rows of a layer are its units. A layer is Z = W P + b. For a fully connected layer, P is the
layer's input. For a convolution, P holds the windows of the input, with a column for each position and example.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from fedcore.algorithms.local_rules import Indices
from fedcore.sim.batching import layers as shared
from fedcore.sim.batching.layers import Block, Gradients, Layered, Linear, Net, starts
from fedcore.sim.nets import MaxPool2
from fedcore.sim.sgd import CPU

Pair = tuple[int, ...]
"""Two numbers, one for each axis of an image."""


class Kernel(NamedTuple):
    """The size and the steps of a convolution and of the pooling after it, for both axes of an image, or for one."""

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    pool: Pair = (1, 1)
    pool_stride: Pair = (1, 1)


@dataclass(frozen=True)
class Windows:
    """Windows of an image, with which a matrix product is a convolution and the max pooling after it.

    All outputs that are pooled into one number depend on one window. For example, with kernels of 5 x 5 and pooling of
    2 x 2, the window is 6 x 6, and has 4 places for the kernel. The pooled output is the largest product of the window
    with the kernel in one of its places. Each pixel has 36/4 copies instead of 25. Without pooling, the kernel has one
    place, and the window is as large as the kernel.

    Attributes:
        table: int64[taps, positions], the pixels of the window for each position of the result, as indices into the
            image float32[channels, height, width]. The index ``pixels``, one past the end, stands for the zero padding.
        places: int64[q, weights], the place in the window of each weight of one output's kernel. The q rows are the
            places of the kernel in the order of the pooling. Among equal products, pooling selects the first.
        pixels: the number of pixels of the image in all channels.
        height, width: the size of the result.
    """

    table: Indices
    places: Indices
    pixels: int
    height: int
    width: int

    @classmethod
    def of(cls, image: tuple[int, int, int], kernel: Kernel) -> "Windows | None":
        """Return the windows of a convolution and a max pooling without padding; None if the result is empty."""
        channels, *sizes = image
        pixels = math.prod(image)
        (y_places, ys), (x_places, xs) = map(_axis, sizes, zip(*kernel, strict=True))
        if not ys.size or not xs.size:
            return None
        c = np.arange(channels)
        inside = (ys >= 0)[:, None, :, None] & (xs >= 0)[None, :, None, :]  # [window y, window x, y, x]
        one = np.where(inside, ys[:, None, :, None] * sizes[1] + xs[None, :, None, :], pixels)
        table = np.where(inside, one + c[:, None, None, None, None] * sizes[0] * sizes[1], pixels)
        shape = len(ys), len(xs)
        places = (c[:, None, None] * shape[0] + y_places[:, None, None, :, None]) * shape[1]
        places = places + x_places[None, :, None, None, :]  # [pool y, pool x, channel, kernel y, kernel x]
        return cls(
            table.reshape(channels * shape[0] * shape[1], -1),
            places.reshape(kernel.pool[0] * kernel.pool[1], -1),
            pixels,
            ys.shape[1],
            xs.shape[1],
        )

    @cached_property
    def covering(self) -> tuple[Indices, Indices]:
        """The places of each pixel in the table, pixel after pixel, and the start of each pixel's places."""
        flat = self.table.ravel()
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=self.pixels + 1)[: self.pixels]
        return order[: counts.sum()], np.concatenate([[0], np.cumsum(counts)[:-1]])


def _axis(size: int, of_axis: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Return the places of the kernel's taps in the window and the pixels of each window, for one axis.

    The places are int64[pool, kernel]; the pixels are int64[window, positions], with -1 for the padding.
    """
    kernel, stride, padding, dilation, pool, pool_stride = of_axis
    offsets = np.add.outer(stride * np.arange(pool), dilation * np.arange(kernel))
    reach, places = np.unique(offsets, return_inverse=True)
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    positions = max(0, (outputs - pool) // pool_stride + 1)
    pixels = np.add.outer(reach, stride * pool_stride * np.arange(positions)) - padding
    return places.reshape(offsets.shape), np.where((pixels >= 0) & (pixels < size), pixels, -1)


_where_positive = torch.ops.aten.threshold_backward
"""(d, z, 0) returns d where z > 0 and 0 elsewhere."""


@dataclass(frozen=True, eq=False)
class Convolution(Linear):
    """A convolution of ``windows`` of its input, and the max pooling after it. ``inputs`` counts a kernel's taps."""

    windows: Windows

    @cached_property
    def kernels(self) -> tuple[Tensor, Tensor]:
        """Indices for the matrix float32[q outputs, taps] of all kernels in each of their q places.

        The first tensor has the weight of each element, or one past the end for zero; the second has the q elements of
        each weight.
        """
        taps, (q, count) = len(self.windows.table), self.windows.places.shape
        places = torch.from_numpy(self.windows.places)[:, None].expand(-1, self.outputs, -1)
        spread = torch.full((q, self.outputs, taps), self.outputs * count)
        spread.scatter_(2, places, torch.arange(self.outputs * count).view(1, self.outputs, count).expand(q, -1, -1))
        gathered = torch.arange(q * self.outputs).view(q, -1, 1) * taps + places
        return spread.view(-1), gathered.view(-1)


class Columns:
    """The gradients of m models on minibatches of b examples, with their scratch memory.

    The layers of ``net`` are ``Convolution`` and ``Linear``; the image float32[channels, height, width] is flat.

    Determinism: a model's gradient depends only on its own rows and on b, if torch's batched products do.
    Cost: two batched products a layer, and one more for all but the first; for a convolution also a copy of its windows
        and the sum of their gradients.
    """

    def __init__(self, net: Net, m: int, b: int, device: torch.device = CPU) -> None:
        self._m, self._b = m, b
        rows = [layer.windows.pixels if isinstance(layer, Convolution) else layer.inputs for layer in net.layers]
        last = net.layers[-1]
        positions = last.windows.height * last.windows.width if isinstance(last, Convolution) else 1
        rows.append(last.outputs * positions)
        # The last row is zero, for a convolution's padding.
        self._activations = [torch.zeros(m * k + 1, b, device=device) for k in rows]
        self._layers: list[_Convolved | _Connected] = []
        for layer, (before, after) in zip(net.layers, pairwise(range(len(rows))), strict=True):
            x, y = self._activations[before], self._activations[after][:-1].view(m, layer.outputs, -1)
            if isinstance(layer, Convolution):
                self._layers.append(_Convolved(layer, x, y))
            else:
                self._layers.append(_Connected(layer, x[:-1].view(m, layer.inputs, b), y))

    def gradients(self, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
        """Compute the gradients; see ``layers.Gradients``."""
        m, b = self._m, self._b
        self._activations[0][:-1].view(m, -1, b).copy_(inputs.transpose(1, 2))
        parameters = list(zip(self._layers, models.weights, models.biases, out.weights, out.biases, strict=True))
        for layer, weight, bias, _, _ in parameters:
            layer.forward(weight, bias)
        d = torch.softmax(self._activations[-1][:-1].view(m, -1, b), 1)
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
    """A convolution with its pooling: reads x float32[m rows + 1, b], writes y float32[m, outputs, positions b].

    x has a row for each pixel of each image, and a last row of zeros.
    """

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
        self._spread, self._gathered = (indices.to(device) for indices in layer.kernels)
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
        for k in reversed(range(1, q)):  # The gradient belongs to the first place with the largest product.
            _where_positive.grad_input(d, self._rise[k - 1], 0, grad_input=self._d[:, k])
            d -= self._d[:, k]
        self._d[:, 0].copy_(d)
        d = self._d.view(m, -1, self._d.shape[3])
        torch.bmm(d, self._windows.transpose(1, 2), out=self._spread_gradients)
        gathered = self._spread_gradients.view(m, -1).index_select(1, self._gathered)
        torch.sum(gathered.view(m, q, -1), 1, out=weight_gradient.view(m, -1))

    def below(self, weight: Tensor) -> Tensor:
        m, b = len(self._y), self._x.shape[1]
        torch.bmm(self._spread_kernels.transpose(1, 2), self._d.view(m, -1, self._d.shape[3]), out=self._windows)
        return embedding_bag(self._covering, self._windows.view(-1, b), self._begins, mode="sum")


PIECE = 64
"""The maximum number of examples in one pass. More are not faster, and copies of windows need several times the memory
of the images."""
CLIENTS = 8
"""The maximum number of clients in one call: enough to hide the overhead of torch's calls; more are not faster. With 1,
2, 4, 8, 16 clients in a call, a client's step of LeNet takes 1.6, 1.0, .9, 1.0, 1.1 ms. With two concurrent calls, in
two threads, it takes 1.5, .9, .6, .6, .6 ms. CIFAR network: 3.3, 2.8, 2.4, 2.6, 2.3 and 2.7, 1.9, 1.5, 1.2, 1.2."""
BYTES = 16 << 20
"""The maximum memory, in bytes, of the models, gradients and scratch of one call. For LeNet with minibatches of 64, a
client needs 6 MiB. 16 of its examples take 1.1, 1.2, 1.2, 1.3 ms with 1, 2, 4, 8 clients in a call."""


class ConvNet(Layered):
    """A convolutional network, trained by hand-written products: ``Convolution`` layers, then ``Linear`` layers."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "ConvNet | None":
        """Return the convolutional network of a module, or None if it is a different network.

        It is an ``nn.Sequential`` of ``Conv2d``, each optionally followed by ``ReLU`` and ``MaxPool2d``, then
        ``Flatten``, then ``Linear`` layers, each with or without ``ReLU``. It has no groups, dropout, normalisation,
        shared or frozen weights, hooks, or objects with their own ``forward``; convolutions may have zero padding,
        poolings none.
        """
        children = shared.plain_sequence(module)
        if not children or len(shape) != 3:
            return None
        layers: list[Linear] = []
        image = (shape[0], shape[1], shape[2])
        while children and not shared.is_flatten(children[0][1]):
            layer = _convolution(children, image, starts(module))
            if layer is None:
                return None
            layers.append(layer)
            image = (layer.outputs, layer.windows.height, layer.windows.width)
        behind = shared.linear_layers(children[1:], image[0] * image[1] * image[2], starts(module))
        return net if layers and behind and (net := cls([*layers, *behind])).covers(module) else None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """Return the maximum number of clients of one call, for minibatches of b examples.

        On the CPU this is ``CLIENTS``, or fewer if only these fit into ``BYTES``; on a GPU, the number that fits into
        ``DEVICE_BYTES``.
        """
        numbers = 2 * self.n
        for layer in self.layers:
            if isinstance(layer, Convolution):
                (taps, positions), q = layer.windows.table.shape, len(layer.windows.places)
                numbers += min(b, PIECE) * positions * (taps + 3 * q * layer.outputs) + 2 * q * layer.outputs * taps
        if device.type == "cpu":
            return max(1, min(CLIENTS, BYTES // (4 * numbers)))
        return max(1, shared.DEVICE_BYTES // (4 * numbers))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """Return the function that computes the gradients of m models on minibatches of b examples."""
        if b <= PIECE:
            return Columns(self, m, b, device).gradients
        pieces = [slice(start, min(start + PIECE, b)) for start in range(0, b, PIECE)]
        sizes = {piece.stop - piece.start for piece in pieces}
        takes = {size: Columns(self, m, size, device).gradients for size in sizes}
        more = Block(self, m, device)

        def gradients(models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
            for piece in pieces:
                take, into = takes[piece.stop - piece.start], more if piece.start else out
                take(models, inputs[:, piece], labels[:, piece], weights[:, piece], into)
                if piece.start:
                    out.flat.add_(more.flat)

        return gradients


def _convolution(
    children: list[tuple[str, nn.Module]], image: tuple[int, int, int], starts: dict[str, int]
) -> Convolution | None:
    """Remove the first modules and return their convolution, or None if they are not a supported convolution."""
    name, module = children.pop(0)
    if type(module) is not nn.Conv2d or f"{name}.weight" not in starts or module.in_channels != image[0]:
        return None
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    relu, pool = False, None
    while children and type(child := children[0][1]) in (nn.ReLU, nn.MaxPool2d, MaxPool2):
        if isinstance(child, nn.MaxPool2d):  # pooling before ReLU gives the same result as after it
            if pool is not None or not _pools_plainly(child):
                return None
            pool = child
        relu = relu or isinstance(child, nn.ReLU)
        children.pop(0)
    pooling = ((1, 1), (1, 1)) if pool is None else (_pair(pool.kernel_size), _pair(pool.stride))
    windows = Windows.of(image, Kernel(module.kernel_size, module.stride, module.padding, module.dilation, *pooling))
    if windows is None:
        return None
    bias = None if module.bias is None else starts[f"{name}.bias"]
    taps = module.weight[0].numel()
    return Convolution(module.out_channels, taps, starts[f"{name}.weight"], bias, relu=relu, windows=windows)


def _pools_plainly(pool: nn.MaxPool2d) -> bool:
    """Whether a pooling has only complete windows, without padding, and returns only the largest value."""
    plain = _pair(pool.padding) == (0, 0) and _pair(pool.dilation) == (1, 1)
    return plain and not pool.ceil_mode and not pool.return_indices


def _pair(numbers: int | tuple[int, ...]) -> Pair:
    """Return the numbers for the two axes of an image."""
    return (numbers, numbers) if isinstance(numbers, int) else (numbers[0], numbers[1])

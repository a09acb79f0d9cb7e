"""Convolutional networks of many clients at once: each layer is a batched product with a matrix of columns.

Between layers there is float32[m, rows, columns] of m models. The rows of an image are its pixels in all channels,
those of a layer are its units, and a column is an example. A layer is Z = W P + b: for a fully connected layer P is its
input, for a convolution the windows of its input, in a column for each position and example.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from fedcore.simulation.batching.layers import (
    DEVICE_BYTES,
    Block,
    Gradients,
    Layered,
    Linear,
    Net,
    is_flatten,
    linear_layers,
    plain_sequence,
    starts,
)
from fedcore.simulation.local_rules import Indices
from fedcore.simulation.nets import MaxPool2
from fedcore.simulation.torch_device import CPU

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Windows of an image: a matrix product with them is a convolution, together with the max pooling after it.

    All outputs that are pooled into one depend on one window: with kernels of 5 x 5 and pooling of 2 x 2, that window
    is 6 x 6, and the kernel has 4 places in it. Convolution and pooling are the largest of the products with the kernel
    in each of its places; each pixel has 36/4 copies instead of 25. Without pooling the kernel has one place, and the
    window is as large as the kernel.

    Attributes:
        table: int64[taps, positions]; the pixels of the window for each position of the result, as indices into the
            image float32[channels, height, width]; ``pixels``, one past the end, is the padding's zero.
        places: int64[q, weights]; the place in the window of each weight of one output's kernel, for each of the q
            places of the kernel in the order of the pooling: among equal products the first counts.
        pixels: of the image, in all channels.
        height, width: those of the result.
    """

    table: Indices
    places: Indices
    pixels: int
    height: int
    width: int

    @classmethod
    def of(
        cls,
        image: tuple[int, int, int],
        kernel: Pair,
        *,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        pool: Pair = (1, 1),
        pool_stride: Pair = (1, 1),
    ) -> "Windows | None":
        """Return the windows of a convolution and max pooling without padding after it, or None if the result is empty.

        Args:
            image: channels, height and width.
            kernel, stride, padding, dilation: those of ``torch.nn.Conv2d``.
            pool, pool_stride: kernel and stride of ``torch.nn.MaxPool2d``.
        """
        channels, *sizes = image
        pixels = math.prod(image)
        (y_places, ys), (x_places, xs) = (
            _axis(*numbers) for numbers in zip(sizes, kernel, stride, padding, dilation, pool, pool_stride, strict=True)
        )
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
            places.reshape(pool[0] * pool[1], -1),
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


def _axis(
    size: int, kernel: int, stride: int, padding: int, dilation: int, pool: int, pool_stride: int
) -> tuple[Indices, Indices]:
    """Along one axis, the place in the window of each tap of the kernel, int64[pool, kernel], and the pixels of each
    window, int64[window, positions], with -1 for the padding."""
    offsets = np.add.outer(stride * np.arange(pool), dilation * np.arange(kernel))
    reach, places = np.unique(offsets, return_inverse=True)
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    positions = max(0, (outputs - pool) // pool_stride + 1)
    pixels = np.add.outer(reach, stride * pool_stride * np.arange(positions)) - padding
    return places.reshape(offsets.shape), np.where((pixels >= 0) & (pixels < size), pixels, -1)


_where_positive = torch.ops.aten.threshold_backward
"""(d, z, 0) is d where z > 0 and 0 elsewhere."""


@dataclass(frozen=True, eq=False)
class Convolution(Linear):
    """A convolution and the max pooling after it; its ``inputs`` are the taps of a kernel in all channels.

    Attributes:
        windows: of its input images.
    """

    windows: Windows

    @property
    def rows(self) -> int:
        """The rows of its output."""
        return self.outputs * self.windows.height * self.windows.width

    @cached_property
    def kernels(self) -> tuple[Tensor, Tensor]:
        """For the kernels of all outputs in each of their q places, as the rows float32[q outputs, taps] of a matrix:
        the weight of each element, with one past the end for zero, and the q elements of each weight."""
        taps, (q, count) = len(self.windows.table), self.windows.places.shape
        places = torch.from_numpy(self.windows.places)[:, None].expand(-1, self.outputs, -1)
        spread = torch.full((q, self.outputs, taps), self.outputs * count)
        spread.scatter_(2, places, torch.arange(self.outputs * count).view(1, self.outputs, count).expand(q, -1, -1))
        went = torch.arange(q * self.outputs).view(q, -1, 1) * taps + places
        return spread.view(-1), went.view(-1)


class Columns:
    """The gradients of m models on minibatches of b examples, with their scratch memory.

    Args:
        net: its layers are ``Convolution`` and ``Linear``; the image float32[channels, height, width] is flat.
        m, b: models, and examples in a minibatch.
        device: the device of all of them.

    Determinism: a model's gradient depends only on its own rows and on b, as far as torch's batched products do.
    Cost: two batched products a layer and one more for all but the first; for a convolution a copy of its windows and
        the sum of their gradients.
    """

    def __init__(self, net: Net, m: int, b: int, device: torch.device = CPU) -> None:
        self._m, self._b = m, b
        rows = [layer.windows.pixels if isinstance(layer, Convolution) else layer.inputs for layer in net.layers]
        rows.append(net.layers[-1].rows if isinstance(net.layers[-1], Convolution) else net.layers[-1].outputs)
        # One row more, of zeros, for a convolution's padding.
        self._reached = [torch.zeros(m * k + 1, b, device=device) for k in rows]
        self._layers: list[_Convolved | _Connected] = []
        for layer, (before, after) in zip(net.layers, pairwise(range(len(rows))), strict=True):
            x, y = self._reached[before], self._reached[after][:-1].view(m, layer.outputs, -1)
            if isinstance(layer, Convolution):
                self._layers.append(_Convolved(layer, x, y))
            else:
                self._layers.append(_Connected(layer, x[:-1].view(m, layer.inputs, b), y))

    def gradients(self, models: Block, inputs: Tensor, labels: Tensor, weights: Tensor, out: Block) -> None:
        """Compute the gradients; see ``layers.Gradients``."""
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
    """A convolution with its pooling: reads images x float32[m rows + 1, b], a row for each pixel and a last row of
    zeros, and writes y float32[m, outputs, positions b]."""

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
        for k in reversed(range(1, q)):  # to the first place of the largest
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


PIECE = 64
"""The most examples in one pass: more gain nothing, and copies of their windows take many times their own memory."""
CLIENTS = 8
"""The most clients in one call: enough to make the overhead of torch's calls small, and more gain nothing. With 1, 2,
4, 8, 16 in a call, a client's step of LeNet takes 1.6, 1.0, .9, 1.0, 1.1 ms, and with two such calls at once, in two
threads, 1.5, .9, .6, .6, .6; that of the CIFAR network 3.3, 2.8, 2.4, 2.6, 2.3 and 2.7, 1.9, 1.5, 1.2, 1.2."""
BYTES = 16 << 20
"""The most memory of the models, gradients and scratch of one call. 16 examples of minibatches of 64 take LeNet 1.1,
1.2, 1.2, 1.3 ms with 1, 2, 4, 8 clients in a call, of 6 MiB each."""


class ConvNet(Layered):
    """A convolutional network, trained by hand-written batched products: ``Convolution`` layers, then ``Linear``."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "ConvNet | None":
        """Return the convolutional network of a module, or None if it is another network.

        It is an ``nn.Sequential`` of ``Conv2d``, each with or without ``ReLU`` and ``MaxPool2d`` after it, then
        ``Flatten``, and then ``Linear`` layers with or without ``ReLU``: no groups, no padding but zeros around the
        convolved image, no dropout, no normalisation, no shared or frozen weights, no hooks.

        Args:
            module: of float32 tensors.
            shape: an example's.
        """
        children = plain_sequence(module)
        if not children or len(shape) != 3:
            return None
        layers: list[Linear] = []
        image = (shape[0], shape[1], shape[2])
        while children and not is_flatten(children[0][1]):
            layer = _convolution(children, image, starts(module))
            if layer is None:
                return None
            layers.append(layer)
            image = (layer.outputs, layer.windows.height, layer.windows.width)
        behind = linear_layers(children[1:], image[0] * image[1] * image[2], starts(module))
        return net if layers and behind and (net := cls([*layers, *behind])).is_whole(module) else None

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: ``CLIENTS``, or as many as fit into
        ``BYTES``; on a GPU as many as fit into ``DEVICE_BYTES``."""
        numbers = 2 * self.n
        for layer in self.layers:
            if isinstance(layer, Convolution):
                (taps, positions), q = layer.windows.table.shape, len(layer.windows.places)
                numbers += min(b, PIECE) * positions * (taps + 3 * q * layer.outputs) + 2 * q * layer.outputs * taps
        if device.type == "cpu":
            return max(1, min(CLIENTS, BYTES // (4 * numbers)))
        return max(1, DEVICE_BYTES // (4 * numbers))

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
    """Take the first modules away and return their convolution, or None if they are of another kind."""
    name, module = children.pop(0)
    if type(module) is not nn.Conv2d or f"{name}.weight" not in starts or module.in_channels != image[0]:
        return None
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    relu, pool = False, None
    while children and type(child := children[0][1]) in (nn.ReLU, nn.MaxPool2d, MaxPool2):
        if isinstance(child, nn.MaxPool2d):  # before or after ReLU, the largest number is the same
            if pool is not None or not _pools_plainly(child):
                return None
            pool = child
        relu = relu or isinstance(child, nn.ReLU)
        children.pop(0)
    windows = Windows.of(
        image,
        _pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=_pair(module.padding),
        dilation=_pair(module.dilation),
        pool=(1, 1) if pool is None else _pair(pool.kernel_size),
        pool_stride=(1, 1) if pool is None else _pair(pool.stride),
    )
    if windows is None:
        return None
    bias = None if module.bias is None else starts[f"{name}.bias"]
    taps = module.weight[0].numel()
    return Convolution(module.out_channels, taps, starts[f"{name}.weight"], bias, relu=relu, windows=windows)


def _pools_plainly(pool: nn.MaxPool2d) -> bool:
    """Whether a pooling has windows of pixels only, all of them whole, and returns only the largest."""
    plain = _pair(pool.padding) == (0, 0) and _pair(pool.dilation) == (1, 1)
    return plain and not pool.ceil_mode and not pool.return_indices


def _pair(numbers: int | tuple[int, ...]) -> Pair:
    """The two numbers of an image's axes."""
    return (numbers, numbers) if isinstance(numbers, int) else (numbers[0], numbers[1])

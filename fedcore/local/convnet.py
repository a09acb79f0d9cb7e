"""A convolutional network as places in its flat vector."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedcore.layout import Layout
from fedcore.local.columns import Columns, Convolution
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
from fedcore.local.nets.max_pool import MaxPool2
from fedcore.local.torch_device import CPU
from fedcore.local.windows import Pair, Windows

PIECE = 64
"""The most examples in one pass: more gain nothing, and copies of their windows take many times their own memory."""
CLIENTS = 8
"""The most clients in one call. So many make torch's calls long against what a call costs, and more gain nothing: with
1, 2, 4, 8, 16 in a call, a client's step of LeNet takes 1.6, 1.0, .9, 1.0, 1.1 ms, and with two such calls at once, in
two threads, 1.5, .9, .6, .6, .6; that of the CIFAR network 3.3, 2.8, 2.4, 2.6, 2.3 and 2.7, 1.9, 1.5, 1.2, 1.2."""
BYTES = 16 << 20
"""What the models, gradients and scratch memory of one call may weigh. 16 examples of minibatches of 64 take LeNet 1.1,
1.2, 1.2, 1.3 ms with 1, 2, 4, 8 clients in a call, of 6 MiB each."""


class ConvNet:
    """The layers of a convolutional network, as places in its flat vector.

    Attributes:
        layers: from the input on: ``Convolution``, and then ``Linear``.
        n: its parameters.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self.n = parameters(layers)

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, ...]) -> "ConvNet | None":
        """The network that a module is; None if it is anything else, or does anything else besides.

        It is one if it is an ``nn.Sequential`` of ``Conv2d``, each with or without ``ReLU`` and ``MaxPool2d`` behind
        it, then ``Flatten``, and then ``Linear`` layers with or without ``ReLU``: no groups, no padding but zeros
        around the image that is convolved, no dropout, no normalisation, no weights that two layers share or that are
        not to be trained, no hooks.

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
        if not layers or not behind or parameters([*layers, *behind]) != Layout.of(module).n:
            return None
        return cls([*layers, *behind])

    def most_clients(self, b: int, device: torch.device = CPU) -> int:
        """The most clients for one call, whose minibatches have b examples: ``CLIENTS``, or what ``BYTES`` hold; on a
        GPU, what ``DEVICE_BYTES`` hold."""
        numbers = 2 * self.n
        for layer in self.layers:
            if isinstance(layer, Convolution):
                (taps, positions), q = layer.windows.table.shape, len(layer.windows.places)
                numbers += min(b, PIECE) * positions * (taps + 3 * q * layer.outputs) + 2 * q * layer.outputs * taps
        if device.type == "cpu":
            return max(1, min(CLIENTS, BYTES // (4 * numbers)))
        return max(1, DEVICE_BYTES // (4 * numbers))

    def gradients(self, m: int, b: int, device: torch.device = CPU) -> Gradients:
        """The function that takes the gradients of m models on minibatches of b examples."""
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
    """The convolution with which modules begin, which are then taken away; None if it is none, or of another kind."""
    name, module = children.pop(0)
    if type(module) is not nn.Conv2d or f"{name}.weight" not in starts or module.in_channels != image[0]:
        return None
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    relu, pool = False, None
    while children and type(child := children[0][1]) in (nn.ReLU, nn.MaxPool2d, MaxPool2):
        if isinstance(child, nn.MaxPool2d):  # ReLU may stand before it or behind, the largest number is the same
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
    """Tell whether a pooling has windows of pixels alone, all of them whole, and gives the largest alone."""
    plain = _pair(pool.padding) == (0, 0) and _pair(pool.dilation) == (1, 1)
    return plain and not pool.ceil_mode and not pool.return_indices


def _pair(numbers: int | tuple[int, ...]) -> Pair:
    """The two numbers of an image's axes."""
    return (numbers, numbers) if isinstance(numbers, int) else (numbers[0], numbers[1])

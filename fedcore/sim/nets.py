"""The models of the papers and examples."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedcore.errors import FedcoreError, RangeError, ShapeError
from fedcore.sim.sgd import FlatModel, copy_of, seeded
from fedcore.validation import Registry, check_integer, check_number


class MaxPool2(nn.MaxPool2d):
    """Max pooling with the values of ``nn.MaxPool2d(2)``, ten times as fast on a CPU without gradients."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, images: Tensor) -> Tensor:
        """Map float32[..., height, width] to float32[..., height // 2, width // 2]."""
        if torch.is_grad_enabled() or images.device.type != "cpu" or min(images.shape[-2:]) < 2:
            pooled: Tensor = super().forward(images)
            return pooled
        rows = torch.maximum(images[..., :-1:2, :], images[..., 1::2, :])
        return torch.maximum(rows[..., :-1:2], rows[..., 1::2])


class LeNet(nn.Sequential):
    """The MimiC paper's network for 1x28x28 images and 10 classes: 44,426 parameters.

    Two 5x5 convolutions, to 6 and to 16 channels, each have ReLU and max pooling by 2. Fully connected layers of 120,
    84 and 10 units follow, with ReLU between them. The paper does not specify the fully connected layers; these are
    from its authors' public code.
    """

    def __init__(self) -> None:
        super().__init__(layers([120, 84, 10], [6, 16], side=28))


def layers(
    sizes: Sequence[int], convolutions: Sequence[int] = (), *, channels: int = 1, side: int = 0, padding: int = 0
) -> OrderedDict[str, nn.Module]:
    """Return the layers of a network by name: 5x5 convolutions with ReLU and max pooling by 2, then linear layers.

    ``convolutions`` has the channels after each convolution of an image with ``channels`` channels, ``side`` pixels
    wide and high. ``sizes`` has the units of the linear layers, with ReLU between them, up to the number of classes;
    without convolutions, the first is the number of inputs.
    """
    check_integer("classes", sizes[-1], 1)
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for number, after in enumerate(convolutions, start=1):
        found[f"conv{number}"] = nn.Conv2d(channels, after, 5, padding=padding)
        found |= {f"relu{number}": nn.ReLU(), f"pool{number}": MaxPool2()}
        channels, side = after, (side + 2 * padding - 4) // 2
    found["flatten"] = nn.Flatten()
    sizes = [channels * side * side, *sizes] if convolutions else sizes
    for number, (before, after) in enumerate(pairwise(sizes), start=1):
        found |= {f"fc{number}": nn.Linear(before, after), f"relu{len(convolutions) + number}": nn.ReLU()}
    found.popitem()  # no ReLU after the last layer
    return found


class CNNCIFAR10(nn.Sequential):
    """PyTorch's tutorial network for 3x32x32 images, which Flower's examples train: 62,006 parameters for 10 classes.

    The network is LeNet with three input channels.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__(layers([120, 84, classes], [6, 16], channels=3, side=32))


class CNNEMNIST(nn.Sequential):
    """The Flexible paper's network for 1x28x28 images: 1,690,046 parameters for 62 classes, 1,682,351 for 47.

    Two convolutions, to 32 and to 64 channels, each have ReLU and max pooling by 2. A fully connected layer of 512
    units with ReLU follows, then the outputs: 62 for the split "byclass", 47 for "bymerge" and "balanced".

    The paper does not specify the kernels. This network has 5x5 kernels that keep the image's size, as in McMahan et
    al., 2017, whose network for MNIST has the same layers.
    """

    def __init__(self, classes: int = 62) -> None:
        super().__init__(layers([512, classes], [32, 64], side=28, padding=2))


class MLP(nn.Sequential):
    """Hidden layers with ReLU over the flattened input. Default: 4,810 parameters, for the 8x8 digits.

    ``hidden`` has the units of each hidden layer, from the input on; it is empty for a logistic regression.
    """

    def __init__(self, inputs: int = 64, hidden: Sequence[int] = (64,), classes: int = 10) -> None:
        named = [("inputs", inputs), *(("hidden", units) for units in hidden), ("classes", classes)]
        super().__init__(layers([check_integer(name, size, 1) for name, size in named]))


def logistic(inputs: int = 60, classes: int = 10) -> MLP:
    """Multinomial logistic regression. Default: the Flexible paper's model for SYNTHETIC, with 610 parameters."""
    return MLP(inputs, (), classes)


def mlp_mnist(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Flexible paper's 784-200-200-10 perceptron for MNIST: 199,210 parameters."""
    return MLP(784, hidden, 10)


def relu_mnist(hidden: Sequence[int] = (200,)) -> MLP:
    """The Momentum paper's two-layer ReLU network for MNIST: 159,010 parameters; the paper gives no width."""
    return MLP(784, hidden, 10)


def mlp_cifar10(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Momentum paper's three-layer perceptron for CIFAR-10: 656,810 parameters; the paper gives no widths."""
    return MLP(3072, hidden, 10)


class Block(nn.Module):
    """A residual block: ReLU(f(x) + x), f two 3x3 convolutions with batch normalisation each and ReLU between them.

    If the shape changes, a 1x1 convolution with batch normalisation is applied to the summand x.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map float32[b, before, s, s] to float32[b, after, s / stride, s / stride]."""
        residual = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 3x32x32 images: 11,173,962 parameters and 9,600 BatchNorm statistics for 10 classes.

    A 3x3 convolution of 64 channels replaces the 7x7 convolution and its pooling. Two blocks each of 64, 128, 256 and
    512 channels follow; from the second pair on, they halve the image. The last layers are the mean over the image and
    a fully connected layer. The Momentum paper only names "ResNet-18".

    The statistics are float buffers, which a server averages but does not correct; ``num_batches_tracked`` is a
    counter.

    Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016.
    """

    CHANNELS = (64, 64, 128, 256, 512)

    def __init__(self, classes: int = 10) -> None:
        check_integer("classes", classes, 1)
        super().__init__()
        self.conv = nn.Conv2d(3, self.CHANNELS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(self.CHANNELS[0])
        blocks: list[nn.Module] = []
        for before, after in pairwise(self.CHANNELS):
            blocks += [Block(before, after, 1 if before == after else 2), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(self.CHANNELS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map float32[b, 3, 32, 32] to scores float32[b, classes]."""
        features = self.blocks(relu(self.bn(self.conv(images))))
        scores: Tensor = self.fc(features.mean(dim=(2, 3)))
        return scores


class VGG11(nn.Module):
    """VGG-11 without batch normalisation for 3x32x32 images and 10 classes: 9,750,922 parameters.

    Eight 3x3 convolutions with ReLU have 64, 128, 256, 256, 512, 512, 512 and 512 channels. Max pooling by 2 follows
    the first, second, fourth, sixth and eighth. Fully connected layers of 512, 512 and 10 units follow, with ReLU
    between them. Dropout precedes the first and second fully connected layer.

    The MimiC paper only names "VGG-11". Its authors' public code has no batch normalisation. The classifier, its
    dropout and the initial weights are from the code on which theirs is based (NIID-Bench).

    Weights of convolutions are drawn from N(0, 2 / (9 channels out)); their biases are 0. With PyTorch's smaller
    default weights, the gradient vanishes in eight layers without normalisation.
    """

    CHANNELS = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    POOLED = (1, 2, 4, 6, 8)
    """The convolutions that a pooling follows."""

    def __init__(self, dropout: float = 0.5) -> None:
        check_number("dropout", dropout, "[0, 1)")
        super().__init__()
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(self.CHANNELS), start=1):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            nn.init.normal_(convolution.weight, std=math.sqrt(2 / (9 * after)))
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
            if number in self.POOLED:
                layers.append(MaxPool2())
        self.features = nn.Sequential(*layers)
        hidden = [layer for _ in range(2) for layer in (nn.Dropout(dropout), nn.Linear(512, 512), nn.ReLU())]
        self.classifier = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map float32[b, 3, 32, 32] to scores float32[b, 10]."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


_MODELS: dict[str, Callable[..., nn.Module]] = {"lenet": LeNet, "vgg11": VGG11, "logistic": logistic, "mlp": MLP}
_MODELS |= {"mlp-mnist": mlp_mnist, "cnn-emnist": CNNEMNIST, "cnn-cifar10": CNNCIFAR10, "mlp-cifar10": mlp_cifar10}
_MODELS |= {"relu-mnist": relu_mnist, "resnet18": ResNet18}
REGISTRY: Registry[Callable[..., nn.Module]] = Registry(
    "model", _MODELS, expected="a class or function that makes a torch.nn.Module", fits=callable, group="fedcore.models"
)


def build(name: str, *, seed: int, **options: Any) -> nn.Module:
    """Create a new model with its usual initial weights.

    ``name`` is a key of ``REGISTRY``, the name of an entry point, or ``module:Name`` of a custom model; ``options`` are
    its arguments. The weights depend only on the arguments, and torch's global random state does not change.

    >>> sum(p.numel() for p in build("lenet", seed=0).parameters())
    44426
    """
    make = REGISTRY.find(name)
    with seeded(seed, "local: initial weights"):
        module = make(**options)
    if not isinstance(module, nn.Module):
        raise RangeError(f"model: {name!r} must return a torch.nn.Module, got {module!r:.200}")
    return module


def scores(name: str, shape: tuple[int, ...], **options: Any) -> int:
    """Return the number of scores that a model has for an example of this shape, by applying a copy of it to one.

    Raises:
        ShapeError: the model cannot be made, copied or applied.
        RangeError, DtypeError: it has no parameters, or others than float32, or does not return float32[b, classes].

    Cost: the time to create the model: milliseconds, or tenths of a second with ten million parameters.

    >>> scores("mlp", (1, 8, 8))
    10
    """
    try:
        model = FlatModel(copy_of(build(name, seed=0, **options)))
        with torch.inference_mode():
            found = model.module.eval()(torch.zeros(1, *shape))
    except FedcoreError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise ShapeError(
            f"{name!r}: cannot be made, copied and applied to examples float32{[*shape]} ({why})"
        ) from error
    if not model.layout.n_parameters:
        raise RangeError(f"{name!r}: has no parameters to train")
    size = list(found.shape) if isinstance(found, Tensor) and found.is_floating_point() else []
    if len(size) != 2 or size[0] != 1:
        raise RangeError(f"{name!r}: must return scores float32[b, classes], got {found!r:.100} for one example")
    return size[1]

"""The models of the papers and of the examples, by name."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedcore.arguments import real, whole
from fedcore.errors import RangeError, ShapeError
from fedcore.registries import Registry
from fedcore.simulation.torch_device import seeded


class MaxPool2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)`` with the same values, in a tenth of the time where a CPU computes no gradients."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, images: Tensor) -> Tensor:
        """float32[..., height, width] to float32[..., height // 2, width // 2]."""
        if torch.is_grad_enabled() or images.device.type != "cpu" or min(images.shape[-2:]) < 2:
            within: Tensor = super().forward(images)
            return within
        rows: Tensor = torch.maximum(images[..., :-1:2, :], images[..., 1::2, :])
        pooled: Tensor = torch.maximum(rows[..., :-1:2], rows[..., 1::2])
        return pooled


class LeNet(nn.Sequential):
    """The MimiC paper's network for 1x28x28 images and 10 classes: 44,426 parameters.

    Convolution to 6 channels (5x5), ReLU, max pooling by 2, convolution to 16 channels (5x5), ReLU, max pooling by 2,
    and fully connected layers of 120, 84 and 10 with ReLU between them. The fully connected layers are those of its
    authors' public code; the paper does not give them.
    """

    def __init__(self) -> None:
        super().__init__(lenet_layers(channels=1, side=28, classes=10))


def lenet_layers(*, channels: int, side: int, classes: int) -> OrderedDict[str, nn.Module]:
    """LeNet's layers by name, for images with ``channels`` channels, ``side`` pixels wide and high."""
    left = ((side - 4) // 2 - 4) // 2  # pixels after two convolutions with their pooling
    return OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(channels, 6, 5),
        relu1=nn.ReLU(),
        pool1=MaxPool2(),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=MaxPool2(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * left * left, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, classes),
    )


class CNNCIFAR10(nn.Sequential):
    """PyTorch's tutorial network for 3x32x32 images, which Flower's examples train: 62,006 parameters for 10 classes.

    LeNet with three channels in: convolutions to 6 and 16 channels (5x5), each with ReLU and max pooling by 2, and
    fully connected layers of 120, 84 and the classes with ReLU between them.

    Args:
        classes: outputs.

    Raises:
        RangeError: ``classes`` is below 1.
    """

    def __init__(self, classes: int = 10) -> None:
        whole("classes", classes, 1)
        super().__init__(lenet_layers(channels=3, side=32, classes=classes))


class CNNEMNIST(nn.Sequential):
    """The Flexible paper's network for 1x28x28 images: 1,690,046 parameters for 62 classes, 1,682,351 for 47.

    Convolutions to 32 and 64 channels, each with ReLU and max pooling by 2, a fully connected layer of 512 with ReLU,
    and the outputs. The paper does not give the kernels; 5x5 that keep the image's size are chosen here, as in McMahan
    et al., 2017, whose network for MNIST has the same layers.

    Args:
        classes: outputs: 62 for the split "byclass", 47 for "bymerge" and "balanced".

    Raises:
        RangeError: ``classes`` is below 1.
    """

    def __init__(self, classes: int = 62) -> None:
        whole("classes", classes, 1)
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 32, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=MaxPool2(),
                conv2=nn.Conv2d(32, 64, 5, padding=2),
                relu2=nn.ReLU(),
                pool2=MaxPool2(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * 7 * 7, 512),
                relu3=nn.ReLU(),
                fc2=nn.Linear(512, classes),
            )
        )


class MLP(nn.Sequential):
    """Hidden layers with ReLU over the flattened input; by default for the 8x8 digits: 4,810 parameters.

    Args:
        inputs: numbers per example.
        hidden: units of the hidden layers, from the input on; none makes a logistic regression.
        classes: outputs.

    Raises:
        RangeError: a size is below 1.
    """

    def __init__(self, inputs: int = 64, hidden: Sequence[int] = (64,), classes: int = 10) -> None:
        named = [("inputs", inputs), *(("hidden", units) for units in hidden), ("classes", classes)]
        sizes = [whole(name, size, 1) for name, size in named]
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for number in range(1, len(sizes)):
            layers[f"fc{number}"] = nn.Linear(sizes[number - 1], sizes[number])
            layers[f"relu{number}"] = nn.ReLU()
        layers.popitem()  # no ReLU after the scores
        super().__init__(layers)


def logistic(inputs: int = 60, classes: int = 10) -> MLP:
    """Multinomial logistic regression, by default the Flexible paper's for SYNTHETIC: 610 parameters."""
    return MLP(inputs, (), classes)


def mlp_mnist(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Flexible paper's 784-200-200-10 for MNIST: 199,210 parameters."""
    return MLP(784, hidden, 10)


def relu_mnist(hidden: Sequence[int] = (200,)) -> MLP:
    """The Momentum paper's two-layer ReLU network for MNIST: 159,010 parameters.

    The width is chosen here, as in the other papers' perceptrons; the paper does not give it.
    """
    return MLP(784, hidden, 10)


def mlp_cifar10(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Momentum paper's three-layer perceptron for CIFAR-10: 656,810 parameters.

    The widths are chosen here, as in the Flexible paper's for MNIST; the paper does not give them.
    """
    return MLP(3072, hidden, 10)


class Block(nn.Module):
    """x + two 3x3 convolutions of x, each with batch normalisation; ReLU between them and at the end.

    Where the shape changes, x goes through a 1x1 convolution with batch normalisation first.
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
        """float32[b, before, s, s] to float32[b, after, s / stride, s / stride]."""
        straight = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(straight + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 in its form for 3x32x32 images: 11,173,962 parameters and 9,600 BatchNorm statistics for 10 classes.

    A 3x3 convolution of 64 channels in the place of the 7x7 one and its pooling; then two blocks each of 64, 128, 256
    and 512 channels, which halve the image from the second pair on; the mean over the image; and one fully connected
    layer. The Momentum paper only names "ResNet-18". The statistics are float buffers: a server averages them and never
    corrects them; ``num_batches_tracked`` is a counter.

    Args:
        classes: outputs.

    Raises:
        RangeError: ``classes`` is below 1.

    Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016.
    """

    CHANNELS = (64, 64, 128, 256, 512)

    def __init__(self, classes: int = 10) -> None:
        whole("classes", classes, 1)
        super().__init__()
        self.conv = nn.Conv2d(3, self.CHANNELS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(self.CHANNELS[0])
        blocks: list[nn.Module] = []
        for before, after in pairwise(self.CHANNELS):
            blocks += [Block(before, after, 1 if before == after else 2), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(self.CHANNELS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """float32[b, 3, 32, 32] to scores float32[b, classes]."""
        features: Tensor = self.blocks(relu(self.bn(self.conv(images))))
        scores: Tensor = self.fc(features.mean(dim=(2, 3)))
        return scores


class VGG11(nn.Module):
    """VGG-11 without batch normalisation for 3x32x32 images and 10 classes: 9,750,922 parameters.

    Eight 3x3 convolutions of 64, 128, 256, 256, 512, 512, 512 and 512 channels with ReLU, max pooling by 2 after the
    first, second, fourth, sixth and eighth, and fully connected layers of 512, 512 and 10 with ReLU between them. The
    MimiC paper only names "VGG-11". Its authors' public code has no batch normalisation; the classifier, its dropout
    and the initial weights are those of the code on which theirs is based (NIID-Bench).

    Weights of convolutions are drawn from N(0, 2 / (9 channels out)), their biases are 0. PyTorch's usual weights are
    smaller, and the gradient vanishes in eight layers without normalisation.

    Args:
        dropout: the probability that a unit before the first and second fully connected layer is dropped in a step.

    Raises:
        RangeError: ``dropout`` is not in [0, 1).
    """

    CHANNELS = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    POOLED = (1, 2, 4, 6, 8)
    """The convolutions with a pooling after them."""

    def __init__(self, dropout: float = 0.5) -> None:
        real("dropout", dropout, "[0, 1)")
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
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """float32[b, 3, 32, 32] to scores float32[b, 10]."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


REGISTRY: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "lenet": LeNet,
        "vgg11": VGG11,
        "logistic": logistic,
        "mlp": MLP,
        "mlp-mnist": mlp_mnist,
        "cnn-emnist": CNNEMNIST,
        "cnn-cifar10": CNNCIFAR10,
        "mlp-cifar10": mlp_cifar10,
        "relu-mnist": relu_mnist,
        "resnet18": ResNet18,
    },
    due="a class or function that makes a torch.nn.Module",
    fits=callable,
    group="fedcore.models",
)


def build(name: str, *, seed: int, **options: Any) -> nn.Module:
    """Make a new model of that name with its usual initial weights.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of your own.
        seed: the run's seed, any int >= 0.
        options: the model's arguments.

    Raises:
        UnknownNameError: there is no such model.
        RangeError: an option is outside its range.

    Determinism: the weights depend only on the arguments, and torch's global random state does not change.

    >>> sum(p.numel() for p in build("lenet", seed=0).parameters())
    44426
    """
    make = REGISTRY.find(name)
    with seeded(seed, "local: initial weights"):
        module = make(**options)
    if not isinstance(module, nn.Module):
        raise RangeError(f"model: expected a torch.nn.Module from {name!r}, got {module!r:.200}")
    return module


def scores(name: str, shape: tuple[int, ...], **options: Any) -> int:
    """Return the number of scores of the model of that name for an example, by a trial with one example.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of your own.
        shape: the example's.
        options: the model's arguments.

    Raises:
        ShapeError: the model takes examples of another shape.
        UnknownNameError, RangeError: as in ``build``.

    Cost: the time to make the model: milliseconds, tenths of a second with ten million parameters.

    >>> scores("mlp", (1, 8, 8))
    10
    """
    module = build(name, seed=0, **options).eval()
    with torch.inference_mode():
        try:
            count: int = module(torch.zeros(1, *shape)).shape[1]
        except RuntimeError as error:
            due = f"expected a model of examples float32{[*shape]}"
            raise ShapeError(f"{name!r}: {due}, found that it takes others ({str(error).rstrip('.')})") from None
    return count

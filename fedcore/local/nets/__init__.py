"""The models of the papers and of the quick examples, by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedcore.errors import ShapeError, UnknownNameError
from fedcore.local.nets.cnn_emnist import CNNEMNIST
from fedcore.local.nets.lenet import LeNet
from fedcore.local.nets.mlp import MLP, logistic, mlp_cifar10, mlp_mnist, relu_mnist
from fedcore.local.nets.resnet import ResNet18
from fedcore.local.nets.vgg import VGG11
from fedcore.local.seeded import seeded

__all__ = [
    "CNNEMNIST",
    "MLP",
    "REGISTRY",
    "VGG11",
    "LeNet",
    "ResNet18",
    "build",
    "logistic",
    "mlp_cifar10",
    "mlp_mnist",
    "relu_mnist",
    "scores",
]

REGISTRY: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "vgg11": VGG11,
    "logistic": logistic,
    "mlp": MLP,
    "mlp-mnist": mlp_mnist,
    "cnn-emnist": CNNEMNIST,
    "mlp-cifar10": mlp_cifar10,
    "relu-mnist": relu_mnist,
    "resnet18": ResNet18,
}


def build(name: str, *, seed: int, **options: Any) -> nn.Module:
    """A new model of that name with its usual initial weights.

    Args:
        name: a key of ``REGISTRY``.
        seed: the run's seed, any int >= 0.
        options: the model's own arguments.

    Raises:
        UnknownNameError: there is no such model.
        RangeError: an option is outside its range.

    Determinism: the weights depend on the arguments alone, and torch's global random state is left as it was.

    >>> sum(p.numel() for p in build("lenet", seed=0).parameters())
    44426
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("model", name, REGISTRY)
    with seeded(seed, "local: initial weights"):
        return REGISTRY[name](**options)


def scores(name: str, shape: tuple[int, ...], **options: Any) -> int:
    """How many scores the model of that name gives for an example, found out by trying one.

    Args:
        name: a key of ``REGISTRY``.
        shape: the example's.
        options: the model's own arguments.

    Raises:
        ShapeError: the model does not take such examples.
        UnknownNameError, RangeError: as in ``build``.

    Cost: a model's making: milliseconds, tenths of a second with ten million parameters.

    >>> scores("mlp", (1, 8, 8))
    10
    """
    module = build(name, seed=0, **options).eval()
    with torch.inference_mode():
        try:
            count: int = module(torch.zeros(1, *shape)).shape[1]
        except RuntimeError as error:
            raise ShapeError(f"{name!r} does not take float32{[*shape]} ({str(error).rstrip('.')})") from None
    return count

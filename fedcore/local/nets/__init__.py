"""The models of the papers and of the quick examples, by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedcore.errors import RangeError, ShapeError
from fedcore.local.nets.cnn_cifar10 import CNNCIFAR10
from fedcore.local.nets.cnn_emnist import CNNEMNIST
from fedcore.local.nets.lenet import LeNet
from fedcore.local.nets.mlp import MLP, logistic, mlp_cifar10, mlp_mnist, relu_mnist
from fedcore.local.nets.resnet import ResNet18
from fedcore.local.nets.vgg import VGG11
from fedcore.local.seeded import seeded
from fedcore.registries import Registry

__all__ = [
    "CNNCIFAR10",
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

_ROWS: dict[str, Callable[..., nn.Module]] = {
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
}
REGISTRY: Registry[Callable[..., nn.Module]] = Registry(
    "model", _ROWS, due="a class or function that makes a torch.nn.Module", fits=callable, group="fedcore.models"
)


def build(name: str, *, seed: int, **options: Any) -> nn.Module:
    """A new model of that name with its usual initial weights.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own.
        seed: the run's seed, any int >= 0.
        options: the model's own arguments.

    Raises:
        UnknownNameError: there is no such model.
        RangeError: an option is outside its range.

    Determinism: the weights depend on the arguments alone, and torch's global random state is left as it was.

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
    """The number of scores that the model of that name gives for an example, found out by trying one.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own.
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
            due = f"expected a model of examples float32{[*shape]}"
            raise ShapeError(f"{name!r}: {due}, found that it takes others ({str(error).rstrip('.')})") from None
    return count

"""The models of the papers and of the quick examples, by name."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from fedcore.errors import UnknownNameError
from fedcore.randomness import generator


class LeNet(nn.Sequential):
    """The MimiC paper's network for 1x28x28 images and 10 classes: 44,426 parameters.

    Convolution to 6 channels (5x5), ReLU, max pooling by 2, convolution to 16 channels (5x5), ReLU, max
    pooling by 2, and fully connected layers of 120, 84 and 10 with ReLU between them. The paper does not give
    the fully connected layers; they are those of its authors' public code.
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 6, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(256, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, 10),
            )
        )


class MLP(nn.Sequential):
    """One hidden layer with ReLU over the flattened input; by default for the 8x8 digits: 4,810 parameters.

    Args:
        inputs: numbers per example.
        hidden: units of the hidden layer.
        classes: outputs.
    """

    def __init__(self, inputs: int = 64, hidden: int = 64, classes: int = 10) -> None:
        super().__init__(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(inputs, hidden),
                relu=nn.ReLU(),
                fc2=nn.Linear(hidden, classes),
            )
        )


REGISTRY: dict[str, Callable[[], nn.Module]] = {"lenet": LeNet, "mlp": MLP}


def build(name: str, *, seed: int) -> nn.Module:
    """A new model of that name with PyTorch's usual initial weights.

    Args:
        name: a key of ``REGISTRY``.
        seed: the run's seed, any int >= 0.

    Raises:
        UnknownNameError: there is no such model.

    Determinism: the weights depend on the arguments alone, and torch's global random state is left as it was.

    >>> sum(p.numel() for p in build("lenet", seed=0).parameters())
    44426
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("model", name, REGISTRY)
    weights_seed = int(generator(seed, "local: initial weights").integers(2**63))
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, whose state is not forked here.
        torch.default_generator.manual_seed(weights_seed)
        return REGISTRY[name]()

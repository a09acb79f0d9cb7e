"""Fully connected networks: logistic regression, and the multi-layer perceptrons of the papers."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedcore.arguments import whole


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
        layers.popitem()  # the scores are as they come
        super().__init__(layers)


def logistic(inputs: int = 60, classes: int = 10) -> MLP:
    """Multinomial logistic regression, by default the Flexible paper's for SYNTHETIC: 610 parameters."""
    return MLP(inputs, (), classes)


def mlp_mnist(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Flexible paper's 784-200-200-10 for MNIST: 199,210 parameters."""
    return MLP(784, hidden, 10)


def relu_mnist(hidden: Sequence[int] = (200,)) -> MLP:
    """The Momentum paper's two-layer ReLU network for MNIST: 159,010 parameters.

    The paper does not give its width; 200 is chosen here, as in the other papers' perceptrons.
    """
    return MLP(784, hidden, 10)


def mlp_cifar10(hidden: Sequence[int] = (200, 200)) -> MLP:
    """The Momentum paper's three-layer perceptron for CIFAR-10: 656,810 parameters.

    The paper does not give its widths; 200 and 200 are chosen here, as in the Flexible paper's for MNIST.
    """
    return MLP(3072, hidden, 10)

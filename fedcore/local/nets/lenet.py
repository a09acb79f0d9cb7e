"""The MimiC paper's network for Fashion-MNIST."""

from collections import OrderedDict

from torch import nn

from fedcore.local.nets.max_pool import MaxPool2


class LeNet(nn.Sequential):
    """The MimiC paper's network for 1x28x28 images and 10 classes: 44,426 parameters.

    Convolution to 6 channels (5x5), ReLU, max pooling by 2, convolution to 16 channels (5x5), ReLU, max
    pooling by 2, and fully connected layers of 120, 84 and 10 with ReLU between them. The paper does not give
    the fully connected layers; they are those of its authors' public code.
    """

    def __init__(self) -> None:
        super().__init__(lenet_layers(channels=1, side=28, classes=10))


def lenet_layers(*, channels: int, side: int, classes: int) -> OrderedDict[str, nn.Module]:
    """LeNet's layers by name, for images of so many channels, ``side`` pixels wide and high."""
    left = ((side - 4) // 2 - 4) // 2  # pixels, behind two convolutions with their pooling
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

"""The convolutional network that frameworks' examples have for CIFAR-10."""

from torch import nn

from fedcore.arguments import whole
from fedcore.local.nets.lenet import lenet_layers


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

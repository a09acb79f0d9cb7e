"""The convolutional network that frameworks' examples have for CIFAR-10."""

from collections import OrderedDict

from torch import nn

from fedcore.arguments import whole


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
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(3, 6, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * 5 * 5, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, classes),
            )
        )

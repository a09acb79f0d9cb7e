"""The MimiC paper's network for Fashion-MNIST."""

from collections import OrderedDict

from torch import nn


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

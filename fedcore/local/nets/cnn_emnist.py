"""The Flexible paper's network for EMNIST."""

from collections import OrderedDict

from torch import nn

from fedcore.arguments import whole
from fedcore.local.nets.max_pool import MaxPool2


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

"""The MimiC paper's network for CIFAR-10."""

import math
from itertools import pairwise

from torch import Tensor, nn

from fedcore.arguments import real
from fedcore.local.nets.max_pool import MaxPool2


class VGG11(nn.Module):
    """VGG-11 without batch normalisation for 3x32x32 images and 10 classes: 9,750,922 parameters.

    Eight 3x3 convolutions of 64, 128, 256, 256, 512, 512, 512 and 512 channels with ReLU, max pooling by 2 after the
    first, second, fourth, sixth and eighth, and fully connected layers of 512, 512 and 10 with ReLU between them. The
    MimiC paper says "VGG-11" and no more. That there is no batch normalisation comes from its authors' public code;
    the classifier, its dropout and the initial weights from the code that this one builds on (NIID-Bench).

    Weights of convolutions are drawn from N(0, 2 / (9 channels out)), their biases are 0. With PyTorch's usual ones,
    which are smaller, eight layers without normalisation hardly let a gradient through.

    Args:
        dropout: chance that a unit before the first and second fully connected layer is left out in a step.

    Raises:
        RangeError: ``dropout`` is not in [0, 1).
    """

    CHANNELS = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    POOLED = (1, 2, 4, 6, 8)
    """The convolutions with a pooling behind them."""

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

"""The Momentum paper's network for CIFAR-10."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from fedcore.arguments import whole


class Block(nn.Module):
    """x + two 3x3 convolutions of x, each with batch normalisation; ReLU between them and at the end.

    Where the shape changes, x goes through a 1x1 convolution with batch normalisation first.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """float32[b, before, s, s] to float32[b, after, s / stride, s / stride]."""
        straight = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(straight + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 in its form for 3x32x32 images: 11,173,962 parameters and 9,600 BatchNorm statistics for 10 classes.

    A 3x3 convolution of 64 channels in the place of the 7x7 one and its pooling; then two blocks each of 64, 128, 256
    and 512 channels, which halve the image from the second pair on; the mean over the image; and one fully connected
    layer. The Momentum paper says "ResNet-18" and no more. The statistics are float buffers: a server averages them
    and never corrects them; ``num_batches_tracked`` is a counter.

    Args:
        classes: outputs.

    Raises:
        RangeError: ``classes`` is below 1.

    Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016.
    """

    CHANNELS = (64, 64, 128, 256, 512)

    def __init__(self, classes: int = 10) -> None:
        whole("classes", classes, 1)
        super().__init__()
        self.conv = nn.Conv2d(3, self.CHANNELS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(self.CHANNELS[0])
        blocks: list[nn.Module] = []
        for before, after in pairwise(self.CHANNELS):
            blocks += [Block(before, after, 1 if before == after else 2), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(self.CHANNELS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """float32[b, 3, 32, 32] to scores float32[b, classes]."""
        features: Tensor = self.blocks(relu(self.bn(self.conv(images))))
        scores: Tensor = self.fc(features.mean(dim=(2, 3)))
        return scores

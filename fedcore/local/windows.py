"""The windows of an image that a convolution and the pooling behind it look at, as tables of indices."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedcore.local_rules import Indices

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Windows of an image of which a matrix product makes a convolution, together with the max pooling behind it.

    All the outputs that are pooled into one come from one window: with kernels of 5 x 5 and pooling of 2 x 2, that
    window is 6 x 6, and the kernel lies in it in 4 places. So the products with the kernel in each of its places, and
    the largest of them, are what convolution and pooling give; and of each pixel 36/4 copies are made instead of 25.
    Without pooling the kernel has one place, and the window is its own size.

    Attributes:
        table: int64[taps, positions]; of the window that makes each position of the result, its pixels, as indices into
            the image float32[channels, height, width]; ``pixels``, one past the end, stands for the padding's zero.
        places: int64[q, weights]; where in the window each weight of one output's kernel lies, for each of its q places
            in the order of the pooling: of the largest the first counts.
        pixels: of the image, in all channels.
        height, width: those of the result.
    """

    table: Indices
    places: Indices
    pixels: int
    height: int
    width: int

    @classmethod
    def of(
        cls,
        image: tuple[int, int, int],
        kernel: Pair,
        *,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
        pool: Pair = (1, 1),
        pool_stride: Pair = (1, 1),
    ) -> "Windows | None":
        """The windows of a convolution, and of max pooling without padding behind it; None if the result is empty.

        Args:
            image: channels, height and width.
            kernel, stride, padding, dilation: those of ``torch.nn.Conv2d``.
            pool, pool_stride: kernel and stride of ``torch.nn.MaxPool2d``.
        """
        channels, *sizes = image
        pixels = math.prod(image)
        (y_places, ys), (x_places, xs) = (
            _axis(*numbers) for numbers in zip(sizes, kernel, stride, padding, dilation, pool, pool_stride, strict=True)
        )
        if not ys.size or not xs.size:
            return None
        c = np.arange(channels)
        inside = (ys >= 0)[:, None, :, None] & (xs >= 0)[None, :, None, :]  # [window y, window x, y, x]
        one = np.where(inside, ys[:, None, :, None] * sizes[1] + xs[None, :, None, :], pixels)
        table = np.where(inside, one + c[:, None, None, None, None] * sizes[0] * sizes[1], pixels)
        shape = len(ys), len(xs)
        places = (c[:, None, None] * shape[0] + y_places[:, None, None, :, None]) * shape[1]
        places = places + x_places[None, :, None, None, :]  # [pool y, pool x, channel, kernel y, kernel x]
        return cls(
            table.reshape(channels * shape[0] * shape[1], -1),
            places.reshape(pool[0] * pool[1], -1),
            pixels,
            ys.shape[1],
            xs.shape[1],
        )

    @cached_property
    def covering(self) -> tuple[Indices, Indices]:
        """For each pixel the places of the table that hold it, one pixel's behind another's, and where each begins."""
        flat = self.table.ravel()
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=self.pixels + 1)[: self.pixels]
        return order[: counts.sum()], np.concatenate([[0], np.cumsum(counts)[:-1]])


def _axis(
    size: int, kernel: int, stride: int, padding: int, dilation: int, pool: int, pool_stride: int
) -> tuple[Indices, Indices]:
    """Along one axis, where in the window each tap of the kernel lies, int64[pool, kernel], and the pixels of each
    window, int64[window, positions], with -1 for the padding."""
    offsets = np.add.outer(stride * np.arange(pool), dilation * np.arange(kernel))
    reach, places = np.unique(offsets, return_inverse=True)
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    positions = max(0, (outputs - pool) // pool_stride + 1)
    pixels = np.add.outer(reach, stride * pool_stride * np.arange(positions)) - padding
    return places.reshape(offsets.shape), np.where((pixels >= 0) & (pixels < size), pixels, -1)

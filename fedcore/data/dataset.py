"""A labelled data set in memory, as every loader returns it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.representation import Represented

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Represented):
    """Training and test examples with their labels.

    Attributes:
        name: what ``load`` knows it by.
        train_x: float32[m, ...], pixels in [0, 1] as [m, channels, height, width].
        train_y: int64[m], in 0 .. classes-1.
        test_x: float32[m', ...], of the same example shape.
        test_y: int64[m'].
        classes: the number of classes.
        parts: which training examples each client holds, int64[m_i] each, where the data itself says so; no example
            is held twice. None where it does not.
        test_parts: likewise, which test examples are each client's own.

    Raises:
        DtypeError, ShapeError, RangeError: an array is not as above.
    """

    name: str
    train_x: Inputs
    train_y: Labels
    test_x: Inputs
    test_y: Labels
    classes: int
    parts: tuple[Indices, ...] | None = None
    test_parts: tuple[Indices, ...] | None = None

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.dtype != np.float32:
                raise DtypeError(f"{part}_x: expected float32[m, ...], got {x.dtype}")
            if y.dtype != np.int64:
                raise DtypeError(f"{part}_y: expected int64[m], got {y.dtype}")
            if x.ndim < 2 or x.shape[1:] != self.train_x.shape[1:]:
                raise ShapeError(f"{part}_x: expected float32[m, ...] of one example shape, got {x.shape}")
            if y.shape != x.shape[:1]:
                raise ShapeError(f"{part}_y: expected int64[{len(x)}], got shape {y.shape}")
            if y.size and not 0 <= y.min() <= y.max() < self.classes:
                raise RangeError(f"{part}_y: expected 0 .. {self.classes - 1}, got {y.min()} .. {y.max()}")
        for name, parts, y in (("parts", self.parts, self.train_y), ("test_parts", self.test_parts, self.test_y)):
            if parts is not None:
                _check_parts(name, parts, len(y))


def _check_parts(name: str, parts: tuple[Indices, ...], examples: int) -> None:
    for client, held in enumerate(parts):
        if held.dtype != np.int64 or held.ndim != 1:
            raise DtypeError(f"{name}[{client}]: expected int64[m_i], got {held.dtype}{list(held.shape)}")
    every = np.concatenate([np.empty(0, np.int64), *parts])
    if every.size and not 0 <= every.min() <= every.max() < examples:
        raise RangeError(f"{name}: expected 0 .. {examples - 1}, got {every.min()} .. {every.max()}")
    if len(np.unique(every)) < len(every):
        raise RangeError(f"{name}: expected each example once at most, got one twice")

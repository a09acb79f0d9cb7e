"""The check of labels with which every partition begins."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import DtypeError, RangeError, ShapeError

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer[Any]]


def check_labels(labels: Labels) -> Labels:
    """``labels`` as an array, once it is int[m] with m >= 1."""
    labels = np.asarray(labels)
    if not np.issubdtype(labels.dtype, np.integer):
        raise DtypeError(f"labels: expected int[m], got {labels.dtype}")
    if labels.ndim != 1:
        raise ShapeError(f"labels: expected int[m], got shape {labels.shape}")
    if not len(labels):
        raise RangeError("labels: expected at least one example, got none")
    return labels


def by_class(labels: Labels, random: np.random.Generator) -> dict[int, Indices]:
    """Each class, in ascending order, and the indices of its examples in random order."""
    return {int(label): random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)}

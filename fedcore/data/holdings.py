"""The numbers of examples of each class that clients hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def holdings(
    labels: npt.NDArray[np.integer[Any]], parts: Sequence[npt.NDArray[np.int64]], classes: int
) -> npt.NDArray[np.int64]:
    """Count each client's examples of each class.

    Args:
        labels: int[m], in 0 .. classes-1, read-only.
        parts: N arrays of indices into ``labels``.
        classes: C.

    Returns:
        int64[N, C].

    >>> holdings(np.array([0, 1, 1]), [np.array([0, 1]), np.array([2])], 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts], np.int64)

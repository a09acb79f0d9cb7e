"""Memory that starts where a cache line does, for arrays that kernels read and write in every round."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line, and of the widest vector."""


def aligned(
    make: Callable[[int, npt.DTypeLike], npt.NDArray[Any]], n: int, dtype: type[np.generic] | np.dtype[Any]
) -> npt.NDArray[Any]:
    """make(n, dtype), such as ``np.empty``, that starts on a cache line.

    NumPy's large arrays start 16 bytes behind a page, so that every vector of 64 bytes lies in two lines. Where the
    sum and the rows are aligned, ``exchange`` takes 5 to 10 % less time (8 clients of 11 M, AVX-512); what a client
    sent need not be.

    >>> aligned(np.zeros, 3, np.float32)
    array([0., 0., 0.], dtype=float32)
    """
    size = np.dtype(dtype).itemsize
    memory = make(n + LINE // size, dtype)
    start = -memory.ctypes.data % LINE // size
    return memory[start : start + n]

"""Checksums: whether stored bytes are still what was written."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.native import core

BLOCK = 1 << 20  # bytes


def checksums(buffer: Any, block: int = BLOCK) -> npt.NDArray[np.uint64]:
    """A 64-bit checksum of each block of ``buffer``; ``csrc/store/checksum.h`` has the formula.

    It tells bytes that changed by accident (a torn write, a flipped bit), not those that somebody changed on purpose.

    Args:
        buffer: whatever exports contiguous bytes: bytes, a memoryview, an mmap, an array of any shape and dtype.
            Read-only, and not to be changed meanwhile.
        block: bytes of a block, >= 1; the last block may be shorter.

    Returns:
        uint64[ceil(bytes / block)].

    Raises:
        RangeError: ``block`` is not an int in 1 .. 2^63 - 1.
        ArrayError: ``buffer`` exports no contiguous bytes.

    Determinism: the bytes and ``block`` alone, on every platform (bytes, not numbers: an array of another byte order
        is another buffer). A change within 8 bytes that are aligned in their block, one flipped bit for one, always
        changes the block's checksum, any other with a probability of about 1 - 2^-64.
    Cost: reads the buffer once, blocks on all threads, without the GIL: near the speed of a plain sum.

    >>> checksums(b"fedcore"), checksums(b"fedcorf")
    (array([9472247094406915468], dtype=uint64), array([15834520062922671200], dtype=uint64))
    """
    sums: npt.NDArray[np.uint64] = core.checksum(buffer, whole("block", block, 1, 2**63 - 1))
    return sums

"""The specification of the checksum, in NumPy: the store's, and of the rows that ``exchange`` writes.

Same name, arguments and result as in ``fedcore._core``, without its checks.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

P, Q = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
LANES = 8


def _step(s: U64, w: U64) -> U64:
    t = s + w * Q
    return (t << np.uint64(31) | t >> np.uint64(33)) * P


def checksum(buffer: Any, block_bytes: int) -> U64:
    """The checksum of each block: eight lanes a block, folded one after another, and the block's length last."""
    data = np.frombuffer(buffer, np.uint8)
    starts = np.arange(0, len(data), block_bytes)
    lengths = np.minimum(block_bytes, len(data) - starts)
    words = np.zeros((len(starts), -(-int(lengths.max(initial=0)) // (8 * LANES)), LANES), "<u8")
    for row, start, length in zip(words, starts.tolist(), lengths.tolist(), strict=True):
        row.reshape(-1).view(np.uint8)[:length] = data[start : start + length]
    lanes = np.tile(np.arange(1, LANES + 1, dtype=np.uint64) * P, (len(starts), 1))
    chunks = -(-lengths // (8 * LANES))
    for j in range(words.shape[1]):
        fed = chunks > j  # the last block may end before the others
        lanes[fed] = _step(lanes[fed], words[fed, j])
    sums = np.zeros(len(starts), np.uint64)
    for lane in lanes.T:
        sums = _step(sums, lane)
    return _step(sums, lengths.astype(np.uint64))

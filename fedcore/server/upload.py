"""The way of what clients send from host memory to the server's device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore import devices
from fedcore.aggregation import Replies
from fedcore.memory import Recycled
from fedcore.native import core
from fedcore.server.update import in_float32


class Upload:
    """Copies vectors that lie in host memory to a device, in memory that is used again; what is there stays as it is.

    Args:
        device: the device.
        lengths: of the vectors that come.
        most: how many of each length are copied at a time.

    Cost: 4 n bytes on the device for each of them.
    """

    def __init__(self, device: str, lengths: set[int], most: int) -> None:
        self._device, self.most = device, most
        self._copies = core.CopyStream(devices.ordinal(device), min(64 << 20, 8 * max(lengths)))
        self._memory = {length: Recycled(length, most=most, device=device) for length in lengths}

    def portions(self, replies: Replies) -> list[Replies]:
        """The replies, as many at a time as may be copied; all at once where their vectors are on the device."""
        k = len(replies)
        if k <= self.most or all(map(self._is_there, [*replies.vectors, *replies.controls])):
            return [replies]
        place = np.arange(k) // self.most
        return [replies.chosen(place == portion) for portion in range(place[-1] + 1)]

    def bring(self, replies: Replies) -> None:
        """Put copies on the device in the place of the replies' vectors that lie in host memory."""
        replies.vectors, replies.controls = self.vectors(replies.vectors), self.vectors(replies.controls)

    def vectors(self, ys: Sequence[Any]) -> list[Any]:
        """The vectors, float32 on the device where they lay in host memory; None stays None.

        Args:
            ys: each one vector, or a list of tensors.
        """
        there = [y if self._is_there(y) else self._copied(y) for y in ys]
        self._copies.join()
        return there

    def _is_there(self, y: Any) -> bool:
        if isinstance(y, list):
            return all(devices.of(tensor) == self._device for tensor in y)
        return y is None or devices.of(y) == self._device

    def _copied(self, y: Any) -> Any:
        if not isinstance(y, list):
            return self._parts([y])[0]
        here = iter(self._parts([part for part in y if not self._is_there(part)]))
        return [part if self._is_there(part) else next(here) for part in y]  # apart as they were: norms are of parts

    def _parts(self, parts: Sequence[Any]) -> list[Any]:
        """Copies on the device of some parts of a vector, one behind the other."""
        lengths = [int(np.prod(part.shape)) for part in parts]
        due = sum(lengths)
        memory: Any = self._memory[next(length for length in sorted(self._memory) if length >= due)].take()
        copies, start = [], 0
        for part, length in zip(parts, lengths, strict=True):
            copies.append(memory[start : start + length])
            with np.errstate(over="ignore"):  # to an infinity, for which the reply is refused
                self._copies.upload(in_float32(part).reshape(-1), copies[-1])
            start += length
        return copies

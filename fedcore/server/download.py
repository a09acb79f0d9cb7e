"""The way of a server's vectors from its device to a store's files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import devices
from fedcore.memory import empty
from fedcore.native import core

Vector = npt.NDArray[Any]


class Download:
    """Copies vectors from a device into memory that is used again, all of them behind one wait.

    Args:
        device: the device.
        largest: bytes of the longest vector.

    Cost: as much host memory as the vectors of one commit take, and two pinned buffers.
    """

    def __init__(self, device: str, largest: int) -> None:
        self._copies = core.CopyStream(devices.ordinal(device), min(64 << 20, largest))
        self._memory: dict[tuple[int, str], list[Vector]] = {}

    def brought(self, vectors: Mapping[str, Any]) -> dict[str, Vector]:
        """The vectors by name in host memory: themselves, or copies that last until the next call."""
        found: dict[str, Vector] = {}
        used: dict[tuple[int, str], int] = {}
        for name, vector in vectors.items():
            if isinstance(vector, np.ndarray):
                found[name] = vector
                continue
            kind = vector.size, vector.dtype.name
            memory, place = self._memory.setdefault(kind, []), used.get(kind, 0)
            if place == len(memory):
                memory.append(empty(vector.size, vector.dtype))
            found[name], used[kind] = memory[place], place + 1
            self._copies.download(vector, found[name])
        self._copies.wait()
        for kind, memory in self._memory.items():
            del memory[used.get(kind, 0) :]
        return found

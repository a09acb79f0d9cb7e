"""A store's memory, which a device reads and writes by itself while it is pinned."""

from fedcore.errors import DeviceError
from fedcore.native import core
from fedcore.store.slots import Slots

LEAST = 1 << 20
"""Bytes of a slot from which on it is worth it; shorter ones are soon copied through a buffer."""


class Pinning:
    """Pins the chunks in which some slots lie, each when one of its slots is first asked for.

    Args:
        slots: in host memory.
        device: the ordinal of the device.

    Cost: a chunk, of 64 MiB or one slot, cannot be swapped, and takes memory whether it is written to or not.
    """

    def __init__(self, slots: Slots, device: int) -> None:
        self._slots, self._device = slots, device
        self._is_possible = slots.payload >= LEAST
        self._chunks: dict[int, core.PinnedArray] = {}

    def holds(self, slot: int) -> bool:
        """Tell whether a slot is pinned from now on: not where the system lets nobody pin so much."""
        if not self._is_possible:
            return False
        number, memory = self._slots.chunk(slot)
        if number not in self._chunks:
            try:
                self._chunks[number] = core.PinnedArray(memory, self._device)
            except DeviceError:
                self._is_possible = False
                return False
        return True

    def end(self) -> None:
        """Let all chunks be as they were; no copy is under way."""
        self._chunks.clear()

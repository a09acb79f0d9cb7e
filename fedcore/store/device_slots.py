"""Slots in a device's memory: of the rows of ``ClientStore(medium="cuda")``, and the hot ones of other stores."""

from typing import Any

import numpy as np

from fedcore.memory import copy_into, empty
from fedcore.store.slots import Slots

CHUNK = 16 << 20
"""Bytes that memory is asked for at a time: on a device it is taken whether it is written to or not."""


class DeviceSlots(Slots):
    """Slots of one size on a device. They have no checksums: nothing of them outlives the process.

    Args:
        payload: bytes of a slot that its user sees.
        device: where they lie.
    """

    def __init__(self, payload: int, device: str) -> None:
        super().__init__(payload)
        self.where, self._device = device, device
        self._per_chunk = max(1, min(self._per_chunk, CHUNK // self.stride))

    def take(self) -> int:
        """A slot of undefined content that nobody else has.

        Raises:
            DeviceMemoryError: the device has no memory for one more; none is taken.
        """
        slot = super().take()
        try:
            self.memory(slot)
        except BaseException:
            self.give([slot])
            raise
        return slot

    def copy(self, slot: int) -> int:
        """A new slot with the same payload."""
        copy = self.take()
        copy_into(self.memory(copy), self.memory(slot))
        return copy

    def _open_chunk(self, number: int) -> Any:
        return empty(self._per_chunk * self.stride, np.uint8, device=self._device)

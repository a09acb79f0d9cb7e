"""The format of a row in a slot's bytes."""

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedcore import devices
from fedcore.arguments import whole
from fedcore.errors import UnknownNameError
from fedcore.kernels import Codes, dequantise
from fedcore.kernels.quantise import BLOCK
from fedcore.memory import Recycled, copy_into, zeros
from fedcore.store.geometry import LINE, padded
from fedcore.store.slots import Memory

Codec = Literal["f32", "bf16", "int8"]
Row: TypeAlias = npt.NDArray[np.float32] | Codes

# As dtypes, not as classes that a call would first look one up for: on small rows that takes as long as the view.
_FLOAT = np.dtype(np.float32)
_CODES: dict[str, np.dtype[Any]] = {"f32": _FLOAT, "bf16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}


class RowFormat:
    """A row of n elements through a codec.

    Args:
        codec: "f32"; "bf16", two bytes an element; or "int8", one byte and a float32 scale for every 64 elements.
        n: elements of a row.
        device: where rows lie, and what they are decoded to.

    Attributes:
        payload: bytes of a row.

    Raises:
        UnknownNameError: there is no such codec.
        RangeError: n is less than 1.
    """

    def __init__(self, codec: Codec, n: int, device: str = devices.CPU) -> None:
        if codec not in get_args(Codec):
            raise UnknownNameError.of("codec", codec, get_args(Codec))
        self.codec, self.device = codec, device
        self.n = whole("n", n, 1)
        self._codes = self.n * _CODES[codec].itemsize
        self._scales_at = padded(self._codes, LINE)
        self._decoded = Recycled(self.n, device=device)
        self.payload = self._scales_at + 4 * -(-self.n // BLOCK) if codec == "int8" else self._codes

    def row(self, memory: Memory) -> Row:
        """The row that lies in a slot's payload, as float32[n] or as Codes; a view."""
        if self.codec == "f32":
            return memory.view(_FLOAT)
        codes = memory[: self._codes].view(_CODES[self.codec])
        scales = memory[self._scales_at :].view(_FLOAT) if self.codec == "int8" else None
        return Codes(self.codec, codes, scales)

    def decoded(self, row: Row | None) -> npt.NDArray[np.float32]:
        """A copy of what a row stands for, float32[n]; zeros for None."""
        if row is None:
            return zeros(self.n, device=self.device)
        vector = self._decoded.take()
        if isinstance(row, Codes):
            dequantise(row, vector)
        else:
            copy_into(vector, row)
        return vector

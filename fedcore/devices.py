"""Devices by name: which one somebody means, whether it is there, and on which an array lies."""

import re
from typing import Any

import numpy as np

from fedcore.errors import DeviceError, UnknownNameError
from fedcore.native import core

CPU = "cpu"
KNOWN = ("cpu", "cuda", "cuda:1")
"""Names as messages show them; any number may stand behind ``cuda:``."""

_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
_HOST = (1, 3)
"""DLPack's numbers of memory that the host reads: its own, and what it has pinned for CUDA."""
_CUDA = (2, 13)
"""Those of a CUDA device's own memory, and of memory that the driver moves there."""


def named(name: str) -> str:
    """The one name of a device: ``"cpu"``, or ``"cuda:0"``, for which ``"cuda"`` may stand too.

    Raises:
        UnknownNameError: there is no such kind of device.
        DeviceError: there is no such device here, or no driver; the message says what is missing.

    >>> named("cpu")
    'cpu'
    """
    if name == CPU:
        return CPU
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    number = ordinal(name)
    if (reason := core.cuda_reason()) is not None:
        raise DeviceError(f"device: expected a GPU for {name!r}, got none: {reason}")
    if number >= (count := len(core.cuda_devices())):
        raise DeviceError(f"device: expected one of the {count} that the driver knows, 'cuda:0' on, got {name!r}")
    return f"cuda:{number}"


def ordinal(name: str) -> int:
    """The number of a CUDA device by its name."""
    return int(name[5:] or 0)


def is_device_array(array: object) -> bool:
    """Tell whether an array is one of this package's own in a device's memory."""
    return isinstance(array, core.DeviceArray)


def of(array: Any) -> str:
    """The name of the device on which an array of anybody's lies; of one that is neither, its numbers in DLPack.

    >>> of(np.zeros(3))
    'cpu'
    """
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return CPU
    kind, number = array.__dlpack_device__()
    if kind in _HOST:
        return CPU
    return f"cuda:{number}" if kind in _CUDA else f"device {kind}:{number} of DLPack"

"""One number a client."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedcore.arguments import due_in, inside
from fedcore.errors import RangeError, ShapeError
from fedcore.float_mode import ieee


@ieee
def each(name: str, values: Sequence[float], clients: int, interval: str) -> npt.NDArray[np.float64]:
    """One number a client, as a read-only copy.

    Returns:
        float64[clients].

    Raises:
        ShapeError: there are not as many as clients.
        RangeError: one of them is no number in the interval.
    """
    shape = np.shape(values)
    if shape != (clients,):
        raise ShapeError(f"{name}: expected {clients} numbers, one a client, got shape {list(shape)}")
    for client, value in enumerate(values):
        if not inside(value, interval):
            raise RangeError(f"{name}[{client}]: expected {due_in(interval)}, got {value!r}")
    array = np.array(values, np.float64)
    array.flags.writeable = False
    return array

"""norms: how long rows are, and whether they are finite."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.float_mode import ieee
from fedcore.native import core


@ieee
def squared_norms(rows: Sequence[Any]) -> npt.NDArray[np.float64]:
    """The squared Euclidean norm of each row.

    Args:
        rows: k arrays float32[n] of one length, in CPU memory or on one CUDA device. Read-only.

    Returns:
        float64[k].

    Raises:
        ShapeError, DtypeError, ArrayError: a row is not what is said above.

    Determinism: float64 on 16 fixed lanes folded in a fixed tree: the same bits on every ISA level and thread count.
    Cost: reads 4 k n bytes.

    >>> squared_norms([np.float32([3, 4])])
    array([25.])
    """
    norms: npt.NDArray[np.float64] = core.squared_norms(rows)
    return norms


@ieee
def all_finite(rows: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Tell whether each row is free of NaN and infinities; arguments, errors and cost as for ``squared_norms``.

    A float32's square cannot overflow the float64 sum, so a row is finite exactly if its squared norm is.

    >>> all_finite([np.float32([3, np.inf])])
    array([False])
    """
    finite: npt.NDArray[np.bool_] = np.isfinite(squared_norms(rows))
    return finite

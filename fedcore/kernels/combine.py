"""combine: linear combinations of a few vectors, and how long they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore import memory
from fedcore.arguments import length, listed, numbers
from fedcore.errors import ShapeError
from fedcore.float_mode import ieee
from fedcore.native import core
from fedcore.typing import F64


@ieee
def combine(terms: Sequence[Any], coefficients: Sequence[float], out: Any = None) -> Any:
    """The linear combination sum_i coefficients[i] terms[i], in one pass.

    The constant part of a method's direction is one, once a client and round. With c = total / N the server's control
    variate, c_i the client's and g the momentum:

    ================  ===========================  ==============================
    method            terms                        coefficients
    ================  ===========================  ==============================
    SCAFFOLD          total, c_i                   1 / N, -1
    FedAvg-M          g                            1 - beta
    SCAFFOLD-M        total, c_i, g                beta / N, -beta, 1 - beta
    FedAvg-M-VR       g                            1 - beta  (b = -(1 - beta))
    SCAFFOLD-M-VR     total, c_i, g                beta / N, -beta, 1 - beta  (b likewise)
    ================  ===========================  ==============================

    Args:
        terms: k >= 1 arrays [n], each float32 or float64 (a running total need not be copied or divided first).
            Read-only.
        coefficients: k numbers.
        out: float32[n] or float64[n], written in place: ``terms[0]`` itself, or memory that no term overlaps; a new
            float32 array beside ``terms[0]`` if None: NumPy's, or a ``DeviceArray``.

    Returns:
        The combination, ``out`` if it was given.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: float64 from the first term to the last, rounded once: the same bits on every ISA level and thread
        count.
    Cost: reads every term once (4 n or 8 n bytes), writes 4 n or 8 n bytes.
    Reference: Cheng et al., Momentum Benefits Non-IID Federated Learning Simply and Provably, Algorithms 1-4.

    >>> combine([np.float64([6, 8]), np.float32([1, 1])], [1 / 2, -1])
    array([2., 3.], dtype=float32)
    >>> total = np.float64([6, 8])
    >>> combine([total, np.float32([1, 1])], [1, -1], total)
    array([5., 7.])
    """
    if out is None:
        terms = listed("terms", terms)
        if not terms:
            raise ShapeError("terms: expected at least one vector, got none")
        out = memory.empty_beside(terms[0], length("terms[0]", terms[0]))
    core.combine(terms, numbers("coefficients", coefficients, np.float64), out)
    return out


@ieee
def combined_square(terms: Sequence[Any], coefficients: Sequence[float], *, partials: F64 | None = None) -> float:
    """The squared norm |sum_i coefficients[i] terms[i]|^2 of a linear combination that nobody needs to have.

    Arguments and errors are those of ``combine``; ``partials`` is float64[ceil(n / 16,384), 1], written: the blocks'
    shares, as of ``accumulate``.

    Determinism: float64 throughout, squares on 16 fixed lanes folded in a fixed tree: the same bits on every ISA level
        and thread count.
    Cost: reads every term once, writes nothing.

    >>> combined_square([np.float64([6, 8]), np.float32([3, 4])], [1, -1])
    25.0
    """
    return core.combined_square(terms, numbers("coefficients", coefficients, np.float64), partials)

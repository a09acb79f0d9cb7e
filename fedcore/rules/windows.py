"""Windows of the numbers of accepted updates, and their medians."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from fedcore.arrays import F32, F64, core

WINDOW = 1000
"""The number of accepted updates in the window of a median."""
FAR = 10.0
"""Claims up to this multiple of the median are usual among honest clients; if they are capped, no log has them."""
FEW = 8
"""The least number of updates for a median; until then, medians include the updates to decide on."""
PARTS = {
    "parameters": "update: its norm",
    "buffers": "update: the norm of its float buffers",
    "controls": "control: its norm",
}


def as_float32(number: float) -> float:
    """Return a number rounded to float32, in which norms are compared; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def least_logged(ratio: float | None) -> float:
    """Return the multiple of a cap with this ratio from which a claim is logged."""
    return max(1.0, FAR / ratio) if ratio else 1.0


class NormWindow:
    """The norms > 0 of the last ``WINDOW`` accepted updates, the oldest first, and their median.

    Attributes:
        norms: the norms, in order.

    Cost: a few microseconds per norm, independent of the number of norms.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self.norms = deque(norms, WINDOW)
        self._sorted = sorted(self.norms)

    def __len__(self) -> int:
        return len(self.norms)

    def add(self, norm: float) -> None:
        """Add a norm; a full window drops its oldest norm."""
        if norm <= 0:
            return
        if len(self.norms) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self.norms[0])]
        self.norms.append(norm)
        insort(self._sorted, norm)

    def median(self, beside: Sequence[float] = ()) -> float | None:
        """Return the lower median of the stored and further norms; None if more than half of the first norms are zeros.

        With the upper median, the longer one of two updates would set its own limit.
        """
        norms = self._sorted
        if beside:
            own = [norm for norm in beside if norm > 0]
            norms = sorted([*self._sorted, *own]) if 2 * len(own) >= len(beside) or self.norms else []
        return norms[(len(norms) - 1) // 2] if norms else None

    def packed(self) -> F32:
        """Return the norms as float32[WINDOW], with NaN after the last: a folder has a file for each vector size."""
        vector = np.full(WINDOW, np.nan, np.float32)
        vector[: len(self.norms)] = self.norms
        return vector

    @classmethod
    def unpacked(cls, vector: F32) -> "NormWindow":
        """Return the window that ``packed`` described."""
        return cls(vector[~np.isnan(vector)].tolist())


_NONE = np.full(WINDOW, np.nan)
_NONE.flags.writeable = False


class ClaimWindow:
    """The last ``WINDOW`` accepted claims of examples or steps, in order.

    Args:
        ratio: the greatest multiple of the median that a claim counts. Default: no limit.
        packed: float64[WINDOW], ``packed`` after the last round. Default: no claims.

    Cost: some microseconds per call, independent of the number of claims.
    """

    def __init__(self, ratio: float | None, packed: F64 | None = None) -> None:
        self.ratio = ratio
        self.packed = _NONE if packed is None else packed
        """The claims, with NaN after the last. The array never changes in place."""
        self._count = 0 if packed is None else WINDOW - int(np.isnan(packed).sum())
        self._range = core.column_range(self.packed[: self._count]) if self._count else (math.inf, -math.inf)
        self._limit = math.inf if ratio is None else ratio

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Whether no claim can exceed the ratio times a median of these and the stored claims, whatever claims follow.

        A single first claim does not agree.
        """
        least, most = core.column_range(claims)
        return len(claims) + self._count > 1 and most <= self._limit * min(least, self._range[0])

    def most(self, beside: F64, ratio: float | None = None) -> float:
        """Return the ratio times the median of the stored and further claims."""
        claims = np.concatenate([self.packed[: self._count], beside])
        return (self._limit if ratio is None else ratio) * median(claims) if len(claims) else math.inf

    def add(self, claims: F64) -> None:
        """Add claims > 0; a full window drops its oldest claims. A weight of the caller may be zero."""
        claims = claims[claims > 0]
        if not len(claims):
            return
        if self._count == WINDOW and self._range[0] == self._range[1] and core.column_range(claims) == self._range:
            return
        kept = self.packed[max(0, self._count + len(claims) - WINDOW) : self._count]
        count = min(WINDOW, len(kept) + len(claims))
        packed = _NONE.copy()
        packed[: len(kept)], packed[len(kept) : count] = kept, claims[-WINDOW:]
        self.packed = packed
        self._count, self._range = count, core.column_range(packed[:count])


def median(claims: F64) -> float:
    """Return the lower median of claims."""
    at = (len(claims) - 1) // 2
    return float(np.partition(claims, at)[at])

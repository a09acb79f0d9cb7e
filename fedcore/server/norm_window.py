"""The lengths of the replies heard lately, whose median says how long the next one may be."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from fedcore.typing import F32

WINDOW = 1000
"""So many norms are remembered: enough for a median, few enough to be written with every commit."""


class NormWindow:
    """The norms of the last ``WINDOW`` replies that counted, in their order, and their median.

    A norm of zero says nothing of the scale of the others, and is not taken in.

    Args:
        heard: norms > 0, the oldest first.

    Cost: a few microseconds a norm, whatever their number.
    """

    def __init__(self, heard: Iterable[float] = ()) -> None:
        self._heard = deque(heard, WINDOW)
        self._sorted = sorted(self._heard)

    def __len__(self) -> int:
        return len(self._heard)

    def add(self, norm: float) -> None:
        """Take a norm in; the oldest one is forgotten if there are too many."""
        if norm <= 0:
            return
        if len(self._heard) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._heard[0])]
        self._heard.append(norm)
        insort(self._sorted, norm)

    def median(self, beside: Sequence[float] = ()) -> float | None:
        """The median, of an even number the lower of the two in the middle; None where there is no norm.

        The lower one, so that one liar of two does not vouch for itself. Nor does one beside zeros: where these are
        more than half there is no median, and nothing that it could vouch for.

        Args:
            beside: norms that count too.
        """
        if not beside:
            norms = self._sorted
        else:
            own = [norm for norm in beside if norm > 0]
            norms = sorted([*self._sorted, *own]) if 2 * len(own) >= len(beside) or self._heard else []
        return norms[(len(norms) - 1) // 2] if norms else None

    def packed(self) -> F32:
        """The norms as float32[WINDOW], NaN behind the last: of one size, for a store has a file for each size."""
        vector = np.full(WINDOW, np.nan, np.float32)
        vector[: len(self._heard)] = self._heard
        return vector

    @classmethod
    def unpacked(cls, vector: F32) -> "NormWindow":
        """The window that ``packed`` made a vector of."""
        return cls(vector[~np.isnan(vector)].tolist())

"""Numbers that clients claimed lately, by whose median is known how much the next claim may count for."""

import math
from collections.abc import Mapping

import numpy as np

from fedcore.native import core
from fedcore.server.norm_window import WINDOW
from fedcore.typing import F64


def median(claims: F64) -> float:
    """The median of some claims, of an even number the lower of the two in the middle: one of two vouches for itself
    no more than the other does.
    """
    at = (len(claims) - 1) // 2
    return float(np.partition(claims, at)[at])


_NONE = np.full(WINDOW, np.nan)
_NONE.flags.writeable = False


class ClaimWindow:
    """The last ``WINDOW`` claims that counted, in their order.

    Args:
        ratio: times their median, up to which a claim counts; None for any claim.
        packed: float64[WINDOW], what ``packed`` was when the last round was finished; None for none.

    Cost: some microseconds a call, whatever the number of claims that are asked about at once.
    """

    def __init__(self, ratio: float | None, packed: F64 | None = None) -> None:
        self._ratio = math.inf if ratio is None else ratio
        self.packed = _NONE if packed is None else packed
        """The claims, NaN behind the last. Never changed: where claims leave it as it is, it is the same array."""
        self._count = 0 if packed is None else WINDOW - int(np.isnan(packed).sum())
        self._range = _range(self._heard)

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Tell whether no claim can be past the ratio times a median of these and those heard, whatever comes next.

        One claim alone agrees with nobody.
        """
        least, most = _range(claims)
        return len(claims) + self._count > 1 and most <= self._ratio * min(least, self._range[0])

    def most(self, beside: F64) -> float:
        """The ratio times the median.

        Args:
            beside: claims that count too.
        """
        heard = np.concatenate([self._heard, beside])
        return self._ratio * median(heard) if len(heard) else math.inf

    def add(self, claims: F64) -> None:
        """Take claims in; the oldest ones are forgotten if there are too many."""
        if not len(claims):
            return
        if self._count == WINDOW and self._range[0] == self._range[1] and _range(claims) == self._range:
            return
        kept = self.packed[max(0, self._count + len(claims) - WINDOW) : self._count]
        count = min(WINDOW, len(kept) + len(claims))
        packed = _NONE.copy()
        packed[: len(kept)], packed[len(kept) : count] = kept, claims[-WINDOW:]
        self.packed = packed
        self._count, self._range = count, _range(packed[:count])

    @property
    def _heard(self) -> F64:
        return self.packed[: self._count]


class ClaimWindows:
    """The windows of several kinds of claims, made of a snapshot's vectors once and not in every round."""

    def __init__(self) -> None:
        self._claimed: dict[str, ClaimWindow] = {}

    def of(self, what: str, ratio: float | None, packed: Mapping[str, F64]) -> ClaimWindow:
        """The window of one kind, up to the snapshot whose vectors ``packed`` has."""
        known, last = self._claimed.get(what), packed.get(what, _NONE)
        if known is None or known.packed is not last:  # an open round that ended otherwise took claims in
            known = self._claimed[what] = ClaimWindow(ratio, last)
        return known


def _range(claims: F64) -> tuple[float, float]:
    return core.column_range(claims)

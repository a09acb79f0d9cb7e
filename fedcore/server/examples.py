"""How many examples clients claimed lately, by which is known how many the next one may count for."""

import numpy as np
import numpy.typing as npt

from fedcore.server.norms import WINDOW

F64 = npt.NDArray[np.float64]

RATIO = 100.0
"""Times the median of the claims heard, up to which a claim counts."""


def most_examples(claims: F64) -> float:
    """``RATIO`` times the median of some claims, of an even number the lower of the two in the middle."""
    at = (len(claims) - 1) // 2
    return RATIO * float(np.partition(claims, at)[at])


class Examples:
    """The last ``WINDOW`` claims that counted, in their order.

    Args:
        packed: float64[WINDOW], what ``packed`` was when the last round was finished; None for none.

    Cost: some microseconds a call, whatever the number of claims that are asked about at once.
    """

    def __init__(self, packed: F64 | None = None) -> None:
        self.packed = np.full(WINDOW, np.nan) if packed is None else packed
        """The claims, NaN behind the last. Never changed: where claims leave it as it is, it is the same array."""
        self._count = WINDOW - int(np.isnan(self.packed).sum())
        self._range = self._of(self._heard)

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Whether no claim can be past ``RATIO`` times a median of these and those heard, whatever comes next.

        One claim alone agrees with nobody.
        """
        least, most = self._of(claims)
        return len(claims) + self._count > 1 and most <= RATIO * min(least, self._range[0])

    def most(self, beside: F64) -> float:
        """``RATIO`` times the median, of an even number the lower of the two in the middle.

        Args:
            beside: claims that count too.
        """
        return most_examples(np.concatenate([self._heard, beside]))

    def add(self, claims: F64) -> None:
        """Take claims in; the oldest ones are forgotten if there are too many."""
        least, most = self._of(claims)
        if not len(claims) or (self._count == WINDOW and self._range == (least, most) and least == most):
            return
        last = np.concatenate([self._heard, claims])[-WINDOW:]
        self.packed = np.full(WINDOW, np.nan)
        self.packed[: len(last)] = last
        self._count, self._range = len(last), self._of(last)

    @property
    def _heard(self) -> F64:
        return self.packed[: self._count]

    @staticmethod
    def _of(claims: F64) -> tuple[float, float]:
        return (float(claims.min()), float(claims.max())) if len(claims) else (np.inf, -np.inf)

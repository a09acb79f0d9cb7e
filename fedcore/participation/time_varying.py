"""A fixed share of the clients, drawn with new weights a round: the MimiC paper's *time-varying* pattern."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError
from fedcore.participation.pattern import Participation
from fedcore.randomness import generator


class TimeVarying(Participation):
    """Each round a_i ~ U[1, 10], and k clients are drawn without replacement by successive draws.

    Each draw takes i with probability a_i / sum a, the sum over those not drawn yet;
    k = max(1, round(share N)), halves to even.

    Args:
        clients: N.
        share: P, the share of the clients that is active, in (0, 1].
        seed: see ``Participation``.
        first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the time-varying pattern.

    >>> len(TimeVarying(30, 0.1).active(7))
    3
    """

    def __init__(self, clients: int, share: float, *, seed: int = 0, first_round: Literal["all"] | None = None) -> None:
        super().__init__(clients, seed=seed, first_round=first_round)
        if not 0 < share <= 1:
            raise RangeError(f"share: expected a number in (0, 1], got {share!r}")
        self.share = share
        self._k = max(1, round(share * clients))

    def _mask(self, round: int) -> npt.NDArray[np.bool_]:
        random = generator(self.seed, "participation: time-varying", round=round)
        return _successive(random.uniform(1, 10, self.clients), self._k, random)


def _successive(a: npt.NDArray[np.float64], k: int, random: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Who is among k successive draws without replacement with probabilities a_i / sum a, as bool[N].

    Exponential clocks of rates a_i ring in exactly that order: the first to ring is i with probability
    a_i / sum a, and since an exponential has no memory, the rest then start afresh without it. So the k
    smallest E_i / a_i with E_i ~ Exp(1) have the law of the k draws.
    """
    drawn = np.zeros(len(a), np.bool_)
    drawn[np.argsort(random.exponential(size=len(a)) / a)[:k]] = True
    return drawn

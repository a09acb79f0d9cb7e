"""A fixed share of the clients, drawn with new weights a round: the MimiC paper's *time-varying* pattern."""

from typing import Literal

import numpy as np

from fedcore.errors import RangeError
from fedcore.participation.pattern import Clients, Participation
from fedcore.randomness import generator
from fedcore.sampling import weighted_without_replacement


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

    def _active(self, round: int) -> Clients:
        a = generator(self.seed, "participation: weights", round=round).uniform(1, 10, self.clients)
        drawn = weighted_without_replacement(
            a, self._k, seed=self.seed, round=round, purpose="participation: time-varying"
        )
        return np.sort(drawn)

"""A fixed number of clients, drawn uniformly without replacement."""

from typing import Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.sampling import without_replacement


class Uniform(Participation):
    """k different clients a round, every set of k with the same probability; all of them where there are fewer.

    Args:
        clients: N.
        k: how many, S in the papers, 1 .. N.
        among, seed, first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024, partial
    participation.

    >>> Uniform(1000, 3).active(7).clients
    array([216, 388, 729])
    """

    def __init__(
        self,
        clients: int,
        k: int,
        *,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.k = whole("k", k, 1, self.clients)

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) <= self.k:
            return candidates
        purpose = self._purpose("uniform")
        drawn = without_replacement(len(candidates), self.k, seed=self.seed, round=round, purpose=purpose)
        return candidates.only(np.sort(drawn))

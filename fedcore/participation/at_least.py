"""A number of clients below which a round does not fall: a habit of the MimiC paper's public code."""

from typing import Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.sampling import without_replacement


class AtLeast(Participation):
    """The clients that ``among`` gives, or ``least`` others drawn uniformly where it gives fewer than that.

    The draw is from all that are present, not from those that ``among`` gave, and those drawn do all their steps.
    The MimiC paper says nothing of it; its authors' public code does it with two clients.

    Args:
        clients: N.
        least: how many, 1 .. N; all that are present where there are fewer.
        among, seed, first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    >>> from fedcore.participation import Bernoulli
    >>> len(AtLeast(30, among=Bernoulli(30, 0.0)).active(3))
    2
    """

    def __init__(
        self,
        clients: int,
        least: int = 2,
        *,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.least = whole("least", least, 1, self.clients)

    def _choose(self, round: int, candidates: Active) -> Active:
        if len(candidates) >= self.least:
            return candidates
        present = self.present(round)
        if len(present) <= self.least:
            return Active(present)
        purpose = self._purpose("at least")
        drawn = without_replacement(len(present), self.least, seed=self.seed, round=round, purpose=purpose)
        return Active(present[np.sort(drawn)])

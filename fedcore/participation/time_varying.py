"""A fixed share of the clients, drawn with new weights a round: the MimiC paper's *time-varying* pattern."""

from typing import Literal

import numpy as np

from fedcore.arguments import real
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.randomness import generator
from fedcore.sampling import weighted_without_replacement


class TimeVarying(Participation):
    """Each round a_i ~ U[1, 10], and k clients are drawn without replacement by successive draws.

    Each draw takes i with probability a_i / sum a, the sum over those not drawn yet;
    k = max(1, round(share N)), halves to even, N the number of those to choose from.

    Since the weights are drawn anew, alike for all and unseen, every set of k clients is as likely as every other: over
    the rounds this is uniform sampling, in which plain averaging has no bias either.

    Args:
        clients: N.
        share: P, the share of the clients that is active, in (0, 1].
        among, seed, first_round: see ``Participation``.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the time-varying pattern.

    >>> len(TimeVarying(30, 0.1).active(7))
    3
    """

    def __init__(
        self,
        clients: int,
        share: float,
        *,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.share = real("share", share, "(0, 1]")

    def _choose(self, round: int, candidates: Active) -> Active:
        if not len(candidates):
            return candidates
        a = generator(self.seed, self._purpose("weights"), round=round).uniform(1, 10, self.clients)
        drawn = weighted_without_replacement(
            a[candidates.clients],
            max(1, int(np.rint(self.share * len(candidates)))),
            seed=self.seed,
            round=round,
            purpose=self._purpose("time-varying"),
        )
        return candidates.only(np.sort(drawn))

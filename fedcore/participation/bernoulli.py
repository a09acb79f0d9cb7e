"""Clients that take part independently, with fixed probabilities: the MimiC paper's *static* pattern."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedcore.arguments import real, whole
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.participation.per_client import each
from fedcore.sampling import bernoulli


class Bernoulli(Participation):
    """Client i is active with probability p_i, independently of the others and of other rounds.

    Args:
        clients: N.
        p: one probability in [0, 1] for all, or N of them.
        levels: L > 1 spreads one p over L levels up to 1: p_i = p + (i mod L)(1 - p)/(L - 1). The MimiC paper has one
            p; its authors' public code has five levels.
        among, seed, first_round: see ``Participation``.

    Attributes:
        p: the probability, or float64[N], read-only.

    Raises:
        RangeError, ShapeError: an argument is not what is said above.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the static pattern.

    >>> Bernoulli(4, 1.0).active(3).clients
    array([0, 1, 2, 3])
    >>> Bernoulli(6, 0.2, levels=5).p
    array([0.2, 0.4, 0.6, 0.8, 1. , 0.2])
    """

    @ieee
    def __init__(
        self,
        clients: int,
        p: float | Sequence[float],
        *,
        levels: int = 1,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        levels = whole("levels", levels, 1, 2**31)
        if np.ndim(p) > 0 and levels > 1:
            raise RangeError(f"levels: expected 1 where there is a p for each client, got {levels}")
        if isinstance(p, Sequence | np.ndarray) and not isinstance(p, str):
            self.p = each("p", p, self.clients, "[0, 1]")
        else:
            least = real("p", p, "[0, 1]")
            level = np.arange(self.clients) % levels / max(levels - 1, 1)
            self.p = np.minimum(least + level * (1 - least), 1.0)
            self.p.flags.writeable = False

    def _choose(self, round: int, candidates: Active) -> Active:
        # Drawn for all, so that whether one is active does not depend on who else could be.
        purpose = self._purpose("bernoulli")
        drawn = bernoulli(self.clients, self.p, seed=self.seed, round=round, purpose=purpose)
        return candidates.only(np.isin(candidates.clients, drawn, assume_unique=True))

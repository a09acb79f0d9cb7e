"""A fixed number of draws by given weights, without or with replacement."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.participation.per_client import each
from fedcore.sampling import weighted_without_replacement, with_replacement


class Weighted(Participation):
    """k draws a round, each of which takes client i with probability w_i / sum w.

    Without replacement the draws are successive: the sum is over those not drawn yet, and k different clients come
    (all with a weight > 0 where there are fewer). With replacement the sum is over all, the weights are the
    probabilities q of the paper, and a client drawn twice is there once and counts twice.

    Args:
        clients: N.
        k: how many draws, >= 1; without replacement at most as many as there are weights > 0.
        weights: N finite numbers >= 0, not all of them 0; they need not add up to 1.
        replacement: whether draws are with replacement.
        among, seed, first_round: see ``Participation``. Draws with replacement take a candidate once however often it
            was drawn before.

    Raises:
        RangeError, ShapeError: an argument is not what is said above.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 1: K clients with replacement by q.

    >>> drawn = Weighted(4, 6, [0.1, 0.0, 0.3, 0.6], replacement=True).active(0)
    >>> drawn.clients, drawn.counts
    (array([0, 3]), array([1, 5]))
    """

    @ieee
    def __init__(
        self,
        clients: int,
        k: int,
        weights: Sequence[float],
        *,
        replacement: bool = False,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.weights = each("weights", weights, self.clients, "[0, inf)")
        positive, total = int(np.count_nonzero(self.weights)), sum(self.weights.tolist())
        if not 0 < total < math.inf:
            raise RangeError(f"weights: expected a finite sum > 0, got {total!r}")
        self.k = whole("k", k, 1, 2**31 if replacement else positive)
        self.replacement = replacement

    def _choose(self, round: int, candidates: Active) -> Active:
        weights = self.weights[candidates.clients]
        positive = int(np.count_nonzero(weights))
        if not self.replacement:
            purpose, k = self._purpose("weighted"), min(self.k, positive)
            drawn = weighted_without_replacement(weights, k, seed=self.seed, round=round, purpose=purpose)
            return candidates.only(np.sort(drawn))
        purpose, k = self._purpose("weighted, with replacement"), self.k if positive else 0
        drawn = with_replacement(weights, k, seed=self.seed, round=round, purpose=purpose)
        places, counts = np.unique(drawn, return_counts=True)
        kept = candidates.only(places)
        return Active(kept.clients, kept.shares, counts.astype(np.int64))

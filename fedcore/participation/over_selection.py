"""More clients than needed are drawn, and the first to answer are kept: the practice of production systems."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.arguments import real, whole
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.randomness import generator
from fedcore.sampling import without_replacement


class OverSelection(Participation):
    """``select`` clients are drawn uniformly without replacement, and of these the first k to answer are kept.

    Client i answers in round t after exp(spread a_i + jitter b_it), a and b standard normal, a drawn once for each
    client and b anew in each round; 1 is the time of the median client. That law is this project's own. Fast clients
    are kept more often than slow ones, which is the bias that this practice has.

    Args:
        clients: N.
        k: how many answers the server waits for, 1 .. N.
        select: how many it asks, k .. N; None is 1.3 k, rounded up, as production systems ask.
        spread: the standard deviation of the logarithm of the clients' own times, >= 0.
        jitter: that of the rounds' deviations from it, >= 0.
        deadline: when the server stops waiting, > 0; None waits for k answers however long that takes.
        among, seed, first_round: see ``Participation``. Shares of work do not change the times.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Bonawitz et al., "Towards Federated Learning at Scale: System Design", 2019: 130 % of the target
    number are selected.

    >>> pattern = OverSelection(100, 10)
    >>> pattern.select, len(pattern.active(3))
    (13, 10)
    """

    def __init__(
        self,
        clients: int,
        k: int,
        *,
        select: int | None = None,
        spread: float = 0.5,
        jitter: float = 0.25,
        deadline: float | None = None,
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.k = whole("k", k, 1, self.clients)
        if select is None:
            select = min(math.ceil(1.3 * self.k), self.clients)
        self.select = whole("select", select, self.k, self.clients)
        self.spread = real("spread", spread, "[0, 10]")
        self.jitter = real("jitter", jitter, "[0, 10]")
        self.deadline = math.inf if deadline is None else real("deadline", deadline, "(0, inf]")
        self._own = self.spread * generator(self.seed, self._purpose("speeds")).standard_normal(self.clients)

    def times(self, round: int) -> npt.NDArray[np.float64]:
        """The times at which each client would answer in a round, float64[N], whether it is asked or not."""
        deviation = generator(self.seed, self._purpose("answers"), round=round).standard_normal(self.clients)
        return np.exp(self._own + self.jitter * deviation)

    def _choose(self, round: int, candidates: Active) -> Active:
        purpose, asked = self._purpose("over-selection"), min(self.select, len(candidates))
        if asked == 0:
            return candidates
        places = np.sort(without_replacement(len(candidates), asked, seed=self.seed, round=round, purpose=purpose))
        times = self.times(round)[candidates.clients[places]]
        first = np.argsort(times, kind="stable")[: self.k]
        return candidates.only(np.sort(places[first[times[first] <= self.deadline]]))

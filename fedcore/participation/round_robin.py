"""Clients that come back after a fixed number of rounds: the MimiC paper's *bounded* pattern."""

from typing import Literal

import numpy as np

from fedcore.errors import RangeError
from fedcore.participation.pattern import Clients, Participation
from fedcore.randomness import generator


class RoundRobin(Participation):
    """Client i is active in every tau_i-th round, with tau_i ~ U{0 .. tau_max} drawn once.

    Active when (t + phase_i) mod max(tau_i, 1) = 0: both 0 and 1 mean every round.

    Args:
        clients: N.
        tau_max: the longest period, an int >= 0.
        phase: "zero" starts all clients in phase, so that round 0 has everyone; "random" draws
            phase_i ~ U{0 .. max(tau_i, 1) - 1}. The paper does not say; the periods are the same in both.
        seed: see ``Participation``.
        first_round: see ``Participation``.

    Attributes:
        tau: int64[N], read-only.

    Raises:
        RangeError: an argument is outside its range.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the pattern with bounded intervals.

    >>> RoundRobin(3, 1).active(5)
    array([0, 1, 2])
    """

    def __init__(
        self,
        clients: int,
        tau_max: int,
        *,
        phase: Literal["zero", "random"] = "zero",
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, seed=seed, first_round=first_round)
        if tau_max < 0:
            raise RangeError(f"tau_max: expected an int >= 0, got {tau_max!r}")
        if phase not in ("zero", "random"):
            raise RangeError(f"phase: expected 'zero' or 'random', got {phase!r}")
        self.tau_max = tau_max
        self.tau = generator(seed, "participation: periods").integers(0, tau_max + 1, clients)
        self.tau.flags.writeable = False
        self._period = np.maximum(self.tau, 1)
        self._phase = np.zeros(clients, np.int64)
        if phase == "random":
            self._phase = generator(seed, "participation: phases").integers(0, self._period)

    def _active(self, round: int) -> Clients:
        return np.flatnonzero((round + self._phase) % self._period == 0)

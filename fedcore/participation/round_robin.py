"""Clients that come back after a fixed number of rounds: the MimiC paper's *bounded* pattern."""

from typing import Literal

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import UnknownNameError
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.randomness import generator


class RoundRobin(Participation):
    """Client i is active in every tau_i-th round.

    Active when (t + phase_i) mod max(tau_i, 1) = 0: both 0 and 1 mean every round.

    Args:
        clients: N.
        tau_max: the longest period, an int >= 0.
        phase: "zero" starts all clients in phase, so that round 0 has everyone; "random" draws
            phase_i ~ U{0 .. max(tau_i, 1) - 1}. The paper does not say; the periods are the same in both.
        periods: "uniform", the paper's: tau_i ~ U{0 .. tau_max}, drawn once. "half-normal", its authors' public
            code: tau_i = min(round(|z_i|), tau_max), z_i normal with standard deviation 3, so that periods past 10 are
            rare whatever tau_max; that code is in phase, and has an ``AtLeast`` of two clients.
        among, seed, first_round: see ``Participation``.

    Attributes:
        tau: int64[N], read-only.

    Raises:
        RangeError: an argument is outside its range.
        UnknownNameError: there is no such phase, or no such law of the periods.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central
    Updates", 2023, the pattern with bounded intervals.

    >>> RoundRobin(3, 1).active(5).clients
    array([0, 1, 2])
    """

    def __init__(
        self,
        clients: int,
        tau_max: int,
        *,
        phase: Literal["zero", "random"] = "zero",
        periods: Literal["uniform", "half-normal"] = "uniform",
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        self.tau_max = whole("tau_max", tau_max, 0, 2**31)
        if phase not in ("zero", "random"):
            raise UnknownNameError.of("phase", phase, ["zero", "random"])
        if periods not in ("uniform", "half-normal"):
            raise UnknownNameError.of("periods", periods, ["uniform", "half-normal"])
        if periods == "uniform":
            self.tau = generator(seed, self._purpose("periods")).integers(0, tau_max + 1, clients)
        else:
            z = generator(seed, self._purpose("half-normal periods")).normal(0, 3, clients)
            self.tau = np.minimum(np.rint(np.abs(z)), tau_max).astype(np.int64)
        self.tau.flags.writeable = False
        self._period = np.maximum(self.tau, 1)
        self._phase = np.zeros(clients, np.int64)
        if phase == "random":
            self._phase = generator(seed, self._purpose("phases")).integers(0, self._period)

    def _choose(self, round: int, candidates: Active) -> Active:
        due = (round + self._phase) % self._period == 0
        return candidates.only(due[candidates.clients])

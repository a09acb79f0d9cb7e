"""Flexible device participation: Ruan et al., "Towards Flexible Device Participation in Federated Learning", 2021.

AISTATS 2021, eq. 2 and Sec. 4.
"""

from dataclasses import dataclass
from typing import Literal

from fedcore.algorithms.algorithm import Algorithm, Step, choose
from fedcore.algorithms.cohort import Claims, Cohort
from fedcore.arguments import whole
from fedcore.kernels import Linear
from fedcore.typing import F64


@dataclass(frozen=True)
class FlexibleFedAvg(Algorithm):
    """x' = x + sum_k p_t^k (y_k - x), with p^k = n_k / n over ALL registered clients (``Server(client_sizes=)``).

    * Scheme A: p_t^k = N p^k / K_t for the devices that did all E steps, K_t their number; the others are left out,
      and a round without any is discarded.
    * Scheme B: p_t^k = p^k; incomplete work is taken as it is.
    * Scheme C: p_t^k = (E / s_k) p^k for s_k steps done.

    After an arrival (``Server.arrive``) the shares are those of the new objective, n_k / (n + n_l). With the fast
    reboot the newcomer's p^l is multiplied by 1 + 2 / (t - t0)^2: 3 in the first round after t0, and down to 1
    (Sec. 4.2). The rate should restart as well: ``rates.Staircase``.

    Args:
        scheme: "A", "B" or "C".
        local_steps: E, the steps of a complete client's work. Needed by A and C, where a client that claims more is
            refused.
        reboot: "fast" or "vanilla", whether a newcomer's share is boosted.
    """

    scheme: Literal["A", "B", "C"] = "C"
    local_steps: int = 1
    reboot: Literal["fast", "vanilla"] = "fast"

    unit = "model"
    takes_server_rate = False
    needs_shares = True

    def __post_init__(self) -> None:
        choose("scheme", self.scheme, ("A", "B", "C"))
        choose("reboot", self.reboot, ("fast", "vanilla"))
        whole("local_steps", self.local_steps, 1)

    @property
    def weighs_claims(self) -> bool:
        """False: the shares are the server's own."""
        return False

    @property
    def most_steps(self) -> int | None:
        """E, of which schemes A and C know."""
        return None if self.scheme == "B" else self.local_steps

    def weigh(self, claims: Claims) -> F64:
        """p_t^k, without scheme A's factor N / K_t."""
        assert claims.shares is not None  # the server has seen to it
        p = claims.shares
        if self.reboot == "fast" and claims.ages is not None:
            p = p * (1 + 2 / claims.ages**2)
        if self.scheme == "A":
            return p * (claims.steps >= self.local_steps)
        return p * (self.local_steps / claims.steps) if self.scheme == "C" else p

    def step(self, cohort: Cohort) -> Step:
        """v = sum_k p_t^k (x - y_k); gamma is 1."""
        return Step(v=Linear(A=cohort.devices / cohort.weighed if self.scheme == "A" else 1))

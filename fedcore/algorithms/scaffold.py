"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Written as in Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024. The
MimiC paper (arXiv 2306.12212) writes its baseline with c from the gradients of this round's cohort at x (eq. 18); its
experiments are taken to be of the method as published.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedcore.algorithms.algorithm import (
    MEAN_GRADIENT,
    NOTHING,
    ROW_CHANGE,
    Algorithm,
    Direction,
    H,
    Placement,
    Step,
    choose,
)
from fedcore.algorithms.cohort import Cohort
from fedcore.kernels import Linear, Terms

Control: TypeAlias = Literal["derived", "sent"]


class ControlVariates(Algorithm):
    """Rows are the clients' control variates c_i, and T their sum; ``placement`` is an option of such a method."""

    placement: Placement

    control: Control = "sent"
    keeps_total = True
    anchor = "offset"

    def __post_init__(self) -> None:
        choose("control", self.control, ("derived", "sent"))
        choose("placement", self.placement, ("server", "client"))

    @property
    def second_vector(self) -> str | None:
        """raw_i, or c_i+ - c_i from a client that keeps it."""
        if self.placement == "client":
            return ROW_CHANGE
        return MEAN_GRADIENT if self.control == "sent" else None

    @property
    def row(self) -> Terms:
        """c_i+ = raw_i = (h_i - offset) / a + c_i, the offset without the row's part."""
        if self.second_vector is not None:
            return NOTHING
        return Terms(h=1 / self.direction.a, r=1, q=-1 / self.direction.a)

    @property
    def adds(self) -> Terms:
        """h_i, or raw_i - c_i."""
        return H if self.second_vector is not None else Terms(row=1, r=-1)

    def step(self, cohort: Cohort) -> Step:
        """v = the mean of h_i, and T' = the sum of all rows; c = T / N.

        With "derived", A = sum of (raw_i - c_i), and h_i = a (raw_i - c_i) + a c + from_momentum g.
        """
        if self.second_vector is not None:
            return Step(v=Linear(A=1 / cohort.S), T=Linear(T=1, B=1))
        d = self.direction
        return Step(v=Linear(A=d.a / cohort.S, T=d.from_mean / cohort.N, g=d.from_momentum), T=Linear(T=1, A=1))


@dataclass(frozen=True)
class SCAFFOLD(ControlVariates):
    """A client steps along grad(y) - c_i + c; v = (1/S) sum of h_i; c_i+ = raw_i; c = (1/N) sum over ALL i of c_i.

    raw_i is the mean of the client's gradients before the correction (Option II of the original gives the same). Rows
    and c are zero at first unless ``Server.warm_start`` says otherwise, and c moves by 1/N, not 1/S.

    Args:
        control: "derived": clients send y alone, as in FedAvg, and raw_i = h_i + c_i - c follows from it, since the
            server knows the offset that it sent. That needs plain steps: weight decay counts as part of the gradient,
            but there is no local momentum, clipping or proximal term. "sent": clients send raw_i as a second vector,
            ``control``.
        placement: "client": each client keeps its own c_i, adds -c_i to the offset, and sends c_i+ - c_i as
            ``control``; the server holds no rows.
    """

    control: Control = "derived"
    placement: Placement = "server"

    direction = Direction(from_row=-1, from_mean=1)

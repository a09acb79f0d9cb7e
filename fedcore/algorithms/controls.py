"""Methods whose clients step along control variates: SCAFFOLD, its momentum forms, and FedDyn."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedcore.algorithms.base import (
    MEAN_GRADIENT,
    NOTHING,
    ROW_CHANGE,
    Algorithm,
    Cohort,
    Direction,
    H,
    Placement,
    Step,
    choose,
)
from fedcore.arguments import real
from fedcore.kernels import Linear, Terms

# SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.
#
# Written as in Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024. The
# MimiC paper (arXiv 2306.12212) writes its baseline with c from the gradients of this round's cohort at x (eq. 18); its
# experiments are taken to be of the method as published.


Control: TypeAlias = Literal["derived", "sent"]


class ControlVariates(Algorithm):
    """Rows are the clients' control variates c_i, and T their sum; ``placement`` is an option of such a method."""

    placement: Placement

    control: Control = "sent"
    keeps_total = True
    total_is_whole = True
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
    def total_sums_rows(self) -> bool:
        """c sums the rows that the server keeps."""
        return self.placement == "server"

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


# SCAFFOLD-M and SCAFFOLD-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".
#
# ICLR 2024, arXiv 2306.16504, Algorithms 2 and 4.


@dataclass(frozen=True)
class SCAFFOLDM(ControlVariates):
    """A client steps along beta (grad(y) - c_i + c) + (1 - beta) g; c_i+ and c as in SCAFFOLD; g+ = (1/S) sum of h_i.

    With "derived" controls raw_i = (h_i - (1 - beta) g) / beta + c_i - c.

    Args:
        beta: in (0, 1]; 1 is SCAFFOLD.
        control, placement: as for SCAFFOLD.
        reparameterised: as for FedAvgM: a client steps along grad(y) - c_i + c + (1 - beta) g.
    """

    beta: float = 0.1
    control: Control = "derived"
    placement: Placement = "server"
    reparameterised: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        real("beta", self.beta, "(0, 1]")

    @property
    def direction(self) -> Direction:
        """a (grad(y) - c_i + c) + (1 - beta) g, a = beta or 1."""
        a = 1.0 if self.reparameterised else self.beta
        return Direction(a=a, from_row=-a, from_mean=a, from_momentum=1 - self.beta)


@dataclass(frozen=True)
class SCAFFOLDMVR(ControlVariates):
    """A client steps along grad(y; xi) - beta (c_i - c) + (1 - beta) (g - grad(x_{t-1}; xi)).

    c_i+, c, g+ and x' as in SCAFFOLD-M. The mean raw gradient does not follow from y here, so clients send it as
    ``control``.

    Args:
        beta: in (0, 1]; 1 is SCAFFOLD.
        placement: as for SCAFFOLD.
    """

    beta: float = 0.1
    placement: Placement = "server"

    def __post_init__(self) -> None:
        super().__post_init__()
        real("beta", self.beta, "(0, 1]")

    @property
    def direction(self) -> Direction:
        """grad(y) + beta (c - c_i) + (1 - beta) (g - grad(x_{t-1}))."""
        beta = self.beta
        return Direction(b=-(1 - beta), from_row=-beta, from_mean=beta, from_momentum=1 - beta)


# FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv 2111.04263.


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """A client steps along grad(y) - l_i + alpha (y - x), and then l_i' = l_i + alpha (x - y_i).

    The server keeps H' = H + (alpha/N) sum over the cohort of (x - y_i), and x' = (1/S) sum of y_i - H' / alpha. Rows
    are r_i = l_i / alpha, lengths of models, so that H / alpha is the mean of ALL rows, T / N. At a fixed point l_i is
    client i's gradient there, and their sum is zero.

    Args:
        alpha: the weight of the regulariser, > 0; the paper takes 0.1, 0.01 and 0.001.
    """

    alpha: float = 0.1

    row = Terms(h=1, r=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True
    unit = "model"
    takes_server_rate = False

    def __post_init__(self) -> None:
        real("alpha", self.alpha, "(0, 1e6]")

    @property
    def direction(self) -> Direction:
        """grad(y) - alpha r_i + alpha (y - x)."""
        return Direction(mu=self.alpha, from_row=-self.alpha)

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T' / N, T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S + 1 / cohort.N, T=1 / cohort.N), T=Linear(T=1, A=1))

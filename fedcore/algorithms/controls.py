"""Methods whose clients correct their local steps by control variates."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedcore.algorithms.base import MEAN_GRADIENT, NOTHING, ROW_CHANGE, Algorithm, Cohort, Direction, Placement, Step
from fedcore.kernels.forms import H, Linear, Terms

# SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.
#
# The notation is that of Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024.
# The MimiC paper (arXiv 2306.12212) defines its SCAFFOLD baseline with a c from the gradients of the current cohort at
# x (eq. 18). We assume that its experiments used the published SCAFFOLD.


Control: TypeAlias = Literal["derived", "sent"]


class ControlVariates(Algorithm):
    """Base class: rows are the control variates c_i, and T is their sum. Subclasses have the option ``placement``."""

    placement: Placement

    control: Control = "sent"
    keeps_total = True
    total_is_whole = True
    anchor = "offset"
    _choices = (("control", ("derived", "sent")), ("placement", ("server", "client")))

    @property
    def second_vector(self) -> str | None:
        """raw_i with "sent"; c_i+ - c_i if clients keep c_i; else None."""
        if self.placement == "client":
            return ROW_CHANGE
        return MEAN_GRADIENT if self.control == "sent" else None

    @property
    def total_sums_rows(self) -> bool:
        """Whether the server keeps the rows."""
        return self.placement == "server"

    @property
    def row(self) -> Terms:
        """c_i+ = raw_i = (h_i - offset) / a + c_i, where the offset excludes the row's term."""
        if self.second_vector is not None:
            return NOTHING
        return Terms(h=1 / self.direction.a, r=1, q=-1 / self.direction.a)

    @property
    def adds(self) -> Terms:
        """h_i, or raw_i - c_i with "derived"."""
        return H if self.second_vector is not None else Terms(row=1, r=-1)

    def step(self, cohort: Cohort) -> Step:
        """v = mean of h_i, T' = sum of all rows, c = T / N.

        With "derived", A = sum of (raw_i - c_i), and h_i = a (raw_i - c_i) + a c + from_momentum g.
        """
        if self.second_vector is not None:
            return Step(v=Linear(A=1 / cohort.S), T=Linear(T=1, B=1))
        d = self.direction
        return Step(v=Linear(A=d.a / cohort.S, T=d.from_mean / cohort.N, g=d.from_momentum), T=Linear(T=1, A=1))


@dataclass(frozen=True)
class SCAFFOLD(ControlVariates):
    """A client steps along grad(y) - c_i + c; v = (1/S) sum of h_i; c_i+ = raw_i; c = (1/N) sum over ALL i of c_i.

    raw_i is the mean of the client's uncorrected gradients (equal to Option II of the original). Rows and c start at
    zero, or from ``Server.warm_start``. c changes by 1/N (not 1/S) times the sum of the cohort's row changes.

    Args:
        control: "derived" or "sent". With "derived", clients send only y, as in FedAvg, and the server computes
            raw_i = h_i + c_i - c. This requires plain local steps without momentum, clipping or a proximal term; weight
            decay counts as part of the gradient. With "sent", clients send raw_i as a second vector, ``control``.
        placement: "server" or "client". With "client", each client keeps its c_i, adds -c_i to the offset, and sends
            c_i+ - c_i as ``control``; the server has no rows.
    """

    control: Control = "derived"
    placement: Placement = "server"

    direction = Direction(from_row=-1, from_mean=1)


# SCAFFOLD-M and SCAFFOLD-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably",
# ICLR 2024, arXiv 2306.16504, Algorithms 2 and 4.


@dataclass(frozen=True)
class SCAFFOLDM(ControlVariates):
    """A client steps along beta (grad(y) - c_i + c) + (1 - beta) g; c_i+ and c as in SCAFFOLD; g+ = (1/S) sum of h_i.

    With "derived" controls raw_i = (h_i - (1 - beta) g) / beta + c_i - c.

    Args:
        beta: a number in (0, 1]. With 1 this is SCAFFOLD.
        control, placement: as for ``SCAFFOLD``.
        reparameterised: as for ``FedAvgM``. A client then steps along grad(y) - c_i + c + (1 - beta) g.
    """

    beta: float = 0.1
    control: Control = "derived"
    placement: Placement = "server"
    reparameterised: bool = False

    _intervals = (("beta", "(0, 1]"),)

    @property
    def direction(self) -> Direction:
        """a (grad(y) - c_i + c) + (1 - beta) g, a = beta or 1."""
        a = 1.0 if self.reparameterised else self.beta
        return Direction(a=a, from_row=-a, from_mean=a, from_momentum=1 - self.beta)


@dataclass(frozen=True)
class SCAFFOLDMVR(ControlVariates):
    """A client steps along grad(y; xi) - beta (c_i - c) + (1 - beta) (g - grad(x_{t-1}; xi)).

    c_i+, c, g+ and x' are those of SCAFFOLD-M. The server cannot compute the mean raw gradient from y, so clients send
    it as ``control``.

    Args:
        beta: a number in (0, 1]. With 1 this is SCAFFOLD.
        placement: as for ``SCAFFOLD``.
    """

    beta: float = 0.1
    placement: Placement = "server"

    _intervals = (("beta", "(0, 1]"),)

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
    are r_i = l_i / alpha, in the unit of models. So H / alpha is the mean of ALL rows, T / N. At a fixed point l_i is
    client i's gradient, and the sum of all l_i is zero.

    Args:
        alpha: the weight of the regulariser, > 0. The paper uses 0.1, 0.01 and 0.001.
    """

    alpha: float = 0.1

    row = Terms(h=1, r=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True
    unit = "model"
    takes_server_rate = False
    _intervals = (("alpha", "(0, 1e6]"),)

    @property
    def direction(self) -> Direction:
        """grad(y) - alpha r_i + alpha (y - x)."""
        return Direction(mu=self.alpha, from_row=-self.alpha)

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T' / N, T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S + 1 / cohort.N, T=1 / cohort.N), T=Linear(T=1, A=1))

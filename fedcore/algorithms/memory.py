"""Methods that store each client's last mean gradient on the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcore.algorithms.base import NOTHING, Algorithm, Claims, Cohort, Placement, Step, Unit
from fedcore.arrays import F64
from fedcore.errors import RangeError
from fedcore.kernels.forms import H, Linear, Terms
from fedcore.validation import check_number, is_number, listed

# MIFA: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021.


@dataclass(frozen=True)
class MIFA(Algorithm):
    """x' = x - gamma v, v = (1/N) sum over ALL clients of the last mean gradient accepted from each.

    The total T is the float64 sum of all rows: T' = T + sum over the cohort of (h_i - r_i), v = T' / N. Rows are
    gradients without a rate, so the current rate multiplies old rows too. A round without clients still steps along the
    stored mean. T has float64 rounding errors, so a row with 10^16 times the norm of the others leaves an error in T.
    With ``Compute(accumulator="exact")`` T is the exact sum.

    Args:
        wait: whether x stays unchanged until every client was accepted once, as in the paper. Rows and round numbers
            still change. If False, x changes from the first round on, and missing rows are zero.
    """

    wait: bool = True

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True
    steps_without_clients = True

    def step(self, cohort: Cohort) -> Step:
        """T' = T + A, v = T' / N."""
        return Step(v=Linear(A=1 / cohort.N, T=1 / cohort.N), T=Linear(T=1, A=1))

    def moves(self, cohort: Cohort) -> bool:
        """Whether every client has a row, or ``wait`` is False."""
        return cohort.rows == cohort.N or not self.wait


# MimiC: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
# 2023, arXiv 2306.12212, Algorithm 1.


@dataclass(frozen=True)
class MimiC(Algorithm):
    """x' = x - gamma v, v_t = (1/S) sum over the cohort of (h_i + c_i); then c_i = v_t - h_i for the accepted clients.

    A client's correction is c_i = v[t_i] - r_i, where t_i is the last round that accepted the client and r_i is its h_i
    of that round. A client that was never accepted has c_i = 0. So an update adds h_i - r_i + v[t_i].

    The method's limit requires that the corrections of all clients sum to zero. T is C, the float64 sum of the stored
    corrections. In exact arithmetic C is zero; v subtracts C / N so that rounding errors do not accumulate.

    Args:
        units: "gradient" or "update". With "gradient", rows and corrections are mean gradients, and the current rate
            multiplies them. With "update" they are model differences, which contain the rate of their round, as in the
            authors' public code. The results then differ if the rate decays, and a server rate is not allowed.
        placement: "server" or "client". With "client", each client keeps its c_i. It sends h_i + c_i (as its
            "gradient", or as the model x - eta K (h_i + c_i)), and after the round sets c_i = v - h_i from
            ``Server.v``. The server only averages, so secure aggregation is possible, but v cannot subtract C / N.
        history: the number of rounds whose v[t] the server keeps. In a row that refers to an older round, r - v[t]
            replaces r and v[t]. A smaller number needs less memory but rewrites more rows.
    """

    units: Literal["gradient", "update"] = "gradient"
    placement: Placement = "server"
    history: int = 64

    anchor = "v[t]"
    averaging_option = 'units="update"'
    total_is_whole = True  # C' = C - A + S v
    _choices = (("units", ("gradient", "update")), ("placement", ("server", "client")))
    _intervals = (("history", (1, 2**31)),)

    @property
    def most_history(self) -> int:
        """The option ``history``."""
        return self.history

    @property
    def row(self) -> Terms:
        """r' = h."""
        return NOTHING if self.placement == "client" else Terms(h=1)

    @property
    def adds(self) -> Terms:
        """h_i + c_i = h_i - r_i + v[t_i]; h if each client keeps its c_i and sends h_i + c_i."""
        return H if self.placement == "client" else Terms(row=1, r=-1, q=1)

    @property
    def keeps_total(self) -> bool:
        """Whether the server keeps C, the sum of the corrections."""
        return self.placement == "server"

    total_sums_rows = keeps_total

    @property
    def unit(self) -> Unit:
        """The unit "model" for ``units="update"``, else "gradient"."""
        return "model" if self.units == "update" else "gradient"

    @property
    def takes_server_rate(self) -> bool:
        """Whether ``units`` is "gradient"."""
        return self.units == "gradient"

    def step(self, cohort: Cohort) -> Step:
        """v = A / S - C / N; C' = C - sum of (v[t_i] - r_i) + sum of (v - h_i) = C - A + S v."""
        if self.placement == "client":
            return Step(v=Linear(A=1 / cohort.W))
        return Step(v=Linear(A=1 / cohort.S, T=-1 / cohort.N), T=Linear(T=1, A=-1, v=cohort.S))


# FedVARP: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial Client
# Participation in Federated Learning", UAI 2022, arXiv 2207.14130.


@dataclass(frozen=True)
class FedVARP(Algorithm):
    """x' = x - gamma v, v = (1/S) sum over the cohort of (h_i - r_i) + (1/N) sum over ALL clients of r_i; r_i' = h_i.

    r_i is client i's last mean gradient, initially zero; it replaces the gradient of an absent client. A round without
    clients changes nothing.
    """

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T / N, with T before the round; T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S, T=1 / cohort.N), T=Linear(T=1, A=1))


# FedStale: Rodio, Neglia, "FedStale: leveraging stale client updates in federated learning", 2024,
# arXiv 2405.04171.


@dataclass(frozen=True)
class FedStale(Algorithm):
    """x' = x - gamma v, v = (1/N) [sum over the cohort of (h_i - beta r_i) / p_i + beta sum over ALL clients of r_i].

    p_i is the probability that client i takes part in a round. r_i is its last mean gradient (r_i' = h_i). The sum over
    all clients uses the rows before the round.

    Args:
        beta: the weight of the stored gradients, in [0, 1]. With 0 this is FedAvg without the bias of unequal
            probabilities; with 1 it is FedVARP.
        chances: p_i as one number in (0, 1] for all clients, or one number for each of the clients 0..N-1. A round
            without clients then steps along the stored gradients. A client without a chance, such as a new client,
            makes the round fail; create a server with its chance first. Default: S / N, and a round without clients
            changes nothing.
    """

    beta: float = 0.5
    chances: float | Sequence[float] | None = None

    row = Terms(h=1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True
    sums_changes = True  # T needs the unweighted changes, and A has weighted ones
    weighs_claims = False  # the chances are the server's own numbers
    _intervals = (("beta", "[0, 1]"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_number(self.chances):
            check_number("chances", self.chances, "(0, 1]")
        elif self.chances is not None:
            chances = tuple(check_number("chances", chance, "(0, 1]") for chance in listed("chances", self.chances))
            if not chances:
                raise RangeError("chances: must not be empty; leave it out")
            object.__setattr__(self, "chances", chances)

    @property
    def adds(self) -> Terms:
        """h - beta r."""
        return Terms(row=1, r=-self.beta)

    @property
    def steps_without_clients(self) -> bool:
        """Whether the chances are known; x then moves along beta T / N."""
        return self.chances is not None

    def weigh(self, claims: Claims) -> F64:
        """1 / p_i, or 1 if p_i is unknown."""
        if self.chances is None:
            return np.ones(len(claims.steps))
        if not isinstance(self.chances, Sequence):
            return np.full(len(claims.steps), 1 / self.chances)
        assert claims.clients is not None
        known = range(len(self.chances))
        for client in claims.clients:
            if client not in known:
                raise RangeError(
                    f"chances: has no probability for client {client!r}, only for clients 0..{known[-1]}; create a "
                    "server with the probabilities of all clients"
                )
        return 1 / np.array([self.chances[int(client)] for client in claims.clients], np.float64)

    def step(self, cohort: Cohort) -> Step:
        """v = A / N + beta T / N, or A / S + beta T / N without ``chances``; T' = T + B, the sum of all rows."""
        divisor = cohort.S if self.chances is None else cohort.N
        return Step(v=Linear(A=1 / divisor, T=self.beta / cohort.N), T=Linear(T=1, B=1))


# FedAWE: Xiang, Ioannidis, Yeh, Joe-Wong, Su, "Efficient Federated Learning against Heterogeneous and Non-stationary
# Client Unavailability", NeurIPS 2024, arXiv 2409.17446, Algorithm 1.


@dataclass(frozen=True)
class FedAWE(Algorithm):
    """x' = (1/S) sum over the cohort of [x_(i) - eta (t - tau_i) (x_(i) - y_i)].

    x_(i) is the model from which client i starts: the one after round tau_i, the last round that accepted its update.
    A client without an update starts from the first model (tau_i = -1), or from that of its first round. A long absence
    is compensated by a longer step. A round without clients changes nothing.

    The server keeps each earlier model while a client starts from it: up to one per client. The authors' public code
    also limits the norm of the cohort's mean of (t - tau_i) (x_(i) - y_i) to 0.5, which the paper does not mention.

    Args:
        eta: the server's rate eta_g, > 0. The paper uses 1.
    """

    eta: float = 1.0

    unit = "model"
    own_starts = True
    takes_server_rate = False
    weighs_claims = False  # the absences are the server's own numbers
    _intervals = (("eta", "(0, 1e6]"),)

    def weigh(self, claims: Claims) -> F64:
        """eta (t - tau_i)."""
        assert claims.absences is not None  # because of own_starts
        return self.eta * claims.absences

    def step(self, cohort: Cohort) -> Step:
        """v = A / S; A has the sum of x - x_(i) too."""
        return Step(v=Linear(A=1 / cohort.S))

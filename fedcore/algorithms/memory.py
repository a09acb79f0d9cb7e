"""Methods that keep each client's last mean gradient on the server: MIFA, MimiC and their relatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcore.algorithms.base import NOTHING, Algorithm, Claims, Cohort, H, Placement, Step, Unit, choose
from fedcore.arguments import real, whole
from fedcore.arrays import F64
from fedcore.errors import RangeError
from fedcore.kernels import Linear, Terms

# MIFA: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021.


@dataclass(frozen=True)
class MIFA(Algorithm):
    """x' = x - gamma v, v = (1/N) sum over ALL clients of the last mean gradient heard from each.

    The total T is the sum of all rows, in float64: T' = T + sum over the cohort of (h_i - r_i), v = T' / N. Rows are
    gradients: no rate multiplies them, so today's rate multiplies old ones too. A round without clients still steps
    along the remembered mean. T follows the rows to float64 rounding, so a row 10^16 times the others' length leaves a
    trace of it behind; with ``Server(accumulate="exact")`` T is their sum to the last bit, and nothing leaves one.

    Args:
        wait: x stays until each client was heard once (the paper's form; rows fill and rounds count meanwhile).
            False starts at once, from rows of zero.
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
        """Once every client has a row, where x waits for that."""
        return cohort.rows == cohort.N or not self.wait


# MimiC: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates", 2023.
#
# arXiv 2306.12212, Algorithm 1.


@dataclass(frozen=True)
class MimiC(Algorithm):
    """x' = x - gamma v, v_t = (1/S) sum over the cohort of (h_i + c_i); then c_i = v_t - h_i for the clients heard.

    A client's correction is c_i = v[t_i] - r_i, t_i the round in which it was last heard and r_i its h_i of then; a
    client never heard has c_i = 0. So an update adds h_i - r_i + v[t_i].

    The corrections of all clients sum to zero, and the limit depends on it. The total T holds their sum C as stored,
    in float64, and v subtracts C / N: no change in exact arithmetic, and rounding cannot accumulate.

    Args:
        units: "gradient": rows and corrections are mean gradients, which today's rate multiplies. "update": they are
            differences of models, in which the rate of their round stays, as in the authors' public code; the curves
            differ where the rate decays, and there is no server rate.
        placement: "client": each client keeps its c_i and sends h_i + c_i (as its "gradient"; the model that it would
            have reached, x - eta K (h_i + c_i), says the same), and after the round sets c_i = v - h_i with
            ``Server.v``. The server only averages, so secure aggregation stays possible; the corrections' sum, which
            it does not see, is not centred.
        history: the server keeps the directions v[t] of so many rounds that rows refer to, and folds older ones into
            their rows (r - v[t] in place of r and v[t]). Fewer take less memory, and rewrite more rows.
    """

    units: Literal["gradient", "update"] = "gradient"
    placement: Placement = "server"
    history: int = 64

    anchor = "v[t]"

    def __post_init__(self) -> None:
        whole("history", self.history, 1, 2**31)
        choose("units", self.units, ("gradient", "update"))
        choose("placement", self.placement, ("server", "client"))

    @property
    def most_history(self) -> int:
        """The option."""
        return self.history

    @property
    def row(self) -> Terms:
        """r' = h."""
        return NOTHING if self.placement == "client" else Terms(h=1)

    @property
    def adds(self) -> Terms:
        """h_i + c_i: h_i - r_i + v[t_i], which clients that keep their c_i have done."""
        return H if self.placement == "client" else Terms(row=1, r=-1, q=1)

    @property
    def keeps_total(self) -> bool:
        """C, where the server knows the corrections."""
        return self.placement == "server"

    @property
    def total_sums_rows(self) -> bool:
        """C sums the corrections."""
        return self.placement == "server"

    @property
    def total_is_whole(self) -> bool:
        """C' = C - A + S v."""
        return True

    @property
    def unit(self) -> Unit:
        """h is x - y in units of updates."""
        return "model" if self.units == "update" else "gradient"

    @property
    def averaging_option(self) -> str:
        """Units of updates."""
        return 'units="update"'

    @property
    def takes_server_rate(self) -> bool:
        """Not in units of updates."""
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

    A client that is not heard is stood for by its last mean gradient r_i, zero if it was never heard; the cohort
    corrects the mean of those. A round without clients changes nothing.
    """

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T / N, T of before the round; T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S, T=1 / cohort.N), T=Linear(T=1, A=1))


# FedStale: Rodio, Neglia, "FedStale: leveraging stale client updates in federated learning", 2024.
#
# arXiv 2405.04171.


@dataclass(frozen=True)
class FedStale(Algorithm):
    """x' = x - gamma v, v = (1/N) [sum over the cohort of (h_i - beta r_i) / p_i + beta sum over ALL clients of r_i].

    p_i is the chance that client i is heard in a round, r_i its last mean gradient (r_i' = h_i). ``beta`` weighs what
    is remembered: 0 is FedAvg without the bias of uneven chances, 1 is FedVARP. The sum over all is of before the
    round.

    Args:
        beta: in [0, 1].
        chances: p_i, where they are known: one number in (0, 1] for all, or one for each of the clients 0..N-1; a round
            without clients then steps along what is remembered. None takes S / N, and such a round changes nothing. A
            client that has none, as one that arrives, ends the round: make a server with its chance first.
    """

    beta: float = 0.5
    chances: float | Sequence[float] | None = None

    row = Terms(h=1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True
    sums_changes = True  # A weighs them, T must not

    def __post_init__(self) -> None:
        real("beta", self.beta, "[0, 1]")
        if isinstance(self.chances, Sequence):
            listed = tuple(real("chances", chance, "(0, 1]") for chance in self.chances)
            if not listed:
                raise RangeError("chances: expected one for each client, got none: leave it out")
            object.__setattr__(self, "chances", listed)
        elif self.chances is not None:
            real("chances", self.chances, "(0, 1]")

    @property
    def adds(self) -> Terms:
        """h - beta r."""
        return Terms(row=1, r=-self.beta)

    @property
    def weighs_claims(self) -> bool:
        """False: the chances are the server's own."""
        return False

    @property
    def steps_without_clients(self) -> bool:
        """Along beta T / N, where the chances are known."""
        return self.chances is not None

    def weigh(self, claims: Claims) -> F64:
        """1 / p_i, where they are known."""
        if self.chances is None:
            return np.ones(len(claims.steps))
        if not isinstance(self.chances, Sequence):
            return np.full(len(claims.steps), 1 / self.chances)
        assert claims.clients is not None
        known = range(len(self.chances))
        for client in claims.clients:
            if client not in known:
                raise RangeError(f"chances: expected one of client {client!r}, got those of the clients 0..{known[-1]}")
        return 1 / np.array([self.chances[int(client)] for client in claims.clients], np.float64)

    def step(self, cohort: Cohort) -> Step:
        """v = A / N + beta T / N, or A / S + beta T / N; T' = T + B, the sum of all rows."""
        of_cohort = cohort.S if self.chances is None else cohort.N
        return Step(v=Linear(A=1 / of_cohort, T=self.beta / cohort.N), T=Linear(T=1, B=1))

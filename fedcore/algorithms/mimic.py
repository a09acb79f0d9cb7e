"""MimiC: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates", 2023.

arXiv 2306.12212, Algorithm 1.
"""

from dataclasses import dataclass
from typing import Literal

from fedcore.algorithms.algorithm import NOTHING, Algorithm, H, Placement, Step, Unit, choose
from fedcore.algorithms.cohort import Cohort
from fedcore.kernels import Linear, Terms


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
    """

    units: Literal["gradient", "update"] = "gradient"
    placement: Placement = "server"

    anchor = "v[t]"

    def __post_init__(self) -> None:
        choose("units", self.units, ("gradient", "update"))
        choose("placement", self.placement, ("server", "client"))

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

"""MimiC: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates", 2023.

arXiv 2306.12212, Algorithm 1.
"""

from typing import Literal

from fedcore.algorithms.algorithm import Algorithm, Cohort, Placement, Step, choose


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

    def __init__(self, units: Literal["gradient", "update"] = "gradient", placement: Placement = "server") -> None:
        choose("units", units, ("gradient", "update"))
        choose("placement", placement, ("server", "client"))
        self.units, self.placement = units, placement
        self.averages_models = units == "update"
        self.takes_server_rate = units == "gradient"
        self.adds = "h - r + v[t]" if placement == "server" else "h"
        self.keeps_total = placement == "server"

    def step(self, cohort: Cohort) -> Step:
        """v = A / S - C / N; C' = C - sum of (v[t_i] - r_i) + sum of (v - h_i) = C - A + S v."""
        if self.placement == "client":
            return Step(from_sum=1 / cohort.W)
        return Step(from_sum=1 / cohort.S, from_total=-1 / cohort.N, keep_sum=-1, keep_v=cohort.S)

"""MimiC: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates", 2023.

arXiv 2306.12212, Algorithm 1, with the corrections on the server.
"""

from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Algorithm, Cohort, Step


class MimiC(Algorithm):
    """x' = x - gamma v, v_t = (1/S) sum over the cohort of (h_i + c_i); then c_i = v_t - h_i for the clients heard.

    A client's correction is c_i = v[t_i] - r_i, t_i the round in which it was last heard and r_i its h_i of then; a
    client never heard has c_i = 0. So an update adds h_i - r_i + v[t_i].

    The corrections of all clients sum to zero, and the limit depends on it. The total T holds their sum C as stored,
    in float64, and v subtracts C / N: no change in exact arithmetic, and rounding cannot accumulate.

    Rows and corrections are in gradient units: today's rate multiplies them.
    """

    adds: ClassVar[Literal["h - r + v[t]"]] = "h - r + v[t]"
    keeps_total: ClassVar[bool] = True

    def step(self, cohort: Cohort) -> Step:
        """v = A / S - C / N; C' = C - sum of (v[t_i] - r_i) + sum of (v - h_i) = C - A + S v."""
        return Step(from_sum=1 / cohort.S, from_total=-1 / cohort.N, keep_sum=-1, keep_v=cohort.S)

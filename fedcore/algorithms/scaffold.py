"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Written as in Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024.
"""

from typing import Literal

from fedcore.algorithms.algorithm import (
    MEAN_GRADIENT,
    ROW_CHANGE,
    Algorithm,
    Cohort,
    Direction,
    Placement,
    Step,
    choose,
)

Control = Literal["derived", "sent"]


class SCAFFOLD(Algorithm):
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

    keeps_total = True

    def __init__(self, control: Control = "derived", placement: Placement = "server") -> None:
        choose("control", control, ("derived", "sent"))
        choose("placement", placement, ("server", "client"))
        self.control, self.placement = control, placement
        if placement == "client":
            self.second = ROW_CHANGE
        elif control == "sent":
            self.second = MEAN_GRADIENT
        self.adds = "h" if self.second else "raw - r"
        self.direction = Direction(from_row=-1, from_mean=1)

    def step(self, cohort: Cohort) -> Step:
        """v = the mean of h_i, and T' = the sum of all rows; c = T / N.

        With "derived", A = sum of (raw_i - c_i), and h_i = a (raw_i - c_i) + a c + from_momentum g.
        """
        if self.second:
            return Step(from_sum=1 / cohort.S, keep_control=1)
        d = self.direction
        return Step(
            from_sum=d.a / cohort.S, from_total=d.from_mean / cohort.N, from_momentum=d.from_momentum, keep_sum=1
        )

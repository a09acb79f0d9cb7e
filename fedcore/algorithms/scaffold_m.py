"""SCAFFOLD-M and SCAFFOLD-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".

ICLR 2024, arXiv 2306.16504, Algorithms 2 and 4.
"""

from fedcore.algorithms.algorithm import Direction, Placement, within
from fedcore.algorithms.scaffold import SCAFFOLD, Control


class SCAFFOLDM(SCAFFOLD):
    """A client steps along beta (grad(y) - c_i + c) + (1 - beta) g; c_i+ and c as in SCAFFOLD; g+ = (1/S) sum of h_i.

    With "derived" controls raw_i = (h_i - (1 - beta) g) / beta + c_i - c.

    Args:
        beta: in (0, 1]; 1 is SCAFFOLD.
        control, placement: as for SCAFFOLD.
        reparameterised: as for FedAvgM: a client steps along grad(y) - c_i + c + (1 - beta) g.
    """

    def __init__(
        self,
        beta: float = 0.1,
        control: Control = "derived",
        placement: Placement = "server",
        reparameterised: bool = False,
    ) -> None:
        super().__init__(control, placement)
        within("beta", beta, 0, 1)
        self.beta, self.reparameterised = beta, reparameterised
        a = 1.0 if reparameterised else beta
        self.direction = Direction(a=a, from_row=-a, from_mean=a, from_momentum=1 - beta)


class SCAFFOLDMVR(SCAFFOLD):
    """A client steps along grad(y; xi) - beta (c_i - c) + (1 - beta) (g - grad(x_{t-1}; xi)).

    c_i+, c, g+ and x' as in SCAFFOLD-M. The mean raw gradient does not follow from y here, so clients send it as
    ``control``.

    Args:
        beta: in (0, 1]; 1 is SCAFFOLD.
        placement: as for SCAFFOLD.
    """

    def __init__(self, beta: float = 0.1, placement: Placement = "server") -> None:
        super().__init__("sent", placement)
        within("beta", beta, 0, 1)
        self.beta = beta
        self.direction = Direction(b=-(1 - beta), from_row=-beta, from_mean=beta, from_momentum=1 - beta)

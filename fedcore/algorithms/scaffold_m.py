"""SCAFFOLD-M and SCAFFOLD-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".

ICLR 2024, arXiv 2306.16504, Algorithms 2 and 4.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Direction, Placement
from fedcore.algorithms.scaffold import Control, ControlVariates
from fedcore.arguments import real


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

"""FedAvg-M and FedAvg-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".

ICLR 2024, arXiv 2306.16504, Algorithms 1 and 3.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Direction, Placement, Step, choose
from fedcore.algorithms.cohort import Cohort
from fedcore.arguments import real
from fedcore.kernels import Linear


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """A client steps along beta grad(y) + (1 - beta) g; g+ = (1/S) sum of h_i; x' = x - gamma g+.

    This is momentum in the LOCAL steps (Algorithm 1, also known as FedCM). It is not the server momentum that other
    frameworks call FedAvgM (Hsu et al. 2019): that is FedAvg with ``Server(optimizer=SGD(momentum=...))``.

    Args:
        beta: the weight of the fresh gradient, in (0, 1]; 1 is FedAvg.
        reparameterised: the form of the paper's eq. 31-33, with g/beta, beta eta and beta gamma in the place of g, eta
            and gamma: a client steps along grad(y) + (1 - beta) g, and ``lr`` and ``server_lr`` are beta times those.
        placement: "client": the server sends x alone, and each client adds (1 - beta) g to its direction itself, with
            g = (x_t - x_{t+1}) / gamma from the two models (Sec. 3.1); one that was not there in round t is sent x_t
            too. Simulations do so (``engines.RecoveringClients``); elsewhere it is left to a loop of one's own.
    """

    beta: float = 0.1
    reparameterised: bool = False
    placement: Placement = "server"

    def __post_init__(self) -> None:
        real("beta", self.beta, "(0, 1]")
        choose("placement", self.placement, ("server", "client"))

    @property
    def direction(self) -> Direction:
        """beta grad(y) + (1 - beta) g, or grad(y) + (1 - beta) g; without g where clients find it themselves."""
        a = 1.0 if self.reparameterised else self.beta
        return Direction(a=a, from_momentum=0.0 if self.placement == "client" else 1 - self.beta)

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W, W = S draws: the directions that were summed hold the old momentum already."""
        return Step(v=Linear(A=1 / cohort.W))


@dataclass(frozen=True)
class FedAvgMVR(Algorithm):
    """A client steps along grad(y; xi) + (1 - beta) (g - grad(x_{t-1}; xi)), the same minibatch xi at both points.

    g+ = (1/S) sum of h_i; x' = x - gamma g+; x_{-1} = x_0 (Algorithm 3).

    Args:
        beta: in (0, 1]; 1 is FedAvg.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        real("beta", self.beta, "(0, 1]")

    @property
    def direction(self) -> Direction:
        """grad(y) + (1 - beta) (g - grad(x_{t-1}))."""
        return Direction(b=-(1 - self.beta), from_momentum=1 - self.beta)

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W, W = S draws."""
        return Step(v=Linear(A=1 / cohort.W))

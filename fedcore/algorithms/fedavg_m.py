"""FedAvg-M and FedAvg-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".

ICLR 2024, arXiv 2306.16504, Algorithms 1 and 3.
"""

from fedcore.algorithms.algorithm import Algorithm, Cohort, Direction, Step, within


class FedAvgM(Algorithm):
    """A client steps along beta grad(y) + (1 - beta) g; g+ = (1/S) sum of h_i; x' = x - gamma g+.

    This is momentum in the LOCAL steps (Algorithm 1, also known as FedCM). It is not the server momentum that other
    frameworks call FedAvgM (Hsu et al. 2019): that is FedAvg with ``Server(optimizer=SGD(momentum=...))``.

    Args:
        beta: the weight of the fresh gradient, in (0, 1]; 1 is FedAvg.
        reparameterised: the form of the paper's eq. 31-33, with g/beta, beta eta and beta gamma in the place of g, eta
            and gamma: a client steps along grad(y) + (1 - beta) g, and ``lr`` and ``server_lr`` are beta times those.
    """

    def __init__(self, beta: float = 0.1, reparameterised: bool = False) -> None:
        within("beta", beta, 0, 1)
        self.beta, self.reparameterised = beta, reparameterised
        self.direction = Direction(a=1.0 if reparameterised else beta, from_momentum=1 - beta)

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W, W = S draws: the directions that were summed hold the old momentum already."""
        return Step(from_sum=1 / cohort.W)


class FedAvgMVR(Algorithm):
    """A client steps along grad(y; xi) + (1 - beta) (g - grad(x_{t-1}; xi)), the same minibatch xi at both points.

    g+ = (1/S) sum of h_i; x' = x - gamma g+; x_{-1} = x_0 (Algorithm 3).

    Args:
        beta: in (0, 1]; 1 is FedAvg.
    """

    def __init__(self, beta: float = 0.1) -> None:
        within("beta", beta, 0, 1)
        self.beta = beta
        self.direction = Direction(b=-(1 - beta), from_momentum=1 - beta)

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W, W = S draws."""
        return Step(from_sum=1 / cohort.W)

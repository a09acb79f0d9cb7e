"""Methods with a server momentum that clients step along."""

from dataclasses import dataclass, replace

from fedcore.algorithms.base import Algorithm, Cohort, Direction, Placement, Step, choose
from fedcore.arguments import real, whole
from fedcore.kernels import Linear
from fedcore.simulation.local_rules import OneMinibatch

# FedAvg-M and FedAvg-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably".
#
# ICLR 2024, arXiv 2306.16504, Algorithms 1 and 3.


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


# MB-STORM: Patel et al., "Towards Optimal Communication Complexity in Distributed Non-Convex Optimization", 2022.
#
# CE-LSGD of the same paper is not here, for its algorithm was not at hand in print: that it goes on from MB-STORM's v_t
# by local steps along v_k = v_{k-1} + grad(y_k; xi) - grad(y_{k-1}; xi) is known, but not from a text that says which
# clients take them, and how x' is made of theirs. In any case CE-LSGD asks for two things that no method here has: a
# round of two exchanges (the v_t that is averaged first, then the local steps), and a local rule whose offset changes
# with every step (gradients at y_k and y_{k-1} on one minibatch, their difference carried along).


@dataclass(frozen=True)
class MBSTORM(FedAvgMVR):
    """v_t = (1/S) sum of [grad_i(x_t; xi) + (1 - beta) (v_{t-1} - grad_i(x_{t-1}; xi))]; x' = x - gamma v_t.

    Clients take no local steps: each spends the examples of its K minibatches on one gradient at both points. So it is
    FedAvg-M-VR with K = 1 and a K times larger minibatch. Here v_{-1} = 0 and x_{-1} = x_0, but ``Server.warm_start``
    makes v_{-1} a mean of gradients at x_0; without a server rate gamma = eta K.

    Args:
        beta: in (0, 1]; 1 is minibatch SGD.
        steps: K, how many of a client's steps along v the server goes. Cheng et al. compare with K as many as the local
            steps of the other methods (Appendix D.1).
    """

    steps: int = 1

    local_rule = OneMinibatch()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("steps", self.steps, 1)

    @property
    def says_gamma(self) -> bool:
        """Where K is more than 1."""
        return self.steps != 1

    def step(self, cohort: Cohort) -> Step:
        """v = A / W, W = S draws; gamma = K times the draws' mean of eta_i."""
        if self.steps == 1 or not cohort.S:
            return super().step(cohort)
        counts = cohort.claims.counts
        eta = float((cohort.eta_steps * counts).sum() / counts.sum())
        return replace(super().step(cohort), gamma=self.steps * eta)

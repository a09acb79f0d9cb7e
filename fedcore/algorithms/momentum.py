"""Methods whose clients use the server's momentum in their local steps."""

from dataclasses import dataclass, replace

from fedcore.algorithms.base import Algorithm, Cohort, Direction, Placement, Step
from fedcore.algorithms.local_rules import OneMinibatch
from fedcore.kernels import Linear

# FedAvg-M and FedAvg-M-VR: Cheng et al., "Momentum Benefits Non-IID Federated Learning Simply and Provably",
# ICLR 2024, arXiv 2306.16504, Algorithms 1 and 3.


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """A client steps along beta grad(y) + (1 - beta) g; g+ = (1/S) sum of h_i; x' = x - gamma g+.

    This is momentum in the LOCAL steps (Algorithm 1, also known as FedCM). Other frameworks use the name FedAvgM for
    server momentum (Hsu et al. 2019), which is ``FedAvg`` with ``Server(optimizer=SGD(momentum=...))``.

    Args:
        beta: the weight of the new gradient, in (0, 1]. With 1 this is FedAvg.
        reparameterised: whether to use the form of the paper's eq. 31-33, with g/beta, beta eta and beta gamma in place
            of g, eta and gamma. A client then steps along grad(y) + (1 - beta) g, and ``lr`` and ``server_lr`` are beta
            times those of the other form.
        placement: "server" or "client". With "client" the server sends only x. Each client computes
            g = (x_t - x_{t+1}) / gamma from two models (Sec. 3.1) and adds (1 - beta) g to its direction. A client
            that missed round t also needs x_t. In simulations ``engines.RecoveringClients`` does this; otherwise the
            caller's clients must. A server optimizer needs "server", since x then does not move along g.
    """

    beta: float = 0.1
    reparameterised: bool = False
    placement: Placement = "server"

    only_takes_mean = True
    _intervals = (("beta", "(0, 1]"),)
    _choices = (("placement", ("server", "client")),)

    @property
    def direction(self) -> Direction:
        """a grad(y) + (1 - beta) g, a = beta or 1; without g if clients compute it."""
        a = 1.0 if self.reparameterised else self.beta
        return Direction(a=a, from_momentum=0.0 if self.placement == "client" else 1 - self.beta)

    @property
    def keeps_models(self) -> str | None:
        """That clients would take the change of x for momentum, if they compute g from two models."""
        return "its clients compute g from two models; use placement='server'" if self.placement == "client" else None

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W with W = S draws; A already contains the old momentum."""
        return Step(v=Linear(A=1 / cohort.W))


@dataclass(frozen=True)
class FedAvgMVR(Algorithm):
    """A client steps along grad(y; xi) + (1 - beta) (g - grad(x_{t-1}; xi)), with one minibatch xi at both points.

    g+ = (1/S) sum of h_i; x' = x - gamma g+; x_{-1} = x_0 (Algorithm 3).

    Args:
        beta: a number in (0, 1]. With 1 this is FedAvg.
    """

    beta: float = 0.1

    _intervals = (("beta", "(0, 1]"),)

    @property
    def direction(self) -> Direction:
        """grad(y) + (1 - beta) (g - grad(x_{t-1}))."""
        return Direction(b=-(1 - self.beta), from_momentum=1 - self.beta)

    def step(self, cohort: Cohort) -> Step:
        """g+ = A / W with W = S draws."""
        return Step(v=Linear(A=1 / cohort.W))


# FedACG: Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
# arXiv 2201.03172.


@dataclass(frozen=True)
class FedACG(Algorithm):
    """Clients start from z = x + lam m and step along grad(y) + beta (y - z).

    m' = lam m + (1/S) sum over the cohort of (y_i - z); x' = x + m'. The server's model is x, and it sends z.

    Args:
        lam: the weight of the momentum, in [0, 1). With 0 this is FedProx with uniform weights.
        beta: the weight of the proximal term. The paper uses 0.85 for ``lam``, and 0.01 or 0.001 for ``beta``.
    """

    lam: float = 0.85
    beta: float = 0.01

    unit = "model"
    takes_server_rate = False
    keeps_momentum = True
    looks_ahead = True
    _intervals = (("lam", "[0, 1)"), ("beta", "[0, 1e6]"))

    @property
    def direction(self) -> Direction:
        """grad(y) + beta (y - z)."""
        return Direction(mu=self.beta)

    def step(self, cohort: Cohort) -> Step:
        """v = -m' = A / W + lam g; clients get x' + lam (x' - x)."""
        return Step(v=Linear(A=1 / cohort.W, g=self.lam), lookahead=self.lam)


# MB-STORM: Patel et al., "Towards Optimal Communication Complexity in Distributed Non-Convex Optimization", 2022.
#
# fedcore does not have CE-LSGD of the same paper. CE-LSGD continues from MB-STORM's v_t with local steps along
# v_k = v_{k-1} + grad(y_k; xi) - grad(y_{k-1}; xi). No text available to us defines which clients take these steps and
# how x' follows. CE-LSGD would also need two exchanges in a round (the average v_t, then the local steps), and a local
# rule whose offset changes with every step.


@dataclass(frozen=True)
class MBSTORM(FedAvgMVR):
    """v_t = (1/S) sum of [grad_i(x_t; xi) + (1 - beta) (v_{t-1} - grad_i(x_{t-1}; xi))]; x' = x - gamma v_t.

    Clients take no local steps. Each client uses the examples of its K minibatches for one gradient at each point. So
    this is FedAvg-M-VR with one local step and a K times larger minibatch. Initially v_{-1} = 0 and x_{-1} = x_0;
    ``Server.warm_start`` sets v_{-1} to a mean of gradients at x_0. Without a server rate gamma = eta K.

    Args:
        beta: a number in (0, 1]. With 1 this is minibatch SGD.
        steps: K, the number of client steps along v that equal the server's step. Cheng et al. set K to the local steps
            of the other methods (Appendix D.1).
    """

    steps: int = 1

    local_rule = OneMinibatch()
    _intervals = (("steps", (1, None)),)  # type: ignore[assignment]

    @property
    def sets_gamma(self) -> bool:
        """Whether K > 1."""
        return self.steps != 1

    def step(self, cohort: Cohort) -> Step:
        """v = A / W with W = S draws; gamma = K times the mean of eta_i over the draws."""
        if self.steps == 1 or not cohort.S:
            return super().step(cohort)
        counts = cohort.claims.counts
        eta = float((cohort.eta_steps * counts).sum() / counts.sum())
        return replace(super().step(cohort), gamma=self.steps * eta)

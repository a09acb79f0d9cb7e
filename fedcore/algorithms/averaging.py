"""Methods that average the clients' models or mean gradients: FedAvg and its relatives."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedcore.algorithms.base import Algorithm, Claims, Cohort, Direction, Step, choose
from fedcore.arguments import real, whole
from fedcore.arrays import F64
from fedcore.kernels import Linear
from fedcore.simulation.local_rules import FullGradient, LocalRule, Sgd

# FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.


Weights: TypeAlias = Literal["uniform", "examples"]


class WeightedMean(Algorithm):
    """v = sum_i w_i h_i / W over the cohort; a method of that kind has ``weights`` among its options."""

    weights: Weights

    unit = "model"

    def __post_init__(self) -> None:
        choose("weights", self.weights, ("uniform", "examples"))

    @property
    def weighs_claims(self) -> bool:
        """True where it weighs by examples."""
        return self.weights == "examples"

    def weigh(self, claims: Claims) -> F64:
        """w_i, once for each time that the client was drawn."""
        return claims.examples * claims.counts if self.weights == "examples" else claims.counts

    def step(self, cohort: Cohort) -> Step:
        """v = A / W."""
        return Step(v=Linear(A=1 / cohort.W))


@dataclass(frozen=True)
class FedAvg(WeightedMean):
    """x' = x - gamma v, v = sum_i w_i h_i / W over the cohort.

    Without a server rate this is the average of the clients' models, x' = x + sum_i (w_i / W) (y_i - x).

    Args:
        weights: "examples", w_i = n_i (McMahan), or "uniform", w_i = 1 (MimiC paper, eq. 4-5).
    """

    weights: Weights = "examples"


# FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.


@dataclass(frozen=True)
class FedProx(WeightedMean):
    """FedAvg's server; a client steps along grad(y) + mu (y - x).

    Args:
        mu: the weight of the proximal term; 0 is FedAvg.
        weights: as for FedAvg.
    """

    mu: float = 0.01
    weights: Weights = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu != 0:
            real("mu", self.mu, "(0, 1e6]")

    @property
    def direction(self) -> Direction:
        """grad(y) + mu (y - x)."""
        return Direction(mu=self.mu)


# FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization".
#
# NeurIPS 2020, arXiv 2007.07481.


@dataclass(frozen=True)
class FedNova(Algorithm):
    """x' = x - (sum p_i eta_i a_i) sum_i p_i (x - y_i) / (eta_i a_i), p_i = n_i / sum of the cohort's n.

    a_i is the length of client i's accumulation: K_i for plain steps, so that the sums are over means h_i of gradients
    however many steps each does. With equal K_i this is FedAvg.

    Args:
        momentum: rho in [0, 0.9999] of the clients' local steps (``LocalOptions(momentum=)`` in simulations), where
            a_i = [K_i - rho (1 - rho^K_i) / (1 - rho)] / (1 - rho).
    """

    momentum: float = 0.0

    says_gamma = True

    def __post_init__(self) -> None:
        real("momentum", self.momentum, "[0, 0.9999]")

    def accumulation(self, steps: F64) -> F64:
        """a_i, float64[k]."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def weigh(self, claims: Claims) -> F64:
        """n_i K_i / a_i, since h_i = (x - y_i) / (eta_i K_i)."""
        return claims.examples * claims.counts * claims.steps / self.accumulation(claims.steps)

    def step(self, cohort: Cohort) -> Step:
        """v = A / sum of n; gamma = sum of p_i eta_i a_i, K_i no longer than the server believes."""
        steps, examples = cohort.claims.steps, cohort.claims.examples * cohort.claims.counts
        lengths = cohort.eta_steps * self.accumulation(steps) / steps
        return Step(v=Linear(A=1 / examples.sum()), gamma=float(examples @ lengths / examples.sum()))


# FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.
#
# arXiv 2301.09604.


@dataclass(frozen=True)
class FedExP(Algorithm):
    """x' = x - gamma D, D = (1/S) sum of d_i, d_i = x - y_i; gamma = max(1, sum |d_i|^2 / (2 S (|D|^2 + epsilon))).

    The more the clients' moves cancel, the longer the server's step. It is FedAvg of uniform weights where they agree.
    So two clients that send long opposite moves lengthen it at will: bound them (the rule ``RejectLong``).
    The paper judges the mean of the last two models, which oscillate less.

    Args:
        epsilon: keeps the step short where D is small, in [1e-9, 1e9]; the paper takes values from 1e-3 to 0.1.
    """

    epsilon: float = 1e-3

    unit = "model"
    says_gamma = True
    needs_square_of_sum = True
    takes_server_rate = False

    def __post_init__(self) -> None:
        real("epsilon", self.epsilon, "[1e-9, 1e9]")

    def step(self, cohort: Cohort) -> Step:
        """v = D = A / W, W = S draws."""
        S = cohort.W
        extrapolated = float(cohort.squares @ cohort.weights) / (2 * S * (cohort.square_of_sum / S**2 + self.epsilon))
        return Step(v=Linear(A=1 / S), gamma=max(1.0, extrapolated))


# LFGD and LFSGD: Haddadpour and Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019.
#
# arXiv 1910.14425, Algorithm 1.


@dataclass(frozen=True)
class LocalDescent(Algorithm):
    """x' = the plain mean of the drawn clients' models: (1/K) sum over the draws of y_j.

    Clients are drawn WITH replacement with probabilities q; one that is drawn twice counts twice (``count``).
    Rates are those of the theorems, in ``fedcore.algorithms.rates``.

    Args:
        full_gradient: local steps along the client's full gradient (LFGD) instead of minibatches (LFSGD).
    """

    full_gradient: bool = False

    unit = "model"

    @property
    def local_rule(self) -> LocalRule:
        """Full gradients, where they are asked for."""
        return FullGradient() if self.full_gradient else Sgd()

    def step(self, cohort: Cohort) -> Step:
        """v = A / K, K the draws."""
        return Step(v=Linear(A=1 / cohort.W))


# Flexible device participation: Ruan et al., "Towards Flexible Device Participation in Federated Learning", 2021.
#
# AISTATS 2021, eq. 2 and Sec. 4.


@dataclass(frozen=True)
class FlexibleFedAvg(Algorithm):
    """x' = x + sum_k p_t^k (y_k - x), with p^k = n_k / n over ALL registered clients (``Server(clients={id: n_k})``).

    * Scheme A: p_t^k = N p^k / K_t for the devices that did all E steps, K_t their number; the others are left out,
      and a round without any is discarded.
    * Scheme B: p_t^k = p^k; incomplete work is taken as it is.
    * Scheme C: p_t^k = (E / s_k) p^k for s_k steps done.

    After an arrival (``Server.arrive``) the shares are those of the new objective, n_k / (n + n_l). With the fast
    reboot the newcomer's p^l is multiplied by 1 + 2 / (t - t0)^2: 3 in the first round after t0, and down to 1
    (Sec. 4.2). The rate should restart as well: ``rates.Staircase``.

    Args:
        scheme: "A", "B" or "C".
        local_steps: E, the steps of a complete client's work. Needed by A and C, where a client that claims more is
            refused.
        reboot: "fast" or "vanilla", whether a newcomer's share is boosted.
    """

    scheme: Literal["A", "B", "C"] = "C"
    local_steps: int = 1
    reboot: Literal["fast", "vanilla"] = "fast"

    unit = "model"
    takes_server_rate = False
    needs_shares = True

    def __post_init__(self) -> None:
        choose("scheme", self.scheme, ("A", "B", "C"))
        choose("reboot", self.reboot, ("fast", "vanilla"))
        whole("local_steps", self.local_steps, 1)

    @property
    def weighs_claims(self) -> bool:
        """False: the shares are the server's own."""
        return False

    @property
    def most_steps(self) -> int | None:
        """E, of which schemes A and C know."""
        return None if self.scheme == "B" else self.local_steps

    def weigh(self, claims: Claims) -> F64:
        """p_t^k, without scheme A's factor N / K_t."""
        assert claims.shares is not None  # the server has seen to it
        p = claims.shares
        if self.reboot == "fast" and claims.ages is not None:
            p = p * (1 + 2 / claims.ages**2)
        if self.scheme == "A":
            return p * (claims.steps >= self.local_steps)
        return p * (self.local_steps / claims.steps) if self.scheme == "C" else p

    def step(self, cohort: Cohort) -> Step:
        """v = sum_k p_t^k (x - y_k); gamma is 1."""
        return Step(v=Linear(A=cohort.devices / cohort.weighed if self.scheme == "A" else 1))

"""Methods that average the clients' models or mean gradients."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedcore.algorithms.base import Algorithm, Claims, Cohort, Direction, Step
from fedcore.algorithms.local_rules import FullGradient, LocalRule, Sgd
from fedcore.arrays import F64
from fedcore.kernels import Linear

# FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.


Weights: TypeAlias = Literal["uniform", "examples"]


class WeightedMean(Algorithm):
    """v = sum_i w_i h_i / W over the cohort. Subclasses have the option ``weights``."""

    weights: Weights

    unit = "model"
    only_takes_mean = True
    _choices = (("weights", ("uniform", "examples")),)

    @property
    def weighs_claims(self) -> bool:
        """Whether the weights are numbers of examples."""
        return self.weights == "examples"

    def weigh(self, claims: Claims) -> F64:
        """Return w_i times the number of draws of each client."""
        return claims.examples * claims.counts if self.weights == "examples" else claims.counts

    def step(self, cohort: Cohort) -> Step:
        """v = A / W."""
        return Step(v=Linear(A=1 / cohort.W))


@dataclass(frozen=True)
class FedAvg(WeightedMean):
    """x' = x - gamma v, v = sum_i w_i h_i / W over the cohort.

    Without a server rate, x' is the average of the clients' models: x' = x + sum_i (w_i / W) (y_i - x).

    Args:
        weights: "examples" for w_i = n_i (McMahan), or "uniform" for w_i = 1 (MimiC paper, eq. 4-5).
    """

    weights: Weights = "examples"


# FedAsync: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019, arXiv 1903.03934.


@dataclass(frozen=True)
class FedAsync(Algorithm):
    """x' = (1 - a) x + a y_i, a = alpha s(tau), for an update of age tau; s is ``RoundPolicy(discount=)``.

    Use it with ``RoundPolicy(buffer=1, max_staleness=S)``. In a round of k updates x' = x - (1/k) sum of a_i (x - y_i).
    x is always the present model, so the server keeps no past models, and late updates must be models.

    Args:
        alpha: the share of a fresh update, in (0, 1].
    """

    alpha: float = 0.6

    unit = "model"
    takes_server_rate = False
    mixes_models = True
    _intervals = (("alpha", "(0, 1]"),)

    def step(self, cohort: Cohort) -> Step:
        """v = alpha A / W, W = k draws."""
        return Step(v=Linear(A=self.alpha / cohort.W))


# FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.


@dataclass(frozen=True)
class FedProx(WeightedMean):
    """FedAvg with a proximal term: a client steps along grad(y) + mu (y - x).

    Args:
        mu: the weight of the proximal term. With 0 this is FedAvg.
        weights: as for ``FedAvg``.
    """

    mu: float = 0.01
    weights: Weights = "examples"

    _intervals = (("mu", "[0, 1e6]"),)

    @property
    def direction(self) -> Direction:
        """grad(y) + mu (y - x)."""
        return Direction(mu=self.mu)


# FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
# NeurIPS 2020, arXiv 2007.07481.


@dataclass(frozen=True)
class FedNova(Algorithm):
    """x' = x - (sum p_i eta_i a_i) sum_i p_i (x - y_i) / (eta_i a_i), p_i = n_i / sum of the cohort's n.

    a_i is the l1 norm of client i's accumulation vector. For plain steps a_i = K_i, so the sum is over mean gradients
    h_i. With equal K_i this is FedAvg.

    Args:
        momentum: rho in [0, 0.9999] of the clients' local steps (``LocalOptions(momentum=)`` in simulations). Then
            a_i = [K_i - rho (1 - rho^K_i) / (1 - rho)] / (1 - rho).
    """

    momentum: float = 0.0

    sets_gamma = True
    _intervals = (("momentum", "[0, 0.9999]"),)

    def accumulation(self, steps: F64) -> F64:
        """a_i, float64[k]."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def weigh(self, claims: Claims) -> F64:
        """n_i K_i / a_i, since h_i = (x - y_i) / (eta_i K_i)."""
        return claims.examples * claims.counts * claims.steps / self.accumulation(claims.steps)

    def step(self, cohort: Cohort) -> Step:
        """v = A / sum of n; gamma = sum of p_i eta_i a_i, with capped K_i."""
        steps, examples = cohort.claims.steps, cohort.claims.examples * cohort.claims.counts
        lengths = cohort.eta_steps * self.accumulation(steps) / steps
        return Step(v=Linear(A=1 / examples.sum()), gamma=float(examples @ lengths / examples.sum()))


# FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
# arXiv 2301.09604.


@dataclass(frozen=True)
class FedExP(Algorithm):
    """x' = x - gamma D, D = (1/S) sum of d_i, d_i = x - y_i; gamma = max(1, sum |d_i|^2 / (2 S (|D|^2 + epsilon))).

    The server's step grows as the clients' updates cancel. If all updates are equal, this is FedAvg with uniform
    weights. Two clients with large opposite updates can make the step arbitrarily large. The rule ``RejectLong`` limits
    such updates. The paper evaluates the mean of the last two models, which oscillates less.

    Args:
        epsilon: a number in [1e-9, 1e9] that limits the step if D is small. The paper uses values from 1e-3 to 0.1.
    """

    epsilon: float = 1e-3

    unit = "model"
    sets_gamma = True
    needs_square_of_sum = True
    takes_server_rate = False
    _intervals = (("epsilon", "[1e-9, 1e9]"),)

    def step(self, cohort: Cohort) -> Step:
        """v = D = A / W, W = S draws."""
        S = cohort.W
        extrapolated = float(cohort.squares @ cohort.weights) / (2 * S * (cohort.square_of_sum / S**2 + self.epsilon))
        return Step(v=Linear(A=1 / S), gamma=max(1.0, extrapolated))


# q-FedAvg: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv 1905.10497.


@dataclass(frozen=True)
class QFedAvg(Algorithm):
    """x' = x - sum_i F_i^q L d_i / sum_i [q F_i^(q-1) |L d_i|^2 + L F_i^q], d_i = x - y_i, L = 1 / eta (Algorithm 2).

    F_i is the mean loss of x over client i's examples, which the client reports. The step decreases the mean of
    F_i^(q+1), so clients with larger losses count more. The sums are over the cohort, or over its draws. A client can
    report any loss >= 0, and a dishonest one could decide the step.

    Args:
        q: the weight of fairness, in [0, 100]. The paper chooses it for each data set, from 0.001 to 5. With 0, clients
            need not report losses, and this is FedAvg with uniform weights. If the F_i^q of a round sum to less than
            2^-40 (exact sums) or 2^-100 (float32 sums), the round ends with a RangeError. Default: 0.
    """

    q: float = 0.0

    unit = "model"
    sets_gamma = True
    takes_server_rate = False
    weighs_claims = False  # losses are not examples
    _intervals = (("q", "[0, 100]"),)

    @property
    def needs_loss(self) -> bool:
        """Whether q > 0."""
        return bool(self.q > 0)

    def weigh(self, claims: Claims) -> F64:
        """F_i^q times the number of draws."""
        return self._power(claims, self.q) * claims.counts

    def step(self, cohort: Cohort) -> Step:
        """v = A / W; gamma = L W / sum of [q F_i^(q-1) |L d_i|^2 + L F_i^q]."""
        claims, W = cohort.claims, cohort.W
        L = float((claims.steps / cohort.eta_steps).mean())
        more = self.q * self._power(claims, self.q - 1) * cohort.squares @ claims.counts
        return Step(v=Linear(A=1 / W), gamma=float(W / (L * more + W)))

    def _power(self, claims: Claims, power: float) -> F64:
        """Return F_i^power, with 1e-10 added to F_i as in the authors' code, in 1e-300..1e30: finite and > 0."""
        if claims.losses is None:
            return np.ones(len(claims.steps))
        with np.errstate(over="ignore"):
            return np.clip((claims.losses + 1e-10) ** power, 1e-300, 1e30)


# FedAU: Wang, Ji, "A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging",
# ICLR 2024, arXiv 2306.03401.


@dataclass(frozen=True)
class FedAU(Algorithm):
    """x' = x - gamma v, v = (1/N) sum over the cohort of w_i h_i (Algorithm 1).

    w_i estimates 1 / p_i, the inverse of the probability that client i takes part in a round. It is the mean of the
    intervals between the client's appearances until this round, and 1 before the first interval ended (Algorithm 2).
    The first interval starts with the client's first round, so a client that replies in every round has w_i = 1.

    Args:
        cutoff: K, the longest interval in rounds. A longer absence counts as several intervals of K rounds, so
            w_i <= K. Smaller values have less variance and more bias. The paper uses 50.
    """

    cutoff: int = 50

    weighs_claims = False  # the intervals are the server's own numbers
    _intervals = (("cutoff", (1, 2**31)),)

    def weigh(self, claims: Claims) -> F64:
        """The mean intervals."""
        assert claims.intervals is not None  # because of cutoff
        return claims.intervals

    def step(self, cohort: Cohort) -> Step:
        """v = A / N."""
        return Step(v=Linear(A=1 / cohort.N))


# LFGD and LFSGD: Haddadpour and Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
# arXiv 1910.14425, Algorithm 1.


@dataclass(frozen=True)
class LocalDescent(Algorithm):
    """x' = the plain mean of the drawn clients' models: (1/K) sum over the draws of y_j.

    Clients are drawn WITH replacement with probabilities q. A client that is drawn twice counts twice (``count``).
    ``fedcore.algorithms.rates`` has the rates of the theorems.

    Args:
        full_gradient: whether clients step along their full gradients (LFGD) or along minibatch gradients (LFSGD).
    """

    full_gradient: bool = False

    unit = "model"

    @property
    def local_rule(self) -> LocalRule:
        """Full gradients with ``full_gradient``, else minibatches."""
        return FullGradient() if self.full_gradient else Sgd()

    def step(self, cohort: Cohort) -> Step:
        """v = A / K with K draws."""
        return Step(v=Linear(A=1 / cohort.W))


# Flexible device participation: Ruan et al., "Towards Flexible Device Participation in Federated Learning", 2021,
# AISTATS 2021, eq. 2 and Sec. 4.


@dataclass(frozen=True)
class FlexibleFedAvg(Algorithm):
    """x' = x + sum_k p_t^k (y_k - x), with p^k = n_k / n over ALL registered clients (``Server(clients={id: n_k})``).

    * Scheme A: p_t^k = N p^k / K_t for the K_t devices that did all E steps. The round ignores the others. If K_t = 0,
      x does not change.
    * Scheme B: p_t^k = p^k, even for incomplete work.
    * Scheme C: p_t^k = (E / s_k) p^k for s_k steps.

    After ``Server.add_clients`` the shares are those of the new objective, n_k / (n + n_l). The fast reboot multiplies
    the new client's p^l by 1 + 2 / (t - t0)^2, which is 3 in the first round after t0 and decreases to 1 (Sec. 4.2).
    The learning rate should restart too: ``rates.Staircase``.

    Args:
        scheme: "A", "B" or "C".
        local_steps: E, the steps of a client that completes its work. With schemes A and C the server rejects an
            update that reports more steps.
        reboot: "fast" to increase a new client's share for its first rounds, or "vanilla" to leave it.
    """

    scheme: Literal["A", "B", "C"] = "C"
    local_steps: int = 1
    reboot: Literal["fast", "vanilla"] = "fast"

    unit = "model"
    takes_server_rate = False
    needs_shares = True
    weighs_claims = False  # the shares are the server's own numbers
    _choices = (("scheme", ("A", "B", "C")), ("reboot", ("fast", "vanilla")))
    _intervals = (("local_steps", (1, None)),)

    @property
    def most_steps(self) -> int | None:
        """E for schemes A and C, None for scheme B."""
        return None if self.scheme == "B" else self.local_steps

    @property
    def fewest_steps(self) -> int:
        """E for scheme A."""
        return self.local_steps if self.scheme == "A" else 1

    def weigh(self, claims: Claims) -> F64:
        """p_t^k, without scheme A's factor N / K_t."""
        assert claims.shares is not None  # because of needs_shares
        p = claims.shares
        if self.reboot == "fast" and claims.ages is not None:
            p = p * (1 + 2 / claims.ages**2)
        if self.scheme == "A":
            return p * (claims.steps >= self.local_steps)
        return p * (self.local_steps / claims.steps) if self.scheme == "C" else p

    def step(self, cohort: Cohort) -> Step:
        """v = sum_k p_t^k (x - y_k); gamma is 1."""
        return Step(v=Linear(A=cohort.devices / cohort.weighed if self.scheme == "A" else 1))

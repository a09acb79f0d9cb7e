"""The choice of beta, rates and warm starts for the momentum methods: in numbers, and in runs with noise."""

import math

import numpy as np
import pytest

from bench.papers.theory.momentum import momentum_rates
from fedcore import Server
from fedcore.algorithms import named
from fedcore.errors import FedcoreError
from tests.theory.quadratics import Clients
from tests.theory.test_bounds import follow, gap

GIVEN = dict(rounds=100, steps=5, clients=20, L=2.0, gap=8.0, noise=40.0, spread=9.0)


def limits(method, R, K, N, S, L, D, sigma, G0, beta, gamma):
    """The limits of beta, gamma and eta K L, and B, as the paper prints them, with c = 1 (eqs. 19, 27, 28, 30)."""
    v = sigma**2 * R
    if method == "FedAvgM":
        eta = 1, 1 / (beta * gamma * L * R), math.sqrt(L * D / (G0 * beta**3 * R)), (beta * N) ** -0.5
        eta = *eta, (beta**3 * N * K) ** -0.25
        return (1, math.sqrt(N * K * L * D / v)), (1 / (24 * L), beta / (6 * L)), eta, 0
    if method == "FedAvgMVR":
        eta = math.sqrt(L * D / (G0 * gamma * L * R)), math.sqrt(beta / N), (beta / (N * K)) ** 0.25
        betas = 1, (N * K * L**2 * D**2 / (sigma**4 * R**2)) ** (1 / 3)
        return betas, (1 / (24 * L), math.sqrt(beta * N * K / (54 * L**2))), eta, K / (R * beta**2)
    if method == "SCAFFOLDM":
        betas = 1, S / N ** (2 / 3), math.sqrt(L * D * S * K / v), math.sqrt(L * D * S**2 / (G0 * N))
        return betas, (beta / L,), (S**-0.5, 1 / (beta * K**0.25), math.sqrt(S) / N), N * K / (S * R)
    eta = math.sqrt(beta / S), (beta / (S * K)) ** 0.25
    B = max(S * K / (N * R * beta**2), N * K / (S * R))
    return (S / N, (K * L * D / v) ** (2 / 3) * S ** (1 / 3)), (1 / L, math.sqrt(beta * S) / L), eta, B


def active(value, found):
    """The number of the smallest limit, which the value meets and 1.01 times the value exceeds."""
    assert value <= min(found) * (1 + 1e-9)
    assert 1.01 * value > min(found)
    return int(np.argmin(found))


@pytest.mark.parametrize(("method", "count"), [("FedAvgM", 9), ("FedAvgMVR", 7), ("SCAFFOLDM", 8), ("SCAFFOLDMVR", 6)])
def test_each_number_meets_the_least_of_the_papers_limits(method, count):
    """In random cases, in which each limit is the least one at least once."""
    rng, met = np.random.default_rng(0), set()
    for _ in range(400):
        R, K, N = (int(10**x) for x in rng.uniform(0, [4, 2, 3]))
        S = int(rng.integers(1, N + 1)) if method.startswith("SCAFFOLD") else N
        L, D, sigma, G0 = (10.0**x for x in rng.uniform(-2, 2, 4))
        made = momentum_rates(
            method, rounds=R, steps=K, clients=N, cohort=S, L=L, gap=D, noise=sigma, spread=G0 * L * D
        )
        beta, gamma, eta, B = limits(method, R, K, N, S, L, D, sigma, G0 * L * D, made.beta, made.server_lr)
        met |= {("beta", active(made.beta, beta)), ("gamma", active(made.server_lr, gamma))}
        met.add(("eta", active(10 * made.lr * K * L, eta)))  # The unprinted constant is 1/10 here.
        cold = method == "FedAvgMVR" and made.beta == 1  # This is FedAvg, which has no g.
        assert made.minibatches == 0 if cold else B * (1 - 1e-9) <= made.minibatches < B + 1
    assert len(met) == count


@pytest.mark.parametrize("method", ["SCAFFOLDM", "SCAFFOLDMVR"])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 40.0])
def test_every_cohort_has_a_valid_beta(method, noise):
    betas = [momentum_rates(method, **GIVEN | {"noise": noise}, cohort=S).beta for S in range(1, 21)]
    assert betas == sorted(betas) or method == "SCAFFOLDMVR"
    assert all(named(method, beta=beta) for beta in betas)
    assert (betas[-1] == 1.0) == (noise < 40)


@pytest.mark.parametrize("method", ["FedAvgM", "SCAFFOLDM", "FedAvgMVR", "SCAFFOLDMVR"])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 40.0])
def test_a_start_is_warm_if_the_method_takes_a_warm_start(method, noise):
    made = momentum_rates(method, **GIVEN | {"noise": noise})
    assert named(method, beta=made.beta).takes_warm_start == (made.minibatches > 0)


ORDERS = {
    "FedAvgM": lambda left, sigma, N, S, K, _: math.sqrt(left * sigma**2 / (N * K)) + left,
    "SCAFFOLDM": lambda left, sigma, N, S, K, differ: (
        math.sqrt(left * sigma**2 / (S * K)) + (1 + (N ** (2 / 3) + math.sqrt(N * differ)) / S) * left
    ),
    "FedAvgMVR": lambda left, sigma, N, S, K, _: (left * sigma / (N * K)) ** (2 / 3) + left,
    "SCAFFOLDMVR": lambda left, sigma, N, S, K, _: (
        (left * sigma / (S * math.sqrt(K))) ** (2 / 3) + (1 + math.sqrt(N) / S) * left
    ),
}
"""The order of the mean of |grad f|^2 by left = L gap / R and differ = G0 / (L gap)."""


class Problem:
    """Clients, x_0, and minibatches with different Hessians, so that differences of gradients have noise.

    Args:
        heard: S.
        added: the standard deviation of a minibatch's addend to each coordinate of a gradient.
        part: a minibatch's Hessian is 1 - part or 1 + part of the client's, at random for each coordinate.
    """

    def __init__(self, clients, x, *, heard, steps, added=0.0, part=0.0):
        self.clients, self.x, self.heard, self.steps, self.added, self.part = clients, x, heard, steps, added, part
        self.spread = float(np.mean(np.sum(clients.gradient(range(clients.N), x) ** 2, axis=1)))
        self.L, self.gap = float(clients.a.max()) * (1 + part), gap(clients, x)
        self.sigma = math.sqrt(added**2 * clients.n + part**2 * self.spread)

    def chosen(self, method, R):
        shape = dict(rounds=R, steps=self.steps, clients=self.clients.N, cohort=self.heard)
        return momentum_rates(method, **shape, L=self.L, gap=self.gap, noise=self.sigma, spread=self.spread)

    def over_the_order(self, method, R, made, order=None):
        """The mean of |grad f|^2 over R rounds with that choice, divided by the order of the method's theorem."""
        clients, rng = self.clients, np.random.default_rng(R)
        N, n = clients.N, clients.n
        algorithm, x = named(method, beta=made.beta), self.x.astype(np.float32)
        server = Server(x, algorithm, clients=N, lr=made.lr, server_lr=made.server_lr)
        if made.minibatches:
            mean = self.sigma / math.sqrt(n * made.minibatches)
            server.warm_start({i: np.float32(clients.gradient(i, x) + mean * rng.normal(size=n)) for i in range(N)})
        met, _ = follow(
            server,
            clients,
            lambda t: rng.choice(N, self.heard, replace=False).tolist(),
            R,
            steps=self.steps,
            noise=lambda shape: (1 + self.part * rng.choice([-1, 1], shape), self.added * rng.normal(size=shape)),
        )
        units = self.L * self.gap
        order = ORDERS[order or method](units / R, self.sigma, N, self.heard, self.steps, self.spread / units)
        return float(np.mean(met)) / order


@pytest.mark.parametrize(("method", "heard"), [("FedAvgM", 8), ("SCAFFOLDM", 2), ("SCAFFOLDMVR", 2)])
def test_the_mean_squared_gradient_has_the_order_of_the_theorem(method, heard):
    """Up to one constant for all R, with different minimisers, some or all clients, and much noise."""
    clients = Clients(8, 20, seed=2)
    clients.o = clients.o * 5
    problem = Problem(clients, np.zeros(20), heard=heard, steps=3, added=60.0, part=0.9)
    assert 1 < max(problem.over_the_order(method, R, problem.chosen(method, R)) for R in (30, 240)) < 8


def test_theorem_2_needs_momentum_and_the_gradient_at_the_old_model():
    """FedAvg-M-VR with all clients, noise and eq. 27's rates: the mean of |grad f|^2 over the order is bounded in R.

    With beta = 1, which is FedAvg, and without the gradient at the old model, which is FedAvg-M, it grows with R.
    """
    clients = Clients(2, 20, seed=2)
    problem = Problem(clients, clients.optimum() + 1, heard=2, steps=16, added=60.0, part=0.3)
    short, long = ((R, problem.chosen("FedAvgMVR", R)) for R in (40, 400))
    met = [problem.over_the_order("FedAvgMVR", *run) for run in (short, long)]
    assert 2 < max(met) < 8
    for method, beta in (("FedAvgM", None), ("FedAvgMVR", 1.0)):
        wrong = [
            problem.over_the_order(method, R, made._replace(beta=beta or made.beta, minibatches=0), order="FedAvgMVR")
            for R, made in (short, long)
        ]
        assert wrong[1] > 1.5 * max(wrong[0], met[1])


@pytest.mark.parametrize(
    ("method", "N", "S", "far", "added"),
    [
        ("FedAvgM", 2, 2, 50, 0.5),
        ("FedAvgMVR", 2, 2, 50, 2.0),
        ("SCAFFOLDM", 16, 1, 0.3, 0.5),
        ("SCAFFOLDMVR", 16, 1, 50, 0.5),
    ],
)
def test_with_little_noise_gamma_and_the_warm_start_are_needed(method, N, S, far, added):
    """With little noise a quarter of gamma is too slow, and without B the -VR methods start in a wrong direction."""
    clients, R = Clients(N, 4, seed=1), 150
    clients.o = clients.o * far
    problem = Problem(clients, clients.optimum() + 1, heard=S, steps=2, added=added)
    made = problem.chosen(method, R)
    ratio = problem.over_the_order(method, R, made)
    assert 0.5 < ratio < 8
    assert problem.over_the_order(method, R, made._replace(server_lr=made.server_lr / 4)) > 2 * ratio
    if method.endswith("VR"):
        assert problem.over_the_order(method, R, made._replace(minibatches=0)) > 2 * ratio


def test_fedavg_m_needs_its_beta():
    """With beta = 1, which is FedAvg, local steps keep a drift of the order eta K L times the spread.

    Half of the coordinates have all of the gap, the other half all of the spread. The unprinted constant of eta is 1
    here: FedAvg-M bears the larger rate, and FedAvg does not.
    """
    clients, R = Clients(2, 4, seed=0), 300
    clients.a = np.array([[2, 2, 2, 2], [2, 2, 0.2, 0.2]])
    clients.o = np.array([[0, 0, 150, 150], [0, 0, -1500, -1500]])
    problem = Problem(clients, np.array([1.0, 1, 0, 0]), heard=2, steps=6, added=12.0)
    made = problem.chosen("FedAvgM", R)
    made = made._replace(lr=10 * made.lr)
    ratio = problem.over_the_order("FedAvgM", R, made)
    assert 2 < ratio < 8
    assert problem.over_the_order("FedAvgM", R, made._replace(beta=1.0)) > 1.5 * ratio


def test_scaffold_m_vr_needs_its_beta():
    """With beta = 1, which is SCAFFOLD, and the same warm start, much noise remains."""
    clients, R = Clients(2, 8, seed=1), 250
    clients.o = clients.o * 3
    problem = Problem(clients, clients.optimum() + 1, heard=1, steps=1, added=11.0)
    made = problem.chosen("SCAFFOLDMVR", R)
    ratio = problem.over_the_order("SCAFFOLDMVR", R, made)
    assert 0.5 < ratio < 8
    assert problem.over_the_order("SCAFFOLDMVR", R, made._replace(beta=1.0)) > 5 * ratio


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "FedAvg"}, "FedAvgM"),
        ({"cohort": 3}, "cohort.*SCAFFOLDM$"),
        ({"method": "FedAvgMVR", "cohort": 3}, "cohort.*SCAFFOLDMVR$"),
        ({"noise": 1e160}, "L: "),
        ({"method": "SCAFFOLDMVR", "gap": 1e-300, "noise": 1e40}, "L: "),
        ({"L": 1e-200, "gap": 1e-200}, "L: "),
        ({"spread": 1e300, "gap": 1e-300, "noise": 0.0}, "L: "),
        ({"rounds": 10**400}, "rounds"),
        ({"method": "SCAFFOLDM", "cohort": 21}, "cohort"),
        ({"rounds": 0}, "rounds"),
        ({"steps": 0}, "steps"),
        ({"clients": 0}, "clients"),
        ({"L": 0.0}, "L"),
        ({"gap": 0.0}, "gap"),
        ({"noise": -1.0}, "noise"),
        ({"spread": math.inf}, "spread"),
    ],
)
def test_wrong_numbers_are_rejected(wrong, words):
    with pytest.raises(FedcoreError, match=words):
        momentum_rates(**{"method": "FedAvgM"} | GIVEN | wrong)

"""The choice of beta, rates and warm starts for the momentum methods: in numbers, and in runs with noise."""

import math

import numpy as np
import pytest

from bench.papers.theory.momentum import MomentumRates, momentum_rates
from fedcore import Server
from fedcore.algorithms import named
from fedcore.errors import FedcoreError
from tests.theory.quadratics import Clients
from tests.theory.test_bounds import follow, gap

GIVEN = dict(rounds=100, steps=5, clients=20, L=2.0, gap=8.0, noise=40.0, spread=9.0)


def test_choices_in_numbers():
    # beta = sqrt(2 * 8 / 100 * 20 * 5) / 40; gamma = beta / 6 / 2; eta = .1 (beta S)^(-1/2) / (5 * 2)
    expected = MomentumRates(0.1, 0.1 / 12, 0.01 / math.sqrt(2), 0)
    assert momentum_rates("FedAvgM", **GIVEN) == pytest.approx(expected)
    # As above with 5 clients, and B = N K / (S R).
    expected = MomentumRates(0.05, 0.05 / 12, 0.01, 1)
    assert momentum_rates("SCAFFOLDM", **GIVEN, cohort=5) == pytest.approx(expected)
    # beta = (.16 / sqrt(100) / 16)^(2/3), gamma at most 1 / 24, eta as small as beta, B = K / (R beta^2)
    expected = MomentumRates(0.01, 1 / 48, 0.0001, 500)
    assert momentum_rates("FedAvgMVR", **GIVEN) == pytest.approx(expected)
    # beta = (.16 / sqrt(5) / 64)^(2/3), gamma = sqrt(5 beta) / 6 / 2, B = S K / (N R beta^2)
    beta = (0.16 / math.sqrt(5) / 64) ** (2 / 3)
    expected = MomentumRates(beta, math.sqrt(5 * beta) / 12, 0.01 * beta, 108)
    assert momentum_rates("SCAFFOLDMVR", **GIVEN, cohort=5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        (dict(clients=1, rounds=10), 1.0),
        (dict(rounds=10), 20**-0.5),
        (dict(rounds=1_000), 24 / 1_000),
        (dict(spread=1e6), math.sqrt(0.16 * 24 / 1e6)),
        (dict(spread=1e-6), 20**-0.5),
        (dict(spread=0.25, gap=1e-4), math.sqrt(2e-6 * 24 / 0.25)),
        (dict(method="FedAvgMVR", spread=1e6), math.sqrt(0.16 * 24 / 1e6)),
        (dict(method="SCAFFOLDMVR", cohort=5, rounds=10), 0.25 * 1.25**-0.5),
        (dict(method="SCAFFOLDMVR", cohort=5, rounds=10, spread=1e6), math.sqrt(1.6 * 24 / 1e6)),
    ],
    ids=str,
)
def test_local_steps_keep_below_their_smallest_limit(changes, limit):
    """Without noise, the limits are the gradient, the possible noise, and the spread at x_0 and away from it."""
    given = {"method": "FedAvgM"} | GIVEN | {"noise": 0.0, "spread": 0.0} | changes
    assert momentum_rates(**given).lr == pytest.approx(0.1 * limit / (5 * 2))


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


def test_a_warm_start_of_a_short_run_has_more_minibatches():
    short = dict(rounds=1, cohort=5)  # N K / (S R) = 20
    assert momentum_rates("SCAFFOLDM", **GIVEN | short).minibatches == 20
    assert momentum_rates("SCAFFOLDM", **GIVEN | short | {"noise": 0.0}).minibatches == 1


def test_without_noise_only_the_cohort_bounds_beta():
    exact = GIVEN | {"noise": 0.0}
    betas = {
        ("FedAvgM", 20): 1.0,
        ("FedAvgMVR", 20): 1.0,
        ("SCAFFOLDM", 20): 1.0,
        ("SCAFFOLDM", 19): 1.0,
        ("SCAFFOLDM", 5): 5 / 20 ** (2 / 3),
        ("SCAFFOLDMVR", 5): 0.25,
    }
    for (method, cohort), beta in betas.items():
        made = momentum_rates(method, **exact, cohort=cohort)
        assert made.beta == pytest.approx(beta)
        assert made.server_lr == pytest.approx(1 / 48)
        assert made.minibatches == method.startswith("SCAFFOLD")


def test_longer_runs_have_a_smaller_beta_and_similar_clients_a_larger_rate():
    for method in ("FedAvgM", "FedAvgMVR", "SCAFFOLDM", "SCAFFOLDMVR"):
        betas = [momentum_rates(method, **GIVEN | {"rounds": R}).beta for R in (10, 1_000, 100_000)]
        assert betas == sorted(betas, reverse=True)
        rates = [momentum_rates(method, **GIVEN | {"spread": spread, "noise": 0.0}).lr for spread in (1e6, 1.0, 0.0)]
        assert rates == sorted(rates)
        assert rates[0] < rates[2]


ORDERS = {
    "FedAvgM": lambda left, sigma, N, S, K: math.sqrt(left * sigma**2 / (N * K)) + left,
    "SCAFFOLDM": lambda left, sigma, N, S, K: math.sqrt(left * sigma**2 / (S * K)) + (1 + N ** (2 / 3) / S) * left,
    "FedAvgMVR": lambda left, sigma, N, S, K: (left * sigma / (N * K)) ** (2 / 3) + left,
    "SCAFFOLDMVR": lambda left, sigma, N, S, K: (
        (left * sigma / (S * math.sqrt(K))) ** (2 / 3) + (1 + math.sqrt(N) / S) * left
    ),
}
"""The order of the mean of |grad f|^2 by left = L gap / R; for the SCAFFOLDs with S < N."""


class Problem:
    """Clients, x_0, and minibatches with different Hessians, so that differences of gradients have noise.

    Args:
        heard: S.
        added: the standard deviation of a minibatch's addend to each coordinate of a gradient.
        part: a minibatch's Hessian is 1 - part or 1 + part of the client's, at random for each coordinate.
    """

    def __init__(self, clients, x, *, heard, steps, added=0.0, part=0.0):
        self.clients, self.x, self.heard, self.steps, self.added, self.part = clients, x, heard, steps, added, part
        self.spread = float(np.mean([np.sum(clients.gradient(i, x) ** 2) for i in range(clients.N)]))
        self.L, self.gap = float(clients.a.max()) * (1 + part), gap(clients, x)
        self.sigma = math.sqrt(added**2 * clients.n + part**2 * self.spread)

    def chosen(self, method, R):
        shape = dict(rounds=R, steps=self.steps, clients=self.clients.N, cohort=self.heard)
        return momentum_rates(method, **shape, L=self.L, gap=self.gap, noise=self.sigma, spread=self.spread)

    def over_the_order(self, method, R, made):
        """The mean of |grad f|^2 over R rounds with that choice, divided by the order of the theorem."""
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
            noise=lambda: (1 + self.part * rng.choice([-1, 1], n), self.added * rng.normal(size=n)),
        )
        return float(np.mean(met)) / ORDERS[method](self.L * self.gap / R, self.sigma, N, self.heard, self.steps)


@pytest.mark.parametrize(("method", "heard"), [("FedAvgM", 8), ("SCAFFOLDM", 2), ("FedAvgMVR", 8), ("SCAFFOLDMVR", 2)])
def test_the_mean_squared_gradient_has_the_order_of_the_theorem(method, heard):
    """Up to one constant for all R, with different minimisers, some or all clients, and much noise.

    With beta = 1, FedAvg-M-VR is FedAvg without a warm start, and worse.
    """
    clients = Clients(8, 20, seed=2)
    clients.o = clients.o * 5
    problem = Problem(clients, np.zeros(20), heard=heard, steps=3, added=60.0, part=0.9)
    ratios = [problem.over_the_order(method, R, problem.chosen(method, R)) for R in (30, 120, 480)]
    assert 1 < max(ratios) < 7
    if method == "FedAvgMVR":
        plain = problem.chosen(method, 480)._replace(beta=1.0, minibatches=0)
        assert problem.over_the_order(method, 480, plain) > 1.3 * ratios[-1]


@pytest.mark.parametrize(("method", "N", "S"), [("FedAvgM", 2, 2), ("SCAFFOLDM", 16, 1), ("SCAFFOLDMVR", 16, 1)])
def test_with_little_noise_gamma_and_the_warm_start_are_needed(method, N, S):
    """With little noise a quarter of gamma is too slow, and without B the draws take x away from x*."""
    clients, R = Clients(N, 4, seed=1), 400
    clients.o = clients.o * 50
    problem = Problem(clients, clients.optimum() + 1, heard=S, steps=2, added=0.5)
    made = problem.chosen(method, R)
    assert 2 < problem.over_the_order(method, R, made) < 7
    assert problem.over_the_order(method, R, made._replace(server_lr=made.server_lr / 4)) > 9
    if method != "FedAvgM":
        assert problem.over_the_order(method, R, made._replace(minibatches=0)) > 9


def test_fedavg_m_needs_its_beta():
    """With beta = 1, which is FedAvg, local steps keep a drift of the order eta K L times the spread.

    Half of the coordinates have all of the gap, the other half all of the spread. With much noise in a long run this is
    the worst case for the choice of eta: its limit by the spread holds with beta, and not with 1.
    """
    clients, R = Clients(2, 4, seed=0), 1200
    clients.a = np.array([[2, 2, 2, 2], [2, 2, 0.2, 0.2]])
    clients.o = np.array([[0, 0, 150, 150], [0, 0, -1500, -1500]])
    problem = Problem(clients, np.array([1.0, 1, 0, 0]), heard=2, steps=6, added=math.sqrt(12 * 2 * 6 * 4 / 4))
    assert problem.sigma**2 == pytest.approx(12 * 2 * 6 * problem.L * problem.gap)
    made = problem.chosen("FedAvgM", R)
    ratio = problem.over_the_order("FedAvgM", R, made)
    assert 2 < ratio < 8
    assert problem.over_the_order("FedAvgM", R, made._replace(beta=1.0)) > 1.3 * ratio


def test_scaffold_m_vr_needs_its_beta():
    """With beta = 1, which is SCAFFOLD, and the same warm start, a long run does not reduce much noise."""
    clients, R = Clients(2, 8, seed=1), 1000
    clients.o = clients.o * 3
    problem = Problem(clients, clients.optimum() + 1, heard=1, steps=1, added=11.0)
    made = problem.chosen("SCAFFOLDMVR", R)
    ratio = problem.over_the_order("SCAFFOLDMVR", R, made)
    assert 2 < ratio < 8
    assert problem.over_the_order("SCAFFOLDMVR", R, made._replace(beta=1.0)) > 1.3 * ratio


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

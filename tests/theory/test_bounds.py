"""The theorems' bounds as inequalities on least squares.

If a bound does not have the paper's constants, the docstring names the difference.
"""

from itertools import pairwise

import numpy as np
import pytest

from bench.papers.theory.local_sgd import largest_network_rate, paper_rate
from fedcore import Network, Server, Update, algorithms, sampling
from fedcore.algorithms import rates
from fedcore.algorithms.controls import ControlVariates
from fedcore.errors import RangeError
from fedcore.sim.network.topology import Topology
from fedcore.sim.participation import Bernoulli, RoundRobin
from tests.theory.local_descent import hear
from tests.theory.quadratics import Clients, distance, run, server_of

N, n = 8, 20


def gradient_square(clients, x):
    return float(np.sum(clients.mean_gradient(x) ** 2))


def gap(clients, x):
    return clients.value(x) - clients.value(clients.optimum())


def follow(server, clients, cohort, rounds, steps=1, noise=None):
    """|grad f|^2 at x_0, x_1, ..., and f's gap at x_0."""
    first, met = gap(clients, server.x), []
    for t in range(rounds):
        met.append(gradient_square(clients, server.x))
        run(server, clients, 1, cohort=lambda _, t=t: cohort(t), steps=lambda *_: steps, noise=noise)
    return np.array(met), first


def per_cohort(clients, pattern, algorithm, c, beta):
    """A server with Lemma 6's rate eta_t = c S_t / (t + beta), and K = 1."""
    sizes = [max(1, len(pattern.active(t))) for t in range(400)]
    rule = rates.PerCohort(c=c, beta=beta).over(sizes.__getitem__)
    return server_of(algorithm, clients, lr=0.1, server_lr=rule), [rule(t) for t in range(len(sizes))]


def test_the_largest_c_of_mimic_meets_eq_25_with_equality():
    """Sun et al., Lemma 6: for each cohort and each round with nu < 1 / (t + beta); 1.01 c breaks it."""

    def eq_25(c, S, t):
        z, eta, rho = 2 * lr**2 * L**2, c * S / (t + beta), (t + beta + 1) / (t + beta)
        phi = (((2 + z) ** K - 1) / (K * (z + 1)) + 1) * L**2
        left = (1 / eta) * (1 / (2 * eta) - L / 2)
        return left / ((rho - nu) * phi * tau_max * clients / (2 * nu * S)) - 1

    for clients, tau_max, K, lr, L, beta in ((30, 20, 5, 0.01, 2.0, 40.0), (3, 1, 1, 0.5, 0.1, 2.0)):
        nu = 1 / (beta + 200)
        rule = rates.PerCohort.largest(N=clients, tau_max=tau_max, K=K, lr=lr, L=L, beta=beta, nu=nu)
        assert rule.beta == beta
        assert min(eq_25(rule.c, S, t) for t in range(200) for S in (1, 2, clients)) >= -1e-12
        assert eq_25(rule.c, clients, 0) == pytest.approx(0, abs=1e-12)
        assert eq_25(1.01 * rule.c, clients, 0) < -0.005


@pytest.mark.parametrize(
    "wrong", [*({name: 0} for name in ("beta", "N", "tau_max", "K", "lr", "L", "nu")), {"nu": 0.1}]
)
def test_wrong_numbers_of_the_largest_c_are_rejected(wrong):
    right = dict(beta=10.0, N=3, tau_max=2, K=4, lr=0.1, L=2.0, nu=0.01)
    with pytest.raises(RangeError, match=f"^{next(iter(wrong))}"):
        rates.PerCohort.largest(**right | wrong)
    with pytest.raises(RangeError, match=r"^c\b"):  # phi_K is too large for a float
        rates.PerCohort.largest(**right | {"K": 5000})


PATTERNS = {
    f"at most {tau_max} rounds": RoundRobin(N, tau_max, phase="random", seed=0, first_round="all")
    for tau_max in (2, 5, 10)
} | {"random": Bernoulli(N, np.linspace(0.2, 0.9, N), seed=2, first_round="all")}


@pytest.mark.parametrize(("dropouts", "beta"), [*zip(PATTERNS, (10.0, 25.0, 50.0, 20.0), strict=True)])
def test_mimic_obeys_theorem_2_under_dropouts(dropouts, beta):
    """sum eta_t |grad f(x_t)|^2 <= 2 (f(x_0) - f*), the first term of Sun et al.'s bound, which FedAvg does not keep.

    The bound's term for staleness is not needed. The sum of the rates diverges, so a convergent sum means that the
    gradient tends to 0 (Corollary 1). c is larger than eq. 54 allows, so that 200 rounds decide.
    """
    clients, pattern, sums = Clients(N, n, seed=1), PATTERNS[dropouts], []
    for algorithm in (algorithms.MimiC(), algorithms.FedAvg("uniform")):
        server, eta = per_cohort(clients, pattern, algorithm, c=0.5, beta=beta)
        met, first = follow(server, clients, lambda t: pattern.active(t).clients.tolist(), 200)
        sums.append(float(np.dot(eta[: len(met)], met)) / (2 * first))
    assert sums[0] < 0.8
    assert sums[1] > 1.1


def test_with_falling_rates_mimic_is_as_fast_as_gradient_descent():
    """Corollary 1: the slope of log |x - x*| over log t, under bounded dropouts, is that of exact gradient descent."""
    clients, pattern = Clients(N, n, seed=1), RoundRobin(N, 5, phase="random", seed=3, first_round="all")
    server, eta = per_cohort(clients, pattern, algorithms.MimiC(), c=0.25, beta=20.0)
    exact, rows = np.zeros(n), []
    for t in range(400):
        run(server, clients, 1, cohort=lambda _, t=t: pattern.active(t).clients.tolist(), steps=lambda *_: 1)
        exact = exact - eta[t] * clients.mean_gradient(exact)
        if t + 1 in (50, 100, 200, 400):
            rows.append((t + 1, distance(server.x, clients.optimum()), distance(exact, clients.optimum())))
    t, ours, expected = np.log(np.array(rows)).T
    np.testing.assert_allclose(np.diff(ours) / np.diff(t), np.diff(expected) / np.diff(t), rtol=0.1)
    assert ours[-1] < ours[0] - 0.5


def test_mimic_s_limit_is_proportional_to_the_local_rate():
    """Corollary 2 and the next one: with K > 1 the limit of the gradient is proportional to eta_L."""
    clients, pattern = Clients(N, n, seed=1), Bernoulli(N, np.linspace(0.2, 0.9, N), seed=2, first_round="all")
    left = []
    for eta in (0.08, 0.04, 0.02):
        server = server_of(algorithms.MimiC(), clients, lr=eta)
        run(server, clients, int(12 / eta), cohort=lambda t: pattern.active(t).clients.tolist(), steps=lambda *_: 5)
        left.append(np.sqrt(gradient_square(clients, server.x)))
    for larger, smaller in pairwise(left):
        assert larger / smaller == pytest.approx(2, rel=0.3)


E_STEPS = 5
SIZES = [1, 2, 3, 4, 5, 6]


def coefficients(scheme, done):
    """p_t^k of each device and round, measured by updates along a device's own axis: [rounds, 6]."""
    rounds, p = done.shape
    server = server_of(
        algorithms.FlexibleFedAvg(scheme, E_STEPS), Clients(p, p, seed=0), 1.0, sizes=SIZES, max_steps=E_STEPS
    )
    found, axes = np.zeros((rounds, p)), np.eye(p, dtype=np.float32)
    for t in range(rounds):
        x = server.x.copy()
        active = np.flatnonzero(done[t]).tolist()
        server.round([Update(k, x + axes[k], steps=int(done[t, k])) for k in active])
        found[t] = server.x - x
    return found


@pytest.mark.parametrize("scheme", "ABC")
def test_the_schemes_coefficients_have_the_expectations_of_table_1(scheme):
    """Ruan et al., App. A.4: E[p s] / p is E only for scheme C, for any law of s; for B it is E[s].

    For A the coefficient of a complete device is N p / K_t, with the expectation p P(K_t > 0). In scheme C a device has
    no work with probability P(s = 0), which the ratio excludes.
    """
    share, rng, rounds = np.array(SIZES) / sum(SIZES), np.random.default_rng(0), 600
    shape = rounds, len(SIZES)
    done = np.where(rng.random(shape) < 0.4, E_STEPS, rng.integers(0, E_STEPS, shape))
    found = coefficients(scheme, done)
    ratio = (found * done) / share
    error = 4 * ratio.std(axis=0) / np.sqrt(rounds) + 1e-5
    if scheme == "C":
        np.testing.assert_allclose(ratio[done > 0], E_STEPS, rtol=1e-4)
    elif scheme == "B":
        assert (abs(ratio.mean(axis=0) - (0.4 * E_STEPS + 0.6 * 2)) < error).all()
        np.testing.assert_allclose(found, np.where(done > 0, share, 0), atol=1e-4)
    else:
        complete = (done == E_STEPS).sum(axis=1, keepdims=True)
        expected = np.where((done == E_STEPS) & (complete > 0), len(SIZES) * share / np.maximum(complete, 1), 0)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert (abs(found.mean(axis=0) - share * (1 - 0.6**6)) < 4 * found.std(axis=0) / np.sqrt(rounds)).all()


def apart(clients, n, far):
    """Clients with different Hessians and minimisers, ``far`` apart, and an x_0 whose gap does not depend on far."""
    clients = Clients(clients, n, seed=2)
    clients.o = clients.o * far
    return clients, (clients.optimum() + 1).astype(np.float32)


STEPS = 5


def over_the_order(algorithm, far, R):
    """The mean of |grad f|^2 over R rounds by everybody, in units of L Delta / sqrt(R): eta K L = .5, gamma falls."""
    clients, x = apart(3, 6, far)
    L = float(clients.a.max())
    server = Server(x, algorithm, clients=clients.N, lr=0.5 / STEPS / L, server_lr=1.5 / np.sqrt(R) / L)
    met, first = follow(server, clients, lambda _: range(clients.N), R, STEPS)
    return float(np.mean(met)) / (L * first) * np.sqrt(R)


def test_fedavg_m_keeps_its_local_rate_for_any_heterogeneity():
    """Cheng et al., Theorem 1 without noise: with beta and gamma like 1 / sqrt(R), the error falls like 1 / sqrt(R).

    The same holds for a heterogeneity zeta ten times as large. FedAvg with the same rates keeps a drift of the order
    eta K L zeta for any R: divided by 1 / sqrt(R) it grows like sqrt(R).
    """
    for far in (4, 40):
        for R in (50, 400):
            assert 0.7 < over_the_order(algorithms.FedAvgM(3 / np.sqrt(R)), far, R) < 1.5
    short, long = (over_the_order(algorithms.FedAvg("uniform"), 40, R) for R in (50, 400))
    assert short > 2.5
    assert long > 2 * short


def sums(algorithm, heard, gamma, far):
    """The sums of |grad f|^2 / (L Delta) over 1, 2, ..., 200 rounds from exact controls: eta K L = .3, gamma in 1/L."""
    clients, x = apart(6, 6, far)
    L = float(clients.a.max())
    server = Server(x, algorithm, clients=clients.N, lr=0.3 / STEPS / L, server_lr=gamma / L)
    if isinstance(algorithm, ControlVariates):
        server.warm_start({i: np.float32(clients.gradient(i, x)) for i in range(clients.N)})

    def cohort(t):
        return np.random.default_rng(t).choice(clients.N, heard, replace=False).tolist()

    met, first = follow(server, clients, cohort, 200, STEPS)
    return np.cumsum(met) / (L * first)


@pytest.mark.parametrize(
    ("algorithm", "heard"),
    [
        (algorithms.SCAFFOLDM(0.5), 6),
        (algorithms.SCAFFOLDM(0.25), 2),
        (algorithms.SCAFFOLDMVR(0.25), 2),
        (algorithms.SCAFFOLD(), 2),
    ],
    ids=repr,
)
def test_control_variates_need_no_bound_on_heterogeneity(algorithm, heard):
    """Cheng et al., Theorems 3, 4 without noise: the sum over R rounds of |grad f|^2 / (L Delta) stays bounded in R.

    Methods without control variates break this (next test). Momentum makes no difference: by its paper, SCAFFOLD needs
    no such bound either, and must pass too.
    """
    met = [sums(algorithm, heard, 1 / 24, far) for far in (4, 40)]
    for found in met:
        assert found[-1] < 1.02 * found[99]  # The second half adds little.
        assert found[-1] < 1.5 * 24
    np.testing.assert_allclose(met[0], met[1], rtol=0.01)


@pytest.mark.parametrize(
    ("algorithm", "heard"),
    [(algorithms.FedAvg("uniform"), 6), (algorithms.FedAvg("uniform"), 2), (algorithms.FedAvgM(0.25), 2)],
    ids=repr,
)
def test_without_control_variates_a_bound_is_needed(algorithm, heard):
    """The reason is the local steps if all clients take part, else the draws, also for FedAvg-M."""
    found = sums(algorithm, heard, 1 / 24, 40)
    assert found[-1] > 1.3 * found[99]
    assert found[-1] > 2 * 24


def local_bound(delta, eta, L, sigma_square, K, E, T):
    """2 Delta / (eta T) + eta L sigma^2 / K + eta^2 L^2 sigma^2 (E - 1) (K + 1) / K: start, noise, and local drift."""
    drift = eta**2 * L**2 * sigma_square * (E - 1) * (K + 1) / K
    return 2 * delta / (eta * T) + eta * L * sigma_square / K + drift


def lfsgd(clients, eta, K, E, rounds, noise=None):
    """x_0, x_E, x_2E, ... in float64, of the K clients that Algorithm 1 draws a round, with replacement."""
    server, path = server_of(algorithms.LocalDescent(), clients, eta), []
    for t in range(rounds):
        path.append(server.x.astype(np.float64))
        hear(server, clients, sampling.with_replacement([1.0] * clients.N, K, seed=0, round=t), E, noise)
    return np.array(path)


@pytest.mark.parametrize("E", [1, 4])
@pytest.mark.parametrize("K", [2, 4])
def test_lfsgd_obeys_theorem_3_3(K, E):
    """Haddadpour, Mahdavi, eq. 24, in the form above: the mean of |grad f|^2 over the rounds if Lambda is bounded.

    The noise's part is linear in the noise, and equals the recursion of its variance: a client's noise has the factor
    (1 + (K - 1) / N) / K in the mean of K draws, since a client that is drawn twice sends the same update.
    """
    clients, rng, rounds = Clients(6, 200, seed=3, shared=True), np.random.default_rng(0), 150
    L, a = float(clients.a.max()), clients.a.mean(axis=0)
    eta = rates.Horizon(L=L, K=K, T=rounds * E)(0)
    assert eta < paper_rate(L, E, clients.largest_diversity(), K)
    noisy = lfsgd(clients, eta, K, E, rounds, lambda shape: (1, rng.normal(size=shape)))
    exact = lfsgd(clients, eta, K, E, rounds)
    mean = np.mean([gradient_square(clients, x) for x in noisy])
    assert 0.2 < mean / local_bound(gap(clients, noisy[0]), eta, L, clients.n, K, E, rounds * E) < 1
    ages = E * np.arange(rounds)[:, None]  # The number of steps whose noise is in x.
    kept = (1 - eta * a) ** 2
    variance = eta**2 * (1 + (K - 1) / clients.N) / K * (1 - kept**ages) / (1 - kept)
    assert np.mean((a * (noisy - exact)) ** 2) == pytest.approx(np.mean(a**2 * variance), rel=0.12)


def test_lfsgd_exceeds_the_bound_if_lambda_is_unbounded():
    """With different minimisers the draws take LFSGD above the bound, which has no term for them."""
    clients, rounds, K, E = Clients(6, 40, seed=3), 150, 2, 4
    clients.o = clients.o * 5
    L = float(clients.a.max())
    eta = rates.Horizon(L=L, K=K, T=rounds * E)(0)
    path = lfsgd(clients, eta, K, E, rounds)
    mean = np.mean([gradient_square(clients, x) for x in path])
    assert mean > 1.5 * local_bound(gap(clients, path[0]), eta, L, 0.0, K, E, rounds * E)


@pytest.mark.parametrize("nodes", [5, 9])
def test_nfsgd_obeys_theorem_3_4(nodes):
    """Eq. 29 in the form 2 Delta / (eta T) + eta L sigma^2 / p + eta^2 L^2 sigma^2 ((1 + zeta^2)/(1 - zeta^2) E - 1).

    For the mean of the models on a ring of nodes that share a minimiser, at a rate that eq. 28 allows.
    """
    clients, rng, rounds, E = Clients(nodes, 40, seed=3, shared=True), np.random.default_rng(0), 150, 2
    L, ring = float(clients.a.max()), Topology.named("ring", nodes)
    largest = largest_network_rate(L, E, clients.largest_diversity(), nodes, ring.zeta)
    eta = min(rates.Horizon(L=L, K=nodes, T=rounds * E)(0), largest)
    network = Network([np.zeros(clients.n, np.float32)] * nodes, ring, lr=eta)
    first, met = gap(clients, np.zeros(clients.n)), []
    for _ in range(rounds):
        met.append(gradient_square(clients, network.output().astype(np.float64)))
        y = np.array(network.models, np.float64)
        for _ in range(E):
            y -= eta * (clients.gradient(range(nodes), y) + rng.normal(size=y.shape))
        network.round([Update(j, y[j].astype(np.float32), E) for j in range(nodes)])
    zeta, noise = ring.zeta, clients.n
    drift = eta**2 * L**2 * noise * ((1 + zeta**2) / (1 - zeta**2) * E - 1)
    bound = 2 * first / (eta * rounds * E) + eta * L * noise / nodes + drift
    assert 0.05 * bound < np.mean(met) < bound

"""Methods that are the same method where the papers say so: every round's x, not the limit alone."""

import numpy as np
import pytest

from fedcore import Update, algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n, K, LR, ROUNDS = 6, 12, 4, 0.05, 25


@pytest.fixture(scope="module")
def clients():
    return Clients(N, n, seed=5)


def path(algorithm, clients, *, steps=K, lr=LR, cohort=lambda t: range(N), start=False, **options):
    """x after every round."""
    server, xs = server_of(algorithm, clients, lr, **options), []
    if start:
        server.warm_start({i: clients.gradient(i, server.x).astype(np.float32) for i in range(N)})
    for t in range(ROUNDS):
        run(server, clients, 1, cohort=lambda _, t=t: cohort(t), steps=lambda _, i: steps)
        xs.append(server.x)
    return np.array(xs)


def same(one, other):
    assert np.linalg.norm(one[-1]) > 0.1  # it went somewhere
    assert max(distance(x, y) for x, y in zip(one, other, strict=True)) < 2e-6


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.FedAvg(),
        algorithms.LocalDescent(),
        algorithms.MIFA(),
        algorithms.MIFA(wait=False),
        algorithms.MimiC(),
        algorithms.MimiC(units="update"),
        *(algorithms.FlexibleFedAvg(scheme, K) for scheme in "ABC"),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_with_everybody_there_every_method_without_local_corrections_is_fedavg(clients, algorithm):
    """MimiC's corrections sum to zero, MIFA's remembered gradients are today's, and all did their E steps."""
    sizes = dict(sizes=[7] * N)
    same(path(algorithm, clients, **sizes), path(algorithms.FedAvg("uniform"), clients, **sizes))


@pytest.mark.parametrize("scheme", "ABC")
def test_with_everybody_there_and_done_the_three_schemes_weigh_by_examples(clients, scheme):
    sizes, cohort = [1, 2, 3, 4, 5, 6], list(range(N))
    flexible = server_of(algorithms.FlexibleFedAvg(scheme, K), clients, LR, sizes=sizes)
    fedavg = server_of(algorithms.FedAvg("examples"), clients, LR)
    for server in (flexible, fedavg):
        for _ in range(ROUNDS):
            broadcast = server.broadcast(cohort)
            server.round([Update(i, clients.work(broadcast, i, K), steps=K, examples=sizes[i]) for i in broadcast.ids])
    assert distance(flexible.x, fedavg.x) < 1e-6
    assert distance(flexible.x, path(algorithms.FedAvg("uniform"), clients)[-1]) > 1e-3


def descent(clients, lr=LR):
    """Gradient descent on the mean of the clients' functions, in float64."""
    x, xs = np.zeros(n), []
    for _ in range(ROUNDS):
        x = x - lr * clients.mean_gradient(x)
        xs.append(x)
    return np.array(xs)


@pytest.mark.parametrize(
    ("algorithm", "start"),
    [
        (algorithms.LocalDescent(full_gradient=True), False),
        (algorithms.SCAFFOLD(control="sent"), False),
        (algorithms.FedAvgMVR(0.3), True),
        (algorithms.SCAFFOLDMVR(0.3), True),
        (algorithms.MBSTORM(0.3), True),
        (algorithms.MBSTORM(1.0), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, algorithms.Algorithm) else "",
)
def test_one_full_gradient_step_of_everybody_is_gradient_descent(clients, algorithm, start):
    """With the warm start g_0 = grad f(x_0) the -VR estimator is exact; test_registry.py has more methods."""
    same(path(algorithm, clients, steps=1, start=start), descent(clients))


def test_mb_storms_server_goes_as_far_as_k_steps(clients):
    """gamma = eta K, as Cheng et al. compare it: the server's rate that says the same."""
    by_option = server_of(algorithms.MBSTORM(0.3, steps=5), clients, LR)
    by_rate = server_of(algorithms.MBSTORM(0.3), clients, LR, server_lr=5 * LR)
    for server in (by_option, by_rate):
        for _ in range(ROUNDS):
            broadcast = server.broadcast(range(N))
            report = server.round([Update(i, clients.work(broadcast, i, 1), steps=1) for i in broadcast.ids])
            assert report.gamma == pytest.approx(5 * LR)
    same(by_option.x, by_rate.x)


@pytest.mark.parametrize(
    "algorithm", [algorithms.FedAvgM(0.3), algorithms.SCAFFOLDM(0.3)], ids=["FedAvgM", "SCAFFOLDM"]
)
def test_one_full_gradient_step_of_everybody_is_the_heavy_ball(clients, algorithm):
    """g+ = beta grad f(x) + (1 - beta) g, x+ = x - gamma g+."""
    x, g, xs = np.zeros(n), np.zeros(n), []
    for _ in range(ROUNDS):
        g = 0.3 * clients.mean_gradient(x) + 0.7 * g
        x = x - LR * g
        xs.append(x)
    same(path(algorithm, clients, steps=1), np.array(xs))

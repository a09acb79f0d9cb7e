"""Every method, through Server.broadcast and add alone, equals a float64 transcription of its paper."""

import numpy as np
import pytest

import fedcore
from fedcore import algorithms
from fedcore.algorithms import rates
from tests.outsiders.house.mine.methods import FedACG
from tests.server.further_papers import fedacg, feddyn, fedexp, fednova, fedstale, fedvarp
from tests.server.papers import (
    Clients,
    K,
    N,
    arbitrary_course,
    fedavg,
    flexible,
    follow,
    mb_storm,
    mifa,
    mimic,
    momentum,
    n,
    start_of,
)

BETA, CHANCES = 0.3, [0.3 + 0.05 * i for i in range(N)]

METHODS = {
    "FedAvg": (algorithms.FedAvg(), fedavg, {}),
    "FedAvg, uniform": (algorithms.FedAvg("uniform"), fedavg, dict(weigh=lambda n_k: 1)),
    "FedProx": (algorithms.FedProx(mu=0.5), fedavg, dict(mu=0.5)),
    "MIFA": (algorithms.MIFA(), mifa, dict(wait=True)),
    "MIFA at once": (algorithms.MIFA(wait=False), mifa, dict(wait=False)),
    "MimiC": (algorithms.MimiC(), mimic, {}),
    "MimiC, update units": (algorithms.MimiC(units="update"), mimic, dict(update_units=True)),
    "SCAFFOLD": (algorithms.SCAFFOLD(), momentum, dict(beta=1, controls=True)),
    "SCAFFOLD, two vectors": (algorithms.SCAFFOLD(control="sent"), momentum, dict(beta=1, controls=True)),
    "FedAvgM": (algorithms.FedAvgM(BETA), momentum, dict(beta=BETA)),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA), momentum, dict(beta=BETA, controls=True)),
    "SCAFFOLDM, two vectors": (
        algorithms.SCAFFOLDM(BETA, control="sent"),
        momentum,
        dict(beta=BETA, controls=True),
    ),
    "FedAvgMVR": (algorithms.FedAvgMVR(BETA), momentum, dict(beta=BETA, vr=True)),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA), momentum, dict(beta=BETA, controls=True, vr=True)),
    "MBSTORM": (algorithms.MBSTORM(BETA), mb_storm, dict(beta=BETA)),
    "Flexible A": (algorithms.FlexibleFedAvg("A", K), flexible, dict(scheme="A")),
    "Flexible B": (algorithms.FlexibleFedAvg("B", K), flexible, dict(scheme="B")),
    "Flexible C": (algorithms.FlexibleFedAvg("C", K), flexible, dict(scheme="C")),
    "LocalDescent": (algorithms.LocalDescent(), fedavg, dict(weigh=lambda n_k: 1)),
    "FedVARP": (algorithms.FedVARP(), fedvarp, {}),
    "FedStale": (algorithms.FedStale(0.6), fedstale, dict(beta=0.6)),
    "FedStale, one chance": (algorithms.FedStale(0.6, chances=0.5), fedstale, dict(beta=0.6, chances=0.5)),
    "FedStale, chances": (algorithms.FedStale(0.6, chances=CHANCES), fedstale, dict(beta=0.6, chances=CHANCES)),
    "FedDyn": (algorithms.FedDyn(0.5), feddyn, dict(alpha=0.5)),
    "FedNova": (algorithms.FedNova(), fednova, {}),
    "FedExP": (algorithms.FedExP(), fedexp, {}),
    "FedACG of one's own": (FedACG(0.6, 0.3), fedacg, dict(lam=0.6, beta=0.3)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
def test_server_follows_the_paper(method, seed):
    algorithm, paper, options = METHODS[method]
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    lr = rates.Exponential(0.1, 0.98)
    server = fedcore.Server(x0, algorithm, clients=dict(enumerate(clients.examples)), lr=lr)
    assert follow(server, clients, course, paper(clients, x0.astype(np.float64), lr, course, **options)) < 2e-6


def test_all_methods_are_transcribed():
    assert {type(algorithm).__name__ for algorithm, *_ in METHODS.values()} == {*algorithms.REGISTRY, "FedACG"}


def test_mimics_corrections_sum_to_zero_over_5000_rounds():
    rng = np.random.default_rng(0)
    server = fedcore.Server(rng.normal(size=n).astype(np.float32), "MimiC", clients=N, lr=0.1)
    clients = Clients(0)
    for t in range(5000):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        with server.open_round() as round:
            for i in cohort:
                round.add(i, clients.train(i, server.x, 0.1, 1)[0].astype(np.float32), steps=1)
        if t % 500 == 499:
            corrections = np.array([server.correction(i) for i in range(N)])
            size = np.abs(corrections).sum(axis=0).max()
            assert size > 1  # there is something to cancel
            assert np.abs(corrections.sum(axis=0)).max() < 1e-6 * size
    # and so the limit is the optimum of all clients, for all that only some are heard
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)


def test_rounding_far_from_the_optimum_leaves_mimics_limit_alone():
    """What the centring C / N is for: without it the corrections' sum keeps the rounding of the first, large rounds."""
    rng = np.random.default_rng(1)
    clients = Clients(1)
    server = fedcore.Server(np.full(n, 1e4, np.float32), "MimiC", clients=N, lr=0.1)
    for _ in range(6000):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        server.round([fedcore.Update(i, clients.train(i, server.x, 0.1, 1)[0].astype("f"), steps=1) for i in cohort])
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)

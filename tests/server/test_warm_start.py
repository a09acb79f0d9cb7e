"""Rounds from a warm start: c_i^0 the mean of minibatch gradients at x_0, c^0 their mean, g^0 = c^0 (-VR) or 0 (-M)."""

import numpy as np
import pytest

from fedcore import Server, algorithms
from fedcore.algorithms import rates
from tests.server.papers import Clients, N, arbitrary_course, follow, mb_storm, mifa, momentum, start_of

BETA = 0.3
LR = rates.Exponential(0.1, 0.98)
METHODS = {
    "SCAFFOLD": (algorithms.SCAFFOLD(), momentum, dict(beta=1, controls=True)),
    "SCAFFOLD, two vectors": (algorithms.SCAFFOLD(control="sent"), momentum, dict(beta=1, controls=True)),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA), momentum, dict(beta=BETA, controls=True)),
    "SCAFFOLDM, two vectors": (algorithms.SCAFFOLDM(BETA, "sent"), momentum, dict(beta=BETA, controls=True)),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA), momentum, dict(beta=BETA, controls=True, vr=True)),
    "FedAvgMVR": (algorithms.FedAvgMVR(BETA), momentum, dict(beta=BETA, vr=True)),
    "MBSTORM": (algorithms.MBSTORM(BETA), mb_storm, dict(beta=BETA)),
    "MIFA": (algorithms.MIFA(), mifa, dict(wait=True)),
    "MIFA at once": (algorithms.MIFA(wait=False), mifa, dict(wait=False)),
}
"""Those that keep a row or have a g at which to start; where clients keep their rows: test_client_placement.py."""


@pytest.mark.parametrize("given", ["all", "some"])
@pytest.mark.parametrize("method", METHODS)
def test_server_follows_the_paper_from_a_warm_start(method, given):
    algorithm, paper, options = METHODS[method]
    seed = 0 if given == "all" else 1
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    warm = dict(enumerate(clients.warm(x0, seed)))
    if given == "some":  # the others' rows are zero
        warm = {i: warm[i] for i in range(0, N, 3)}
    server = Server(x0, algorithm, N, lr=LR)
    server.warm_start({i: gradient.astype(np.float32) for i, gradient in warm.items()})
    assert (
        follow(server, clients, course, paper(clients, x0.astype(np.float64), LR, course, warm=warm, **options)) < 2e-6
    )

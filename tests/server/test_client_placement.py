"""Clients that keep their own rows go the paper's way as well, whatever the cohorts: empty, of one, of all."""

import numpy as np
import pytest

from fedcore import Server, algorithms
from fedcore.algorithms import rates
from tests.server.papers import Clients, N, arbitrary_course, follow, mimic, momentum, n, start_of

BETA = 0.3
LR = rates.Exponential(0.1, 0.98)


@pytest.mark.parametrize("units", ["gradient", "update"])
@pytest.mark.parametrize("kind", ["model", "delta", "gradient"])
def test_mimics_clients_send_h_plus_c_and_keep_v_minus_h(kind, units):
    """Algorithm 1's "practical implementation", told in each of the ways of an update; "delta" by draws."""
    seed = 0 if kind == "model" else 1
    clients, course, x0 = Clients(seed), arbitrary_course(seed, draws=kind == "delta"), start_of(seed)
    server = Server(x0, algorithms.MimiC(units, placement="client"), N, lr=LR)
    c, h = np.zeros((N, n)), {}

    def work(broadcast, i, steps):
        distance = broadcast.lr * steps
        unit = distance if units == "gradient" else 1.0
        h[i] = (broadcast.x - clients.train(i, broadcast.x, broadcast.lr, steps)[0]) / unit
        delta = -unit * (h[i] + c[i])
        y = {"model": broadcast.x + delta, "delta": delta, "gradient": -delta / distance}[kind]
        return dict(value=y.astype(np.float32), kind=kind)

    def after(heard):
        for i in heard:
            c[i] = server.v - h[i]

    paper = mimic(clients, x0.astype(np.float64), LR, course, update_units=units == "update", centred=False)
    assert follow(server, clients, course, paper, work, after) < 2e-6
    assert np.abs(c).max() > 0.1


SCAFFOLDS = {
    "SCAFFOLD": (algorithms.SCAFFOLD(placement="client"), dict(beta=1)),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA, placement="client"), dict(beta=BETA)),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA, placement="client"), dict(beta=BETA, vr=True)),
}


@pytest.mark.parametrize("warm", [False, True], ids=["from zero", "warm"])
@pytest.mark.parametrize("method", SCAFFOLDS)
def test_scaffolds_clients_keep_c_i_and_send_its_change(method, warm):
    algorithm, options = SCAFFOLDS[method]
    seed = int(warm)
    clients, course, x0 = Clients(seed), arbitrary_course(seed), start_of(seed)
    server = Server(x0, algorithm, N, lr=LR)
    c = np.zeros((N, n))
    if warm:
        c[:] = clients.warm(x0, seed)
        server.warm_start(dict(enumerate(c.astype(np.float32))))
        options = options | dict(warm=dict(enumerate(c)))

    def work(broadcast, i, steps):
        own = -options["beta"] * c[i]  # the papers' - beta c_i, which the server's offset is short of
        y, raw = clients.train(i, broadcast.x, broadcast.lr, steps, clients.direction(broadcast, i, own))
        change, c[i] = raw - c[i], raw
        return dict(value=y.astype(np.float32), control=change.astype(np.float32))

    paper = momentum(clients, x0.astype(np.float64), LR, course, controls=True, **options)
    assert follow(server, clients, course, paper, work) < 2e-6

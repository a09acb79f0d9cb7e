"""No update can end the round of others: one that would make the step infinite is rejected."""

from itertools import product

import numpy as np
import pytest

from fedcore import Update
from fedcore.algorithms import optimizers
from tests.server.rounds import METHODS, made, n, steps_of

N = 10
LENGTHS = [3e38, 1e33, 1e29, 1e28]
OPTIONS = {
    "as it is": {},
    "a large server rate": {"server_lr": 1e10},
    "Adam": {"optimizer": optimizers.Adam()},
    "Adagrad": {"optimizer": optimizers.Adagrad()},
    "SGD": {"optimizer": optimizers.SGD()},
    "own rates": {"max_client_lr": 100.0},
}


def server_of(method, options):
    return made(method, clients={i: 1 + i for i in range(N)}, **OPTIONS[options])


def cases():
    """Methods, the options that they take, and the part of an update that is long."""
    for method, options in product(METHODS, OPTIONS):
        try:
            algorithm = server_of(method, options).algorithm
        except ValueError:  # a server rate, where the method takes none
            assert options == "a large server rate"
            continue
        yield method, options, "gradient"
        yield method, options, "delta"
        if algorithm.second_vector or options == "as it is":  # else it is not read, whatever the options
            yield method, options, "control"


def honest(server, client):
    control = np.full(n, 0.5, np.float32) if server.broadcast([client]).second else None
    return Update(
        client, value=np.full(n, 0.125, np.float32), kind="gradient", steps=steps_of(server, 5), control=control
    )


@pytest.mark.parametrize(("method", "options", "kind"), [*cases()])
@pytest.mark.sample(1)
def test_no_length_diverges(method, options, kind):
    for length in LENGTHS:
        server = server_of(method, options)
        for t in range(4):
            updates = [honest(server, i) for i in range(N)]
            huge = np.full(n, length, np.float32)
            if kind == "control":
                updates[t % N] = updates[t % N]._replace(control=huge)
            else:
                steps = steps_of(server, 1 + 10**5 * (t % 2))
                own = {"lr": 1e-3} if options == "own rates" else {}
                updates[t % N] = updates[t % N]._replace(value=huge, kind=kind, steps=steps, **own)
            report = server.round(updates)
            assert np.isfinite(server.x).all()
            assert len(report.accepted) >= N - 1
            if length > 1e35 and (kind != "control" or server.algorithm.second_vector):
                [(client, why)] = report.rejected
                assert client == t % N
                assert "norm" in why

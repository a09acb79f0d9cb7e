"""No reply can end the round of the others: one that is so long that the step would be infinite is refused by name."""

from itertools import product

import numpy as np
import pytest

from fedcore import Server, Update, optimizers
from tests.server.rounds import METHODS, made, n, steps_of

N = 10
LENGTHS = [3e38, 1e36, 1e33, 1e29, 1e28, 1e20]
OPTIONS = {
    "as it is": {},
    "a large server rate": {"server_lr": 1e10},
    "Adam": {"optimizer": optimizers.Adam()},
    "Adagrad": {"optimizer": optimizers.Adagrad()},
    "SGD": {"optimizer": optimizers.SGD()},
    "own rates": {"own_rates": True},
}


def server_of(method, options):
    return made(method, clients=N, client_sizes=range(1, N + 1), **OPTIONS[options])


def cases():
    """Methods, with the options that they take, and what of a reply is long."""
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
    return Update(client, gradient=np.full(n, 0.125, np.float32), steps=steps_of(server, 5), control=control)


@pytest.mark.parametrize(("method", "options", "kind"), [*cases()])
def test_no_length_diverges(method, options, kind):
    for length in LENGTHS:
        server = server_of(method, options)
        for t in range(N):
            updates = [honest(server, i) for i in range(N)]
            huge = np.full(n, length, np.float32)
            if kind == "control":
                updates[t % N] = updates[t % N]._replace(control=huge)
            else:
                steps = steps_of(server, 1 + 10**5 * (t % 2))
                own = {"lr": 1e-3} if options == "own rates" else {}
                updates[t % N] = updates[t % N]._replace(
                    **({"model": None, "gradient": None} | {kind: huge}), steps=steps, **own
                )
            report = server.round(updates)
            assert np.isfinite(server.x).all()
            assert len(report.heard) >= N - 1
            if length > 1e35 and (kind != "control" or server.algorithm.second_vector):
                [(client, why)] = report.refused
                assert client == t % N
                assert "an update past float32's range" in why


def test_a_federation_goes_on_where_one_gradient_of_3e38_ended_every_round():
    server = Server("MIFA", np.zeros(20, np.float32), 10, lr=0.1, own_rates=True)
    for _ in range(5):
        updates = [Update(i, server.x + np.float32(0.1), 5) for i in range(9)]
        report = server.round([*updates, Update(9, gradient=np.full(20, 3e38, np.float32), steps=1, lr=100.0)])
        assert report.heard == tuple(range(9))
        assert [client for client, _ in report.refused] == [9]

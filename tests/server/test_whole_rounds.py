"""A round of a list in one call, against the same updates through an open round."""

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.algorithms import FedAvg
from fedcore.algorithms.base import Step
from fedcore.errors import FedcoreError
from fedcore.kernels import Linear
from tests.server.rounds import SIZES, N, go_on, made, n

LONG = np.full(n, 3e29, np.float32)


def replies(server, change=None):
    rng = np.random.default_rng(server.round_number)
    broadcast = server.broadcast(range(4))
    control = rng.normal(size=n).astype(np.float32) if broadcast.second else None
    updates = [
        Update(i, server.x + rng.normal(size=n).astype(np.float32), steps=1, examples=i + 1, control=control)
        for i in range(4)
    ]
    for i, fields in (change or {}).items():
        updates[i] = updates[i]._replace(**fields)
    return updates


def one_by_one(server, updates):
    with server.open_round() as opened:
        for update in updates:
            opened.add_batch([update])
        return opened.finish()


def outcome(server, take, updates):
    """The report and the state after a round, or its error."""
    reports = []
    server.callbacks = [reports.append]
    try:
        take(server, updates)
        output = repr([report.__class__(**{**vars(report), "seconds": 0.0}) for report in reports])
    except FedcoreError as error:
        output = f"{type(error).__name__}: {error}"
    rows = [server.store.read(i).tobytes() for i in range(N)] if server.algorithm.keeps_rows else []
    after = server.round([])  # shows v, gamma and the total
    return output, server.x.tobytes(), rows, after.gamma, server.x.tobytes()


def compare(change, **options):
    method = options.pop("method", "FedAvg")
    whole, open_ = made(method, **options), made(method, **options)
    for server in (whole, open_):
        go_on(server, 2)
    assert outcome(whole, Server.round, replies(whole, change)) == outcome(open_, one_by_one, replies(open_, change))


@pytest.mark.parametrize("method", ["FedAvg", "FedProx", "MIFA", "MimiC", "SCAFFOLD"])
def test_a_server_rate(method):
    compare({1: dict(steps=2)}, method=method, server_lr=0.5)


@pytest.mark.parametrize("method", ["FedAvg", "FedProx", "MIFA", "MimiC"])
@pytest.mark.parametrize("clients", [N, SIZES], ids=["no sizes", "sizes"])
@pytest.mark.parametrize(
    "change",
    [
        {1: dict(examples=None)},
        {i: dict(examples=None) for i in range(4)},
        {1: dict(examples=7)},
        {1: dict(steps=3), 2: dict(steps=2)},
        {1: dict(client=0)},
        {1: dict(client="nobody")},
        {1: dict(steps=0)},
        {1: dict(value=np.full(n, np.nan, np.float32))},
        {1: dict(value=np.full(n, 3e38, np.float32))},
        {1: dict(value=LONG)},
        {i: dict(value=LONG) for i in range(4)},
        {1: dict(value=np.ones(n - 1, np.float32))},
        {1: dict(value=np.ones(n))},
        {1: dict(weight=0.25)},
        {1: dict(round=0)},
    ],
    ids=lambda change: "-".join(f"{i} {name}" for i, fields in change.items() for name in fields),
)
def test_unusual_updates(method, clients, change):
    compare(change, method=method, clients=clients)


@pytest.mark.parametrize(
    "options",
    [
        dict(accumulator="float64"),
        dict(accumulator="exact"),
        dict(max_staleness=2),
        dict(max_norm=3.0),
        dict(reject_long=1.5),
        dict(cap_examples=1.5, clients=N),
        dict(aggregation="open"),
        dict(optimizer=None, server_lr=1e38),
        dict(diagnostics=True),
        dict(weights={i: 1.0 + i for i in range(N)}),
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("change", [{}, {1: dict(value=LONG)}], ids=["usual", "long"])
def test_options(options, change):
    compare(change, **options)


class Uniform(FedAvg):
    """Declares that claims do not count, but weighs by examples."""

    weighs_claims = False


class Shy(FedAvg):
    hides_mean = True


class Twice(FedAvg):
    def step(self, cohort):
        return Step(v=Linear(A=2 / cohort.W))


@pytest.mark.parametrize("algorithm", [Uniform(), Shy(), Twice()], ids=repr)
def test_custom_methods(algorithm):
    def server():
        return Server(np.linspace(-1, 1, n, dtype=np.float32), algorithm, clients=N, lr=0.1)

    whole, open_ = server(), server()
    assert outcome(whole, Server.round, replies(whole)) == outcome(open_, one_by_one, replies(open_))

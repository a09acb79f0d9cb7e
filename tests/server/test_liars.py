"""For every method and kind of false update, one dishonest client of ten moves x by the bound of liars.py at most."""

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.sim.data import load
from tests.server import liars


@pytest.mark.parametrize("kind", liars.LIES)
@pytest.mark.parametrize("method", liars.METHODS)
@pytest.mark.sample(1)
def test_one_dishonest_client_of_ten_moves_x_by_its_bound_at_most(method, kind):
    server = liars.server_of(method, **liars.OPTIONS.get(kind, {}))
    since = 1 if method == "MIFA" else 0  # it waits for a client without an accepted update
    reports = liars.federation(server, liars.LIES[kind], since=since)
    for report in reports[since:]:
        assert set(report.accepted) | {liars.LIAR} == set(range(10))
        assert [client for client, _ in report.rejected] == ([liars.LIAR] if liars.is_refused(method, kind) else [])
    x, due = server.tensors(), liars.honest_result(method)
    assert liars.distance(x["w"], due["w"], liars.MODEL["w"]) <= liars.bound(method, kind)
    assert np.all((x["running_var"] > 1) & (x["running_var"] < 2))
    assert x["num_batches_tracked"] <= liars.most_counted(kind) * due["num_batches_tracked"]
    assert len(reports) == liars.ROUNDS


@pytest.mark.parametrize("method", ["FedAvg", "FedProx"])
def test_an_unlimited_claim_of_examples_decides_x(method):
    server = liars.server_of(method)
    liars.federation(server, liars.LIES["examples"])
    assert liars.distance(server.tensors()["w"], liars.honest_result(method)["w"], liars.MODEL["w"]) > 0.99


@pytest.mark.parametrize("kind", liars.REFUSED)
def test_mifa_reports_that_it_waits_for_a_rejected_client(kind):
    server = liars.server_of("MIFA", **liars.OPTIONS.get(kind, {}))
    assert [report.waiting_for for report in liars.federation(server, liars.LIES[kind], rounds=4)] == [1] * 4
    server.remove_client(liars.LIAR)
    assert not server.tensors()["w"].any()


def accuracy_on_digits(method, *, lies):
    """The accuracy of softmax regression with one digit per client, if the last one reverses its update."""
    data = load("digits")
    X, Y = data.train_x.reshape(-1, 64), data.train_y
    parts = np.array_split(np.argsort(Y, kind="stable"), 10)
    server = Server(np.zeros(650, np.float32), method, 10, lr=0.5)
    for _ in range(20):
        sent, updates = server.broadcast(range(10)), []
        for client, at in enumerate(parts):
            y = sent.x.copy()
            for _ in range(liars.STEPS):
                slope = gradient(y, X[at], Y[at])
                y -= np.float32(0.5) * (slope + sent.offset(client) if sent.has_offset else slope)
            updates.append(Update(client, 2 * sent.x - y if lies and client == liars.LIAR else y, liars.STEPS))
        server.round(updates)
    scores = data.test_x.reshape(-1, 64) @ server.x[:640].reshape(64, 10) + server.x[640:]
    return float((scores.argmax(1) == data.test_y).mean())


def gradient(y, X, Y):
    scores = X @ y[:640].reshape(64, 10) + y[640:]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(Y)), Y] -= 1
    return np.append(X.T @ shares, shares.sum(0)) / np.float32(len(Y))


@pytest.mark.parametrize(("method", "learns"), [("FedAvg", True), ("SCAFFOLD", False)])
def test_one_reversed_update_stops_scaffold_but_not_fedavg(method, learns):
    """SCAFFOLD has no bound by default: each round adds the update to all corrections."""
    assert accuracy_on_digits(method, lies=False) > 0.8
    assert (accuracy_on_digits(method, lies=True) > 0.7) == learns

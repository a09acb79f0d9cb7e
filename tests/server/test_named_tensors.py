"""Models of named tensors, folded in place, have the bits of flat vectors."""

import numpy as np
import pytest
import torch

from fedcore import Compute, Server, Storage, Update, algorithms
from fedcore.rules import ClipToMedian

N, ROUNDS = 5, 4


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))


def run(method, send, kind):
    """x of every round and the final rows, with updates as ``send(t, i, flat, named)`` chooses."""
    server, xs = Server(net(), method, {i: 1 + i for i in range(N)}, lr=0.1), []
    rng, n, p = np.random.default_rng(1), server.layout.n, server.layout.n_parameters
    for t in range(ROUNDS):
        updates = []
        for i in range(N - t):  # odd and even cohorts
            delta = rng.normal(scale=0.1, size=n).astype(np.float32)
            flat = delta if kind == "delta" else server.x + delta
            named = server.tensors(library="numpy") | {
                name: value.copy() for name, value in server.layout.unflatten(flat).items()
            }
            control = rng.normal(size=p).astype(np.float32) if server.algorithm.second_vector else None
            steps = min(1 + i, server.algorithm.most_steps or N)
            updates.append(Update(i, send(t, i, flat, named), steps, 1 + i, kind=kind, control=control))
        assert not server.round(updates).rejected
        xs.append(server.x)
    return np.array(xs), [server.store.read(i) for i in range(N)] if server.algorithm.keeps_rows else []


@pytest.mark.parametrize("kind", ["model", "delta"])
@pytest.mark.parametrize("method", algorithms.REGISTRY)
def test_named_tensors_count_as_one_vector(method, kind):
    due = run(method, lambda t, i, flat, named: flat, kind)
    for send in (
        lambda t, i, flat, named: named,
        lambda t, i, flat, named: {name: torch.from_numpy(np.array(value)) for name, value in named.items()},
        lambda t, i, flat, named: (flat, named)[(t + i) % 2],
    ):
        xs, rows = run(method, send, kind)
        # FedExP's rate follows from lengths, which of tensors and of one vector are not added up alike.
        np.testing.assert_allclose(xs, due[0], rtol=1e-5 if method == "FedExP" else 0, atol=0)
        np.testing.assert_array_equal(rows, due[1])
    assert np.ptp(due[0], axis=0).min() > 0  # every element moved


def test_float_buffers_are_a_weighted_mean_over_their_senders():
    server = Server(net(), "FedAvg", clients=3, lr=0.1)
    first, second = net(), net()
    with torch.no_grad():
        first[1].running_mean += 1
        second[1].running_mean += 5
    gradient = np.ones(server.layout.n_parameters, np.float32)  # of a client that sends no buffers
    server.round(
        [
            Update(0, first.state_dict(), steps=2, examples=1),
            Update(1, second.state_dict(), steps=1, examples=3),
            Update(2, value=gradient, kind="gradient", steps=5, examples=4),
        ]
    )
    np.testing.assert_allclose(
        server.tensors(library="numpy")["1.running_mean"], np.full(7, (1 + 3 * 5) / 4), rtol=1e-6
    )
    x = server.layout.flatten(net())[: server.layout.n_parameters]
    np.testing.assert_allclose(server.x[: len(x)], x - 4 / 8 * 0.1 * 5, rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", ["FedAvg", "FedAvgM", "MIFA", "MimiC", "SCAFFOLD", "FedDyn"])
def test_a_norm_does_not_depend_on_the_other_updates_of_a_batch(method, exact, tmp_path):
    """Flat vectors and named tensors in one round, clipped: the same bits in every batch, and from a journal."""

    def run(way, batch_size):
        compute = Compute(batch_size=batch_size, accumulator="exact" if exact else None)
        storage = Storage(tmp_path / way, journal=True) if way == "resumed" else None
        options = {"aggregation": [ClipToMedian()], "compute": compute, "storage": storage}
        server, rng = Server(net(), method, N, lr=0.1, **options), np.random.default_rng(1)
        for _ in range(ROUNDS):
            updates = []
            for i in range(N):
                y = server.x + rng.normal(0, 0.3, server.layout.n).astype(np.float32)
                y[server.layout.n_parameters :] = 1
                named = server.tensors(library="numpy") | server.layout.unflatten(y)
                control = None if server.algorithm.second_vector is None else y[: server.layout.n_parameters]
                updates.append(Update(i, named if i % 3 else y, 3, control=control, keep=True))
            if way == "list":
                server.round(updates)
                continue
            opened = server.open_round()
            for update in updates:
                if way == "resumed" and update.client == 3:
                    server.close()
                    server = Server.load(tmp_path / way)
                    opened = server.open_round()
                opened.add_batch([update])
            opened.finish()
        with server:
            return server.x.tobytes(), [server.store.read(i).tobytes() for i in range(N)]

    assert run("one by one", 1) == run("one by one", 4) == run("list", 4) == run("list", 1) == run("resumed", 2)

"""Exact sums: the order of updates changes no bits, totals equal the sums of the rows, also on disk."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, algorithms, errors, kernels
from fedcore.algorithms import REGISTRY, Linear, Step
from fedcore.algorithms.memory import MIFA
from fedcore.kernels import ExactSum
from fedcore.server.folder import exact_total_problems
from fedcore.server.requests import without_part
from tests.kit import flat, place
from tests.server.forgeries import forge

N, CLIENTS, ROUNDS = 301, 7, 5
SIZES = {client: 10 + 7 * client for client in range(CLIENTS)}


def server_of(name, store="ram", **options):
    x0 = {"w": np.linspace(-1, 1, N - 20).astype(np.float32), "running_mean": np.zeros(20, np.float32)}
    algorithm = algorithms.named(name) if isinstance(name, str) else name
    options = dict(accumulator="exact", lr=0.1) | options
    clients = SIZES if algorithm.needs_shares else None if isinstance(store, ClientStore) else CLIENTS
    return Server(x0, algorithm, clients, storage=place(store), **flat(**options))


def updates(server, t, examples=True):
    """The updates of round t, of many magnitudes; they depend on the round, the client and the broadcast."""
    chosen = np.random.default_rng(t).permutation(CLIENTS)[: 4 + t % 3].tolist()
    sent = server.broadcast(chosen)
    for client in chosen:
        rng = np.random.default_rng([t, client])
        y = sent.x - (rng.normal(size=N) * 10.0 ** rng.uniform(-9, 0, N)).astype(np.float32)
        p, second = server.layout.n_parameters, server.algorithm.second_vector
        control = None if second is None else rng.normal(size=p).astype(np.float32)
        yield Update(client, y, steps=2 + client % 3, examples=SIZES[client] if examples else 1, control=control)


def state_of(server):
    """The state that a round changes, as a digest."""
    now = server._backend.snapshot
    parts = [now.x, np.float64(now.gamma), *([now.momentum] if server.algorithm.keeps_momentum else [])]
    parts += [] if now.exact_total is None else [*now.exact_total, now.total]
    parts += [server.store.read(client) for client in server.clients] if server.algorithm.keeps_rows else []
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def run(name, order, batch_size=None, rounds=ROUNDS, **options):
    server = server_of(name, batch_size=batch_size, **options)
    for t in range(rounds):
        sent = list(updates(server, t))
        with server.open_round() as round:
            for i in order.permutation(len(sent)):
                round.add_batch([sent[i]])
    return state_of(server)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_order_changes_no_method(name):
    orders = np.random.default_rng(2)
    assert len({run(name, orders, fold) for fold in (1, 2, 3, 8)}) == 1


@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedDyn"])
def test_exact_sums_are_close_to_float64_sums(name):
    servers = [server_of(name, accumulator=accumulate) for accumulate in ("exact", "float64")]
    for t in range(ROUNDS):
        for server in servers:
            server.round(updates(server, t))
    np.testing.assert_allclose(servers[0].x, servers[1].x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["MIFA", "MimiC", "SCAFFOLD", "FedVARP", "FedStale"])
@pytest.mark.parametrize("history", [64, 2])
def test_a_total_is_the_sum_of_the_rows_to_the_last_bit(name, codec, history):
    store = ClientStore(CLIENTS, N - 20, codec=codec)
    server = server_of(algorithms.MimiC(history=history) if name == "MimiC" else name, store)
    for t in range(12):
        server.round(updates(server, t))
    now = server._backend.snapshot
    directions = now.history.directions if server.algorithm.keeps_history else None
    assert exact_total_problems(store, now.exact_total, directions) == []
    np.testing.assert_array_equal(now.total, kernels.read_exact(now.exact_total))
    changed = ExactSum(now.exact_total.high, now.exact_total.low ^ 1)
    assert exact_total_problems(store, changed, directions) != []
    for client in list(server.clients)[1:]:
        server.remove_client(client)
    now = server._backend.snapshot
    directions = now.history.directions if server.algorithm.keeps_history else None
    assert exact_total_problems(store, now.exact_total, directions) == []
    server.remove_client(0)
    assert not server._backend.snapshot.exact_total.high.any()
    assert not server._backend.snapshot.exact_total.low.any()


def test_after_the_removal_of_a_row_too_long_the_others_are_added_again():
    server = server_of(MIFA(wait=False))
    p = server.layout.n_parameters
    with ClientStore(3, p) as rows:
        for client, length in ((0, 2.0**60), (1, 1.5)):
            rows.stage(client)[:] = length
        rows.commit(0)
        server._backend.store = rows
        after = without_part(server._backend, 0)
    np.testing.assert_array_equal(after.total, np.full(p, 1.5))
    np.testing.assert_array_equal(kernels.read_exact(after.exact_total), after.total)


def test_a_row_of_another_size_leaves_no_trace():
    server = server_of(MIFA(wait=False))
    server.round(updates(server, 0))
    before = [words.copy() for words in server._backend.snapshot.exact_total]
    server.add_clients(CLIENTS)
    server.round([Update(CLIENTS, value=np.full(N, 2.0**30, np.float32), kind="delta", steps=1)])
    server.remove_client(CLIENTS)
    for words, due in zip(server._backend.snapshot.exact_total, before, strict=True):
        np.testing.assert_array_equal(words, due)


@pytest.mark.parametrize(
    ("word", "value"), [("low", 2**50), ("low", -1), ("high", 2**62), ("high", -(2**62))], ids=lambda value: f"{value}"
)
def test_words_out_of_range_in_a_folder_are_rejected(word, value, tmp_path):
    """With right checksums, as a user of this package can write it."""
    server = server_of("MIFA")
    server.round(updates(server, 0))
    now = server._backend.snapshot
    words = now.exact_total._replace(**{word: getattr(now.exact_total, word).copy()})
    getattr(words, word)[7] = value
    server._backend.snapshot = now._replace(exact_total=words)
    server.save(tmp_path / "run")
    with pytest.raises(errors.CheckpointError, match=f"total/{word}"):
        Server.load(tmp_path / "run")


def without_low(head):
    return replace(head, vectors={name: vector for name, vector in head.vectors.items() if name != "total/low"})


def low_as_floats(head):
    return replace(head, vectors=head.vectors | {"total/low": replace(head.vectors["total/low"], dtype="<f8")})


def high_short(head):
    return replace(head, vectors=head.vectors | {"total/high": replace(head.vectors["total/high"], shape=(3,))})


@pytest.mark.parametrize(
    ("head", "said"),
    [(without_low, r"\btotal\b"), (low_as_floats, "total/low"), (high_short, r"\bvectors\b")],
    ids=["without low", "low as floats", "high short"],
)
def test_an_invalid_exact_total_in_a_folder_is_rejected(head, said, tmp_path):
    server = server_of("MIFA")
    server.round(updates(server, 0))
    server.save(tmp_path / "run")
    forge(tmp_path / "run", head=head)
    with pytest.raises(errors.CheckpointError, match=said):
        Server.load(tmp_path / "run")


def test_warm_starts_are_exact():
    gradients = {i: np.random.default_rng(i).normal(size=N - 20).astype(np.float32) for i in range(CLIENTS)}
    servers = [server_of("SCAFFOLD") for _ in range(2)]
    servers[0].warm_start(gradients)
    servers[1].warm_start(dict(reversed(gradients.items())))
    assert state_of(servers[0]) == state_of(servers[1])
    assert exact_total_problems(servers[0]._backend.store, servers[0]._backend.snapshot.exact_total, None) == []


def test_updates_too_long_for_exact_sums_are_rejected_in_any_cohort():
    for others in (0, 3):
        server = server_of("FedAvg")
        sent = [Update(i, value=np.full(N, 1e-3, np.float32), kind="delta", steps=1) for i in range(others)]
        sent.append(Update(6, value=np.full(N, 2.0**39, np.float32), kind="delta", steps=1))
        report = server.round(sent)
        assert [client for client, _ in report.rejected] == [6]
        assert len(report.accepted) == others


class Halved(MIFA):
    """A method whose total is halved each round."""

    total_is_whole = False

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.N, T=1 / cohort.N), T=Linear(T=0.5, A=1))


def test_a_method_with_fractional_totals_is_rejected():
    undeclared = type("Undeclared", (Halved,), {"total_is_whole": True})
    with pytest.raises(errors.AlgorithmError, match="integers"):
        server_of(undeclared(wait=False)).round([Update(0, np.zeros(N, np.float32), 1)])
    with pytest.raises(errors.UnknownNameError, match=r"^accumulator\b"):
        server_of("FedAvg", accumulator="float16")

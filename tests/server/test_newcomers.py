"""Clients that join with a round are registered with their first accepted update, else never."""

import numpy as np
import pytest

from fedcore import Server, Update, errors
from fedcore.algorithms import REGISTRY, FlexibleFedAvg, named
from tests.kit import place
from tests.server.invariant import contradictions

P = 4
X0 = np.zeros(P, np.float32)
OPTIMA = {client: np.full(P, i + 1, np.float32) for i, client in enumerate("abcd")}


def a_server(method, store="ram", clients=(), optimizer=None):
    return Server(X0, method, list(clients), lr=0.1, storage=place(store), optimizer=optimizer)


def answers(server, clients, asked=()):
    """The clients' updates: steps toward their optima along the method's direction."""
    sent = server.broadcast(clients, newcomers=[*clients, *asked])
    for client in clients:
        y = sent.x - np.float32(sent.lr) * (sent.a * (sent.x - OPTIMA[client]) + np.asarray(sent.offset(client)))
        control = sent.x - OPTIMA[client] if sent.second else None
        yield Update(client, np.asarray(y, np.float32), 1, control=control)


def a_round(server, received, asked, sizes=None):
    new = [client for client in asked if client not in server.clients]
    updates = list(answers(server, received, asked))
    with server.open_round(newcomers=new if sizes is None else {c: sizes[c] for c in new}) as round:
        for update in updates:
            round.add_batch([update])
    return round.report


@pytest.mark.parametrize("method", [name for name in sorted(REGISTRY) if named(name).keeps_rows])
def test_sizes_have_no_effect_in_methods_without_shares(method):
    """A silent newcomer changes n and the shares, but no sum without shares."""
    sized, plain = (Server(X0, method, clients, lr=0.1) for clients in ({"a": 10, "b": 10}, ["a", "b"]))
    for number in range(3):
        asked = ["c", "x", "y"] if number == 0 else []
        a_round(sized, ["a", "b", "c"], asked, dict.fromkeys(asked, 10))
        a_round(plain, ["a", "b", "c"], asked)
        assert contradictions(sized) == []
    assert sized.x.tobytes() == plain.x.tobytes()


COURSE = [["a", "b"], ["b"], ["a", "c"], ["c", "b"], ["a"]]
SILENT = ["x", "y", 7]


@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", [name for name in REGISTRY if not named(name).needs_shares])
@pytest.mark.sample(1)
def test_newcomers_without_an_update_have_no_effect(tmp_path, method, medium):
    """Bit for bit, in memory and in the folder."""
    servers = []
    for name, silent in (("with", SILENT), ("without", [])):
        server = a_server(method, "ram" if medium == "ram" else f"mmap:{tmp_path / name}")
        for received in COURSE:
            report = a_round(server, received, [*received, *silent])
            assert report.accepted == tuple(received)
            assert contradictions(server) == []
        assert set(server.clients) == {"a", "b", "c"}
        servers.append(server)
    np.testing.assert_array_equal(servers[0].x, servers[1].x)
    for client in "abc":
        np.testing.assert_array_equal(servers[0].store.read(client), servers[1].store.read(client))
    if medium == "mmap":
        servers[0].close()
        with Server.load(tmp_path / "with") as again:
            assert set(again.clients) == {"a", "b", "c"}
            np.testing.assert_array_equal(again.x, servers[1].x)
            a_round(again, ["d"], ["d", "x"])
            assert set(again.clients) == {"a", "b", "c", "d"}
    servers[1].close()


@pytest.mark.parametrize("scheme", "ABC")
def test_shares_are_of_the_accepted_newcomers(scheme):
    sizes = {"a": 1, "b": 2, "c": 5, "x": 1000, "y": 7, 7: 9}
    method = FlexibleFedAvg(scheme, local_steps=1)
    silent, alone = a_server(method), a_server(method)
    for received in COURSE:
        reports = a_round(silent, received, [*received, *SILENT], sizes), a_round(alone, received, received, sizes)
        assert reports[0].diversity == pytest.approx(reports[1].diversity, rel=1e-5)
    np.testing.assert_allclose(silent.x, alone.x, rtol=1e-6)
    assert silent._backend.snapshot.population.total == 8


def test_invalid_newcomers_are_rejected():
    server = a_server("FedAvg", clients="ab")
    wrong = [(["a"], errors.RangeError), ([None], errors.UnknownClientError), (["c", "c"], errors.RangeError)]
    for newcomers, error in wrong:
        with pytest.raises(error):
            server.open_round(newcomers=["d", *newcomers])
        assert list(server.clients) == ["a", "b"]
    with pytest.raises(errors.RangeError, match=r"^clients\b"):
        server.open_round(newcomers={"c": 5})
    with pytest.raises(errors.UnknownClientError):
        server.broadcast(["c"])
    for newcomers in (["c"], np.array([7, 8]), np.array([])):
        with server.open_round(newcomers=newcomers):
            assert list(server.clients) == ["a", "b", *newcomers]
    with server.open_round(newcomers=iter("c"), expected=iter("c")) as round:
        assert round.add("c", np.zeros(4, np.float32), steps=1)


def test_a_first_round_without_clients_moves_nothing():
    for method in REGISTRY:
        server = a_server(method)
        with server.open_round():
            pass
        assert server.round_number == 1
        assert not server.x.any()


def test_the_control_does_not_count_newcomers():
    """SCAFFOLD: x moves along the mean of the updates, although clients join."""
    server = a_server("SCAFFOLD")
    a_round(server, ["a", "b"], ["a", "b"])
    before = server.x
    updates = list(answers(server, ["c", "d"]))
    with server.open_round(newcomers=["c", "d"]) as round:
        for update in updates:
            round.add_batch([update])
    mean = np.mean([update.value for update in updates], axis=0)
    np.testing.assert_allclose(server.x, mean, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(before, server.x)

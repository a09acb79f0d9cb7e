"""Sizes and arrivals are columns: rounds leave them alone, and many clients come in one commit."""

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.clients import Registry
from fedcore.errors import RangeError, RoundError, UnknownClientError
from fedcore.server.population import Population

N = 3000


def flexible(store="ram", clients=N, examples=None):
    sizes = [1 + i % 7 for i in range(N)] if examples is None else examples
    return Server("FlexibleFedAvg", np.zeros(4, np.float32), clients, lr=0.1, client_sizes=sizes, store=store)


def hear(server, *clients):
    return server.round([Update(client, server.x + np.float32(1), 1) for client in clients])


def test_a_commit_of_a_round_writes_no_size_again(tmp_path):
    server = flexible(f"mmap:{tmp_path / 'state'}")
    server.arrive(["a", "b"], client_sizes=[3, 4])
    columns = ["population/sizes", "population/arrived"]
    before = [server.store.vector(name).ctypes.data for name in columns]
    for t in range(3):
        hear(server, t, "a")
    assert [server.store.vector(name).ctypes.data for name in columns] == before
    assert len(str(server.store.state)) < 3000  # and of the clients there is no list in what each commit writes


def test_a_resumed_server_knows_who_has_what_and_when_it_came(tmp_path):
    servers = [flexible(f"mmap:{tmp_path / 'state'}"), flexible()]
    for server in servers:
        hear(server, 0, 1)
        server.arrive(["a", "b"], client_sizes={"b": 4, "a": 3})
        server.depart(5)
        server.depart(6, from_objective=False)
        hear(server, 7, "a")
    servers[0].close()
    servers[0] = Server.load(tmp_path / "state")
    for server in servers:
        server.arrive(6, client_sizes=9)  # its share comes back to it
        hear(server, "b", 6, 8)
    assert servers[0].x.tobytes() == servers[1].x.tobytes()
    assert servers[0]._state.snapshot.population.total == servers[1]._state.snapshot.population.total
    ages = servers[1]._state.snapshot.population.ages(servers[1].store.registry, ["a", "b", 6, 8], 3)
    assert ages.tolist() == [3, 3, np.inf, np.inf]


def test_many_arrivals_are_what_they_are_one_by_one():
    together, in_turn = flexible(), flexible()
    for server in (together, in_turn):
        server.depart(17)
    together.arrive(["a", 2**64 - 1, np.int64(17)], client_sizes=[3, 4, 5])
    for client, size in zip(["a", 2**64 - 1, 17], [3, 4, 5], strict=True):
        in_turn.arrive(client, client_sizes=size)
    for server in (together, in_turn):
        hear(server, 17, "a", 2**64 - 1, 0)
    assert together.x.tobytes() == in_turn.x.tobytes()


@pytest.mark.parametrize(
    ("clients", "examples", "error", "match"),
    [
        (["a", 3], [1, 2], RangeError, "3, which is registered already"),
        (["a", "b"], [1], RangeError, "a size for each of 2 clients, got 1"),
        (["a", "b"], [1, 0], RangeError, r"\['b'\].*got 0"),
        (["a", "b"], {"a": 1}, RangeError, r"\['b'\].*got None"),
        (["a"], {"a": 1, "c": 1}, UnknownClientError, "got 'c'"),
        (["a"], [2**53 + 1], RangeError, "1..2"),
        (["a", 1.5], [1, 1], UnknownClientError, "1.5"),
        (["a"], None, RangeError, r"\['a'\].*got None"),
    ],
)
def test_if_one_arrival_is_refused_nobody_came(clients, examples, error, match):
    server = flexible()
    before = server._state.snapshot.population
    with pytest.raises(error, match=match):
        server.arrive(clients, client_sizes=examples)
    assert len(server.clients) == N
    assert server._state.snapshot.population is before


def test_nobody_arrives_where_nobody_is_named():
    server = flexible()
    server.arrive([])
    assert len(server.clients) == N


def test_folders_that_listed_sizes_and_arrivals_are_read():
    registry = Registry([10, 20, "x"])
    listed = {
        "sizes": [[10, 4], [20, 6], ["x", 5]],
        "arrived": [["x", 3]],
        "included": [["gone", 5]],
        "total": 20,
    }
    population = Population.from_state(listed, {}, registry)
    assert population.shares(registry, ["x", 10]).tolist() == [5 / 20, 4 / 20]
    assert population.ages(registry, ["x", 10], 5).tolist() == [3, np.inf]
    assert population.included == {"gone": 5}
    none = Population.from_state({"sizes": [], "arrived": [], "total": 0}, {}, registry)
    assert none.shares(registry, [10]) is none.ages(registry, [10], 0) is None


def test_one_comes_or_many():
    server = Server("MIFA", np.zeros(2, np.float32), 2, lr=0.1)
    server.arrive("abc")
    server.arrive(["d", 7])
    server.arrive(np.int64(9))
    server.arrive(name for name in ("e", "f"))
    assert list(server.clients) == [0, 1, "abc", "d", 7, 9, "e", "f"]
    assert len(server.clients) == 8
    assert "abc" in server.clients
    assert "a" not in server.clients
    for wrong in (b"gh", 1.5, None):
        with pytest.raises(UnknownClientError):
            server.arrive(wrong)
    with pytest.raises(RangeError, match="client_sizes: expected a size for each of 2 clients, got 5"):
        server.arrive(["g", "h"], client_sizes=5)
    sized = Server("FlexibleFedAvg", np.zeros(2, np.float32), 2, lr=0.1, client_sizes=[1, 2])
    sized.arrive("a", client_sizes=np.int64(3))
    sized.arrive("b", client_sizes={"b": 4})
    sized.arrive("c", client_sizes=[5])
    assert sized.client_sizes.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kept", ["ram", "mmap"])
def test_clients_whose_data_change_have_other_shares(tmp_path, kept):
    """p^k = n_k / n of the sizes as they are from then on, as of a server that was told them from the start."""
    server = flexible(f"mmap:{tmp_path / 'state'}" if kept == "mmap" else "ram", ["a", "b", 3], [1, 2, 5])
    server.resize({"b": 9, 3: 4})
    fresh = flexible("ram", ["a", "b", 3], [1, 9, 4])
    for each in (server, fresh):
        hear(each, "a", "b")
    assert (server.x == fresh.x).all()
    np.testing.assert_allclose(server.x, (1 + 9) / 14, rtol=1e-6)
    server.resize({})
    server.arrive("d", client_sizes=6)
    server.resize({"a": 2})
    hear(server, "d")
    np.testing.assert_allclose(server.x, 10 / 14 + 3 * 6 / 21, rtol=1e-6)  # a newcomer's share, threefold at first
    if kept == "mmap":
        x = server.x.copy()
        server.close()
        server = Server.load(tmp_path / "state")
        hear(server, "a")
        np.testing.assert_allclose(server.x - x, 2 / 21, rtol=1e-5)


def test_sizes_that_cannot_change_are_refused():
    server = flexible("ram", ["a", "b"], [1, 2])
    with pytest.raises(UnknownClientError, match="expected registered ids, got 'c'"):
        server.resize({"c": 1})
    with pytest.raises(RangeError, match="client_sizes"):
        server.resize({"a": 0})
    with server.open_round(), pytest.raises(RoundError):
        server.resize({"a": 2})
    with pytest.raises(RangeError, match="told none"):
        Server("MimiC", np.zeros(2, np.float32), 2, lr=0.1).resize({0: 3})
    hear(server, "a", "b")
    np.testing.assert_allclose(server.x, 1, rtol=1e-6)

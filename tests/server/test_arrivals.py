"""Clients that are added and removed, and warm starts."""

import numpy as np
import pytest

import fedcore
from fedcore import ClientStore, Server, Update, algorithms
from fedcore.errors import RangeError, RoundError, UnknownClientError


def vector(*values):
    return np.array(values, np.float32)


def hear(server, **h):
    """A round in which clients c0, c1 send these mean gradients."""
    return server.round(
        [Update(int(name[1:]), value=vector(value), kind="gradient", steps=1) for name, value in h.items()]
    )


def test_a_new_client_counts_in_n_and_has_a_row_of_zeros():
    server = Server(vector(0), algorithms.MIFA(wait=False), clients=2, lr=1.0)
    hear(server, c0=4, c1=8)
    server.add_clients(7)
    hear(server)  # rows 4, 8, 0: v = 4
    assert server.x == [-6 - 4]
    hear(server, c7=3)
    assert server.x == [-10 - 5]
    with pytest.raises(RangeError, match="7"):
        server.add_clients(7)


def test_shares_follow_the_clients():
    server = Server(vector(0), algorithms.FlexibleFedAvg("B", reboot="vanilla"), dict(enumerate([30, 10])), lr=1.0)
    move = lambda client, by: server.round([Update(client, server.x + vector(by), 1)])  # noqa: E731
    move(0, 8)
    assert server.x == [6]  # p = 3/4
    server.add_clients({"new": 40})
    move("new", 8)
    assert server.x == [6 + 4]  # p = 40/80
    server.remove_client("new", from_objective=False)
    move(0, 8)
    assert server.x == [10 + 3]  # p = 30/80 still
    server.remove_client(1)
    move(0, 7)
    assert server.x == [13 + 3]  # p = 30/70
    with pytest.raises(RangeError, match=r"^clients\b"):
        server.add_clients(9)


def test_warm_start():
    server = Server(vector(0), "SCAFFOLD", clients=4, lr=1.0)
    server.warm_start({0: vector(4), 2: vector(8)})
    broadcast = server.broadcast(range(4))
    assert [float(broadcast.offset(i)[0]) for i in range(4)] == [3 - 4, 3, 3 - 8, 3]
    momentum = Server(vector(0), algorithms.FedAvgMVR(beta=0.25), clients=2, lr=1.0)
    momentum.warm_start({0: vector(4), 1: vector(8)})
    assert float(momentum.broadcast([0]).offset(0)[0]) == 0.75 * 6
    both = Server(vector(0), algorithms.SCAFFOLDMVR(beta=0.5), clients=4, lr=1.0)
    both.warm_start({0: vector(4), 2: vector(8)})  # c_0 = 4, c = g = 3: -beta (c_0 - c) + (1 - beta) g
    assert [float(both.broadcast([i]).offset(i)[0]) for i in (0, 1)] == [-0.5 + 1.5, 1.5 + 1.5]
    for warm in (server, momentum, both):
        with pytest.raises(RoundError, match=r"^warm_start\b"):
            warm.warm_start({0: vector(1)})
    hear(fresh := Server(vector(0), "SCAFFOLD", clients=4, lr=1.0), c0=1)
    with pytest.raises(RoundError, match=r"^warm_start\b"):
        fresh.warm_start({0: vector(1)})
    fresh = Server(vector(0), algorithms.FedAvgMVR(), clients=2, lr=1.0)
    with pytest.raises(fedcore.errors.ArrayError, match=r"gradients\[1\]"):
        fresh.warm_start({0: vector(1), 1: vector(np.inf)})


def flexible(scheme, examples):
    algorithm = algorithms.FlexibleFedAvg(scheme=scheme, local_steps=2)
    return Server(vector(0), algorithm, clients=dict(enumerate(examples)), lr=1.0)


def test_a_client_that_returns_to_its_share_is_not_new():
    server = flexible("B", [1, 2, 3])
    server.remove_client(2, from_objective=False)
    server.add_clients({2: 3})
    server.round([Update(i, vector(6), steps=2) for i in range(3)])
    assert server.x == pytest.approx(6)  # the shares add up to 1, and none is boosted
    server.remove_client(2, from_objective=False)
    server.add_clients({2: 6})  # with twice as many examples: p = 1/9, 2/9, 6/9
    server.round([Update(2, server.x + vector(9), steps=2)])
    assert server.x == pytest.approx(6 + 6)
    server.remove_client(2)
    server.add_clients({2: 3})
    server.round([Update(2, server.x + vector(6), steps=2)])
    assert server.x == pytest.approx(12 + 3 * 6 / 2)  # a newcomer: three times its half


@pytest.mark.parametrize("known", [True, False])
def test_clients_can_join_an_empty_server(known):
    """With a size if the others had sizes or if it brings one; the next client then needs one too."""
    server = flexible("B", [1, 2]) if known else Server(vector(0), "FedAvg", clients=2, lr=1.0)
    server.remove_client(0)
    server.remove_client(1)
    if known:
        with pytest.raises(RangeError, match=r"^clients\[5\]"):
            server.add_clients(5)
    server.add_clients({5: 3})
    server.round([Update(5, vector(6), steps=1)])
    assert server.x == pytest.approx(6 * (3 if known else 1))  # the newcomer's share is 1, and boosted by 3
    with pytest.raises(RangeError, match=r"^clients\b"):
        server.add_clients(6)


def test_methods_that_weigh_by_shares_need_sizes():
    with pytest.raises(RangeError, match=r"^clients\b"):
        Server(vector(0), "FlexibleFedAvg", clients=2, lr=1.0)
    server = Server(vector(0), "FedAvg", clients=2, lr=1.0)
    with pytest.raises(RangeError, match=r"^clients\b"):
        server.add_clients({2: 5})
    server.add_clients(2)
    server.round([Update(2, vector(1), 1)])
    for wrong in ([1, 0], [1, True], [1, 2.5]):
        with pytest.raises(RangeError, match=r"^clients\[1\]"):
            Server(vector(0), "FlexibleFedAvg", clients=dict(enumerate(wrong)), lr=1.0)
    for wrong in ({0: 1}, {0: 1, 1: 2, 2: 3}, {0: 1, 5: 2}):
        with pytest.raises((RangeError, UnknownClientError), match=r"^clients\b"):
            Server(vector(0), "FlexibleFedAvg", clients=wrong, lr=1.0, storage=ClientStore(2, 1))


@pytest.mark.parametrize("method", [algorithms.SCAFFOLD, algorithms.SCAFFOLDM, algorithms.SCAFFOLDMVR])
def test_warm_start_of_clients_that_keep_their_rows(method):
    servers = [Server(vector(0), method(placement=at), clients=4, lr=1.0) for at in ("server", "client")]
    for server in servers:
        server.warm_start({0: vector(4), 2: vector(8)})
    at_server, at_client = (server.broadcast([0]) for server in servers)
    from_row = at_server.from_row
    assert at_client.offset(0) + from_row * 4 == pytest.approx(at_server.offset(0))  # the client adds what it keeps

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


@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "MimiC"])
def test_the_row_of_a_removed_client_leaves_every_sum(method):
    algorithm = algorithms.MIFA(wait=False) if method == "MIFA" else method
    server = Server(vector(0), algorithm, clients=3, lr=1.0)
    hear(server, c0=4, c1=8, c2=30)
    hear(server, c0=2, c2=10)
    before = server._backend.snapshot.total.copy()
    row = server.correction(2) if method == "MimiC" else server.store.read(2)
    server.remove_client(2)
    np.testing.assert_array_equal(server._backend.snapshot.total, before - row)
    assert server._backend.snapshot.total.sum() == pytest.approx(
        sum((server.correction(i) if method == "MimiC" else server.store.read(i)).sum() for i in (0, 1)),
        abs=1e-6,
    )
    with pytest.raises(UnknownClientError):
        server.broadcast([2])


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_after_a_removal_x_ends_at_the_optimum_of_the_others(method):
    rng = np.random.default_rng(0)
    optima = rng.normal(size=(5, 6))
    server = Server(np.zeros(6, np.float32), method, clients=5, lr=0.2)
    for t in range(400):
        if t == 100:
            server.remove_client(4)
        there = range(5 if t < 100 else 4)
        cohort = there if t == 0 else [i for i in there if rng.random() < 0.5]
        x = server.x.astype(np.float64)
        server.round([Update(i, value=(x - optima[i]).astype(np.float32), kind="gradient", steps=1) for i in cohort])
    np.testing.assert_allclose(server.x, optima[:4].mean(axis=0), rtol=1e-5, atol=1e-6)


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


def test_the_fast_reboot_boosts_a_new_client_by_3_and_decays():
    server = Server(vector(0), algorithms.FlexibleFedAvg("B"), dict(enumerate([1])), lr=1.0)
    server.add_clients({"l": 1})  # t0 = 0
    moved = []
    for _ in range(5):
        before = float(server.x[0])
        server.round([Update("l", server.x + vector(1), 1)])
        moved.append((float(server.x[0]) - before) / 0.5)
    # Rounds count from 1, so the round after an arrival before round 0 is t - t0 = 1.
    np.testing.assert_allclose(moved, [1 + 2 / t**2 for t in (1, 2, 3, 4, 5)], rtol=1e-5)


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


@pytest.mark.parametrize("method", [algorithms.SCAFFOLD, algorithms.SCAFFOLDM, algorithms.SCAFFOLDMVR])
def test_warm_start_of_clients_that_keep_their_rows(method):
    servers = [Server(vector(0), method(placement=at), clients=4, lr=1.0) for at in ("server", "client")]
    for server in servers:
        server.warm_start({0: vector(4), 2: vector(8)})
    at_server, at_client = (server.broadcast([0]) for server in servers)
    from_row = at_server.from_row
    assert at_client.offset(0) + from_row * 4 == pytest.approx(at_server.offset(0))  # the client adds what it keeps


def test_a_client_that_keeps_its_row_cannot_be_removed():
    server = Server(vector(0), algorithms.SCAFFOLD(placement="client"), clients=3, lr=1.0)
    with pytest.raises(RangeError, match=r"^client\b.*2"):
        server.remove_client(2)
    assert 2 in server.clients


def flexible(scheme, examples):
    algorithm = algorithms.FlexibleFedAvg(scheme=scheme, local_steps=2)
    return Server(vector(0), algorithm, clients=dict(enumerate(examples)), lr=1.0)


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_a_removed_client_can_keep_its_share(scheme):
    server = flexible(scheme, [1, 2, 3])
    server.remove_client(2, from_objective=False)
    server.round([Update(0, vector(6), steps=2), Update(1, vector(12), steps=2)])
    # p = 1/6 and 2/6 as before; scheme A multiplies by N / K_t = 3 / 2, for the objective still has three devices
    assert server.x == pytest.approx((1 + 4) * (1.5 if scheme == "A" else 1))


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


def test_clients_do_not_change_while_a_round_is_open():
    server = Server(vector(0), "MIFA", clients=2, lr=1.0)
    with server.open_round():
        for change in (
            lambda: server.add_clients(5),
            lambda: server.remove_client(0),
            lambda: server.warm_start({0: vector(1)}),
        ):
            with pytest.raises(RoundError):
                change()


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

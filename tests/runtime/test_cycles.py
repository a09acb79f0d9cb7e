"""Deleted objects are freed at once, without the cycle collector: a server's rows may be most of the memory."""

import gc
from contextlib import contextmanager

import numpy as np
import pytest

from fedcore import ClientStore, EdgeAggregator, Network, Server
from fedcore.sim.network.topology import Topology

N = 200


@contextmanager
def no_cycles():
    """Assert that the block leaves no fedcore object to the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("fedcore")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == set()


def play(server, rounds=2):
    for _ in range(rounds):
        broadcast = server.broadcast([0, 1])
        with server.open_round() as round:
            for client in broadcast.ids:
                control = np.ones(N, np.float32) if broadcast.second else None
                round.add(client, broadcast.x + np.float32(0.5), steps=2, control=control)


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "MIFA", "MimiC", "FedVARP", "FedAvgMVR"])
@pytest.mark.parametrize("where", ["memory", "folder", "closed"])
def test_a_deleted_server_is_freed(name, where, tmp_path):
    def work(storage):
        server = Server(np.zeros(N, np.float32), name, clients=3, lr=0.1, storage=storage)
        play(server)
        if where == "closed":
            server.close()

    work(None if where == "memory" else tmp_path / "first")  # imports and caches of the first run
    with no_cycles():
        work(None if where == "memory" else tmp_path / "store")


def test_a_resumed_server_and_one_with_a_failed_round(tmp_path):
    def work(path):
        play(Server(np.zeros(N, np.float32), "MimiC", clients=3, lr=0.1, storage=path))
        server = Server.load(path)
        play(server)
        with pytest.raises(ZeroDivisionError), server.open_round():
            raise ZeroDivisionError

    work(tmp_path / "first")
    with no_cycles():
        work(tmp_path / "store")


def test_stores_edges_and_networks(tmp_path):
    def work():
        store = ClientStore(3, N)
        store.stage(0)[:] = 1
        store.commit(0)
        edge = EdgeAggregator(np.zeros(N, np.float32), "FedAvg", [0, 1], lr=0.1)
        edge.fold(np.zeros(N, np.float32), [], round=0)
        Network([np.zeros(N, np.float32)] * 4, Topology.named("ring", 4), lr=0.1)

    work()
    with no_cycles():
        work()

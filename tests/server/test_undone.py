"""A server whose last transaction is rolled back in its folder continues without a trace of it."""

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, errors
from fedcore.server.folder import Transactions, go_back, last_change, transactions
from tests.server.rounds import N, everything, go_on, made, n


def kept(path, method="MIFA", **options):
    return made(method, storage=Storage(path, keep_previous=True), **options)


def take_back(path, to):
    """Roll back to a transaction in a closed folder; return the server that resumes there."""
    rows = ClientStore.open(path, keep_previous=True)
    assert go_back(rows, to)
    assert not go_back(rows, to)
    assert transactions(rows) == (to, None)
    return Server.load(rows)


def known(server):
    return everything(server, list(server.clients)), list(server.clients)


def one_round(server):
    go_on(server, 1)


def arrival(server):
    server.add_clients({"new": 5, 77: 6})


def departure(server):
    server.remove_client(2)


@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "SCAFFOLDMVR"])
def test_a_rolled_back_warm_start_leaves_no_trace(method, tmp_path):
    gradients = {i: np.full(n, 1 + i, np.float32) for i in range(N)}
    straight = made(method)
    go_on(straight, 3)
    with kept(tmp_path / "run", method) as server:
        server.warm_start(gradients)
        warm = known(server)
    with take_back(tmp_path / "run", 0) as server:
        server.warm_start(gradients)
        assert known(server) == warm
    with take_back(tmp_path / "run", 0) as server:
        go_on(server, 3)
        assert everything(server) == everything(straight)


def test_copies_and_compactions_are_no_transactions(tmp_path):
    """Neither changes the number that servers of several folders compare."""

    def found(name="run"):
        with ClientStore.open(tmp_path / name, readonly=True) as rows:
            return transactions(rows)

    with kept(tmp_path / "run") as server:
        assert found() == Transactions(0, None), "before it was made there was no server"
        go_on(server, 2)
        server.add_clients({"new": 5})
        assert found() == (3, 2)
        server.save(tmp_path / "copy")
        server.checkpoint()
        assert found() == (3, 2)
        assert found("copy") == (3, None)
        server.compact()
        assert found() == (3, None), "a compaction gives back what was kept"
        with pytest.raises(errors.RoundError):
            server.warm_start({})
        with pytest.raises(errors.RangeError):
            server.add_clients({"new": 5})
        assert server.transactions == 3
        server.remove_client("new")
        assert found() == (4, 3)
    with Server.load(tmp_path / "copy") as copy:
        assert (copy.transactions, copy._backend.store.keep_previous) == (3, True)
        go_on(copy, 1)
    assert found("copy") == (4, 3)


def test_a_round_that_fails_is_no_transaction(tmp_path):
    with kept(tmp_path / "run") as server:
        go_on(server, 1)
        opened = server.open_round()
        opened.add(0, server.x, steps=1, examples=1)
        opened.abort()
        with ClientStore.open(tmp_path / "run", readonly=True) as rows:
            assert transactions(rows) == (server.transactions, 0) == (1, 0)


def warm_start(server):
    server.warm_start({0: np.ones(n, np.float32)})


def resized(server):
    server.update_clients({0: 9})


def a_round_with_a_newcomer(server):
    with server.open_round(newcomers={"new": 5}) as round:
        round.add("new", server.x, steps=1, control=np.zeros(n, np.float32))


@pytest.mark.parametrize(
    ("change", "rounds", "due"),
    [
        (one_round, 2, "round 2"),
        (arrival, 2, "the arrival of 2 clients"),
        (departure, 2, "the departure of 1 client"),
        (resized, 2, "a change of client_sizes"),
        (resized, 0, "a change of client_sizes"),
        (a_round_with_a_newcomer, 2, "round 2 and the arrival of 1 client"),
        (warm_start, 0, "a warm start"),
    ],
)
def test_the_last_change_is_described(change, rounds, due, tmp_path):
    kept(tmp_path / "run", "SCAFFOLD, two vectors").close()
    with Server.load(tmp_path / "run", storage=Storage(keep_previous=True)) as server:
        go_on(server, rounds)
        change(server)
    with ClientStore.open(tmp_path / "run", keep_previous=True) as rows:
        assert last_change(rows) == due
        assert rows.undo()
        assert last_change(rows) is None


def test_only_one_transaction_is_rolled_back(tmp_path):
    with kept(tmp_path / "run") as server:
        go_on(server, 3)
    with ClientStore.open(tmp_path / "run", keep_previous=True) as rows:
        for to in (0, 1, 4):
            with pytest.raises(errors.CheckpointError, match=rf"transaction {to}.*3.*2"):
                go_back(rows, to)
        assert transactions(rows) == (3, 2)
        assert go_back(rows, 2)
        with pytest.raises(errors.CheckpointError, match=r"transaction 1.*2"):
            go_back(rows, 1)
    without = r"^store\b.*ClientStore"
    with ClientStore(3, n) as rows, pytest.raises(errors.CheckpointError, match=without):
        transactions(rows)


def test_the_folder_stores_keep_previous(tmp_path):
    def goes_on(**options):
        with Server.load(tmp_path / "run", storage=Storage(**options)) as server:
            go_on(server, 1)
            return server._backend.store.keep_previous

    kept(tmp_path / "run").close()
    assert goes_on()
    assert goes_on(medium="mmap")
    assert not goes_on(medium="ram")
    assert not goes_on(keep_previous=False)
    assert not goes_on()
    with ClientStore.open(tmp_path / "run") as rows:
        assert rows.previous is None
    assert goes_on(keep_previous=True)
    assert goes_on()
    with pytest.raises(errors.RangeError, match=r"^keep_previous\b"):
        Server.load(tmp_path / "run", storage=Storage(medium="ram", keep_previous=True))


def test_a_server_is_loaded_from_an_open_store(tmp_path):
    with kept(tmp_path / "run") as server:
        go_on(server, 2)
        before = known(server)
    rows = ClientStore.open(tmp_path / "run", keep_previous=True, durability="none")
    for name, value in {"medium": "ram", "durability": "round", "keep_previous": False}.items():
        with pytest.raises(errors.RangeError, match=rf"{name}\b"):
            Server.load(rows, storage=Storage(**{name: value}))
    with Server.load(rows, storage=Storage(keep_previous=True)) as server:
        assert known(server) == before
        with pytest.raises(errors.LockedError):
            Server.load(tmp_path / "run")
    with pytest.raises(errors.StoreError, match="closed"):
        rows.read(0)
    with ClientStore.open(tmp_path / "run", readonly=True) as rows:
        with pytest.raises(errors.RangeError, match=r"^path\b"):
            Server.load(rows)
        assert rows.round == 1
    assert known(Server.load(ClientStore.open(tmp_path / "run", medium="ram"))) == before
    with ClientStore(N, n) as rows:
        with pytest.raises(errors.CheckpointError, match=r"^store\b"):
            Server.load(rows)
        assert len(rows.registry) == N, "it is the caller's still"
    with ClientStore(N, n, medium="mmap", path=tmp_path / "rows") as rows:
        with pytest.raises(errors.CheckpointError, match=rf"^{tmp_path}/rows.*ClientStore"):
            Server.load(rows)
        assert len(rows.registry) == N

"""Opening and closing: a folder is one commit, is locked until the server is closed, and is released after errors."""

import gc
import os
from unittest.mock import Mock

import numpy as np
import pytest

from fedcore import ClientStore, Network, Server, Storage, Update, algorithms, errors
from fedcore.store import inspect as info
from fedcore.store.files import folder
from tests.kit import python

N, n = 6, 50


def made(path, **options):
    return Server(np.zeros(n, np.float32), algorithms.MimiC(history=2), N, lr=0.1, storage=path, **options)


def play(server, rounds=1):
    for _ in range(rounds):
        r = server.round_number
        server.round([Update(i, server.x + np.float32(1 + i + r % 7), 1) for i in range(N) if (i + r) % 3])


def require_one_commit(server):
    """Memory and rows are of one round: its number, T as the sum of all corrections, and each row's direction."""
    assert server.store.round + 1 == server.round_number
    history = server._backend.snapshot.history
    assert set(history.directions) == set(history.references)
    corrections = sum(server.correction(i) for i in range(N))
    np.testing.assert_allclose(server._backend.snapshot.total, corrections, rtol=1e-6, atol=1e-6)


def test_a_server_loaded_beside_a_writer_is_of_one_commit(tmp_path, monkeypatch):
    """A round is committed between any two reads of the folder."""
    writer = made(tmp_path / "run")
    play(writer, 5)
    opened = folder.Folder.__init__

    def late(self, *arguments, **options):
        opened(self, *arguments, **options)
        play(writer)

    monkeypatch.setattr(folder.Folder, "__init__", late)
    for _ in range(3):
        before = writer.round_number
        loaded = Server.load(tmp_path / "run", storage=Storage(medium="ram"))
        assert writer.round_number == before + 2  # a look at the state, and one opening
        require_one_commit(loaded)
        play(loaded, 3)
        require_one_commit(loaded)
    monkeypatch.undo()
    writer.close()


def test_only_the_medium_is_read_before_the_folder_is_opened(tmp_path, monkeypatch):
    """The writer commits and closes after the first read."""
    writer = made(tmp_path / "run")
    play(writer, 5)
    look = info.state_of

    def late(path):
        state = look(path)
        play(writer, 2)
        writer.close()
        return state

    monkeypatch.setattr("fedcore.server.opening.state_of", late)
    with Server.load(tmp_path / "run") as loaded:
        assert loaded.store.medium == "mmap"
        assert loaded.round_number == 7
        require_one_commit(loaded)
        play(loaded, 3)
        require_one_commit(loaded)


def test_a_server_is_closed_and_opened_again(tmp_path):
    server = made(tmp_path / "run")
    play(server, 2)
    server.close()
    server.close()
    assert server.x.any()
    with pytest.raises(errors.StoreError, match="closed"):
        play(server)
    with Server.load(tmp_path / "run") as again:
        play(again)
    with Server.load(tmp_path / "run") as third:
        assert third.round_number == 3


def test_a_context_manager_aborts_an_open_round(tmp_path):
    with pytest.raises(ZeroDivisionError), made(tmp_path / "run") as server:
        play(server)
        opened = server.open_round()
        opened.add(0, server.x + 1, steps=1)
        raise ZeroDivisionError
    assert not opened.is_open
    with Server.load(tmp_path / "run") as again:
        assert again.round_number == 1
        require_one_commit(again)


def test_a_server_in_memory_can_be_closed_too():
    with Server(np.zeros(n, np.float32), "MIFA", N, lr=0.1) as server:
        play(server)
    assert server.round_number == 1


def test_the_callers_store_is_closed_with_the_server(tmp_path):
    store = ClientStore(N, n, medium="mmap", path=tmp_path / "rows")
    with Server(np.zeros(n, np.float32), "MIFA", lr=0.1, storage=store) as server:
        play(server)
    ClientStore.open(tmp_path / "rows").close()


def test_the_error_of_a_locked_folder_lists_the_ways_out(tmp_path):
    server = made(tmp_path / "run")
    for act in (
        lambda: Server.load(tmp_path / "run"),
        lambda: Server.load(tmp_path / "run", storage=Storage(medium="mmap")),
        lambda: ClientStore.open(tmp_path / "run"),
        lambda: Server(np.zeros(n, np.float32), "MIFA", N, lr=0.1).save(tmp_path / "run"),
    ):
        with pytest.raises(errors.LockedError, match=r"\(\d+\).*close\(\)") as e:
            act()
        assert 'readonly=True of ClientStore.open, medium="ram" of Server.load' in str(e.value)
    program = "import sys; from fedcore import Server; Server.load(sys.argv[1])"
    other = python("-c", program, tmp_path / "run", status=1)
    assert f"in process {os.getpid()}; close() the store there, or" in other.stderr
    assert Server.load(tmp_path / "run", storage=Storage(medium="ram")).round_number == 0
    server.close()


def test_the_error_of_a_locked_folder_names_an_open_round(tmp_path):
    server = made(tmp_path / "run")
    opened = server.open_round()
    del server
    gc.collect()
    with pytest.raises(errors.LockedError, match="open round"):
        Server.load(tmp_path / "run")
    del opened
    gc.collect()
    Server.load(tmp_path / "run").close()


def test_a_closed_round_keeps_no_store_open(tmp_path):
    server = made(tmp_path / "run")
    finished, aborted = server.open_round(), None
    finished.finish()
    aborted = server.open_round()
    aborted.abort()
    del server
    gc.collect()
    Server.load(tmp_path / "run").close()
    for over in (finished, aborted):
        with pytest.raises(errors.RoundError):
            over.finish()


@pytest.mark.parametrize(
    ("options", "error"), [({"algorithm": "FlexibleFedAvg"}, errors.RangeError), ({"clients": 0}, errors.RangeError)]
)
def test_a_failed_creation_leaves_no_folder(tmp_path, options, error):
    arguments = {"algorithm": "MIFA", "clients": N} | options
    for _ in range(2):
        with pytest.raises(error) as caught:
            Server(np.zeros(n, np.float32), lr=0.1, storage=tmp_path / "run", **arguments)
        assert "in use" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_load_releases_the_folder(tmp_path):
    made(tmp_path / "run", server_lr=lambda t: 0.1).close()
    with pytest.raises(errors.CheckpointError) as caught:
        Server.load(tmp_path / "run")
    Server.load(tmp_path / "run", server_lr=lambda t: 0.1).close()
    ClientStore(N, n, medium="mmap", path=tmp_path / "rows").close()
    with pytest.raises(errors.CheckpointError, match="Server") as caught:
        Server.load(tmp_path / "rows", storage=Storage(medium="mmap"))
    ClientStore.open(tmp_path / "rows").close()
    del caught


def test_a_network_is_loaded_in_one_opening(tmp_path, monkeypatch):
    network = Network([np.zeros(n, np.float32)] * 3, np.full((3, 3), 1 / 3), lr=0.1)
    network.save(tmp_path / "net")
    opened, init = [], folder.Folder.__init__

    def counted(self, *arguments, **options):
        opened.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(folder.Folder, "__init__", counted)
    Network.load(tmp_path / "net")
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["aggregation.Sum.total_at_once", "validation.Validator.remembered"])
def test_a_round_is_aborted_if_its_sums_are_interrupted(monkeypatch, name):
    server = Server(np.zeros(n, np.float32), "FedAvg", N, lr=0.1, aggregation="median" if "Valid" in name else None)
    (round := server.open_round()).add(0, np.ones(n, np.float32), steps=1, keep=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"fedcore.server.{name}", Mock(side_effect=KeyboardInterrupt))
        round.finish()
    assert (round.is_open, server.round([Update(0, server.x + 1, 1)]).round) == (False, 0)

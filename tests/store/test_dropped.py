"""Stores that nobody closes, and stores of more clients than there is memory for."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.clients.registry import MOST
from tests.server.invariant import contradictions
from tests.store.contents import content, write

N = 30


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "fedcore-store"]


def test_a_store_that_is_dropped_leaves_no_thread_and_no_file(tmp_path):
    gc.collect()  # of what other tests have left
    files = os.listdir("/proc/self/fd")
    for number in range(5):
        store = ClientStore(3, N, medium="mmap", path=tmp_path / f"{number}", durability="checkpoint")
        write(store, 0, content(N, 0))
        store.commit(0)  # starts writing back
        store.prefetch([0])
        assert threads()
        del store
        gc.collect()
        assert not threads()
        ClientStore.open(tmp_path / f"{number}").close()
    assert os.listdir("/proc/self/fd") == files


def test_a_store_that_is_collected_in_its_own_thread(tmp_path):
    store = ClientStore(3, N, medium="mmap", path=tmp_path / "store")
    write(store, 0, content(N, 0))
    store.commit(0)
    background, done = store._session.background, threading.Event()
    held = [store]
    del store
    background._do(lambda: (held.clear(), gc.collect(), done.set()))
    assert done.wait(60)
    for thread in threading.enumerate():
        if thread.name == "fedcore-store":
            thread.join(60)
    assert not threads()
    ClientStore.open(tmp_path / "store").close()


def test_a_store_that_is_open_when_python_ends(tmp_path):
    program = f"""
from fedcore import ClientStore
store = ClientStore(3, 4, medium="mmap", path={str(tmp_path / "store")!r}, durability="checkpoint")
store.stage(0)[:] = 1
store.commit(0)
store.checkpoint()
store.prefetch([0])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    with ClientStore.open(tmp_path / "store") as store:
        assert store.round == 0


@pytest.mark.parametrize("clients", [10**10, MOST])
@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC"])
def test_a_server_of_more_clients_than_fit_into_memory(method, clients):
    """What a client without a row costs is nothing."""
    server = Server(method, np.zeros(4, np.float32), clients=clients, lr=0.1)
    server.round([Update(i, server.x + 1, 1) for i in (0, 5)])
    assert server.round_number == 1
    assert server.store.row(clients - 1) is None
    assert server.store.round_of(clients - 1) is None
    server.broadcast([clients - 1])
    server.depart(clients - 1)
    server.arrive("new") if clients < MOST else None
    assert len(server.store) == (0 if method == "FedAvg" else 2)


def test_a_row_that_memory_has_no_room_for_is_refused_by_name(tmp_path):
    for where in ({}, {"medium": "mmap", "path": tmp_path / "store"}):
        with ClientStore(MOST, N, **where) as store:
            with pytest.raises(
                errors.StoreError, match=r"the row of number \d+ needs [\d,]+ bytes of memory, 25 for eac"
            ):
                store.stage(MOST - 1)
            write(store, 7, content(N, 7))
            store.commit(0)
            store.prefetch([MOST - 1, 7])
            store.forget(MOST - 2)
            store.commit(1)
    with ClientStore.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.read(7), content(N, 7))
        assert store.row(MOST - 1) is None
        store.save(tmp_path / "copy")
        store.compact()
        assert store.verify() == []


AT_EXIT = """
import atexit, sys, threading
begun, may_go_on = threading.Event(), threading.Event()
def last():
    may_go_on.set()
    thread.join(60)
atexit.register(last)  # before anything else: what is registered later runs before it
import numpy as np
from fedcore import Server, Update
from fedcore.store.files import system_calls as disk
server = Server("MIFA", np.zeros(50, np.float32), 2, lr=0.1, store=f"mmap:{sys.argv[1]}")
act = getattr(disk, sys.argv[2])
def waiting(*arguments):
    begun.set()
    may_go_on.wait()
    return act(*arguments)
setattr(disk, sys.argv[2], waiting)
updates = [Update(client, server.x + 1, 1) for client in range(2)]
thread = threading.Thread(target=lambda: server.round(updates), daemon=True)
thread.start()
begun.wait()
"""


@pytest.mark.parametrize("call", ["write", "reserve", "sync", "commit"])
def test_a_thread_is_in_a_round_when_the_program_ends(tmp_path, call):
    """Its files stay as they are until the process ends, which is as a kill: nobody closes them under its hands."""
    command = [sys.executable, "-c", AT_EXIT, tmp_path / "run", call]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    with Server.load(tmp_path / "run") as server:
        assert server.round_number == 1
        assert server.store.verify() + contradictions(server) == []

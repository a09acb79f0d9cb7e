"""Relative paths, ``~``, and folders that are moved or deleted while a store has them open."""

import os
import shutil

import numpy as np
import pytest

import fedcore
from fedcore import ClientStore, Server, cluster
from fedcore.cluster import reshard
from fedcore.errors import RangeError, StoreError
from fedcore.model_files import write_model
from fedcore.network import Network
from fedcore.server.saved_model import read_model

X0 = np.zeros(20_000, np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with another one in it; it is the home directory, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    return tmp_path


def play(server, client=0):
    with server.open_round() as round:
        round.add(client, X0 + 1, steps=1)


def test_a_changed_working_directory_changes_nothing(here):
    server = Server("MIFA", X0, clients=9, lr=0.1, store="mmap:state", undoable=True)
    many = cluster.Server("MIFA", X0, 9, lr=0.1, shards=2, path="many", folders=["a", "b"])
    reader = ClientStore.open("state", readonly=True)
    os.chdir("other")
    for one in (server, many):
        play(one)
        one.arrive("new")
        play(one, "new")
        one.checkpoint()
    reader.refresh()
    assert reader.round == 1
    if not (child := os.fork()):
        status = 1
        try:
            assert reader.read("new")[0] == pytest.approx(-10)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    server.compact()
    server.save("copy")
    many.save("copies")
    for opened in (reader, server, many):
        opened.close()
    os.chdir(here)
    assert sorted(os.listdir()) == ["a", "b", "many", "other", "state"]
    for path in ("state", "other/copy"):
        with Server.load(path) as again:
            os.chdir("other")
            play(again)
            assert again.round_number == 3
            os.chdir(here)
    for path, folders in (("many", ["a", "b"]), ("other/copies", None)):
        with cluster.Server.load(path, folders=folders) as again:
            os.chdir("other")
            play(again)
            assert again.round_number == 3
            os.chdir(here)


def test_the_home_directory_is_meant_by_a_tilde(here):
    os.chdir("other")
    ClientStore(2, 3, medium="mmap", path="~/rows").save("~/saved")
    ClientStore.open("~/saved", readonly=True).close()
    with Server("FedAvg", X0, clients=2, lr=0.1, store="mmap:~/state") as server:
        server.save("~/copy")
        write_model({"w": X0}, "~/model.npz")
    Server.load("~/copy", medium="ram")
    assert read_model("~/copy").round_number == 0
    Network([X0] * 2, np.full((2, 2), 0.5), lr=0.1).save("~/network")
    Network.load("~/network")
    cluster.Server("FedAvg", X0, 2, lr=0.1, path="~/many", folders=["~/a", "~/b"]).close()
    with cluster.Server.load("~/many", folders=["~/a", "~/b"]) as many:
        many.save("~/copies")
    reshard("~/many", 1, to="~/one", current_folders=["~/a", "~/b"])
    names = "a b copies copy many model.npz network one other rows saved state"
    assert sorted(os.listdir(here)) == names.split()
    assert os.listdir() == []
    with Server("FedAvg", X0, clients=2, lr=0.1, store="mmap:./~"):  # a folder of this name
        assert os.listdir() == ["~"]


def test_a_home_directory_that_there_is_not(here):
    for make in (
        lambda: Server("FedAvg", X0, clients=2, lr=0.1, store="mmap:~no-such-user/state"),
        lambda: Server.load("~no-such-user/state"),
        lambda: fedcore.read_records("~no-such-user/runs"),
    ):
        with pytest.raises(RangeError, match="path: expected a home directory for ~, got none for '~no-such-user/"):
            make()
    os.chdir("other")
    (here / "other").rmdir()
    with pytest.raises(StoreError, match="state: expected a working directory, got a deleted one"):
        Server("FedAvg", X0, clients=2, lr=0.1, store="mmap:state")


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_folder_that_is_gone_is_named_and_works_again_where_it_was(here, how):
    server = Server("MIFA", X0, clients=9, lr=0.1, store="mmap:state", undoable=True)
    play(server)
    reader = ClientStore.open("state", readonly=True)
    if how == "moved":
        os.rename("state", "moved")
    else:
        shutil.rmtree("state")
    calls = [
        lambda: play(server, 1),
        lambda: server.arrive("new"),
        lambda: server.depart(0),
        lambda: server.change(lr=0.2),
        server.checkpoint,
        server.compact,
        server.store.info,
        reader.info,
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"/state: expected the folder of an open store, .*moved or deleted"):
            call()
    assert (server.round_number, server.transactions) == (1, 1)
    server.save("copy")  # what is open can still be read
    with Server.load("copy") as copy:
        play(copy, 1)
        if how == "moved":
            os.rename("moved", "state")
            play(server, 1)
            np.testing.assert_array_equal(server.x, copy.x)
    reader.close()
    server.close()
    assert os.path.exists("state") == (how == "moved")

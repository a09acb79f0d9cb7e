"""Commits and compactions that an exception from outside stops, at whatever line, leave a store that goes on."""

from contextlib import suppress
from shutil import rmtree

import numpy as np
import pytest

from fedcore import ClientStore
from fedcore.errors import StoreError
from fedcore.store import geometry
from fedcore.store.files import slot_file
from fedcore.store.files import system_calls as disk
from fedcore.store.files.inventory import VECTORS
from fedcore.store.files.store_folder import vectors_header
from tests.server.stopping import Stopped, each_line, from_outside


@pytest.mark.parametrize("room", ["slot_file.py", "store_folder.py"])
def test_a_file_of_vectors_is_made_again(tmp_path, room):
    vectors = {"x": np.arange(5, dtype=np.float32)}
    at, goes_on = 1, True
    while goes_on:
        with ClientStore(3, 2, medium="mmap", path=tmp_path / str(at)) as store:
            with suppress(Stopped):
                goes_on = each_line(lambda store: store.commit(0, vectors), store, at, from_outside, f"files/{room}")
            store.commit(0, vectors)
            np.testing.assert_array_equal(store.vector("x"), vectors["x"])
        at += 1
    assert at > 20


def test_a_file_of_vectors_that_a_kill_left_empty_is_made_again_beside_a_reader(tmp_path):
    vectors = {"x": np.arange(5, dtype=np.float32)}
    path = tmp_path / "store"
    store = ClientStore(3, 2, medium="mmap", path=path)
    with ClientStore.open(path, readonly=True):  # looks at an older commit, so that nothing is deleted
        store.stage(0)[:] = 1
        store.commit(0)
        store.close()
        (path / VECTORS.format(20)).touch()
        with ClientStore.open(path) as again:
            again.commit(1, vectors)
            np.testing.assert_array_equal(again.vector("x"), vectors["x"])


@pytest.mark.parametrize("error", [FileExistsError(17, "File exists"), OSError(24, "Too many open files")])
def test_a_file_that_was_there_is_not_deleted(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    (tmp_path / "vectors").touch()
    monkeypatch.setattr(slot_file.os, "open", fails)
    with pytest.raises(StoreError, match=error.strerror):
        slot_file.SlotFile.create(tmp_path / "vectors", vectors_header("00" * 16, 20, 3))
    assert (tmp_path / "vectors").exists()


@pytest.mark.parametrize(("medium", "holes"), [("ram", True), ("mmap", True), ("mmap", False)])
def test_rows_after_a_compaction_have_slots_of_their_own(tmp_path, medium, holes, monkeypatch):
    monkeypatch.setattr(geometry, "CHUNK", 1)
    if not holes:
        monkeypatch.setattr(disk, "free", lambda *_: False)
    k, n = 24, 1000  # more rows than a chunk holds, so that the file becomes shorter
    at, goes_on = 1, True
    while goes_on:
        path = tmp_path / str(at) if medium == "mmap" else None
        with ClientStore(k, n, medium=medium, path=path, durability="none") as store:
            for client in range(k):
                store.stage(client)[:] = client
            store.commit(0)
            for client in {*range(k)} - {0, 3, 4}:
                store.forget(client)
            store.commit(1)
            with suppress(Stopped):
                goes_on = each_line(lambda store: store.compact(), store, at, from_outside, "slot")
            for number in range(100, 100 + k):
                store.add(str(number))
                store.stage(str(number))[:] = number
            store.commit(2)
            rows = {client: store.read(client)[0] for client in store.registry}
            assert rows == {0: 0, 3: 3, 4: 4} | {str(number): number for number in range(100, 100 + k)}
        if path:
            with ClientStore.open(path) as again:
                assert {client: again.read(client)[0] for client in again.registry} == rows
            rmtree(path)
        at += 1
    assert at > 20

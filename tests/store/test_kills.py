"""A kill or an exception at any moment leaves the last committed round."""

import json
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

from fedcore import ClientStore
from fedcore.errors import StoreError
from fedcore.files import OpenFolder
from fedcore.store import slots as geometry
from fedcore.store.files import disk, slot_file
from fedcore.store.files.inventory import VECTORS
from fedcore.store.files.slot_file import Header
from tests.kit import python
from tests.server.stopping import from_outside, line_by_line

PROGRAM = Path(__file__).with_name("killed.py")
LONG = pytest.mark.endurance
WAYS = [("round", 24), ("checkpoint", 24), ("none", 24), ("round", 12, "undoable"), ("none", 12, "undoable")]


@pytest.mark.parametrize(
    ("durability", "kills", "keep_previous"),
    [(durability, kills, keep_previous) for durability, kills, *keep_previous in WAYS]
    + [pytest.param(durability, 2000, keep_previous, marks=LONG) for durability, _, *keep_previous in WAYS],
    ids=lambda value: "undoable" if value == ["undoable"] else "" if value == [] else None,
)
def test_killed_at_any_moment(tmp_path, durability, kills, keep_previous):
    run = python(PROGRAM, tmp_path, durability, kills, "1", *keep_previous, timeout=400 + 2 * kills)
    result = json.loads(run.stdout)
    assert sum(result["places"].values()) == kills
    # While a round is committed, saved, compacted, and taken back or half written; on a machine of any speed.
    assert {"c", "s", "p", *("u" if keep_previous else "w")} <= set(result["places"])
    assert result["rounds"] > 0  # and it got on between the kills
    assert result["left"] == ["copy", "store"]


@pytest.mark.parametrize(
    "strides",
    [{"round": 12, "checkpoint": 24, "none": 24}, pytest.param({"round": 1, "checkpoint": 1, "none": 1}, marks=LONG)],
    ids=["some", "every"],
)
def test_killed_at_the_calls_of_an_undo_history(folder_in_memory, strides):
    ways = [f"{durability}={stride}" for durability, stride in strides.items()]
    kills = json.loads(python(PROGRAM.with_name("undo_killed.py"), folder_in_memory, *ways, timeout=1800).stdout)
    assert len(kills) == 18
    assert min(kills.values()) >= 2  # opening makes one call, before and behind which it is killed
    assert strides["round"] > 1 or sum(kills.values()) > 300


@pytest.mark.parametrize("room", ["slot_file.py", "folder.py"])
def test_a_file_of_vectors_is_made_again(tmp_path, room):
    vectors = {"x": np.arange(5, dtype=np.float32)}
    for count, run in enumerate(line_by_line(from_outside, f"files/{room}", least=20)):
        with ClientStore(3, 2, medium="mmap", path=tmp_path / str(count)) as store:
            run(store.commit, 0, vectors)
            store.commit(0, vectors)
            np.testing.assert_array_equal(store.vector("x"), vectors["x"])


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
def test_an_existing_file_is_not_deleted(tmp_path, monkeypatch, error):
    def fails(*_, **__):
        raise error

    (tmp_path / "vectors").touch()
    monkeypatch.setattr(slot_file.os, "open", fails)
    with pytest.raises(StoreError, match=error.strerror):
        slot_file.SlotFile.create(OpenFolder(tmp_path, -1), "vectors", Header.of_vectors("00" * 16, 20, 3))
    assert (tmp_path / "vectors").exists()


@pytest.mark.parametrize(("medium", "holes"), [("ram", True), ("mmap", True), ("mmap", False)])
def test_rows_after_a_compaction_have_distinct_slots(tmp_path, medium, holes, monkeypatch):
    monkeypatch.setattr(geometry, "CHUNK", 1)
    if not holes:
        monkeypatch.setattr(disk, "free", lambda *_: False)
    k, n = 20, 1000  # more rows than a chunk has, so that the file becomes shorter
    # The second case interrupts other lines of code than the third.
    lines = line_by_line(from_outside, "slot", first=1 if holes else 4, stride=6 if medium == "mmap" else 1, least=20)
    for count, run in enumerate(lines):
        path = tmp_path / str(count) if medium == "mmap" else None
        with ClientStore(k, n, medium=medium, path=path, durability="none") as store:
            for client in range(k):
                store.stage(client)[:] = client
            store.commit(0)
            for client in {*range(k)} - {0, 3, 4}:
                store.forget(client)
            store.commit(1)
            run(store.compact)
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

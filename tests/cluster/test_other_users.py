"""A cluster's folder that other users may write to: no folder elsewhere that they name is opened or deleted."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, cluster
from fedcore.cluster.manifest import INTENT, NAME
from fedcore.errors import CheckpointError, FedcoreError, StoreError
from tests.cluster.pairs import made, n, one_round
from tests.store.kit import OPENING, meanwhile

X0 = np.linspace(-1, 1, n, dtype=np.float32)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def victim(tmp_path):
    """Another run of the same user's, which is not at work."""
    with made("MIFA", X0, shards=2, path=tmp_path / "victim") as server:
        one_round(server)
    (tmp_path / "victim" / "thesis").mkdir()
    (tmp_path / "victim" / "thesis" / "rows.slots").write_text("years of work")
    return tmp_path / "victim"


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def tree(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "readers" not in path.parts and path.name != "lock" and "sqlite-" not in path.name
    }


def by_a_link(shared, victim):
    (shared / "shard-0-0123abcd").symlink_to(victim / "shard-0")
    return "shard-0-0123abcd"


def by_a_link_above(shared, victim):
    (shared / "runs").symlink_to(victim)
    return "runs/shard-0"


def a_folder_of_no_store(shared, victim):
    """With the entries' names of a store, and no store inside."""
    shutil.copytree(victim / "thesis", shared / "shard-0-0123abcd")
    return "shard-0-0123abcd"


def another_run_s_shard(shared, victim):
    """It lies in the shared folder, where other users may have moved it."""
    shutil.copytree(victim / "shard-1", shared / "shard-0-0123abcd")
    return "shard-0-0123abcd"


NAMES = {
    "absolute": lambda shared, victim: str(victim / "shard-0"),
    "above": lambda shared, victim: "../victim/shard-0",
    "above, through a name": lambda shared, victim: "shard-0-0123abcd/../../victim/shard-0",
    "link": by_a_link,
    "link above": by_a_link_above,
    "no store": a_folder_of_no_store,
    "number of another": another_run_s_shard,
    "dot": lambda shared, victim: ".",
    "empty": lambda shared, victim: "",
    "of no run": lambda shared, victim: "../victim/thesis",
}


def manifest_of(victim, shared, name, *, copy):
    saved = json.loads((victim / NAME).read_text())
    saved["shards"][0]["folder"] = name
    saved["shards"][1]["folder"] = "shard-1-0123abcd"
    return json.dumps(saved | {"copy": copy})


@pytest.mark.parametrize("way", ["manifest", "made", "going"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(1)
def test_a_save_deletes_nothing_that_others_name(tmp_path, victim, shared, name, way):
    folder = NAMES[name](shared, victim)
    cluster_name = json.loads((victim / NAME).read_text())["cluster"]
    with made("MIFA", X0, shards=2, path=tmp_path / "mine") as server:
        one_round(server)
        if way == "manifest":
            (shared / NAME).write_text(manifest_of(victim, shared, folder, copy=True))
        else:
            parts = {"cluster": cluster_name, "folders": [folder, "../victim/shard-1"]}
            (shared / INTENT).write_text(json.dumps({"home": str(shared), "made": None, "going": None, way: parts}))
        before, beside = tree(victim), tree(shared)
        with suppress(FedcoreError):
            server.save(shared)
        assert tree(victim) == before
        theirs = {path: content for path, content in beside.items() if path.parts[0] not in (NAME, INTENT)}
        assert theirs.items() <= tree(shared).items()
        server.save(tmp_path / "copy")
    with Server.load(tmp_path / "copy") as copy, Server.load(victim) as there:
        assert copy.round_number == there.round_number == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_opens_nothing_outside_its_folder(victim, shared, name):
    folder = NAMES[name](shared, victim)
    shutil.copytree(victim / "shard-1", shared / "shard-1-0123abcd")
    (shared / NAME).write_text(manifest_of(victim, shared, folder, copy=False))
    before = tree(victim)
    with pytest.raises((StoreError, CheckpointError)):
        Server.load(shared)
    with pytest.raises((StoreError, CheckpointError)):
        cluster.reshard(shared, 3)
    assert tree(victim) == before


@pytest.mark.parametrize("way", ["folder", "link"])
def test_a_folder_that_takes_a_shard_s_place_meanwhile_stays(tmp_path, shared, way):
    thesis, opened, places = tmp_path / "thesis", [], []
    ClientStore(2, 4, medium="mmap", path=thesis).close()

    def swap(folder):
        if (
            folder == str(shared) and f"{older}/" in str(opened[-1:]) and not places
        ):  # it is found to be the copy's shard
            older.rename(shared / "aside")
            places.append(thesis.rename(older) if way == "folder" else thesis)
            if way == "link":
                older.symlink_to(thesis)

    with made("MIFA", X0, shards=1, path=tmp_path / "mine") as server:
        server.save(shared)
        before, older = tree(thesis), next(shared.glob("shard-0-*"))
        with meanwhile({OPENING: opened.append, "os.scandir": swap}), suppress(FedcoreError):
            server.save(shared)
    assert tree(places[0]) == before
    assert b"to be deleted" not in (places[0] / "lock").read_bytes()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_save_to_a_file_is_rejected(tmp_path, make):
    make(tmp_path / "taken")
    with made("MIFA", X0, shards=2) as server:
        with pytest.raises(StoreError, match=r"/taken\b"):
            server.save(tmp_path / "taken")
        with pytest.raises(StoreError, match="taken"):
            made("MIFA", X0, shards=2, path=tmp_path / "taken" / "run")


def test_the_caller_may_name_folders_elsewhere(victim, shared):
    (shared / NAME).write_text(manifest_of(victim, shared, str(victim / "shard-0"), copy=False))
    with Server.load(shared, storage=Storage(folders=[victim / "shard-0", victim / "shard-1"])) as server:
        assert server.round_number == 1


@needs_root
@pytest.mark.parametrize("name", [NAME, INTENT])
def test_a_file_of_another_user_decides_nothing(tmp_path, shared, name):
    with made("MIFA", X0, shards=2, path=tmp_path / "mine") as server:
        server.save(shared)
        if name == INTENT:
            saved = json.loads((shared / NAME).read_text())
            folders = [one["folder"] for one in saved["shards"]]
            made_ = {"cluster": saved["cluster"], "folders": ["shard-0", "shard-1"]}
            going = {"cluster": saved["cluster"], "folders": folders}
            (shared / INTENT).write_text(json.dumps({"made": made_, "going": going}))
        os.chown(shared / name, 1001, 1001)
        before = tree(shared)
        with pytest.raises(StoreError, match="another user"):
            server.save(shared)
        assert tree(shared) == before


@needs_root
def test_a_shard_of_another_user_is_neither_opened_nor_deleted(tmp_path, shared):
    with made("MIFA", X0, shards=2, path=tmp_path / "mine") as server:
        server.save(shared)
        (theirs,) = shared.glob("shard-1-*")
        os.chown(theirs, 1001, 1001)
        with pytest.raises(StoreError, match="another user"):
            Server.load(shared)
        server.save(shared)
    assert (theirs / "index.sqlite").exists()


def test_a_new_shard_is_not_made_behind_a_link(shared, tmp_path):
    (shared / "shard-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"/shard-1\b"):
        made("MIFA", X0, shards=2, path=shared)
    assert not (tmp_path / "elsewhere").exists()
    assert not (shared / NAME).exists()


def test_a_copy_is_replaced_where_the_file_system_names_another_owner(shared, monkeypatch):
    """A network file system may map all users to one: every file is root's, and this user is not root."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with made("MIFA", X0, shards=2) as server:
        server.save(shared)
        first = {path.name for path in shared.iterdir()}
        one_round(server)
        server.save(shared)
        x = server.x.copy()
    second = {path.name for path in shared.iterdir()}
    assert first & second == {NAME}
    assert len(first) == len(second)
    with Server.load(shared) as copy:
        assert copy.x.tobytes() == x.tobytes()


@pytest.mark.parametrize("path", ["shared", "shared/cluster.json", "pipe"])
def test_a_pipe_is_rejected_at_once(tmp_path, shared, path):
    os.mkfifo(shared / NAME)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match=path):
        Server.load(tmp_path / path)


def test_a_manifest_that_is_a_link_or_larger_than_memory_is_rejected(victim, shared):
    (shared / NAME).symlink_to(victim / NAME)
    for shard in ("shard-0", "shard-1"):
        shutil.copytree(victim / shard, shared / shard)
    with pytest.raises(StoreError, match="symbolic link"):
        Server.load(shared)
    (shared / NAME).unlink()
    (shared / NAME).touch()
    os.truncate(shared / NAME, 1 << 40)
    with pytest.raises(FedcoreError, match=NAME):
        Server.load(shared)

"""A copy replaces nothing or an older copy, and never a run."""

import re

import numpy as np
import pytest

from fedcore import Server, cluster
from fedcore.cluster.manifest import INTENT
from fedcore.errors import CheckpointError, LockedError, StoreError
from tests.cluster.pairs import made, n, one_round

X0 = np.linspace(-1, 1, n, dtype=np.float32)


def test_by_another_name_of_its_own_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
        with pytest.raises(StoreError, match="server's own"):
            server.save(tmp_path / "link")
        one_round(server)
    with Server.load(tmp_path / "link") as server:
        assert server.round_number == 2
        with pytest.raises(StoreError, match="server's own"):
            server.save(tmp_path / "run")


@pytest.mark.parametrize("is_open", [True, False])
def test_over_a_run(tmp_path, is_open):
    other = made("MIFA", X0, shards=2, path=tmp_path / "other")
    one_round(other)
    if not is_open:
        other.close()
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server, pytest.raises(StoreError, match="server's own"):
        server.save(tmp_path / "other")
    other.close()
    with Server.load(tmp_path / "other") as other:
        assert other.round_number == 1


def test_over_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with made("MIFA", X0, shards=2) as server, pytest.raises(StoreError, match=r"notes\.txt"):
        server.save(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_over_a_copy_in_use(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(tmp_path / "copy")
        with Server.load(tmp_path / "copy") as going_on:
            one_round(going_on)
            with pytest.raises(LockedError):
                server.save(tmp_path / "copy")
            one_round(going_on)
        for load in (True, False):
            with pytest.raises(StoreError, match="a store with commits"):
                server.save(tmp_path / "copy")
            if load:
                with Server.load(tmp_path / "copy") as copy:
                    assert copy.round_number == 2


def test_a_copy_that_was_only_looked_at_is_replaced(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        for k in range(3):
            server.save(tmp_path / "copy")
            with Server.load(tmp_path / "copy") as copy:
                assert copy.round_number == k
                copy.compact()
            one_round(server)


def test_the_only_shard_of_a_run_that_was_cut_is_not_replaced_by_a_server_s_copy(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
    cluster.reshard(tmp_path / "run", 1)
    [shard] = (tmp_path / "run").glob("shard-0-*")
    with pytest.raises(StoreError, match="a store with commits"):
        Server(X0, "MIFA", 6, lr=0.1).save(shard)
    with Server.load(tmp_path / "run") as whole:
        assert whole.round_number == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"{}", b'{"made": 3, "going": null}', b'{"made": {"cluster": "x"}, "going": 1}'],
)
def test_the_error_of_a_damaged_intent_names_the_file_to_delete(tmp_path, content):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(tmp_path / "copy")
        ways = {"copy": server.save, "run": lambda path: cluster.reshard(path, 3)}
        for name, way in ways.items():
            intent = tmp_path / name / INTENT
            intent.write_bytes(content)
            if name == "run":
                server.close()
            with pytest.raises(CheckpointError, match=re.escape(f"delete {intent}")):
                way(intent.parent)
            assert intent.read_bytes() == content
            intent.unlink()
            way(intent.parent)
    for name in ways:
        with Server.load(tmp_path / name) as server:
            assert server.verify() == []

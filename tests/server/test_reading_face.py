"""``Server.store`` shows the rows, and cannot change them: the sums would no longer fit."""

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update
from fedcore.errors import CheckpointError, RangeError
from fedcore.server.opening import on_device
from fedcore.store.reader import ReadRows
from fedcore.store.registry import Registry
from tests.server.invariant import contradictions


@pytest.fixture(params=["ram", "mmap"])
def server(request, tmp_path):
    rows = ClientStore(4, 6, medium=request.param, path=tmp_path / "run" if request.param == "mmap" else None)
    with Server(np.zeros(6, np.float32), "MIFA", lr=0.1, storage=rows) as server:
        server.round([Update(i, server.x + 1 + i, 1) for i in range(3)])
        yield server


def public(of):
    return {name for name in dir(of) if not name.startswith("_")}


def test_the_store_of_a_server_has_no_method_that_changes_it(server):
    changing = {"stage", "stage_all", "replace_rows", "unstage", "discard", "commit", "checkpoint", "rollback", "undo"}
    changing |= {"add", "add_all", "forget", "room_for_checksums", "note_checksums"}
    changing |= {"save", "compact", "refresh", "close", "open", "read_into", "in_memory"}
    assert changing <= public(ClientStore)
    assert public(server.store) == public(ClientStore) - changing - {"commits", "is_ahead", "durability", "documents"}
    assert public(Registry) - public(server.clients) >= {"add", "add_all", "remove", "put_back"}
    assert isinstance(server.store, ReadRows)
    assert not isinstance(server.store, ClientStore)


def test_the_store_shows_the_last_commit(server):
    kept = server.store
    server.round([Update(i, server.x + 5, 1) for i in range(4)])
    server.add_clients("new")
    assert (kept.round, len(kept), list(kept.registry)) == (2, 4, [0, 1, 2, 3, "new"])
    for client in range(4):
        np.testing.assert_array_equal(kept.read(client), server._backend.store.read(client))
        with pytest.raises(ValueError, match="read-only"):
            kept.row(client)[:] = 9
    assert kept.verify() == []
    assert contradictions(server) == []


class Compressed(ClientStore):
    """A store whose rows may be elsewhere."""


def test_only_the_class_of_the_rows_reads_them(tmp_path):
    with Server(np.zeros(3, np.float32), "MIFA", lr=1.0, storage=Compressed(2, 3, medium="mmap", path=tmp_path)) as own:
        own.round([Update(0, np.float32([1, 2, 3]), 1)])
        with pytest.raises(RangeError, match=r"^store: .* row\(client\)"):
            own.store  # noqa: B018
        np.testing.assert_array_equal(own.row(0), [-1, -2, -3])
    with Compressed.open(tmp_path) as store:
        store.commit(1, {name: store.vector(name) for name in store.vector_names()} | {"compressed/0": np.zeros(9)})
        with pytest.raises(RangeError, match=r"^storage: the rows of the Compressed are on cpu"):
            on_device(store, "cuda:0", None)
    with pytest.raises(CheckpointError, match="compressed/0"):
        Server.load(tmp_path)


def test_the_server_checkpoints_and_compacts(server):
    for client in (0, 1):
        server.remove_client(client)
    server.checkpoint()
    before = server.store.info().bytes
    server.compact()
    assert server.store.info().bytes <= before
    assert contradictions(server) == []

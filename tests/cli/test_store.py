import numpy as np
import pytest

from fedcore import ClientStore, Server, Update
from tests.cli.command import invoke


@pytest.fixture
def path(tmp_path):
    with ClientStore(1000, 50_000, medium="mmap", codec="int8", path=tmp_path / "store") as store:
        for client in range(20):
            slot = store.stage(client)
            slot.codes[:], slot.scales[:] = client, 1
        store.commit(4, {"x": np.zeros(50_000, np.float32)})
        for client in range(10):
            store.forget(client)
        store.commit(5)
    return tmp_path / "store"


def store(*arguments):
    return invoke("store", *arguments)


def test_info(path):
    lines = {line.strip().split("  ")[0]: line.rstrip() for line in store("info", path).output.splitlines()}
    assert lines["last round"].endswith(" 5")
    assert lines["clients"].endswith(" 990")
    assert lines["rows"].endswith("10 of 50,000 elements, int8, 53.2 KB each")
    assert lines["free slots"].endswith(" 10")
    assert lines["vector x"].endswith("<f4[50000]")
    assert "MB" in lines["on disk"]


def test_verify_says_who_is_damaged(path):
    result = store("verify", path)
    assert (result.status, result.output) == (0, "sound: 10 rows and 1 vectors\n")
    with open(path / "rows.slots", "r+b") as raw:
        raw.seek(65_536 + 15 * 53_248)
        raw.write(b"\xff" * 100)
    result = store("verify", path)
    assert result.status == 1
    assert result.output.count("\n") == 1
    assert "the row of client 15 (slot 16) is damaged: block 0 of 1 changed" in result.output


@pytest.mark.parametrize("method", ["MIFA", "MimiC", "SCAFFOLD", "FedAvg"])
def test_verify_compares_a_server_s_sums_with_its_rows(tmp_path, method):
    """A fault that no checksum can tell: what was written is what is there, and is wrong."""
    folder = tmp_path / "run"
    with Server(method, np.zeros(20, np.float32), 4, lr=0.1, store=f"mmap:{folder}", history_rounds=2) as server:
        for round in range(4):
            server.round([Update(i, server.x + 1 + i + round, 1) for i in range(3) if (i + round) % 3])
    assert store("verify", folder).status == 0
    with ClientStore.open(folder) as rows:
        vectors = {name: rows.vector(name) for name in rows.vector_names()}
        if method == "FedAvg":
            assert "total" not in vectors
            return
        vectors["total"] = vectors["total"] + np.eye(20)[7]
        rows.commit(rows.round, vectors)
        assert rows.verify() == []
    result = store("verify", folder)
    assert result.status == 1
    assert result.output.startswith(f"{folder}: T: expected the sum of all rows, ")
    assert " in element 7, got " in result.output
    assert result.output.count("\n") == 1


def test_compact_makes_the_files_shorter(path):
    before = (path / "rows.slots").stat().st_size
    result = store("compact", path)
    assert result.status == 0
    assert " on disk before, " in result.output
    after = (path / "rows.slots").stat().st_size
    assert after == 65_536 + 10 * 53_248 < before
    with ClientStore.open(path) as compacted:
        for client in range(10, 20):
            np.testing.assert_array_equal(compacted.read(client), np.full(50_000, client))
        assert compacted.verify() == []


@pytest.mark.parametrize("command", ["info", "verify", "compact"])
def test_a_folder_that_is_no_store(tmp_path, command):
    result = store(command, tmp_path)
    assert result.status == 2
    assert "expected the folder of a store" in result.errors

"""``fedcore store info``, ``verify``, ``compact`` and ``undo``."""

import json
import os
import re
import shutil
import time

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Model, Server, Storage, Update, errors
from fedcore.algorithms import MimiC
from fedcore.rules import CapSteps
from tests.cli.command import invoke
from tests.server.forgeries import FORGERIES, forge, of_state
from tests.store.test_format import FORMATS


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


def test_info_as_a_probe(path):
    for seconds in (86_400, -1000):
        for file in path.glob("index.sqlite*"):
            os.utime(file, (0, time.time() + seconds))
        assert store("info", path, "--max-age", "900").status == 1
    assert re.search(r"last commit +1,00\d s ago", store("info", path).output)
    assert store("info", path, "--max-age", "2000").status == 0
    for json_too in ([], ["--json"]):
        result = store("info", path, "--max-age", "900", *json_too)
        assert "--max-age 900: the last commit is 1,00" in result.errors
    with ClientStore.open(path) as opened:
        opened.commit(6)
        assert store("info", path, "--max-age", "900").status == 0


def test_info_of_a_server_before_and_after_its_first_round(tmp_path):
    with Server(np.zeros(8, np.float32), "MIFA", 2, lr=0.1, storage=tmp_path / "run") as server:
        assert re.search(r"last round +none yet\n", store("info", tmp_path / "run").output)
        server.round([Update(0, server.x + 1, 1)])
        assert re.search(r"last round +0\n", store("info", tmp_path / "run").output)


def test_verify_lists_damaged_rows(path):
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
def test_verify_compares_sums_with_rows(tmp_path, method):
    """Checksums cannot detect it: wrong sums were written."""
    folder = tmp_path / "run"
    algorithm = MimiC(history=2) if method == "MimiC" else method
    with Server(np.zeros(20, np.float32), algorithm, 4, lr=0.1, storage=folder) as server:
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


FORGED = {
    "round": ("numbers", "round_number", 1),
    "transactions": ("numbers", "transactions", -1),
    "gamma": ("numbers", "gamma", "x"),
    "no place": ("place", {"cluster": "x"}),
    "a place past the last": ("place", {"cluster": "x", "shard": 2, "shards": 2, "first": 0}),
    "rate": ("settings", "lr", {"name": "os:system", "class": "x", "options": {}, "was": "y"}),
    "rate without values": ("settings", "lr", {"name": "TableRate", "options": {}}),
    "fold": ("settings", "fold", 0),
    "algorithm": ("settings", "algorithm", {"name": "os:system", "options": {}}),
    "device": ("device", "../../x"),
    "medium": ("medium", "floppy"),
}


@pytest.mark.parametrize("what", [*FORGED, "row of round 2^62", "total short", "total of integers"])
def test_info_and_verify_report_forged_folders(what, tmp_path):
    folder = tmp_path / "run"
    with Server(np.zeros(8, np.float32), "MIFA", 4, lr=0.1, storage=folder) as server:
        for _ in range(3):
            server.round([Update(i, server.x + 1 + i, 1) for i in range(4)])
    assert "cannot be loaded" not in store("info", folder).output
    forge(folder, **(of_state(*FORGED[what]) if what in FORGED else FORGERIES[what]))
    with pytest.raises(errors.CheckpointError) as refused:
        Server.load(folder, storage=Storage(medium="ram"))
    result, shown = store("verify", folder), store("info", folder)
    assert "sound" not in result.output
    assert result.status != 0
    if not isinstance(refused.value, errors.CorruptionError):
        assert "cannot be loaded" in " ".join(shown.output.split())
        assert what == "no place" or what == "a place past the last" or str(refused.value)[-20:] in result.output
        assert json.loads(store("info", "--json", folder).output)["problems"]


@pytest.mark.parametrize(
    "change",
    [
        ("settings", "algorithm", "options", {"zz": 1}),
        ("settings", "algorithm", "name", [1]),
        ("settings", "algorithm", "MIFA"),
        ("settings", "algorithm", None),
        ("settings", "lr", [1]),
        ("settings", "lr", {"was": 7}),
        ("settings", "optimizer", {"was": "mine", "name": [1]}),
        ("settings", []),
        ("numbers", None),
    ],
)
def test_settings_beside_a_custom_optimizer_are_checked(change, tmp_path):
    """The optimizer cannot be created, but the other settings are checked."""
    folder = tmp_path / "run"
    with Server(np.zeros(8, np.float32), "MIFA", 4, lr=0.1, storage=folder) as server:
        server.round([Update(i, server.x + 1 + i, 1) for i in range(4)])
    forge(folder, **of_state("settings", "optimizer", {"was": "\x1b[31mmine", "name": None, "options": {}}))
    assert store("verify", folder).status == 0
    assert "\x1b" not in store("verify", folder).output
    forge(folder, **of_state(*change))
    for command in ("verify", "info"):
        result = store(command, folder)
        assert "Traceback" not in result.output
        assert result.status in (0, 1, 2)
    assert store("verify", folder).status == 1 or change[0] == "numbers"


def test_custom_code_is_a_hint(tmp_path):
    folder = tmp_path / "run"
    own = [type("Own", (CapSteps,), {})()]
    with Server(np.zeros(8, np.float32), "MIFA", 4, lr=lambda round: 0.1, aggregation=own, storage=folder) as server:
        server.round([Update(i, server.x + 1 + i, 1) for i in range(4)])
    result = store("verify", folder)
    assert result.status == 0
    assert "to load it, pass lr= again" in result.output
    assert {"lr=", "aggregation="} <= {*store("info", folder).output.split()}
    forge(folder, **of_state("numbers", "round_number", -1))
    assert store("verify", folder).status == 1


def test_compact_shortens_the_files(path):
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


def kept(tmp_path):
    """A server of six clients that keeps the last transaction, and its folder."""
    storage = Storage(path=tmp_path / "run", keep_previous=True)
    return Server(np.zeros(20, np.float32), "SCAFFOLD", 6, lr=0.1, storage=storage), tmp_path / "run"


def a_round(server):
    server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(3)])


ACTS = {
    "round 2": a_round,
    "the arrival of 2 clients": lambda server: server.add_clients(["new", 77]),
    "the departure of 1 client": lambda server: server.remove_client(1),
}


@pytest.mark.parametrize("what", ACTS)
def test_undo_names_the_transaction(tmp_path, what):
    server, folder = kept(tmp_path)
    with server:
        a_round(server)
        a_round(server)
        before, clients = server.x.copy(), list(server.clients)
    with Server.load(folder) as server:
        ACTS[what](server)
        last = server.transactions
    lines = [line.strip() for line in store("info", folder).output.splitlines()]
    info = next(line for line in lines if line.startswith("undo"))
    transaction = rf"{what} \(transaction {last}, commit \d, of round \d\)"
    assert re.search(rf"{transaction}, back to transaction 2 \(commit 3, of round 1\)$", info)
    result = store("undo", folder)
    assert (result.status, result.errors) == (0, "")
    expected = rf"rolled back {transaction}; the store is at transaction 2 \(commit 3, of round 1\)\n"
    assert re.fullmatch(expected, result.output)
    assert "nothing to roll back" in store("info", folder).output
    with Server.load(folder) as server:
        assert (server.transactions, server.round_number, list(server.clients)) == (2, 2, clients)
        np.testing.assert_array_equal(server.x, before)
        a_round(server)
    assert store("undo", folder).output.startswith("rolled back round 2 (transaction 3, ")


def test_undo_of_a_warm_start(tmp_path):
    server, folder = kept(tmp_path)
    with server:
        server.warm_start({0: np.ones(20, np.float32)})
    assert store("undo", folder).output.startswith("rolled back a warm start (transaction 1, ")


def test_undo_of_a_store_and_of_a_new_server(tmp_path):
    with ClientStore(3, 20, medium="mmap", path=tmp_path / "rows", keep_previous=True) as rows:
        rows.commit(7)
    expected = "rolled back commit 1, of round 7; the store is at commit 0, before any round\n"
    assert store("undo", tmp_path / "rows").output == expected
    server, folder = kept(tmp_path)
    server.close()
    assert "no transaction to roll back" in store("undo", folder).errors
    Server.load(folder).close()


GROUPS = {"a.w": np.zeros(2, np.float32), "b.w": np.zeros(3, np.float32)}


def test_undo_of_partial_updates_rolls_back_all_groups(tmp_path):
    server = Server(Model(GROUPS, partial={"A": "a.*"}), "MIFA", clients=2, lr=0.1, storage=tmp_path / "s")
    xs = []
    for t in range(3):
        server.round([Update(i, {name: v + t + i for name, v in GROUPS.items()}, 2) for i in range(2)])
        xs.append(server.x)
    server.close()
    assert store("undo", tmp_path / "s").output.startswith("rolled back round 2 (transaction 3, ")
    assert store("export", tmp_path / "s", tmp_path / "model.npz").status == 0
    exported = np.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(np.concatenate([exported[name] for name in GROUPS]), xs[1])
    assert Server.load(tmp_path / "s", storage=Storage(medium="ram")).round_number == 2
    assert "no transaction to roll back" in store("undo", tmp_path / "s").errors
    with Server.load(tmp_path / "s") as server:
        server.round([Update(i, {name: v + 2 + i for name, v in GROUPS.items()}, 2) for i in range(2)])
        np.testing.assert_array_equal(server.x, xs[2])


@pytest.mark.parametrize("arguments", [["export", "model.npz"], ["undo"], ["recover"]])
def test_shards_refuse_by_name(tmp_path, arguments):
    Server(np.zeros(40_000, np.float32), "MIFA", 2, lr=0.1, storage=tmp_path / "s", compute=Compute(shards=2)).close()
    result = store(arguments[0], tmp_path / "s", *arguments[1:])
    assert result.status == 2
    assert f"{arguments[0]}: not supported with shards: " in result.errors
    assert store("compact", tmp_path / "s").status == 0


@pytest.mark.parametrize("why", ["never kept", "once", "compacted", "an older format"])
def test_undo_without_a_transaction_changes_nothing(path, tmp_path, why):
    folder = path
    if why == "an older format":
        shutil.unpack_archive(FORMATS / "2.zip", tmp_path / "old")
        folder = tmp_path / "old" / "f32"
    elif why != "never kept":
        server, folder = kept(tmp_path)
        with server:
            a_round(server)
            if why == "compacted":
                server.compact()
        if why == "once":
            assert store("undo", folder).status == 0
    before = re.sub(r"\d+ s ago", "", store("info", folder).output)
    result = store("undo", folder)
    assert (result.status, result.output) == (2, "")
    assert f"{folder}: no transaction to roll back" in result.errors
    assert re.sub(r"\d+ s ago", "", store("info", folder).output) == before


def test_undo_needs_the_only_writer(tmp_path):
    server, folder = kept(tmp_path)
    with server:
        a_round(server)
        result = store("undo", folder)
        assert result.status == 2
        assert f"{folder}: already open for writing" in result.errors
        assert "call remove_client" in store("remove-client", folder, 0).errors
        assert server.transactions == 1
    assert store("undo", folder).status == 0


@pytest.mark.parametrize("command", ["info", "verify", "compact", "undo"])
def test_folder_without_a_store_is_rejected(tmp_path, command):
    result = store(command, tmp_path)
    assert result.status == 2
    assert "not a store" in result.errors


@pytest.mark.parametrize("kind", ["groups", "shards", "shards of groups"])
def test_a_folder_whose_last_change_is_incomplete(kind, tmp_path, monkeypatch):
    """After a kill between the commits of its parts, commands say so; loading goes back, also after a compaction."""
    monkeypatch.setattr("fedcore.server.folder.READS", 2)  # no server writes to these folders
    tensors = {name: np.zeros(20_000, np.float32) for name in "ab"}

    def a_round(server):
        server.round([Update(i, {name: x + i for name, x in tensors.items()}, steps=1) for i in range(3)])

    model = tensors if kind == "shards" else Model(tensors, {"a": "a"})
    shards = None if kind == "groups" else 2
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    with Server(model, "MIFA", 3, lr=0.1, storage=Storage(torn, audit=True), compute=Compute(shards=shards)) as server:
        a_round(server)
        a_round(server)
        x = server.x
    shutil.copytree(torn, whole)
    with Server.load(whole) as server:
        a_round(server)
    part = {"groups": "groups/0", "shards": "shard-0", "shards of groups": "shard-0/groups/0"}[kind]
    shutil.rmtree(torn / part)
    shutil.copytree(whole / part, torn / part)
    for command, status in (("info", 0), ("verify", 0), ("audit", 2)):
        result = store(command, torn)
        assert result.status == status
        assert re.search("incomplete|to be rolled back", result.output + result.errors)
        assert re.search("2 rounds|transaction 2", result.output + result.errors)
    assert "2 rounds" in json.loads(store("info", torn, "--json").output)["incomplete"]
    assert json.loads(store("info", whole, "--json").output)["incomplete"] is None
    if kind == "groups":
        assert "2 rounds" in store("export", torn, tmp_path / "x.npz").errors
        with pytest.raises(errors.StoreError, match=f"^{torn}: .* 2 rounds"):
            Server.load(torn, storage=Storage(medium="ram"))
    shutil.copytree(torn, tmp_path / "compacted")
    assert store("compact", tmp_path / "compacted").status == 0
    for folder in (torn, tmp_path / "compacted"):
        with Server.load(folder) as server:
            assert server.round_number == 2
            assert server.x.tobytes() == x.tobytes()
        assert store("audit", folder).status == 0

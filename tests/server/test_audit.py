"""Audit documents: their content, their transaction, and the detection of changes."""

import json
import sqlite3
from hashlib import blake2b

import numpy as np
import pytest
import torch

from fedcore import ClientStore, Compute, Server, Storage, Update
from fedcore.errors import CorruptionError, RangeError
from fedcore.server.update import digest_of_text
from fedcore.store.files import disk as system_calls

X0 = np.zeros(3, np.float32)


def digest(array):
    return blake2b(np.asarray(array, "<f4").tobytes(), digest_size=32).hexdigest()


def play(server, value=1.0):
    y = server.x + np.float32(value)
    report = server.round([Update(0, y, 2, 30), Update(1, {"x": y}, 1, 10), Update(2, X0 * np.nan, 1, 5)])
    assert report.accepted == (0, 1)
    return y


def test_a_document_lists_the_updates_and_the_step():
    server = Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(audit=True))
    y = play(server)
    server.change(lr=0.2)
    play(server)
    first, change, second = server.audit_log()
    assert {"what", "finished", "versions"} <= first.keys()
    assert (first["round"], second["round"]) == (0, 1)
    assert first["x_before"] == digest(X0)
    assert first["x_after"] == change["x_after"] == second["x_before"] == digest(y)
    assert second["x_after"] == digest(server.x)
    assert [(u["client"], u["digest"], u["weight"]) for u in first["updates"]] == [
        (0, digest(y), 30),
        (1, digest(y), 10),
    ]
    assert first["rejected"][0]["client"] == 2
    assert first["options"]["algorithm"]["name"] == "FedAvg"
    assert second["changed"] == {"lr": 0.2}
    assert first["previous"] is None
    assert change["options"] == {"lr": 0.2}
    assert change["previous"] == blake2b(json.dumps(first, sort_keys=True).encode(), digest_size=32).hexdigest()
    assert Server(X0, "FedAvg", 3, lr=0.1).audit_log() == []


@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.bfloat16, "numpy", "bytes", "named"])
def test_a_digest_depends_only_on_the_numbers(of):
    server = Server({"a": X0, "b": X0}, "FedAvg", 1, lr=0.1, storage=Storage(audit=True))
    flat = np.arange(6, dtype=np.float32)
    forms = {"numpy": flat, "bytes": flat.tobytes(), "named": {"b": torch.arange(3.0, 6.0), "a": flat[:3]}}
    server.round([Update(0, forms[of] if isinstance(of, str) else torch.tensor(flat, dtype=of), 1)])
    assert server.audit_log()[0]["updates"][0]["digest"] == digest(flat)


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
def test_documents_are_committed_and_rolled_back_with_their_rounds(tmp_path, durability):
    path = tmp_path / "s"
    Server(X0, "MIFA", 3, lr=0.1, storage=Storage(path=path, keep_previous=True, audit=True)).close()
    with Server.load(path, storage=Storage(durability=durability)) as server:
        for _ in range(3):
            play(server)
        server.add_clients("new")
        server.save(tmp_path / "copy")
        whole = server.audit_log()
        assert [document["what"] for document in whole] == [
            *["a round of a fedcore server"] * 3,
            "an arrival of clients",
        ]
    with Server.load(tmp_path / "copy") as copy:
        assert copy.audit_log() == whole
    if durability == "checkpoint":
        return
    for value in (1, 7):
        with ClientStore.open(path, keep_previous=True) as store:
            assert store.undo()  # the arrival, then the round
        with Server.load(path) as server:
            log = server.audit_log()
            assert log[:-1] == whole
            assert (log[-1]["what"], log[-1]["kept"]) == ("an undo", 3)
            assert log[-1]["x_after"] == whole[2]["x_after"] == digest(server.x)
            play(server, value)
            whole = server.audit_log()
            assert whole[:-1] == log  # one transaction has both


def test_a_round_that_was_not_committed_leaves_no_document(tmp_path, monkeypatch):
    server = Server(X0, "MIFA", 3, lr=0.1, storage=Storage(path=tmp_path / "s", audit=True))
    play(server)
    whole = server.audit_log()

    def full(*_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(system_calls, "commit", full)
        with pytest.raises(Exception, match="full"):
            play(server)
    assert server.audit_log() == whole
    play(server)
    assert len(server.audit_log()) == 2
    server.close()


@pytest.mark.parametrize("change", ["content", "less", "last"])
def test_a_changed_or_missing_document_is_detected(tmp_path, change):
    path = tmp_path / "s"
    with Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(path=path, audit=True)) as server:
        for _ in range(3):
            play(server)
    with sqlite3.connect(path / "index.sqlite") as index:
        if change == "content":
            index.execute("UPDATE documents SET content = replace(content, '30.0', '31.0') WHERE number = 1")
        else:
            index.execute("DELETE FROM documents WHERE number = ?", (0 if change == "less" else 2,))
    index.close()
    with Server.load(path) as server, pytest.raises(CorruptionError, match="audit"):
        server.audit_log()


def test_shards_keep_no_documents():
    with pytest.raises(RangeError, match="audit"):
        Server(
            np.zeros(40_000, np.float32), "FedAvg", 2, lr=0.1, storage=Storage(audit=True), compute=Compute(shards=2)
        )


def test_documents_survive_copies_in_memory(tmp_path):
    server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1, storage=Storage(audit=True))
    for k in range(4):
        server.round([Update(0, np.full(4, k, np.float32), 1)])
        server.save(tmp_path / "copy")
        server = Server.load(tmp_path / "copy", storage=Storage(medium=("ram", None)[k % 2]))
        assert [document["round"] for document in server.audit_log()] == list(range(k + 1))


@pytest.mark.parametrize("text", ["[", "[]", "7", "{}", "[" * 10**5, "9" * 5000])
def test_an_invalid_document_is_an_error(tmp_path, text):
    with Server(
        np.zeros(4, np.float32), "MIFA", 2, lr=0.1, storage=Storage(audit=True, path=tmp_path / "run")
    ) as server:
        server.round([Update(0, np.ones(4, np.float32), 1)])
        audited = digest_of_text(text)
        server._backend.store.documents = lambda: [(0, text)]
        server._backend.snapshot = server._backend.snapshot._replace(audited=audited)
        with pytest.raises(CorruptionError, match=r"^audit\b"):
            server.audit_log()

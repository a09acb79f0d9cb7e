"""Audit documents: their content, their transaction, and the detection of changes."""

import json
import sqlite3
from hashlib import blake2b

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcore import ClientStore, Compute, Layout, Model, Server, Storage, Update
from fedcore.cli import main
from fedcore.errors import CheckpointError, CorruptionError, RangeError
from fedcore.server.folder import read_audit
from fedcore.server.report import checked, document_of, public_key
from fedcore.server.update import digest_of_text
from fedcore.store.files import disk as system_calls
from tests.cli.command import invoke
from tests.store.kit import full

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


def test_documents_are_committed_and_rolled_back_with_their_rounds(tmp_path):
    path = tmp_path / "s"
    Server(X0, "MIFA", 3, lr=0.1, storage=Storage(path=path, keep_previous=True, audit=True)).close()
    with Server.load(path) as server:
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

    def fail(*_):
        raise full("commit")

    for _ in range(2):
        whole = server.audit_log()
        with monkeypatch.context() as patch:
            patch.setattr(system_calls, "commit", fail)
            with pytest.raises(Exception, match="full"):
                play(server)
        assert server.audit_log() == whole
        play(server)
    assert len(server.audit_log()) == 2
    server.close()


@pytest.mark.parametrize("folder", [".", "shard-1"])
@pytest.mark.parametrize("change", ["content", "less", "last"])
def test_a_changed_or_missing_document_is_detected(tmp_path, change, folder):
    path, x0, shards = tmp_path / "s", np.zeros(40_000, np.float32), None if folder == "." else 2
    with Server(x0, "FedAvg", 3, lr=0.1, storage=Storage(path, audit=True), compute=Compute(shards=shards)) as server:
        for _ in range(3):
            server.round([Update(0, x0 + 1, 2, 30)])
    with sqlite3.connect(path / folder / "index.sqlite") as index:
        if change == "content":
            index.execute("UPDATE documents SET content = replace(content, '30.0', '31.0') WHERE number = 1")
        else:
            index.execute("DELETE FROM documents WHERE number = ?", (0 if change == "less" else 2,))
    index.close()
    assert invoke("store", "verify", path).status == 1
    with Server.load(path) as server, pytest.raises(CorruptionError, match=f"^{path / folder}: audit.* backup"):
        assert len(server.verify()) == 1
        server.audit_log()


def test_documents_survive_copies_in_memory(tmp_path):
    server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1, storage=Storage(audit=True))
    for k in range(4):
        server.round([Update(0, np.full(4, k, np.float32), 1)])
        server.save(tmp_path / "copy")
        server = Server.load(tmp_path / "copy", storage=Storage(medium=("ram", None)[k % 2]))
        assert [document["round"] for document in server.audit_log()] == list(range(k + 1))


@pytest.mark.parametrize("text", ["[", "[]", "7", "{}", "[" * 10**5, "9" * 5000])
def test_an_invalid_document_is_an_error(tmp_path, text):
    with Server(X0, "MIFA", 2, lr=0.1, storage=Storage(tmp_path / "run", audit=True)) as server:
        server.round([Update(0, X0 + 1, 1)])
        audited = digest_of_text(text)
        server._backend.store.documents = lambda first=0: [(0, text)]
        server._backend.snapshot = server._backend.snapshot._replace(audited=audited, documents=1)
        with pytest.raises(CorruptionError, match=r": audit\b"):
            server.audit_log()


KEY, OTHER = bytes(range(32)), bytes(32)


def test_changes_of_a_server_are_documents(tmp_path):
    """Clients that join, leave or change, options, and a warm start; also of a server that was loaded."""
    storage = Storage(tmp_path / "s", audit=True)
    with Server(X0, "SCAFFOLD", {0: 5, 1: 5, 2: 5}, lr=0.1, storage=storage) as server:
        server.warm_start({client: np.ones(3, np.float32) for client in range(3)})
        server.add_clients({"new": 7})
        server.update_clients({"new": 8})
        play(server)
    with Server.load(tmp_path / "s", lr=0.2) as server:
        server.remove_client(2, from_objective=False)
        with server.open_round(newcomers={"later": 3}) as round:
            round.add("later", server.x, steps=1)
        server.compact(erase=True)
        log = server.audit_log()
        assert log[-1]["x_after"] == digest(server.x)
    facts = ["digests", "clients", "sizes", "updates", "options", "client", "joined"]
    assert all(fact in document for fact, document in zip(facts, log, strict=False))
    assert len(log) == 8
    assert log[6]["joined"] == ["later"]


def test_a_rejected_sender_may_have_an_id_of_numpy():
    options = {"compute": Compute(accumulator="exact"), "storage": Storage(audit=True)}
    server = Server(X0, "FedAvg", 3, lr=0.1, **options)
    with server.open_round() as round:
        round.add_partial_sum(b"", np.int64(2))
    assert server.audit_log()[0]["rejected"][0]["client"] == 2


def test_a_report_has_the_digest_of_its_document(tmp_path):
    server = Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(audit=True))
    reports = [server.round([Update(0, X0 + k, 1)]) for k in range(2)]
    assert server.audit_log()[1]["previous"] == reports[0].audited
    assert reports[1].audited == server._backend.snapshot.audited
    assert Server(X0, "FedAvg", 3, lr=0.1).round([Update(0, X0, 1)]).audited is None


def test_a_client_can_compute_the_digest_of_its_update():
    model = {"b": np.ones((2, 2), np.float32), "a": np.ones(3, np.float16)}
    server = Server(model, "FedAvg", 1, lr=0.1, storage=Storage(audit=True))
    sent = {"a": model["a"] * 3, "b": model["b"] * 2}
    server.round([Update(0, sent, 1)])
    assert server.audit_log()[0]["updates"][0]["digest"] == Layout.of(model).digest(sent)


def test_a_model_that_was_replaced_is_detected(tmp_path):
    with Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(tmp_path / "s", audit=True)) as server:
        play(server)
    with ClientStore.open(tmp_path / "s") as store:
        store.commit(1, {**{name: store.vector(name) for name in store.vector_names()}, "x": X0 + 5}, store.state)
    with Server.load(tmp_path / "s") as server, pytest.raises(CorruptionError, match=r": audit\b"):
        server.audit_log()


def test_a_folder_with_a_document_for_each_round_can_be_continued(tmp_path):
    """Older versions stored no number of documents."""
    with Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(tmp_path / "s", audit=True)) as server:
        play(server)
        play(server)
    with ClientStore.open(tmp_path / "s") as store:
        state = store.state
        del state["numbers"]["documents"]
        store.commit(2, state=state)
    with Server.load(tmp_path / "s", lr=0.5) as server:
        play(server)
        assert [document["round"] for document in server.audit_log()] == [0, 1, 2, 2]


def test_signed_documents_need_their_key(tmp_path):
    path = tmp_path / "s"
    with Server(X0, "FedAvg", 3, lr=0.1, storage=Storage(path, audit=True, keep_previous=True)) as server:
        play(server)
    with Server.load(path, storage=Storage(audit_key=KEY)) as server:
        play(server)
        log = server.audit_log()
    assert log[1]["signer"] == public_key(KEY)
    assert KEY.hex() not in json.dumps(log)
    assert not any(KEY in file.read_bytes() for file in path.iterdir() if file.is_file())
    for key in (None, OTHER):
        with pytest.raises(CheckpointError, match="audit_key"):
            Server.load(path, storage=Storage(audit_key=key))
    with ClientStore.open(path, keep_previous=True) as store:
        assert store.undo()
    with Server.load(path) as server:  # the documents that count have no signature
        assert len(server.audit_log()) == 3
    with Server.load(path, storage=Storage(audit_key=KEY)) as server:
        play(server)
        assert len(server.audit_log()) == 4


@pytest.mark.parametrize(
    "options", [{"audit_key": b"short"}, {"audit_key": "k" * 32}, {"audit_key": KEY, "audit": False}]
)
def test_an_invalid_key_is_an_error(options):
    with pytest.raises(RangeError, match="audit_key"):
        Storage(**options)


def test_a_key_is_not_shown():
    assert repr(KEY)[2:20] not in repr(Storage(audit_key=KEY))


def test_a_signature_is_that_of_the_line_without_it():
    """Also if names are numbers, which JSON sorts as text."""
    facts = {"what": "a change", "options": {2: "a", 10: "b"}}
    text = document_of(facts, round=0, previous=None, x=("0" * 64, "1" * 64), key=KEY)
    [(_, document)] = checked([text], signer=public_key(KEY))
    line = text.replace(f'"signature": "{document["signature"]}", ', "")
    Ed25519PrivateKey.from_private_bytes(KEY).public_key().verify(
        bytes.fromhex(document["signature"]), b"fedcore audit 1: " + line.encode()
    )


def test_one_log_has_the_partial_updates_of_all_groups(tmp_path, capsys):
    """Digests are of what a client sent, and of the whole model; also after changes, a load and an undo."""
    model = Model({"a": X0, "b": X0, "m.running_var": X0 + 1}, {"B": ("b", "m.*")})
    path, y = tmp_path / "s", {"a": X0 + 2, "b": X0 + 3, "m.running_var": X0 + 4}

    def play(server):
        with server.open_round(newcomers=[f"new {server.round_number}"]) as opened:
            assert opened.add(0, {"a": y["a"]}, steps=2, examples=30)
            assert opened.add(f"new {server.round_number}", y, steps=1, examples=10)

    with Server(model, "MIFA", 2, lr=0.1, storage=Storage(path, audit=True)) as server:
        play(server)
        server.replace_x(server.x * np.float32(0.5))
        server.remove_client(1)
    with Server.load(path, storage=Storage(audit=True, audit_key=KEY)) as server:
        play(server)
        log, layout = server.audit_log(), server.layout
        assert log[-1]["x_after"] == layout.digest(server.tensors()) == digest(server.x)
    assert [document["x_before"] for document in log[1:]] == [document["x_after"] for document in log[:-1]]
    assert [one["digest"] for one in log[0]["updates"]] == [layout.digest({"a": y["a"]}), layout.digest(y)]
    assert layout.digest({"a": y["a"]}) == digest(y["a"])
    assert log[0]["groups"]["B"] == {"gamma": log[0]["gamma"], "clients": ["new 0"], "weights": [1.0]}
    assert [document for _, document in read_audit(path)] == log
    main(["store", "undo", str(path)])
    with Server.load(path, storage=Storage(audit_key=KEY)) as server:
        assert server.audit_log()[-1]["what"] == "an undo"
        assert server.audit_log()[:-1] == log
        play(server)
        last = server.audit_log()[-1]
        assert (last["x_before"], last["x_after"]) == (log[-1]["x_before"], digest(server.x))
    capsys.readouterr()
    with ClientStore.open(path / "groups" / "0") as store:
        named = {name: store.vector(name) for name in store.vector_names()}
        store.commit(store.round, named | {"x": named["x"] + 1}, store.state)
    with pytest.raises(CorruptionError, match=r": audit\b"):
        read_audit(path)
    with (
        Server.load(path, storage=Storage(audit_key=KEY)) as server,
        pytest.raises(CorruptionError, match=r": audit\b"),
    ):
        server.audit_log()

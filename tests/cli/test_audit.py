"""``fedcore store audit`` and ``fedcore audit check``."""

import json
import os
import sqlite3

import numpy as np
import pytest

from fedcore import Server, Storage, Update
from fedcore.server.report import public_key
from fedcore.server.update import digest_of_text
from tests.cli.command import invoke

KEY = bytes(range(32))


def run(path, **options):
    """Play three rounds; return the digest after each."""
    with Server(np.zeros(2, np.float32), "FedAvg", 2, lr=0.1, storage=Storage(path, audit=True, **options)) as server:
        return [server.round([Update(0, server.x + 1, 1, 30), Update(1, server.x - 3, 1, 5)]).audited for _ in range(3)]


def check(*arguments):
    return invoke("audit", "check", *arguments)


def test_an_exported_log_can_be_checked_without_the_folder(tmp_path):
    path, log = tmp_path / "s", tmp_path / "log"
    digests = run(path, keep_previous=True)
    assert digests[-1] in invoke("store", "info", path).output
    assert digests[-1] in invoke("store", "audit", path).output
    assert invoke("store", "audit", path, "--export", log).status == 0
    lines = log.read_text().splitlines()
    assert [digest_of_text(line) for line in lines] == digests
    found = check(log, "--anchor", digests[1], "--anchor", digests[2], "--client", "1")
    assert (found.status, found.output.count("weight")) == (0, 3)
    found = check(log, "--client", "11")
    assert (found.status, "sound" in found.output, "did you mean '1'" in found.errors) == (2, True, True)
    log.write_text("\n".join(lines[:2]))
    assert check(log, "--anchor", digests[1]).status == 0
    assert check(log, "--anchor", digests[2]).status == 2

    invoke("store", "undo", path)
    assert invoke("store", "verify", path).status == 0
    invoke("store", "audit", path, "--export", log)
    assert json.loads(log.read_text().splitlines()[-1])["kept"] == 2
    assert check(log, "--anchor", digests[2]).status == 0


def test_a_changed_document_is_not_sound(tmp_path):
    run(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("UPDATE documents SET content = replace(content, '30.0', '31.0') WHERE number = 0")
    index.close()
    assert invoke("store", "verify", tmp_path).status == 1
    assert "cannot be loaded" in invoke("store", "info", tmp_path).output
    assert invoke("store", "audit", tmp_path).status == 2


def test_signatures(tmp_path):
    path, log, key = tmp_path / "s", tmp_path / "log", tmp_path / "key"
    run(path, audit_key=KEY)
    key.write_bytes(KEY)
    assert invoke("store", "remove-client", path, "1").status == 2
    assert invoke("store", "remove-client", path, "1", "--audit-key", key).status == 0
    assert invoke("store", "verify", path).status == 0
    invoke("store", "audit", path, "--export", log)
    assert check(log, "--signer", public_key(KEY)).status == 0
    assert check(log, "--signer", public_key(bytes(32))).status == 2
    *before, last = log.read_text().splitlines()
    document = json.loads(last)
    signature = document.pop("signature")
    for other in (
        signature.upper(),
        f"{signature[:2]} {signature[2:]}",
        signature,
    ):  # the third one is not in its place
        log.write_text("\n".join([*before, json.dumps(document | {"signature": other})]))
        assert check(log).status == 2
    lines, previous = [], None
    for line in (*before, last):  # without the key, no program can write another history
        document = json.loads(line) | {"previous": previous}
        if document["round"] == 1:
            document["rejected"] = [{"client": 1, "reason": "none"}]
        lines.append(json.dumps(document, sort_keys=True))
        previous = digest_of_text(lines[-1])
    log.write_text("\n".join(lines))
    assert check(log).status == 2
    del document["signer"], document["signature"]
    log.write_text(json.dumps(document | {"previous": None}, sort_keys=True))
    assert check(log).status == 0
    assert check(log, "--signer", public_key(KEY)).status == 2


DIGEST = "0" * 64
GOOD = {"what": "an undo", "round": 0, "previous": None, "x_before": DIGEST, "x_after": DIGEST}
HOSTILE = {
    "empty": b"",
    "a blank line": b"\n",
    "deep": b"[" * 10**6,
    "a deep field": json.dumps(GOOD).encode()[:-1] + b', "a": ' + b"[" * 10**5,
    "many digits": b"9" * 10**5,
    "not ASCII": "\u00e9\n".encode(),
    "zeros": bytes(1000),
    "NaN": b"NaN",
    "a number for a digest": json.dumps(GOOD | {"x_after": float("nan")}, sort_keys=True).encode(),
    "an undo of nothing": json.dumps(GOOD | {"kept": 0}, sort_keys=True).encode(),
    "a name twice": json.dumps(GOOD | {"what": "a"}, sort_keys=True).encode()[:-1] + b', "x_after": "1"}',
    "a list for a name": json.dumps(GOOD | {"what": []}, sort_keys=True).encode(),
    "a list for a key": json.dumps(GOOD | {"what": "a", "signer": [], "signature": {}}, sort_keys=True).encode(),
    "a short signature": json.dumps(GOOD | {"what": "a", "signer": "00", "signature": "00"}, sort_keys=True).encode(),
    "surrogates": json.dumps(GOOD | {"what": "\ud800", "signer": "\ud800"}, sort_keys=True).encode(),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_file_of_a_stranger_is_an_error(tmp_path, content):
    (tmp_path / "log").write_bytes(content)
    result = check(tmp_path / "log")
    assert result.status == 2
    assert result.errors.startswith("error: ")


def test_other_files_are_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing", "/dev/zero"):
        assert check(path).status == 2
    assert check(tmp_path / "missing", "--anchor", "12").status == 2


@pytest.mark.parametrize("entry", [7, {}, {"client": []}, {"client": "a", "weight": []}])
def test_entries_of_any_type_are_listed_or_passed_over(tmp_path, entry):
    is_listed = entry == {"client": "a", "weight": []}
    document = GOOD | {"what": "a round of a fedcore server", "updates": [entry], "rejected": None}
    (tmp_path / "log").write_text(json.dumps(document, sort_keys=True))
    assert check(tmp_path / "log", "--client", "a").status == (0 if is_listed else 2)
    run(tmp_path / "s")
    with sqlite3.connect(tmp_path / "s/index.sqlite") as index:
        index.execute("DELETE FROM documents")
        index.execute("INSERT INTO documents VALUES(3, ?)", ((tmp_path / "log").read_text(),))
    index.close()
    for command in (["store", "audit"], ["store", "info"], ["store", "verify"]):
        assert "Traceback" not in invoke(*command, tmp_path / "s").errors

"""Edited folders of a server whose checksums are right."""

import json
import sqlite3
from dataclasses import replace

import numpy as np

from fedcore.store.files.entries import Head, client_digests, row_digests, row_entries, total


def forge(folder, *, head=lambda head: head, rows=(), statements=()):
    """Edit an index, and update its checksums."""
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.executemany("REPLACE INTO rows VALUES(?, ?, ?, ?)", rows)
    found = Head.parsed(connection.execute("SELECT content FROM head").fetchone()[0])
    table = np.array(connection.execute("SELECT * FROM rows").fetchall(), np.int64)
    clients = connection.execute("SELECT * FROM clients").fetchall()
    rows_sum = total(row_digests(row_entries(*table[:, :3].T, table[:, 3].view(np.uint64))))
    found = head(replace(found, rows_sum=rows_sum, clients_sum=total(client_digests(clients))))
    connection.execute("UPDATE head SET content = ?", (found.text(),))
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def _head(**fields):
    return {"head": lambda head: replace(head, **fields)}


def _vector(name, **fields):
    return {"head": lambda head: replace(head, vectors={**head.vectors, name: replace(head.vectors[name], **fields)})}


def _state(*keys):
    """Replace a value in the server's state; the last argument is the value, the others are its path."""
    *path, last, value = keys

    def edit(head):
        state = json.loads(head.state)
        place = state
        for key in path:
            place = place[key]
        place[last] = value
        return replace(head, state=json.dumps(state))

    return {"head": edit}


def _algorithm(name, **options):
    return _state("settings", "algorithm", {"name": name, "options": options})


def _tensors(kind="parameter", shape=(8,), dtype="float32"):
    return _state("settings", "layout", "tensors", [["x", kind, list(shape), dtype]])


VIEW = "CREATE VIEW rows AS SELECT number, slot, round, seal FROM old UNION ALL SELECT 1000 + value, 1, 1, 1"
ENDLESS = "CREATE VIEW rows AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x, 1, 1, 1 FROM c"
LARGE = "CREATE VIEW head AS SELECT 0 AS key, hex(zeroblob(400000000)) AS content"

FORGERIES = {
    "vector of objects": _vector("x", dtype="|O"),
    "vector of structs": _vector("x", dtype="f4,f4"),
    "vector of no dtype": _vector("x", dtype="zzz"),
    "vector of nested objects": _vector("x", dtype="O,i4"),
    "vector of a huge shape": _vector("x", shape=(2**62,)),
    "vector of a negative shape": _vector("x", shape=(-8,)),
    "vector of two dimensions": _vector("x", shape=(2, 4)),
    "vector of another shape": _vector("x", shape=(4,)),
    "vector in slot 0": _vector("x", slot=0),
    "vector in slot -5": _vector("x", slot=-5),
    "vector in slot 2^40": _vector("x", slot=2**40),
    "vector of no bytes": _vector("x", payload=0),
    "vector of 2^50 bytes": _vector("x", payload=2**50),
    "vector of -64 bytes": _vector("x", payload=-64),
    "vector in the file of rows": _vector("x", payload="../rows"),
    "vector of bytes in words": _vector("x", payload="32"),
    "vector in slot 1.5": _vector("x", slot=1.5),
    "row in slot 2^40": {"rows": [(0, 2**40, 1, 0)]},
    "row in slot 2^62": {"rows": [(0, 2**62, 1, 0)]},
    "row of number 2^40": {"rows": [(2**40, 1, 1, 0)]},
    "row of number 2^62": {"rows": [(2**62, 1, 1, 0)]},
    "row of round 2^62": {"rows": [(0, 1, 2**62, 0)]},
    "two rows in one slot": {"rows": [(0, 1, 0, 0), (1, 1, 0, 0)]},
    "n 2^40": _head(n=2**40),
    "n -1": _head(n=-1),
    "n 0": _head(n=0),
    "codec unknown": _head(codec="zz"),
    "clients 2^62": _head(clients=2**62),
    "clients 10^10": _head(clients=10**10),
    "clients -1": _head(clients=-1),
    "store unknown": _head(store="zz"),
    "sequence 2^63": _head(sequence=2**63),
    "state a list": _head(state="[]"),
    "state deep": _head(state="[" * 100_000 + "]" * 100_000),
    "state a large number": _head(state="9" * 5000),
    "algorithm unknown": _algorithm("os.system"),
    "algorithm's option of another type": _algorithm("MIFA", wait="rm -rf"),
    "algorithm's option unknown": _algorithm("MIFA", x=1),
    "algorithm a list": _state("settings", "algorithm", []),
    "rate huge": _state("settings", "lr", {"name": "Constant", "options": {"value": 1e300}}),
    "limits missing": _state("settings", "limits", {}),
    "tensor of objects": _tensors(dtype="object"),
    "tensor huge": _tensors(shape=(2**40,)),
    "tensor of no kind": _tensors(kind="zz"),
    "tensor of another shape": _tensors(shape=(6,)),
    "fold 0": _state("settings", "fold", 0),
    "fold in words": _state("settings", "fold", "9"),
    "round -1": _state("numbers", "round_number", -1),
    "round infinite": _state("numbers", "round_number", float("inf")),
    "transactions fewer than rounds": _state("numbers", "transactions", 2),
    "transactions in words": _state("numbers", "transactions", "3"),
    "rounds without a group more than rounds": _state("numbers", "idle", 99),
    "undoable in words": _state("undoable", "yes"),
    "references to no direction": _state("numbers", "references", [[99, 3]]),
    "sizes of three": _state("numbers", "population", {"sizes": [[1, 2, 3]], "arrived": [], "total": 0}),
    "clients more than there are": _state("clients", 5),
    "a place among shards": _state("place", [0, 2]),
    "what it is unknown": _state("what", "a fedcore servant"),
    "medium unknown": _state("medium", "floppy"),
    "no vectors": _head(vectors={}),
    "total short": _vector("total", shape=(4,)),
    "total of integers": _vector("total", dtype="<i8"),
    "trigger": {"statements": ["CREATE TRIGGER t AFTER UPDATE ON head BEGIN DELETE FROM rows; END"]},
    "view as rows": {"statements": ["ALTER TABLE rows RENAME TO old", f"{VIEW} FROM generate_series(1, 100)"]},
    "endless view as rows": {"statements": ["ALTER TABLE rows RENAME TO old", ENDLESS]},
    "large view as head": {"statements": ["ALTER TABLE head RENAME TO old", LARGE]},
    # and what else has a name in such a file
    "index beside the tables": {"statements": ["CREATE INDEX i ON rows(slot)"]},
    "table beside the tables": {"statements": ["CREATE TABLE more(x)"]},
    "table with another column": {"statements": ["ALTER TABLE clients ADD COLUMN more DEFAULT (1)"]},
    "temporary trigger's name": {"statements": ["CREATE TRIGGER rows AFTER INSERT ON clients BEGIN SELECT 1; END"]},
}

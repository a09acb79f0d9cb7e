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


def _vector(name, **fields):
    return {"head": lambda head: replace(head, vectors={**head.vectors, name: replace(head.vectors[name], **fields)})}


def of_state(*keys):
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
    return of_state("settings", "algorithm", {"name": name, "options": options})


def _tensors(kind="parameter", shape=(8,), dtype="float32"):
    return of_state("settings", "layout", "tensors", [["x", kind, list(shape), dtype]])


VIEW = "CREATE VIEW rows AS SELECT number, slot, round, seal FROM old UNION ALL SELECT 1000 + value, 1, 1, 1"
ENDLESS = "CREATE VIEW rows AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x, 1, 1, 1 FROM c"
LARGE = "CREATE VIEW head AS SELECT 0 AS key, hex(zeroblob(400000000)) AS content"


def _each(make, **values):
    """A forgery for each of the values of each field, with a name that has both."""
    return {f"{name}={value!r}"[:40]: make(name, value) for name, some in values.items() for value in some}


FORGERIES = _each(
    lambda name, value: _vector("x", **{name: value}),
    dtype=["|O", "f4,f4", "zzz", "O,i4"],
    shape=[(2**62,), (-8,), (2, 4), (4,)],
    slot=[0, -5, 2**40, 1.5],
    payload=[0, 2**50, -64, "../rows", "32"],
)
FORGERIES |= _each(
    lambda name, value: {"head": lambda head: replace(head, **{name: value})},
    n=[2**40, -1, 0],
    clients=[2**62, 10**10, -1],
    state=["[]", "[" * 100_000 + "]" * 100_000, "9" * 5000],
    **{"codec": ["zz"], "store": ["zz"], "sequence": [2**63], "vectors": [{}]},
)
ROWS = [[(0, 2**40, 1, 0)], [(0, 2**62, 1, 0)], [(2**40, 1, 1, 0)], [(2**62, 1, 1, 0)], [(0, 1, 0, 0), (1, 1, 0, 0)]]
FORGERIES |= {f"rows {rows}": {"rows": rows} for rows in ROWS}
FORGERIES |= _each(
    lambda name, value: of_state(*name.split(), value),
    **{"settings algorithm": [[]], "settings limits": [{}], "settings fold": [0, "9"], "place": [[0, 2]]},
    **{
        "settings lr": [{"name": "Constant", "options": {"value": 1e300}}],
        "clients": [5],
        "what": ["a fedcore servant"],
    },
    **{"numbers round_number": [-1, float("inf")], "numbers transactions": [2, "3"], "numbers idle": [99]},
    **{"undoable": ["yes"], "medium": ["floppy"], "numbers references": [[[99, 3]]]},  # to no direction
    **{"numbers population": [{"sizes": [[1, 2, 3]], "arrived": [], "total": 0}]},
)
FORGERIES |= {
    "algorithm unknown": _algorithm("os.system"),
    "algorithm's option of another type": _algorithm("MIFA", wait="rm -rf"),
    "algorithm's option unknown": _algorithm("MIFA", x=1),
    "tensor of objects": _tensors(dtype="object"),
    "tensor huge": _tensors(shape=(2**40,)),
    "tensor of no kind": _tensors(kind="zz"),
    "tensor of another shape": _tensors(shape=(6,)),
    "row of round 2^62": {"rows": [(0, 1, 2**62, 0)]},
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

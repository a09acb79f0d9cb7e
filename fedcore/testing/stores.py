"""The contract of stores."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np

from fedcore import kernels
from fedcore.arrays import copy_into, to_host
from fedcore.errors import CorruptionError, DtypeError, FedcoreError, RangeError, StoreError
from fedcore.kernels import Codes
from fedcore.store import ClientStore
from fedcore.testing.contract import Contract, raises, require, same

N = 131  # two whole blocks of a scale, and a piece


def content(n: int, *key: int | str) -> Any:
    """Return float32[n], a pure function of the key, that every codec stores without loss."""
    numbers = [int.from_bytes(part.encode()) if isinstance(part, str) else part for part in key]
    values = np.random.default_rng(numbers).integers(-127, 128, n).astype(np.float32)
    values[::64] = 127  # a block's scale is then 1
    return values


def arrays(row: Any) -> list[Any]:
    """Return the arrays of a row, wherever they lie."""
    return [array for array in row[1:] if array is not None] if isinstance(row, Codes) else [row]


def write(store: Any, client: Any, values: Any) -> None:
    """Stage a row with these values."""
    slot = store.stage(client)
    coded = kernels.quantise(np.float32(values), slot.codec) if isinstance(slot, Codes) else np.float32(values)
    for there, here in zip(arrays(slot), arrays(coded), strict=True):
        copy_into(there, here)


class StoreContract(Contract):
    """Your store behaves like ``fedcore.ClientStore``: one row per client, named vectors, and atomic commits.

    Override ``make_store``; for a store in files also ``reopen``. A ``Server`` takes only a class derived from
    ``ClientStore``. If the files do not have the plain bytes of a row, for example because they are compressed,
    override ``with_first_row`` too: it finds the bytes that one test damages and that another one requires to be
    erased. The promises:

    * a row that was never written is zero; staged rows are invisible until a commit;
    * a rejected commit, ``discard``, ``unstage`` and ``rollback`` do not change the last commit;
    * rows have their client's id and round; a client that leaves takes its row along;
    * vectors and the state change as a whole, and a view does not change while it is held;
    * in files: a reopened store is at its last commit, ``undo`` goes back one transaction, damage is found by name,
      ``compact(erase=True)`` leaves no byte of earlier rows, and there is one writer.
    """

    levels: ClassVar[Mapping[str, str]] = {level: level for level in ("round", "checkpoint", "none")}

    def make_store(self, folder: Path, clients: Any, n: int, **options: Any) -> Any:
        """Return a new store, with the arguments of ``ClientStore``; ``folder`` does not exist yet."""
        return ClientStore(clients, n, **options)

    def reopen(self, folder: Path, **options: Any) -> Any:
        """Open the store in a folder, with the arguments of ``ClientStore.open``. Default: skip the test."""
        raise SkipTest("the store has no folder")

    def read(self, store: Any, client: Any) -> Any:
        """Return a copy of the client's row in host memory."""
        return to_host(store.read(client))

    def test_a_row_never_written_is_zero(self, tmp_path: Path) -> None:
        """A row that was never written reads as zero, and costs nothing (``ClientStore``)."""
        store = self.make_store(tmp_path / "s", 10**6, N)  # as fast as a small one
        same((len(store), store.row(999_999), store.round_of(5), store.round), (0, None, None, None), "a new store")
        same(self.read(store, 5), np.zeros(N, np.float32), "row")

    def test_a_rejected_commit_changes_nothing(self, tmp_path: Path) -> None:
        """A rejected commit leaves the last one, and the rows stay staged (``ClientStore.commit``)."""
        store = self.make_store(tmp_path / "s", 2, N)
        write(store, 0, content(N, 0))
        store.commit(0, {"x": content(9, 0)}, {"a": 1})
        write(store, 0, content(N, 1))
        before = self.seen(store)
        same(before["vectors"], {"x": content(9, 0)}, "vectors")
        wrong: list[tuple[tuple[Any, ...], type[FedcoreError], str]] = [
            ((-1,), RangeError, "round="),
            ((1.0,), RangeError, "round="),
            ((1, {"x": content(9, 1), "y": np.array(["text"])}), DtypeError, r"^vectors\['y'\]"),
            ((1, {"x": content(9, 1)}, {"a": object()}), RangeError, "state: JSON"),
        ]
        for arguments, error, pattern in wrong:
            with raises(error, pattern):
                store.commit(*arguments)
            same(self.seen(store), before, "store after a rejected commit")
        store.commit(1)
        due = {"rows": before["rows"] | {0: content(N, 1)}, "rounds": {0: 1, 1: None}, "now": (1, {"a": 1})}
        same(self.seen(store), before | due, "store after a commit")

    def test_it_behaves_like_a_dictionary(self, level: str, tmp_path: Path) -> None:
        """Any changes give the rows and vectors of a dictionary, also after reopening (docs/state.md)."""
        for seed in range(12):
            self.walk(tmp_path / str(seed), level, np.random.default_rng(seed))

    def walk(self, folder: Path, level: str, rng: np.random.Generator) -> None:
        """Make random changes to a store and to dictionaries; compare everything that the store shows after each."""
        store = self.make_store(folder, 5, N, durability=level)
        now: dict[str, Any] = {"rows": {}, "vectors": {}, "clients": set(range(5)), "t": 0}
        last, staged, held = copy.deepcopy(now), dict[int, int](), list[tuple[Any, int]]()
        for key in range(50):
            client, action = int(rng.integers(5)), int(rng.integers(17))
            if action < 6 and client in now["clients"]:
                write(store, client, content(N, key))
                staged[client] = key
            elif action == 6 and client in now["clients"]:
                store.unstage(client)
                staged.pop(client, None)
            elif action < 9:
                (store.forget if client in now["clients"] else store.add)(client)
                now["clients"] ^= {client}
                now["rows"].pop(client, None)
                staged.pop(client, None)
            elif action < 13:
                now["vectors"] = (now["vectors"] if client else {}) | {"xyz"[client % 3]: key}
                now["rows"] |= {client: (number, now["t"]) for client, number in staged.items()}
                store.commit(now["t"], {name: content(70, number) for name, number in now["vectors"].items()})
                staged, now["t"] = {}, now["t"] + 1
                last, held = copy.deepcopy(now), [*held[-1:], (store.vector("xyz"[client % 3]), key)]
            elif action == 13:
                store.discard()
                staged = {}
            elif action == 14:
                store.rollback()
                staged, now = {}, copy.deepcopy(last)
            elif not staged and now == last:
                (store.checkpoint if action == 15 else store.compact)()
            self.shows(store, now, f"step {key}")
            for view, number in held:
                same(view, content(70, number), f"a view that is held, after step {key}")
        if store.path is not None:
            store.discard()
            store.close()
            store = self.reopen(folder)
            self.shows(store, now, "reopening")
        store.close()

    def shows(self, store: Any, due: Mapping[str, Any], what: str) -> None:
        """Require that a store shows these rows, as keys of ``content`` and rounds, vectors and clients."""
        seen, rows = self.seen(store), due["rows"]
        same((set(seen["rows"]), len(store)), (due["clients"], len(rows)), f"clients and rows after {what}")
        values = {i: content(N, rows[i][0]) if i in rows else np.zeros(N, np.float32) for i in due["clients"]}
        same(seen["rows"], values, f"rows after {what}")
        same(seen["rounds"], {i: rows[i][1] if i in rows else None for i in values}, f"rounds after {what}")
        same(seen["vectors"], {name: content(70, key) for name, key in due["vectors"].items()}, f"vectors after {what}")

    def test_undo(self, tmp_path: Path) -> None:
        """``undo`` restores rows, vectors, clients, round and state of one transaction (``ClientStore.undo``)."""
        path = tmp_path / "s"
        self.play(path, 1)
        store = self.reopen(path, keep_previous=True)
        before, due = self.seen(store), [True, False]
        for change in (lambda: None, lambda: store.add("new"), lambda: store.forget(0)):
            change()
            write(store, 1, content(N, 7))
            store.commit(1, {"x": content(200, 7)}, {"round": 1})
            same([store.undo(), store.undo()], due, "results of undo")
            same(self.seen(store), before, "store after an undo")
        store.close()
        again = self.reopen(path)
        same(self.seen(again), before, "reopened store")
        again.close()

    def test_damage_is_found(self, tmp_path: Path) -> None:
        """A damaged row raises an error when it is read, and ``verify`` lists it (docs/state.md)."""
        path = tmp_path / "s"
        self.play(path, 1)
        file, whole, needle = self.written(path)
        file.write_bytes(whole.replace(needle, b"?" * len(needle)))
        store = self.reopen(path)
        require(len(store.verify()) == 1, "one line for the damaged row", store.verify())
        with raises(CorruptionError):
            store.read(0)
        same(self.read(store, 1), content(N, 1, 0), "a whole row")
        store.close()

    def test_compact_erases(self, tmp_path: Path) -> None:
        """After ``compact(erase=True)`` the files have no byte of earlier rows (docs/trust.md)."""
        path = tmp_path / "s"
        self.play(path, 1)
        self.written(path)
        store = self.reopen(path)
        write(store, 0, content(N, 9))
        store.commit(1)
        before = self.seen(store)
        store.compact(erase=True)
        same(self.seen(store), before, "store after compact")
        store.close()
        same([str(file) for file, *_ in self.with_first_row(path)], [], "files with bytes of an earlier row")

    def test_one_writer(self, tmp_path: Path) -> None:
        """A folder has one writer and any number of readers, which see one commit (docs/design.md, "Guarantees")."""
        path = tmp_path / "s"
        self.play(path, 1)
        store, reader = self.reopen(path), self.reopen(path, readonly=True)
        with raises(StoreError):
            self.reopen(path)
        before = self.seen(reader)
        write(store, 0, content(N, 9))
        store.commit(1)
        same(self.seen(reader), before, "a reader before refresh")
        reader.refresh()
        same(self.seen(reader), self.seen(store), "a reader after refresh")
        with raises(StoreError):
            reader.stage(0)
        reader.close()
        store.close()

    def play(self, path: Path, rounds: int) -> None:
        """Make a store of three clients in a folder, with some commits, and close it."""
        store = self.make_store(path, 3, N)
        for t in range(rounds):
            for client in range(2):
                write(store, client, content(N, client, t))
            store.commit(t, {"x": content(200, 8, t)}, {"round": t})
        store.close()

    def with_first_row(self, path: Path) -> list[tuple[Path, bytes, bytes]]:
        """Return the files that have bytes of client 0's first row, each with all its bytes and the found ones.

        The row is ``content(N, 0, 0)`` of this module. A store that was just written has it in exactly one file.
        """
        with self.reopen(path, readonly=True) as store:
            needle = _needle(store.codec)
        files = [(file, file.read_bytes(), needle) for file in path.rglob("*") if file.is_file()]
        return [found for found in files if needle in found[1]]

    def written(self, path: Path) -> tuple[Path, bytes, bytes]:
        """Return what ``with_first_row`` finds in the files of a store that was just written."""
        found = self.with_first_row(path)
        require(len(found) == 1, "1 file with client 0's row; if its bytes differ, override with_first_row", len(found))
        return found[0]

    def seen(self, store: Any) -> dict[str, Any]:
        """Return everything that a store shows."""
        rows = {client: self.read(store, client) for client in store.registry}
        rounds = {client: store.round_of(client) for client in store.registry}
        vectors = {name: np.array(store.vector(name)) for name in store.vector_names()}
        return {"rows": rows, "rounds": rounds, "vectors": vectors, "now": (store.round, store.state)}


def _needle(codec: str) -> bytes:
    """Return bytes of client 0's first row as ``play`` writes it."""
    codes = content(N, 0, 0) if codec == "f32" else kernels.quantise(content(N, 0, 0), codec).codes
    return bytes(codes[1:33].tobytes())

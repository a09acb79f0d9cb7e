"""The contract of stores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np

from fedcore import kernels
from fedcore.arrays import copy_into, to_host
from fedcore.errors import CorruptionError, DtypeError, FedcoreError, RangeError, StoreError, UnknownClientError
from fedcore.kernels import Codes
from fedcore.store import ClientStore
from fedcore.testing.contract import Contract, raises, require, same

N, P = 131, 20_000  # two whole blocks of a scale and a piece; more than a block of 64 KiB


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

    Override ``make_store``; for a store in files also ``reopen``. The promises:

    * a row that was never written is zero; staged rows are invisible until a commit;
    * a rejected commit, ``discard``, ``unstage`` and ``rollback`` leave the last commit as it is;
    * rows have their client's id and round; a client that leaves takes its row along;
    * vectors and the state change as a whole, and a view stays as it is while it is held;
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

    def test_staged_rows_are_invisible_until_commit(self, tmp_path: Path) -> None:
        """A commit makes the staged rows current in one step (``ClientStore.commit``)."""
        store = self.make_store(tmp_path / "s", ["a", "b"], N)
        write(store, "a", content(N, 1))
        same(store.row("a"), None, "a staged row")
        store.commit(round=7)
        same(self.read(store, "a"), content(N, 1), "row")
        rounds = len(store), store.round_of("a"), store.round_of("b"), store.round
        same(rounds, (1, 7, None, 7), "rows and rounds")

    def test_discard_unstage_and_rollback(self, tmp_path: Path) -> None:
        """Discarded rows and clients leave the last commit as it is (``ClientStore.rollback``)."""
        store = self.make_store(tmp_path / "s", 3, N)
        for client in range(3):
            write(store, client, content(N, client))
        store.commit(0)
        for number, drop in enumerate((lambda: store.unstage(2), store.discard, store.rollback)):
            if drop == store.rollback:
                store.add("new")
                store.forget(1)
            for client in [i for i in range(3) if i in store.registry]:
                write(store, client, content(N, 9))
            drop()
            store.discard()
            store.commit(round=1 + number)
            for client in range(3):
                same(self.read(store, client), content(N, client), f"row {client}")
            same(([*store.registry], store.round_of(1)), ([0, 1, 2], 0), "clients, and the round of a row")

    def test_rows_are_slots_in_the_form_of_the_codec(self, tmp_path: Path) -> None:
        """Slots are aligned to 64 bytes, writable until the commit, and then read-only (``ClientStore.stage``)."""
        store = self.make_store(tmp_path / "s", 2, N)
        slot = store.stage(0)
        staged = arrays(slot)
        if store.codec == "f32":
            same((slot.dtype, slot.shape), (np.float32, (N,)), "slot")
        else:
            same((slot.codec, staged[0].shape), (store.codec, (N,)), "codes")
            require(store.codec != "int8" or staged[1].shape == (3,), "a scale for 64 elements", staged[-1].shape)
        places = list(map(_address, staged))
        require(all(place % 64 == 0 for place in places), "addresses that are multiples of 64", places)
        require(all(map(_is_writable, staged)), "a slot that can be written", "one that is read-only")
        same([*map(_address, arrays(store.stage(np.int64(0))))], places, "a slot that is staged twice")
        write(store, 0, content(N, 0))
        store.commit(0)
        rows = arrays(store.row(0))
        same([*map(_address, rows)], places, "the place of the row")
        require(not any(map(_is_writable, rows)), "a read-only row", "one that can be written")

    def test_two_slots_serve_one_client(self, tmp_path: Path) -> None:
        """A client's row alternates between two slots (``ClientStore``, Cost)."""
        store, places = self.make_store(tmp_path / "s", ["a"], N), []
        for t in range(6):
            write(store, "a", content(N, t))
            store.commit(t)
            places.append(_address(arrays(store.row("a"))[0]))
        same((len(set(places)), places[2:]), (2, places[:-2]), "two places that alternate")

    def test_ids(self, tmp_path: Path) -> None:
        """Ids are ints of 64 bits or texts; other ids raise UnknownClientError (``ClientStore``)."""
        ids = [0, 2**64 - 1, "x", ""]
        store = self.make_store(tmp_path / "s", [np.int8(0), np.uint64(2**64 - 1), np.str_("x"), ""], N)
        for i, client in enumerate(ids):
            write(store, client, content(N, i))
        store.commit(0)
        for i, client in enumerate(ids):
            same(self.read(store, client), content(N, i), f"row {client!r}")
        for unknown in ("0", 1, -1, 2**64, 0.0, False, None, b"x"):
            with raises(UnknownClientError, r"^client="):
                store.row(unknown)
            with raises(UnknownClientError):
                store.stage(unknown)

    def test_vectors_and_state_change_as_a_whole(self, tmp_path: Path) -> None:
        """A commit replaces all vectors, or the state, or neither (``ClientStore.commit``)."""
        store = self.make_store(tmp_path / "s", 2, N)
        x, due = content(200, 1), {"total": np.arange(200.0), "one": np.array(3), "none": np.zeros((0, 2), np.int8)}
        store.commit(0, {"x": x, **due}, {"gamma": 0.5})
        x[:] = 0  # it was copied
        same({name: store.vector(name) for name in store.vector_names()}, {"x": content(200, 1), **due}, "vectors")
        require(not store.vector("x").flags.writeable, "a read-only vector", "one that can be written")
        store.commit(1, {"x": store.vector("x")})
        same((store.vector_names(), store.vector("total"), store.state), (("x",), None, {"gamma": 0.5}), "vectors")
        store.commit(2, state={})
        same((store.vector_names(), store.state), (("x",), {}), "vectors and state")

    def test_views_of_vectors(self, tmp_path: Path) -> None:
        """A view that is passed back stays in place, and a view that is held does not change (``ClientStore.vector``)."""
        store = self.make_store(tmp_path / "s", 2, N)
        store.commit(0, {"x": content(200, 1)})
        x = store.vector("x")
        store.commit(1, {"x": x.view(), "before": x})
        same([store.vector(name).ctypes.data for name in ("x", "before")], [x.ctypes.data] * 2, "places of a view")
        views = {"x": x[::-1], "half": x[:100], "bits": x.view(np.int32)}  # other vectors
        due = {name: view.copy() for name, view in views.items()}
        store.commit(2, views)
        same({name: store.vector(name) for name in store.vector_names()}, due, "vectors")
        held, places = store.vector("half")[10:], set()
        for t in range(3, 9):
            store.commit(t, {"x": content(200, t)})
        same(held, due["half"][10:], "a view that is held")
        for t in range(9, 15):  # without a view two slots alternate
            store.commit(t, {"x": content(200, t)})
            places.add(store.vector("x").ctypes.data)
        same(len(places), 2, "places of a vector")

    def test_a_rejected_commit_changes_nothing(self, tmp_path: Path) -> None:
        """A rejected commit leaves the last one, and the rows stay staged (``ClientStore.commit``)."""
        store = self.make_store(tmp_path / "s", 2, N)
        write(store, 0, content(N, 0))
        store.commit(0, {"x": content(9, 0)}, {"a": 1})
        write(store, 0, content(N, 1))
        wrong: list[tuple[tuple[Any, ...], type[FedcoreError], str]] = [
            ((-1,), RangeError, "round="),
            ((1.0,), RangeError, "round="),
            ((1, {"x": content(9, 1), "y": np.array(["text"])}), DtypeError, r"^vectors\['y'\]"),
            ((1, {"x": content(9, 1)}, {"a": object()}), RangeError, "state: JSON"),
        ]
        for arguments, error, pattern in wrong:
            with raises(error, pattern):
                store.commit(*arguments)
            same((store.round, store.state), (0, {"a": 1}), "round and state")
            same([self.read(store, 0).tobytes(), store.vector("x").tobytes()], _bytes(content(N, 0), content(9, 0)))
        store.commit(1)
        same(self.read(store, 0), content(N, 1), "row")

    def test_clients_come_and_leave(self, tmp_path: Path) -> None:
        """A client that leaves takes its row, also a staged one (``ClientStore.forget``)."""
        store = self.make_store(tmp_path / "s", 3, N)
        for client in range(3):
            write(store, client, content(N, client))
        store.commit(0)
        write(store, 1, content(N, 5))
        store.forget(1)
        same((len(store), len(store.registry), 1 in store.registry), (2, 2, False), "rows and clients")
        with raises(UnknownClientError):
            store.row(1)
        store.add("new")  # it gets the number of a removed client, but not its row
        same(store.row("new"), None, "row of a new client")
        write(store, "new", content(N, 9))
        store.commit(1)
        same([self.read(store, i).tobytes() for i in ("new", 2)], _bytes(content(N, 9), content(N, 2)), "rows")
        store.add(1)
        same(store.row(1), None, "row of a client that came back")
        with raises(RangeError, "^client=1: already"):
            store.add(1)

    def test_reading_ahead_changes_nothing(self, tmp_path: Path) -> None:
        """``prefetch`` is only a hint (``ClientStore.prefetch``)."""
        store = self.make_store(tmp_path / "s", range(6), P)
        for client in range(4):
            write(store, client, content(P, client))
        store.commit(0)
        store.prefetch(range(6))
        store.prefetch([])
        same(self.read(store, 2), content(P, 2), "row")

    def test_it_behaves_like_a_dictionary(self, level: str, tmp_path: Path) -> None:
        """Any changes give the rows and vectors of a dictionary, also after reopening (docs/state.md)."""
        for seed in range(12):
            self.walk(tmp_path / str(seed), level, np.random.default_rng(seed))

    def walk(self, folder: Path, level: str, rng: np.random.Generator) -> None:
        """Make some random changes to a store and to dictionaries, and compare."""
        store, clients, vectors, t = self.make_store(folder, 5, N, durability=level), set(range(5)), dict[str, int](), 0
        rows, staged, coming = dict[int, tuple[int, int]](), dict[int, int](), dict[str, int]()
        for key in range(40):
            client, action = int(rng.integers(5)), int(rng.integers(16))
            if action < 6 and client in clients:
                write(store, client, content(N, key))
                staged[client] = key
            elif action == 6 and client in clients:
                store.unstage(client)
                staged.pop(client, None)
            elif action == 7:
                (store.forget if client in clients else store.add)(client)
                clients ^= {client}
                rows.pop(client, None)
                staged.pop(client, None)
            elif action < 10:
                coming["xyz"[client % 3]] = key
            elif action < 13:
                vectors |= coming
                store.commit(t, {name: content(70, number) for name, number in vectors.items()})
                rows |= {client: (number, t) for client, number in staged.items()}
                staged, coming, t = {}, {}, t + 1
            elif action == 13:
                store.discard()
                staged = {}
            elif action == 14:
                store.checkpoint()
            elif not staged:
                store.compact()
            same((set(store.registry), len(store)), (clients, len(rows)), f"clients and rows after step {key}")
        if store.path is not None:
            store.discard()
            store.commit(t)
            store.close()
            store = self.reopen(folder)
        seen = self.seen(store)
        zero = np.zeros(N, np.float32)
        same(seen["rows"], {i: content(N, rows[i][0]) if i in rows else zero for i in clients}, "rows")
        same(seen["rounds"], {i: rows[i][1] if i in rows else None for i in clients}, "rounds")
        same(seen["vectors"], {name: content(70, number) for name, number in vectors.items()}, "vectors")
        store.close()

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
        [(file, whole, needle)] = self.with_first_row(path)
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
        """Return the files of a folder, with their bytes, that have bytes of client 0's first row."""
        with self.reopen(path, readonly=True) as store:
            needle = _needle(store.codec)
        files = [(file, file.read_bytes(), needle) for file in path.rglob("*") if file.is_file()]
        return [found for found in files if needle in found[1]]

    def seen(self, store: Any) -> dict[str, Any]:
        """Return everything that a store shows."""
        rows = {client: self.read(store, client) for client in store.registry}
        rounds = {client: store.round_of(client) for client in store.registry}
        vectors = {name: np.array(store.vector(name)) for name in store.vector_names()}
        return {"rows": rows, "rounds": rounds, "vectors": vectors, "now": (store.round, store.state)}


def _needle(codec: str) -> bytes:
    """Return bytes of client 0's first row as ``play`` writes it."""
    values = content(N, 0, 0)
    codes = values if codec == "f32" else kernels.quantise(values, codec).codes
    return bytes(codes[1:33].tobytes())


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.address)


def _is_writable(array: Any) -> bool:
    return bool(array.flags.writeable if isinstance(array, np.ndarray) else array.writeable)


def _bytes(*values: Any) -> list[bytes]:
    return [value.tobytes() for value in values]

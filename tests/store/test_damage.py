"""Detection of damaged files, and recovery after lost commits."""

import errno
import gc
import os
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, Update, errors
from fedcore.store import inspect as recovery
from fedcore.store.files import disk
from fedcore.store.files import slot_file as header
from fedcore.store.slots import GRAINS, VERSION
from tests.cli.command import invoke
from tests.kit import python
from tests.server.invariant import contradictions
from tests.store.kit import content, write
from tests.store.test_format import FORMATS

N = 40_000  # 160,000 bytes: three blocks
CLIENTS = ["a", "b", 2, 3]
FILES = ["rows.slots", "index.sqlite", "vectors-400.slots"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A closed store with used and free slots."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with ClientStore(CLIENTS, N, medium="mmap", path=path) as store:
        for round in range(3):
            for client in CLIENTS[: 3 - round]:
                write(store, client, content(N, client, round))
            store.commit(round, {"x": content(100, round)}, {"round": round})
    return path


@pytest.fixture
def path(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "store")
    return tmp_path / "store"


def assert_holds(store):
    """The store has exactly the committed content; reading it may raise an error."""
    rounds = {"a": 2, "b": 1, 2: 0, 3: None}
    assert (store.round, store.state, store.vector_names()) == (2, {"round": 2}, ("x",))
    assert list(store.registry) == CLIENTS
    for client, round in rounds.items():
        assert store.round_of(client) == round
        expected = np.zeros(N, np.float32) if round is None else content(N, client, round)
        np.testing.assert_array_equal(store.read(client), expected)
    np.testing.assert_array_equal(store.vector("x"), content(100, 2))


def harm(path, *, readonly):
    """The error of reading a damaged store; "" if it has all of its content."""
    try:
        with ClientStore.open(path, readonly=readonly) as store:
            # SQLite also reports damage in unused bytes of a page.
            problems = [line for line in store.verify() if "free space corruption" not in line]
            try:
                assert_holds(store)
                shown = ""
            except errors.CorruptionError as error:
                shown = str(error)
            assert bool(problems) == bool(shown), f"verify found {problems}, and reading them raised {shown!r}"
            return shown
    except errors.StoreError as error:
        return str(error)


@pytest.mark.parametrize("file", FILES)
def test_flipped_bits(path, file):
    rng = np.random.default_rng(FILES.index(file))
    target = path / file
    size = target.stat().st_size
    found = 0
    for trial in range(150):
        # The bytes between header and slots are unused.
        start = GRAINS[VERSION] if file.endswith(".slots") and trial % 3 else 0
        place = int(rng.integers(start, size if trial % 3 else min(size, 4096)))
        with open(target, "r+b") as raw:
            raw.seek(place)
            (byte,) = raw.read(1)
            raw.seek(place)
            raw.write(bytes([byte ^ 1 << int(rng.integers(8))]))
        shown = harm(path, readonly=True)
        assert shown == "" or file in shown, shown
        found += shown != ""
        with open(target, "r+b") as raw:
            raw.seek(place)
            raw.write(bytes([byte]))
    assert harm(path, readonly=True) == ""
    assert found > 3


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(("file", "at"), [*((file, 0) for file in FILES), ("index.sqlite", 68)])
def test_a_damaged_store_that_is_refused_leaves_no_file_open(sound, tmp_path, file, at, readonly):
    path = tmp_path / "damaged"
    shutil.copytree(sound, path)
    with open(path / file, "r+b") as raw:
        raw.seek(at)  # 68: SQLite's application id
        raw.write(bytes(4))
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(errors.StoreError) as refused:
        ClientStore.open(path, readonly=readonly)
    assert os.listdir("/proc/self/fd") == before, f"while {refused.value!r} is held"


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("file", FILES)
def test_truncated_files(sound, tmp_path, file, readonly):
    whole = (sound / file).stat().st_size
    lengths = [0, 1, 100, 511, 512, 4095, 4096, 4097, 5000, 8192, whole // 2, whole // 2 + 1, whole - 4096, whole - 1]
    for length in lengths:
        if not 0 <= length < whole:
            continue
        path = tmp_path / f"{length}"
        shutil.copytree(sound, path)
        with open(path / file, "r+b") as raw:
            raw.truncate(length)
        shown = harm(path, readonly=readonly)
        # Bytes after the last row may be missing; a writer extends the file again.
        assert file in shown or (shown == "" and length > whole - 4096), f"{length} of {whole}: {shown!r}"
        shutil.rmtree(path)


@pytest.mark.parametrize("file", FILES)
def test_missing_files(path, file):
    (path / file).unlink()
    for readonly in (True, False):
        assert file in harm(path, readonly=readonly)


def test_a_damaged_row_is_named_and_the_others_can_be_read(path):
    with ClientStore.open(path) as store:
        slot = int(store._content.rows.slot[store.registry.number("b")])
        place = GRAINS[VERSION] + (slot - 1) * store.info().row_bytes + 70_000  # in the second block
    with open(path / "rows.slots", "r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff")
    message = rf"rows.slots: the row of client 'b' \(slot {slot}\) is damaged: block 1 of 3 changed"
    for readonly in (True, False):
        with ClientStore.open(path, readonly=readonly) as store:
            for _ in range(2):
                with pytest.raises(errors.CorruptionError, match=message):
                    store.row("b")
            np.testing.assert_array_equal(store.read("a"), content(N, "a", 2))
            (problem,) = store.verify()
            assert "client 'b'" in problem
            with pytest.raises(errors.CorruptionError, match=message):
                store.save(path.with_name("copy"))
            assert not path.with_name("copy").exists()
            with pytest.raises(RuntimeError):
                ClientStore.open(path, medium="ram") if readonly else store.read("b")
    with ClientStore.open(path) as store:
        store.compact()  # does not make it look undamaged
        with pytest.raises(errors.CorruptionError):
            store.read("b")
        write(store, "b", content(N, 5))
        store.commit(3)
        assert store.verify() == []
    with ClientStore.open(path) as store:
        np.testing.assert_array_equal(store.read("b"), content(N, 5))


def test_a_damaged_vector_is_named(path):
    with open(path / "vectors-400.slots", "r+b") as raw:
        raw.seek(GRAINS[VERSION])
        raw.write(b"\x01" * 4096)
    with ClientStore.open(path) as store:
        with pytest.raises(errors.CorruptionError, match=r"vectors-400.slots: the vector 'x' is damaged"):
            store.vector("x")
        assert len(store.verify()) == 1
        store.commit(3, {"x": content(100, 7)})
        assert store.verify() == []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rows SET round = round + 1 WHERE number = 0",
        "UPDATE rows SET number = 3 WHERE number = 2",
        "UPDATE rows SET slot = slot + 1 WHERE number = 0",
        "UPDATE rows SET seal = 0 WHERE number = 0",
        "DELETE FROM rows WHERE number = 1",
        "INSERT INTO rows VALUES(3, 9, 0, 0)",
        "UPDATE rows SET slot = 'x' WHERE number = 0",
        "UPDATE clients SET id = 'c' WHERE number = 0",
        "DELETE FROM clients WHERE number = 3",
        "UPDATE clients SET id = 3.5 WHERE number = 3",
        "UPDATE head SET content = replace(content, '\"round\": 2', '\"round\": 1')",
        "UPDATE head SET content = 7",
        "DELETE FROM head",
        "DROP TABLE clients",
        "PRAGMA application_id = 1",
    ],
)
def test_a_changed_index_is_refused(path, change):
    connection = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    try:
        connection.execute(change)
    finally:
        connection.close()
    for readonly in (True, False):
        assert "index.sqlite" in harm(path, readonly=readonly)


def test_an_index_that_is_older_than_the_rows_is_refused(path):
    shutil.copy(path / "index.sqlite", path.with_name("older"))
    with ClientStore.open(path) as store:
        for round in range(3, 6):
            write(store, "a", content(N, round))
            store.commit(round)
    shutil.copy(path.with_name("older"), path / "index.sqlite")
    for readonly in (True, False):
        with pytest.raises(errors.CorruptionError, match=r"index.sqlite ends at commit \d+, but rows.slots at \d"):
            ClientStore.open(path, readonly=readonly)


def test_files_of_two_stores_are_refused(path, tmp_path):
    ClientStore(CLIENTS, N, medium="mmap", path=tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / "rows.slots", path)
    with pytest.raises(errors.CorruptionError, match=r"rows.slots: .*header"):
        ClientStore.open(path)


def test_the_errors_for_foreign_and_newer_files(path, tmp_path):
    with pytest.raises(errors.StoreError, match=r"nowhere: .* does not exist"):
        ClientStore.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.StoreError, match=r"empty: .* \[\]"):
        ClientStore.open(tmp_path / "empty")
    (path / "lock").write_text("zrocess 7\n")  # writers need it
    assert "lock: not a lock file" in harm(path, readonly=False)
    assert "lock: not a lock file" in invoke("store", "verify", path).output
    new = rf"index.sqlite: format {VERSION + 1} is unknown"
    for version, problem in (
        (VERSION + 1, new),
        (1, r"index.sqlite: damaged: schema: "),
        (VERSION, "rows.slots: not a file"),
    ):
        with sqlite3.connect(path / "index.sqlite") as index:
            index.execute(f"PRAGMA user_version = {version}")
        index.close()
        if version == VERSION:
            (path / "rows.slots").write_bytes(b"GIF89a" + bytes(10_000))
        with pytest.raises(errors.StoreError, match=problem):
            ClientStore.open(path, readonly=True)


def test_slots_of_another_format_than_the_index(tmp_path):
    """Before version 3, the version of the index is also that of the slots."""
    shutil.unpack_archive(FORMATS / "2.zip", tmp_path)
    connection = sqlite3.connect(tmp_path / "f32" / "index.sqlite")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(errors.CorruptionError, match=r"rows.slots: .*header .*different store"):
        ClientStore.open(tmp_path / "f32")


UNREADABLE = """
import os, sys
from fedcore import ClientStore, errors
from fedcore.store.files.slot_file import SlotFile
store = ClientStore.open(sys.argv[1])
store.read("a")  # maps the file
SlotFile._require = lambda *_: None  # a bad sector leaves the file as long as it was
# A read after the end of the file raises the signal of a bad sector: SIGBUS.
os.truncate(sys.argv[1] + "/rows.slots", 65536 + store.info().row_bytes)
for line in store.verify():
    print(line)
for client in store.registry:
    try:
        store.read(client)
    except errors.CorruptionError as error:
        print(error)
sys.stdout.flush()
os._exit(0)
"""


def test_a_row_that_the_disk_cannot_read_is_named_instead_of_ending_the_process(path):
    run = python("-c", UNREADABLE, path)
    assert run.stderr == ""
    lines = [line for line in run.stdout.splitlines() if "is damaged: it cannot be read from the disk" in line]
    assert any("the row of client" in line for line in lines), run.stdout
    assert any(line.endswith("remove the client, or use a copy of the store") for line in lines)


def test_a_rows_file_of_a_newer_format_is_refused(path):
    with open(path / "rows.slots", "r+b") as raw:
        found = header.Header.read(raw.fileno(), path / "rows.slots")
        raw.write(replace(found, version=VERSION + 1).packed())
    with pytest.raises(errors.StoreError, match=rf"rows.slots: format {VERSION + 1} is unknown"):
        ClientStore.open(path)


CUT = """
import os, shutil, sys
from pathlib import Path
import numpy as np
from fedcore import ClientStore, Server, Storage, Update, errors
folder = Path(sys.argv[1])
y = np.ones(20_000, np.float32)

def in_round(server, at, cut):
    with server.open_round() as round:
        for k in range(3):
            if k == at:
                cut()
            if k < 2:
                round.add(k, y, steps=1)

LOOKS = {
    "open": lambda server, cut: (cut(), server.open_round()),
    "add": lambda server, cut: in_round(server, 1, cut),
    "finish": lambda server, cut: in_round(server, 2, cut),
    "x": lambda server, cut: (cut(), server.x.sum()),
    "v": lambda server, cut: (cut(), server.v.sum()),
    "tensors": lambda server, cut: (cut(), server.tensors()),
    "broadcast": lambda server, cut: (cut(), server.broadcast([0]).x.sum()),
    "offset": lambda server, cut: [cut(), broadcast.offset(0)] if (broadcast := server.broadcast([0])) else None,
    "correction": lambda server, cut: (cut(), server.correction(0), server.save(folder / "not here")),
    "read": lambda server, cut: (cut(), server.store.read(0)),
    "save": lambda server, cut: (cut(), server.save(folder / "saved")),
    "depart": lambda server, cut: (cut(), server.remove_client(0)),
    "compact": lambda server, cut: (cut(), server.compact()),
    "beside": lambda server, cut: [cut(), rows.verify(), rows.read(0), rows.vector("x").sum()]
        if (rows := ClientStore.open(server._backend.store.path, readonly=True)).read(0) is not None else None,
}
for method, kind in (("FedAvg", "vectors-80000"), ("MimiC", "vectors-80000"), ("MimiC", "rows")):
    if not (folder / method).exists():
        with Server(y, method, 3, lr=0.1, storage=folder / method) as made:
            made.round([Update(i, y * i, 1) for i in range(2)])
    for name, look in LOOKS.items():
        if name == "read" and kind != "rows":
            continue
        print(method, kind, name, flush=True)
        path = Path(shutil.copytree(folder / method, folder / f"{method} {kind} {name}"))
        server = Server.load(path, storage=Storage(durability="none"))
        file = path / f"{kind}.slots"
        try:
            look(server, lambda: os.truncate(file, 4096))
        except errors.StoreError as error:
            assert file.name in str(error), error
        else:
            raise AssertionError("no error")
        server.close()
print("all")
"""


def test_a_file_that_is_cut_short_under_a_server_is_an_error_and_no_signal(tmp_path):
    assert python("-c", CUT, tmp_path).stdout.endswith("all\n")


SHARED_CUT = """
import os, sys
from fedcore import ClientStore
from fedcore.errors import StoreError
from tests.store.kit import content, write

path, left, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = ClientStore(4, 4, medium="mmap", path=path)
for client in range(4):
    write(store, client, content(4, client))
store.commit(0, state={"text": size * "x"})  # a long one makes the log longer, and so the shared memory
shared = path + "/index.sqlite-shm"
os.truncate(shared, left)
for use in (store.verify, lambda: store.commit(1), store.verify, lambda: ClientStore.open(path, readonly=True)):
    try:
        use()
        raise SystemExit("expected an error")
    except StoreError as error:
        assert "truncated by another program" in str(error), error
        assert os.path.getsize(shared) == left  # another program may use the file
try:
    store.close()
except StoreError:
    pass
print("closed")
"""


@pytest.mark.parametrize(("left", "size"), [(0, 1), (100, 1), (16_384, 1), (32_768, 6 << 20), (40_000, 6 << 20)])
def test_shared_memory_that_is_cut_short_is_an_error_and_no_signal(tmp_path, left, size):
    assert python("-c", SHARED_CUT, tmp_path / "store", left, size).stdout == "closed\n"
    with ClientStore.open(tmp_path / "store") as again:
        assert again.round == 0
        assert again.verify() == []


def play(server, rounds):
    for _ in range(rounds):
        server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(3)])


def lose(folder, rounds):
    """A server's folder whose index lacks the last commits, as if the disk had not written them."""
    with Server(np.zeros(50, np.float32), "MIFA", 3, lr=0.1, storage=folder) as server:
        play(server, 4)
    shutil.copy(folder / "index.sqlite", folder.with_name("index"))
    child = os.fork()
    if child == 0:
        server = Server.load(folder)
        play(server, rounds)
        os._exit(0)  # nothing is closed
    assert os.waitpid(child, 0)[1] == 0
    (folder / "index.sqlite-wal").unlink()
    (folder / "index.sqlite-shm").unlink()
    shutil.move(folder.with_name("index"), folder / "index.sqlite")
    return folder


def content_of(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.suffix == ".slots"}


def test_recovery_after_lost_commits(tmp_path):
    folder = lose(tmp_path / "run", 1)
    before = content_of(folder)
    for opened in (ClientStore.open, Server.load, lambda path: Server.load(path, storage=Storage(medium="ram"))):
        with pytest.raises(errors.CorruptionError, match=rf"lost: .* `fedcore store recover {folder}` can restore"):
            opened(folder)
    shown = invoke("store", "recover", folder)
    assert shown.status == 1
    assert "the last complete commit is 5 (round 3)\ncommit 6 would be lost" in shown.output
    assert content_of(folder) == before
    shown = invoke("store", "recover", folder, "--accept-loss")
    assert shown.status == 0, shown.errors
    assert shown.output.endswith("commit 6 discarded; the store can be opened again\n")
    assert invoke("store", "verify", folder).status == 0
    with Server.load(folder) as server:
        assert server.round_number == 4
        assert contradictions(server) == []
        play(server, 3)
        assert contradictions(server) == []
    with Server.load(folder) as server:
        assert server.round_number == 7
    assert recovery.look(folder).lost == range(10, 10)


def test_recovery_rejects_a_commit_that_a_lost_one_has_overwritten(tmp_path):
    folder = lose(tmp_path / "run", 4)
    before = content_of(folder)
    shown = invoke("store", "recover", folder, "--accept-loss")
    assert shown.status == 1
    assert "the row of client 0" in shown.output
    assert "use a copy of the store" in shown.output
    with pytest.raises(errors.CorruptionError, match=r"commit 5 is damaged: .* and more; use a copy"):
        recovery.give_up(folder)
    assert content_of(folder) == before


def test_recovery_does_not_change_a_sound_store(tmp_path):
    with Server(np.zeros(5, np.float32), "MIFA", 3, lr=0.1, storage=tmp_path / "run") as server:
        play(server, 2)
    before = content_of(tmp_path / "run")
    shown = invoke("store", "recover", tmp_path / "run", "--accept-loss")
    assert (shown.status, shown.output) == (0, "the last complete commit is 3 (round 1)\nno commit was lost\n")
    assert recovery.give_up(tmp_path / "run").lost == range(4, 4)
    assert content_of(tmp_path / "run") == before


def test_an_interrupted_recovery(tmp_path, monkeypatch):
    folder = lose(tmp_path / "run", 1)
    monkeypatch.setattr("fedcore.store.files.disk.commit", lambda connection: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        recovery.give_up(folder)
    monkeypatch.undo()
    with pytest.raises(errors.CorruptionError, match="commits were lost"):
        ClientStore.open(folder)
    write = disk.write

    def full(fd, content_of, start=0):
        if start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, content_of)  # of the lock

    monkeypatch.setattr(disk, "write", full)
    recovery.give_up(folder)  # the mark may be missing: the index is ahead of it
    monkeypatch.undo()
    Server.load(folder).close()

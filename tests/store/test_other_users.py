"""Folders from other users: no link is followed, and only the store's own files are written or deleted."""

import fcntl
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, cluster, errors
from fedcore.store import inspect as recovery
from fedcore.store.files import folder as atomic_folder
from fedcore.store.inspect import state_of
from tests.kills import killed
from tests.store.kit import OPENED, OPENING, as_user, content, meanwhile, opened_to_all, write

N = 30

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has locks of an open file, and lists them")


@pytest.fixture
def folder(tmp_path):
    with ClientStore(["a", "b"], N, medium="mmap", path=tmp_path / "store") as store:
        write(store, "a", content(N, 0))
        store.commit(0, {"x": content(N, 1)})
    return tmp_path / "store"


def opened(folder):
    """The round or the error of each way to open a store."""
    results = []
    for options in ({}, {"readonly": True}, {"medium": "ram"}):
        try:
            with ClientStore.open(folder, **options) as store:
                results.append(store.round)
                if not store.readonly and store.medium == "mmap":
                    store.compact()
        except errors.StoreError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("name", ["rows.slots", f"vectors-{4 * N}.slots", "index.sqlite", "lock"])
def test_a_file_that_is_a_link_is_refused(folder, name):
    target = folder.parent / "precious"
    shutil.move(folder / name, target)
    before = target.read_bytes()
    (folder / name).symlink_to(target)
    for error in opened(folder):
        assert error == f"{folder / name}: is a symbolic link, which a store does not follow"
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
def test_a_log_that_is_a_link_is_refused(folder, name):
    target = folder.parent / "precious"
    target.write_bytes(b"precious")
    (folder / name).symlink_to(target)
    assert all("symbolic link" in error for error in opened(folder))
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["INDEX.SQLITE-wal", "Rows.Slots", "READERS", "loc\u212a"])
def test_a_link_is_refused_under_a_name_that_some_file_systems_take_for_the_same(folder, name):
    (folder / name).symlink_to(folder.parent)
    assert all("symbolic link" in error for error in opened(folder))


def hot_journal(index, victim):
    """A rollback journal of no pages that names a super-journal, which SQLite deletes when it plays it back."""
    content = index.read_bytes()
    page = int.from_bytes(content[16:18], "big")
    magic = bytes.fromhex("d9d505f920a163d7")
    head = magic + struct.pack(">IIIII", 0, 1234, len(content) // page, 512, page)
    name = os.fsencode(victim)
    signed = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    tail = struct.pack(">I", 0x40000000 // page + 1) + name + struct.pack(">II", len(name), signed) + magic
    return head.ljust(512, b"\0") + tail


def in_the_old_mode(index, path):
    """Set the mode of rollback journals in the header of an index."""
    content = bytearray(index.read_bytes())
    content[18:20] = b"\1\1"
    index.write_bytes(content)
    return hot_journal(index, path)


JOURNALS = {
    "hot": lambda index, path: hot_journal(index, path),
    "of the old mode": in_the_old_mode,
    "empty": lambda index, path: b"",
    "long": lambda index, path: bytes(1 << 20),
    "link": lambda index, path: path,
    "broken link": lambda index, path: path.with_name("nowhere"),
    "folder": lambda index, path: None,
    "pipe": lambda index, path: os.mkfifo,
}

WAYS = {
    "ClientStore.open": lambda path: ClientStore.open(path),
    "readonly": lambda path: ClientStore.open(path, readonly=True),
    "ram": lambda path: ClientStore.open(path, medium="ram"),
    "undoable": lambda path: ClientStore.open(path, keep_previous=True),
    "Server.load": lambda path: Server.load(path),
    "Server.load, mmap": lambda path: Server.load(path, storage=Storage(medium="mmap", keep_previous=False)),
    "Server.load, ram": lambda path: Server.load(path, storage=Storage(medium="ram")),
    "save over it": lambda path: Server(np.zeros(4, np.float32), "MIFA", 4, lr=0.1).save(path),
    "recovery.look": lambda path: recovery.look(path),
    "recovery.give_up": lambda path: recovery.give_up(path),
    "state_of": lambda path: state_of(path),
    "reshard": lambda path: cluster.reshard(path, 1, to=path.with_name("cut")),
    "Server.open": lambda path: Server.open(path, np.zeros(4, np.float32), "MIFA", [0], lr=0.1),
}


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_rollback_journal_is_rejected_before_sqlite_sees_it(tmp_path, journal):
    victim, path = tmp_path / "thesis.txt", tmp_path / "gift"
    Server(np.zeros(4, np.float32), "MIFA", 4, lr=0.1, storage=path).close()
    place = path / "index.sqlite-journal"
    match JOURNALS[journal](path / "index.sqlite", victim):
        case bytes(content):
            place.write_bytes(content)
        case None:
            place.mkdir()
        case Path() as target:
            place.symlink_to(target)
        case make:
            make(place)
    for name, way in WAYS.items():
        victim.write_text("years of work")
        with pytest.raises(errors.StoreError, match=r"index\.sqlite-journal"):
            way(path)
        assert victim.read_text() == "years of work", name
        assert os.path.lexists(place), name


def test_an_index_in_the_mode_of_rollback_journals_is_rejected(folder):
    in_the_old_mode(folder / "index.sqlite", folder)
    assert all("write-ahead log" in error for error in opened(folder))


def test_a_journal_is_rejected_when_a_fork_opens_the_index_again(folder):
    with ClientStore.open(folder) as store:
        (folder / "index.sqlite-journal").write_bytes(b"")

        def act():
            with pytest.raises(errors.StoreError):
                store._folder.index.head()

        assert not killed(act)
        (folder / "index.sqlite-journal").unlink()


@on_linux
def test_a_journal_that_appears_while_the_index_is_opened_is_not_played_back(folder):
    victim, journal = folder.with_name("thesis.txt"), folder / "index.sqlite-journal"
    victim.write_text("years of work")
    hot = hot_journal(folder / "index.sqlite", victim)
    with meanwhile({OPENED: lambda _: journal.write_bytes(hot)}), ClientStore.open(folder) as store:
        write(store, "b", content(N, 2))
        store.commit(1)
    assert victim.read_text() == "years of work"
    journal.unlink()
    with ClientStore.open(folder) as store:
        np.testing.assert_array_equal(store.read("b"), content(N, 2))


@on_linux
@pytest.mark.parametrize("back", [True, False], ids=["swapped back", "swapped"])
def test_an_index_that_is_swapped_while_it_is_opened_plays_back_no_journal(folder, back):
    victim, index = folder.with_name("thesis.txt"), folder / "index.sqlite"
    journal, aside, other = folder / "index.sqlite-journal", folder / "aside", folder / "other"
    victim.write_text("years of work")
    hot = hot_journal(index, victim)

    def swap(_):
        shutil.copy(index, other)
        index.rename(aside)
        other.rename(index)

    def put(_):
        if back:
            aside.rename(index)
        journal.write_bytes(hot)

    with meanwhile({OPENING: swap, OPENED: put}), pytest.raises(errors.StoreError, match="replacing"):
        ClientStore.open(folder)
    assert victim.read_text() == "years of work"


@on_linux
@pytest.mark.parametrize("event", ["os.scandir", OPENING, OPENED])
@pytest.mark.parametrize("readonly", [False, True])
def test_a_folder_that_becomes_a_link_while_it_is_opened_opens_nothing_elsewhere(folder, event, readonly):
    """Files are opened in the folder that was checked; SQLite's, which it opens by path, are compared."""
    victim, moves = folder.with_name("victim"), []
    with ClientStore([*"abc"], N, medium="mmap", path=folder.with_name("live")) as store:
        store.commit(0)
        shutil.copytree(store.path, victim)  # its last commit is in the log

    def swap(*_):
        if not moves:
            moves.append(folder.rename(folder.with_name("aside")))
            folder.symlink_to(victim)

    def content_of(place):
        return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "-shm" not in path.name}

    before = content_of(victim)
    with meanwhile({event: swap}), pytest.raises(errors.StoreError, match="replacing"):
        ClientStore.open(folder, readonly=readonly)
    assert moves
    assert content_of(victim) == before
    folder.unlink()
    moves[0].rename(folder)
    with ClientStore.open(folder) as store:
        assert store.round == 0


@on_linux
def test_the_lock_of_an_index_ends_with_its_last_connection(folder):
    def locked():
        fd = os.open(folder / "index.sqlite", os.O_RDWR)
        try:
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0x40000001, 1, 0)
            return fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)[:2] != struct.pack("h", fcntl.F_UNLCK)
        finally:
            os.close(fd)

    before = len(os.listdir("/proc/self/fd"))
    first, second = ClientStore.open(folder), ClientStore.open(folder, readonly=True)
    first.close()
    assert locked()
    second.close()
    assert not locked()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_refused_and_not_waited_for(folder):
    (folder / "rows.slots").unlink()
    os.mkfifo(folder / "rows.slots")
    assert all("not a regular file" in error for error in opened(folder))


def test_readers_that_are_a_link_are_refused(folder):
    keys = folder.parent / "keys"
    keys.mkdir()
    for name in ("a.txt", f"77-{'0' * 32}"):
        (keys / name).write_text("precious")
    shutil.rmtree(folder / "readers")
    (folder / "readers").symlink_to(keys)
    assert all("symbolic link" in error for error in opened(folder))
    assert sorted(entry.name for entry in keys.iterdir()) == [f"77-{'0' * 32}", "a.txt"]


def test_a_lock_that_is_a_hard_link_to_another_file_is_not_written(folder):
    keys = folder.parent / "authorized_keys"
    keys.write_text("ssh-rsa precious")
    (folder / "lock").unlink()
    os.link(keys, folder / "lock")
    assert "not a lock file" in opened(folder)[0]
    assert keys.read_text() == "ssh-rsa precious"


FILES = ["rows.slots", f"vectors-{4 * N}.slots", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", ["its own", "empty", "a process"])
def test_a_file_with_a_second_hard_link_is_not_written(folder, name, content):
    """A log and a lock may have any content at first; the other files must belong to the store."""
    if not (folder / name).exists() or content != "its own":
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(b"" if content == "empty" else b"process \nprecious")
    other = folder.parent / "precious"
    os.link(folder / name, other)
    before = other.read_bytes()
    ways = [
        {},
        {"keep_previous": True},
        *([{"readonly": True}, {"medium": "ram"}] if name == "index.sqlite-shm" else []),
    ]
    for way in ways:
        with pytest.raises(errors.StoreError) as error:
            ClientStore.open(folder, **way)
        assert str(error.value).startswith(f"{folder / name}: the file has several hard links")
        assert other.read_bytes() == before
    if content == "its own" and not name.startswith("index.sqlite-"):
        with ClientStore.open(folder, readonly=True) as store:  # which writes to no file of it
            assert store.round == 0
        assert other.read_bytes() == before
        shutil.copy(folder / name, folder.parent / "copy")
        os.replace(folder.parent / "copy", folder / name)
        ClientStore.open(folder).close()


def test_only_the_notes_of_readers_are_open_to_others(tmp_path):
    before = os.umask(0o077)
    try:
        server = Server(np.zeros(4, np.float32), "MIFA", 4, lr=0.1, storage=Storage(tmp_path / "run", journal=True))
        with server, ClientStore.open(tmp_path / "run", readonly=True):
            paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
            open_to_others = [path for path in paths if path.stat().st_mode & 0o077]
            assert [(path.parent.name, path.stat().st_size) for path in open_to_others] == [("readers", 8)]
    finally:
        os.umask(before)


def test_only_notes_of_readers_are_touched(folder):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_text("precious")
    dead = folder / "readers" / f"4321-{'a' * 32}"
    dead.write_bytes(b"")
    files = {"notes.txt", ".nfs000000", f"x-{'a' * 32}", f"12-{'A' * 32}"}
    for name in files:
        (folder / "readers" / name).touch()
    folders, link = {".snapshot", f"14-{'c' * 32}"}, f"13-{'b' * 32}"
    for name in folders:
        (folder / "readers" / name).mkdir()
    (folder / "readers" / link).symlink_to(elsewhere)
    with ClientStore.open(folder) as store:
        for round in range(1, 9):
            write(store, "a", content(N, round))
            store.commit(round)
        assert store.info().free == 1  # none of them keeps slots from reuse
    assert {entry.name for entry in (folder / "readers").iterdir()} == files | folders | {link}
    assert elsewhere.read_text() == "precious"


def test_files_that_are_called_nearly_like_vectors_stay(folder):
    for name in ("vectors-thesis.slots", "vectors-.slots", "vectors-08.slots"):
        (folder / name).write_text("precious")
    (folder / "vectors-9.slots").write_bytes(b"")  # created before a loss of power
    ClientStore.open(folder).close()
    assert not (folder / "vectors-9.slots").exists()
    with ClientStore(1, 1, medium="mmap", path=folder.parent / "other") as other:
        other.commit(0, {"x": np.zeros(3, np.float32)})
    shutil.copy(folder.parent / "other" / "vectors-12.slots", folder)
    (folder / "vectors-13.slots").write_text("years of work")
    ClientStore.open(folder).close()
    assert (folder / "vectors-12.slots").exists()
    assert (folder / "vectors-13.slots").read_text() == "years of work"
    assert all((folder / name).exists() for name in ("vectors-thesis.slots", "vectors-.slots", "vectors-08.slots"))


FAULTS = {
    "a folder": lambda readers: (readers / ".snapshot").mkdir(),
    "an unreadable note": lambda readers: (readers / f"99-{'d' * 32}").touch(mode=0),
    "no folder of readers": lambda readers: readers.rmdir(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_ignores_faults_in_the_readers_folder(folder, fault):
    with ClientStore.open(folder) as store:
        FAULTS[fault](folder / "readers")
        for round in range(1, 4):
            write(store, "a", content(N, round))
            store.commit(round)
    with ClientStore.open(folder) as store:
        assert store.round == 3
        assert store.verify() == []


def test_a_commit_without_a_file_descriptor_left(folder):
    with ClientStore.open(folder) as store:
        write(store, "a", content(N, 1))
        store.commit(1)
        write(store, "a", content(N, 2))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        last = os.dup(0)
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))
        try:
            store.commit(2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert store.round == 2
        write(store, "a", content(N, 3))
        store.commit(3)
    with ClientStore.open(folder) as store:
        assert store.round == 3


def test_a_reader_of_another_user_holds_its_commit_and_nothing_else(folder):
    """The writer may read its note but not write to it."""
    if os.geteuid() != 0:
        pytest.skip("only root can become two other users")

    with opened_to_all(folder) as shared:
        reading, writing = os.pipe()
        done, finish = os.pipe()
        reader = os.fork()
        if reader == 0:
            os.close(finish)
            with as_user(1002):
                os.umask(0o077)
                store = ClientStore.open(shared, readonly=True)
                view = store.row("a")
                os.write(writing, b"r")
                os.read(done, 1)  # until the writer is done
                os.write(writing, b"y" if (view == content(N, 0)).all() and store.verify() == [] else b"n")
            os._exit(0)
        assert os.read(reading, 1) == b"r"
        writer = os.fork()
        if writer == 0:
            status = 1
            with as_user(1001):
                store = ClientStore.open(shared)
                for round in range(1, 6):
                    write(store, "a", content(N, round))
                    store.commit(round)
                status = 0 if store.info().free == 5 else 2  # no slot that the reader may use was reused
                store.close()
            os._exit(status)
        assert os.waitpid(writer, 0)[1] == 0
        os.write(finish, b"f")
        assert os.read(reading, 1) == b"y"
        os.waitpid(reader, 0)


def test_a_reader_in_the_writer_s_process_keeps_sqlite_s_locks(folder):
    """Closing a descriptor of the index would drop them, and another SQLite client then deletes the log."""
    with ClientStore.open(folder) as store:
        write(store, "a", content(N, 1))
        store.commit(1)
        ClientStore.open(folder, readonly=True).close()
        code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM head'); c.close()"
        subprocess.run([sys.executable, "-c", code, folder / "index.sqlite"], check=True, timeout=60)
        assert (folder / "index.sqlite-wal").exists()


def test_a_link_is_not_removed_and_its_store_neither(folder):
    link = folder.with_name("link")
    link.symlink_to(folder)
    atomic_folder.remove(link)
    assert link.is_symlink()
    with ClientStore.open(folder) as store:
        assert store.round == 0

"""One writer and its lock, and readers that hold slots back."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store.files.locks import WriterLock
from tests.cli.command import invoke
from tests.kit import python
from tests.server.invariant import contradictions
from tests.store.kit import content, write

N = 70


@pytest.fixture
def store(tmp_path):
    with ClientStore(["a", "b", 2**64 - 1], N, medium="mmap", codec="int8", path=tmp_path / "store") as store:
        commit(store, 0, "a", "b")
        yield store


def commit(store, round, *clients):
    for client in clients:
        write(store, client, content(N, client, round))
    store.commit(round, {"x": content(N, round)}, {"round": round})


def assert_is_at(store, round, **rounds):
    assert store.round == round
    assert store.state == {"round": round}
    np.testing.assert_array_equal(store.vector("x"), content(N, round))
    for client, written in rounds.items():
        assert store.round_of(client) == written
        np.testing.assert_array_equal(store.read(client), content(N, client, written))


def forked(act):
    """Run ``act`` in a fork; return a function that waits for the fork and returns its result, a text, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)

    def result():
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return text

    return result


def in_a_fork(act):
    return forked(act)()


def test_the_error_of_a_second_writer_names_the_first(store):
    with pytest.raises(errors.LockedError, match=rf"this process \({os.getpid()}\); close\(\)"):
        ClientStore.open(store.path)
    program = "import sys; from fedcore import ClientStore; ClientStore.open(sys.argv[1])"
    other = python("-c", program, store.path, status=1)
    assert f"LockedError: {store.path}: already open for writing in process {os.getpid()}; close()" in other.stderr
    commit(store, 1, "a")
    store.close()
    ClientStore.open(store.path).close()


def test_readers_stay_where_they_are_until_they_refresh(store):
    early = ClientStore.open(store.path, readonly=True)
    view = early.row("a")
    for round in range(1, 30):
        commit(store, round, "a")
        if round == 10:
            late = ClientStore.open(store.path, readonly=True)
    assert_is_at(early, 0, a=0, b=0)
    np.testing.assert_array_equal(view.codes, content(N, "a", 0))
    assert_is_at(late, 10, a=10, b=0)
    early.refresh()
    assert_is_at(early, 29, a=29, b=0)
    assert_is_at(late, 10, a=10, b=0)
    late.close()
    commit(store, 30, "a")
    free = store.info().free
    for round in range(31, 50):
        commit(store, round, "a")
    assert store.info().free == free  # slots of the readers are reused
    early.close()


def test_a_reader_cannot_write(store):
    with ClientStore.open(store.path, readonly=True) as reader:
        calls = {"stage": "a", "commit": [1], "add": "c", "forget": "a", "checkpoint": (), "compact": (), "undo": ()}
        for name, arguments in calls.items():
            with pytest.raises(errors.StoreError, match="readonly=True"):
                getattr(reader, name)(*arguments)
        row = reader.row("a")
        with pytest.raises(ValueError, match="read-only"):
            row.codes[0] = 1
    for act in (lambda: reader.read("a"), lambda: reader.vector("x"), lambda: reader.refresh()):
        with pytest.raises(errors.StoreError, match="is closed"):
            act()


def assert_the_note_goes(store):
    assert len(list((store.path / "readers").iterdir())) == 1
    for round in range(1, 5):
        commit(store, round, "a")
    assert not list((store.path / "readers").iterdir())
    assert store.info().free == 1  # the old slots take turns


def test_a_reader_that_died_holds_nothing(store):
    assert in_a_fork(lambda: [ClientStore.open(store.path, readonly=True), os.kill(os.getpid(), 9)]) == ""
    assert_the_note_goes(store)


def test_two_readers_beside_a_writer(store):
    """Each sees only complete rounds, while the writer commits as fast as it can."""

    def follow():
        reader = ClientStore.open(store.path, readonly=True)
        seen = set()
        while reader.round < 60:
            assert_is_at(reader, reader.round, a=reader.round, b=reader.round - reader.round % 2)
            seen.add(reader.round)
            reader.refresh()
        reader.close()
        return f"saw {len(seen)}"

    readers = [forked(follow) for _ in range(2)]
    for round in range(1, 61):
        commit(store, round, *("ab" if round % 2 == 0 else "a"))
    for result in readers:
        assert result().startswith("saw ")


def test_a_fork_of_the_writer_does_not_touch_the_store(store):
    for act in (lambda: store.read("a"), lambda: store.stage("a"), lambda: store.commit(1), lambda: store.vector("x")):
        text = in_a_fork(act)
        assert text.startswith(f"StoreError: {store.path}: open for writing in the parent process {os.getpid()}")
    assert in_a_fork(lambda: store.close() or "closed") == "closed"

    def read():
        with ClientStore.open(store.path, readonly=True) as reader:
            assert_is_at(reader, 0, a=0, b=0)
        return "well"

    assert in_a_fork(read) == "well"
    with pytest.raises(errors.LockedError):
        ClientStore.open(store.path)
    commit(store, 1, "a")
    assert_is_at(store, 1, a=1, b=0)


class Child:
    """A fork that waits until it is closed."""

    def __enter__(self):
        reading, self._writing = os.pipe()
        self.number = os.fork()
        if self.number == 0:
            os.close(self._writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        return self

    def __exit__(self, *_):
        os.close(self._writing)
        os.waitpid(self.number, 0)


def test_a_store_is_opened_again_beside_a_child_that_lives(store):
    with Child():
        store.close()
        with ClientStore.open(store.path) as again:
            commit(again, 1, "a")


def test_a_copy_of_the_lock_that_no_fork_knows_of_goes_with_close(store):
    """A library that forks without Python runs none of its hooks, and the child shares the open file."""
    lock = store._content.folder._lock
    shared = os.dup(lock._fd)
    store.close()
    ClientStore.open(store.path).close()
    os.close(shared)


ORPHAN = """
import os, sys
from fedcore import ClientStore
store = ClientStore.open(sys.argv[1], readonly=sys.argv[2] == "reader")
reading, writing = os.pipe()
started, starting = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.write(starting, b"!")
    sys.stdin.read(1)  # lives until the test is done
    os._exit(0)
os.read(started, 1)  # until the child runs
print(child, flush=True)
os.read(reading, 1)  # until it is killed
"""


@pytest.fixture
def orphan(store):
    """A function that kills a process with an open store, and leaves its child running."""
    children = []

    def orphan(kind):
        program = [sys.executable, "-c", ORPHAN, store.path, kind]
        parent = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(parent)
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        assert parent.wait(60) == -9
        return parent

    yield orphan
    for parent in children:
        parent.stdin.close()
        assert parent.stdout.read() == ""  # the child has ended too
        parent.stdout.close()


def test_the_lock_of_a_process_that_was_killed_does_not_live_on_in_its_child(store, orphan):
    store.close()
    orphan("writer")
    with ClientStore.open(store.path) as again:
        commit(again, 1, "a")


def test_the_note_of_a_reader_that_was_killed_does_not_live_on_in_its_child(store, orphan):
    orphan("reader")
    assert_the_note_goes(store)


def test_a_copy_without_its_empty_folder(store):
    """Git, zip and object stores do not copy empty folders."""
    (store.path / "notes").mkdir()
    store.close()
    copy = store.path.with_name("copy")
    copy.mkdir()
    for entry in store.path.iterdir():
        if entry.is_file():
            (copy / entry.name).write_bytes(entry.read_bytes())
    with ClientStore.open(copy, readonly=True) as reader, ClientStore.open(copy, readonly=True) as other:
        for looking in (reader, other):
            assert_is_at(looking, 0, a=0, b=0)
        with pytest.raises(errors.LockedError, match="this process"):
            ClientStore.open(copy)
    with ClientStore.open(copy) as writer:
        assert (copy / "readers").is_dir()
        commit(writer, 1, "a")
        with ClientStore.open(copy, readonly=True) as reader:
            assert_is_at(reader, 1, a=1, b=0)
        (copy / "readers").rmdir()
        with pytest.raises(errors.LockedError, match="register a reader"):
            ClientStore.open(copy, readonly=True)
        commit(writer, 2, "a")
    (copy / "lock").unlink()
    with ClientStore.open(copy, readonly=True) as reader:
        assert_is_at(reader, 2, a=2, b=0)


def test_a_fork_of_a_reader_is_another_reader(store):
    reader = ClientStore.open(store.path, readonly=True)
    commit(store, 1, "a")

    def read():
        reader.read("a")  # reads the last commit
        assert_is_at(reader, 1, a=1, b=0)
        assert len(list((store.path / "readers").iterdir())) == 2
        reader.close()
        return "well"

    assert in_a_fork(read) == "well"
    assert_is_at(reader, 0, a=0, b=0)
    commit(store, 2, "a")
    commit(store, 3, "a")
    assert_is_at(reader, 0, a=0, b=0)


def test_the_exit_of_a_fork_does_not_disturb_the_writer(store):
    program = f"""
import os, sys
from fedcore import ClientStore
store = ClientStore.open({str(store.path)!r})
if os.fork() == 0:
    sys.exit(0)  # with all that Python does at its end
os.wait()
store.stage("a").codes[:] = 0
store.commit(1, dict(x=store.vector("x")), dict(round=1))
print(store.round)
"""
    store.close()
    run = python("-c", program)
    assert (run.stdout, run.stderr) == ("1\n", "")
    with ClientStore.open(store.path) as again:
        assert again.round == 1


LARGE = 50


def slots(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.suffix == ".slots"}


def play(server):
    server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(4)])


HARM = {
    "delete": lambda lock: lock.unlink(),
    "replace": lambda lock: [lock.unlink(), lock.write_bytes(b"process 1\n")],
    "rename": lambda lock: lock.rename(lock.with_name("old")),
    "overwrite": lambda lock: lock.write_bytes(b"process 1\n"),  # as another process does without working locks
}


@pytest.fixture
def server(tmp_path):
    server = Server(np.zeros(LARGE, np.float32), "MIFA", 4, lr=0.1, storage=tmp_path / "run")
    play(server)
    yield server
    server.close()


@pytest.mark.parametrize("harm", HARM)
def test_a_writer_without_its_lock_writes_nothing(server, tmp_path, harm):
    folder = tmp_path / "run"
    before, x = slots(folder), server.x.copy()
    HARM[harm](folder / "lock")
    for act in (play, play, lambda server: server.remove_client(1), lambda server: server.add_clients(9)):
        with pytest.raises(errors.StoreError, match=r"open (it|the store) again"):
            act(server)
    assert (server.round_number, server.x.tobytes()) == (1, x.tobytes())
    server.close()  # does not shorten the files
    assert slots(folder) == before
    shutil.copytree(folder, tmp_path / "left")
    (tmp_path / "left" / "lock").unlink(missing_ok=True)
    with Server.load(tmp_path / "left") as again:
        assert contradictions(again) == []


def test_the_other_writer_continues(server, tmp_path):
    (tmp_path / "run" / "lock").unlink()
    with pytest.raises(errors.LockedError, match=r"run/lock: .* missing \(No such"):
        play(server)
    with Server.load(tmp_path / "run") as other:
        for _ in range(3):
            with pytest.raises(errors.StoreError):
                play(server)
            play(other)
        server.close()
        play(other)
    with Server.load(tmp_path / "run") as again:
        assert again.round_number == 5
        assert contradictions(again) == []
        assert again.store.verify() == []


def test_where_locks_do_nothing_the_one_that_came_first_stops(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with Server.load(tmp_path / "run") as other:
        with pytest.raises(errors.LockedError, match=rf"lost the lock: process {os.getpid()} "):
            play(server)
        play(other)
        assert contradictions(other) == []


def stores(tmp_path, monkeypatch):
    """Two writers of one store, which have no working locks."""
    monkeypatch.setattr("fedcore.store.files.locks.WriterLock.require", lambda lock: None)
    one = ClientStore(4, LARGE, medium="mmap", path=tmp_path / "store")
    write(one, 0, content(LARGE, 0))
    one.commit(0)
    (tmp_path / "store" / "lock").unlink()
    return one, ClientStore.open(tmp_path / "store")


def test_a_commit_of_another_stops_the_next(tmp_path, monkeypatch):
    one, other = stores(tmp_path, monkeypatch)
    write(other, 1, content(LARGE, 1))
    other.commit(1)
    with pytest.raises(errors.LockedError, match=r"index.sqlite: another process has committed"):
        one.commit(1)
    assert one.round == 0
    with pytest.raises(errors.StoreError, match="another process has written"):
        one.commit(2)
    one.close()
    assert other.verify() == []
    write(other, 3, content(LARGE, 3))
    other.commit(2)
    other.close()
    with ClientStore.open(tmp_path / "store") as store:
        assert (store.round, store.verify()) == (2, [])
        np.testing.assert_array_equal(store.read(1), content(LARGE, 1))


def test_an_error_during_another_writers_commit(tmp_path, monkeypatch):
    """The other writer's commit has the number that this one's would have had."""
    one, other = stores(tmp_path, monkeypatch)
    act = "fedcore.store.files.folder.Folder.publish"

    def failing(*_):
        write(other, 1, content(LARGE, 1))
        monkeypatch.undo()
        other.commit(7)
        raise MemoryError

    write(one, 2, content(LARGE, 2))
    monkeypatch.setattr(act, failing)
    with pytest.raises(MemoryError):
        one.commit(1)
    assert (one.round, one.round_of(2)) == (0, None)
    monkeypatch.setattr("fedcore.store.files.locks.WriterLock.require", lambda lock: None)
    with pytest.raises(errors.LockedError):
        one.commit(1)
    one.close()
    other.close()


def test_own_commits_and_log_checkpoints_are_not_another_writers(tmp_path):
    with ClientStore(4, LARGE, medium="mmap", path=tmp_path / "store") as store:
        store._content.folder.index._connection().execute("PRAGMA wal_autocheckpoint = 3")
        for round in range(40):
            write(store, round % 4, content(LARGE, round))
            store.commit(round)
            with ClientStore.open(tmp_path / "store", readonly=True) as reader:
                assert reader.round == round


SMALL, CLIENTS = 20, 60


@pytest.fixture
def busy_store(tmp_path):
    with ClientStore(CLIENTS, SMALL, medium="mmap", path=tmp_path / "store", durability="none") as busy_store:
        play_all(busy_store, 0, 1)
        yield busy_store


@pytest.fixture
def reader(busy_store):
    """A process that reads round 0."""
    reading, writing = os.pipe()
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        kept = ClientStore.open(busy_store.path, readonly=True)
        os.write(started, b"!")
        os.read(reading, 1)
        assert kept.round == 0
        os._exit(0)
    os.close(reading)
    os.read(ready, 1)
    yield child
    os.close(writing)
    os.waitpid(child, 0)


def play_all(busy_store, first, last):
    for round in range(first, last):
        for client in range(CLIENTS):
            write(busy_store, client, content(SMALL, client, round))
        busy_store.commit(round, {"x": content(SMALL, round)})


def test_a_slow_reader_is_named_once(busy_store, reader, caplog):
    with caplog.at_level(logging.WARNING, logger="fedcore.store"):
        play_all(busy_store, 1, 2)
        assert not caplog.records
        play_all(busy_store, 2, 9)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"{busy_store.path}: ")
    assert "kept for readers, and 61 slots are in use" in text
    assert f"process {reader}, 2 commits behind" in text
    lines = invoke("store", "info", busy_store.path).output.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines if "read by" in line] == [
        f"process {reader}, 8 commits behind"
    ]


def test_readers_that_refresh_are_not_named(busy_store, caplog):
    with ClientStore.open(busy_store.path, readonly=True) as other:
        for round in range(1, 9):
            play_all(busy_store, round, round + 1)
            other.refresh()
    assert busy_store.info().readers == ()
    assert not caplog.records


def test_without_readers_there_is_no_warning(busy_store, caplog):
    play_all(busy_store, 1, 9)
    assert not caplog.records
    assert ClientStore(3, SMALL).info().readers == ()


def test_a_refusal_while_another_thread_opens_stores(tmp_path, store):
    """The refusal looks at all locked files of this process."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def come_and_go():
        while not stop.is_set():
            kept = [WriterLock(folder) for folder in folders]
            for lock in kept:
                lock.close()

    folders = [tmp_path / str(i) for i in range(20)]
    for folder in folders:
        folder.mkdir()
    thread = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(200):
            with pytest.raises(errors.LockedError, match="in this process"):
                WriterLock(store.path)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)

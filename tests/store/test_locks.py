"""One writer, many readers, and processes that are forked."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fedcore import ClientStore, errors
from tests.store.contents import content, write

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


def in_a_fork(act):
    """Run ``act`` in a fork, which exits as processes do, and return the text that it returned."""
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
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_opened_again_it_is_as_it_was_committed(store):
    write(store, "a", content(N, 9))  # and never committed
    store.close()
    again = ClientStore.open(store.path)
    assert (again.n, again.codec, again.medium, again.readonly) == (N, "int8", "mmap", False)
    assert list(again.registry) == ["a", "b", 2**64 - 1]
    assert_is_at(again, 0, a=0, b=0)
    assert again.row(2**64 - 1) is None
    commit(again, 1, "a", 2**64 - 1)
    again.close()
    with ClientStore.open(store.path) as third:
        assert_is_at(third, 1, a=1, b=0)
        np.testing.assert_array_equal(third.read(2**64 - 1), content(N, 2**64 - 1, 1))


def test_ids_and_departures_are_kept(tmp_path):
    with ClientStore(4, N, medium="mmap", path=tmp_path / "store") as store:
        write(store, 2, content(N, 2))
        store.commit(0)
        store.forget(1)
        store.forget(2)
        store.add("text")
        store.add(2**63)
        store.add(2**63 + 1)
        store.commit(1)
        store.forget(2**63 + 1)
        store.commit(2)
        expected = set(store.registry)
    assert expected == {0, 3, "text", 2**63}
    with ClientStore.open(tmp_path / "store") as again:
        assert set(again.registry) == expected
        assert len(again) == 0
        for client in (1, 2, 7):
            again.add(client)
            assert again.row(client) is None


def test_a_second_writer_is_told_who_the_first_is(store):
    with pytest.raises(errors.LockedError, match=rf"got this very process \({os.getpid()}\): close\(\) the se"):
        ClientStore.open(store.path)
    program = "import sys; from fedcore import ClientStore; ClientStore.open(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", program, store.path], capture_output=True, text=True, timeout=300)
    assert other.returncode == 1
    assert f"LockedError: {store.path}: expected no other writer, got process {os.getpid()}: close()" in other.stderr
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
    assert store.info().free == free  # what readers held is used again
    early.close()


def test_what_a_reader_may_not(store):
    with ClientStore.open(store.path, readonly=True) as reader:
        for act in (
            lambda: reader.stage("a"),
            lambda: reader.commit(1),
            lambda: reader.checkpoint(),
            lambda: reader.compact(),
            lambda: reader.add("c"),
            lambda: reader.forget("a"),
        ):
            with pytest.raises(
                errors.StoreError, match="expected a store open for writing, got one opened with readonl"
            ):
                act()
        row = reader.row("a")
        with pytest.raises(ValueError, match="read-only"):
            row.codes[0] = 1
    for act in (lambda: reader.read("a"), lambda: reader.vector("x"), lambda: reader.refresh()):
        with pytest.raises(errors.StoreError, match="expected an open store, got one that was closed"):
            act()


def test_a_reader_that_died_holds_nothing(store):
    def die():
        reader = ClientStore.open(store.path, readonly=True)
        os.kill(os.getpid(), 9)
        reader.close()

    assert in_a_fork(die) == ""
    assert len(list((store.path / "readers").iterdir())) == 1
    for round in range(1, 5):
        commit(store, round, "a")
    assert not list((store.path / "readers").iterdir())
    assert store.info().free == 1  # the old slots take turns


def test_two_readers_beside_a_writer(store):
    """Each sees whole rounds only, while the writer goes on as fast as it can."""

    def follow():
        reader = ClientStore.open(store.path, readonly=True)
        seen = set()
        while reader.round < 60:
            assert_is_at(reader, reader.round, a=reader.round, b=reader.round - reader.round % 2)
            seen.add(reader.round)
            reader.refresh()
        reader.close()
        return f"saw {len(seen)}"

    readers = []
    for _ in range(2):
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                text = follow()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        readers.append(reading)
    for round in range(1, 61):
        commit(store, round, *("ab" if round % 2 == 0 else "a"))
    for reading in readers:
        with os.fdopen(reading) as pipe:
            assert pipe.read().startswith("saw ")
        os.wait()


def test_a_fork_of_the_writer_does_not_touch_the_store(store):
    for act in (lambda: store.read("a"), lambda: store.stage("a"), lambda: store.commit(1), lambda: store.vector("x")):
        text = in_a_fork(act)
        assert text.startswith(f"StoreError: {store.path}: expected the process that opened the store for writing")
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
    """A fork that does nothing but live until it is told to end."""

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
    """A library that forks by itself runs none of Python's hooks; its child shares the open file all the same."""
    lock = store._content.folder._lock
    shared = os.dup(lock._fd)
    store.close()
    ClientStore.open(store.path).close()
    os.close(shared)


def test_a_store_is_opened_again_beside_the_workers_of_a_loader(store):
    torch = pytest.importorskip("torch")

    loader = torch.utils.data.DataLoader(
        torch.zeros(4, 2), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for _ in loader:
        pass
    store.close()
    with ClientStore.open(store.path) as again:
        assert_is_at(again, 0, a=0, b=0)


ORPHAN = """
import os, sys
from fedcore import ClientStore
store = ClientStore.open(sys.argv[1], readonly=sys.argv[2] == "reader")
reading, writing = os.pipe()
said, saying = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.write(saying, b"!")
    sys.stdin.read(1)  # lives until the test is done
    os._exit(0)
os.read(said, 1)  # until the child runs
print(child, flush=True)
os.read(reading, 1)  # until it is killed
"""


@pytest.fixture
def orphan(store):
    """A function that leaves a living child of a process that had the store open, and was killed."""
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
    assert len(list((store.path / "readers").iterdir())) == 1
    for round in range(1, 5):
        commit(store, round, "a")
    assert not list((store.path / "readers").iterdir())
    assert store.info().free == 1  # the old slots take turns


def test_a_copy_without_its_empty_folder(store):
    """As git, zip and object stores make copies."""
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
        with pytest.raises(errors.LockedError, match="expected no other writer, got this very process"):
            ClientStore.open(copy)
    with ClientStore.open(copy) as writer:
        assert (copy / "readers").is_dir()
        commit(writer, 1, "a")
        with ClientStore.open(copy, readonly=True) as reader:
            assert_is_at(reader, 1, a=1, b=0)
        (copy / "readers").rmdir()
        with pytest.raises(errors.LockedError, match="expected no writer, since readers cannot be noted in this fold"):
            ClientStore.open(copy, readonly=True)
        commit(writer, 2, "a")
    (copy / "lock").unlink()
    with ClientStore.open(copy, readonly=True) as reader:
        assert_is_at(reader, 2, a=2, b=0)


def test_a_fork_of_a_reader_is_a_reader_of_its_own(store):
    reader = ClientStore.open(store.path, readonly=True)
    commit(store, 1, "a")

    def read():
        reader.read("a")  # wakes, and looks at the last commit
        assert_is_at(reader, 1, a=1, b=0)
        assert len(list((store.path / "readers").iterdir())) == 2
        reader.close()
        return "well"

    assert in_a_fork(read) == "well"
    assert_is_at(reader, 0, a=0, b=0)
    commit(store, 2, "a")
    commit(store, 3, "a")
    assert_is_at(reader, 0, a=0, b=0)


def test_a_fork_that_ends_as_processes_do_leaves_the_writer_alone(store):
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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (run.stdout, run.stderr) == ("1\n", "")
    with ClientStore.open(store.path) as again:
        assert again.round == 1

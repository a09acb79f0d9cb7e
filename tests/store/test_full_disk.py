"""A full disk is an error that changes nothing, on each file system."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, Update, errors
from fedcore.store.files import disk
from fedcore.store.files import disk as file_system
from tests.kit import with_history
from tests.store.disks import SIZES, cut, fill, image, mounted
from tests.store.kit import content, write

N = 20_000
CALLS = ("resize", "reserve", "sync", "sync_path", "write", "commit")
PROGRAM = Path(__file__).with_name("small_disk.py")


def attempt(store, round):
    """A round of three clients, the first of which is never the same one, and a vector of a new size."""
    for client in (round, 50, 51):
        write(store, client, content(N, client, round))
    store.commit(round, {"x": content(30 + round, round)}, {"round": round})


def assert_is_at(store, round):
    assert store.round == round
    assert store.state == {"round": round}
    assert store.verify() == []
    np.testing.assert_array_equal(store.vector("x"), content(30 + round, round))
    for client in range(50):
        written = client if client <= round else None
        assert store.round_of(client) == written
    for client in (round, 50, 51):
        np.testing.assert_array_equal(store.read(client), content(N, client, round))


def fail_at(monkeypatch, call, error, names):
    """Let the call-th call into the system fail; returns what was called."""
    called = []

    def failing(name, act):
        def acting(*arguments):
            called.append(name)
            if len(called) == call:
                raise error(name)
            return act(*arguments)

        return acting

    for name in names:
        monkeypatch.setattr(disk, name, failing(name, getattr(disk, name)))
    return called


def full(name):
    """What the system says when the disk is full."""
    if name != "commit":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def broken(name):
    """What the system says when the disk fails."""
    if name != "commit":
        return OSError(errno.EIO, os.strerror(errno.EIO))
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    return error


def each_call(tmp_path, monkeypatch, failure):
    """For each call that a commit makes, and once for none: a store of one commit whose next fails there, its path, the
    number of the call, and the names of those that were made."""
    with ClientStore(60, N, medium="mmap", path=tmp_path / "start") as store:
        attempt(store, 0)
    for call in range(1, 100):
        path = tmp_path / "store"
        shutil.copytree(tmp_path / "start", path)
        store = ClientStore.open(path)
        called = fail_at(monkeypatch, call, failure, CALLS)
        yield store, path, call, called
        shutil.rmtree(path)
        if len(called) < call:
            return


def assert_is_kept(store, path):
    """The second commit is what the folder has, too."""
    store.close()
    with ClientStore.open(path) as again:
        assert_is_at(again, 1)


@pytest.mark.parametrize("failure", [full, broken])
def test_every_call_fails_in_turn(tmp_path, monkeypatch, failure):
    failed = set()
    for store, path, call, called in each_call(tmp_path, monkeypatch, failure):
        try:
            attempt(store, 1)
        except errors.StoreError as error:
            monkeypatch.undo()
            name, said = called[call - 1], str(error)
            failed.add(name)
            assert said.startswith(str(path))
            assert any(word in said for word in ("failed", "the disk is full"))
            assert_is_at(store, 0)
            if ".slots: syncing failed" in said or (name == "commit" and failure is broken):
                # Nobody can tell what the disk has of it: this process must not go on as if it knew.
                with pytest.raises(errors.StoreError, match=r"only the files tell if it is durable .*: open it again"):
                    store.stage(1)
                store.close()
                store = ClientStore.open(path)
                assert store.round == 0
            else:
                store.discard()
                with ClientStore.open(path, readonly=True) as reader:
                    assert_is_at(reader, 0)
            attempt(store, 1)
        monkeypatch.undo()
        assert_is_at(store, 1)
        assert_is_kept(store, path)
    assert failed == set(CALLS)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, UnicodeEncodeError])
def test_an_error_before_the_transaction_ends_nothing(tmp_path, monkeypatch, failure):
    """Nor one after it: whatever it is, the store goes on, as it was or as the transaction made it."""

    def raised(name):
        return failure("utf-8", name, 0, 1, "no") if failure is UnicodeEncodeError else failure(name)

    for store, path, call, called in each_call(tmp_path, monkeypatch, raised):
        with suppress(failure):
            attempt(store, 1)
        monkeypatch.undo()
        # The file tells whether the transaction happened, and memory follows it.
        assert_is_at(store, int("commit" in called[: call - 1]))
        store.discard()
        attempt(store, 1)
        assert_is_kept(store, path)
    assert call > 8


@pytest.mark.parametrize("failure", [full, broken])
def test_a_copy_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch, failure):
    store = ClientStore(60, N, medium="mmap", path=tmp_path / "store")
    attempt(store, 0)
    store.save(tmp_path / "before")
    attempt(store, 1)
    for call in range(1, 100):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "copy")
        called = fail_at(monkeypatch, call, failure, (*CALLS, "rename", "exchange"))
        try:
            store.save(tmp_path / "copy")
        except errors.StoreError:
            monkeypatch.undo()
            assert sorted(entry.name for entry in tmp_path.iterdir()) == ["before", "copy", "store"]
            with ClientStore.open(tmp_path / "copy") as copy:
                # Once the two have changed names, only the end of the old one can fail.
                assert_is_at(copy, int("exchange" in called[: call - 1]))
        monkeypatch.undo()
        if len(called) < call:
            break
    assert call > 10
    with ClientStore.open(tmp_path / "copy") as copy:
        assert_is_at(copy, 1)
    assert_is_at(store, 1)
    store.close()


@pytest.mark.parametrize("failure", [full, broken])
@pytest.mark.parametrize("name", ["write", "work_in"])
def test_an_opening_that_failed_holds_no_lock(tmp_path, monkeypatch, name, failure):
    """Who tries again, here or elsewhere, is let in."""
    with ClientStore(60, N, medium="mmap", path=tmp_path / "store") as store:
        attempt(store, 0)
    fail_at(monkeypatch, 1, failure, [name])
    with pytest.raises(errors.StoreError, match=f"^{tmp_path / 'store'}"):
        ClientStore.open(tmp_path / "store")
    monkeypatch.undo()
    with ClientStore.open(tmp_path / "store") as store:
        attempt(store, 1)
        assert_is_at(store, 1)


def test_an_index_that_cannot_grow(tmp_path):
    with ClientStore([str(i) * 200 for i in range(40)], 4, medium="mmap", path=tmp_path / "store") as store:
        store.commit(0)
        connection = store._content.folder.index._connection()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        for i in range(100):
            store.add(f"{i}" + "x" * 500)
        for _ in range(2):
            with pytest.raises(errors.StoreError, match=r"index.sqlite: the disk is full"):
                store.commit(1)
            assert store.round == 0
        connection.execute("PRAGMA max_page_count = 100000")
        store.commit(1)
    with ClientStore.open(tmp_path / "store") as store:
        assert (store.round, len(store.registry)) == (1, 140)


def test_a_file_that_may_not_grow(tmp_path):
    """The system's own refusal, where every file may be so long only."""
    program = f"""
import resource, sys
from fedcore import ClientStore
with ClientStore(5, 10, medium="mmap", path={str(tmp_path / "store")!r}) as store:
    store.commit(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        store.stage(1)
    except Exception as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.stage(1)
    print("well")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout == f"StoreError {tmp_path / 'store' / 'rows.slots'}: growing failed: File too large\nwell\n"


LIMITED = """
import resource, sys
from fedcore import ClientStore, errors
store = ClientStore(5, 10, medium="mmap", path=sys.argv[1])
def attempt(round):
    store.stage(round % 5)[:] = round
    store.commit(round, {"x": store.read(0)}, {"said": "x" * 5000})
attempt(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
round = 1
try:
    while True:
        attempt(round)
        round += 1
except errors.StoreError as error:
    print(error)
assert store.round == round - 1 and store.verify() == []
try:
    store.commit(round)
except errors.StoreError as error:
    assert "open it again" not in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.commit(round)
assert store.read(round % 5)[0] == round > 5
store.close()
with ClientStore.open(sys.argv[1]) as store:
    assert store.round == round and store.verify() == [] and store.read(round % 5)[0] == round
print("well")
"""


def test_a_log_that_may_not_grow(tmp_path):
    """As at a quota: the write was refused, so that it is certain that nothing was committed."""
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "store"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "index.sqlite: writing failed, at a quota or a limit of the file's size, say (disk I/O error)" in run.stdout
    assert run.stdout.endswith("\nwell\n")


def test_a_disk_that_is_really_full(tmp_path):
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec {sys.executable} {PROGRAM} {tmp_path}"
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of their own")
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        cwd=PROGRAM.parents[2],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "No space left on device" in run.stdout
    assert run.stdout.endswith("well\n")


def test_a_folder_that_cannot_be_written_to(tmp_path_factory):
    with tempfile.TemporaryDirectory() as name:  # not in pytest's folder, which is the user's own
        folder = Path(name)
        with ClientStore(60, N, medium="mmap", path=folder / "store") as store:
            attempt(store, 0)
        for entry in [folder, *folder.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:  # who may write everywhere
                    os.setgid(65534)
                    os.setuid(65534)
                look_but_do_not_touch(folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        for entry in [folder, *folder.rglob("*")]:
            entry.chmod(0o755)
        assert status == 0
        with ClientStore.open(folder / "store") as store:
            attempt(store, 1)


def look_but_do_not_touch(folder):
    reader = ClientStore.open(folder / "store", readonly=True)
    assert_is_at(reader, 0)
    for act in (
        lambda: ClientStore.open(folder / "store"),
        lambda: ClientStore(2, 2, medium="mmap", path=folder / "new"),
        lambda: reader.save(folder / "copy"),
    ):
        with pytest.raises(errors.StoreError, match=r"Permission denied|Read-only"):
            act()
    with pytest.raises(errors.StoreError, match=r"can be written to: .*; open the store with readonly=True, or get"):
        ClientStore.open(folder / "store")
    with ClientStore.open(folder / "store", medium="ram") as loaded:
        assert_is_at(loaded, 0)
    reader.close()


HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(params=SIZES)
def mounted_disk(request, tmp_path):
    """A folder on a small disk of that file system."""
    with mounted(image(request.param, tmp_path), tmp_path / "disk") as place:
        yield place


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )


def test_rounds_until_the_disk_is_full_and_on_when_there_is_room(mounted_disk):
    fill(mounted_disk, leave=8 << 20)
    said = run(HERE / "small_disk.py", mounted_disk)
    assert said.returncode == 0, said.stderr
    assert "No space left on device" in said.stdout or "the disk is full" in said.stdout
    assert said.stdout.endswith("well\n")


WRITTEN_BACK = """
import os, sys
import numpy as np
from pathlib import Path
from fedcore import ClientStore, errors
from tests.store.disks import fill
n = 20_000
store = ClientStore(100, n, medium="mmap", path=Path(sys.argv[1], "store"))
for round in range(2):
    for client in range(50):
        store.stage(client)[:] = 1000 * round + client
    store.commit(round, {"x": np.full(n, round, np.float32)})
os.sync()
rows = [store.stage(client) for client in range(20)]
for row in rows:
    row[:] = 7
os.sync()  # as the system does by itself within half a minute
fill(sys.argv[1], leave=0)
for row in rows:
    row[:] = 8  # and the user of the rows goes on writing
try:
    store.commit(2)
    print("committed")
except errors.StoreError as error:
    print(error)
assert store.verify() == []
Path(sys.argv[1], "filler").unlink()
print("end")
"""


def test_a_disk_that_fills_up_while_a_round_is_open(mounted_disk, tmp_path):
    """What was staged has been written back: a file system that copies on writing would need room for it anew."""
    program = tmp_path / "written_back.py"
    program.write_text(WRITTEN_BACK)
    said = run(program, mounted_disk)
    assert said.returncode == 0, f"ended by signal {-said.returncode}: {said.stdout}{said.stderr}"
    assert said.stdout.endswith("end\n")
    with ClientStore.open(mounted_disk / "store") as store:
        assert store.verify() == []
        assert store.round == (2 if "committed" in said.stdout else 1)
        due = 8 if store.round == 2 else 1000
        assert (store.read(0) == due).all()


def test_a_disk_that_is_full_before_a_round_says_so(mounted_disk):
    with ClientStore(400, N, medium="mmap", path=mounted_disk / "store") as store:
        for client in range(20):
            write(store, client, content(N, client))
        store.commit(0, {"x": content(N, 0)})
        filler = fill(mounted_disk, leave=0)
        with pytest.raises(errors.StoreError, match=r"No space left on device|the disk is full"):
            for round in range(1, 200):
                for client in range(20):
                    write(store, 20 * round % 380 + client, content(N, client))
                store.commit(round, {"x": content(N, round)})
        assert store.verify() == []
        filler.unlink()
        before = store.round
        store.close()
    with ClientStore.open(mounted_disk / "store") as store:
        assert store.round >= before
        write(store, 0, content(N, 1))
        store.commit(999)
        assert store.verify() == []


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
@pytest.mark.parametrize("kills", [25, pytest.param(400, marks=pytest.mark.endurance)])
def test_killed_at_any_moment(mounted_disk, kills, durability):
    said = run(HERE / "killed.py", mounted_disk, durability, kills, 3)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["rounds"] > 0


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_the_power_goes(tmp_path, kind, method):
    """Every round that was finished is there, from what had reached the disk; and the next goes on from it."""
    source, n = image(kind, tmp_path), 5000
    with mounted(source, tmp_path / "disk") as mounted_disk:
        server = Server(np.zeros(n, np.float32), with_history(method, 2), 5, lr=0.1, storage=mounted_disk / "run")
        expected = []
        for round in range(6):
            server.round([Update(i, server.x + np.float32(1 + i + round), 1) for i in range(5) if (i + round) % 3])
            if round == 3:
                server.save(mounted_disk / "copy")
            expected.append((server.round_number, server.x.copy(), cut(source, tmp_path / f"cut{round}.{kind}")))
        server.round([])  # and one that is under way
        server.close()
    for number, x, left in expected:
        with mounted(left, tmp_path / f"left{number}") as place:
            with Server.load(place / "run") as again:
                assert again.round_number == number
                np.testing.assert_array_equal(again.x, x)
                assert again.store.verify() == []
                again.round([Update(i, again.x + 1, 1) for i in range(5)])
            if number > 3:
                assert Server.load(place / "copy", storage=Storage(medium="ram")).round_number == 4
        left.unlink()


def test_new_files_are_overwritten_in_place_where_the_file_system_copies(tmp_path):
    with mounted(image("btrfs", tmp_path), tmp_path / "disk") as mounted_disk:
        ClientStore(3, N, medium="mmap", path=mounted_disk / "store").close()
        said = subprocess.run(["lsattr", mounted_disk / "store"], capture_output=True, text=True, check=True).stdout
        assert all("C" in line.split()[0] for line in said.splitlines())
        assert len(said.splitlines()) >= 3


@pytest.mark.parametrize("number", [0x6969, 0xFF534D42, 0xFE534D42, 0x5346414F])
def test_a_network_file_system_takes_copies_alone(tmp_path, monkeypatch, number):
    with ClientStore(3, N, medium="mmap", path=tmp_path / "store") as store:
        write(store, 0, content(N, 0))
        store.commit(0)
    monkeypatch.setattr(file_system, "kind", lambda path: number)
    for act in (
        lambda: ClientStore(3, N, medium="mmap", path=tmp_path / "new"),
        lambda: Server(np.zeros(N, np.float32), "MIFA", 3, lr=0.1, storage=tmp_path / "new"),
        lambda: ClientStore.open(tmp_path / "store"),
    ):
        with pytest.raises(
            errors.StoreError, match=r"expected a local file system, got \w+, on which locks and mapped"
        ):
            act()
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    server = Server(np.zeros(N, np.float32), "MIFA", 3, lr=0.1)
    server.round([Update(1, server.x + 1, 1)])
    for _ in range(2):
        server.save(tmp_path / "copy")
    assert Server.load(tmp_path / "copy").round_number == 1
    with ClientStore.open(tmp_path / "store", readonly=True) as reader:
        np.testing.assert_array_equal(reader.read(0), content(N, 0))
        assert not list((tmp_path / "store" / "readers").iterdir())  # it holds writers off instead
    monkeypatch.undo()
    ClientStore.open(tmp_path / "store").close()


def test_what_kind_a_file_system_is(mounted_disk, tmp_path):
    numbers = {"ext4": 0xEF53, "xfs": 0x58465342, "btrfs": 0x9123683E}
    kind = next(path for path in tmp_path.glob("disk.*")).suffix[1:]
    for path in (mounted_disk, mounted_disk / "not" / "there", mounted_disk / ".." / "disk"):
        assert file_system.kind(path) == numbers[kind]
        assert not file_system.is_network(path)

"""A full disk is an error that changes nothing, on each file system."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store.files import disk
from tests.kills import killed
from tests.kit import python
from tests.store.disks import SIZES, fill, image, mounted
from tests.store.kit import CALLS, broken, content, each_call, fail_at, full, write

N = 20_000
HERE = Path(__file__).parent
PROGRAM = HERE / "small_disk.py"
ROOT = HERE.parents[1]


def attempt(store, round):
    """A round of three clients, the first of them new, and a vector of a new size."""
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


@pytest.fixture
def start(tmp_path):
    """The folder of a store after one round."""
    with ClientStore(60, N, medium="mmap", path=tmp_path / "start") as store:
        attempt(store, 0)
    return tmp_path / "start"


def assert_is_kept(store):
    """The folder has the second commit too."""
    store.close()
    with ClientStore.open(store.path) as again:
        assert_is_at(again, 1)


@pytest.mark.parametrize("failure", [full, broken])
def test_every_call_fails_in_turn(start, monkeypatch, failure):
    failed = set()
    for store, call, called in each_call(start, monkeypatch, failure):
        try:
            attempt(store, 1)
        except errors.StoreError as error:
            monkeypatch.undo()
            name, text, path = called[call - 1], str(error), store.path
            failed.add(name)
            assert text.startswith(str(path))
            assert any(word in text for word in ("failed", "the disk is full"))
            assert_is_at(store, 0)
            if ".slots: syncing failed" in text or (name == "commit" and failure is broken):
                # The content of the disk is unknown, so this process must not continue.
                with pytest.raises(errors.StoreError, match=r"durable is unknown .*; open the store again"):
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
        assert_is_kept(store)
    assert failed == set(CALLS)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, UnicodeEncodeError])
def test_an_error_before_the_transaction_ends_nothing(start, monkeypatch, failure):
    """Nor after it: the store continues, as it was or as the transaction made it."""

    def raised(name):
        return failure("utf-8", name, 0, 1, "no") if failure is UnicodeEncodeError else failure(name)

    for store, call, called in each_call(start, monkeypatch, raised):
        with suppress(failure):
            attempt(store, 1)
        monkeypatch.undo()
        # The file shows whether the transaction happened, and memory agrees with it.
        assert_is_at(store, int("commit" in called[: call - 1]))
        store.discard()
        attempt(store, 1)
        assert_is_kept(store)
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
                # After the exchange only deleting the old one can fail.
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
def test_an_opening_that_failed_holds_no_lock(start, monkeypatch, name, failure):
    """The next attempt succeeds."""
    fail_at(monkeypatch, 1, failure, [name])
    with pytest.raises(errors.StoreError, match=f"^{start}"):
        ClientStore.open(start)
    monkeypatch.undo()
    with ClientStore.open(start) as store:
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
    """The system limits the size of files."""
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
    done = python("-c", program, timeout=1200)
    assert done.stdout == f"StoreError {tmp_path / 'store' / 'rows.slots'}: growing failed: File too large\nwell\n"


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
    assert "open the store again" not in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.commit(round)
assert store.read(round % 5)[0] == round > 5
store.close()
with ClientStore.open(sys.argv[1]) as store:
    assert store.round == round and store.verify() == [] and store.read(round % 5)[0] == round
print("well")
"""


def test_a_log_that_may_not_grow(tmp_path):
    """As with a quota: the write failed, so certainly nothing was committed."""
    done = python("-c", LIMITED, tmp_path / "store", timeout=1200)
    assert "index.sqlite: writing failed, perhaps because of a quota" in done.stdout
    assert done.stdout.endswith("\nwell\n")


def test_a_disk_that_is_really_full(tmp_path):
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec {sys.executable} {PROGRAM} {tmp_path}"
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("users cannot mount a small disk on this system")
    command = ["unshare", "-rm", "sh", "-c", mount]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout
    assert done.stdout.endswith("well\n")


def test_a_folder_that_cannot_be_written_to(tmp_path_factory):
    with tempfile.TemporaryDirectory() as name:  # not in pytest's folder, which is the user's own
        folder = Path(name)
        with ClientStore(60, N, medium="mmap", path=folder / "store") as store:
            attempt(store, 0)
        for entry in [folder, *folder.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)

        def act():
            if os.geteuid() == 0:  # root may write everywhere
                os.setgid(65534)
                os.setuid(65534)
            look_but_do_not_touch(folder)

        try:
            assert not killed(act)
        finally:
            for entry in [folder, *folder.rglob("*")]:
                entry.chmod(0o755)
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
    with pytest.raises(errors.StoreError, match=r"no write access: .*readonly=True"):
        ClientStore.open(folder / "store")
    with ClientStore.open(folder / "store", medium="ram") as loaded:
        assert_is_at(loaded, 0)
    reader.close()


@pytest.fixture(params=SIZES)
def mounted_disk(request, tmp_path):
    """A folder on a small disk of that file system."""
    with mounted(image(request.param, tmp_path), tmp_path / "disk") as place:
        yield place


def test_rounds_until_the_disk_is_full_and_after_space_is_freed(mounted_disk):
    fill(mounted_disk, leave=8 << 20)
    done = python(PROGRAM, mounted_disk, timeout=1200)
    assert "No space left on device" in done.stdout or "the disk is full" in done.stdout
    assert done.stdout.endswith("well\n")


WRITTEN_BACK = """
import os, sys
import numpy as np
from pathlib import Path
from fedcore import ClientStore, errors
from tests.kit import python
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
    """Staged rows were written back; a copy-on-write file system needs new space to write them again."""
    program = tmp_path / "written_back.py"
    program.write_text(WRITTEN_BACK)
    done = python(program, mounted_disk, timeout=1200)
    assert done.stdout.endswith("end\n")
    with ClientStore.open(mounted_disk / "store") as store:
        assert store.verify() == []
        assert store.round == (2 if "committed" in done.stdout else 1)
        due = 8 if store.round == 2 else 1000
        assert (store.read(0) == due).all()


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
@pytest.mark.parametrize("kills", [25, pytest.param(400, marks=pytest.mark.endurance)])
def test_killed_at_any_moment(mounted_disk, kills, durability):
    done = python(HERE / "killed.py", mounted_disk, durability, kills, 3, timeout=1200)
    assert json.loads(done.stdout)["rounds"] > 0


def test_new_files_are_overwritten_in_place_where_the_file_system_copies(tmp_path):
    with mounted(image("btrfs", tmp_path), tmp_path / "disk") as mounted_disk:
        ClientStore(3, N, medium="mmap", path=mounted_disk / "store").close()
        done = subprocess.run(["lsattr", mounted_disk / "store"], capture_output=True, text=True, check=True).stdout
        assert all("C" in line.split()[0] for line in done.splitlines())
        assert len(done.splitlines()) >= 3


@pytest.mark.parametrize("number", [0x6969, 0xFF534D42, 0xFE534D42, 0x5346414F])
def test_a_network_file_system_takes_only_copies(tmp_path, monkeypatch, number):
    with ClientStore(3, N, medium="mmap", path=tmp_path / "store") as store:
        write(store, 0, content(N, 0))
        store.commit(0)
    monkeypatch.setattr(disk, "kind", lambda path: number)
    for act in (
        lambda: ClientStore(3, N, medium="mmap", path=tmp_path / "new"),
        lambda: Server(np.zeros(N, np.float32), "MIFA", 3, lr=0.1, storage=tmp_path / "new"),
        lambda: ClientStore.open(tmp_path / "store"),
    ):
        with pytest.raises(errors.StoreError, match=r"on \w+, where locks"):
            act()
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    server = Server(np.zeros(N, np.float32), "MIFA", 3, lr=0.1)
    server.round([Update(1, server.x + 1, 1)])
    for _ in range(2):
        server.save(tmp_path / "copy")
    assert Server.load(tmp_path / "copy").round_number == 1
    with ClientStore.open(tmp_path / "store", readonly=True) as reader:
        np.testing.assert_array_equal(reader.read(0), content(N, 0))
        assert not list((tmp_path / "store" / "readers").iterdir())  # it excludes writers instead
    monkeypatch.undo()
    ClientStore.open(tmp_path / "store").close()


def test_the_kind_of_a_file_system(mounted_disk, tmp_path):
    numbers = {"ext4": 0xEF53, "xfs": 0x58465342, "btrfs": 0x9123683E}
    kind = next(path for path in tmp_path.glob("disk.*")).suffix[1:]
    for path in (mounted_disk, mounted_disk / "not" / "there", mounted_disk / ".." / "disk"):
        assert disk.kind(path) == numbers[kind]
        assert not disk.is_network(path)

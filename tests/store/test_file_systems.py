"""Full disks, kills and losses of power on the file systems that stores are meant for, mounted from images."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store.files import file_system
from tests.store.contents import content, write
from tests.store.disks import SIZES, cut, fill, image, mounted

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
N = 20_000


@pytest.fixture(params=SIZES)
def disk(request, tmp_path):
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


def test_rounds_until_the_disk_is_full_and_on_when_there_is_room(disk):
    fill(disk, leave=8 << 20)
    said = run(HERE / "small_disk.py", disk)
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


def test_a_disk_that_fills_up_while_a_round_is_open(disk, tmp_path):
    """What was staged has been written back: a file system that copies on writing would need room for it anew."""
    program = tmp_path / "written_back.py"
    program.write_text(WRITTEN_BACK)
    said = run(program, disk)
    assert said.returncode == 0, f"ended by signal {-said.returncode}: {said.stdout}{said.stderr}"
    assert said.stdout.endswith("end\n")
    with ClientStore.open(disk / "store") as store:
        assert store.verify() == []
        assert store.round == (2 if "committed" in said.stdout else 1)
        due = 8 if store.round == 2 else 1000
        assert (store.read(0) == due).all()


def test_a_disk_that_is_full_before_a_round_says_so(disk):
    with ClientStore(400, N, medium="mmap", path=disk / "store") as store:
        for client in range(20):
            write(store, client, content(N, client))
        store.commit(0, {"x": content(N, 0)})
        filler = fill(disk, leave=0)
        with pytest.raises(errors.StoreError, match=r"No space left on device|the disk is full"):
            for round in range(1, 200):
                for client in range(20):
                    write(store, 20 * round % 380 + client, content(N, client))
                store.commit(round, {"x": content(N, round)})
        assert store.verify() == []
        filler.unlink()
        before = store.round
        store.close()
    with ClientStore.open(disk / "store") as store:
        assert store.round >= before
        write(store, 0, content(N, 1))
        store.commit(999)
        assert store.verify() == []


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
@pytest.mark.parametrize("kills", [25, pytest.param(400, marks=pytest.mark.endurance)])
def test_killed_at_any_moment(disk, kills, durability):
    said = run(HERE / "killed.py", disk, durability, kills, 3)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["rounds"] > 0


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_the_power_goes(tmp_path, kind, method):
    """Every round that was finished is there, from what had reached the disk; and the next goes on from it."""
    source, n = image(kind, tmp_path), 5000
    with mounted(source, tmp_path / "disk") as disk:
        server = Server(method, np.zeros(n, np.float32), 5, lr=0.1, store=f"mmap:{disk / 'run'}", history_rounds=2)
        expected = []
        for round in range(6):
            server.round([Update(i, server.x + np.float32(1 + i + round), 1) for i in range(5) if (i + round) % 3])
            if round == 3:
                server.save(disk / "copy")
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
                assert Server.load(place / "copy", medium="ram").round_number == 4
        left.unlink()


def test_new_files_are_overwritten_in_place_where_the_file_system_copies(tmp_path):
    with mounted(image("btrfs", tmp_path), tmp_path / "disk") as disk:
        ClientStore(3, N, medium="mmap", path=disk / "store").close()
        said = subprocess.run(["lsattr", disk / "store"], capture_output=True, text=True, check=True).stdout
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
        lambda: Server("MIFA", np.zeros(N, np.float32), 3, lr=0.1, store=f"mmap:{tmp_path / 'new'}"),
        lambda: ClientStore.open(tmp_path / "store"),
    ):
        with pytest.raises(
            errors.StoreError, match=r"expected a local file system, got \w+, on which locks and mapped"
        ):
            act()
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    server = Server("MIFA", np.zeros(N, np.float32), 3, lr=0.1)
    server.round([Update(1, server.x + 1, 1)])
    for _ in range(2):
        server.save(tmp_path / "copy")
    assert Server.load(tmp_path / "copy").round_number == 1
    with ClientStore.open(tmp_path / "store", readonly=True) as reader:
        np.testing.assert_array_equal(reader.read(0), content(N, 0))
        assert not list((tmp_path / "store" / "readers").iterdir())  # it holds writers off instead
    monkeypatch.undo()
    ClientStore.open(tmp_path / "store").close()


def test_what_kind_a_file_system_is(disk, tmp_path):
    numbers = {"ext4": 0xEF53, "xfs": 0x58465342, "btrfs": 0x9123683E}
    kind = next(path for path in tmp_path.glob("disk.*")).suffix[1:]
    for path in (disk, disk / "not" / "there", disk / ".." / "disk"):
        assert file_system.kind(path) == numbers[kind]
        assert not file_system.is_network(path)

"""Folders that this format's first version wrote are read for as long as their version is.

``python -m tests.store.test_format`` writes the archive of the present version, once: when the version changes, the
old archive stays, and ``VERSIONS`` says whether it is still read.
"""

import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, algorithms, kernels
from fedcore.kernels import Codes
from fedcore.store import slots as geometry
from tests.kit import place

FORMATS = Path(__file__).with_name("formats")
VERSIONS = {1: "read", 2: "read", 3: "read"}
N = 200
CLIENTS = ["a", 7, 2**64 - 1, "gone", "never"]


def values(key, n=N):
    """Integers that every codec stores without loss, by arithmetic only."""
    found = ((np.arange(n) * 7 + key * 31) % 255 - 127).astype(np.float32)
    found[::64] = 127  # a block's scale is then 1
    return found


def write_row(store, client, row):
    slot = store.stage(client)
    if isinstance(slot, Codes):
        kernels.quantise(row, slot.codec, out=slot)
    else:
        slot[:] = row


def write_store(path, codec):
    with ClientStore(CLIENTS, N, medium="mmap", codec=codec, path=path) as store:
        for round in range(3):
            for key, client in enumerate(CLIENTS[: 4 - round]):
                write_row(store, client, values(10 * round + key))
            store.commit(round, {"x": values(round), "total": values(round).astype(np.float64)}, {"said": round})
        store.forget("gone")
        store.add("come")


def write_undoable(path):
    """Rounds 0 to 2, of which the last also has an arrival and a departure, and can be taken back."""
    with ClientStore(CLIENTS, N, medium="mmap", path=path, keep_previous=True) as store:
        for round in range(3):
            for key, client in enumerate(CLIENTS[: 4 - round]):
                write_row(store, client, values(10 * round + key))
            if round == 2:
                store.forget("gone")
                store.add("come")
            store.commit(round, {"x": values(round)}, {"said": round})


def play(server):
    """Rounds in whole numbers and halves, exact in float32 whatever computes them."""
    for round, cohort in enumerate([[0, 1, 2, 3], [0, 1], [2], [3, 0]]):
        server.round([Update(i, values(10 * round + i), 2, kind="gradient") for i in cohort])
    return server


def made(store="ram"):
    algorithm = algorithms.MimiC(history=2)
    return Server(np.zeros(N, np.float32), algorithm, clients=4, lr=0.5, server_lr=0.5, storage=place(store))


def write(folder):
    for codec in ("f32", "bf16", "int8"):
        write_store(folder / codec, codec)
    write_undoable(folder / "undoable")
    play(made(f"mmap:{folder / 'server'}")).close()
    ClientStore.open(folder / "server").close()  # without views the files end after their last slots


@pytest.fixture(params=[version for version, now in VERSIONS.items() if now == "read"])
def folder(request, tmp_path):
    with zipfile.ZipFile(FORMATS / f"{request.param}.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_every_version_has_its_archive_and_the_present_one_is_read():
    assert sorted(f"{version}.zip" for version in VERSIONS) == sorted(path.name for path in FORMATS.iterdir())
    assert geometry.VERSION == max(VERSIONS) == max(geometry.GRAINS)
    assert VERSIONS[geometry.VERSION] == "read"


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_a_store_of_that_version_has_its_content(folder, codec, readonly):
    assert (folder / codec / "rows.slots").read_bytes()[:8] == b"fedcore\x1a"
    with ClientStore.open(folder / codec, readonly=readonly) as store:
        assert store.verify() == []
        assert (store.codec, store.n, store.round, store.state) == (codec, N, 2, {"said": 2})
        assert set(store.registry) == {*CLIENTS, "come"} - {"gone"}
        for key, (client, round) in enumerate([("a", 2), (7, 2), (2**64 - 1, 1)]):
            assert store.round_of(client) == round
            np.testing.assert_array_equal(store.read(client), values(10 * round + key))
        assert store.row("come") is store.row("never") is None
        np.testing.assert_array_equal(store.vector("x"), values(2))
        np.testing.assert_array_equal(store.vector("total"), values(2).astype(np.float64))
        if not readonly:
            store.stage("come")
            store.commit(3)


def test_undo_in_a_store_of_that_version(folder):
    """From version 3 on; an older store is upgraded, and its next commit can be undone."""
    path = folder / "undoable"
    if not path.exists():
        with ClientStore.open(folder / "f32", keep_previous=True) as store:
            assert (store.previous, store.undo(), store.round, store.info().format) == (None, False, 2, 3)
            write_row(store, "a", values(99))
            store.commit(3)
            assert (store.undo(), store.round) == (True, 2)
            np.testing.assert_array_equal(store.read("a"), values(20))
        return
    with ClientStore.open(path, keep_previous=True) as store:
        assert (store.round, store.previous.round, store.previous.state) == (2, 1, {"said": 1})
        assert store.verify() == []
        assert store.undo()
        assert (store.round, store.state, set(store.registry)) == (1, {"said": 1}, set(CLIENTS))
        for key, (client, round) in enumerate([("a", 1), (7, 1), (2**64 - 1, 1), ("gone", 0)]):
            assert store.round_of(client) == round
            np.testing.assert_array_equal(store.read(client), values(10 * round + key))
        np.testing.assert_array_equal(store.vector("x"), values(1))
        assert store.verify() == []


def test_a_server_of_that_version_continues(folder):
    again, here = Server.load(folder / "server"), play(made())
    assert again.round_number == 4
    assert len(again._backend.snapshot.history) == 2
    for server in (again, here):
        server.round([Update(i, values(50 + i), 2, kind="gradient") for i in (1, 3)])
    np.testing.assert_allclose(again.x, here.x, rtol=1e-6)
    for i in range(4):
        np.testing.assert_allclose(again.correction(i), here.correction(i), rtol=1e-6, atol=1e-4)


if __name__ == "__main__":
    target = FORMATS / f"{geometry.VERSION}.zip"
    if target.exists():
        sys.exit(f"{target}: is there already, and is never written again")
    FORMATS.mkdir(exist_ok=True)
    with TemporaryDirectory() as name, zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        write(Path(name))
        for entry in sorted(Path(name).rglob("*")):
            archive.write(entry, entry.relative_to(name))

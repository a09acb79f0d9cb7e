"""Systems of large pages: a store works where memory is mapped and advised at multiples of 64 KiB alone."""

import errno
import mmap
import os
import zipfile

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update
from fedcore.store.files import slot_file
from fedcore.store.geometry import CHUNK, GRAINS, VERSION, Geometry
from tests.store.contents import content, write
from tests.store.test_format import FORMATS

MAP = mmap.mmap


class Strict(MAP):
    """What a system of pages of so many bytes lets one do."""

    page = 1

    def __new__(cls, fd, length, *arguments, offset=0, **options):
        if offset % cls.page:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().__new__(cls, fd, length, *arguments, offset=offset, **options)

    def madvise(self, advice, start=0, length=None):
        if start % self.page:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().madvise(advice, start, len(self) - start if length is None else length)


@pytest.fixture(params=[4, 16, 64], ids=lambda size: f"{size} KiB")
def page(request, monkeypatch):
    """Pages of this size, as far as a store can tell."""
    monkeypatch.setattr(Strict, "page", request.param << 10)
    monkeypatch.setattr(mmap, "mmap", Strict)
    monkeypatch.setattr(slot_file, "_PAGE", request.param << 10)
    return request.param << 10


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("n", [1, 70, 20_000, 270_000, 1_100_000], ids=str)
def test_a_store_from_its_making_to_its_copy(tmp_path, page, n, codec):
    """Rows that are smaller than a page, larger than one, and whole pages."""
    clients, options = 5, {"codec": codec, "resident_rows": 2}
    with ClientStore(clients, n, medium="mmap", path=tmp_path / "store", **options) as store:
        for round in range(3):
            for client in range(round, clients):
                write(store, client, content(n, client, round))
            store.commit(round, {"x": content(n, round)}, {"round": round})
    with ClientStore.open(tmp_path / "store", resident_rows=2) as store:
        with ClientStore.open(tmp_path / "store", readonly=True) as reader:
            store.prefetch(range(clients))
            for client in range(3):
                store.forget(client)
            store.commit(3, {"x": content(n, 3)})
            np.testing.assert_array_equal(reader.read(0), content(n, 0, 0))
            reader.refresh()
            np.testing.assert_array_equal(reader.vector("x"), content(n, 3))
        store.compact()
        store.save(tmp_path / "copy")
        assert store.verify() == []
    for path in (tmp_path / "store", tmp_path / "copy"):
        for options in ({}, {"readonly": True}, {"medium": "ram"}):
            with ClientStore.open(path, **options) as store:
                assert (store.round, len(store), store.info().format) == (3, 2, VERSION)
                for client in (3, 4):
                    np.testing.assert_array_equal(store.read(client), content(n, client, 2))


def test_more_than_a_chunk_of_small_rows(tmp_path, page):
    n = 250  # 1,088 bytes with the checksum: no divisor of a page
    geometry = Geometry.of(4 * n)
    clients = geometry.per_chunk + 3
    with ClientStore(clients, n, medium="mmap", path=tmp_path / "store", durability="none") as store:
        for client in range(clients):
            store.stage(client)[:] = client
        store.commit(0)
        for client in (0, geometry.per_chunk - 1, geometry.per_chunk, clients - 1):
            assert (store.read(client) == client).all()


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_a_server(tmp_path, page, method):
    with Server(method, np.zeros(20_000, np.float32), 3, lr=0.1, store=f"mmap:{tmp_path / 'run'}") as server:
        for round in range(4):
            server.round([Update(i, server.x + np.float32(i + round), 1) for i in range(3)])
        x = server.x.copy()
    with Server.load(tmp_path / "run") as again:
        np.testing.assert_array_equal(again.x, x)
        again.round([Update(i, again.x + 1, 1) for i in range(3)])


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_a_folder_of_the_first_version_goes_on_as_one(tmp_path, page, codec):
    """It was made for pages of 4 KiB; on larger ones its chunks are mapped from the page in which they begin."""
    with zipfile.ZipFile(FORMATS / "1.zip") as archive:
        archive.extractall(tmp_path)
    path = tmp_path / codec
    with ClientStore.open(path) as store:
        assert store.info().format == 1
        n, clients = store.n, list(store.registry)
        before = {client: store.read(client) for client in clients}
        for round in range(3, 6):
            write(store, "a", content(n, round))
            store.commit(round, {"x": content(n, round), f"of{round}": content(n * round, round)})
        store.compact()
        store.save(tmp_path / "copy")
    for folder, version in ((path, 1), (tmp_path / "copy", VERSION)):
        with ClientStore.open(folder, readonly=True) as store:
            assert store.info().format == version
            assert store.verify() == []
            for client in clients:
                due = content(n, 5) if client == "a" else before[client]
                np.testing.assert_array_equal(store.read(client), due)
            np.testing.assert_array_equal(store.vector("x"), content(n, 5))
    assert {entry.read_bytes()[8] for entry in path.glob("*.slots")} == {1}


@pytest.mark.parametrize("version", GRAINS)
def test_chunks_are_whole_grains_and_slots_share_no_more_pages_than_they_must(version):
    grain = GRAINS[version]
    rng = np.random.default_rng(0)
    sizes = [*range(1, 2000, 37), *(2 ** rng.uniform(0, 28, 300)).astype(int).tolist(), 1 << 16, 1 << 20, 1 << 26]
    for payload in sizes:
        geometry = Geometry.of(payload, version)
        assert geometry.begin == grain
        assert geometry.stride * geometry.per_chunk % grain == 0
        assert geometry.stride >= payload + 8 * geometry.blocks
        assert geometry.stride <= 1.07 * payload + 2 * 64 + 8 * geometry.blocks
        assert geometry.stride % (grain if geometry.stride >= 16 * grain else 64) == 0
        assert geometry.per_chunk * geometry.stride <= CHUNK or geometry.per_chunk <= 16

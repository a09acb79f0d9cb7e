"""Slots of rows: checksums, pages, memory and disk."""

import errno
import fcntl
import mmap
import os
import zipfile
from threading import RLock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import ClientStore, Server, errors, kernels
from fedcore.store.files import disk, slot_file
from fedcore.store.files.slot_file import SlotFile
from fedcore.store.slots import CHUNK, GRAINS, VERSION, Geometry, checksums
from tests import oracle
from tests.cluster.pairs import one_round
from tests.kit import in_threads
from tests.store.kit import content, write
from tests.store.test_format import FORMATS

BLOCK = 1 << 20
RAMP = bytes(i * i % 251 for i in range(1000))


@pytest.mark.parametrize(
    ("content", "due"),
    [
        (b"\0", 0x793AA1AF55DFFFDB),
        (b"fedcore", 0x83742E8BD6D9A58C),
        (b"\0" * 64, 0x6F6BA49B20CB1285),
        (RAMP[:64], 0xEEB25A030343CABA),
        (RAMP[:65], 0x35E3386007A57F20),
        (RAMP, 0x69751B694AFC6CD4),
    ],
)
def test_checksums_have_known_values(content, due):
    assert checksums(content).tolist() == [due]
    assert oracle.checksum(content, BLOCK).tolist() == [due]


@given(st.binary(max_size=700), st.integers(1, 800), st.integers(0, 8))
def test_blocks_agree_with_the_reference_at_any_alignment(content, block, shift):
    shifted = memoryview(bytes(shift) + content)[shift:]
    sums = checksums(shifted, block)
    np.testing.assert_array_equal(sums, oracle.checksum(content, block))
    np.testing.assert_array_equal(checksums(content, 2**63 - 1), checksums(content))
    assert sums.tolist() == [int(checksums(content[at : at + block])[0]) for at in range(0, len(content), block)]


@pytest.mark.parametrize("block", [1, 1000, 65_536, BLOCK])
def test_large_buffers_agree_with_the_reference(block):
    content = np.random.default_rng(0).bytes(3 * BLOCK // (100 if block == 1 else 1) + 17)
    np.testing.assert_array_equal(checksums(content, block), oracle.checksum(content, block))


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_one_or_two_flipped_bits_and_every_truncation_change_it(fill):
    n = 88  # a full chunk and a part of one
    base = {"zeros": np.zeros(n), "ones": np.full(n, 255), "random": np.random.default_rng(1).integers(0, 256, n)}[fill]
    base, bits = base.astype(np.uint8), np.arange(8 * n)
    flips = np.zeros((8 * n, n), np.uint8)
    flips[bits, bits // 8] = 1 << bits % 8
    first, second = np.triu_indices(8 * n)  # the diagonal flips nothing
    changed = base ^ flips[first] ^ flips[second]
    once = base ^ flips
    sums = np.concatenate([checksums(changed[first != second], n), checksums(once, n), checksums(base, n)])
    assert len(np.unique(sums)) == len(sums) == 8 * n * (8 * n - 1) // 2 + 8 * n + 1
    truncated = [int(checksums(base[:length])[0]) for length in range(1, n + 1)]
    assert len(set(truncated)) == n


def test_several_flipped_signs_do_not_cancel():
    rows = np.ones((64, 48), np.float32)
    for bit, element in enumerate([0, 1, 16, 17, 32, 33]):  # six that go through one lane
        rows[np.arange(64) >> bit & 1 == 1, element] = -1
    assert len(np.unique(checksums(rows, 4 * 48))) == 64


def test_every_exporter_of_bytes(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(RAMP)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        due = checksums(RAMP)
        for buffer in (bytearray(RAMP), memoryview(RAMP), mapped, np.frombuffer(RAMP, np.float64).reshape(5, 25)):
            np.testing.assert_array_equal(checksums(buffer), due)
    for empty in (b"", np.zeros((0, 3), np.float32)):
        assert checksums(empty).shape == (0,)
        assert checksums(empty).dtype == np.uint64


@pytest.mark.parametrize("buffer", [None, [1, 2], "text", np.zeros((4, 4))[:, 1], memoryview(b"abcd")[::2]])
def test_other_objects_have_no_contiguous_bytes(buffer):
    with pytest.raises(errors.ArrayError, match="buffer: expected contiguous bytes, "):
        checksums(buffer)


@pytest.mark.parametrize("block", [0, -1, 2**63, 1.5, "1", None])
def test_blocks_out_of_range_are_refused(block):
    with pytest.raises(errors.RangeError, match=r"^block="):
        checksums(b"x", block)


N = 40_001  # two whole blocks under a checksum, and a piece
SUMMED = 65_536


@pytest.fixture
def store(tmp_path):
    with ClientStore(["a", "b"], N, medium="mmap", path=tmp_path / "store") as store:
        yield store


def reopened(store):
    """The damage in the store's folder, and its rows if there is none, from another store."""
    store.close()
    with ClientStore.open(store.path, readonly=True) as other:
        problems = other.verify()
        return problems, {} if problems else {client: other.read(client) for client in other.registry}


def assert_sound(store, **keys):
    """No row is damaged, and these clients' rows have the contents of these keys."""
    problems, rows = reopened(store)
    assert problems == []
    for client, key in keys.items():
        np.testing.assert_array_equal(rows[client], content(N, key))


def note(store, client, values):
    store.note_checksums([client], np.array([checksums(values, SUMMED)]))


def test_a_commit_reads_no_row_whose_checksums_are_known(store):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 2))  # wrong ones, which only a reader detects
    store.commit(round=0)
    (problem,), _ = reopened(store)
    assert "client 'a'" in problem


def test_known_checksums_equal_those_of_a_commit(store):
    for client, key in (("a", 1), ("b", 2)):
        write(store, client, content(N, key))
    sums = np.array([checksums(content(N, 2), SUMMED)])
    store.note_checksums(["b"], sums)
    sums[:] = 0  # they were copied
    store.commit(round=0)
    assert_sound(store, a=1, b=2)


@pytest.mark.parametrize(
    "drop",
    [
        lambda store: None,
        lambda store: store.unstage("a"),
        lambda store: [store.unstage("a"), note(store, "a", content(N, 1))],  # of no staged row
        lambda store: store.discard(),
        lambda store: store.rollback(),
        lambda store: store.commit(round=0),
    ],
)
def test_staging_again_drops_noted_checksums(store, drop):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 1))
    drop(store)
    write(store, "a", content(N, 2))
    store.commit(round=1)
    assert_sound(store, a=2)


@pytest.mark.parametrize(("medium", "codec"), [("ram", "f32"), ("mmap", "bf16"), ("mmap", "int8")])
def test_stores_that_need_no_noted_checksums(tmp_path, medium, codec):
    path = tmp_path / "store" if medium == "mmap" else None
    with ClientStore(2, N, medium=medium, codec=codec, path=path) as store:
        assert store.room_for_checksums(2) is None


def test_a_row_that_is_written_anew_after_a_commit_that_failed_is_summed_anew(store):
    for client, key in (("a", 1), ("b", 2)):
        write(store, client, content(N, key))
        note(store, client, content(N, key))
    with pytest.raises(errors.DtypeError):
        store.commit(round=0, vectors={"v": np.array(["no number"])})
    write(store, "b", content(N, 3))
    store.commit(round=0)
    assert_sound(store, a=1, b=3)


def test_a_reused_slot_or_number_has_no_noted_checksums(store):
    write(store, "a", content(N, 1))
    note(store, "a", content(N, 1))
    store.unstage("a")
    write(store, "b", content(N, 2))  # into the slot that "a" had
    store.commit(round=0)
    write(store, "a", content(N, 3))
    note(store, "a", content(N, 3))
    store.forget("a")
    store.commit(round=1)
    store.add("c")  # with the number that "a" had
    write(store, "c", content(N, 4))
    store.commit(round=2)
    assert_sound(store, b=2, c=4)


def test_invalid_checksums_are_rejected(store):
    write(store, "a", content(N, 1))
    for shape, dtype in (((1, 2), np.uint64), ((2, 3), np.uint64), ((3,), np.uint64), ((1, 3), np.int64)):
        got = rf"{np.dtype(dtype)}\[{', '.join(map(str, shape))}\]"
        with pytest.raises(errors.ShapeError, match=rf"^checksums: .*uint64\[1, 3\], not {got}"):
            store.note_checksums(["a"], np.zeros(shape, dtype))
    with pytest.raises(errors.UnknownClientError):
        store.note_checksums(["a", "unknown"], np.zeros((2, 3), np.uint64))
    store.commit(round=0)
    assert_sound(store, a=1)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 16_383, 16_384, 16_385, 32_768])
def test_an_exchange_has_the_checksums_of_a_commit(tmp_path, n):
    """Each slot is written twice, and the second time counts."""
    rng, ones = np.random.default_rng(n), np.ones(2)
    with ClientStore(2, n, medium="mmap", path=tmp_path / "store") as store:
        for round in range(3):
            ys = rng.normal(size=(2, 2, n)).astype(np.float32)
            for some in ys:
                old, new, sums = store.rows_of([0, 1]), store.stage_all([0, 1]), store.room_for_checksums(2)
                total = np.zeros(n)
                kernels.exchange(total, [None] * 2, list(some), ones, ones, old, [None] * 2, new, out=total, sums=sums)
                store.note_checksums([0, 1], sums)
            store.commit(round)
        problems, rows = reopened(store)
        assert problems == []
        np.testing.assert_array_equal(list(rows.values()), -ys[1])


MAP = mmap.mmap


class Strict(MAP):
    """A mapping on a system with pages of ``page`` bytes."""

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
    """Pages of this size, for all calls of a store."""
    monkeypatch.setattr(Strict, "page", request.param << 10)
    monkeypatch.setattr(mmap, "mmap", Strict)
    monkeypatch.setattr(slot_file, "_PAGE", request.param << 10)
    return request.param << 10


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("n", [1, 70, 20_000, 270_000, 1_100_000], ids=str)
@pytest.mark.sample(1)
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


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_a_folder_of_the_first_version_keeps_its_version(tmp_path, page, codec):
    """It assumes pages of 4 KiB; on larger ones a chunk is mapped from the start of its first page."""
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


class File(SlotFile):
    """Records evicted slots; meanwhile another thread uses rows."""

    def __init__(self, resident):
        self.resident, self._used, self._turn = resident, {}, RLock()
        self.evicted = []
        self.meanwhile = lambda: None

    def let_go(self, slots):
        self.evicted += slots
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        in_threads(lambda _: meanwhile(), [0])


def test_the_least_recently_used_rows_are_evicted():
    file = File(3)
    file.use([1, 2, 3, 4, 1, 5])
    for _ in range(2):
        file.evict()
        assert file.evicted == [2, 3]


def test_a_thread_may_use_rows_while_another_evicts():
    file = File(2)
    file.meanwhile = lambda: [file.use([1, 6, 7, 8]), file.evict()]
    file.use([1, 2, 3, 4, 5])
    file.evict()
    assert list(file._used) == [7, 8]


OF_CHUNKS = 3_000_000  # five rows of a chunk each


@pytest.mark.parametrize("punches", [True, False])
def test_a_file_is_never_shorter_than_what_is_mapped(tmp_path, monkeypatch, punches):
    """Another thread may read there. The system may free a range of a file without shortening it."""
    with ClientStore(12, OF_CHUNKS, medium="mmap", path=tmp_path / "store", durability="none") as store:
        for client in range(12):
            write(store, client, content(OF_CHUNKS, client))
        store.commit(0)
        before = os.stat(tmp_path / "store" / "rows.slots")
        for client in range(3, 12):
            store.forget(client)
        store.commit(1)
        sizes, resize = [], disk.resize
        monkeypatch.setattr(disk, "resize", lambda fd, size: (sizes.append(size), resize(fd, size)))
        if not punches:
            monkeypatch.setattr(disk, "free", lambda *_: False)
        store.compact()
        file = store._content.rows.slots
        mapped = file._end(len(file._maps) * file._per_chunk)
        assert len(file._maps) == 1
        assert min(sizes) == (mapped if punches else file._end(3))
        after = os.stat(tmp_path / "store" / "rows.slots")
        assert after.st_blocks < before.st_blocks / 3
        assert after.st_size == mapped
        for client in range(3):
            np.testing.assert_array_equal(store.read(client), content(OF_CHUNKS, client))
        write(store, 2, content(OF_CHUNKS, 5))
        store.commit(2)
        assert store.verify() == []


LINUX_ALONE = ("posix_fallocate", "fdatasync", "posix_fadvise")
FULL_SYNC = 51  # macOS's number


@pytest.fixture
def macos(monkeypatch):
    """This system with only the calls of macOS; returns a list of the synced files."""
    for name in LINUX_ALONE:
        monkeypatch.delattr(os, name)
    for name in ("free", "exchange"):
        monkeypatch.setattr(disk, name, lambda *_: False)
    monkeypatch.setattr(disk, "start_writing", lambda fd: None)
    monkeypatch.setattr(disk.sys, "platform", "darwin")
    synced, control = [], fcntl.fcntl

    def recorded(fd, command, *rest):
        if command != FULL_SYNC:
            return control(fd, command, *rest)
        synced.append(fd)
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", recorded)
    return synced


class Mapped(mmap.mmap):
    """A mapping whose flushes are counted."""

    flushed = 0

    def flush(self, *where):
        Mapped.flushed += 1
        return super().flush(*where)


def test_rounds_on_a_store_in_files(macos, tmp_path, monkeypatch):
    monkeypatch.setattr(slot_file.mmap, "mmap", Mapped)
    Mapped.flushed = 0

    def rounds(server, count):
        for _ in range(count):
            one_round(server)

    x0 = np.linspace(-1, 1, 40_000, dtype=np.float32)
    due = Server(x0, "MIFA", 6, lr=0.1)
    rounds(due, 4)
    with Server(x0, "MIFA", 6, lr=0.1, storage=tmp_path / "run") as server:
        rounds(server, 2)
        server.broadcast(range(6))
        server.save(tmp_path / "copy")
        before = len(macos)
        rounds(server, 1)
        assert Mapped.flushed >= 3  # in each round
        assert len(macos) >= before + 2  # the rows, and the index's log or the folder
        server.save(tmp_path / "copy")
    for folder in ("run", "copy"):
        with Server.load(tmp_path / folder) as server:
            assert server.store.verify() == []
            rounds(server, 1)
            assert server.x.tobytes() == due.x.tobytes()


def test_a_range_has_its_place(macos, tmp_path):
    """No byte of the file changes, also after its end."""
    content = np.random.default_rng(0).bytes(10_000)
    with (tmp_path / "file").open("wb+") as file:
        file.write(content)
        file.truncate(3 << 20)
        file.flush()
        disk.reserve(file.fileno(), 5_000, 4 << 20)
        output = os.fstat(file.fileno())
        assert output.st_size == 5_000 + (4 << 20)
        assert output.st_blocks * 512 >= 4 << 20
        file.seek(0)
        assert file.read() == content.ljust(output.st_size, b"\0")


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EIO])
def test_a_sync_that_is_refused(macos, tmp_path, monkeypatch, code):
    """A file system may have only the weaker sync; a failing disk is an error."""

    def refused(*_):
        raise OSError(code, os.strerror(code))

    plain = []
    monkeypatch.setattr(fcntl, "fcntl", refused)
    monkeypatch.setattr(os, "fsync", plain.append)
    with (tmp_path / "file").open("wb") as file:
        if code == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                disk.sync(file.fileno())
            assert plain == []
        else:
            disk.sync(file.fileno())
            assert plain == [file.fileno()]

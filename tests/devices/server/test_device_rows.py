"""The cache of a store's rows on a device: read, staged, copied back and evicted rows."""

import threading

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server
from fedcore.arrays import core, to_host
from fedcore.errors import CorruptionError, DeviceMemoryError, RangeError, StoreError
from fedcore.store import device_store as pinning
from fedcore.store import slots as device_slots
from fedcore.store.device_store import DeviceStore
from tests.devices.server.kit import everything, run_rounds, server

n = 600
OUT_OF_MEMORY = 2


@pytest.fixture(params=["ram", "pinned", "mmap"])
def rows(request, cuda_device, tmp_path, monkeypatch):
    medium = "mmap" if request.param == "mmap" else "ram"
    if request.param == "pinned":
        monkeypatch.setattr(pinning, "LEAST", 1)
    path = {"path": tmp_path / "rows"} if medium == "mmap" else {}
    with DeviceStore(ClientStore(8, n, medium=medium, **path), "cuda:0", cached_rows=3) as made:
        yield made


def write(rows, values, round):
    for client, value in values.items():
        rows.stage_all([client])[0].copy_from(np.full(n, value, np.float32))
    rows.commit(round)


def held(rows, clients=range(8)):
    """The value in each client's row, read on the device; 0 for no row."""
    found = []
    for client in clients:
        row = to_host(rows.read(client))
        assert (row == row[0]).all()
        found.append(float(row[0]))
    return found


def in_store(rows):
    """The same, read in the store itself."""
    return [0.0 if row is None else float(row[0]) for row in ClientStore._read(rows, np.arange(8))]


def slots(rows):
    return [(i, rows._content.rows.slot_of(i)) for i in range(8)]


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_pinned_while_rows_go_through_it(refused, cuda_driver, monkeypatch):
    monkeypatch.setattr(pinning, "LEAST", 1)
    if refused:
        cuda_driver.fail("cuMemHostRegister", OUT_OF_MEMORY)
    cuda_driver.lines()
    with DeviceStore(ClientStore(8, n), "cuda:0", cached_rows=0) as rows:
        write(rows, {0: 1, 1: 2}, round=0)
        rows.compact()
        write(rows, {1: 3}, round=1)
        assert held(rows) == in_store(rows) == [1, 3, 0, 0, 0, 0, 0, 0]
    names = [call.name for call in cuda_driver.calls()]
    assert names.count("cuMemHostRegister") == (1 if refused else 2)  # once more behind the compaction
    assert names.count("cuMemHostUnregister") == (0 if refused else 2)


def test_rows_are_on_the_device_and_in_the_store(rows):
    write(rows, {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}, round=0)
    assert len(rows._cache) == 3  # those that were written last
    assert in_store(rows) == held(rows) == [1, 2, 3, 4, 5, 0, 0, 0]
    assert len(rows._cache) >= 3
    write(rows, {1: 7}, round=1)
    assert len(rows._cache) in (2, 3)
    assert in_store(rows) == held(rows) == [1, 7, 3, 4, 5, 0, 0, 0]


def test_staged_rows_count_from_the_commit_on(rows):
    write(rows, {0: 1, 1: 2}, round=0)
    for value in (8, 9):
        rows.stage_all([0])[0].copy_from(np.full(n, value, np.float32))
        rows.stage_all([1])[0].copy_from(np.full(n, value, np.float32))  # sends the other one back
    assert held(rows)[:2] == in_store(rows)[:2] == [1, 2]
    rows.unstage(1)
    rows.commit(1)
    assert held(rows)[:2] == in_store(rows)[:2] == [9, 2]
    rows.stage_all([0, 1])
    rows.discard()
    assert held(rows)[:2] == in_store(rows)[:2] == [9, 2]
    assert rows._staged == {}


def test_a_cohort_larger_than_the_bound(rows):
    write(rows, {i: i + 1 for i in range(8)}, round=0)
    old = [to_host(row) for row in rows.rows_of(range(8))]
    assert [float(row[0]) for row in old] == [1, 2, 3, 4, 5, 6, 7, 8]
    for start in (0, 4):
        for i, row in zip(range(start, start + 4), rows.stage_all(range(start, start + 4)), strict=True):
            row.copy_from(np.full(n, 10 + i, np.float32))
    assert len(rows._staged) <= 7
    rows.commit(1)
    assert len(rows._cache) == 3
    assert in_store(rows) == held(rows) == [10, 11, 12, 13, 14, 15, 16, 17]


def test_prefetched_rows_are_not_copied_again(rows, cuda_driver):
    write(rows, {i: i + 1 for i in range(8)}, round=0)
    cuda_driver.calls()
    rows.prefetch([0, 1, 2, 3])
    rows._settle()
    copied = [call for call in cuda_driver.calls() if call.name == "cuMemcpyHtoDAsync"]
    assert [call.argument("bytes") for call in copied] == [4 * n] * 4  # although only three stay between rounds
    assert [float(to_host(row)[0]) for row in rows.rows_of([0, 1, 2, 3])] == [1, 2, 3, 4]
    assert not [call for call in cuda_driver.calls() if call.name == "cuMemcpyHtoDAsync"]


def test_a_new_client_does_not_get_the_row_of_a_removed_one(rows):
    write(rows, {0: 1, 1: 2}, round=0)
    rows.forget(1)
    rows.commit(1)
    number = rows.add_all(["new"])[0]
    rows.commit(1)
    assert rows.row("new") is None
    rows.stage_all(["new"])[0].copy_from(np.full(n, 5, np.float32))
    rows.commit(2)
    assert held(rows, ["new", 0]) == [5, 1]
    assert number in rows._cache


def test_compaction_moves_rows_under_those_that_are_hot(rows):
    write(rows, {i: i + 1 for i in range(8)}, round=0)
    for i in range(5):
        rows.forget(i)
    rows.commit(1)
    rows.compact()
    assert held(rows, [5, 6, 7]) == [6, 7, 8]


def test_no_memory_for_a_prefetch_is_no_error(rows, cuda_driver, monkeypatch):
    write(rows, {i: i + 1 for i in range(4)}, round=0)
    monkeypatch.setattr(rows._slots, "take", lambda: (_ for _ in ()).throw(DeviceMemoryError("none left")))
    rows.prefetch([0, 1, 2, 3])
    monkeypatch.undo()
    assert held(rows)[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "end", [lambda rows: rows.discard(), lambda rows: rows.rollback(), lambda rows: rows.unstage(0)]
)
def test_staged_rows_are_discarded_during_a_prefetch(rows, end):
    write(rows, {i: i + 1 for i in range(8)}, round=0)
    for client in (0, 1):  # the first is on its way back when the second comes
        rows.stage_all([client])[0].copy_from(np.full(n, 9, np.float32))
    rows.prefetch(range(2, 8))
    assert rows._prefetching is not None
    end(rows)
    assert rows._prefetching is None, "the copies are one thread's"
    rows.discard()
    assert in_store(rows) == held(rows) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert_every_slot_is_known(rows)


def assert_every_slot_is_known(rows):
    taken = rows._slots.high - len(rows._slots._free)
    assert taken == len(rows._cache) + len(rows._staged) + len(rows._unsafe)


def test_an_interrupted_wait_for_the_prefetch_leaves_it_known(rows, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    write(rows, {i: i + 1 for i in range(8)}, round=0)
    rows.prefetch([0, 1, 2])
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rows.rows_of([0, 1, 2])
    assert rows._prefetching is not None
    assert [float(to_host(row)[0]) for row in rows.rows_of([0, 1, 2])] == [1, 2, 3]
    assert rows._prefetching is None
    assert_every_slot_is_known(rows)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_commit_is_retried_after_a_failed_copy(rows, cuda_driver, call, after):
    write(rows, {0: 1, 1: 2, 2: 3}, round=0)
    for client, row in enumerate(rows.stage_all(range(3))):
        row.copy_from(np.full(n, 7 + client, np.float32))
    if call != "cuMemcpyDtoHAsync" and rows._is_pinned(1):  # copies without a buffer, and so without its event
        call, after = "cuStreamSynchronize", 0
    cuda_driver.fail(call, OUT_OF_MEMORY, after)
    with pytest.raises(DeviceMemoryError):
        rows.commit(1)
    assert in_store(rows)[:3] == [1, 2, 3]
    rows.commit(1)
    assert in_store(rows)[:3] == held(rows)[:3] == [7, 8, 9]
    assert_every_slot_is_known(rows)


def test_a_cohort_is_prefetched_though_no_row_stays(cuda_driver):
    with DeviceStore(ClientStore(8, n), "cuda:0", cached_rows=0) as rows:
        write(rows, {i: i + 1 for i in range(8)}, round=0)
        assert len(rows._cache) == 0
        rows.prefetch(range(6))
        rows._settle()
        assert len(rows._cache) == 6
        cuda_driver.calls()
        assert [float(to_host(row)[0]) for row in rows.rows_of(range(3))] == [1, 2, 3]
        for client, row in enumerate(rows.stage_all(range(3))):
            row.copy_from(np.full(n, 11 + client, np.float32))
        cuda_driver.calls()
        assert [float(to_host(row)[0]) for row in rows.rows_of(range(3, 6))] == [4, 5, 6]
        assert not [call for call in cuda_driver.calls() if call.name == "cuMemcpyHtoDAsync"], (
            "the next fold's are here"
        )
        rows.commit(1)
        assert len(rows._cache) == 0
        assert in_store(rows) == held(rows) == [11, 12, 13, 4, 5, 6, 7, 8]


def test_without_device_memory_idle_rows_are_evicted(cuda_driver, monkeypatch):
    monkeypatch.setattr(device_slots, "DEVICE_CHUNK", 1)  # a row each
    with DeviceStore(ClientStore(8, n), "cuda:0") as rows:
        write(rows, {i: i + 1 for i in range(3)}, round=0)
        cuda_driver.set_limit(cuda_driver.live_bytes(0))
        write(rows, {3: 4}, round=1)
        assert set(rows._cache) == {1, 2, 3}
        assert [float(to_host(row)[0]) for row in rows.rows_of([2, 0])] == [3, 1]
        assert set(rows._cache) == {3, 2, 0}
        with pytest.raises(DeviceMemoryError):
            rows.rows_of([0, 1, 2, 3])
        assert [float(to_host(rows.row(client))[0]) for client in range(4)] == [1, 2, 3, 4]
        assert_every_slot_is_known(rows)


def test_an_undo_of_cached_staged_and_in_flight_rows(cuda_device, tmp_path):
    folder = ClientStore(8, n, medium="mmap", path=tmp_path / "rows", keep_previous=True)
    with DeviceStore(folder, "cuda:0", cached_rows=3) as rows:
        write(rows, {0: 1, 1: 2}, round=0)
        write(rows, {1: 7, 2: 8}, round=1)
        for client in (1, 2):  # the first is on its way back when the second comes
            rows.stage_all([client])[0].copy_from(np.full(n, 9, np.float32))
        rows.prefetch([0, 1, 2])
        assert rows.undo()
        assert len(rows._cache) == 1, "a rolled back row uses no memory of the device"
        assert in_store(rows) == held(rows) == [1, 2, 0, 0, 0, 0, 0, 0]
        assert_every_slot_is_known(rows)
        assert not rows.undo()
        write(rows, {1: 5}, round=1)  # the same round, in a slot that was used for it before
        assert in_store(rows) == held(rows) == [1, 5, 0, 0, 0, 0, 0, 0]
        rows.stage_all([3])[0].copy_from(np.full(n, 9, np.float32))
    with DeviceStore(ClientStore.open(tmp_path / "rows", keep_previous=True), "cuda:0") as rows:
        assert held(rows) == [1, 5, 0, 0, 0, 0, 0, 0]
        assert rows.undo()
        assert held(rows) == [1, 2, 0, 0, 0, 0, 0, 0]


def test_a_store_in_device_memory_has_no_undo(cuda_device, tmp_path):
    with pytest.raises(RangeError, match=r"^keep_previous\b"):
        ClientStore(8, n, medium="cuda", keep_previous=True)
    ClientStore(8, n, medium="mmap", path=tmp_path / "rows", keep_previous=True).close()
    with pytest.raises(RangeError, match=r"^keep_previous\b.*cuda:0"):
        ClientStore.open(tmp_path / "rows", medium="cuda:0", keep_previous=True)
    with ClientStore(8, n, medium="cuda") as rows:
        assert (rows.keep_previous, rows.previous) == (False, None)
        with pytest.raises(StoreError, match=r"^undo\b"):
            rows.undo()


def with_a_damaged_row(folder, method):
    """A folder of a server, and the client in it whose row is damaged."""
    with server(method, "mmap", "f32", "cpu", folder) as s:
        run_rounds(s, 3)
        first = s.store.clients_of(2)[0]
        slot = s._backend.store._content.rows.slot_of(first)
        geometry = s._backend.store._content.rows.slots.geometry
    with (folder / "rows.slots").open("r+b") as file:
        file.seek(geometry.begin + (slot - 1) * geometry.stride + 100)
        file.write(b"\xff")
    return first


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_a_client_whose_row_is_damaged_goes_as_on_the_cpu(cuda_device, tmp_path, method):
    found = []
    for device in ("cpu", "cuda"):
        client = with_a_damaged_row(tmp_path / device, method)
        with Server.load(tmp_path / device, compute=Compute(device=device)) as s:
            s.remove_client(client)
            without = everything(s)
            s.add_clients({client: 1})
            found.append((without, run_rounds(s, 2), everything(s)))
    assert found[0] == found[1]


def test_a_client_without_updates_has_a_zero_correction(cuda_device):
    s = server("MimiC", "cuda", "f32", "cuda")
    correction = s.correction(0)
    assert isinstance(correction, core.DeviceArray)
    assert (correction.dtype, len(correction)) == (np.float64, s.layout.n_parameters)
    assert not to_host(correction).any()


def test_a_damaged_row_is_found_when_it_is_needed(cuda_device, tmp_path):
    first = with_a_damaged_row(tmp_path / "rows", "MIFA")
    with DeviceStore(ClientStore.open(tmp_path / "rows"), "cuda:0") as damaged:
        damaged.prefetch([first])  # raises nothing yet
        with pytest.raises(CorruptionError, match="damaged"):
            damaged.rows_of([first])

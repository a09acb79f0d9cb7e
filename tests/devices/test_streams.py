"""The stream of a call, and its waits: the emulated driver runs nothing before a wait."""

import numpy as np
import pytest

from fedcore import arrays as cuda
from fedcore import kernels
from fedcore.arrays import core
from tests.devices.memory import Memory, Stream, copy
from tests.devices.tensors import LEGACY, NumbaArray, Tensor, TorchTensor
from tests.kit import in_threads


@pytest.fixture(autouse=True)
def driver(cuda_driver):
    """The driver, when nothing is left from opening the device."""
    kernels.squared_norms([core.DeviceArray(1, "float32")])
    cuda_driver.lines()
    return cuda_driver


@pytest.fixture
def torch_stream(monkeypatch):
    """Choose the stream on which torch's library works."""
    return lambda stream: monkeypatch.setattr(TorchTensor, "current", stream.number)


def values(n=5000, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def doubled(row, out):
    kernels.weighted_sum([row], [2], out)


def launches(driver):
    return [(call.kernel, call.argument("stream")) for call in driver.calls() if call.kernel]


def waits(driver):
    return [call for call in driver.calls() if call.name == "cuStreamSynchronize"]


def test_a_call_uses_the_legacy_stream_by_default(driver):
    row, out = Tensor(values()), Tensor(np.zeros(5000, np.float32))
    doubled(row, out)
    assert launches(driver) == [("sums_f32_in_f32", 0)]
    assert row.asked == out.asked == [LEGACY], "the protocol's number of the legacy stream"
    stream = Stream()
    with cuda.stream(stream.number):
        doubled(row, out)
        assert row.asked == out.asked == [LEGACY, stream.number]
        with cuda.stream(LEGACY):
            doubled(row, out)
    doubled(row, out)
    assert [number for _, number in launches(driver)] == [stream.number, 0, 0]


@pytest.mark.parametrize("attribute", ["cuda_stream", "ptr"])
def test_streams_of_torch_and_cupy_are_known_by_their_attribute(driver, attribute):
    stream = Stream()
    with cuda.stream(type("Stream", (), {attribute: stream.number})()):
        doubled(Tensor(values()), Tensor(values()))
    assert launches(driver) == [("sums_f32_in_f32", stream.number)]


def test_a_call_without_norms_does_not_wait(driver):
    row, out = core.DeviceArray(5000, "float32"), core.DeviceArray(5000, "float32")
    row.copy_from(values())
    driver.lines()
    doubled(row, out)
    kernels.direction_step(out, row, lr=0.5)
    assert not waits(driver)
    np.testing.assert_array_equal(out.to_host(), 2 * values() - np.float32(0.5) * values())


def test_the_current_stream_of_the_arrays_library_is_taken(driver, torch_stream):
    theirs = Stream()
    torch_stream(theirs)
    row, out = TorchTensor(values()), TorchTensor(np.zeros(5000, np.float32))
    driver.lines()
    doubled(row, out)
    calls = driver.calls()
    assert [call.argument("stream") for call in calls if call.kernel] == [theirs.number]
    np.testing.assert_array_equal(out.numpy(), 2 * values())


def test_the_host_does_not_wait_for_other_streams(driver, torch_stream):
    theirs, chosen = Stream(), Stream()
    torch_stream(theirs)
    row, out = TorchTensor(values()), core.DeviceArray(5000, "float32")
    driver.lines()
    with cuda.stream(chosen.number):
        doubled(row, out)
    calls = driver.calls()
    assert [call.argument("stream") for call in calls if call.kernel] == [chosen.number]
    assert theirs.number in [call.argument("stream") for call in calls if call.name == "cuEventRecord"]
    assert not [call for call in calls if call.name == "cuStreamSynchronize"]
    np.testing.assert_array_equal(out.to_host(), 2 * values())


@pytest.mark.parametrize("library", [Tensor, NumbaArray])
def test_a_call_runs_after_queued_work_of_the_library(library):
    theirs, chosen = Stream(), Stream()
    row, out = library(values(), stream=theirs.number), library(np.zeros(5000, np.float32), stream=theirs.number)
    with cuda.stream(chosen.number):
        doubled(row, out)
    np.testing.assert_array_equal(out.memory.read(chosen.number).view(np.float32), 2 * values())


def test_calls_on_different_streams_run_in_their_order():
    first, second = Stream(), Stream()
    rows = [core.DeviceArray(5000, "float32") for _ in range(3)]
    rows[0].copy_from(values())
    with cuda.stream(first.number):
        doubled(rows[0], rows[1])
    with cuda.stream(second.number):
        doubled(rows[1], rows[2])
    doubled(rows[2], rows[0])
    np.testing.assert_array_equal(rows[0].to_host(), 8 * values())


def test_tables_are_not_written_over_while_calls_wait():
    rows, outs = values(7 * 3000).reshape(7, 3000), [Tensor(np.zeros(3000, np.float32)) for _ in range(7)]
    for row, out in zip(rows, outs, strict=True):
        doubled(Tensor(row), out)
    for row, out in zip(rows, outs, strict=True):
        np.testing.assert_array_equal(out.numpy(), 2 * row)


def test_reads_of_an_export_precede_later_writes():
    theirs, shown = Stream(), core.DeviceArray(5000, "float32")
    shown.copy_from(values())
    capsule = shown.__dlpack__(stream=theirs.number)
    taken = Memory(shown.nbytes)
    copy(taken.address, shown.address, shown.nbytes, theirs.number)
    shown.fill_with_zeros()
    doubled(shown, core.DeviceArray(5000, "float32"))
    shown.copy_from(values(seed=1))
    np.testing.assert_array_equal(taken.read(theirs.number).view(np.float32), values())
    del capsule


@pytest.mark.parametrize("calls_before", [0, 2])
def test_writes_to_an_exported_array_are_seen(calls_before):
    theirs, shown, out = Stream(), core.DeviceArray(5000, "float32"), core.DeviceArray(5000, "float32")
    shown.copy_from(values())
    capsule, trained = shown.__dlpack__(stream=theirs.number), Tensor(values(seed=1), stream=theirs.number)
    for _ in range(calls_before):  # as long as they hold it they may write again
        doubled(shown, out)
    copy(shown.address, trained.memory.address, shown.nbytes, theirs.number)
    doubled(shown, out)
    np.testing.assert_array_equal(out.to_host(), 2 * values(seed=1))
    copy(shown.address, trained.memory.address, shown.nbytes, theirs.number)
    shown.copy_from(values())
    copy(shown.address, trained.memory.address, shown.nbytes, theirs.number)
    np.testing.assert_array_equal(shown.to_host(), values(seed=1))
    del capsule


def test_calls_continue_after_the_stream_of_an_export_has_ended():
    theirs, shown, out = Stream(), core.DeviceArray(5000, "float32"), core.DeviceArray(5000, "float32")
    shown.copy_from(values())
    capsule = shown.__dlpack__(stream=theirs.number)
    theirs.end()
    for turn in range(2):  # held or not, they are waited for no more
        doubled(shown, out)
        np.testing.assert_array_equal(out.to_host(), 2 * values())
        doubled(out, shown)
        np.testing.assert_array_equal(shown.to_host(), 4 * values())
        shown.fill_with_zeros()
        shown.copy_from(values())
        core.CopyStream(buffer_bytes=64).upload(values(), shown)
        if turn == 0:
            del capsule


def test_an_export_sees_earlier_calls():
    theirs, shown = Stream(), core.DeviceArray(5000, "float32")
    doubled(Tensor(values()), shown)
    capsule = shown.__dlpack__(stream=theirs.number)
    taken = Memory(shown.nbytes)
    copy(taken.address, shown.address, shown.nbytes, theirs.number)
    np.testing.assert_array_equal(taken.read(theirs.number).view(np.float32), 2 * values())
    del capsule


def test_threads_take_turns():
    streams, found = [Stream() for _ in range(4)], {}

    def work(number):
        row, out = core.DeviceArray(3000, "float32"), core.DeviceArray(3000, "float32")
        with cuda.stream(streams[number].number):
            for turn in range(5):
                row.copy_from(values(3000, seed=10 * number + turn))
                doubled(row, out)
                square = kernels.squared_norms([out])
                found[number, turn] = out.to_host(), square

    in_threads(work, range(4))
    assert len(found) == 20
    for (number, turn), (out, square) in found.items():
        due = 2 * values(3000, seed=10 * number + turn)
        np.testing.assert_array_equal(out, due)
        np.testing.assert_array_equal(square, kernels.squared_norms([due]))


def test_a_steady_call_allocates_nothing_and_waits_once(driver):
    k, n = 5, 20_000
    x, acc = core.DeviceArray(n, "float32"), core.DeviceArray(n, "float64")
    ys, rows = ([core.DeviceArray(n, "float32") for _ in range(k)] for _ in range(2))
    for array in (x, *ys, *rows):
        array.copy_from(values(n))
    acc.fill_with_zeros()

    def fold():
        return kernels.exchange(acc, [x] * k, ys, np.ones(k), np.ones(k), rows, [None] * k, rows, out=acc)

    for _ in range(3):  # tables and scratch have grown
        fold()
    before = driver.live_bytes(), driver.pinned_bytes()
    driver.lines()
    fold()
    calls = [call.name for call in driver.calls()]
    assert (driver.live_bytes(), driver.pinned_bytes()) == before
    assert not [name for name in calls if "Alloc" in name or "Free" in name or "Module" in name or "Create" in name]
    assert calls.count("cuStreamSynchronize") == 1
    assert calls.count("cuLaunchKernel") == 2, "the exchange, and the norms' sums"
    assert [name for name in calls if name.startswith("cuMemcpy")] == ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"]

"""Copies at the same time as kernels: their waits, waits for them, and errors."""

import numpy as np
import pytest

from fedcore import errors, kernels
from fedcore.arrays import core
from tests.devices.memory import Memory, Stream, copy
from tests.devices.tensors import held
from tests.kit import in_threads

n = 5000


@pytest.fixture(autouse=True)
def driver(cuda_driver):
    return cuda_driver


def zeros():
    """An array whose zeros have been written: nothing is queued."""
    array = held(np.zeros(n, np.float32))
    array.to_host()
    return array


def values(seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def read_by_another(array):
    """Let another library read an array on its own stream; return its capsule, its memory and its stream."""
    theirs, taken = Stream(), Memory(array.nbytes)
    capsule = array.__dlpack__(stream=theirs.number)
    copy(taken.address, array.address, array.nbytes, theirs.number)
    return capsule, lambda: taken.read(theirs.number).view(np.float32)


def test_a_copy_stream_goes_beside_the_kernels(driver):
    copies, values = core.CopyStream(buffer_bytes=64), np.arange(100, dtype=np.float32)  # seven buffers full
    there, out = core.DeviceArray(100, "float32"), np.zeros(100, np.float32)
    copies.upload(values, there)
    values[:] = 0  # it was read before the call returned
    copies.join()
    np.testing.assert_array_equal(there.to_host(), np.arange(100))
    copies.download(there, out)
    there.fill_with_zeros()  # behind the download
    there.to_host()
    copies.wait()
    np.testing.assert_array_equal(out, np.arange(100))
    driver.lines()
    copies.upload(values, there)
    copies.wait()
    assert not [call for call in driver.calls() if "Alloc" in call.name or call.name == "cuStreamSynchronize"]


def test_only_calls_after_join_see_an_upload():
    copies, there = core.CopyStream(buffer_bytes=4096), held(np.zeros(4, np.float32))
    copies.upload(np.ones(4, np.float32), there)
    other = Stream()
    taken = Memory(16)
    taken.write(np.zeros(4, np.float32), other.number)
    assert not there.to_host().any(), "nothing has waited for the copy yet"
    copies.join()
    np.testing.assert_array_equal(there.to_host(), 1)


def test_exports_see_a_joined_upload():
    copies, there = core.CopyStream(), zeros()
    copies.upload(values(), there)
    copies.join()
    capsule, read = read_by_another(there)
    np.testing.assert_array_equal(read(), values())
    del capsule


def test_downloads_of_other_streams_see_a_joined_upload():
    copies, others, there, out = core.CopyStream(), core.CopyStream(), zeros(), np.ones(n, np.float32)
    copies.upload(values(), there)
    copies.join()
    others.download(there, out)
    others.wait()
    np.testing.assert_array_equal(out, values())


def test_an_upload_waits_for_readers_of_its_destination():
    copies, others, there, out = core.CopyStream(), core.CopyStream(), held(values()), np.zeros(n, np.float32)
    capsule, read = read_by_another(there)
    others.download(there, out)
    copies.upload(values(1), there)
    copies.wait()
    others.wait()
    np.testing.assert_array_equal(read(), values())
    np.testing.assert_array_equal(out, values())
    del capsule


def test_a_download_waits_for_writes_to_its_source():
    copies, theirs, there, out = core.CopyStream(), Stream(), zeros(), np.ones(n, np.float32)
    capsule, written = there.__dlpack__(stream=theirs.number), Memory(there.nbytes)
    written.write(values(), theirs.number)
    copy(there.address, written.address, there.nbytes, theirs.number)
    copies.download(there, out)
    copies.wait()
    np.testing.assert_array_equal(out, values())
    del capsule


@pytest.mark.parametrize("waited", [True, False])
def test_an_array_outlives_its_copy_stream(waited):
    there, out = held(values()), np.zeros(n, np.float32)
    copies = core.CopyStream()
    copies.download(there, out)
    if waited:
        copies.wait()
    del copies
    there.fill_with_zeros()
    kernels.weighted_sum([held(values(1))], [1], there)
    np.testing.assert_array_equal(there.to_host(), values(1))
    again = core.CopyStream()
    again.upload(values(2), there)
    again.join()
    np.testing.assert_array_equal(there.to_host(), values(2))


def test_threads_take_turns_with_its_buffers():
    copies, sources = core.CopyStream(buffer_bytes=1 << 12), np.repeat(np.float32([[1], [2], [3], [4]]), 40_000, axis=1)
    arrays, outs = [core.DeviceArray(40_000, "float32") for _ in sources], np.zeros_like(sources)

    for _ in range(10):
        in_threads(copies.upload, sources, arrays)
        copies.join()
        for array, source in zip(arrays, sources, strict=True):
            np.testing.assert_array_equal(array.to_host(), source)
        outs[:] = 0
        in_threads(copies.download, arrays, outs)
        copies.wait()
        np.testing.assert_array_equal(outs, sources)


def test_other_objects_are_not_device_arrays():
    copies, there = core.CopyStream(buffer_bytes=64), zeros()
    for wrong in (None, np.zeros(n, np.float32), 3):
        with pytest.raises(TypeError, match="upload"):
            copies.upload(values(), wrong)
        with pytest.raises(TypeError, match="download"):
            copies.download(wrong, values())
    with pytest.raises(errors.ArrayError, match=r"^source\b"):
        copies.upload(None, there)
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        copies.download(there, None)
    there.writeable = False
    with pytest.raises(errors.ArrayError, match=r"^to\b"):
        copies.upload(values(), there)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_buffers_without_bytes(nbytes):
    with pytest.raises(errors.RangeError, match=r"^buffer_bytes\b"):
        core.CopyStream(buffer_bytes=nbytes)

"""Vectors in a device's memory: their parts and views, and copies to and from the host."""

import numpy as np
import pytest

from fedcore import errors
from fedcore.arrays import core
from tests.devices.tensors import PINNED, Tensor, held

DTYPES = ["float32", "float64", "float16", "uint8", "uint16", "uint64", "int8", "int64"]


@pytest.fixture(autouse=True)
def driver(cuda_driver):
    return cuda_driver


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attributes_of_an_array(dtype):
    array = core.DeviceArray(7, dtype, device=1)
    assert (array.dtype, array.size, array.ndim, array.shape, len(array)) == (np.dtype(dtype), 7, 1, (7,), 7)
    assert array.nbytes == 7 * array.dtype.itemsize
    assert array.device == 1
    assert array.__dlpack_device__() == (2, 1)
    assert array.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_to_and_from_the_host(dtype):
    values = np.arange(100).astype(dtype)
    array = held(values)
    np.testing.assert_array_equal(array.to_host(), values)
    out = np.empty(100, dtype)
    array.copy_to(out)
    np.testing.assert_array_equal(out, values)
    array.fill_with_zeros()
    np.testing.assert_array_equal(array.to_host(), 0)
    other = core.DeviceArray(100, dtype)
    other.copy_from(held(values))
    np.testing.assert_array_equal(other.to_host(), values)


def test_the_source_may_change_when_the_copy_was_called():
    values = np.ones(10, np.float32)
    pinned = Tensor(values, device_type=PINNED)
    for source, change in [(values, values), (pinned, pinned.memory.bytes())]:
        array = core.DeviceArray(10, "float32")
        array.copy_from(source)
        change[:] = 0
        np.testing.assert_array_equal(array.to_host(), 1)


def test_parts_and_views_are_the_same_memory():
    array = held(np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(array[2:5].to_host(), [2, 3, 4])
    np.testing.assert_array_equal(array[-3:].to_host(), [7, 8, 9])
    assert array[4:4].size == 0
    array[2:5].fill_with_zeros()
    np.testing.assert_array_equal(array.to_host(), [0, 1, 0, 0, 0, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(array.view("uint8").to_host(), array.to_host().view(np.uint8))
    assert array[1:3].address == array.address + 4
    with pytest.raises(errors.ArrayError, match="step"):
        array[::2]
    with pytest.raises(errors.DtypeError, match=r"^dtype\b.*12"):
        array[:3].view("float64")
    with pytest.raises(errors.DtypeError, match=r"^dtype\b"):
        core.DeviceArray(3, "int32")


def test_memory_lives_as_long_as_a_reference(driver):
    before = driver.live_bytes()
    array = core.DeviceArray(1000, "float32")
    part, capsule = array[10:20], array.__dlpack__()
    del array, part
    assert driver.live_bytes() == before + 4000
    del capsule
    assert driver.live_bytes() == before


def test_a_read_only_array_stays_so():
    array = held(np.ones(4, np.float32))
    array.writeable = False
    for change in (array.fill_with_zeros, array[1:].fill_with_zeros, lambda: array.copy_from(np.zeros(4, np.float32))):
        with pytest.raises(errors.ArrayError, match="read-only"):
            change()
    with pytest.raises(errors.ArrayError, match=r"^writeable\b"):
        array.writeable = True
    with pytest.raises(BufferError, match="read-only"):
        array.__dlpack__()
    array.__dlpack__(max_version=(1, 0))
    np.testing.assert_array_equal(array.to_host(), 1)


def test_it_is_no_array_of_the_hosts():
    array = held(np.ones(4, np.float32))
    with pytest.raises(errors.ArrayError, match="to_host"):
        np.asarray(array)
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        array.copy_to(core.DeviceArray(4, "float32"))
    with pytest.raises(errors.ShapeError, match=r"^source\b"):
        array.copy_from(np.ones(5, np.float32))
    with pytest.raises(errors.DtypeError, match=r"^source\b"):
        array.copy_from(np.ones(4))


def test_a_part_is_a_slice():
    array = held(np.arange(5, dtype=np.float32))
    for part in (0, -1, np.int64(2), [1, 2], (slice(1), 0), None, Ellipsis, array):
        with pytest.raises(errors.ArrayError, match=r"^part\b"):
            array[part]
    with pytest.raises(errors.ArrayError, match=r"^part\b"):
        next(iter(array))


def test_the_representation_of_an_array():
    assert repr(core.DeviceArray(5000, "float32")) == "float32[5000] on cuda:0"
    assert repr(core.DeviceArray(0, "int8", device=1)) == "int8[0] on cuda:1"


def test_the_arguments_of_an_export():
    array = held(np.ones(4, np.float32))
    for asked in ({"dl_device": (2, 0)}, {"copy": False}, {"dl_device": None, "copy": None}, {"stream": -1}):
        assert array.__dlpack__(**asked) is not None
    for asked, error, message in [
        ({"dl_device": (2, 1)}, errors.ArrayError, r"^dl_device\b"),
        ({"dl_device": (1, 0)}, errors.ArrayError, r"^dl_device\b"),
        ({"copy": True}, errors.ArrayError, r"^copy\b"),
        ({"stream": -7}, errors.RangeError, r"^stream\b"),
        ({"stream": 0}, errors.RangeError, r"^stream\b"),
    ]:
        with pytest.raises(error, match=message):
            array.__dlpack__(**asked)
    assert array.holders == 1, "what was refused holds nothing"

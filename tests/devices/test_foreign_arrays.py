"""Arrays of other libraries on a device: zero-copy use, and errors that name the argument."""

import numpy as np
import pytest

from fedcore import errors, kernels
from fedcore.arrays import core
from tests.devices.memory import Memory
from tests.devices.tensors import EXPORTED, MANAGED, PINNED, NumbaArray, OldTensor, Tensor, TorchTensor

pytestmark = pytest.mark.usefixtures("cuda_driver")

LIBRARIES = [Tensor, OldTensor, TorchTensor, NumbaArray]


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def summed(rows, out, weights=None):
    kernels.weighted_sum(rows, [1] * len(rows) if weights is None else weights, out)


def device_array(values):
    made = core.DeviceArray(values.size, values.dtype.name)
    made.copy_from(values)
    return made


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_every_library_go_in_and_out(library):
    values = random(3, 50)
    out = library(np.zeros(50, np.float32))
    summed([library(row) for row in values], out)
    np.testing.assert_array_equal(out.numpy(), values[0] + values[1] + values[2])
    assert not EXPORTED, "every tensor was given back"


@pytest.mark.parametrize("library", [Tensor, OldTensor, TorchTensor])
def test_libraries_and_own_arrays_meet_in_one_call(library):
    values, out = random(2, 50), core.DeviceArray(50, "float32")
    summed([library(values[0]), device_array(values[1])], out)
    np.testing.assert_array_equal(out.to_host(), values[0] + values[1])


def test_tensors_of_any_shape_and_offset():
    values = random(2, 3, 4)
    outs = [Tensor(np.zeros((2, 3, 4), np.float32), offset=32), TorchTensor(np.zeros((), np.float32))]
    models = [[Tensor(values, offset=20), Tensor(values[0, 0, 0])], [TorchTensor(values), Tensor(values[0, 0, 1])]]
    kernels.weighted_sum_segments(models, [1, 1], outs)
    np.testing.assert_array_equal(outs[0].numpy(), 2 * values)
    assert outs[1].numpy() == values[0, 0, 0] + values[0, 0, 1]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes_of_updates(dtype):
    values = random(40)
    if dtype == "bfloat16":
        held, due = (values.view(np.uint32) >> 16).astype(np.uint16), (values.view(np.uint32) & 0xFFFF0000)
        due = due.view(np.float32)
    else:
        held = values.astype(dtype)
        due = held.astype(np.float32)
    out = core.DeviceArray(40, "float32")
    summed([Tensor(held, dtype)], out)
    np.testing.assert_array_equal(out.to_host(), due)
    own = Tensor(np.zeros_like(held), dtype)
    summed([Tensor(held, dtype)], own)
    np.testing.assert_array_equal(own.numpy(), held)


def test_managed_memory_lies_on_its_device():
    row, out = Tensor(random(9), device_type=MANAGED), Tensor(np.zeros(9, np.float32), device_type=MANAGED)
    summed([row], out)
    np.testing.assert_array_equal(out.numpy(), row.numpy())


def test_pinned_memory_counts_as_the_hosts():
    row, out = Tensor(random(9), device_type=PINNED), np.zeros(9, np.float32)
    summed([row], out)
    np.testing.assert_array_equal(out, row.numpy())
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        summed([row], Tensor(out))


def test_arrays_without_elements():
    out = Tensor(np.zeros(0, np.float32))
    summed([Tensor(np.zeros(0, np.float32))], out)
    assert out.numpy().size == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_host_and_a_device_in_one_call(library):
    with pytest.raises(errors.ArrayError, match=r"^rows\[1\]"):
        summed([library(random(4)), random(4)], library(random(4)))
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        summed([random(4)], library(random(4)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_devices_in_one_call(library):
    with pytest.raises(errors.ArrayError, match=r"^rows\[1\]"):
        summed([library(random(4)), library(random(4), device=1)], library(random(4)))
    values = random(4)
    there = library(np.zeros(4, np.float32), device=1)
    summed([library(values, device=1)], there)
    np.testing.assert_array_equal(there.numpy(), values)


def test_own_arrays_on_two_devices():
    values = random(3000)
    here, there = (core.DeviceArray(3000, "float32", device) for device in (0, 1))
    for array in (here, there):
        array.copy_from(values)
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        summed([there], here)
    with pytest.raises(errors.ArrayError, match=r"^source\b"):
        there.copy_from(here)
    np.testing.assert_array_equal(kernels.squared_norms([there]), kernels.squared_norms([here]))
    with pytest.raises(errors.ArrayError, match=r"^to\b"):
        core.CopyStream(0, 4096).upload(values, there)


def test_small_arrays_stay_on_the_host():
    row, out = Tensor(random(4)), Tensor(random(4))
    with pytest.raises(errors.ArrayError, match=r"^weights\b"):
        summed([row], out, Tensor(np.ones(1, np.float32)))
    acc = Tensor(np.zeros(4))
    with pytest.raises(errors.ArrayError, match=r"^scales\b"):
        kernels.accumulate(acc, [None], [row], Tensor(np.ones(1)), np.ones(1), out=acc)


@pytest.mark.parametrize("library", [Tensor, TorchTensor, NumbaArray])
def test_a_read_only_array_is_read_and_not_written(library):
    values, out = random(4), Tensor(np.zeros(4, np.float32))
    held = library(values, read_only=True)
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        summed([out], held)
    summed([held], out)
    np.testing.assert_array_equal(out.numpy(), values)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_output_over_an_input(library):
    row = library(random(8))
    with pytest.raises(errors.ArrayError, match=r"^out\b.*rows\[0\]"):
        summed([row], row)
    array = core.DeviceArray(8, "float32")
    with pytest.raises(errors.ArrayError, match=r"^out\b.*rows\[0\]"):
        summed([array[:5]], array[3:])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        (random(4), {"strides": (2,)}, errors.ShapeError, "that is not contiguous"),
        (random(5), {}, errors.ShapeError, r"of 4 elements|float32\[4\], got float32\[5\]"),
        (np.int16([1, 2, 3, 4]), {}, errors.DtypeError, "float32.* got int16"),
        (random(4), {"offset": 2}, errors.ArrayError, "whose address is no multiple of 4"),
    ],
    ids=["strides", "length", "dtype", "address"],
)
def test_arrays_that_do_not_fit(library, values, options, error, message):
    row, out = Tensor(random(4)), library(values, **options)
    with pytest.raises(error, match="^out: .*" + f"({message})"):
        summed([row], out)
    assert not EXPORTED


def test_other_objects_are_not_arrays():
    with pytest.raises(errors.ArrayError, match=r"^out\b"):
        summed([Tensor(random(4))], object())


def test_a_failed_export():
    class Broken(Tensor):
        def __dlpack__(self, **_):
            raise BufferError("somebody trains it")

    with pytest.raises(errors.ArrayError, match=r"^rows\[0\].*somebody trains it"):
        summed([Broken(random(4))], Tensor(random(4)))


@pytest.mark.parametrize("library", [Tensor, OldTensor, TorchTensor])
def test_a_device_without_a_number(library):
    class Lost(library):
        __dlpack_c_exchange_api__ = TorchTensor.__dlpack_c_exchange_api__ if library is TorchTensor else None

        def managed(self, kind):
            made = super().managed(kind)
            made.tensor.device_id = -1
            return made

    with pytest.raises(errors.ArrayError, match=r"^rows\[0\]"):
        kernels.squared_norms([Lost(random(4))])
    assert not EXPORTED


class Described:
    """64 bytes on the device with a CUDA array interface; fields that are None are left out."""

    def __init__(self, **changes):
        self.memory = Memory(64)
        output = {"shape": (4,), "typestr": "<f4", "data": (self.memory.address, False), "version": 3} | changes
        self.__cuda_array_interface__ = {field: value for field, value in output.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shape": (-4,)}, errors.ShapeError, r"sizes that fit into memory, got \[-4\]"),
        ({"shape": (-2, -2)}, errors.ShapeError, r"sizes that fit into memory, got \[-2, -2\]"),
        ({"shape": (2**62, 4)}, errors.ShapeError, "sizes that fit into memory"),
        ({"shape": (2**61,)}, errors.ShapeError, "sizes that fit into memory"),
        ({"shape": (1,) * 65}, errors.ArrayError, "got 65 axes"),
        ({"shape": (2**64,)}, errors.ArrayError, "its interface is invalid: "),
        ({"shape": "four"}, errors.ArrayError, "its interface is invalid: "),
        ({"shape": 4}, errors.ArrayError, "its interface is invalid: "),
        ({"mask": object()}, errors.ArrayError, "expected an array without a mask, got a masked one"),
        ({"data": (0, False)}, errors.ArrayError, "its interface is invalid: "),
        ({"data": (8, False)}, errors.ArrayError, "its interface is invalid: "),
        ({"data": ()}, errors.ArrayError, "its interface is invalid: "),
        ({"data": (-1, False)}, errors.ArrayError, "its interface is invalid: "),
        ({"data": None}, errors.ArrayError, "its interface is invalid: "),
        ({"shape": None}, errors.ArrayError, "its interface is invalid: "),
        ({"typestr": None}, errors.ArrayError, "its interface is invalid: "),
        ({"typestr": "no type"}, errors.ArrayError, "its interface is invalid: "),
        ({"strides": "no strides"}, errors.ArrayError, "its interface is invalid: "),
        ({"strides": (4, 4)}, errors.ShapeError, "that is not contiguous"),
        ({"stream": "no stream"}, errors.ArrayError, "its interface is invalid: "),
    ],
)
def test_descriptions_that_cannot_be(changes, error, message):
    for rows in ([Described(**changes)], [Tensor(random(4)), Described(**changes)]):
        with pytest.raises(error, match=rf"^rows\[{len(rows) - 1}\]: .*{message}"):
            kernels.squared_norms(rows)


def test_an_interface_that_is_no_description():
    for output in (None, 3, [("shape", (4,))]):
        described = Described()
        described.__cuda_array_interface__ = output
        with pytest.raises(errors.ArrayError, match=r"^rows\[0\]"):
            kernels.squared_norms([described])


def test_a_description_that_raises():
    class Gone:
        def __iter__(self):
            raise RuntimeError("its memory is gone")

    with pytest.raises(errors.ArrayError, match=r"^rows\[0\].*its memory is gone"):
        kernels.squared_norms([Described(data=Gone())])


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_without_elements_of_every_library(library):
    assert kernels.squared_norms([library(np.zeros(0, np.float32))]) == [0]
    out = library(np.zeros(0, np.float32))
    kernels.combine([library(np.zeros(0, np.float32)), core.DeviceArray(0, "float32")], [1, 1], out)
    assert kernels.squared_norms([Described(shape=(0,), data=(0, False))]) == [0]

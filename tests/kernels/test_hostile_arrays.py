"""Objects instead of arrays are rejected by the argument's name without a write, or read correctly."""

import array as standard
import ctypes
import re
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedcore import errors, kernels
from tests.kernels.calls import CALLS
from tests.kernels.dlpack import Exporter, nothing_but

SIZES = st.one_of(st.integers(0, 70), st.sampled_from([130, 2049]))
NAMES = sorted(CALLS)
OF_EITHER_PRECISION = {"acc", "sum", "out", "terms[0]", "terms[1]"}  # or one decides which the other must be
C_TYPES = {"float32": ctypes.c_float, "float64": ctypes.c_double, "uint16": ctypes.c_uint16, "int8": ctypes.c_int8}


@st.composite
def one_argument(draw, least=0, eligible=lambda call, arrays, name: True):
    """A call, its arrays, and the name of an eligible array with at least `least` elements."""
    call = CALLS[draw(st.sampled_from(NAMES))]
    arrays = call.arrays(draw(SIZES.filter(lambda n: n >= max(least, 1))), draw(st.integers(0, 9)))
    names = [name for name in sorted(arrays) if arrays[name].size >= least and eligible(call, arrays, name)]
    assume(names)
    return call, arrays, draw(st.sampled_from(names))


NO_ARRAY = "expected an array in CPU memory( or on a CUDA device)?"  # only vectors may be on a device


def assert_refused(call, arrays, name, bad, error, message=""):
    """Assert that the call raises that error about that argument, and writes nothing."""
    before = {key: array.tobytes() for key, array in arrays.items()}
    with pytest.raises(error, match="^" + re.escape(name) + ": " + message):
        call.run(arrays | {name: bad})
    assert before == {key: array.tobytes() for key, array in arrays.items()}


WRONG_DTYPES = ["i2", "i4", "i8", "u8", "c8", "?", "g", ">f4", ">f8", ">u2", "O", "U2", "S4", "M8[s]", "f4,f4", "V4"]


@given(one_argument(), st.sampled_from(WRONG_DTYPES))
def test_other_dtypes(argument, dtype):
    call, arrays, name = argument
    assert_refused(call, arrays, name, np.zeros(arrays[name].shape, dtype), errors.DtypeError, "expected .* got ")


def of_one_precision(call, arrays, name):
    several = name.startswith(("rows", "models", "ys", "weights"))  # may come in more than one
    return arrays[name].dtype.kind == "f" and name not in OF_EITHER_PRECISION and not several


@given(one_argument(eligible=of_one_precision))
def test_the_other_precision(argument):
    call, arrays, name = argument
    dtype = arrays[name].dtype
    other = np.float64 if dtype == np.float32 else np.float32
    assert_refused(call, arrays, name, arrays[name].astype(other), errors.DtypeError, f"expected {dtype}")
    assert_refused(call, arrays, name, torch.from_numpy(arrays[name].astype(other)), errors.DtypeError)


def reordered(array):
    """The array's elements, or some of them, with other strides."""
    return {
        "every other": np.repeat(array, 2)[::2],
        "backwards": array[::-1],
        "one for all": np.broadcast_to(array[:1], array.shape),
        "a column": np.stack([array, array], axis=1)[:, 0],
        "a structure's field": np.zeros(array.shape, [("x", array.dtype), ("y", "f8")])["x"],
        "torch": torch.from_numpy(np.repeat(array, 2))[::2],
        "memoryview": memoryview(array)[::-1],
        "zero strides": Exporter(array, strides=[0]),
        "negative strides": Exporter(array, strides=[-1]),
    }


@given(one_argument(least=2), st.sampled_from(sorted(reordered(np.zeros(1, np.float32)))))
def test_other_strides(argument, how):
    call, arrays, name = argument
    assert_refused(call, arrays, name, reordered(arrays[name])[how], errors.ShapeError, ".* that is not contiguous")


@given(one_argument(least=1), st.sampled_from(["row", "column", "scalar", "torch", "Fortran", "empty row"]))
def test_other_shapes(argument, how):
    call, arrays, name = argument
    array = arrays[name]
    bad = {
        "row": array[None, :],
        "column": array[:, None],
        "scalar": array[:1].reshape(()),
        "torch": torch.from_numpy(array)[None, :],
        "Fortran": np.asfortranarray(np.stack([array, array])),
        "empty row": np.empty((0, 3), array.dtype),
    }[how]
    if name in call.any_shape:
        assume(how == "Fortran" and array.size > 1)
    assert_refused(call, arrays, name, bad, errors.ShapeError)


@given(one_argument(), st.sampled_from([-1, 1, 64]))
def test_another_length(argument, longer):
    call, arrays, name = argument
    array = arrays[name]
    assume(array.size + longer >= 0 and len(arrays) > 1)
    bad = np.resize(array, array.size + longer) if array.size else np.zeros(array.size + longer, array.dtype)
    before = {key: other.tobytes() for key, other in arrays.items()}
    with pytest.raises(
        errors.ShapeError, match=r": expected .* got "
    ):  # of this array, or of those that differ from it
        call.run(arrays | {name: bad})
    assert before == {key: other.tobytes() for key, other in arrays.items()}


@given(one_argument(least=1), st.sampled_from([object(), 7, "text", {"not": "an array"}, np.float32, iter([1.0])]))
def test_objects_that_are_no_arrays(argument, bad):
    call, arrays, name = argument
    assert_refused(call, arrays, name, bad, errors.ArrayError, NO_ARRAY + ", ")


@given(one_argument(least=1))
def test_masks_and_odd_addresses(argument):
    call, arrays, name = argument
    array = arrays[name]
    masked = np.ma.masked_array(array, np.arange(array.size) % 2 == 0)
    assert_refused(call, arrays, name, masked, errors.ArrayError, "expected an array without a mask")
    if array.itemsize > 1:
        memory = np.zeros(array.nbytes + 1, np.uint8)
        odd = memory[1 - memory.ctypes.data % 2 :][: array.nbytes].view(array.dtype)
        message = f".* whose address is no multiple of {array.itemsize}"
        for bad in (odd, memoryview(odd), nothing_but(odd)):
            assert_refused(call, arrays, name, bad, errors.ArrayError, message)


@given(one_argument(least=1, eligible=lambda call, arrays, name: name in call.outputs(arrays)))
def test_outputs_that_are_read_only(argument):
    call, arrays, name = argument
    frozen = arrays[name].copy()
    frozen.flags.writeable = False
    for bad in (frozen, frozen.view(), np.frombuffer(frozen.tobytes(), frozen.dtype), memoryview(frozen)):
        assert_refused(call, arrays, name, bad, errors.ArrayError, ".* got a read-only array")
    for flags in (1, 2, 3):  # DLPack's flags: read-only, a copy, both
        bad = Exporter(frozen, "dltensor_versioned", flags=flags)
        assert_refused(call, arrays, name, bad, errors.ArrayError, ".* got a read-only array")


HOSTILE = {
    "no axes counted": dict(ndim=-1),
    "too many axes": dict(ndim=2**31 - 1),
    "more axes than NumPy has": dict(ndim=65),
    "no sizes": dict(shape=None, ndim=1),
    "a negative size": dict(shape=[-3]),
    "a negative size behind a good one": dict(shape=[3, -1]),
    "more bytes than there are addresses": dict(shape=[2**62]),
    "sizes whose product is 0 modulo 2^64": dict(shape=[2**32, 2**32]),
    "no address": dict(data=None),
    "another device": dict(device_type=7),
    "memory of AMD": dict(device_type=10),
    "4 lanes": dict(lanes=4),
    "no lanes": dict(lanes=0),
    "no bits": dict(bits=0),
    "more bits": dict(bits=128),
    "complex numbers": dict(code=5),
    "opaque handles": dict(code=3),
    "used by somebody": dict(name="used_dltensor"),
    "used by somebody, DLPack 1": dict(name="used_dltensor_versioned"),
    "a capsule of something else": dict(name="numpy.core._multiarray_umath"),
    "DLPack 2": dict(name="dltensor_versioned", major=2),
    "DLPack 0 that says it is 1": dict(name="dltensor_versioned", major=0),
}


@settings(max_examples=200)
@given(one_argument(least=1), st.sampled_from(sorted(HOSTILE)))
def test_invalid_capsules(argument, how):
    call, arrays, name = argument
    bad = Exporter(arrays[name], **HOSTILE[how])
    assert_refused(call, arrays, name, bad, (errors.ArrayError, errors.ShapeError, errors.DtypeError))
    assert bad.asked >= 1


class Failing:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **_):
        raise self.error


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("not even its message")


@given(one_argument(least=1))
def test_exporters_that_fail(argument):
    call, arrays, name = argument
    says = NO_ARRAY + "; its export failed: "
    for error, message in [
        (RuntimeError("no"), "RuntimeError: no"),
        (TypeError("no"), "TypeError"),
        (UnspeakableError(), "Uns"),
    ]:
        assert_refused(call, arrays, name, Failing(error), errors.ArrayError, says + message)
    for tensor in (torch.zeros(arrays[name].shape, requires_grad=True), torch.zeros(arrays[name].shape, device="meta")):
        assert_refused(call, arrays, name, tensor, errors.ArrayError, says)
    assert_refused(call, arrays, name, torch.eye(3).to_sparse(), errors.ArrayError, says)
    with pytest.raises(KeyboardInterrupt):  # which is no answer to the question
        call.run(arrays | {name: Failing(KeyboardInterrupt())})


def test_a_capsule_is_not_consumed():
    """It may be used again until a consumer takes it; its memory is released once."""
    row = np.float32([3, 4])
    exporter = Exporter(row)
    for _ in range(3):
        np.testing.assert_array_equal(kernels.squared_norms([exporter, exporter]), [25, 25])
    capsule = torch.from_numpy(row).__dlpack__()
    Once = type("Once", (), {"__dlpack__": lambda self, **_: capsule})
    np.testing.assert_array_equal(kernels.squared_norms([Once()]), [25])
    torch.from_dlpack(capsule)
    with pytest.raises(errors.ArrayError, match=r"^rows\[0\]"):
        kernels.squared_norms([Once()])


def exported(array):
    """The same memory, through other exporters."""
    kinds = {
        "NumPy": array,
        "a subclass": array.view(type("Sub", (np.ndarray,), {})),
        "DLPack": nothing_but(array),
        "DLPack by hand": Exporter(array),
        "DLPack 1 by hand": Exporter(array, "dltensor_versioned", strides=[1]),
        "torch": torch.from_numpy(array),
        "memoryview": memoryview(array),
    }
    if array.size:  # ctypes has no array of nothing
        kinds["ctypes"] = (C_TYPES[array.dtype.name] * array.size).from_buffer(array)
    return kinds


@given(st.sampled_from(NAMES), SIZES, st.data())
def test_every_exporter_of_the_same_memory_gives_the_same_bits(name, n, data):
    call = CALLS[name]
    assume(n >= 1 or "replacement" not in name)
    arrays, due = call.arrays(n), call.arrays(n)
    kinds = sorted(exported(np.zeros(1, np.float32)))
    chosen = {key: exported(array) for key, array in arrays.items()}
    passed = {key: ways.get(data.draw(st.sampled_from(kinds)), arrays[key]) for key, ways in chosen.items()}
    result, due_result = call.run(passed), call.run(due)
    assert {key: array.tobytes() for key, array in arrays.items()} == {k: array.tobytes() for k, array in due.items()}
    if call.returns_more(due, due_result):
        np.testing.assert_array_equal(result, due_result)


class OfBefore:
    """Exports as DLPack 0 did, without a version."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


@given(st.sampled_from(NAMES), SIZES, st.data())
def test_read_only_inputs_of_every_exporter(name, n, data):
    call = CALLS[name]
    assume(n >= 1 or "replacement" not in name)
    arrays, due = call.arrays(n), call.arrays(n)
    inputs = [key for key in arrays if key not in call.outputs(arrays)]
    assume(inputs)
    key = data.draw(st.sampled_from(inputs))
    frozen = arrays[key].copy()
    frozen.flags.writeable = False
    exporter = data.draw(st.sampled_from([nothing_but, torch.from_numpy, memoryview, OfBefore]))
    if exporter in (torch.from_numpy, OfBefore):  # which have no way to say so
        frozen = arrays[key]
    result, due_result = call.run(arrays | {key: exporter(frozen)}), call.run(due)
    assert {k: array.tobytes() for k, array in arrays.items()} == {k: array.tobytes() for k, array in due.items()}
    if call.returns_more(due, due_result):
        np.testing.assert_array_equal(result, due_result)


def test_arrays_of_the_standard_library_and_of_files():
    row = np.arange(1, 50, dtype=np.float32)
    due = kernels.squared_norms([row])
    np.testing.assert_array_equal(kernels.squared_norms([standard.array("f", row.tolist())]), due)
    with tempfile.NamedTemporaryFile() as file:
        mapped = np.memmap(file.name, np.float32, "w+", shape=row.shape)
        kernels.weighted_sum([row], [1], out=mapped)
        np.testing.assert_array_equal(mapped, row)
        np.testing.assert_array_equal(kernels.squared_norms([mapped]), due)


@settings(max_examples=300)
@given(st.sampled_from([name for name in NAMES if CALLS[name].outputs(CALLS[name].arrays(1))]), st.data())
def test_an_output_over_another_array_is_refused(name, data):
    """By any number of bytes, from either side, except exactly over the input that it may replace."""
    call = CALLS[name]
    arrays = call.arrays(data.draw(st.sampled_from([1, 2, 5, 17, 200])))
    written = data.draw(st.sampled_from(call.outputs(arrays)))
    other = data.draw(st.sampled_from(sorted(set(arrays) - {written})))
    first, second = arrays[written], arrays[other]
    unit = max(first.itemsize, second.itemsize)
    shift = unit * data.draw(st.integers(-(second.nbytes // unit) - 1, first.nbytes // unit + 1))
    memory = np.zeros(first.nbytes + 2 * second.nbytes + 4 * unit, np.uint8)
    start = -(-second.nbytes // unit) * unit + unit  # of the output; the other lies `shift` bytes behind it
    over = memory[start : start + first.nbytes].view(first.dtype)
    under = memory[start + shift : start + shift + second.nbytes].view(second.dtype)
    over[:], under[:] = first, second
    passed = arrays | {written: over, other: under}
    overlap = -second.nbytes < shift < first.nbytes
    same = shift == 0 and first.nbytes == second.nbytes
    if not overlap or (same and call.replaces.get(written) == other):
        call.run(passed)
        return
    before = memory.tobytes()
    with pytest.raises(errors.ArrayError, match="must not overlap"):
        call.run(passed)
    assert memory.tobytes() == before


def special(array, rng):
    """Put subnormal and other numbers into an array."""
    if array.dtype.kind == "f":
        tiny = np.finfo(array.dtype).smallest_subnormal * rng.integers(1, 1000, array.size)
        array[::3] = tiny[::3]
        array[1::3] *= np.finfo(array.dtype).tiny
    return array


@pytest.mark.parametrize("n", [17, 200_003])
@pytest.mark.parametrize("name", NAMES)
def test_flush_to_zero_of_the_caller_does_not_change_bits(name, n):
    call, rng = CALLS[name], np.random.default_rng(5)
    arrays = {key: special(array, rng) for key, array in call.arrays(n).items()}
    if "scales" in arrays and arrays["scales"].dtype == np.float64:
        arrays["scales"][:] = [1e-40, 1]  # subnormal as the float32 that it is rounded to
    results = []
    for flush in (False, True):
        passed = {key: array.copy() for key, array in arrays.items()}
        torch.set_flush_denormal(flush)
        try:
            result = call.run(passed)
        finally:
            torch.set_flush_denormal(False)
        digest = [array.tobytes() for array in passed.values()]
        results.append([*digest, np.array(result).tobytes()] if call.returns_more(passed, result) else digest)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("numbers", "start", "slope"),
    [
        (dict(lr=1e-40, a=1), 0, 3e38),
        (dict(lr=1e37, a=1e-40), 1e38, 3e38),
        (dict(lr=1e37, a=0, b=1e-40), 1e38, 0),
        (dict(lr=1e37, a=0, mu=1e-40), 1e38, 0),
        (dict(lr=1e37, weight_decay=1e-40), 1e38, 0),
    ],
)
def test_flush_to_zero_of_the_caller_does_not_change_coefficients(numbers, start, slope):
    results = []
    for flush in (False, True):
        y, grad, other = (np.full(40, value, np.float32) for value in (start, slope, 3e38))
        torch.set_flush_denormal(flush)
        try:
            kernels.direction_step(y, grad, grad_prev=other, x=-y, **numbers)
        finally:
            torch.set_flush_denormal(False)
        assert (y != np.float32(start)).all()
        results.append(y.tobytes())
    assert results[0] == results[1]

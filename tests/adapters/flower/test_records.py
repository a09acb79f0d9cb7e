"""A wire reads replies in the same way whether it knows their headers or not."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedcore.adapters.flower.records import Wire, read_array
from fedcore.errors import FedcoreError

RNG = np.random.default_rng(0)
SHAPES = {"w": (7, 5), "b": (5,), "none": (0, 3), "scalar": (), "wide": (300, 1000), "steps": (1,)}


def model(fill=None):
    named = {
        name: np.full(shape, fill, np.float32) if fill else RNG.random(shape, np.float32)
        for name, shape in SHAPES.items()
    }
    return {**named, "w": np.asfortranarray(named["w"]), "steps": np.array([3], np.int64)}


def record_of(tensors):
    return ArrayRecord({name: Array(np.asarray(tensor)) for name, tensor in tensors.items()})


def same(read, record):
    assert [*read] == [*record]
    for name, tensor in read.items():
        due = read_array(name, record[name])
        assert (tensor.tobytes(), tensor.shape, tensor.dtype) == (due.tobytes(), due.shape, due.dtype)
        assert not tensor.size or not tensor.flags.writeable


def test_the_first_and_the_next_replies_are_read_in_the_same_way():
    wire = Wire.of(record_of(model()))
    for _ in range(3):
        record = record_of(model())
        same(wire.read(record), record)


def other(**changed):
    return lambda array: Array(**{**{f: getattr(array, f) for f in ("dtype", "shape", "stype", "data")}, **changed})


def spoilt(change):
    def spoil(array):
        return other(data=change(array.data))(array)

    return spoil


SPOILT = {
    "cut": spoilt(lambda data: data[:-1]),
    "longer": spoilt(lambda data: data + b"\0"),
    "no magic": spoilt(lambda data: b"\x94" + data[1:]),
    "a pickle": spoilt(lambda data: b"\x80\x04\x95" + bytes(100)),
    "objects": spoilt(lambda data: data.replace(b"'<f4'", b"'|O8'")),
    "nothing": spoilt(lambda data: b""),
    "another shape in the bytes": spoilt(lambda data: data.replace(b"(300, 1000)", b"(1000, 300)")),
    "another shape in the fields": other(shape=(1000, 300)),
    "a flat shape in the fields": other(shape=(300_000,)),
    "another dtype in the fields": other(dtype="float64"),
    "another serialisation": other(stype="pickle"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_wire_that_knows_the_headers_raises_the_same_error(name):
    record = record_of(model())
    wire = Wire.of(record)
    wire.read(record)
    bad = record_of(model())
    bad["wide"] = SPOILT[name](bad["wide"])
    errors = []
    for reader in (wire, Wire.of(record)):
        with pytest.raises(FedcoreError, match=r"^wide\b") as rejected:
            reader.read(bad)
        errors.append((type(rejected.value), str(rejected.value)))
    assert errors[0] == errors[1]
    good = record_of(model())
    same(wire.read(good), good)


def test_a_header_of_another_form_is_read_and_stored():
    """With more spaces, as from another version of NumPy."""
    record, odd = record_of(model()), record_of(model())
    wire = Wire.of(record)
    data = odd["wide"].data
    longer = data[:8] + (int.from_bytes(data[8:10], "little") + 64).to_bytes(2, "little")
    odd["wide"] = other(data=longer + data[10:127] + b" " * 64 + data[127:])(odd["wide"])
    for one in (record, odd, odd, record):
        same(wire.read(one), one)

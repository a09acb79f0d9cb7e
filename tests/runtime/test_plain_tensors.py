"""Reads of plain tensors and known headers match the oracle for any input."""

import numpy as np
import pytest

from fedcore.adapters import npy
from fedcore.arrays import core
from fedcore.errors import ArrayError, ShapeError
from tests import oracle

RNG = np.random.default_rng(0)
F32 = np.dtype(np.float32)
PLAIN = RNG.random((3, 4), np.float32)
DATA, HEAD = npy.write(PLAIN), npy.head(PLAIN)


class Below(np.ndarray):
    """An array of a derived class, which may interpret its elements differently."""


TENSORS = {
    "one axis": np.ones(12, np.float32),
    "two axes": PLAIN,
    "no axis": np.array(1, np.float32),
    "nothing": np.empty((0, 4), np.float32),
    "a view": PLAIN[:2],
    "of bytes": np.frombuffer(bytes(48), np.float32).reshape(3, 4),
    "read-only": npy.read(DATA),
    "Fortran order": np.asfortranarray(PLAIN),
    "strided": RNG.random((3, 8), np.float32)[:, ::2],
    "float64": PLAIN.astype(np.float64),
    "another byte order": PLAIN.astype(">f4"),
    "int32": PLAIN.view(np.int32),
    "bool": PLAIN > 0.5,
    "text": np.full((3, 4), b"ab"),
    "an odd address": np.zeros(4 * 12 + 1, np.uint8)[1:].view(np.float32).reshape(3, 4),
    "a class below": PLAIN.view(Below),
    "masked": np.ma.masked_array(PLAIN, mask=False),
    "a list": [1.0, 2.0],
    "None": None,
}


def same(one, other):
    if other is None:
        return one is None
    return all(
        (a.tobytes(), a.shape, a.dtype, a.ctypes.data, a.flags.writeable)
        == (b.tobytes(), b.shape, b.dtype, b.ctypes.data, b.flags.writeable)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", TENSORS)
def test_plain_tensors_match_the_oracle(name):
    tensor = TENSORS[name]
    for shape in (np.shape(tensor), (3, 4), (4, 3), (12,), (), (-1, 4), (2**70,), ("a",), None):
        for dtype in (F32, np.dtype(np.int32), np.dtype(np.float64), np.dtype(bool), np.dtype("S4"), "float32", None):
            arguments = [PLAIN, tensor], [PLAIN.shape, shape], [F32, dtype]
            assert same(core.read_plain_tensors(*arguments), oracle.read_plain_tensors(*arguments)), (shape, dtype)


def test_vectors_share_and_own_the_tensors_memory():
    tensor = RNG.random((5, 2), np.float32)
    [vector] = core.read_plain_tensors([tensor], [(5, 2)], [F32])
    vector[3] = 7
    assert tensor[1, 1] == 7
    due = tensor.copy()
    del tensor
    assert vector.tobytes() == due.tobytes()


@pytest.mark.parametrize(
    ("arrays", "due"),
    [
        ([], True),
        ([np.frombuffer(bytes(8), np.float32)], True),
        ([np.frombuffer(memoryview(bytes(8))[4:], np.float32)], True),
        ([npy.read(DATA).reshape(-1)[2:]], True),
        ([npy.read(DATA).view(Below)], True),
        ([b"bytes themselves", memoryview(b"or a view")], True),
        ([npy.read(DATA), PLAIN], False),
        ([np.frombuffer(bytearray(8), np.float32)], False),
        ([np.frombuffer(memoryview(bytearray(8)), np.float32)], False),
        ([PLAIN.view(Below)], False),
        ([None], False),
        ([3], False),
    ],
)
def test_only_arrays_in_bytes_are_immutable(arrays, due):
    assert core.are_immutable(arrays) is due
    assert oracle.are_immutable(arrays) is due


class MoreThanBytes(bytes):
    """A class derived from bytes may report another length."""

    def __len__(self):
        return 2**40


HOSTILE = {
    "itself": (DATA, HEAD, (3, 4)),
    "another payload": (HEAD + bytes(48), HEAD, (3, 4)),
    "a byte less": (DATA[:-1], HEAD, (3, 4)),
    "a byte more": (DATA + b"\0", HEAD, (3, 4)),
    "the head alone": (HEAD, HEAD, (3, 4)),
    "less than the head": (HEAD[:-1], HEAD, (3, 4)),
    "nothing": (b"", HEAD, (3, 4)),
    "another head": (npy.write(PLAIN.reshape(4, 3)), HEAD, (3, 4)),
    "a head that is one bit off": (bytes([DATA[0] ^ 1]) + DATA[1:], HEAD, (3, 4)),
    "float64": (npy.write(PLAIN.astype(np.float64)), HEAD, (3, 4)),
    "a bytearray": (bytearray(DATA), HEAD, (3, 4)),
    "a memoryview": (memoryview(DATA), HEAD, (3, 4)),
    "a class below bytes": (MoreThanBytes(DATA), HEAD, (3, 4)),
    "no bytes": (None, HEAD, (3, 4)),
    "no head": (DATA, None, (3, 4)),
    "another shape": (DATA, HEAD, (4, 3)),
    "a shape of more": (DATA, HEAD, (3, 5)),
    "a negative shape": (DATA, HEAD, (-3, -4)),
    "a shape past 64 bits": (DATA, HEAD, (2**62, 4)),
    "a shape past 128 bits": (DATA, HEAD, (2**127, 4)),
    "a shape that wraps to its size": (DATA, HEAD, (2**32, 2**32, 12)),
    "a shape of nothing": (HEAD, HEAD, (0, 4)),
    "a shape of truth values": (DATA, HEAD, (True, 12)),
    "a list for a shape": (DATA, HEAD, [3, 4]),
    "no shape": (DATA, HEAD, None),
    "no head at all": (PLAIN.tobytes(), b"", (3, 4)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_known_headers_match_the_oracle(name):
    data, head, shape = HOSTILE[name]
    arguments = [DATA, data], [HEAD, head], [(3, 4), shape]
    read = npy.read_known(*arguments)
    assert same(read, oracle.read_npy(*arguments))
    assert (read is None) == (name not in ("itself", "another payload", "another shape", "no head at all"))
    for view, whole in zip(read or (), arguments[0], strict=False):
        assert view.base is whole
        assert not view.flags.writeable


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ShapeError, match="shapes: expected 2 entries, got 1"):
        core.read_plain_tensors([PLAIN, PLAIN], [(3, 4)], [F32, F32])
    with pytest.raises(ShapeError, match="heads: expected 1 entries, got 0"):
        core.read_npy([DATA], [], [(3, 4)])
    with pytest.raises(ArrayError, match="arrays: expected a list or tuple, got int"):
        core.are_immutable(3)

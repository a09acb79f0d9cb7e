import sys

import numpy as np
import pytest

from fedcore import reference
from fedcore.adapters import npy
from fedcore.errors import ArrayError
from fedcore.native import core

native_only = pytest.mark.skipif(core is reference, reason="the twin makes new bytes, and does without checks")


@pytest.mark.parametrize(
    "sizes", [[], [(0, 0)], [(3, 0), (0, 5)], [(7, 1), (64, 3 << 20), (1, (256 << 10) + 1)], [(61, 17 << 20), (9, 70)]]
)
def test_joined_bytes_are_those_of_the_twin(sizes):
    random = np.random.default_rng(0)
    heads, payloads = [], []
    for head, payload in sizes:
        heads.append(random.bytes(head))
        payloads.append(random.integers(0, 256, payload, np.uint8))
    made = core.joined_bytes(heads, payloads, [])
    assert (
        made
        == reference.joined_bytes(heads, payloads, [])
        == [h + p.tobytes() for h, p in zip(heads, payloads, strict=True)]
    )
    assert all(type(one) is bytes for one in made)


@native_only
def test_what_has_no_bytes_is_refused():
    with pytest.raises(ArrayError, match="payloads"):
        core.joined_bytes([b""], [3], [])


def fresh(k=3, fill=1):
    return core.joined_bytes([b"head"] * k, [np.full(100, fill, np.uint8)] * k, [])


@native_only
def test_memory_that_nobody_else_has_is_written_again():
    spare = fresh()
    hash(spare[0])
    where = [id(one) for one in spare]
    made = core.joined_bytes([b"HEAD"] * 3, [np.full(100, 2, np.uint8)] * 3, spare)
    assert made == [b"HEAD" + b"\x02" * 100] * 3
    assert [id(one) for one in made] == where
    assert {made[0]: 1} == {b"HEAD" + b"\x02" * 100: 1}, "the hash is not that of what was there"
    assert all(sys.getrefcount(one) == 3 for one in made), "the list's, the loop's and the call's"


@pytest.mark.parametrize(
    "hold",
    [lambda one: one, memoryview, lambda one: np.frombuffer(one, np.uint8), lambda one: {one}, lambda one: (one,)],
)
def test_bytes_that_somebody_has_stay_as_they_are(hold):
    spare = fresh()
    held = hold(spare[1])
    before = b"head" + b"\x01" * 100
    made = core.joined_bytes([b"HEAD"] * 3, [np.full(100, 2, np.uint8)] * 3, spare)
    assert made == [b"HEAD" + b"\x02" * 100] * 3
    value = next(iter(held)) if isinstance(held, set | tuple) else held
    assert bytes(value) == before


def test_spare_bytes_of_another_length_or_kind_are_of_no_use():
    for spare in ([b"short"], [None, 3, "text"], [bytearray(104)] * 3, [b"", b"a"], fresh(k=5)):
        made = core.joined_bytes([b"HEAD"] * 3, [np.full(100, 2, np.uint8)] * 3, spare)
        assert made == [b"HEAD" + b"\x02" * 100] * 3
        assert all(one is None for one in spare[:3])


def test_an_array_is_written_from_the_bytes_that_it_lies_in():
    [data] = npy.write_all([npy.head(np.ones(50, np.float32))], [np.arange(50, dtype=np.float32)])
    array, spare = npy.read(data), [data]
    del data
    [again] = npy.write_all([npy.head(array)], [array], spare)
    assert npy.read(again).tolist() == array.tolist() == list(range(50))

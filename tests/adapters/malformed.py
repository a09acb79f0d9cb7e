"""Malformed messages: a valid one with parts deleted, replaced, renamed or doubled, at every level.

No replacement is a valid number of steps or examples, or a tensor of the model's shapes. A message that is accepted all
the same has the values of the valid one, since the server does not use the changed part.
"""

import random

import numpy as np


class UnreadableError(Exception):
    """The error of objects that cannot be read."""


def _raise(*args, **kwargs):
    raise UnreadableError


DUNDERS = """len iter next contains getitem setitem eq ne lt le gt ge hash bool int float index complex repr str format
bytes call add radd sub mul rmul truediv neg abs array array_interface array_struct dlpack dlpack_device length_hint
copy deepcopy reduce_ex"""
RAISING = {f"__{name}__": _raise for name in DUNDERS.split()}
READ = {
    name: property(_raise) for name in ("shape", "dtype", "nbytes", "flags", "ndim", "size", "data", "name", "weight")
}
CALLED = dict.fromkeys(["items", "keys", "values", "get", "detach", "cpu", "numpy", "is_contiguous", "float"], _raise)
Hostile = type("Hostile", (), {**RAISING, **READ, **CALLED})
"""Every access raises an error."""

HostileDict = type("HostileDict", (dict,), {**RAISING, **CALLED})
HostileList = type("HostileList", (list,), RAISING)
HostileText = type("HostileText", (str,), RAISING)
HostileNumber = type("HostileNumber", (int,), RAISING)


class LyingNumber(int):
    """An integer below 1 that compares as inside every range."""

    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True


class LyingArray(np.ndarray):
    """An array of five elements whose shape equals every shape."""

    shape = property(lambda self: AnyShape())
    flags = property(lambda self: np.zeros(2).flags)


class AnyShape(tuple):
    """A shape that is equal to every other."""

    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = tuple.__hash__


class LyingExport:
    """An export of float32[6] that returns a shorter array each time."""

    dtype, shape, ndim, nbytes = np.dtype("float32"), (6,), 1, 24

    def __init__(self):
        self.size = 6

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        self.size -= 1
        return np.zeros(self.size, np.float32).__dlpack__()


class NearKey(str):
    """A name that collides with another and cannot be compared."""

    __hash__ = str.__hash__
    __eq__ = _raise


def _nested(depth=900):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def _released():
    view = memoryview(bytes(24))
    view.release()
    return view


PLAIN = [
    *(lambda value=value: value for value in (None, True, False, 0, -1, 10**30, -(2**63), 1.5, 0.0, float("nan"))),
    *(lambda value=value: value for value in (float("inf"), 1j, "", "text", "5", "\ud800", "x" * 10**4, b"", b"bytes")),
    *(lambda value=value: value for value in ((), (1, 2), range(4), frozenset({1}))),
    lambda: [],
    lambda: [None],
    lambda: {},
    lambda: {"a": {"b": []}},
    lambda: bytearray(b"bytes"),
    _nested,
]
"""Values that a message may carry, and similar ones."""

ARRAYS = [
    lambda: np.zeros(0, np.float32),
    lambda: np.zeros((1, 1, 1, 7), np.float32),
    lambda: np.zeros(6, np.complex64),
    lambda: np.full(6, None),
    lambda: np.array(["text"] * 6),
    lambda: np.zeros(6, "M8[s]"),
    lambda: np.zeros(6, [("a", "f4")]),
    lambda: np.float32(1),
    lambda: np.int64(0),
    lambda: np.ma.array(np.zeros(6, np.float32), mask=True),
    lambda: np.broadcast_to(np.float32(0), (10**6, 10**6)),
]
OBJECTS = [
    object,
    Hostile,
    UnreadableError,
    lambda: Hostile,
    lambda: HostileDict(a=1),
    lambda: HostileList([1]),
    lambda: HostileText("5"),
    lambda: HostileNumber(5),
    lambda: LyingNumber(-5),
    lambda: np.zeros(5, np.float32).view(LyingArray),
    LyingExport,
    _released,
    lambda: (item for item in [1]),
    lambda: lambda: None,
]
"""Objects that lie about themselves, or raise errors when they are read."""

ODD = [*PLAIN, *ARRAYS, *OBJECTS]
NAMES = [None, 7, "", "\ud800", ("a",), b"w", "x" * 1000]


def malformed(valid, count, seed=0, odd=ODD):
    """Yield ``count`` messages made of ``valid``, of dictionaries and lists, by one to three changes each."""
    rng = random.Random(seed)
    for _ in range(count):
        message = valid
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            message = _changed(message, rng, odd)
        yield message


def _changed(part, rng, odd):
    """A copy of a part in which one thing at some level is another; leaves are shared with the original."""
    if type(part) not in (dict, list) or not part or rng.random() < 0.1:
        return rng.choice(odd)()
    copy = dict(part) if type(part) is dict else list(part)
    key = rng.choice([*copy]) if type(part) is dict else rng.randrange(len(copy))
    act = rng.random()
    if act < 0.1:
        del copy[key]
    elif act < 0.2 and type(part) is dict:
        copy[rng.choice([*NAMES, NearKey(key) if isinstance(key, str) else 8])] = copy.pop(key)
    elif act < 0.3:
        other = rng.choice([*copy.values()] if type(part) is dict else copy)
        copy[key] = [other, copy[key]]
    else:
        copy[key] = _changed(copy[key], rng, odd)
    return copy


def assert_only_the_valid_count(report, honest, liars):
    """Each client is accepted, or rejected with a short reason: all honest ones are accepted, and few of the liars."""
    rejected = [client for client, _ in report.rejected]
    assert set(honest) <= set(report.accepted)
    assert not set(honest) & set(rejected)
    assert set(report.accepted) | set(rejected) == {*honest, *liars}
    assert len(rejected) == len(set(rejected)) >= 0.6 * len(liars)
    assert all(type(reason) is str and reason and len(reason) <= 500 for _, reason in report.rejected)

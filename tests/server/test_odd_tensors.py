"""Tensors without plain memory, and hostile objects, are rejected like other invalid updates."""

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch

from fedcore import Server, Update, algorithms
from tests.kit import one_by_one

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
n = 5


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.zeros(n)])


class Array:
    """An object that claims to be float32[n], and calls ``export`` when it is read."""

    dtype, shape, ndim, nbytes = np.dtype(np.float32), (n,), 1, -(10**400)

    def __init__(self, export, **claims):
        self.export = export
        vars(self).update(claims)

    def __len__(self):
        return n

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        return self.export()


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError


class WordyError(Exception):
    def __str__(self):
        return "x" * 10**6 + "\ud800"


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def claiming(array, **claims):
    """An array of a class with false properties."""
    properties = {name: property(lambda _, value=value: value) for name, value in claims.items()}
    return array.view(type("Claiming", (np.ndarray,), properties))


def released():
    view = memoryview(bytes(4 * n))
    view.release()
    return view


def bfloat16_with(export):
    tensor = torch.zeros(n, dtype=torch.bfloat16)
    tensor.__dlpack__ = tensor.detach = export
    return tensor


ones, three = np.ones(n, np.float32), np.zeros(3, np.float32)
shape = dict(shape=(n,), size=n, nbytes=4 * n)
RAISED = [KeyError("w"), AttributeError("w"), OSError("w"), StopIteration(), MemoryError(), ZeroDivisionError("w")]
HOSTILE = {
    **{f"raises {type(error).__name__}": lambda error=error: Array(raising(error)) for error in RAISED},
    "raises what cannot be printed": lambda: Array(raising(UnprintableError())),
    "raises a long text": lambda: Array(raising(WordyError())),
    "detach raises": lambda: Array(raising(OSError("w")), detach=raising(OSError("w"))),
    "another dtype in memory": lambda: Array(np.zeros(n, np.int32).__dlpack__),
    "another length in memory": lambda: Array(three.__dlpack__),
    "bfloat16 that raises": lambda: Array(raising(OSError("w")), dtype="bfloat16"),
    "bfloat16 of another length": lambda: Array(torch.zeros(3, dtype=torch.bfloat16).__dlpack__, dtype="bfloat16"),
    "released memory": released,
    "a shape that lies": lambda: claiming(three, **shape),
    "a dtype that lies": lambda: claiming(np.zeros(n, np.uint8), dtype=np.dtype(np.float32)),
    "flags that lie": lambda: claiming(np.zeros(2 * n, np.float32)[::2], flags=ones.flags),
    "a shape of more that lies": lambda: claiming(np.zeros(4 * n, np.float32), **shape, flags=ones.flags),
    "a class": lambda: np.ndarray,
    "sparse": lambda: torch.zeros(n).to_sparse(),
    "sparse rows": lambda: torch.zeros(n, 1).to_sparse_csr(),
    "nested": nested,
}


TWO_VECTORS = algorithms.named("SCAFFOLD", control="sent")


def assert_refused_alone(method, **sent):
    """The update is rejected with a short reason for every delivery; the others have the bits without it."""
    control = {"control": ones} if method is TWO_VECTORS else {}
    good = [Update(client, ones * client, 5, **control) for client in range(3)]
    bad = Update(3, **({"value": ones, "steps": 5, **control} | sent))
    made = lambda: Server(np.zeros(n, np.float32), method, clients=4, lr=0.1)  # noqa: E731
    straight = made()
    straight.round(good)
    for way in ("add", "keep", "round", "one by one"):
        server = made()
        updates = [good[0], bad._replace(keep=way == "keep"), *good[1:]]
        run = one_by_one if way in ("add", "keep") else Server.round
        report = run(server, iter(updates) if way == "one by one" else updates)
        assert report.accepted == (0, 1, 2)
        [(client, why)] = report.rejected
        assert (client, len(why) <= 500) == (3, True)
        why.encode()
        assert report.bytes >= 0
        assert server.x.tobytes() == straight.x.tobytes()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_array_is_rejected(what):
    for kind in ("model", "delta", "gradient"):
        assert_refused_alone("FedAvg", value=HOSTILE[what](), kind=kind)
    assert_refused_alone(TWO_VECTORS, control=HOSTILE[what]())
    assert_refused_alone("MIFA", value=HOSTILE[what]())


class Changing(UserDict):
    """Has other tensors each time it is read."""

    def __getitem__(self, name):
        self.data = {name: HOSTILE["another length in memory"]()}
        return ones


class Raising(UserDict):
    items = keys = __getitem__ = raising(OSError("w"))


BY_NAME = [name for name in HOSTILE if name != "flags that lie"]  # not used: named tensors are copied


@pytest.mark.parametrize("what", [*BY_NAME, "masked", "a mapping that changes", "a mapping that raises"])
def test_a_hostile_array_in_a_mapping_is_rejected(what):
    server = Server({"a": np.zeros(n, np.float32), "seen": np.zeros((), np.int64)}, "MIFA", clients=2, lr=0.1)
    seen = np.ones((), np.int64)
    if what == "a mapping that raises":
        models = [Raising()]
    elif what == "a mapping that changes":
        models = [Changing({"a": ones, "seen": seen})]
    else:
        odd = np.ma.masked_equal(ones * 2, 2) if what == "masked" else HOSTILE[what]()
        models = [{"a": odd, "seen": seen}, {"a": ones, "seen": odd}]
    for model in models:
        report = server.round([Update(0, model, 1), Update(1, {"a": ones, "seen": seen}, 1)])
        assert report.accepted == (1,)
        assert len(report.rejected[0][1]) <= 500


def anything(base):
    """A subclass of a number with false comparisons and conversions."""
    names = ("__le__", "__ge__", "__lt__", "__gt__", "__eq__")
    lies = {name: lambda *_: True for name in names} | {"__hash__": base.__hash__, "__float__": lambda _: -1.0}
    return type("Anything", (base,), lies)


class Index:
    def __index__(self):
        raise MemoryError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, anything(int)(-5)) for name in ("steps", "examples", "round")),
        *((name, anything(np.int64)(-5)) for name in ("steps", "examples", "round")),
        ("round", anything(int)(5)),
        *(("lr", anything(base)(-5)) for base in (int, float, np.float32, np.float64)),
        *((name, Index()) for name in ("steps", "examples", "lr", "round")),
    ],
)
def test_a_hostile_number_is_rejected(name, value):
    assert_refused_alone("FedAvg", **{name: value})


def test_a_named_tensor_need_not_be_contiguous():
    server = Server({"a": np.zeros(n, np.float32)}, "MIFA", clients=1, lr=0.1)
    server.round([Update(0, {"a": np.arange(2 * n, dtype=np.float32)[::2]}, 1)])
    np.testing.assert_array_equal(server.x, np.arange(0, 2 * n, 2))


def test_a_copy_of_a_view_has_only_the_bytes_of_the_view():
    flat, counts = torch.zeros(2 * n, dtype=torch.bfloat16), torch.arange(100)
    x0 = {"v": np.zeros(n, np.float32), "w": np.zeros(n, np.float32), "n": np.array(0)}
    with Server(x0, "FedAvg", 2, lr=0.1, aggregation="median").open_round() as round:
        round.add(0, {"v": flat[:n], "w": flat[n:], "n": counts[1]}, steps=1)
        (incoming := round.begin(1, steps=1)).write("n", counts[1])
        held = [*round._held[0].vectors[0], incoming._outside["n"]]
        assert [one.untyped_storage().nbytes() for one in held] == [2 * n, 2 * n, 8]


def test_arrays_of_honest_subclasses_are_accepted():
    server = Server(np.zeros(n, np.float32), "FedAvg", clients=5, lr=0.1)
    exported = Array(ones.__dlpack__)
    bfloat16 = Array(torch.ones(n, dtype=torch.bfloat16).__dlpack__, dtype="bfloat16")
    models = [claiming(ones), exported, bfloat16, torch.nn.Parameter(torch.ones(n)), bfloat16_with(raising(OSError()))]
    models[-1] += 1
    report = server.round([Update(client, model, anything(int)(2), keep=True) for client, model in enumerate(models)])
    assert report.accepted == (0, 1, 2, 3, 4)
    np.testing.assert_array_equal(server.x, ones)

"""Direct calls of ``fedcore._core`` with any arguments raise errors and never crash."""

import subprocess
import sys

import numpy as np
import pytest

from fedcore import Update, _core, errors, sampling
from tests.kit import python

KEY = (1, 2, 3, 4)
ROW = np.ones(4, np.float32)
INDEX = _core.ClientIndex(bytes(16), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.checksum(b"abc", 0), r"^block_bytes\b"),
        (lambda: _core.checksum(b"", -5), r"^block_bytes\b"),
        (lambda: _core.permutation(0, 0, 0, KEY), r"^population\b"),
        (lambda: _core.permutation(-3, 0, 0, KEY), r"^population\b"),
        (lambda: _core.permutation(5, -1, 2, KEY), r"^start\b"),
        (lambda: _core.permutation(5, 3, 3, KEY), r"^count\b"),
        (lambda: _core.permutation(5, 0, -1, KEY), r"^count\b"),
        (lambda: _core.without_replacement(0, 0, KEY), r"^population\b"),
        (lambda: _core.without_replacement(4, 5, KEY), r"^k\b"),
        (lambda: _core.without_replacement(4, -1, KEY), r"^k\b"),
        (lambda: _core.with_replacement(np.ones(3), -1, KEY), r"^k\b"),
        (lambda: _core.weighted_without_replacement(np.ones(3), -1, KEY), r"^k\b"),
        (lambda: _core.bernoulli(-1, 0.5, KEY), r"^population\b"),
        (lambda: _core.random_words(KEY, (0, 0, 0), 0, -1), r"^blocks\b"),
        (lambda: _core.random_words(KEY, (0, 0, 0), 0, 2**62), r"^blocks\b"),
        (lambda: _core.set_threads(-5), r"^count\b"),
        (lambda: _core.set_threads(0), r"^count\b"),
        (lambda: _core.set_threads(4097), r"^count\b"),
        (lambda: _core.ClientIndex(bytes(16), -1), r"^count\b"),
        (lambda: _core.ClientIndex(bytes(16), 2**62 + 1), r"^count\b"),
        (lambda: _core.ClientIndex(b"short", 1), r"^key\b"),
        (lambda: _core.permutation(5, 0, 5, (1, 2, 3, None)), r"^key\[3\]"),
    ],
)
def test_numbers_out_of_range(call, message):
    before = _core.threads()
    with pytest.raises(errors.RangeError, match=message):
        call()
    assert _core.threads() == before


@pytest.mark.parametrize("key", [(), (1, 2, 3), (1, 2, 3, 4, 5)])
def test_keys_of_another_length(key):
    with pytest.raises(errors.ShapeError, match=r"^key\b"):
        _core.permutation(5, 0, 5, key)


def test_a_key_is_a_list_or_a_tuple_of_ints():
    class Liar:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return 1

    with pytest.raises(errors.ArrayError, match=r"^key\b"):
        _core.permutation(5, 0, 5, Liar())
    for word in (-1, 2**64):
        with pytest.raises(OverflowError):
            _core.permutation(5, 0, 5, (1, 2, 3, word))


def plain_updates(type):
    limits = 0.1, 10.0, 10.0, False, 10.0, 0, 0, 0, False, True, True
    return _core.PlainUpdates(type, INDEX, 4, limits, [], [], 0, False, lambda y: False)


def test_objects_that_are_no_update_types():
    for named, items in ((int, [5]), (object, [object()]), (str, ["text"]), (7, [Update(0, ROW, 1)])):
        with pytest.raises(errors.ArrayError, match=r"^type\b"):
            plain_updates(named).add(items, set(), set(), -1, 0)
    assert plain_updates(tuple).add([("too", "short")], set(), set(), -1, 0) is None


def test_numbers_of_clients_below_zero():
    assert _core.ClientIndex(bytes(16), 3).ids(-(2**63), 2**63 - 1) == [0, 1, 2]


@pytest.mark.parametrize("population", [2**62, 2**63 - 1])
@pytest.mark.parametrize(
    "draw",
    [
        lambda population: sampling.bernoulli(population, 0.0, seed=1, round=1),
        lambda population: sampling.without_replacement(population, population, seed=1, round=1),
        lambda population: sampling.permutation(population, seed=1, round=1),
        lambda population: sampling.with_replacement([1.0, 2.0], population, seed=1, round=1),
    ],
)
def test_draws_larger_than_memory(draw, population):
    with pytest.raises(MemoryError):
        draw(population)


FUZZ = """
import random, re, resource, sys, warnings
import numpy as np
from fedcore import _core, Update, kernels
from fedcore.errors import DeviceError
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
rng = random.Random(int(sys.argv[1]))
row, rows = np.ones(7, np.float32), np.ones((9, 7), np.float32)
values = {
    "int": [-(2**63), -1, 0, 1, 2, 3, 7, 64, 65, 1000, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 2**64],
    "float": [0, -1.0, 0.5, 1e-310, 1e308, float("nan"), float("inf")],
    "bool": [False, True],
    "str": ["bf16", "f16", "int8", "f32", "text", "\\ud800"],
    "bytes": [b"", bytes(3), bytes(16)],
    "lists": [
        (), [], [1], (1, 2, 3, 4), [0, 0, 0], [None], [None, None], [row, row.copy()], [rows[0], rows[1]], [rows[2]],
        [[row], [row.copy()]], [[rows[3]], [rows[4]]], ["a", "b"], [Update(0, row, 1)], [bytes(3)], [2**64 - 1, "c"],
        [kernels.Codes("int8", np.int8([1] * 7), np.ones(1, "f"))], [("int8", row, row)], [rows[5], None], [row[:0]],
    ],
    "object": [
        None, 7, 0.5, "text", b"", bytes(100), bytearray(9), {}, object(), int, tuple, Update, lambda *_: None,
        row, row[::2], row.astype("f8"), np.zeros(7), np.zeros((2, 3), "f"), np.zeros(0, "f"), np.ones(2, "f"),
        np.int64([0, 7]), np.int64([0, 1, 1]), np.int64([0, 2]), np.int64([0]), np.uint64([1, 2]), np.int8([1] * 7),
        np.uint16([1] * 7), np.float64([0.5, 0.5]), np.zeros(1, "f"), *rows,
    ],
}
index = _core.ClientIndex(bytes(16), 5)
functions = [getattr(_core, name) for name in dir(_core) if not name.startswith("_") and name != "in_ieee_mode"]
limits = 0.1, 10.0, 10.0, False, 10.0, 0, 0, 0, False, True, True
updates = _core.PlainUpdates(Update, index, 7, limits, [], [("w", (7,))], 100, False, lambda y: False)
functions += [getattr(one, name) for one in (index, updates) for name in dir(one) if not name.startswith("_")]
functions = [f for f in functions if callable(f)]
documented = {f: (f.__init__ if isinstance(f, type) else f).__doc__ or "" for f in functions}
known = {f: re.findall(r"(\\w+): ([^,)]+)", doc.split("\\n")[0]) for f, doc in documented.items()}
returned = 0
for _ in range(int(sys.argv[2])):
    function = rng.choice(functions)
    arguments = {}
    for name, annotation in known[function]:
        kinds = [kind for kind in ("int", "float", "bool", "str", "bytes") if kind in annotation.lower()]
        kind = rng.choice(kinds or ["lists", "object", "object"]) if rng.random() < 0.95 else rng.choice(list(values))
        arguments[name] = rng.choice(values[kind])
    arguments.pop("self", None)
    try:
        function(**arguments)
        returned += 1
    except (TypeError, ValueError, OverflowError, MemoryError, KeyError, DeviceError):
        pass
print("done", returned > 0)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_random_arguments_do_not_crash_the_core(seed):
    assert python("-c", FUZZ, seed, "30000").stdout == "done True\n"


SUB_INTERPRETER = """
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
other = interpreters.create()
error = run(other, "import warnings; warnings.simplefilter('ignore'); import fedcore")
print(error)
"""


def test_a_sub_interpreter_is_rejected_without_hanging():
    done = subprocess.run([sys.executable, "-c", SUB_INTERPRETER], capture_output=True, text=True, timeout=60)
    assert "ImportError" in done.stdout + done.stderr
    assert "WSGIApplicationGroup" in done.stdout + done.stderr

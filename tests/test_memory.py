import copy
import gc

import numpy as np
import pytest

import fedcore
from fedcore import arrays as memory
from fedcore.errors import UnknownNameError
from tests.kit import in_threads, python

HUGE_FLOATS = memory.HUGE // 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 5000, 100_000, HUGE_FLOATS, 13 * HUGE_FLOATS // 8, 2_000_001])
def test_vectors_start_on_a_cache_line_and_large_ones_near_a_huge_page(n, dtype):
    vectors = [memory.zeros(n, dtype) for _ in range(3)] + [memory.empty(n, dtype) for _ in range(5)]
    starts = {vector.ctypes.data % memory.HUGE for vector in vectors if vector.nbytes >= memory.HUGE}
    assert len(starts) in (0, 8), "eight vectors never share a set of the cache"
    assert all(start < memory.SETS for start in starts)
    for vector in vectors:
        assert n == 0 or vector.ctypes.data % memory.LINE == 0
        assert vector.shape == (n,)
        assert vector.dtype == dtype
        assert vector.flags.writeable
        assert vector.flags.c_contiguous
    assert not any(vector.any() for vector in vectors[:3])
    assert (memory.full(n, 3, dtype) == 3).all()
    vectors[0][:] = 1  # each has its own
    assert not vectors[1].any()


def test_a_copy_has_the_dtype_and_the_shape():
    for vector in (np.arange(6.0).reshape(2, 3), np.float32([1, 2]), np.array(3)):
        copy = memory.copied(vector)
        np.testing.assert_array_equal(copy, vector)
        assert copy.dtype == vector.dtype
        assert not np.shares_memory(copy, vector)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: memory.zeros(3, device=device),
        lambda device: memory.empty(3, np.float64, device=device),
        lambda device: memory.full(3, 1.0, device=device),
        lambda device: memory.copied(np.ones(3), device=device),
        lambda device: memory.BufferPool(3, device=device),
    ],
)
def test_an_unknown_device_is_named(make):
    make("cpu")
    with pytest.raises(UnknownNameError, match=r"^device\b.*'cuda:x'.*cuda:1"):
        make("cuda:x")


def test_too_much_memory_is_a_memory_error():
    with pytest.raises(MemoryError):
        memory.empty(2**60)


@pytest.mark.parametrize("n", [5, HUGE_FLOATS])
def test_the_pool_keeps_the_given_number_of_memories(n):
    vectors = memory.BufferPool(n, most=2)
    three = [vectors.get() for _ in range(3)]
    places = [vector.ctypes.data for vector in three]
    views = [three[1][1:]]
    three[0][:] = 7
    three.clear()
    again = [vectors.get() for _ in range(3)]
    assert {vector.ctypes.data for vector in again[:2]} == {places[0], places[2]}
    assert again[2].ctypes.data not in places  # the view still needs that one
    del views
    assert vectors.get().ctypes.data == places[1]


def test_threads_never_share_a_memory():
    vectors, seen = memory.BufferPool(4, most=3), []

    def work(number):
        for _ in range(500):
            mine = [vectors.get() for _ in range(3)]
            for vector in mine:
                vector[:] = number
            seen.append(all((vector == number).all() for vector in mine))

    in_threads(work, range(4))
    assert all(seen)
    assert len(seen) == 2000


def test_the_vectors_of_a_server_are_aligned():
    server = fedcore.Server(np.zeros(100_000, np.float32), "MIFA", clients=1, lr=0.1)
    for _ in range(2):
        server.round([fedcore.Update(0, np.ones(100_000, np.float32), steps=1)])
        sums, snapshot = server._backend._sum.result(), server._backend.snapshot
        for vector in (sums.A, snapshot.x, snapshot.momentum, snapshot.total):
            assert vector.ctypes.data % 64 == 0


@pytest.mark.parametrize("method", ["SCAFFOLD", "MimiC"])
def test_rounds_reuse_earlier_memory(method):
    adam = fedcore.algorithms.optimizers.Adam()
    server = fedcore.Server(np.zeros(1000, np.float32), method, clients=2, lr=0.1, optimizer=adam)
    seen = set()
    for number in range(8):
        server.round([fedcore.Update(i, server.x + np.float32(1), steps=1) for i in range(2)])
        gc.collect()
        moments = {moment.ctypes.data for moment in server._backend.snapshot.moments}
        assert number < 4 or moments <= seen
        spares = [*server._backend._offsets._free, *server._backend.model._moments._free]
        seen |= moments | {memory.vector.ctypes.data for memory in spares}


AT_THE_END = """
import ctypes, sys
from fedcore import arrays as memory
vectors = memory.BufferPool(3)
lent = [vectors.get() for _ in range(3)]
for module in (sys.modules["__main__"], memory):  # something holds them for ever, so that they are emptied at the end
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""


def test_vectors_at_interpreter_exit_are_freed_silently():
    assert python("-c", AT_THE_END).stderr == ""


def test_a_copied_pool_shares_no_memory():
    vectors = memory.BufferPool(1000, most=3)
    held = [vectors.get() for _ in range(3)]
    del held
    copied = copy.deepcopy(vectors)
    ours, theirs = ([each.get() for _ in range(4)] for each in (vectors, copied))
    addresses = {vector.ctypes.data for vector in [*ours, *theirs]}
    assert len(addresses) == 8
    assert not copied.owns(ours[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_takes_twenty_bytes_a_parameter(dtype):
    """x, x or the model as sent, the sum, its spare, and v, also after rounds with updates of the model's dtype."""
    code = f"""
import ml_dtypes, numpy as np
import fedcore

def highest():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def run(n):
    model = {{str(i): np.ones((n // 4000, 100), "{dtype}") for i in range(40)}}
    before = highest()
    server = fedcore.Server(model, "FedAvg", clients=2, lr=0.1)
    for _ in range(3):
        with server.open_round() as round:
            assert round.add(0, model, steps=1) and round.add(1, model, steps=1)
    return (highest() - before) / n

run(4000)  # loads all code
print(run(8_000_000))
"""
    assert 15 < float(python("-c", code).stdout) < 20.6

"""The core called by many threads at once, as it is with a GIL and, more so, without one.

Nothing here needs torch, nor the conftest that does: Pythons without a GIL run it too (`release/installed.py`).
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fedcore
from fedcore.arrays import core
from fedcore.errors import RangeError, UnknownClientError
from fedcore.kernels import weighted_sum
from fedcore.store.registry import Registry

THREADS, CLIENTS = 8, 2_000


def together(*works):
    """Run each function in its own thread, all starting at once, and raise the first error."""
    begin = threading.Barrier(len(works))

    def run(work):
        begin.wait()
        return work()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(works)) as pool:
            return [each.result() for each in [pool.submit(run, work) for work in works]]
    finally:
        sys.setswitchinterval(before)


def test_clients_added_by_many_threads_get_different_numbers():
    registry = Registry()
    names = [[f"{thread} {i}" for i in range(CLIENTS)] for thread in range(THREADS)]
    numbers = together(*[lambda own=own: [registry.add(name) for name in own] for own in names])
    assert sorted(np.concatenate(numbers)) == list(range(THREADS * CLIENTS))
    for own, of_thread in zip(names, numbers, strict=True):
        assert registry.numbers(own).tolist() == of_thread


def test_one_of_many_threads_adds_a_client():
    registry = Registry()
    names = [f"client {i}" for i in range(CLIENTS)]

    def add():
        refused = 0
        for name in names:
            try:
                registry.add(name)
            except RangeError:
                refused += 1
        return refused

    assert sum(together(*[add] * THREADS)) == (THREADS - 1) * CLIENTS
    assert sorted(registry) == sorted(names)


def test_lookups_during_additions_and_removals():
    registry = Registry(CLIENTS)
    stay = [f"stays {i}" for i in range(CLIENTS)]
    known = registry.add_all(stay)

    def come_and_go(thread):
        for turn in range(20):
            names = [f"{thread} {turn} {i}" for i in range(50)]
            registry.add_all(names)
            for name in names:
                registry.remove(name)

    def look_up():
        for _ in range(20):
            np.testing.assert_array_equal(registry.numbers(stay), known)
            assert [registry.id_of(number) for number in known[:50]] == stay[:50]
            assert set(stay) <= set(registry)

    together(*[lambda thread=thread: come_and_go(thread) for thread in range(4)], *[look_up] * 4)
    assert set(registry) == {*range(CLIENTS), *stay}
    assert Registry.restore(*registry.explicit()) == registry


def test_a_registry_is_read_at_one_moment():
    registry = Registry([name for i in range(40) for name in (f"gap {i}", f"stays {i}")])
    stay = {f"stays {i}": 2 * i + 1 for i in range(40)}
    for i in range(40):
        registry.remove(f"gap {i}")

    def come_and_go(thread):
        for turn in range(CLIENTS):
            registry.add(f"{thread} {turn}")
            registry.add(f"{thread} {turn} too")
            registry.remove(f"{thread} {turn}")
            registry.remove(f"{thread} {turn} too")

    def tell():
        for _ in range(CLIENTS // 10):
            _, pairs = registry.explicit()
            assert {name: number for number, name in pairs if name in stay} == stay

    together(lambda: come_and_go(0), lambda: come_and_go(1), tell, tell)


def test_a_removed_client_is_not_found_by_its_thread():
    registry = Registry(8)

    def come_and_go(thread):
        for turn in range(3 * CLIENTS):
            registry.add(f"{thread} {turn}")
            registry.remove(f"{thread} {turn}")

    def leave():
        for _ in range(3 * CLIENTS):
            registry.remove(3)
            assert 3 not in registry
            with pytest.raises(UnknownClientError):
                registry.number(3)
            registry.add(3)

    together(leave, *[lambda thread=thread: come_and_go(thread) for thread in range(7)])


def test_lookups_while_an_iterable_of_clients_blocks():
    registry, asked = Registry(4), threading.Event()

    def clients():
        yield "first"
        until = time.monotonic() + 60
        while not asked.is_set():  # it never sleeps
            assert time.monotonic() < until
        yield "second"

    def look_up():
        while "first" not in registry:
            pass
        asked.set()

    together(lambda: registry.add_all(clients()), look_up)
    assert list(registry) == [0, 1, 2, 3, "first", "second"]


def test_a_list_may_change_while_a_call_reads_it():
    full = [np.zeros(1) for _ in range(1_000)]
    listed = full.copy()

    def change():
        for _ in range(CLIENTS):
            listed.clear()
            listed.extend(full)

    def read():
        for _ in range(CLIENTS // 4):
            core.are_immutable(listed)

    together(change, change, *[read] * 4)
    assert not core.are_immutable(listed)


def test_updates_are_read_during_additions_and_removals():
    registry = Registry(16)
    updates = [fedcore.Update(i, np.full(4, i, np.float32), steps=1) for i in range(16)]

    def come_and_go(thread):
        for turn in range(CLIENTS):
            registry.add(f"{thread} {turn}")
            registry.remove(f"{thread} {turn}")

    def read():
        for _ in range(CLIENTS // 4):
            limits = 0.1, 1e9, 1e9, False, 1e9, 0, 0, 0, False, True, True
            plain = core.PlainUpdates(fedcore.Update, registry.index, 4, limits, [], [], 0, False, lambda y: False)
            plain.add(updates, set(), set(), -1, 0)
            clients, ys, *_ = plain.take()
            assert clients == list(range(16))
            assert [y[0] for y in ys] == clients

    together(*[lambda thread=thread: come_and_go(thread) for thread in range(4)], *[read] * 4)


def test_threads_sum_like_one_thread():
    rng = np.random.default_rng(0)
    rows, weights = list(rng.standard_normal((8, 70_000), np.float32)), rng.random(8, np.float32)
    expected = weighted_sum(rows, weights)

    def add_up():
        for _ in range(20):
            np.testing.assert_array_equal(weighted_sum(rows, weights), expected)

    together(*[add_up] * THREADS)


def test_each_thread_may_run_a_server():
    def serve():
        server = fedcore.Server(np.zeros(100, np.float32), "MIFA", clients=4, lr=0.1)
        for turn in range(20):
            server.round([fedcore.Update(i, server.x - np.float32(i + turn), steps=2) for i in range(4)])
        return server.x.copy()

    first, *others = together(*[serve] * THREADS)
    for x in others:
        np.testing.assert_array_equal(x, first)

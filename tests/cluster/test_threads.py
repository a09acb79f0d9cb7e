"""Threads that use one cluster at once: readers beside rounds, and two that open one."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest

from fedcore.errors import ClusterError, RoundError
from tests.cluster.pairs import made, n, one_round, same
from tests.kills import killed

X0 = np.linspace(-1, 1, n, dtype=np.float32)


@pytest.fixture(autouse=True)
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def test_readers_beside_rounds():
    """For example a thread that displays the model: each read is of one round, and no round is disturbed."""
    one, many = made("MIFA", X0), made("MIFA", X0, shards=2)
    models, over = {one.x.tobytes()}, Event()

    def read():
        seen = []
        while not over.is_set():
            seen.append(many.x.tobytes())
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for _ in range(20):
                one_round(one)
                models.add(one.x.tobytes())
                one_round(many)
        finally:
            over.set()
        for reader in readers:
            assert reader.result()
            assert set(reader.result()) <= models
    same(one, many)


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_fork_has_no_shards(tmp_path, folder):
    """It hears so, also if another thread called the shards meanwhile, and leaves them to its parent."""

    def act():
        signal.alarm(60)
        with pytest.raises(ClusterError):
            one_round(many)
        many.close()

    with made("MIFA", X0, shards=2, path=folder and tmp_path / folder) as many, ThreadPoolExecutor(1) as pool:
        pool.submit(many._backend.coordinator.lock.acquire).result()
        assert not killed(act)
        pool.submit(many._backend.coordinator.lock.release).result()
        one_round(many)


def test_two_that_open_a_round_at_once():
    """One has it, and the other hears so."""
    with made("FedAvg", X0, shards=2) as many, ThreadPoolExecutor(2) as pool:
        for t in range(20):
            start = Barrier(2)

            def opening(start=start):
                start.wait()
                try:
                    return many.open_round()
                except RoundError as error:
                    return error

            found = [pool.submit(opening) for _ in range(2)]
            results = [one.result() for one in found]
            (opened,) = [one for one in results if not isinstance(one, RoundError)]
            opened.add(0, X0 * np.float32(t), steps=1)
            assert opened.finish().accepted == (0,)

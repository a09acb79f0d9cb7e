"""A cluster has the memory of all its shards' machines."""

import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fedcore import Compute, Server
from fedcore.cluster import LocalThreads
from fedcore.errors import RangeError
from tests.kit import python
from tests.server.test_population import MORE
from tests.store.peaks import peak_of

PROGRAM = Path(__file__).with_name("limited.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's")
def test_a_model_larger_than_one_shards_memory_runs_on_two():
    run = python(PROGRAM)
    in_one, in_two, whole = run.stdout.splitlines()
    assert "MemoryError" in in_one + run.stderr  # a lost process tells its error to the standard one
    assert in_two == whole


class Many:
    """A cluster's server of so many clients with ids; and changes, each of another client."""

    def __init__(self, clients, path):
        threads = Compute(executor=LocalThreads())
        ids = [f"client {i}" for i in range(clients)]
        self.server = Server(np.zeros(4, np.float32), "MIFA", ids, lr=0.1, storage=path, compute=threads)
        self.ids, self.numbers = iter(ids), count()
        assert len(self.server.clients) == clients

    def arrive(self):
        self.server.add_clients(f"new {next(self.numbers)}")

    def depart(self):
        self.server.remove_client(next(self.ids))

    def newcomer(self):
        name = f"newcomer {next(self.numbers)}"
        with self.server.open_round(newcomers=[name, "silent"]) as opened:
            opened.add(name, np.ones(4, np.float32), steps=1)

    def refused(self):
        with pytest.raises(RangeError):
            self.server.add_clients("client 999")


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_change_of_one_client_allocates_no_more_among_many(tmp_path, kind):
    changes = ("arrive", "depart", "newcomer", "refused")
    peaks = []
    for clients in (1_000, 100_000):
        many = Many(clients, None if kind == "memory" else tmp_path / str(clients))
        peaks.append([peak_of(getattr(many, change)) for change in changes])
        many.server.close()
    for change, few, most in zip(changes, *peaks, strict=True):
        assert most < few + MORE, change

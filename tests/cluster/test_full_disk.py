"""A disk of one shard that is full, at each of its calls into the system: nothing happened, and can be done again."""

import itertools
import threading

import numpy as np
import pytest

from fedcore import Server
from fedcore.errors import StoreError
from fedcore.store.files import disk as system_calls
from tests.cluster.pairs import made, n, one_round, same
from tests.kills import WRITING
from tests.store.kit import full

X0 = np.linspace(-1, 1, n, dtype=np.float32)


class Full:
    """The disk of a shard, which is full at the call with this number; ``failed`` is its error."""

    def __init__(self, shard, call, patched):
        self._thread, self._call, self.failed = f"fedcore shard {shard}", call, None
        for name in WRITING:
            patched.setattr(system_calls, name, self._acting(name, getattr(system_calls, name)))

    def _acting(self, name, act):
        def acting(*arguments):
            if threading.current_thread().name == self._thread:
                self._call -= 1
                if self._call == 0:
                    self.failed = name
                    raise full(name)
            return act(*arguments)

        return acting


def arrive(server, number):
    server.add_clients([f"late {number}", f"later {number}"])


def depart(server, number):
    server.add_clients([f"late {number}"])
    return lambda: server.remove_client(f"late {number}")


ACTS = {
    "round": lambda server, number: lambda: one_round(server),
    "arrive": lambda server, number: lambda: arrive(server, number),
    "depart": depart,
}


@pytest.mark.parametrize(("what", "shard"), [("round", 0), ("round", 1), ("arrive", 1), ("depart", 0)])
def test_a_change_at_each_call(tmp_path, monkeypatch, what, shard):
    options = {"cap_steps": 10}  # one more vector to write
    one, many = made("MIFA", X0, **options), made("MIFA", X0, shards=2, path=tmp_path / "run", **options)
    for server in (one, many):
        one_round(server)
    rejected = set()
    for call in itertools.count(1):
        here, there = (ACTS[what](server, call) for server in (one, many))
        with monkeypatch.context() as patched:
            disk = Full(shard, call, patched)
            try:
                there()
            except StoreError:
                rejected.add(disk.failed)
                patched.undo()
                same(one, many, opened_again=True)
                there()
        here()
        same(one, many, opened_again=True)
        if disk.failed is None:
            break
    assert rejected >= {"write", "sync", "commit"} if what == "round" else "commit" in rejected
    assert many.verify() == []
    many.close()


def test_a_copy_at_each_call(tmp_path, monkeypatch):
    """The older copy stays until the new one is complete; the next save deletes an unfinished one."""
    copy, rejected = tmp_path / "copy", set()
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(copy)
        older = server.round_number
        for call in itertools.count(1):
            one_round(server)
            with monkeypatch.context() as patched:
                disk = Full(1, call, patched)
                try:
                    server.save(copy)
                    older = server.round_number
                except StoreError:
                    rejected.add(disk.failed)
            with Server.load(copy) as found:
                assert found.round_number == older
                assert found.verify() == []
            if disk.failed is None:
                break
        assert server.verify() == []
    assert len(list(copy.iterdir())) == 3
    assert rejected >= {"resize", "write", "sync", "rename"}

"""Shards that are lost at inconvenient moments: errors are true, and say how to continue."""

import os

import numpy as np
import pytest

from fedcore.cluster.placement import Lost
from fedcore.cluster.shard import Returned
from fedcore.errors import ClusterError, RoundError
from tests.cluster.pairs import both, made, n, one_round, same
from tests.cluster.processes import Processes

X0 = np.linspace(-1, 1, n, dtype=np.float32)


class Losing(Processes):
    """Its second shard is killed before a call of that name."""

    before = None

    def begin(self, name, arguments):
        if name == self.before:
            self.before = None
            self._shards[1][0].kill()
        super().begin(name, arguments)


class Deaf(Processes):
    """All shards are killed after their commit, before they report it."""

    name = None

    def begin(self, name, arguments):
        self.name = name
        super().begin(name, arguments)

    def wait(self, seconds):
        found = super().wait(seconds)
        if self.name != "finish" or not any(isinstance(one, Returned) for one in found.values()):
            return found
        self.name = None
        while self.waiting:
            found |= super().wait(None)
        for process, _ in self._shards:
            process.kill()
        return {k: Lost(RuntimeError("killed")) for k in found}


def test_while_a_server_is_made(tmp_path):
    there = Losing()
    there.before = "make"
    with pytest.raises(ClusterError, match=r"\[1\]"):
        made("MIFA", X0, shards=2, path=tmp_path / "run", executor=there)
    assert not (tmp_path / "run" / "cluster.json").exists()
    left = sorted(os.listdir(tmp_path / "run"))  # a shard whose process cannot delete it any more
    assert left in ([], ["cluster.json.intent", "shard-1"])
    made("MIFA", X0, shards=2, path=tmp_path / "run").close()


def test_while_a_round_is_open_and_something_else_is_asked(tmp_path):
    there = Losing()
    one, many = made("MIFA", X0), made("MIFA", X0, shards=2, path=tmp_path / "run", executor=there)
    both(one, many, one_round)
    opened = many.open_round()
    opened.add(0, X0, steps=1)
    there.before = "read"
    with pytest.raises(ClusterError, match="again"):
        _ = many.x
    with pytest.raises(ClusterError, match=r"^round\b"):
        opened.finish()
    assert not opened.is_open
    with pytest.raises(RoundError):
        opened.finish()
    both(one, many, one_round)
    same(one, many, opened_again=True)
    many.close()


def test_a_change_that_happened_is_not_reported_as_undone(tmp_path):
    there = Deaf()
    with made("FedAvg", X0, shards=2, path=tmp_path / "run", executor=there) as many:
        opened = many.open_round()
        opened.add(0, X0 * np.float32(0.5), steps=1)
        with pytest.raises(ClusterError, match="complete") as raised:
            opened.finish()
        assert "done again" not in str(raised.value)
        assert many.round_number == 1

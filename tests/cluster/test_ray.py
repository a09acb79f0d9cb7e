"""Shards on Ray: the bits of one server, and of a run without kills."""

import os
import signal

import numpy as np
import pytest

from fedcore import Compute, Server, cluster
from fedcore.errors import ClusterError, RoundError
from tests.cluster import test_groups
from tests.cluster.pairs import both, made, n, one_round, same

pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
X0 = np.linspace(-1, 1, n, dtype=np.float32)


@pytest.fixture(scope="module")
def on_ray(ray_session):
    from fedcore.cluster import OnRay

    with OnRay(cpus=0.25) as there:
        yield there


def processes(on_ray):
    """The number of each shard's process."""
    import ray

    return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in on_ray._actors])


def test_the_same_bits(on_ray, tmp_path):
    import ray

    one, many = made("MIFA", X0), made("MIFA", X0, shards=2, path=tmp_path / "run", executor=on_ray)
    for _ in range(2):
        both(one, many, one_round)
    assert np.concatenate(ray.get(many.broadcast([0]).slices.x)).tobytes() == many.x.tobytes()
    y = X0 * np.float32(0.5)
    with one.open_round() as opened:
        opened.add(2, y, steps=3)
    with many.open_round() as opened:
        slices = [ray.put(y[span.start : span.stop]) for span in many._backend.ranges]
        opened.add(2, cluster.Slices(slices), steps=3)
    same(one, many)
    both(one, many, lambda server: server.replace_x(X0 * np.float32(2)))
    both(one, many, one_round)
    same(one, many)
    many.close()
    with Server.load(tmp_path / "run", compute=Compute(executor=on_ray)) as many:
        same(one, many, opened_again=True)


def test_partial_updates(on_ray):
    one, many = test_groups.new_server("MIFA"), test_groups.new_server("MIFA", 2, compute=Compute(executor=on_ray))
    for _ in range(3):
        both(one, many, test_groups.run_round, test_groups.alike)
    test_groups.sent_alike(one, many)
    assert many.broadcast([0]).slices is None
    same(one, many)
    many.close()


def test_a_shard_is_killed(on_ray, tmp_path):
    """Between two rounds and within one: an unfinished round is rolled back and can be repeated."""
    one, many = made("MimiC", X0), made("MimiC", X0, shards=2, path=tmp_path / "run", executor=on_ray)
    both(one, many, one_round)
    os.kill(processes(on_ray)[1], signal.SIGKILL)
    with pytest.raises(ClusterError, match="changed"):
        one_round(many)
    both(one, many, one_round)
    opened = many.open_round()
    opened.add(0, X0, steps=1)
    os.kill(processes(on_ray)[0], signal.SIGKILL)
    with pytest.raises(ClusterError, match="changed"):
        opened.finish()
    assert not opened.is_open
    with pytest.raises(RoundError):
        opened.finish()
    both(one, many, one_round)
    same(one, many, opened_again=True)
    assert many.verify() == []
    many.close()


def test_a_broadcast_from_before_a_shard_was_lost(on_ray, tmp_path):
    """A read raises an error, and the present shards are unchanged."""
    with made("FedAvg", X0, shards=2, path=tmp_path / "run", executor=on_ray) as many:
        os.kill(processes(on_ray)[1], signal.SIGKILL)
        before, other = many.broadcast([0]), many.broadcast([0])
        with pytest.raises(ClusterError, match="changed"):
            _ = before.x
        there = processes(on_ray)
        with pytest.raises(ClusterError, match=r"^broadcast\b"):
            _ = other.x
        assert processes(on_ray) == there
        assert many.broadcast([0]).x.tobytes() == X0.tobytes()
    with made("FedAvg", X0, shards=2, executor=on_ray) as many:
        os.kill(processes(on_ray)[1], signal.SIGKILL)
        before = many.broadcast([0])
        with pytest.raises(ClusterError):
            _ = before.x
        with pytest.raises(ClusterError, match="memory"):
            _ = many.x


class OddError(Exception):
    """One that cannot be pickled."""

    def __reduce__(self):
        raise TypeError


def fail(actor):
    def failing(*_):
        raise OddError("it is odd")

    actor._shard.resume = failing


def test_only_a_loss_has_all_shards_opened_again(on_ray, tmp_path, monkeypatch):
    """And no error of another kind, in whatever words it comes from a shard's process."""
    made("FedAvg", X0, shards=2, path=tmp_path / "run", executor=on_ray).close()
    told, make = [], on_ray.make

    def then_failing(shards):
        make(shards)
        told.append([actor.__ray_call__.remote(fail) for actor in on_ray._actors])

    monkeypatch.setattr(on_ray, "make", then_failing)
    with pytest.raises(ClusterError, match="OddError: it is odd"):
        Server.load(tmp_path / "run", compute=Compute(executor=on_ray))
    assert len(told) == 1


def test_a_second_coordinator_is_fenced(on_ray, tmp_path, monkeypatch):
    from fedcore.cluster import coordinator
    from fedcore.errors import LockedError

    monkeypatch.setattr(coordinator, "PATIENCE", 0.1)
    with made("FedAvg", X0, shards=2, path=tmp_path / "run", executor=on_ray), pytest.raises(LockedError):
        Server.load(tmp_path / "run")

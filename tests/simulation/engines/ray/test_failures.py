"""Workers, machines and trainings that fail, and a Ray that is not as it should be."""

import os
import signal
import socket
import sys

import psutil
import pytest

from fedcore import Server
from fedcore.errors import ClusterError, MissingDependencyError, RangeError
from fedcore.simulation.executor import Session
from fedcore.simulation.ray_engine import Ray
from tests.simulation.engines.ray.models import MARK, Odd
from tests.simulation.engines.ray.problems import listening, noise, program, results


def test_an_error_in_a_clients_training_is_raised_as_it_is(ray_session):
    data, parts = noise("mlp", 5, 4)
    data.train_x[parts[2], 0] = MARK
    with Ray(Odd(), data, parts, batch=4, steps=1, seed=0, together=False, workers=1) as engine:
        broadcast = Server(engine.initial, "FedAvg", clients=5, lr=0.1).broadcast(range(5))
        with pytest.raises(RangeError, match=r"^made up\b") as raised:
            list(engine.updates(broadcast))
    assert type(raised.value) is RangeError


def test_nothing_listens_outside(ray_session):
    """Not on this machine's other addresses; and nobody is told that Ray is in use."""
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    found = listening()
    assert found
    assert found <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_closed_session_begins_no_ray():
    """Nor does a closed pool, nor a server whose placement is closed, nor a session whose Ray somebody has ended."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    told, _ = program("closed.py").communicate(timeout=300)
    methods = ["put", "pickled", "start", "wait", "result", "room", "require_open"]
    ended = [*methods, "fill", "train", "slices", "x", "broadcast.x", "open_round", "make"]
    assert told.splitlines() == [
        *(f"ended by somebody: {what}: ClusterError, got one that ray.shutdown() has ended" for what in ended),
        "listening: []",
        "the newer session's Ray is there: 7",
        *(f"closed: {what}: ClusterError, got one that was closed" for what in methods),
        "listening: []",
    ]


def test_a_closed_engine(ray_session, together):
    """Its workers are ended, and no others begin, though another session keeps its Ray."""
    with together.ray(workers=1) as engine:
        broadcast = Server(engine.initial, "FedAvg", clients=12, lr=0.1).broadcast(range(12))
    for begun in (lambda: list(engine.updates(broadcast)), lambda: engine.gradients(broadcast)):
        with pytest.raises(ClusterError, match="closed"):
            begun()
    assert engine.processes() == []


def test_a_round_begins_again_where_it_has_failed(one_by_one):
    """While the exception holds the updates of the first; who reads on there hears that they are over."""
    engine, ids = one_by_one.there, range(6)
    server, one = (Server(engine.initial, "MimiC", clients=6, lr=0.1) for _ in range(2))
    updates = engine.updates(server.broadcast(ids))
    try:
        with server.open_round() as opened:
            opened.add_batch([next(updates)])
            raise RangeError("made up")
    except RangeError:
        server.round(engine.updates(server.broadcast(ids)))
    with pytest.raises(ClusterError, match=r"^updates\b"):
        next(updates)
    one.round(one_by_one.here.updates(one.broadcast(ids)))
    assert server.x.tobytes() == one.x.tobytes()


def test_another_cluster_than_the_one_that_is_connected(ray_session):
    with pytest.raises(RangeError, match=r"^address\b"):
        Session("10.0.0.1:6379")


def test_nobody_is_at_the_address(ray_session):
    """It is said at once, whatever Ray itself would try for how long."""
    import ray

    from fedcore.simulation.executor import _connect

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"^address.*'{address}'.*`ray"):
            _connect(ray, address, {})
    with pytest.raises(ClusterError, match=r"^address.*'nowhere'.*ray start --head"):
        _connect(ray, "nowhere", {})
    with pytest.raises(ClusterError, match=r"^address.*'local'"):
        _connect(ray, "local", {})


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"fedcore-fl\[ray\]"):
        Session()


def test_a_machine_comes_and_another_one_goes():
    """Two Ray nodes on this machine, of which the second is there in the middle."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    told, _ = program("machines.py", "lenet", "MimiC").communicate(timeout=300)
    assert results(told)[-1:] == ["MimiC: the same bits, 2 machines, 1 worker lost"]


def test_an_interrupt_ends_everything(interruptible):
    """As from a terminal, which sends it to all processes of the group."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    with program("interrupted.py") as running:
        assert running.stdout.readline() == "working\n"
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        rest, _ = running.communicate(timeout=300)
    assert rest == "interrupted, and closed\n"
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=60)[1] == []

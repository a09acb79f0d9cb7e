"""Lost workers and machines, errors in training, and connections to Ray that fail or end."""

import os
import signal
import socket
import sys

import psutil
import pytest

from fedcore import Server
from fedcore.cluster.workers import Session
from fedcore.errors import ClusterError, MissingDependencyError, RangeError
from fedcore.sim.ray_engine import Ray
from tests.sim.engines.ray.problems import MARK, Odd, listening, noise, program, results


def test_an_error_in_a_client_s_training_is_raised_unchanged(ray_session):
    data, parts = noise("mlp", 5, 4)
    data.train_x[parts[2], 0] = MARK
    with Ray(Odd(64, 10), data, parts, batch=4, steps=1, seed=0, together=False, workers=1) as engine:
        broadcast = Server(engine.initial, "FedAvg", clients=5, lr=0.1).broadcast(range(5))
        with pytest.raises(RangeError, match=r"^made up\b") as raised:
            list(engine.updates(broadcast))
    assert type(raised.value) is RangeError


def test_ray_listens_on_the_loopback_interface_and_reports_no_statistics(ray_session):
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    addresses = listening()
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_closed_objects_start_no_ray():
    """Sessions, pools and a server in shards, after ``close`` and after ``ray.shutdown()``."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    output, _ = program("closed.py").communicate(timeout=300)
    methods = ["put", "pickled", "start", "wait", "result", "room", "require_open"]
    ended = [*methods, "fill", "train", "broadcast", "x", "broadcast.x", "open_round", "make"]
    assert output.splitlines() == [
        *(f"shut down: {name}: ClusterError, was ended by ray.shutdown()" for name in ended),
        "listening: []",
        "the newer session works: 7",
        *(f"closed: {name}: ClusterError, was closed" for name in methods),
        "listening: []",
    ]


def test_a_closed_engine_starts_no_workers_although_ray_still_runs(ray_session, together):
    with together.ray(workers=1) as engine:
        broadcast = Server(engine.initial, "FedAvg", clients=12, lr=0.1).broadcast(range(12))
    for use in (lambda: list(engine.updates(broadcast)), lambda: engine.gradients(broadcast)):
        with pytest.raises(ClusterError, match="closed"):
            use()
    assert engine.processes() == []


def test_a_round_can_be_repeated_while_the_exception_keeps_its_updates_open(one_by_one):
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


def test_a_second_cluster_is_rejected(ray_session):
    with pytest.raises(RangeError, match=r"^address\b"):
        Session("10.0.0.1:6379")


def test_an_address_without_a_cluster_fails_at_once(ray_session):
    import ray

    from fedcore.cluster.workers import _connect

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # The socket does not listen.
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


@pytest.mark.endurance
def test_a_machine_joins_and_another_is_lost():
    """Two Ray nodes on this machine."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    output, _ = program("machines.py", "lenet", "MimiC").communicate(timeout=300)
    assert results(output)[-1:] == ["MimiC: the same bits, 2 machines, 1 worker lost"]


def test_an_interrupt_ends_all_processes(interruptible):
    """A terminal sends the signal to all processes of the group."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    with program("interrupted.py") as running:
        assert running.stdout.readline() == "working\n"
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        rest, _ = running.communicate(timeout=300)
    assert rest == "interrupted, and closed\n"
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=60)[1] == []

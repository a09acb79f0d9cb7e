"""Workers, machines and trainings that fail, and a Ray that is not as it should be."""

import os
import signal
import socket
import sys

import psutil
import pytest

from fedcore import Server
from fedcore.engines import Ray
from fedcore.engines.ray import Session
from fedcore.errors import ClusterError, MissingDependencyError, RangeError
from tests.engines.ray.models import MARK, Odd
from tests.engines.ray.problems import noise, program, results


def test_an_error_in_a_clients_training_is_raised_as_it_is(ray_session):
    data, parts = noise("mlp", 5, 4)
    data.train_x[parts[2], 0] = MARK
    with Ray(Odd(), data, parts, batch=4, steps=1, seed=0, together=False, workers=1) as engine:
        broadcast = Server("FedAvg", engine.initial, clients=5, lr=0.1).broadcast(range(5))
        with pytest.raises(RangeError, match=r"^made up: expected nothing, got a marked client$") as raised:
            list(engine.updates(broadcast))
    assert type(raised.value) is RangeError


def test_nothing_listens_outside(ray_session):
    """Not on this machine's other addresses; and nobody is told that Ray is in use."""
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    listening = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        listening |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    assert listening
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_another_cluster_than_the_one_that_is_connected(ray_session):
    with pytest.raises(RangeError, match=r"^address: expected None or that of this process's own connection, '127"):
        Session("10.0.0.1:6379")


def test_nobody_is_at_the_address(ray_session):
    """It is said at once, whatever Ray itself would try for how long."""
    import ray

    from fedcore.ray_session import _connect

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"got '{address}': nobody answers at {address}: .*; begin one by `ray"):
            _connect(ray, address, {})
    with pytest.raises(ClusterError, match=r"got 'nowhere': .*; begin one by `ray start --head`"):
        _connect(ray, "nowhere", {})
    with pytest.raises(ClusterError, match=r"got 'local': it is no HOST:PORT, and not auto; begin one"):
        _connect(ray, "local", {})


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"^fedcore on Ray: need Ray; pip install 'fedcore-fl\[ray\]'$"):
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

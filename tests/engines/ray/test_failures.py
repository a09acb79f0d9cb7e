"""Workers, machines and trainings that fail, and a Ray that is not as it should be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedcore import Server
from fedcore.engines import Ray
from fedcore.engines.ray import Session
from fedcore.errors import MissingDependencyError, RangeError
from tests.engines.ray.models import MARK, Odd
from tests.engines.ray.problems import noise

PROGRAMS = Path(__file__).parent / "programs"


def test_workers_that_are_killed(one_by_one):
    """One with what it has been given, and then all at once."""
    engine, lost = one_by_one.there, one_by_one.there.stats.lost
    victims = {1: slice(0, 1), 3: slice(None)}

    def kill(t, _):
        for process in engine.processes()[victims.pop(t, slice(0, 0))]:
            os.kill(process, signal.SIGKILL)

    assert one_by_one.run(engine, "MimiC", seen=kill) == one_by_one.run(one_by_one.here, "MimiC")
    assert not victims
    assert lost + 1 <= engine.stats.lost <= lost + 3


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


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"^fedcore on Ray: need Ray; pip install 'fedcore-fl\[ray\]'$"):
        Session()


def program(name):
    """A program with a Ray of its own."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(PROGRAMS / name)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_machine_comes_and_another_one_goes():
    """Two Ray nodes on this machine, of which one is there at first and the other one in the end."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    told, _ = program("machines.py").communicate(timeout=300)
    assert told.splitlines()[-1] == "the same bits, 2 machines, 1 worker lost"


def test_an_interrupt_ends_everything(interruptible):
    """As from a terminal, which sends it to all processes of the group."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    with program("interrupted.py") as running:
        assert running.stdout.readline() == "training\n"
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        rest, _ = running.communicate(timeout=300)
    assert rest == "interrupted, and closed\n"
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=60)[1] == []

"""Shards that hang: a signal aborts the call; if some have committed, their folders show what happened."""

import itertools
import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from fedcore import Server
from fedcore.cluster.manifest import ShardInfo
from fedcore.errors import ClusterError
from tests.cluster.pairs import both, made, n, one_round, same

X0 = np.linspace(-1, 1, n, dtype=np.float32)
GUARD = 60.0
"""Seconds until a shard that hangs goes on, so that a test fails and does not hang too."""

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Signals wait for a shorter time than usual."""
    monkeypatch.setattr("fedcore.cluster.coordinator.HELD", 0.1)
    monkeypatch.setattr("fedcore.cluster.coordinator.GRACE", 0.3)
    monkeypatch.setattr("fedcore.cluster.placement.ENDING", 0.1)


class Gate:
    """A place at which a shard hangs until it is opened; the guard opens it, too."""

    def __init__(self):
        self.reached, self._opened, self.was_guarded = threading.Event(), threading.Event(), False

    def __call__(self):
        self.reached.set()
        self.was_guarded |= not self._opened.wait(GUARD)

    def open(self):
        self._opened.set()


def shard_of(server):
    return server._backend.coordinator.placement._shards[0]


def hang(monkeypatch, owner, name, gate):
    """Have a method hang at a gate before it begins."""
    before = getattr(owner, name)

    def hanging(*arguments):
        gate()
        return before(*arguments)

    monkeypatch.setattr(owner, name, hanging)


@contextmanager
def signals(number, times, reached):
    """Send this process a signal so many times, once a shard hangs; yields the number of sent ones."""
    sent, is_over = [], threading.Event()

    def send():
        while len(sent) < times and reached(GUARD) and not is_over.wait(0.7 if sent else 0.1):
            sent.append(number)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield sent
    finally:
        is_over.set()
        sender.join()


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_interrupt_leaves_a_thread_that_hangs(tmp_path, monkeypatch, in_memory):
    """In memory the server continues when the thread does; a folder is opened by another process."""
    path = None if in_memory else tmp_path / "run"
    gate, one, many = Gate(), made("MIFA", X0), made("MIFA", X0, shards=2, path=path)
    both(one, many, one_round)
    hang(monkeypatch, shard_of(many), "finish", gate)
    with signals(signal.SIGINT, 1, gate.reached.wait), pytest.raises(KeyboardInterrupt):
        one_round(many)
    assert not gate.was_guarded
    assert many.round_number == 1
    if not in_memory:
        with pytest.raises(ClusterError, match="process"):
            one_round(many)
    gate.open()
    if not in_memory:
        many.close()
        many = Server.load(path)
    both(one, many, one_round)
    same(one, many, opened_again=not in_memory)
    many.close()


def test_a_commit_that_hangs_is_left_at_the_second_interrupt(tmp_path, monkeypatch):
    gate, one, many = Gate(), made("MIFA", X0), made("MIFA", X0, shards=2, path=tmp_path / "run")
    hang(monkeypatch, shard_of(many)._state, "keep", gate)
    with signals(signal.SIGINT, 2, gate.reached.wait) as sent, pytest.raises(KeyboardInterrupt):
        one_round(many)
    assert not gate.was_guarded
    assert len(sent) == 2
    gate.open()
    many.close()
    with Server.load(tmp_path / "run") as many:
        if many.round_number == 0:
            one_round(many)
        one_round(one)
        same(one, many, opened_again=True)


def test_a_round_that_is_interrupted_in_its_commit_counts(monkeypatch):
    one, many = made("MIFA", X0), made("MIFA", X0, shards=2)
    state = shard_of(many)._state
    with monkeypatch.context() as patch:
        hang(patch, state, "keep", lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            one_round(many)
    assert many.round_number == 1
    one_round(one)
    both(one, many, one_round)
    same(one, many)


def test_a_handler_runs_while_a_shard_hangs(monkeypatch):
    """One that raises nothing breaks nothing off, and a handler that it sets stays."""
    gate, one, many = Gate(), made("MIFA", X0), made("MIFA", X0, shards=2)
    hang(monkeypatch, shard_of(many), "finish", gate)

    def handle(*_):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        gate.open()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with signals(signal.SIGUSR1, 1, gate.reached.wait):
            both(one, many, one_round)
        assert not gate.was_guarded
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    same(one, many)


@pytest.mark.parametrize("within", [lambda server: server.x, lambda server: server.close()], ids=["read", "close"])
def test_a_handler_uses_a_server_of_which_a_shard_hangs(monkeypatch, within):
    gate, many = Gate(), made("MIFA", X0, shards=2)
    hang(monkeypatch, shard_of(many), "finish", gate)
    before = signal.signal(signal.SIGUSR1, lambda *_: within(many))
    try:
        with signals(signal.SIGUSR1, 1, gate.reached.wait), pytest.raises(ClusterError, match="handler"):
            one_round(many)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not gate.was_guarded
    gate.open()


def test_the_log_names_a_shard_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr("fedcore.cluster.coordinator.LATE", 0.1)
    gate, many = Gate(), made("MIFA", X0, shards=2)
    hang(monkeypatch, shard_of(many)._state, "read", gate)
    opener = threading.Timer(1.0, gate.open)
    opener.start()
    assert many.x.tobytes() == X0.tobytes()
    opener.join()
    assert "shards [0]" in caplog.text


def on_ray(**limits):
    from fedcore.cluster import OnRay

    return OnRay(**{"cpus": 0.25} | limits)


class Stopped:
    """The process of the first shard on Ray, which stops as on a disk that hangs; the guard has it go on."""

    def __init__(self, placement):
        import ray

        self._actor = placement._actors[0]
        self._process = psutil.Process(ray.get(self._actor.__ray_call__.remote(lambda actor: os.getpid())))
        self.was_guarded = False
        self._guard = threading.Timer(GUARD, self._go_on)
        self._guard.start()

    def stop(self):
        self._process.suspend()

    def stop_behind_commit(self):
        import ray

        def arm(actor):
            keep = actor._shard._state.keep

            def stopping(*arguments):
                keep(*arguments)
                os.kill(os.getpid(), signal.SIGSTOP)

            actor._shard._state.keep = stopping

        ray.get(self._actor.__ray_call__.remote(arm))

    def reached(self, seconds):
        until = time.monotonic() + seconds
        while self._process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
            time.sleep(0.05)
        return time.monotonic() < until

    def over(self):
        """Whether the test came here without the guard."""
        self._guard.cancel()
        return not self.was_guarded

    def _go_on(self):
        self.was_guarded = True
        if self._process.is_running():
            self._process.resume()


def test_an_interrupt_ends_a_process_that_hangs(ray_session, tmp_path):
    with on_ray() as there:
        one, many = made("MIFA", X0), made("MIFA", X0, shards=2, path=tmp_path / "run", executor=there)
        opened, stopped = many.open_round(), Stopped(there)
        opened.add(0, X0, steps=1)
        stopped.stop()
        with signals(signal.SIGINT, 1, stopped.reached), pytest.raises(KeyboardInterrupt):
            opened.finish()
        assert stopped.over()
        assert many.round_number == 0
        both(one, many, one_round)
        same(one, many, opened_again=True)
        many.close()


def test_a_second_interrupt_ends_a_process_that_hangs_behind_its_commit(ray_session, tmp_path):
    """The shards' folders then show that the round happened."""
    with on_ray() as there:
        one, many = made("MIFA", X0), made("MIFA", X0, shards=2, path=tmp_path / "run", executor=there)
        stopped = Stopped(there)
        stopped.stop_behind_commit()
        with signals(signal.SIGINT, 2, stopped.reached) as sent, pytest.raises(KeyboardInterrupt):
            one_round(many)
        assert stopped.over()
        assert len(sent) == 2
        assert many.round_number == 1
        one_round(one)
        same(one, many, opened_again=True)
        many.close()


def test_the_start_has_its_own_limit(ray_session, monkeypatch):
    place = ShardInfo("a cluster", 0, 1, 0, False, None)
    with on_ray(seconds=0.01) as there:
        there.make([place])
        assert not there.waiting
    for limit in (0.5, 1.5, 2.5, 3.5):  # The clock moves on at each look, so that time ends at every line.
        with on_ray(cpus=1000, start_seconds=limit) as there, monkeypatch.context() as patch:
            patch.setattr("fedcore.cluster.on_ray.time", SimpleNamespace(monotonic=itertools.count(0.0).__next__))
            with pytest.raises(ClusterError, match="start_seconds"):
                there.make([place])

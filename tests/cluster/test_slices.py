"""Clients' workers and shards on one Ray: slices all the way, with the bits of one server and one process."""

import ctypes
import gc
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import Compute, Server, Storage, algorithms
from fedcore.cluster import Slices
from fedcore.errors import ClusterError, RangeError
from fedcore.sim.data import Dataset
from fedcore.sim.engines import KeepingClients
from fedcore.sim.ray_engine import Ray
from tests.cluster.pairs import alike
from tests.sim.engines.ray.problems import MANY_VECTORS, OTHERS, Problem, program

pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")

from fedcore.cluster import OnRay


class Kept(OnRay):
    """Shards whose processes serve one server after another, since a process takes longer than a test."""

    def make(self, shards):
        if not self._actors:
            super().make(shards)
        for actor, info in zip(self._actors, shards, strict=True):
            self._session.result(actor.prepare.remote(info, 1))

    def drop(self):
        pass

    def close(self):
        super().drop()
        super().close()


@pytest.fixture(scope="module")
def shards(ray_session):
    """Two shards on Ray."""
    there = Kept(cpus=0.25)
    yield Compute(shards=2, executor=there)
    there.close()


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 460), nn.ReLU(), nn.Linear(460, 10))


def normed():
    """A model with float buffers, and a counter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 460), nn.BatchNorm1d(460), nn.ReLU(), nn.Linear(460, 10))


@pytest.fixture(scope="module")
def one_by_one(ray_session):
    """Clients that are trained one by one; the buffers are the last shard's."""
    with Problem("mlp", clients=6, examples=10, module=normed, together=False, cpus=0.25) as problem:
        yield problem


@pytest.fixture(scope="module")
def together(ray_session):
    """Clients that are trained together."""
    with Problem("mlp", clients=6, examples=8, module=wide, workers=1, cpus=0.25) as problem:
        yield problem


def sliced(t, update):
    """The driver's view of an update: references and digests."""
    assert isinstance(update.value, Slices)
    assert len(update.value.parts) == len(update.value.digests) == 2
    assert not any(hasattr(part, "dtype") for part in update.value.parts)


@pytest.mark.parametrize("method", [*MANY_VECTORS, *(pytest.param(m, marks=pytest.mark.endurance) for m in OTHERS)])
def test_every_method(one_by_one, shards, method):
    assert not one_by_one.there.together
    due = one_by_one.run(one_by_one.here, method, 3, x0=normed())
    assert one_by_one.run(one_by_one.there, method, 3, sliced, compute=shards, x0=normed()) == due


@pytest.mark.parametrize(
    "method",
    [
        algorithms.SCAFFOLD(control="sent"),
        algorithms.SCAFFOLDM(control="sent"),
        algorithms.MimiC(),
        algorithms.FedAvgMVR(),
    ],
)
def test_batched_training(together, shards, method):
    assert together.there.together
    assert together.run(together.there, method, 4, sliced, compute=shards) == together.run(together.here, method)


def test_a_warm_start(together, shards):
    ends = []
    for compute, engine in ((Compute(), together.here), (shards, together.there)):
        with Server(engine.initial, "MIFA", clients=6, lr=0.1, compute=compute) as server:
            gradients = engine.gradients(server.broadcast(range(6)))
            assert isinstance(gradients[0], Slices) == (compute is shards)
            server.warm_start(gradients)
            server.round(engine.updates(server.broadcast([1, 4, 5])))
            ends.append(server.x.tobytes())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", ["MimiC", "SCAFFOLD"])
def test_clients_that_keep_their_rows_keep_them_in_this_process(together, shards, method):
    """And so are sent, and send, whole vectors."""
    algorithm = algorithms.named(method, placement="client")
    ends = []
    for compute, engine in ((Compute(), together.here), (shards, together.there)):
        with Server(engine.initial, algorithm, clients=6, lr=0.1, compute=compute) as server:
            keeping = KeepingClients(engine, algorithm)
            for _ in range(2):
                keeping.after(server, server.round(keeping.updates(server.broadcast([1, 4, 5]))))
            ends.append(server.x.tobytes())
    assert ends[0] == ends[1]


def test_shards_in_threads_take_whole_vectors(together):
    here = Compute(shards=3)
    due = together.run(together.here, "SCAFFOLD", 2)
    assert together.run(together.there, "SCAFFOLD", 2, compute=here) == due
    assert together.run(together.here, "SCAFFOLD", 2, compute=here) == due


def rounds(problem, engine, compute, change=lambda server, updates: updates):
    """Some rounds of SCAFFOLD, of which a caller changes the updates; the reports and the model."""
    with Server(problem.module(), "SCAFFOLD", clients=problem.clients, lr=0.1, compute=compute) as server:
        reports = [
            server.round(change(server, engine.updates(server.broadcast(range(problem.clients))))) for _ in range(3)
        ]
        return reports, server.x.tobytes()


def test_a_worker_that_lies(one_by_one, shards):
    """Faults that only one shard can see are rejected as by one server."""

    def cut(server, y):
        backend = server._backend
        return Slices([y[span.start : span.stop] for span in backend.ranges]) if hasattr(backend, "ranges") else y

    def lying(server, updates):
        for update in updates:
            if update.client == 1:
                y = np.array(server.x)
                y[-1] = np.nan if server.round_number else 3e38
                update = update._replace(value=cut(server, y))
            if update.client == 2:
                update = update._replace(steps=0)
            yield update

    (reports, x), (due, x_due) = (
        rounds(one_by_one, engine, compute, lying)
        for compute, engine in ((shards, one_by_one.there), (Compute(), one_by_one.here))
    )
    assert x == x_due
    for report, other in zip(reports, due, strict=True):
        assert sorted(client for client, _ in report.rejected) == [1, 2]  # buffered updates are rejected later
        alike(*(replace(one, rejected=tuple(sorted(one.rejected))) for one in (report, other)))


def test_a_journal_and_an_audit_get_slices_too(one_by_one, shards, tmp_path):
    """The coordinator gathers them; the bits are the same."""
    storage, xs, digests = Storage(tmp_path / "run", journal=True, audit=True), [], []
    for options in (dict(compute=shards, storage=storage), dict(storage=Storage(audit=True))):
        engine = one_by_one.there if "compute" in options else one_by_one.here
        with Server(normed(), "SCAFFOLD", clients=6, lr=0.1, **options) as server:
            for _ in range(2):
                broadcast = server.broadcast(range(6))
                assert (broadcast.slices is not None) == ("compute" in options)
                assert server.round(engine.updates(broadcast)).accepted == tuple(range(6))
            xs.append(server.x.tobytes())
            digests.append([document["updates"] for document in server.audit_log()])
    assert (xs[0], digests[0]) == (xs[1], digests[1])


@pytest.mark.parametrize("what", ["value", "control"])
def test_slices_of_two_vectors_are_refused(together, shards, what):
    """By the digests that the worker has made of them."""

    def mixed(updates):
        before = None
        for update in updates:
            mine = getattr(update, what)
            if update.client == 3:
                parts = [mine.parts[0], getattr(before, what).parts[1]]
                update = update._replace(**{what: Slices(parts, mine.digests)})
            before = update
            yield update

    with Server(
        together.here.initial, algorithms.SCAFFOLD(control="sent"), clients=6, lr=0.1, compute=shards
    ) as server:
        report = server.round(mixed(together.there.updates(server.broadcast(range(6)))))
        assert report.accepted == (0, 1, 2, 4, 5)
        ((client, reason),) = report.rejected
        assert client == 3
        assert reason.startswith("model: " if what == "value" else "control: ")
        assert "slices of one vector" in reason
        with server.open_round() as opened, pytest.raises(RangeError, match=r"^model\b"):
            opened.add(0, Slices([server.x]), steps=1)


def test_a_worker_is_killed(one_by_one, shards):
    """While it trains, and before its update is folded: its slices outlive it."""
    lost, engine = one_by_one.there.stats.lost, one_by_one.there

    def killing(server, updates):
        for update in updates:
            if (server.round_number, update.client) in ((0, 0), (1, 3)):
                os.kill(engine.processes()[0], signal.SIGKILL)
            yield update

    reports, x = rounds(one_by_one, engine, shards, killing)
    due, x_due = rounds(one_by_one, one_by_one.here, Compute())
    assert x == x_due
    for report, other in zip(reports, due, strict=True):
        alike(report, other)
    assert engine.stats.lost >= lost + 2


@pytest.mark.endurance
def test_a_machine_is_lost_with_slices_that_wait(ray_session):
    """The round that waited for them never happened, and is begun again."""
    results, _ = program("slices.py").communicate(timeout=300)
    lost, bits = results.splitlines()[-2:]
    assert lost.startswith("round 1: shards: a slice was lost with its machine; begin")
    assert bits == "the same bits"


def test_a_shard_is_killed(one_by_one, ray_session, tmp_path):
    """Before and during training: the unfinished round is rolled back, and no worker counts as failed."""
    import ray

    engine, lost = one_by_one.there, one_by_one.there.stats.lost

    def kill(there):
        process = ray.get(there._actors[1].__ray_call__.remote(lambda self: os.getpid()))
        os.kill(process, signal.SIGKILL)

    def killing(there, updates, before):
        """Kill a shard before a client's training is asked for, or before its update is folded in."""
        if before:
            kill(there)
        for update in updates:
            if update.client == 1 and not before:
                kill(there)
            yield update

    options = dict(clients=6, lr=0.1)
    with OnRay(cpus=0.25) as there:
        server = Server(
            normed(), "SCAFFOLD", storage=tmp_path / "run", compute=Compute(shards=2, executor=there), **options
        )
        server.round(engine.updates(server.broadcast([0, 1, 5])))
        with pytest.raises(ClusterError, match=r"^clients ."):
            server.round(killing(there, engine.updates(server.broadcast(range(6))), before=True))
        server.round(engine.updates(server.broadcast(range(6))))
        with pytest.raises(ClusterError):
            server.round(killing(there, engine.updates(server.broadcast(range(6))), before=False))
        assert engine.stats.lost == lost
        assert server.round_number == 2
        server.round(engine.updates(server.broadcast(range(6))))
        x = server.x.tobytes()
        server.close()
    one = Server(normed(), "SCAFFOLD", **options)
    for ids in ([0, 1, 5], range(6), range(6)):
        one.round(one_by_one.here.updates(one.broadcast(ids)))
    assert x == one.x.tobytes()


def growth(act):
    """The growth of this process's own memory during a call, in bytes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: vectors take fresh pages, also after tests that freed large ones
    libc.malloc_trim(0)  # otherwise reused free memory would not count
    before, over = private(), Event()
    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch, over)
        try:
            kept = act()
        finally:
            over.set()
        most = watched.result()  # its last look is at the result of the call, too
        del kept
        return most - before


def private():
    return 1024 * int(re.search(r"RssAnon:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])


def watch(over):
    most = private()
    while not over.wait(0.001):
        most = max(most, private())
    return max(most, private())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
def test_no_vector_passes_the_coordinator(shards):
    """Its own memory grows by less than one vector in all rounds, and by one where x is asked for."""

    def module():
        return nn.Linear(2048, 2048)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 2048)).astype(np.float32)
    data = Dataset("noise", x, rng.integers(0, 2048, 16), x[:1], np.zeros(1, np.int64), classes=2048)
    given = dict(batch=4, steps=1, seed=0, together=False, workers=1, cpus=0.25)
    with Ray(module(), data, np.split(np.arange(16), 4), **given) as engine:
        vector = engine.initial.nbytes
        with Server(engine.initial, "FedAvgM", clients=4, lr=0.1, compute=shards) as server:

            def three_rounds():
                for _ in range(3):
                    report = server.round(engine.updates(server.broadcast(range(4))))
                    assert len(report.accepted) == 4

            three_rounds()
            grown, gathered = growth(three_rounds), growth(lambda: server.broadcast([0]).x)
    assert vector > 16 * 10**6
    assert grown < vector / 2
    assert gathered > 0.9 * vector

"""The tasks of a round over a pool of workers on Ray."""

import os

import psutil
import pytest

from fedcore.errors import ClusterError
from fedcore.simulation import ray_engine
from fedcore.simulation.executor import Pool, Session
from fedcore.simulation.ray_engine import Tasks
from tests.simulation.engines.ray.light import light


@pytest.fixture
def workers(ray_session, monkeypatch):
    """Pools by their size."""
    pools = []

    def made(count, **asked):
        pools.append(Pool(ray_session, light(), count, cpus=0.0, **asked))
        return pools[-1]

    monkeypatch.setattr(ray_engine, "MOST_TRIES", 2)
    yield made
    for one in pools:
        one.close()


def tasks(pool, *what):
    return Tasks(pool, len(what), lambda task: (what[task],), lambda task: f"task {task}")


def done(work, count):
    """Wait for the results of so many tasks, in the order in which they come; nobody is asked for ever."""
    found = []
    for _ in range(1000):
        work.start(100)
        found += work.wait()
        if len(found) >= count:
            return [one.result for one in found]
    raise AssertionError("waits without anything to wait for")


def test_a_worker_has_two_tasks_and_no_task_begins_beyond_the_window(workers):
    pool = workers(1)
    pool.complete()
    work = tasks(pool, *range(6))
    work.start(1)
    assert pool.stats.tasks == 1
    work.start(6)
    assert pool.stats.tasks == 2
    assert done(work, 6) == list(range(6))


def test_a_task_that_ends_its_worker_again_and_again(workers):
    pool = workers(1)
    work = tasks(pool, "end", 1)  # the first of all: a result just before the end may be lost with the worker
    with pytest.raises(ClusterError, match=r"^task 0: 2 workers ended while they trained them: The actor"):
        while True:
            work.start(2)
            work.wait()
    assert pool.stats.lost == 2
    assert work._lost == {0: 2}  # and not the task that waited behind it
    work.stop()
    pool.fill()
    assert done(tasks(pool, 7), 1) == [7]


def test_a_worker_whose_tasks_fail_is_free_again(workers):
    pool = workers(1)
    pool.complete()
    for _ in range(3):
        work = tasks(pool, "refuse")
        with pytest.raises(KeyError, match="made up"):
            done(work, 1)
        work.stop()
    assert pool.free(2) is not None
    assert done(tasks(pool, 7), 1) == [7]


def test_tasks_that_somebody_holds_leave_all_workers_to_the_next(workers):
    pool = workers(1)
    pool.complete()
    held = tasks(pool, "stop", 1, 2)
    held.start(3)
    after = tasks(pool, 7, 8)
    assert done(after, 2) == [7, 8]
    for go_on in (lambda: held.start(3), held.wait):
        with pytest.raises(ClusterError, match=r"^updates: they ended"):
            go_on()
    held.stop()  # whenever its holder lets go of it
    after.require_served()


def test_nothing_to_wait_for_is_an_error(workers, caplog):
    pool = workers(1)
    pool.complete()
    work = tasks(pool, 1)
    pool.close()
    work.start(1)
    with pytest.raises(ClusterError, match=r"^workers: all of them were ended: make another"):
        work.wait()
    assert caplog.records == []


def test_an_argument_that_is_lost_costs_no_worker(workers, ray_session):
    """It is asked for again, and it is not the task that is blamed."""
    actor = ray_session.start(light(), cpus=0)
    lost = actor.train.remote("end")
    pool = workers(1)
    (worker,) = pool.complete()
    work, asked = tasks(pool, lost, 1), []
    work._arguments = lambda task: asked.append(task) or ((lost, 1)[task],)
    with pytest.raises(
        ClusterError,
        match=r"^task 0: the vectors that they start from are lost: they were sent 2 times: begin the round again",
    ):
        done(work, 2)
    assert asked.count(0) == 2
    assert (pool.stats.lost, pool.stats.retried) == (0, 1)
    assert pool.complete() == [worker]
    assert done(tasks(pool, 7), 1) == [7]


def test_who_stops_asking_leaves_nothing_running(workers):
    pool = workers(2)
    processes = [psutil.Process(worker.process) for worker in pool.complete()]
    work = tasks(pool, "stop", "stop", 2)
    work.start(3)
    work.stop()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    pool.fill()
    assert done(tasks(pool, 7), 1) == [7]


def test_workers_without_a_place_are_told_of_once_and_the_others_work(workers, monkeypatch, caplog):
    monkeypatch.setattr(Session, "patience", 0.0)
    some = workers(2, gpus=0.75)
    assert sorted(done(tasks(some, 1, 2, 3), 3)) == [1, 2, 3]
    (told,) = [record.getMessage() for record in caplog.records if record.name == "fedcore.simulation"]
    assert "of 2 workers have not begun after 0 s: each asks for 0 CPUs and 0.75 GPUs, and there are 6 CPUs (" in told
    assert " free) and 1 GPUs (" in told


def test_four_workers_share_a_gpu(ray_session):
    """A pretended one."""

    class Sees:
        def devices(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [ray_session.start(Sees, cpus=0, gpus=0.25) for _ in range(4)]
    assert [ray_session.result(actor.devices.remote()) for actor in actors] == ["0"] * 4
    for actor in actors:
        ray_session.kill(actor)

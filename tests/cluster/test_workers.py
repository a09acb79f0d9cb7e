"""The contract of executors, pools and tasks, on this machine's processes and on Ray: results, errors, lost workers."""

import os
import threading

import psutil
import pytest

from fedcore.cluster import workers
from fedcore.cluster.workers import LostError, Pool, Processes
from fedcore.errors import ClusterError, FedcoreError
from fedcore.sim import ray_engine
from fedcore.sim.ray_engine import Tasks
from fedcore.testing import ExecutorContract
from tests.kit import python
from tests.sim.engines.ray.light import Light, light


@pytest.fixture(params=["processes", "ray"])
def backend(request):
    """An executor, and a class of workers that it can start."""
    if request.param == "processes":
        return Processes(), Light
    return request.getfixturevalue("ray_session"), light()


@pytest.fixture
def make_pool(backend, monkeypatch):
    """Make pools of some workers on the executor; two lost workers in a row are an error."""
    pools = []

    def make(count, *arguments, **options):
        pools.append(Pool(*backend, count, **{"cpus": 0.0, "arguments": arguments} | options))
        return pools[-1]

    monkeypatch.setattr(workers, "MOST_TRIES", 2)
    monkeypatch.setattr(ray_engine, "MOST_TRIES", 2)
    yield make
    for pool in pools:
        pool.close()


class TestProcesses(ExecutorContract):
    pass


class PathError(Exception):
    def __init__(self, path, why):
        super().__init__(f"{path}: {why}")


class Unsent:
    """A worker whose errors and result cannot be pickled, or not be read again."""

    def run(self, what):
        if what == "result":
            return threading.Lock()
        raise PathError("a.png", "broken") if what == "unread" else KeyError(threading.Lock())


def test_what_cannot_be_sent_becomes_an_error_and_the_worker_continues():
    executor = Processes()
    worker = executor.start(Unsent)
    due = {"unread": "PathError: a.png: broken", "unsent": "KeyError: <unlocked", "result": "pickle"}
    for what, text in due.items():
        with pytest.raises((FedcoreError, TypeError), match=text):
            executor.result(executor.submit(worker, "run", what))
    executor.kill(worker)


class TestRay(ExecutorContract):
    @pytest.fixture(autouse=True)
    def set_session(self, ray_session):
        self.session = ray_session

    def make_executor(self):
        return self.session


def make_tasks(pool, *words):
    return Tasks(pool, len(words), lambda task: (words[task],), lambda task: f"task {task}")


def finish(tasks, count):
    """The results of some tasks in completion order."""
    done = []
    for _ in range(1000):
        tasks.start(100)
        done += tasks.wait()
        if len(done) >= count:
            return [one.result for one in done]
    raise AssertionError("tasks.wait() returns without waiting")


def test_the_worker_with_the_fewest_tasks_is_free(make_pool):
    pool = make_pool(2)
    one, two = pool.complete()
    one.tasks.append(0)
    assert pool.free() is two
    two.tasks += [1, 2]
    assert pool.free() is None
    assert pool.free(2) is one


def test_tasks_raise_the_error_of_a_method_and_the_worker_continues(make_pool):
    pool = make_pool(1)
    tasks = make_tasks(pool, "refuse")
    with pytest.raises(KeyError, match="made up"):
        finish(tasks, 1)
    tasks.stop()
    assert finish(make_tasks(pool, 7), 1) == [7]
    assert (pool.stats.lost, pool.stats.waited > 0) == (0, True)


def test_fill_starts_at_most_as_many_workers_as_needed(make_pool):
    pool = make_pool(2)
    for worker in pool.complete():
        pool.drop(worker)
    for most, count in ((1, 1), (None, 2)):
        pool.fill(most)
        assert len(pool.complete()) == count


def test_a_closed_pool_waits_for_no_task(make_pool, caplog):
    pool = make_pool(2)
    processes = [psutil.Process(worker.process) for worker in pool.complete()]
    pool.submit(pool.free(), "train", "stop")
    tasks = make_tasks(pool, 1)
    pool.close()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    tasks.start(1)
    with pytest.raises(ClusterError, match=r"^workers: all workers have ended"):
        tasks.wait()
    assert caplog.records == []


def test_a_worker_has_two_tasks_and_no_task_starts_beyond_the_window(make_pool):
    pool = make_pool(1)
    pool.complete()
    tasks = make_tasks(pool, *range(6))
    for below, count in ((1, 1), (6, 2)):
        tasks.start(below)
        assert pool.stats.tasks == count
    assert finish(tasks, 6) == list(range(6))
    assert [done.result for done in make_tasks(pool, 5, 4, 3).in_order(2)] == [5, 4, 3]
    assert sorted(done.result for done in make_tasks(pool, 5, 4, 3).as_completed()) == [3, 4, 5]


def test_a_task_that_ends_its_worker_repeatedly_is_an_error(make_pool):
    pool = make_pool(1)
    tasks = make_tasks(pool, "end", 1)  # First, since a result just before the end may be lost with the worker.
    with pytest.raises(ClusterError, match=r"^task 0: 2 workers ended"):
        while True:
            tasks.start(2)
            tasks.wait()
    assert pool.stats.lost == 2
    assert tasks._lost == {0: 2}  # The second task had not started.
    tasks.stop()
    pool.fill()
    assert finish(make_tasks(pool, 7), 1) == [7]


def test_newer_tasks_stop_older_ones_and_their_workers(make_pool):
    pool = make_pool(1)
    (process,) = [psutil.Process(worker.process) for worker in pool.complete()]
    older = make_tasks(pool, "stop", 1, 2)
    older.start(3)
    newer = make_tasks(pool, 7, 8)
    assert psutil.wait_procs([process], timeout=60)[1] == []
    assert finish(newer, 2) == [7, 8]
    for use in (lambda: older.start(3), older.wait):
        with pytest.raises(ClusterError, match=r"^updates\b"):
            use()
    older.stop()
    newer.require_current()


def test_the_error_of_a_lost_process_has_its_exit_status():
    processes = Processes()
    worker = processes.start(Light)
    assert processes.result(processes.submit(worker, "train", 1)) == 1
    call = processes.submit(worker, "train", "stop")
    worker.process.kill()
    for lost in (call, processes.submit(worker, "train", 1)):
        with pytest.raises(LostError, match=r"process ended with exit status -9$"):
            processes.result(lost)
    processes.kill(worker)


def test_slow_processes_are_not_logged(monkeypatch, caplog):
    monkeypatch.setattr(workers, "PATIENCE", 0.0)
    pool = Pool(Processes(), Light, 1)
    assert len(pool.complete()) == 1
    assert caplog.records == []
    pool.close()


UNGUARDED = """
from fedcore.cluster.workers import Pool, Processes
from tests.sim.engines.ray.light import Light

Pool(Processes(), Light, 1).complete()
"""


def test_a_program_without_a_main_guard_gets_advice(tmp_path):
    program = tmp_path / "unguarded.py"
    program.write_text(UNGUARDED)
    done = python(program, status=1)
    assert "ClusterError: workers: 4 workers ended while they started: " in done.stderr
    assert "ended with exit status 1 " in done.stderr
    assert 'call fedcore under if __name__ == "__main__", or use jobs=0' in done.stderr


def test_a_lost_argument_costs_no_worker(ray_session, monkeypatch):
    """The task is repeated with its arguments computed again, and its worker is not blamed."""
    monkeypatch.setattr(ray_engine, "MOST_TRIES", 2)
    pool = Pool(ray_session, light(), 1, cpus=0)
    lost = ray_session.submit(ray_session.start(light(), cpus=0), "train", "end")
    (worker,) = pool.complete()
    arguments, calls = (lost, 1), []
    tasks = Tasks(pool, 2, lambda task: calls.append(task) or (arguments[task],), lambda task: f"task {task}")
    with pytest.raises(ClusterError, match=r"^task 0: .* failed 2 times"):
        finish(tasks, 2)
    assert calls.count(0) == 2
    assert (pool.stats.lost, pool.stats.retried) == (0, 1)
    assert pool.complete() == [worker]
    assert finish(make_tasks(pool, 7), 1) == [7]
    pool.close()


def test_workers_without_resources_are_logged_once_and_the_others_work(ray_session, monkeypatch, caplog):
    monkeypatch.setattr(workers, "PATIENCE", 0.0)
    pool = Pool(ray_session, light(), 2, cpus=0.0, gpus=0.75)
    assert sorted(finish(make_tasks(pool, 1, 2, 3), 3)) == [1, 2, 3]
    (text,) = [record.getMessage() for record in caplog.records if record.name == "fedcore.sim"]
    assert "each requests 0 CPUs and 0.75 GPUs, and the executor has 6 CPUs (" in text
    assert " free) and 1 GPUs (" in text
    pool.close()


def test_four_workers_share_a_simulated_gpu(ray_session):
    class Device:
        def number(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [ray_session.start(Device, cpus=0, gpus=0.25) for _ in range(4)]
    assert [ray_session.result(ray_session.submit(actor, "number")) for actor in actors] == ["0"] * 4
    for actor in actors:
        ray_session.kill(actor)

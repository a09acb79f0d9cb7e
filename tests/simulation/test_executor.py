"""The contract of executors and their pools: results, errors, and lost workers, on this machine and on Ray."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedcore.errors import ClusterError
from fedcore.simulation import executor
from fedcore.simulation.executor import LostError, Pool, Processes
from tests.simulation.engines.ray.light import Light, light


@pytest.fixture(params=["processes", "ray"])
def place(request):
    """An executor, and a class of workers that it can start."""
    if request.param == "processes":
        return Processes(), Light
    return request.getfixturevalue("ray_session"), light()


@pytest.fixture
def pools(place, monkeypatch):
    """Pools of so many workers on one of the executors."""
    made = []

    def make(count, *arguments):
        made.append(Pool(*place, count, cpus=0, arguments=arguments))
        return made[-1]

    monkeypatch.setattr(executor, "MOST_TRIES", 2)
    yield make
    for pool in made:
        pool.close()


def finished(pool, running):
    """The results of calls, in the order in which they come."""
    found = []
    while running:
        for reference in pool.wait(running):
            running.remove(reference)
            found.append(pool.result(reference))
    return found


def test_results_come_from_processes_of_their_own(pools):
    pool = pools(2)
    workers = pool.complete()
    processes = {worker.process for worker in workers}
    assert len(processes - {os.getpid()}) == 2
    assert sorted(finished(pool, [pool.submit(worker, "train", n) for n, worker in enumerate(workers)])) == [0, 1]
    assert finished(pool, [pool.submit(workers[0], "train", n) for n in range(5)]) == list(range(5))
    assert {worker.process for worker in pool.complete()} == processes


def test_an_error_is_raised_as_it_is_and_its_worker_goes_on(pools):
    pool = pools(1)
    (worker,) = pool.complete()
    for _ in range(2):
        with pytest.raises(KeyError, match="made up") as raised:
            finished(pool, [pool.submit(worker, "train", "refuse")])
        assert type(raised.value) is KeyError
    assert finished(pool, [pool.submit(worker, "train", 7)]) == [7]
    assert pool.stats.lost == 0


def test_a_lost_worker_is_replaced(pools):
    pool = pools(2)
    workers = pool.complete()
    lost, other = workers
    with pytest.raises(LostError) as raised:
        finished(pool, [pool.submit(lost, "train", "end")])
    for _ in range(2):  # each of its tasks reports the loss
        pool.lose(lost, raised.value)
    assert pool.stats.lost == 1
    pool.fill()
    assert other in pool.complete()
    new = next(worker for worker in pool.complete() if worker is not other)
    assert new.process not in {worker.process for worker in workers}
    assert finished(pool, [pool.submit(new, "train", 7)]) == [7]


def test_the_message_on_a_lost_process_has_its_exit_status():
    processes = Processes()
    worker = processes.start(Light)
    assert processes.result(processes.submit(worker, "train", 1)) == 1
    call = processes.submit(worker, "train", "stop")
    worker.process.kill()
    with pytest.raises(LostError, match=r"^its process ended with exit status -9$"):
        processes.result(call)
    with pytest.raises(LostError, match=r"exit status -9$"):  # also of a call that comes too late
        processes.result(processes.submit(worker, "train", 1))
    processes.kill(worker)


def test_workers_that_end_before_they_begin_are_an_error(pools):
    pool = pools(1, "end")
    for _ in range(2):  # a caller that goes on has as many tries again
        with pytest.raises(ClusterError, match=r"^workers: 2 ended before they had begun"):
            for _ in range(4):
                pool.fill()
                pool.wait(())


def test_fill_starts_no_more_than_are_needed(pools):
    pool = pools(2)
    for worker in pool.complete():
        pool.drop(worker)
    pool.fill(1)
    assert len(pool.complete()) == 1
    pool.fill()
    assert len(pool.complete()) == 2


def test_the_worker_with_the_fewest_tasks_is_free(pools):
    pool = pools(2)
    one, two = pool.complete()
    one.tasks.append(0)
    assert pool.free() is two
    two.tasks += [1, 2]
    assert pool.free() is None
    assert pool.free(2) is one


def test_a_closed_pool_has_no_processes_and_waits_for_nothing(pools, caplog):
    pool = pools(2)
    processes = [psutil.Process(worker.process) for worker in pool.complete()]
    call = pool.submit(pool.free(), "train", "stop")  # what it does is not waited for
    pool.close()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    with pytest.raises(ClusterError, match=r"^workers: all of them were ended: make another"):
        pool.wait(())
    assert call is not None
    assert caplog.records == []


UNGUARDED = """
from fedcore.simulation.executor import Pool, Processes
from tests.simulation.engines.ray.light import Light

Pool(Processes(), Light, 1).complete()
"""


def test_a_program_that_starts_workers_when_it_is_imported_is_told_so(tmp_path):
    program = tmp_path / "unguarded.py"
    program.write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ClusterError: workers: 4 ended before they had begun: its process ended with exit status 1" in done.stderr
    assert 'call fedcore below if __name__ == "__main__", or with jobs=0' in done.stderr

"""The contract of executors, which run the workers of a simulation."""

import os
from typing import Any

from fedcore.cluster.workers import Executor, LostError, Pool, Processes
from fedcore.errors import ClusterError
from fedcore.testing.contract import Contract, raises, require, same


class Worker:
    """A worker whose task is a number, which it returns squared, or a word."""

    def prepare(self, *ends: bool) -> int:
        """Return the process id, or end the process."""
        if ends:
            os._exit(3)
        return os.getpid()

    def train(self, task: Any) -> Any:
        """Return the square of a number; "refuse" raises, "end" ends the process, and "stop" never returns."""
        if task == "end":
            os._exit(3)
        if task == "refuse":
            raise KeyError("made up")
        if task == "stop":
            os.read(os.pipe()[0], 1)
        return task * task


class ExecutorContract(Contract):
    """Your executor starts workers in processes of their own, and calls their methods, as ``Processes`` does.

    Override ``make_executor``. An engine of your own uses the executor in a ``Pool``; no option of fedcore takes it.
    The promises:

    * a worker runs its calls in order, one at a time; the results do not depend on the number of workers;
    * an error of a task is raised unchanged, by its class and message, and the worker continues;
    * a worker that ends is a LostError, which a pool replaces; workers that end at their start are a ClusterError;
    * a closed pool leaves no process.
    """

    worker: type = Worker

    def make_executor(self) -> Executor:
        """Return the executor. Default: ``Processes()``."""
        return Processes()

    def pool(self, workers: int, *arguments: Any) -> Pool:
        """Return a pool of workers on the executor."""
        return Pool(self.make_executor(), self.worker, workers, cpus=0.0, arguments=arguments)

    def test_results_do_not_depend_on_the_workers(self) -> None:
        """Any number of workers gives the results of one, each in its own process (docs/on-ray.md)."""
        for count in (1, 3):
            pool = self.pool(count)
            workers = pool.complete()
            processes = {worker.process for worker in workers}
            same(len(processes - {os.getpid()}), count, "processes")
            tasks = {pool.submit(workers[task % count], "train", task): task for task in range(7)}
            running, results = list(tasks), {}
            while running:
                for reference in pool.wait(running):
                    running.remove(reference)
                    results[tasks[reference]] = pool.result(reference)
            same(results, {task: task * task for task in range(7)}, f"results of {count} workers")
            same({worker.process for worker in pool.complete()}, processes, "processes after the tasks")
            calls = [pool.submit(workers[0], "train", task) for task in range(5)]
            same([pool.result(call) for call in calls], [0, 1, 4, 9, 16], "results of one worker in order")
            pool.close()

    def test_an_error_of_a_task_is_raised_unchanged(self) -> None:
        """An error of a task has its class and message, and the worker continues (``Executor.result``)."""
        pool = self.pool(1)
        (worker,) = pool.complete()
        for _ in range(2):
            with raises(KeyError, "made up"):
                pool.result(pool.submit(worker, "train", "refuse"))
        same(pool.result(pool.submit(worker, "train", 3)), 9, "result after an error")
        same(pool.stats.lost, 0, "lost workers")
        pool.close()

    def test_a_lost_worker_is_replaced(self) -> None:
        """A worker that ends is a LostError, and a pool replaces it, once (``Pool.lose``)."""
        pool = self.pool(2)
        workers = lost, other = pool.complete()
        with raises(LostError):
            pool.result(pool.submit(lost, "train", "end"))
        for _ in range(2):  # each task of the worker reports the loss
            pool.lose(lost, LostError("the worker ended"))
        same(pool.stats.lost, 1, "lost workers")
        pool.fill(1)
        (new,) = [worker for worker in pool.complete() if worker is not other]
        require(new.process not in {worker.process for worker in workers}, "a new process", new.process)
        same(pool.result(pool.submit(new, "train", 7)), 49, "result of the new worker")
        pool.close()

    def test_workers_that_end_at_their_start(self) -> None:
        """Workers that end while they start are a ClusterError, and not an endless loop (``Pool``)."""
        pool = self.pool(1, True)
        with raises(ClusterError, "^workers: .* ended while they started"):
            for _ in range(9):
                pool.fill()
                pool.wait(())
        pool.close()

    def test_a_closed_pool_has_no_processes(self) -> None:
        """``kill`` ends a worker at once, also one that is busy (``Executor.kill``)."""
        pool = self.pool(2)
        workers = pool.complete()
        calls = [pool.submit(worker, "train", "stop") for worker in workers]
        pool.close()
        for call in calls:
            with raises(LostError):
                pool.result(call)
        with raises(ClusterError, "^workers: all workers have ended"):
            pool.wait(())

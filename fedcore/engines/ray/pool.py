"""Workers on Ray: as many as were asked for, with a new one in the place of each that is lost."""

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedcore.errors import ClusterError
from fedcore.ray_session import ArgumentLostError, LostError, Session

LOGGER = logging.getLogger("fedcore.engines")
MOST_TRIES = 4
"""Workers that a task may bring down, or that may end before they begin, before it is an error: a machine that goes
takes one, what is wrong with the task itself takes all of them."""
PATIENCE = 10.0
"""Seconds until it is said that a worker has no place."""


@dataclass(eq=False)
class Worker:
    """A process, and the tasks that it has been given and has not done, in their order.

    Attributes:
        since: when it was asked for.
        process: its number, on its machine; None while it is not prepared.
        ended: whether the task is known that it was at when it ended.
    """

    actor: Any
    since: float
    tasks: list[int] = field(default_factory=list)
    process: int | None = None
    ended: bool = False


@dataclass
class Stats:
    """The work of a pool so far.

    Attributes:
        tasks: given to workers, again ones counted.
        retried: given again, since their worker was lost, or what they start from could not be read there.
        lost: workers.
        waited: seconds for results.
    """

    tasks: int = 0
    retried: int = 0
    lost: int = 0
    waited: float = 0.0


class Pool:
    """Workers of one kind. One counts from the moment when it is prepared, also in the middle of a round.

    Args:
        kind: the class of the workers' objects; ``prepare`` returns the number of their process, ``train`` does a task.
        workers: how many.
        cpus, gpus: what each asks for.
        told: the arguments of ``prepare``.
    """

    def __init__(
        self, session: Session, kind: type, workers: int, *, cpus: float, gpus: float, told: tuple[Any, ...]
    ) -> None:
        self._session, self._kind, self._told = session, kind, told
        self.size, self._cpus, self._gpus = workers, cpus, gpus
        self._there: list[Worker] = []
        self._coming: dict[Any, Worker] = {}
        self._ended_early = 0
        self._said = False
        self._served: Tasks | None = None
        self.stats = Stats()
        self.fill()

    def serve(self, tasks: "Tasks") -> None:
        """Have the workers for these tasks alone, all of them: those who were at other tasks are ended.

        Whoever had begun those may still hold them and never read on, as an exception holds what was open when it was
        raised; their workers would be free for nobody.
        """
        if self._served is not None:
            self._served.stop()
        self.fill()
        self._served = tasks

    def serves(self, tasks: "Tasks") -> bool:
        """Tell whether the workers are these tasks' still."""
        return self._served is tasks

    def forget(self, tasks: "Tasks") -> None:
        """Let go of tasks, if they are the ones that the workers are for."""
        if self._served is tasks:
            self._served = None

    def fill(self) -> None:
        """Ask for the workers that are missing."""
        for _ in range(self.size - len(self._there) - len(self._coming)):
            actor = self._session.actor(self._kind, cpus=self._cpus, gpus=self._gpus)
            self._coming[actor.prepare.remote(*self._told)] = Worker(actor, time.monotonic())

    def free(self, most: int = 2) -> Worker | None:
        """The worker with the least to do, if it has less than so many tasks: a second one hides the way there."""
        least = min(self._there, key=lambda worker: len(worker.tasks), default=None)
        return least if least is not None and len(least.tasks) < most else None

    def drop(self, worker: Worker) -> None:
        """End a worker, if it is still there; ``fill`` asks for another one."""
        if worker in self._there:
            self._there.remove(worker)
            self._session.kill(worker.actor)

    def lose(self, worker: Worker, error: LostError) -> None:
        """Take note that a worker has ended, by whichever of its tasks says so first."""
        if worker in self._there:
            self.stats.lost += 1
            LOGGER.info("a worker is lost, another one takes its place: %s", error)
            self.drop(worker)

    def ready(self, running: Collection[Any]) -> list[Any]:
        """Wait for results of what is running, or for a worker that comes; it is taken in.

        Raises:
            ClusterError: there is neither; workers end before they begin; or the connection is not open.
        """
        if not running and not self._coming:
            raise ClusterError(
                "workers: expected one that works or comes, got none, since they were ended: make another engine"
            )
        begun = time.monotonic()
        oldest = min((worker.since for worker in self._coming.values()), default=None)
        patience = None if oldest is None or self._said else max(0.0, oldest + PATIENCE - begun)
        found = self._session.ready([*running, *self._coming], patience)
        self.stats.waited += time.monotonic() - begun
        if not found:
            self._say_who_waits()
        for reference in found:
            if reference in self._coming:
                self._join(reference)
        return [reference for reference in found if reference in running]

    def train(self, worker: Worker, returns: int, arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Have a worker do a task; references to the first object that it returns, and to the others."""
        self._session.require_open()
        train = worker.actor.train
        if returns == 1:
            return train.remote(*arguments), []
        first, *others = train.options(num_returns=returns).remote(*arguments)
        return first, others

    def result(self, reference: Any, others: Sequence[Any] = ()) -> Any:
        """The value that a worker returned, or the first of several: ``Session.result``."""
        try:
            return self._session.result(reference)
        except Exception as error:
            for other in () if type(error) is LostError else others:
                with suppress(Exception):  # the same one: Ray prints it for each reference that nobody has read
                    self._session.result(other)
            raise

    def complete(self) -> list[Worker]:
        """Wait until all workers are there, as far as is known."""
        while self._coming:
            self.ready(())
        return list(self._there)

    def close(self) -> None:
        """End all workers."""
        for worker in [*self._there, *self._coming.values()]:
            self._session.kill(worker.actor)
        self._there.clear()
        self._coming.clear()

    def _join(self, reference: Any) -> None:
        worker = self._coming.pop(reference)
        try:
            worker.process = self._session.result(reference)
        except LostError as error:
            self._ended_early += 1
            if self._ended_early == MOST_TRIES:
                self._ended_early = 0  # who goes on has as many again, and not for ever
                raise ClusterError(
                    f"workers: {MOST_TRIES} ended before they had begun, one after another: {error}; "
                    "see their machines' memory, and Ray's logs"
                ) from None
            self.stats.lost += 1
            self.fill()
            return
        self._ended_early = 0
        self._there.append(worker)
        if not self._coming:
            self._said = False

    def _say_who_waits(self) -> None:
        self._said = True
        LOGGER.warning(
            "%d of %d workers have not begun after %.0f s: each asks for %g CPUs and %g GPUs, and Ray has %s; they join"
            " when there is room, or ask for less",
            len(self._coming),
            self.size,
            PATIENCE,
            self._cpus,
            self._gpus,
            self._session.room(),
        )


class Done(NamedTuple):
    """A task that has been done.

    Attributes:
        result: what it returned; the first of several.
        references: to the others, which are read by nobody here.
    """

    task: int
    result: Any
    references: list[Any]


class Tasks:
    """The tasks of one round: started in their order, and again where a worker is lost.

    A pool's workers are for the last ones that were made; those before end there.

    Args:
        count: tasks are numbered from 0.
        arguments: of ``train``, for a task; asked for again where it is begun again.
        name: what messages call a task.
        returns: how many objects a task returns.
    """

    def __init__(
        self,
        pool: Pool,
        count: int,
        arguments: Callable[[int], tuple[Any, ...]],
        name: Callable[[int], str],
        returns: Callable[[int], int] = lambda task: 1,
    ) -> None:
        self._pool, self._arguments, self._name, self._returns = pool, arguments, name, returns
        self._waiting = list(range(count))  # a heap: who is begun again goes to the front
        self._running: dict[Any, tuple[int, Worker, list[Any]]] = {}
        self._brought_down: Counter[int] = Counter()
        self._unread: Counter[int] = Counter()
        pool.serve(self)

    def require_served(self) -> None:
        """Refuse to go on where the workers are no longer for these tasks.

        Raises:
            ClusterError: they are for others, that were made since; or these were stopped.
        """
        if not self._pool.serves(self):
            raise ClusterError(
                "updates: expected those of the engine's last call, got others, which ended when the last was begun: "
                "read the last, or have another engine for two at once"
            )

    def start(self, below: int) -> None:
        """Give workers what waits, of the tasks with numbers below that, as long as one is free.

        Raises:
            ClusterError: ``require_served``'s; or the connection is not open.
        """
        self.require_served()
        while self._waiting and self._waiting[0] < below and (worker := self._pool.free()) is not None:
            task = heapq.heappop(self._waiting)
            first, others = self._pool.train(worker, self._returns(task), self._arguments(task))
            self._running[first] = task, worker, others
            worker.tasks.append(task)
            self._pool.stats.tasks += 1

    def wait(self) -> list[Done]:
        """Wait for tasks that are done, and return them: none, perhaps, where workers came or went.

        Raises:
            ClusterError: a task has brought down ``MOST_TRIES`` workers; what a shard was to send it is lost, or what
                was put here could not be read as often; there is nothing to wait for; or ``require_served``'s.
            Exception: what a task raised.
        """
        self.require_served()
        done = []
        for reference in self._pool.ready(self._running):
            task, worker, others = self._running.pop(reference)
            try:
                done.append(Done(task, self._pool.result(reference, others), others))
            except ArgumentLostError as error:
                self._unread[task] += 1
                if others or self._unread[task] == MOST_TRIES:  # slices; what was put here another worker can read
                    how = "whose shard or machine is lost" if others else f"which was asked for {MOST_TRIES} times"
                    raise ClusterError(
                        f"{self._name(task)}: expected the vectors that they start from, got none of one, {how}: "
                        f"begin the round again: {error}"
                    ) from None
                self._pool.stats.retried += 1
                heapq.heappush(self._waiting, task)  # the worker is there, and the task has done nothing to it
            except LostError as error:
                self._again(task, worker, error)
            finally:
                worker.tasks.remove(task)
        return done

    def stop(self) -> None:
        """End the workers that have something to do: nobody waits for it any more."""
        for _, worker, _ in self._running.values():
            self._pool.drop(worker)
        self._running.clear()
        self._pool.forget(self)

    def _again(self, task: int, worker: Worker, error: LostError) -> None:
        heapq.heappush(self._waiting, task)
        self._pool.lose(worker, error)
        if worker.tasks[0] == task and not worker.ended:  # the one that it was at; those behind it had not begun
            worker.ended = True
            self._brought_down[task] += 1
            if self._brought_down[task] == MOST_TRIES:
                raise ClusterError(
                    f"{self._name(task)}: the workers ended {MOST_TRIES} times while they trained there: {error}; "
                    "see their machines' memory, and Ray's logs"
                ) from None
        self._pool.stats.retried += 1
        self._pool.fill()

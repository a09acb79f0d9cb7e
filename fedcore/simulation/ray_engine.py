"""Client work in worker processes on Ray, on one machine or many."""

import heapq
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedcore.arguments import real, whole
from fedcore.arrays import F32
from fedcore.errors import ClusterError, RangeError
from fedcore.profiling import timed
from fedcore.registries import load_module
from fedcore.runtime import hide_warnings_of_others, set_threads
from fedcore.server import Broadcast, Update
from fedcore.server.instructions import Instructions
from fedcore.server.update import SentSlices, Slices, digest_of
from fedcore.simulation.data import Dataset
from fedcore.simulation.engines import OverEngine, Plan, standing
from fedcore.simulation.executor import MOST_TRIES, ArgumentLostError, LostError, Pool, Session, Stats, Worker
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.participation import Active
from fedcore.store.registry import ClientId

TOGETHER = 64
"""The most clients of a task if they are trained together: they share a call, and the cost of a task."""
Ranges = Sequence[tuple[int, int, int]]
"""(start, stop, end) of each shard: see ``SentSlices``."""


class Ray(OverEngine):
    """The engine that trains the clients of a round in workers on Ray, with the bits of ``InProcess``.

    The module, the data set and the parts are sent once, and lie once on each machine; x is sent once a round. A lost
    worker or machine is replaced, and its clients are trained again. A worker that starts later gets work at once, also
    in the middle of a round. Ray's memory, not this process's, holds updates that are not read yet. A task costs some
    milliseconds (docs/on-ray.md): it pays for models of LeNet's size and more, never for small perceptrons.

    A context manager.

    Args:
        module, dataset, parts, batch, epochs, steps, seed, options, together, threads: as for ``InProcess``; threads
            are those of a worker, and the module is taken over.
        workers: processes.
        cpus: cores that each asks for; a fraction, perhaps.
        gpus: GPUs that each asks for; four workers with 0.25 share one. ``device="cuda"`` needs it, since Ray shows a
            worker only its own GPU.
        device: "cpu", or "cuda": workers train on the GPU that Ray gives each, and this process evaluates on its own.
        group: the most clients of a task. Default: 64 if they are trained together, else 1. A small cohort is divided
            further, so that each worker has two tasks.
        ahead: tasks for each worker that may be done before their turn, or be on their way. More of them hide slow
            clients; each holds 4 n bytes for each of its clients.
        ordered: False yields updates in completion order: the bits of a plain sum then depend on chance.
        address: as for ``Session``.
        imports: modules, or paths of .py files, that each worker imports first, for the class of the module or of a
            local rule. Other machines must have them too.

    Attributes:
        initial: float32[n], a copy of the module's initial values: x_0.
        ordered: as above.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: there is no cluster at the address.
        RangeError, DtypeError, ArrayError, DeviceError: as for ``InProcess``; workers or a size are out of range; or
            workers on GPUs ask for none.

    Determinism: that of ``InProcess`` on one thread of torch's, for any number of workers and losses. On GPUs clients
        that are trained together form groups that depend on the number of workers, which may change bits.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        parts: Sequence[npt.NDArray[np.int64]],
        *,
        workers: int = 2,
        cpus: float = 1.0,
        gpus: float = 0.0,
        group: int | None = None,
        ahead: int = 4,
        ordered: bool = True,
        address: str | None = None,
        imports: Sequence[str] = (),
        device: str = "cpu",
        **options: Any,
    ) -> None:
        workers, self._ahead = whole("workers", workers, 1), whole("ahead", ahead, 1)
        cpus, gpus = real("cpus", cpus, "[0, inf)"), real("gpus", gpus, "[0, inf)")
        if device not in ("cpu", "cuda"):
            raise RangeError(f"device={device!r}: must be 'cpu' or 'cuda', the GPU that Ray gives a worker")
        if device != "cpu" and not gpus:
            raise RangeError(f"gpus=0: workers on {device!r} need a share of one: 1, or 0.25 for four workers")
        options["device"] = device
        self._session = Session(address, cpus=workers * cpus)
        try:
            pickled = self._session.pickled(module)  # before it is taken over
            self._here = InProcess(module, dataset, parts, **options)
            super().__init__(self._here)
            self.initial = self._here.initial
            self.ordered = ordered
            self._group = (TOGETHER if self.together else 1) if group is None else whole("group", group, 1)
            none = slice(0, 0)
            training = replace(
                dataset, test_x=dataset.test_x[none], test_y=dataset.test_y[none], parts=None, test_parts=None
            )
            shared = tuple(map(self._session.put, (tuple(imports), pickled, training, list(parts), options)))
            self._pool = Pool(self._session, Trainer, workers, cpus=cpus, gpus=gpus, arguments=shared)
        except BaseException:
            self._session.close()
            raise

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast in the workers, some ahead of the one that is read.

        Args:
            broadcast, active: as for ``InProcess.updates``.

        Yields:
            An ``Update`` for each id, in their order if ``ordered``; ``y`` is read-only, has memory of its own, and
            ``keep`` is true. If the broadcast has slices, ``y`` and ``control`` are ``Slices`` of references, with
            the workers' digests, and no vector comes to this process.

        Raises: what ``InProcess.updates`` does, and what a client's training raises; and
            ClusterError: a client's training ended one worker after another; a shard whose slices it starts from is
                lost; the engine is closed; or other updates or gradients of this engine were begun before all of these
                were read, which ended these.

        Cost: x, x_prev and the offset are copied once each to Ray, or an offset for each client if it has its own,
            and y back; with slices, from the shards to a worker and back, 4 n bytes more in each worker, and one
            reading of y for its digests.
        """
        here = broadcast.on_host()
        yield from timed("train", self._updates(here, self._here.parts.plan(here, active)))

    def _updates(self, broadcast: Broadcast, plan: Plan) -> Iterator[Update]:
        if not plan.clients:
            return
        spans = self._spans(len(plan.clients))
        shards = 0 if broadcast.slices is None else len(broadcast.slices.ranges)
        tasks = Tasks(
            self._pool,
            len(spans),
            self._arguments(broadcast, plan, spans),
            lambda task: f"clients {', '.join(str(plan.clients[place]) for place in spans[task])}",
            lambda task: 1 + len(spans[task]) * shards * (1 + broadcast.second),
        )
        try:
            for done in self._in_order(tasks, len(spans)) if self.ordered else _as_done(tasks, len(spans)):
                for update in self._read(plan, spans[done.task], done, shards):
                    tasks.require_served()
                    yield update
        finally:
            tasks.stop()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, Any]:
        """The gradients of ``InProcess.gradients``, made by the workers; ``Slices`` for a server in shards on Ray."""
        still = standing(broadcast.on_host())
        plan = self._here.parts.plan(still, None, minibatches=minibatches)
        whole = still.slices is None
        return {u.client: np.array(u.control) if whole else u.control for u in self._updates(still, plan)}

    @property
    def waited(self) -> float:
        """Seconds so far of waiting for workers: those of ``stats``."""
        return self.stats.waited

    @property
    def stats(self) -> Stats:
        """The numbers of tasks, repeated tasks and lost workers so far, and the seconds of waiting."""
        return self._pool.stats

    def processes(self) -> list[int | None]:
        """The number of each worker's process, on its machine, once all have started."""
        return [worker.process for worker in self._pool.complete()]

    def close(self) -> None:
        """End the workers, and a Ray that was started for them and that nothing else uses."""
        self._pool.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spans(self, clients: int) -> list[range]:
        """The tasks, as the places of their clients: two for each worker in a small cohort."""
        group = max(1, min(self._group, -(-clients // (2 * self._pool.size))))
        return [range(start, min(start + group, clients)) for start in range(0, clients, group)]

    def _sent(self, broadcast: Broadcast) -> SentSlices:
        """References to the vectors of a broadcast: those of the shards, or of one server's, put here once."""
        if broadcast.slices is not None:
            return broadcast.slices
        put, x, x_prev = self._session.put, broadcast.x, broadcast.x_prev
        return SentSlices((), [put(x)], None if x_prev is None else [put(x_prev)], lambda one: [broadcast.offset(one)])

    def _arguments(self, broadcast: Broadcast, plan: Plan, spans: Sequence[range]) -> Callable[[int], tuple[Any, ...]]:
        """The arguments of ``Trainer.train`` for a task; vectors that tasks share are sent once."""
        sent, ranges = self._sent(broadcast), None if broadcast.slices is None else tuple(broadcast.slices.ranges)
        each = broadcast.has_offset and bool(broadcast.direction.from_row)
        shared = []
        if broadcast.has_offset and not each:
            parts = sent.offset(plan.clients[0])
            shared = [list(parts) if ranges else [self._session.put(part) for part in parts]]
        common = [sent.x] if sent.x_prev is None else [sent.x, sent.x_prev]

        def arguments(task: int) -> tuple[Any, ...]:
            clients = [plan.clients[place] for place in spans[task]]
            steps = [plan.steps[place] for place in spans[task]]
            offsets = [sent.offset(client) for client in clients] if each else shared
            asked = Asked(broadcast.numbers, clients, steps, len(common) > 1, len(offsets), ranges)
            return asked, *(part for parts in (*common, *offsets) for part in parts)

        return arguments

    def _in_order(self, tasks: "Tasks", count: int) -> Iterator["Done"]:
        """The results in the order of the tasks; no task begins beyond the window."""
        early: dict[int, Done] = {}
        window = self._ahead * self._pool.size
        for turn in range(count):
            while turn not in early:
                tasks.start(turn + window)
                early.update((done.task, done) for done in tasks.wait())
            tasks.start(turn + 1 + window)
            yield early.pop(turn)

    def _read(self, plan: Plan, span: range, done: "Done", shards: int) -> Iterator[Update]:
        trained: Trained = done.result
        vectors = trained.vectors(done.references, shards)
        for place, (y, control), steps, rate in zip(span, vectors, trained.steps, trained.rates, strict=True):
            client = plan.clients[place]
            yield Update(
                client,
                y,
                steps,
                examples=len(self._here.parts[client]),
                lr=rate,
                control=control,
                count=plan.counts[place],
                keep=True,
            )


def _as_done(tasks: "Tasks", count: int) -> Iterator["Done"]:
    left = count
    while left:
        tasks.start(count)
        for done in tasks.wait():
            left -= 1
            yield done


class Done(NamedTuple):
    """A finished task.

    Attributes:
        result: its result; the first of several.
        references: to its other results, which are not read here.
    """

    task: int
    result: Any
    references: list[Any]


class Tasks:
    """The tasks of one round: started in their order, and again if a worker is lost.

    The workers of a pool serve the last ``Tasks`` that was made; older ones stop, since an exception may hold them open
    and never read on.

    Args:
        count: tasks are numbered from 0.
        arguments: of ``train``, for a task; asked for again if it starts again.
        name: a task's name in messages.
        returns: the number of results of a task.
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
        self._waiting = list(range(count))  # a heap: a task that starts again goes to the front
        self._running: dict[Any, tuple[int, Worker, list[Any]]] = {}
        self._lost: Counter[int] = Counter()
        self._unread: Counter[int] = Counter()
        if pool.user is not None:
            pool.user.stop()
        pool.fill()
        pool.user = self

    def require_served(self) -> None:
        """Raise ClusterError if the workers serve other tasks, or these were stopped."""
        if self._pool.user is not self:
            raise ClusterError(
                "updates: they ended when the engine's next updates or gradients were begun: read those, or make "
                "another engine for two at once"
            )

    def start(self, below: int) -> None:
        """Give waiting tasks with numbers less than ``below`` to workers that have fewer than two.

        A second task hides the way to the worker.

        Raises:
            ClusterError: that of ``require_served``; or the connection is closed.
        """
        self.require_served()
        while self._waiting and self._waiting[0] < below and (worker := self._pool.free(2)) is not None:
            task = heapq.heappop(self._waiting)
            returns = self._returns(task)
            found = self._pool.submit(worker, "train", *self._arguments(task), returns=returns)
            first, *others = [found] if returns == 1 else found
            self._running[first] = task, worker, others
            worker.tasks.append(task)
            self._pool.stats.tasks += 1

    def wait(self) -> list[Done]:
        """Wait for finished tasks; there may be none if a worker started or was lost.

        Raises:
            ClusterError: a task lost ``MOST_TRIES`` workers; an argument of a shard is lost, or one of this process
                was as often; there is nothing to wait for; or that of ``require_served``.
            Exception: the error that a task raised.
        """
        self.require_served()
        done = []
        for reference in self._pool.wait(self._running):
            task, worker, others = self._running.pop(reference)
            try:
                done.append(Done(task, self._pool.result(reference, others), others))
            except ArgumentLostError as error:
                self._unread[task] += 1
                if others or self._unread[task] == MOST_TRIES:  # slices; this process's vectors can be read again
                    how = "a shard or its machine is lost" if others else f"they were sent {MOST_TRIES} times"
                    raise ClusterError(
                        f"{self._name(task)}: the vectors that they start from are lost: {how}: begin the round again: "
                        f"{error}"
                    ) from None
                self._pool.stats.retried += 1
                heapq.heappush(self._waiting, task)  # the worker lives, and the task had not begun
            except LostError as error:
                self._again(task, worker, error)
            finally:
                worker.tasks.remove(task)
        return done

    def stop(self) -> None:
        """End the workers that have tasks: their results are not needed."""
        for _, worker, _ in self._running.values():
            self._pool.drop(worker)
        self._running.clear()
        if self._pool.user is self:
            self._pool.user = None

    def _again(self, task: int, worker: Worker, error: LostError) -> None:
        heapq.heappush(self._waiting, task)
        self._pool.lose(worker, error)
        if worker.tasks[0] == task and not worker.blamed:  # the one that it was at; those behind it had not begun
            worker.blamed = True
            self._lost[task] += 1
            if self._lost[task] == MOST_TRIES:
                raise ClusterError(
                    f"{self._name(task)}: {MOST_TRIES} workers ended while they trained them: {error}; see the memory "
                    "of their machines, and Ray's logs"
                ) from None
        self._pool.stats.retried += 1
        self._pool.fill()


class Trained(NamedTuple):
    """The models that the clients of a task made of x, and their work.

    Attributes:
        ys: float32[n] of each; empty if slices come beside this.
        controls: float32[n_parameters] of each, the second vectors, if they were asked for; likewise.
        steps: that each did.
        rates: the mean rate of each.
        digests: of the slices that come beside this: of each client's y, and of its second vector.
    """

    ys: list[F32]
    controls: list[F32]
    steps: list[int]
    rates: list[float]
    digests: Sequence[Sequence[Sequence[str]]] = ()

    def cut(self, ranges: Ranges) -> list[Any]:
        """The same without vectors, and behind it each client's slices: of y, and of its second vector."""
        slices: list[F32] = []
        digests = []
        for i, y in enumerate(self.ys):
            vectors = [[y[start:stop] for start, stop, _ in ranges]]
            vectors += [[control[start:end] for start, _, end in ranges] for control in self.controls[i : i + 1]]
            digests.append([list(map(digest_of, own)) for own in vectors])
            slices += [one for own in vectors for one in own]
        return [self._replace(ys=[], controls=[], digests=digests), *slices]

    def vectors(self, references: Sequence[Any], shards: int) -> Iterator[tuple[Any, Any]]:
        """Each client's y and second vector, or None: arrays, or slices by reference."""
        if not self.digests:
            yield from zip(self.ys, self.controls or repeat(None), strict=False)
            return
        parts = iter(references)
        for digests in self.digests:
            y, *control = [Slices(tuple(islice(parts, shards)), own) for own in digests]
            yield y, control[0] if control else None


class Asked(NamedTuple):
    """A task, without its vectors.

    Attributes:
        common: the instructions to all its clients.
        clients, steps: of the clients, the numbers and local steps.
        has_x_prev: whether x_prev comes too.
        offsets: vectors that come beside: none, one for all, or one for each.
        ranges: of the slices that each vector comes in, and goes back in; None if all are whole.
    """

    common: Instructions
    clients: Sequence[int]
    steps: Sequence[int]
    has_x_prev: bool
    offsets: int
    ranges: Ranges | None


class Trainer:
    """The object of a worker's process, which trains clients."""

    def prepare(
        self, imports: Sequence[str], module: bytes, dataset: Dataset, parts: Sequence[Any], options: dict[str, Any]
    ) -> int:
        """Make the engine; return the number of this process.

        Args:
            imports: modules, or paths of files, to import first.
            module: the model, pickled, since its class may be in one of these.
            dataset: the training examples.
            parts, options: as for ``InProcess``.
        """
        hide_warnings_of_others()
        torch.set_num_threads(1)  # the order of torch's sums depends on it
        set_threads(options.get("threads", 1))
        for name in imports:
            load_module(name)
        with warnings.catch_warnings():
            # The memory of the object store is read-only, and training only reads it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            self._engine = InProcess(pickle.loads(module), dataset, parts, **options)
        self._room: dict[str, F32] = {}
        return os.getpid()

    def train(self, asked: Asked, *vectors: F32) -> Trained | list[Any]:
        """Train some clients.

        Args:
            vectors: x, x_prev and the offsets, each in as many slices as there are.

        Returns:
            Their work, and behind it each slice, if the vectors came in slices.
        """
        plan = Plan(asked.clients, asked.steps, [1] * len(asked.clients), _Received(asked, vectors, self._room))
        done = Trained([], [], [], [])
        for _, y, work in self._engine.trained(plan):
            done.ys.append(np.array(y))
            if work.control is not None:
                done.controls.append(work.control)
            done.steps.append(work.steps)
            done.rates.append(work.lr)
        return done if asked.ranges is None else done.cut(asked.ranges)


class _Received:
    """A ``Sent`` of received vectors; slices are copied into one vector, as into a model.

    Args:
        room: for the vectors that all clients share, kept from task to task.
    """

    def __init__(self, asked: Asked, vectors: Sequence[F32], room: dict[str, F32]) -> None:
        pieces = 1 if asked.ranges is None else len(asked.ranges)
        each = [vectors[start : start + pieces] for start in range(0, len(vectors), pieces)]
        names = ["x", *["x_prev"] * asked.has_x_prev, *["offset"] * (asked.offsets == 1)]
        shared = {name: _whole(parts, room, name) for name, parts in zip(names, each, strict=False)}
        self.x = shared.pop("x")
        self.common = replace(asked.common, x_prev=shared.pop("x_prev", None))
        self._offset = shared.pop("offset", None)
        own = each[len(names) :]
        self._own = dict(zip(asked.clients, own, strict=True)) if own else {}

    def of(self, client: int) -> Instructions:
        """See ``Sent``."""
        own = self._own.get(client)
        return replace(self.common, offset=self._offset if own is None else _whole(own, {}, "offset"))


def _whole(parts: Sequence[F32], room: dict[str, F32], name: str) -> F32:
    """A vector of its slices, in the room of that name; a single slice as it is."""
    if len(parts) == 1:
        return parts[0]
    n = sum(map(len, parts))
    if len(room.get(name, ())) != n:
        room[name] = np.empty(n, np.float32)
    return np.concatenate(parts, out=room[name])

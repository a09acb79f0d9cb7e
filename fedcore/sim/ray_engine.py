"""Client training in worker processes on Ray, on one machine or many."""

import heapq
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedcore.arrays import F32, I64
from fedcore.cluster import Slices, digest_of
from fedcore.cluster.workers import MOST_TRIES, ArgumentLostError, LostError, Pool, Session, Stats, Worker
from fedcore.errors import ClusterError, RangeError
from fedcore.files import closed_on_error
from fedcore.profiling import timed
from fedcore.runtime import Closing, hide_warnings_of_others, set_threads
from fedcore.server import Broadcast, SentSlices, Update
from fedcore.server.broadcast import Instructions
from fedcore.sim.data import Dataset
from fedcore.sim.engines import EngineWrapper, Plan, standing
from fedcore.sim.in_process import InProcess
from fedcore.sim.participation import Active
from fedcore.sim.sgd import Work
from fedcore.store.registry import ClientId
from fedcore.validation import check_integer, check_number, load_module

TOGETHER = 64
"""The maximum number of clients per task if they are trained together: they share a call, and the cost of a task."""
Ranges = Sequence[tuple[int, int, int]]
"""(start, stop, end) of each shard: see ``SentSlices``."""


class Ray(EngineWrapper, Closing):
    """The engine that trains a round's clients in workers on Ray, bit-identical to ``InProcess``. A context manager.

    Each machine gets the module, the data set and the parts once, and x once a round. The engine replaces lost workers,
    and trains their clients again. A worker that starts in the middle of a round gets work at once. Unread updates use
    Ray's memory, not this process's. A task costs some milliseconds (docs/on-ray.md): it pays off for models of LeNet's
    size and larger ones, but never for small perceptrons.

    Args:
        module, dataset, parts, batch, epochs, steps, seed, options, together, threads: as for ``InProcess``;
            ``threads`` applies to each worker.
        workers: the number of processes.
        cpus: cores that each worker requests, possibly a fraction.
        gpus: GPUs that each worker requests; four workers with 0.25 share one. Required for ``device="cuda"``, since
            Ray shows a worker only its own GPU.
        device: "cpu" or "cuda". With "cuda", each worker trains on the GPU that Ray assigns to it, and this process
            evaluates on its own GPU.
        group: the maximum number of clients per task. Default: 64 if they are trained together, else 1. A small cohort
            is divided further, so that each worker has two tasks.
        ahead: the number of tasks per worker that may start before their turn. More tasks hide slow clients. Each task
            holds 4 n bytes for each of its clients.
        ordered: whether to yield updates in the order of the clients. In completion order (False), the bits of a plain
            sum are not reproducible.
        address: as for ``Session``.
        imports: modules, or paths of .py files, that each worker imports first, for the class of the module or of a
            local rule. Other machines must have them too.

    Attributes:
        initial: float32[n], a copy of the module's initial values: x_0.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: no cluster answers at the address.
        RangeError, DtypeError, ArrayError, DeviceError: as for ``InProcess``; or workers on GPUs request no GPU.

    Determinism: as ``InProcess`` on one torch thread, for any number of workers and losses. On GPUs, groups of clients
        that are trained together depend on the number of workers, which may change bits.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        parts: Sequence[I64],
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
        workers, self._ahead = check_integer("workers", workers, 1), check_integer("ahead", ahead, 1)
        cpus, gpus = check_number("cpus", cpus, "[0, inf)"), check_number("gpus", gpus, "[0, inf)")
        if device not in ("cpu", "cuda"):
            raise RangeError(f"device={device!r}: must be 'cpu' or 'cuda', the GPU that Ray gives a worker")
        if device != "cpu" and not gpus:
            raise RangeError(f"gpus=0: must be > 0 on {device!r}; use 1, or 0.25 if four workers share a GPU")
        options["device"] = device
        self._session = Session(address, cpus=workers * cpus)
        with closed_on_error(self._session):
            pickled = self._session.pickled(module)
            self._local = InProcess(module, dataset, parts, **options)
            super().__init__(self._local)
            self.initial = self._local.initial
            self.ordered = ordered
            self._group = (TOGETHER if self.together else 1) if group is None else check_integer("group", group, 1)
            no_test: dict[str, Any] = {"test_x": dataset.test_x[:0], "test_y": dataset.test_y[:0], "test_parts": None}
            training = replace(dataset, parts=None, **no_test)
            shared = tuple(map(self._session.put, (tuple(imports), pickled, training, list(parts), options)))
            self._pool = Pool(self._session, Trainer, workers, cpus=cpus, gpus=gpus, arguments=shared)

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast in the workers, some before their update is read.

        Updates and errors are those of ``InProcess.updates``, in the order of the ids if ``ordered``. Each ``value`` is
        read-only, has its own memory, and ``keep`` is true. If the broadcast has slices, ``value`` and ``control`` are
        ``Slices`` of references with the workers' digests, and this process receives no vector.

        Raises:
            ClusterError: too many workers were lost during one task; a shard with slices of x is lost; the engine is
                closed; or a later call of ``updates`` or ``gradients`` ended these updates.

        Cost: x, x_prev and the offset are copied once each to Ray, or one offset per client if they differ; each y is
            copied back. Slices are copied from the shards to a worker and back: each worker needs 4 n bytes more, and
            one pass over y for its digests.
        """
        on_host = broadcast.on_host()
        yield from timed("train", self._updates(on_host, self._local.parts.plan(on_host, active)))

    def _updates(self, broadcast: Broadcast, plan: Plan) -> Iterator[Update]:
        if not plan.clients:
            return
        if broadcast.has_starts:
            raise RangeError("algorithm: on Ray all clients must start from one model; use the engine in this process")
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
            for done in tasks.in_order(self._ahead * self._pool.size) if self.ordered else tasks.as_completed():
                for update in self._read(plan, spans[done.task], done, shards):
                    tasks.require_current()
                    yield update
        finally:
            tasks.stop()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, Any]:
        """Return the gradients of ``InProcess.gradients``, as ``Slices`` if the server's shards are on Ray."""
        still = standing(broadcast.on_host())
        plan = self._local.parts.plan(still, None, minibatches=minibatches)
        return {u.client: u.control if still.slices else np.array(u.control) for u in self._updates(still, plan)}

    @property
    def waited(self) -> float:
        """Total seconds of waiting for workers."""
        return self.stats.waited

    @property
    def stats(self) -> Stats:
        """The counters of tasks and workers, and the seconds of waiting."""
        return self._pool.stats

    def processes(self) -> list[int | None]:
        """Wait until all workers are ready; return the process id of each on its machine."""
        return [worker.process for worker in self._pool.complete()]

    def close(self) -> None:
        """End the workers; also end Ray if this engine started it and nothing else uses it."""
        self._pool.close()
        self._session.close()

    def _spans(self, clients: int) -> list[range]:
        """Return the positions of each task's clients. In a small cohort, each worker has two tasks."""
        group = max(1, min(self._group, -(-clients // (2 * self._pool.size))))
        return [range(start, min(start + group, clients)) for start in range(0, clients, group)]

    def _sent(self, broadcast: Broadcast) -> SentSlices:
        """Return references to a broadcast's vectors. The vectors of a server without shards are copied to Ray once."""
        if broadcast.slices is not None:
            return broadcast.slices
        put, x, x_prev = self._session.put, broadcast.x, broadcast.x_prev
        return SentSlices((), [put(x)], None if x_prev is None else [put(x_prev)], lambda one: [broadcast.offset(one)])

    def _arguments(self, broadcast: Broadcast, plan: Plan, spans: Sequence[range]) -> Callable[[int], tuple[Any, ...]]:
        """Return a function from a task to the arguments of ``Trainer.train``; put shared vectors into Ray once."""
        sent, ranges = self._sent(broadcast), None if broadcast.slices is None else tuple(broadcast.slices.ranges)
        each = broadcast.has_offset and bool(broadcast.from_row)
        shared = []
        if broadcast.has_offset and not each:
            parts = sent.offset(plan.clients[0])
            shared = [list(parts) if ranges else [self._session.put(part) for part in parts]]
        common = [sent.x] if sent.x_prev is None else [sent.x, sent.x_prev]

        def arguments(task: int) -> tuple[Any, ...]:
            clients = [plan.clients[place] for place in spans[task]]
            steps = [plan.steps[place] for place in spans[task]]
            offsets = [sent.offset(client) for client in clients] if each else shared
            header = TaskHeader(broadcast.numbers, clients, steps, len(common) > 1, len(offsets), ranges)
            return header, *(part for parts in (*common, *offsets) for part in parts)

        return arguments

    def _read(self, plan: Plan, span: range, done: "Done", shards: int) -> Iterator[Update]:
        trained: Trained = done.result
        vectors = trained.vectors(done.references, shards)
        for place, (y, control), work in zip(span, vectors, trained.works, strict=True):
            client = plan.clients[place]
            sent: dict[str, Any] = {"count": plan.counts[place], "control": control, "loss": work.loss, "keep": True}
            yield Update(client, y, work.steps, len(self._local.parts[client]), work.lr, **sent)


class Done(NamedTuple):
    """A finished task, with its first result, and references to the other results, which this process does not read."""

    task: int
    result: Any
    references: list[Any]


class Tasks:
    """The tasks of a round: started in their order, and repeated if a worker is lost.

    The workers of a pool serve only the newest ``Tasks`` object. An older one is stopped, since an exception may leave
    it open although nothing reads it any more. The arguments ``arguments``, ``name`` and ``returns`` are functions of a
    task's number: the arguments of the workers' ``train``, a name for messages, and the number of results.
    """

    def __init__(
        self,
        pool: Pool,
        count: int,
        arguments: Callable[[int], tuple[Any, ...]],
        name: Callable[[int], str],
        returns: Callable[[int], int] = lambda task: 1,
    ) -> None:
        self._pool, self._count, self._arguments, self._name, self._returns = pool, count, arguments, name, returns
        self._waiting = list(range(count))  # a heap, so that a repeated task goes to the front
        self._running: dict[Any, tuple[int, Worker, list[Any]]] = {}
        self._lost: Counter[int] = Counter()
        self._unread: Counter[int] = Counter()
        if pool.user is not None:
            pool.user.stop()
        pool.fill()
        pool.user = self

    def in_order(self, window: int) -> Iterator[Done]:
        """Yield the results in the order of the tasks; at most ``window`` tasks start before their turn."""
        early: dict[int, Done] = {}
        for turn in range(self._count):
            while turn not in early:
                self.start(turn + window)
                early.update((done.task, done) for done in self.wait())
            self.start(turn + 1 + window)
            yield early.pop(turn)

    def as_completed(self) -> Iterator[Done]:
        """Yield the results in completion order."""
        left = self._count
        while left:
            self.start(self._count)
            for done in self.wait():
                left -= 1
                yield done

    def require_current(self) -> None:
        """Raise a ClusterError if the workers serve other tasks, or these tasks were stopped."""
        if self._pool.user is not self:
            raise ClusterError("updates: a later call ended them; read all updates first, or create a second engine")

    def start(self, below: int) -> None:
        """Give waiting tasks with numbers less than ``below`` to workers that have fewer than two.

        A second task hides the latency of the connection.
        """
        self.require_current()
        while self._waiting and self._waiting[0] < below and (worker := self._pool.free(2)) is not None:
            task = heapq.heappop(self._waiting)
            several = {} if (count := self._returns(task)) == 1 else {"returns": count}
            references = self._pool.submit(worker, "train", *self._arguments(task), **several)
            first, *others = references if several else [references]
            self._running[first] = task, worker, others
            worker.tasks.append(task)
            self._pool.stats.tasks += 1

    def wait(self) -> list[Done]:
        """Wait for finished tasks; the list may be empty if a worker started or was lost.

        Raise a ClusterError if a task lost ``MOST_TRIES`` workers, or its argument as often, or an argument from a
        shard.
        """
        self.require_current()
        done = []
        for reference in self._pool.wait(self._running):
            task, worker, others = self._running.pop(reference)
            try:
                done.append(Done(task, self._pool.result(reference, others), others))
            except ArgumentLostError as error:
                self._unread[task] += 1
                if others or self._unread[task] == MOST_TRIES:  # this process cannot send a shard's slices again
                    how = "a shard or its machine is lost" if others else f"sending them failed {MOST_TRIES} times"
                    raise ClusterError(
                        f"{self._name(task)}: the vectors sent to them are lost: {how}; open the round again: {error}"
                    ) from None
                self._repeat(task)  # the worker still runs, and has not started the task
            except LostError as error:
                self._lose(task, worker, error)
            finally:
                worker.tasks.remove(task)
        return done

    def stop(self) -> None:
        """End all workers that have tasks, since their results are not needed."""
        for _, worker, _ in self._running.values():
            self._pool.drop(worker)
        self._running.clear()
        if self._pool.user is self:
            self._pool.user = None

    def _repeat(self, task: int) -> None:
        heapq.heappush(self._waiting, task)
        self._pool.stats.retried += 1

    def _lose(self, task: int, worker: Worker, error: LostError) -> None:
        self._pool.lose(worker, error)
        if worker.tasks[0] == task and not worker.blamed:  # only its first task had started
            worker.blamed = True
            self._lost[task] += 1
            if self._lost[task] == MOST_TRIES:
                raise ClusterError(
                    f"{self._name(task)}: {MOST_TRIES} workers ended while training them: {error}; check the memory "
                    "of the machines and Ray's logs"
                ) from None
        self._repeat(task)
        self._pool.fill()


class Trained(NamedTuple):
    """The y of a task's clients, their second vectors (if any), and their ``Work`` without these vectors.

    If slices are separate results, ``ys`` and ``controls`` are empty. ``digests`` then has, for each client, the
    digests of its slices of y, and of its second vector.
    """

    ys: list[F32]
    controls: list[F32]
    works: list[Work]
    digests: Sequence[Sequence[Sequence[str]]] = ()

    def cut(self, ranges: Ranges) -> list[Any]:
        """Return a copy without vectors, followed by each client's slices of y and of its second vector."""
        slices: list[F32] = []
        digests = []
        for i, y in enumerate(self.ys):
            vectors = [[y[start:stop] for start, stop, _ in ranges]]
            vectors += [[control[start:end] for start, _, end in ranges] for control in self.controls[i : i + 1]]
            digests.append([list(map(digest_of, own)) for own in vectors])
            slices += [one for own in vectors for one in own]
        return [self._replace(ys=[], controls=[], digests=digests), *slices]

    def vectors(self, references: Sequence[Any], shards: int) -> Iterator[tuple[Any, Any]]:
        """Yield each client's y, and its second vector or None, as arrays or as references to slices."""
        if not self.digests:
            yield from zip(self.ys, self.controls or repeat(None), strict=False)
            return
        parts = iter(references)
        for digests in self.digests:
            y, *control = [Slices(tuple(islice(parts, shards)), own) for own in digests]
            yield y, control[0] if control else None


class TaskHeader(NamedTuple):
    """A task without its vectors.

    ``offsets`` is the number of offsets among the vectors: 0, 1 for all clients, or one per client. ``ranges`` are the
    slices of each vector, for arguments and results; None if vectors are whole.
    """

    common: Instructions
    clients: Sequence[int]
    steps: Sequence[int]
    has_x_prev: bool
    offsets: int
    ranges: Ranges | None


class Trainer:
    """The object in a worker process, which trains clients."""

    def prepare(
        self, imports: Sequence[str], module: bytes, dataset: Dataset, parts: Sequence[Any], options: dict[str, Any]
    ) -> int:
        """Import modules, unpickle the model (its class may be in them), create the engine; return the process id."""
        hide_warnings_of_others()
        torch.set_num_threads(1)  # the order of torch's sums depends on the number
        set_threads(options.get("threads", 1))
        for name in imports:
            load_module(name)
        with warnings.catch_warnings():
            # The object store's memory is read-only; training does not write to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            self._engine = InProcess(pickle.loads(module), dataset, parts, **options)
        self._buffers: dict[str, F32] = {}
        return os.getpid()

    def train(self, header: TaskHeader, *vectors: F32) -> Trained | list[Any]:
        """Train the clients of a task, given x, x_prev and the offsets, each whole or in slices; return their work.

        If the vectors are in slices, return a list of the work and all slices of the results.
        """
        sent = _Received(header, vectors, self._buffers)
        trained = Trained([], [], [])
        for _, y, work in self._engine.trained(Plan(header.clients, header.steps, [1] * len(header.clients), sent)):
            trained.ys.append(np.array(y))
            if work.control is not None:
                trained.controls.append(work.control)
            trained.works.append(replace(work, control=None))
        return trained if header.ranges is None else trained.cut(header.ranges)


class _Received:
    """A ``Sent`` of received vectors. Slices are copied into one vector, in ``buffers`` if all clients share it."""

    def __init__(self, header: TaskHeader, vectors: Sequence[F32], buffers: dict[str, F32]) -> None:
        pieces = 1 if header.ranges is None else len(header.ranges)
        each = [vectors[start : start + pieces] for start in range(0, len(vectors), pieces)]
        names = ["x", *["x_prev"] * header.has_x_prev, *["offset"] * (header.offsets == 1)]
        shared = {name: _joined(parts, buffers, name) for name, parts in zip(names, each, strict=False)}
        self.x = shared["x"]
        self.common = replace(header.common, x_prev=shared.get("x_prev"))
        self._offset = shared.get("offset")
        own = each[len(names) :]
        self._own = dict(zip(header.clients, own, strict=True)) if own else {}

    def of(self, client: int) -> Instructions:
        """See ``Sent``."""
        own = self._own.get(client)
        return replace(self.common, offset=self._offset if own is None else _joined(own, {}, "offset"))


def _joined(parts: Sequence[F32], buffers: dict[str, F32], name: str) -> F32:
    """Return the concatenation of slices in the buffer of this name; return a single slice unchanged."""
    if len(parts) == 1:
        return parts[0]
    n = sum(map(len, parts))
    if len(buffers.get(name, ())) != n:
        buffers[name] = np.empty(n, np.float32)
    return np.concatenate(parts, out=buffers[name])

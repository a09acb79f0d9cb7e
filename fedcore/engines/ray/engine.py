"""Client work in many processes, on one machine or many, by Ray: the twin of ``InProcess``."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import nn

from fedcore.arguments import real, whole
from fedcore.clients import ClientId
from fedcore.data import Dataset
from fedcore.engines.engine import Evaluation
from fedcore.engines.inprocess import InProcess
from fedcore.engines.orders import Orders, standing
from fedcore.engines.ray.pool import Done, Pool, Stats, Tasks
from fedcore.engines.ray.trained import Trained, returns
from fedcore.engines.ray.trainer import Asked, Trainer
from fedcore.errors import RangeError
from fedcore.local_rules import LocalRule
from fedcore.participation import Active
from fedcore.ray_session import Session
from fedcore.server import Broadcast, Update
from fedcore.server.slices import SentSlices

TOGETHER = 64
"""Clients of a task at most, where they are trained together: they share a call, and what a task costs."""


class Ray:
    """The engine that trains the clients of a round in workers on Ray, with the bits of ``InProcess``.

    The module, the data set and the parts are sent once, and lie once on each machine; x once a round. A worker that is
    lost, with its machine perhaps, is replaced by a new one, and its clients are trained again; one that comes later,
    in the middle of a round too, is given work at once. Ray's own memory, not this process's, holds what workers have
    sent and nobody has asked for yet. A task costs some milliseconds (docs/on-ray.md): it pays for clients that take
    longer, LeNet's and larger ones, never for small perceptrons.

    A context manager.

    Args:
        module, dataset, parts, batch, epochs, steps, seed, options, together, threads: as for ``InProcess``; threads
            are a worker's, and the module is taken over.
        workers: processes.
        cpus: cores that each asks for; a fraction, perhaps.
        gpus: GPUs that each asks for; four workers with 0.25 share one. With ``device="cuda"`` it is due, since Ray
            shows a worker no other GPU than its own.
        device: "cpu", or "cuda": workers train on the GPU that Ray gives each, and this process evaluates on its own.
        group: clients of a task at most; None for 64 where they are trained together, and 1 where they are not.
            A small cohort is divided further, so that each worker has two tasks.
        ahead: tasks for each worker that may be done before their turn has come, or on their way. More of them hide
            clients that are slow; each holds 4 n bytes for each of its clients.
        ordered: False yields updates as they come, and waits for nobody: their order, and so a plain sum's bits, are
            then a matter of chance.
        address: as for ``Session``.
        imports: modules, or paths of .py files, that each worker imports first: where the module's class, or a local
            rule's, is from. On other machines they must be there too.

    Attributes:
        initial: float32[n], a copy of the module's values as they came: x_0.
        ordered: as above.
        stats: what has been done so far.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: there is no cluster at the address.
        RangeError, DtypeError, ArrayError, DeviceError: as for ``InProcess``; workers or a size are out of range; or
            workers on GPUs ask for none.

    Determinism: that of ``InProcess`` on one thread of torch's, for any number of workers, and whoever is lost. On GPUs
        clients that are trained together are so in groups that depend on the number of workers, which may show in bits.
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
            raise RangeError(f"device: expected 'cpu' or 'cuda', the GPU that Ray gives a worker, got {device!r}")
        if device != "cpu" and not gpus:
            raise RangeError(f"gpus: expected a share of one for workers on {device!r} (1, or 0.25 for four), got 0")
        options["device"] = device
        self._session = Session(address, cpus=workers * cpus)
        try:
            pickled = self._session.pickled(module)  # before it is taken over
            self._here = InProcess(module, dataset, parts, **options)
            self.initial = self._here.initial
            self.ordered = ordered
            self._group = (TOGETHER if self.together else 1) if group is None else whole("group", group, 1)
            none = slice(0, 0)
            training = replace(
                dataset, test_x=dataset.test_x[none], test_y=dataset.test_y[none], parts=None, test_parts=None
            )
            told = tuple(map(self._session.put, (tuple(imports), pickled, training, list(parts), options)))
            self._pool = Pool(self._session, Trainer, workers, cpus=cpus, gpus=gpus, told=told)
        except BaseException:
            self._session.close()
            raise

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast in the workers, some ahead of the one that is asked for.

        Args:
            broadcast, active: as for ``InProcess.updates``.

        Yields:
            An ``Update`` for each id, in their order if ``ordered``; ``y`` is read-only, has memory of its own, and
            ``keep`` says so. Where the broadcast has slices, ``y`` and ``control`` are ``Slices`` of references, with
            the workers' digests, and nothing of a vector comes here.

        Raises: what ``InProcess.updates`` does, and what a client's training raises; and
            ClusterError: a client's training has ended one worker after another; a shard whose slices it was to start
                from is lost; the engine is closed; or other updates or gradients of this engine were begun before all
                of these were read, which ended these.

        Cost: x, x_prev and the offset are copied once each to Ray, or an offset for each client where it has its own,
            and y back; with slices, from the shards to a worker and back, 4 n bytes more in each worker, and one
            reading of y for its digests.
        """
        here = broadcast.on_host()
        yield from self._updates(here, self._here.parts.orders(here, active))

    def _updates(self, broadcast: Broadcast, orders: Orders) -> Iterator[Update]:
        if not orders.clients:
            return
        spans = self._spans(len(orders.clients))
        arguments, name = self._arguments(broadcast, orders, spans), self._name(orders, spans)
        shards = 0 if broadcast.slices is None else len(broadcast.slices.ranges)
        tasks = Tasks(
            self._pool, len(spans), arguments, name, lambda task: returns(len(spans[task]), shards, broadcast.second)
        )
        try:
            for done in self._in_order(tasks, len(spans)) if self.ordered else _come(tasks, len(spans)):
                for update in self._read(orders, spans[done.task], done, shards):
                    tasks.require_served()
                    yield update
        finally:
            tasks.stop()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, Any]:
        """The gradients of ``InProcess.gradients``, made by the workers; ``Slices`` for a server in shards on Ray."""
        still = standing(broadcast.on_host())
        orders = self._here.parts.orders(still, None, minibatches=minibatches)
        whole = still.slices is None
        return {u.client: np.array(u.control) if whole else u.control for u in self._updates(still, orders)}

    def evaluate(self, x: npt.NDArray[np.float32]) -> Evaluation:
        """Evaluate a model, in this process: ``InProcess.evaluate``."""
        return self._here.evaluate(x)

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps that a client's complete work has: ``InProcess.most_steps``."""
        return self._here.most_steps(local_rule)

    @property
    def together(self) -> bool:
        """Tell whether clients are trained together."""
        return self._here.together

    @property
    def waited(self) -> float:
        """Seconds so far of waiting for workers: those of ``stats``."""
        return self.stats.waited

    @property
    def stats(self) -> Stats:
        """Tasks so far, those that were given again, lost workers, seconds of waiting."""
        return self._pool.stats

    def processes(self) -> list[int | None]:
        """The number of each worker's process, on its machine; those that come are waited for."""
        return [worker.process for worker in self._pool.complete()]

    def close(self) -> None:
        """End the workers, and a Ray that was begun for them and that nobody else uses."""
        self._pool.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spans(self, clients: int) -> list[range]:
        """The tasks, as the places of their clients: two for each worker, where the cohort is small."""
        group = max(1, min(self._group, -(-clients // (2 * self._pool.size))))
        return [range(start, min(start + group, clients)) for start in range(0, clients, group)]

    def _sent(self, broadcast: Broadcast) -> SentSlices:
        """References to the vectors of a broadcast: the shards' own; or one server's, in one piece, put here once."""
        if broadcast.slices is not None:
            return broadcast.slices
        put, x, x_prev = self._session.put, broadcast.x, broadcast.x_prev
        return SentSlices((), [put(x)], None if x_prev is None else [put(x_prev)], lambda one: [broadcast.offset(one)])

    def _arguments(self, broadcast: Broadcast, orders: Orders, spans: Sequence[range]) -> Any:
        """The arguments of ``Trainer.train`` for a task; what several have in common is sent once."""
        sent, ranges = self._sent(broadcast), None if broadcast.slices is None else tuple(broadcast.slices.ranges)
        each = broadcast.has_offset and bool(broadcast.direction.from_row)
        shared = []
        if broadcast.has_offset and not each:
            parts = sent.offset(orders.clients[0])
            shared = [list(parts) if ranges else [self._session.put(part) for part in parts]]
        common = [sent.x] if sent.x_prev is None else [sent.x, sent.x_prev]

        def arguments(task: int) -> tuple[Any, ...]:
            clients = [orders.clients[place] for place in spans[task]]
            steps = [orders.steps[place] for place in spans[task]]
            offsets = [sent.offset(client) for client in clients] if each else shared
            asked = Asked(broadcast.numbers, clients, steps, len(common) > 1, len(offsets), ranges)
            return asked, *(part for parts in (*common, *offsets) for part in parts)

        return arguments

    def _name(self, orders: Orders, spans: Sequence[range]) -> Any:
        return lambda task: f"clients {', '.join(str(orders.clients[place]) for place in spans[task])}"

    def _in_order(self, tasks: Tasks, count: int) -> Iterator[Done]:
        """The tasks' results in their order; no task is begun that is further ahead than the window."""
        early: dict[int, Done] = {}
        window = self._ahead * self._pool.size
        for turn in range(count):
            while turn not in early:
                tasks.start(turn + window)
                early.update((done.task, done) for done in tasks.wait())
            tasks.start(turn + 1 + window)
            yield early.pop(turn)

    def _read(self, orders: Orders, span: range, done: Done, shards: int) -> Iterator[Update]:
        trained: Trained = done.result
        vectors = trained.vectors(done.references, shards)
        for place, (y, control), steps, rate in zip(span, vectors, trained.steps, trained.rates, strict=True):
            client = orders.clients[place]
            yield Update(
                client,
                y,
                steps,
                examples=len(self._here.parts[client]),
                lr=rate,
                control=control,
                count=orders.counts[place],
                keep=True,
            )


def _come(tasks: Tasks, count: int) -> Iterator[Done]:
    """The tasks as they are done."""
    left = count
    while left:
        tasks.start(count)
        for done in tasks.wait():
            left -= 1
            yield done

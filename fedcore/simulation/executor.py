"""Executors: workers in processes of this machine or on Ray, and a pool that replaces those that are lost."""

import logging
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from fedcore.errors import ClusterError, MissingDependencyError, RangeError

LOGGER = logging.getLogger("fedcore.simulation")
MOST_TRIES = 4
"""Workers that may be lost one after another, during one task or before they begin, before it is an error: a lost
machine takes one worker, a faulty task takes all of them."""
CONNECT_SECONDS = 10.0
"""Seconds in which an address must answer."""


class LostError(Exception):
    """A worker has ended, or its result is lost: another worker has to do the task."""


class ArgumentLostError(LostError):
    """The worker lives, but an argument of its task is lost or was never made."""


class Executor(Protocol):
    """Starts workers, each an object in its own process, and calls their methods.

    A worker does its calls one after another, in their order. It never starts again by itself: a new one needs the
    state of the old one, which ``Pool`` gives it.
    """

    @property
    def patience(self) -> float | None:
        """Seconds after which a worker that has not started is worth a warning, or None."""

    def start(self, kind: type, *, cpus: float, gpus: float = 0.0) -> Any:
        """Start a process with an object of that class, which takes no arguments."""

    def submit(self, worker: Any, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Call a method of a worker; return a reference to its result, or a list of references if it has several."""

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait for a result or an error; return all references that have one, none after so many seconds."""

    def result(self, reference: Any) -> Any:
        """Return the value of a call.

        Raises:
            LostError: the worker has ended.
            ArgumentLostError: the worker could not begin.
            Exception: the error that the method raised, as it is.
        """

    def kill(self, worker: Any) -> None:
        """End a worker at once."""

    def room(self) -> str:
        """Describe the free cores and GPUs."""

    def require_open(self) -> None:
        """Raise ClusterError if no worker can be started or called."""


_UNGUARDED = (
    " before it had begun; a program is imported by each process: call fedcore below "
    'if __name__ == "__main__", or with jobs=0'
)


@dataclass(eq=False)
class _Process:
    process: Any
    pipe: Any
    is_new: bool = True


@dataclass(eq=False)
class _Call:
    worker: _Process


class Processes:
    """The executor in processes of this machine.

    They are spawned, since a forked process inherits the locks of torch's threads. They ignore Ctrl-C, which is for
    this process to handle, and end with it.
    """

    patience = None

    def start(self, kind: type, *, cpus: float = 1.0, gpus: float = 0.0) -> _Process:
        """See ``Executor``; cores and GPUs are not reserved."""
        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, kind), daemon=True)
        with _interrupts_ignored():  # inherited, so that it holds from the first moment
            process.start()
        theirs.close()
        return _Process(process, pipe)

    def submit(self, worker: _Process, method: str, *arguments: Any, returns: int = 1) -> _Call:
        """See ``Executor``; a call has one result."""
        with suppress(BrokenPipeError):  # ``result`` reports a lost process
            worker.pipe.send((method, arguments))
        return _Call(worker)

    def wait(self, references: Sequence[_Call], seconds: float | None = None) -> list[_Call]:
        """See ``Executor``."""
        oldest: dict[Any, _Call] = {}
        for call in references:
            oldest.setdefault(call.worker.pipe, call)
        return [oldest[pipe] for pipe in connection.wait(list(oldest), seconds)]

    def result(self, reference: _Call) -> Any:
        """See ``Executor``."""
        worker = reference.worker
        try:
            is_value, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):  # for example, the system was out of memory and killed it
            worker.process.join()
            status = worker.process.exitcode
            unguarded = _UNGUARDED if worker.is_new and status == 1 else ""
            raise LostError(f"its process ended with exit status {status}{unguarded}") from None
        worker.is_new = False
        if is_value:
            return value
        raise value

    def kill(self, worker: _Process) -> None:
        """See ``Executor``."""
        worker.process.terminate()
        worker.process.join()
        worker.pipe.close()

    def room(self) -> str:
        """See ``Executor``."""
        return f"{os.cpu_count()} cores on 1 machine"

    def require_open(self) -> None:
        """Do nothing: processes can always be started."""


def _serve(pipe: connection.Connection, kind: type) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = kind()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent has ended, or needs no result
        while True:
            method, arguments = pipe.recv()
            try:
                reply = True, getattr(worker, method)(*arguments)
            except Exception as error:
                reply = False, error
            pipe.send(reply)


def _end_with_parent() -> None:
    """End this process with its parent, however that ended: a task may take hours."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # as a kill


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set, or gets, a signal
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_RAYS_WARNINGS = (
    (FutureWarning, "Tip: In future versions of Ray"),
    (ResourceWarning, "unclosed file <_io.* name='/dev/null'"),
    (ResourceWarning, r"subprocess \d+ is still running"),
)
"""Warnings of Ray's code about itself."""


@dataclass(eq=False)
class _Connection:
    """A connection to Ray, shared by sessions.

    Attributes:
        identity: its node and job, which differ in a later connection.
        made_here: whether its last session ends it.
        held: the number of open sessions.
    """

    identity: tuple[str, str]
    made_here: bool
    held: int = 0


class Session:
    """The executor on Ray, with actors as workers: this process's connection to Ray, which all its sessions share.

    A context manager. Once a session is closed, or ``ray.shutdown()`` has ended its connection, every method but
    ``kill`` and ``close`` raises ClusterError: Ray itself would start another Ray, which listens on every address.

    Args:
        address: "auto" or ``HOST:PORT`` for a running cluster. Default: the connection that this process has, else a
            new Ray on this machine, which listens on the loopback interface only.
        cpus: cores that a new Ray offers.
        own: further arguments of ``ray.init`` for a new Ray, such as ``object_store_memory``.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: there is no cluster at the address.
        RangeError: this process is connected to another cluster.
    """

    patience: float | None = 10.0
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _last: ClassVar[_Connection | None] = None

    def __init__(self, address: str | None = None, *, cpus: float = 1, **own: Any) -> None:
        ray = self._package = _package()
        self._is_closed = False
        with Session._lock:
            is_new = not ray.is_initialized()
            if is_new:
                _connect(ray, address, {"num_cpus": math.ceil(cpus), **own})
            else:
                there = ray.get_runtime_context().gcs_address
                if address not in (None, "auto", there):
                    raise RangeError(f"address={address!r}: this process is connected to {there!r}: leave it out")
            identity = _identity(ray)
            if is_new or Session._last is None or Session._last.identity != identity:
                Session._last = _Connection(identity, made_here=is_new)
            self._connection = Session._last
            self._connection.held += 1

    def close(self) -> None:
        """Close the session; the last one ends a connection that was made here, and a Ray that was started here."""
        with Session._lock:
            if not self._is_closed:
                self._is_closed = True
                self._connection.held -= 1
                if not self._connection.held and self._connection.made_here and self._is_connected:
                    with _without_rays_warnings():
                        self._package.shutdown()

    def require_open(self) -> None:
        """See ``Executor``.

        Raises:
            ClusterError: the session is closed, or ``ray.shutdown()`` has ended its connection.
        """
        if self._is_closed or not self._is_connected:
            how = "was closed" if self._is_closed else "ray.shutdown() has ended"
            raise ClusterError(f"connection to Ray: got one that {how}: make another engine, placement or Session")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> str:
        """The version of Ray."""
        return str(self._package.__version__)

    def put(self, value: Any) -> Any:
        """A reference to a value; each machine copies it at most once, and reads its arrays without a copy."""
        return self._ray.put(value)

    def pickled(self, value: Any) -> bytes:
        """A value as bytes, with the classes of the program or notebook, for a worker that imports modules first."""
        data: bytes = self._ray.cloudpickle.dumps(value)
        return data

    def start(self, kind: type, *, cpus: float, gpus: float = 0.0, node: str | None = None) -> Any:
        """See ``Executor``.

        Ray must not restart an actor: constructor arguments over 100 KB are lost by then
        (https://github.com/ray-project/ray/issues/53727), and calls to one that has no place block others.

        Args:
            node: a resource that only one machine has, such as "node:10.0.0.1": the actor runs there.
        """
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        if node is not None:
            options["resources"] = {node: 0.001}
        return self._ray.remote(kind).options(**options).remote()

    def submit(self, worker: Any, method: str, *arguments: Any, returns: int = 1) -> Any:
        """See ``Executor``."""
        self.require_open()
        call = getattr(worker, method)
        return (call if returns == 1 else call.options(num_returns=returns)).remote(*arguments)

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """See ``Executor``."""
        ray = self._ray
        found, others = ray.wait(list(references), num_returns=1, timeout=seconds)
        if found and others:
            more, _ = ray.wait(others, num_returns=len(others), timeout=0)
            found += more
        return list(found)

    def result(self, reference: Any) -> Any:
        """See ``Executor``."""
        ray = self._ray
        errors = ray.exceptions
        try:
            return ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (errors.ObjectLostError, errors.RayActorError)):
                raise ArgumentLostError(str(cause)) from None
            raise cause from None
        except (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
        ) as error:
            raise LostError(str(error)) from None

    def kill(self, worker: Any) -> None:
        """See ``Executor``."""
        if self._is_connected:
            self._package.kill(worker, no_restart=True)

    def room(self) -> str:
        """See ``Executor``."""
        ray = self._ray
        there, free = ray.cluster_resources(), ray.available_resources()
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        kinds = [f"{there.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
        return f"{' and '.join(kinds)} on {machines} machine{'s' * (machines != 1)}"

    @property
    def _is_connected(self) -> bool:
        return bool(self._package.is_initialized()) and _identity(self._package) == self._connection.identity

    @property
    def _ray(self) -> Any:
        self.require_open()
        return self._package


def _package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics leave the machine
    try:
        import ray
    except ImportError:
        raise MissingDependencyError.of("fedcore on Ray", "Ray", extra="ray") from None
    return ray


def _identity(ray: Any) -> tuple[str, str]:
    """The present connection: its node, and the job number that the cluster gave it."""
    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_job_id())


def _connect(ray: Any, address: str | None, own: dict[str, Any]) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _without_rays_warnings():
        if address is None:
            with _on_loopback(ray):
                ray.init(address="local", include_dashboard=False, **quiet, **own)
            return
        try:
            _require_answer(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"address={address!r}: there is no running Ray cluster: {error}; begin one by `ray start --head`"
            ) from None


def _require_answer(address: str) -> None:
    """Fail at once if nothing answers at an address: Ray itself tries for a quarter of an hour.

    Raises:
        OSError, ValueError: there is no answer, or it is no address.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if "://" not in address:
        found = canonicalize_bootstrap_address(address)  # for localhost: the machine's outer address
        host, separator, port = str(found).rpartition(":")
        if not separator:
            raise ValueError("it is no HOST:PORT, and not auto")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {found}: {error}") from None


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Have a new Ray listen on the loopback interface only.

    ``_node_ip_address="127.0.0.1"`` does not suffice: ``ray.init`` replaces it by the machine's outer address, and its
    processes, which ask for no password, listen on all of them. It keeps it where Ray has no clusters.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_rays_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, message in _RAYS_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


@dataclass(eq=False)
class Worker:
    """A process, and the tasks that it was given and has not done, in their order.

    Attributes:
        since: when it was asked for.
        process: its number on its machine; None before it is prepared.
        blamed: whether its loss was counted against a task.
    """

    handle: Any
    since: float
    tasks: list[int] = field(default_factory=list)
    process: int | None = None
    blamed: bool = False


@dataclass
class Stats:
    """The work of a pool so far.

    Attributes:
        tasks: given to workers, including those that were given again.
        retried: given again, since their worker or an argument was lost.
        lost: workers.
        waited: seconds for results.
    """

    tasks: int = 0
    retried: int = 0
    lost: int = 0
    waited: float = 0.0


class Pool:
    """Workers of one kind over an executor. A worker counts once it is prepared, which may be in the middle of a round.

    Args:
        executor: where they run.
        kind: the class of their objects; its ``prepare`` returns the number of the process.
        workers: how many.
        cpus, gpus: the cores and GPUs that each asks for.
        arguments: of ``prepare``.

    Attributes:
        user: the tasks that the workers serve, for their owner.
    """

    def __init__(
        self,
        executor: Executor,
        kind: type,
        workers: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        self._executor, self._kind, self._arguments = executor, kind, arguments
        self.size, self._cpus, self._gpus = workers, cpus, gpus
        self._ready: list[Worker] = []
        self._starting: dict[Any, Worker] = {}
        self._ended_early = 0
        self._warned = False
        self.user: Any = None
        self.stats = Stats()
        self.fill()

    def fill(self, most: int | None = None) -> None:
        """Start the workers that are missing, at most so many."""
        missing = self.size - len(self._ready) - len(self._starting)
        for _ in range(missing if most is None else min(missing, most)):
            handle = self._executor.start(self._kind, cpus=self._cpus, gpus=self._gpus)
            worker = Worker(handle, time.monotonic())
            self._starting[self._executor.submit(handle, "prepare", *self._arguments)] = worker

    def free(self, most: int = 1) -> Worker | None:
        """The worker with the fewest tasks, if it has fewer than ``most``."""
        least = min(self._ready, key=lambda worker: len(worker.tasks), default=None)
        return least if least is not None and len(least.tasks) < most else None

    def submit(self, worker: Worker, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Call a method of a worker; see ``Executor.submit``."""
        return self._executor.submit(worker.handle, method, *arguments, returns=returns)

    def wait(self, running: Collection[Any]) -> list[Any]:
        """Wait for results of ``running``, or for a worker to start.

        Raises:
            ClusterError: there is neither; workers end before they begin; or the executor is closed.
        """
        if not running and not self._starting:
            raise ClusterError("workers: all of them were ended: make another engine")
        begun = time.monotonic()
        oldest = min((worker.since for worker in self._starting.values()), default=None)
        limit = self._executor.patience
        seconds = None if oldest is None or limit is None or self._warned else max(0.0, oldest + limit - begun)
        found = self._executor.wait([*running, *self._starting], seconds)
        self.stats.waited += time.monotonic() - begun
        if not found:
            self._warn(limit)
        for reference in found:
            if reference in self._starting:
                self._join(reference)
        return [reference for reference in running if reference in found]

    def result(self, reference: Any, others: Sequence[Any] = ()) -> Any:
        """The value of a call, or the first of several; see ``Executor.result``."""
        try:
            return self._executor.result(reference)
        except Exception as error:
            for other in () if type(error) is LostError else others:
                with suppress(Exception):  # the same one: Ray prints it for each reference that is not read
                    self._executor.result(other)
            raise

    def drop(self, worker: Worker) -> None:
        """End a worker, if it is there."""
        if worker in self._ready:
            self._ready.remove(worker)
            self._executor.kill(worker.handle)

    def lose(self, worker: Worker, error: LostError) -> None:
        """Take a lost worker out; the first of its tasks that reports the loss counts it."""
        if worker in self._ready:
            self.stats.lost += 1
            LOGGER.info("a worker is lost: %s", error)
            self.drop(worker)

    def complete(self) -> list[Worker]:
        """Wait until all workers are there."""
        while self._starting:
            self.wait(())
        return list(self._ready)

    def close(self) -> None:
        """End all workers."""
        for worker in [*self._ready, *self._starting.values()]:
            self._executor.kill(worker.handle)
        self._ready.clear()
        self._starting.clear()

    def _join(self, reference: Any) -> None:
        worker = self._starting.pop(reference)
        try:
            worker.process = self._executor.result(reference)
        except LostError as error:
            self._ended_early += 1
            if self._ended_early == MOST_TRIES:
                self._ended_early = 0  # a caller that goes on has as many tries again
                raise ClusterError(
                    f"workers: {MOST_TRIES} ended before they had begun: {error}; see the memory of their machines and "
                    "the output of the processes"
                ) from None
            self.stats.lost += 1
            self.fill()
            return
        self._ended_early = 0
        self._ready.append(worker)
        if not self._starting:
            self._warned = False

    def _warn(self, seconds: float | None) -> None:
        self._warned = True
        LOGGER.warning(
            "%d of %d workers have not begun after %.0f s: each asks for %g CPUs and %g GPUs, and there are %s; they"
            " join when there is room, or ask for less",
            len(self._starting),
            self.size,
            seconds or 0.0,
            self._cpus,
            self._gpus,
            self._executor.room(),
        )

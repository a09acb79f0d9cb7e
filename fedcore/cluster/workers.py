"""Executors, which run workers in processes on this machine or on Ray, and a pool that replaces lost workers."""

import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from typing import Any, ClassVar, Protocol

from fedcore.errors import ClusterError, FedcoreError, MissingDependencyError, RangeError

LOGGER = logging.getLogger("fedcore.sim")
MOST_TRIES = 4
"""An error is raised once this many workers in a row were lost, during one task or at their start. A lost machine costs
a task one worker; a faulty task loses every worker."""
PATIENCE = 10.0
"""Seconds after which a warning reports workers that have not started."""
CONNECT_SECONDS = 10.0
"""Timeout in seconds for an address to answer."""


class LostError(Exception):
    """A worker ended, or its result is lost; a different worker must repeat the task."""


class ArgumentLostError(LostError):
    """An argument of a task is lost or could not be computed; the worker still runs."""


class Executor(Protocol):
    """Starts workers, each an object in its own process, and calls their methods.

    A worker runs its calls in their order, one at a time. An executor never restarts a worker, because a new one needs
    the state of the old one; ``Pool`` passes this state to it. ``fedcore.testing.ExecutorContract`` tests an executor.
    """

    def start(self, kind: type, *, cpus: float, gpus: float = 0.0) -> Any:
        """Start a process with an instance of ``kind``, whose constructor has no arguments."""

    def submit(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Call a method of a worker; return a reference to its result."""

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait for a result or an error; return all references that have one. Return an empty list after a timeout."""

    def result(self, reference: Any) -> Any:
        """Return the result of a call, or raise the error that the method raised.

        An error or a result that cannot be pickled may become an error of another class with the same message.

        Raises:
            LostError: the worker has ended.
            ArgumentLostError: the worker could not start the call.
        """

    def kill(self, worker: Any) -> None:
        """End a worker at once."""

    def room(self) -> str | None:
        """Describe the CPUs and GPUs, and how many are free; return None if workers do not need to wait for any."""


_UNGUARDED = (
    " before it was ready; each process imports the main program, so call fedcore under "
    'if __name__ == "__main__", or use jobs=0'
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
    """The executor that uses processes on this machine.

    Processes are spawned, because a forked process would inherit the locks of torch's threads. They ignore Ctrl-C,
    which this process handles, and end with this process.
    """

    def start(self, kind: type, *, cpus: float = 1.0, gpus: float = 0.0) -> _Process:
        """See ``Executor``. Cores and GPUs are not reserved."""
        context = get_context("spawn")
        pipe, far_end = context.Pipe()
        process = context.Process(target=_serve, args=(far_end, kind), daemon=True)
        with _interrupts_ignored():  # The new process inherits this.
            process.start()
        far_end.close()
        return _Process(process, pipe)

    def submit(self, worker: _Process, method: str, *arguments: Any) -> _Call:
        """See ``Executor``."""
        with suppress(BrokenPipeError):  # ``result`` reports a lost process.
            worker.pipe.send((method, arguments))
        return _Call(worker)

    def wait(self, references: Sequence[_Call], seconds: float | None = None) -> list[_Call]:
        """See ``Executor``."""
        if ended := [call for call in references if call.worker.pipe.closed]:
            return ended
        oldest = {call.worker.pipe: call for call in reversed(references)}
        return [oldest[pipe] for pipe in connection.wait(list(oldest), seconds)]

    def result(self, reference: _Call) -> Any:
        """See ``Executor``."""
        worker = reference.worker
        try:
            if worker.pipe.closed:  # ``kill`` ended the worker.
                raise EOFError
            is_value, value = worker.pipe.recv()
        except (EOFError, ConnectionResetError):  # for example, the system killed it because memory ran out
            worker.process.join()
            status = worker.process.exitcode
            unguarded = _UNGUARDED if worker.is_new and status == 1 else ""
            raise LostError(f"the worker's process ended with exit status {status}{unguarded}") from None
        worker.is_new = False
        if is_value:
            return value
        raise value

    def kill(self, worker: _Process) -> None:
        """See ``Executor``."""
        worker.process.terminate()
        worker.process.join()
        worker.pipe.close()

    def room(self) -> None:
        """See ``Executor``."""


def _serve(pipe: connection.Connection, kind: type) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = kind()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # The parent has ended or closed the pipe.
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(worker, method)(*arguments)))
            except Exception as error:
                pipe.send((False, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """Return an error, or another one with its class and message if it cannot be pickled and read."""
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return FedcoreError(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """End this process when its parent ends for any reason, since a task may take hours."""
    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread is interrupted, and only it can set a signal handler.
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(eq=False)
class _Connection:
    """A connection to Ray, shared by sessions. The last session ends it if a session made it (``is_own``)."""

    identity: tuple[str, str]
    is_own: bool
    sessions: int = 0
    lock: ClassVar[threading.Lock] = threading.Lock()
    last: ClassVar["_Connection | None"] = None


class Session(AbstractContextManager["Session"]):
    """The executor on Ray, whose workers are actors. It uses this process's connection to Ray. A context manager.

    All sessions of a process share one connection. After ``close`` or ``ray.shutdown()``, every method except ``kill``
    and ``close`` raises a ClusterError; Ray itself would start a new cluster on all addresses.

    Args:
        address: "auto" or ``HOST:PORT`` of a running cluster. Default: the connection of this process, else a new Ray
            on this machine, which listens only on the loopback interface.
        cpus: the number of cores that a new Ray offers.
        options: further arguments of ``ray.init`` for a new Ray, such as ``object_store_memory``.

    Raises:
        ClusterError: no cluster answers at the address.
        RangeError: this process is connected to a different cluster.
    """

    def __init__(self, address: str | None = None, *, cpus: float = 1, **options: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray must not send usage statistics.
        try:
            import ray
        except ImportError:
            raise MissingDependencyError.of("fedcore on Ray", "Ray", extra="ray") from None
        self._package, self._is_closed = ray, False
        with _Connection.lock:
            is_new = not ray.is_initialized()
            if is_new:
                _connect(ray, address, {"num_cpus": math.ceil(cpus), **options})
            elif address not in (None, "auto", current := ray.get_runtime_context().gcs_address):
                raise RangeError(f"address={address!r}: this process is already connected to {current!r}; omit address")
            identity = _identity(ray)
            if is_new or _Connection.last is None or _Connection.last.identity != identity:
                _Connection.last = _Connection(identity, is_own=is_new)
            self._connection = _Connection.last
            self._connection.sessions += 1

    def close(self) -> None:
        """Close the session. The last session ends the connection, and Ray, if a session started them."""
        with _Connection.lock:
            if not self._is_closed:
                self._is_closed = True
                self._connection.sessions -= 1
                if not self._connection.sessions and self._connection.is_own and self._is_connected:
                    with _without_ray_warnings():
                        self._package.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise a ClusterError if the session is closed, or ``ray.shutdown()`` has ended its connection."""
        if self._is_closed or not self._is_connected:
            how = "was closed" if self._is_closed else "was ended by ray.shutdown()"
            raise ClusterError(f"connection to Ray: {how}; create a new engine, placement or Session")

    def put(self, value: Any) -> Any:
        """Store a value in Ray; return a reference. Each machine copies it at most once; arrays are read in place."""
        return self._ray.put(value)

    def pickled(self, value: Any) -> bytes:
        """Return a value as bytes, including classes of the main program, for a worker that imports modules first."""
        data: bytes = self._ray.cloudpickle.dumps(value)
        return data

    def start(self, kind: type, *, cpus: float, gpus: float = 0.0, node: str | None = None) -> Any:
        """See ``Executor``. An actor runs on one machine if ``node`` is its resource, such as "node:10.0.0.1".

        Ray must not restart an actor. By then, constructor arguments over 100 KB are lost
        (https://github.com/ray-project/ray/issues/53727), and calls to an actor without resources block other calls.
        """
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        if node is not None:
            options["resources"] = {node: 0.001}
        return self._ray.remote(kind).options(**options).remote()

    def submit(self, worker: Any, method: str, *arguments: Any, returns: int = 1) -> Any:
        """See ``Executor``. With ``returns`` > 1, return a list of references, one for each part of the result."""
        self.require_open()
        call = getattr(worker, method)
        return (call if returns == 1 else call.options(num_returns=returns)).remote(*arguments)

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """See ``Executor``."""
        ray = self._ray
        ready, others = ray.wait(list(references), num_returns=1, timeout=seconds)
        if ready and others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return list(ready)

    def result(self, reference: Any) -> Any:
        """See ``Executor``."""
        ray = self._ray
        errors = ray.exceptions
        lost = errors.RayActorError, errors.ObjectLostError
        try:
            return ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, lost):
                raise ArgumentLostError(str(error.cause)) from None
            raise error.cause from None
        except (*lost, errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise LostError(str(error)) from None

    def kill(self, worker: Any) -> None:
        """See ``Executor``."""
        if self._is_connected:
            self._package.kill(worker, no_restart=True)

    def room(self) -> str:
        """See ``Executor``."""
        ray = self._ray
        total, free = ray.cluster_resources(), ray.available_resources()
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        kinds = [f"{total.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
        return f"{' and '.join(kinds)} on {machines} machine{'s' * (machines != 1)}"

    @property
    def _is_connected(self) -> bool:
        return bool(self._package.is_initialized()) and _identity(self._package) == self._connection.identity

    @property
    def _ray(self) -> Any:
        self.require_open()
        return self._package


def _identity(ray: Any) -> tuple[str, str]:
    """Return the node of the current connection, and the job id that the cluster assigned to it."""
    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_job_id())


def _connect(ray: Any, address: str | None, options: dict[str, Any]) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _without_ray_warnings():
        if address is None:
            with _loopback_only(ray):
                ray.init(address="local", include_dashboard=False, **quiet, **options)
            return
        try:
            _require_answer(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"address={address!r}: no Ray cluster is running there: {error}; start one with `ray start --head`"
            ) from None


def _require_answer(address: str) -> None:
    """Raise an error at once if nothing answers at an address; Ray itself tries for a quarter of an hour."""
    from ray._private.services import canonicalize_bootstrap_address

    if "://" not in address:
        canonical = canonicalize_bootstrap_address(address)  # the machine's outer address for localhost
        host, separator, port = str(canonical).rpartition(":")
        if not separator:
            raise ValueError("the address must be HOST:PORT or auto")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {canonical}: {error}") from None


@contextmanager
def _loopback_only(ray: Any) -> Iterator[None]:
    """Make a new Ray listen only on the loopback interface.

    ``_node_ip_address="127.0.0.1"`` is not enough: ``ray.init`` replaces it by the machine's outer address, and Ray's
    processes, which do not require a password, listen on all addresses. Ray keeps the argument if clusters are
    disabled.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_ray_warnings() -> Iterator[None]:
    """Hide the warnings that Ray raises about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
        warnings.filterwarnings("ignore", "unclosed file <_io.* name='/dev/null'", ResourceWarning)
        warnings.filterwarnings("ignore", r"subprocess \d+ is still running", ResourceWarning)
        yield


@dataclass(eq=False)
class Worker:
    """A process with its unfinished tasks in their order.

    ``since`` is the time at which the pool started it. ``process`` is the process id; None until the worker is ready.
    ``blamed`` is whether the loss of the worker was counted against a task.
    """

    handle: Any
    since: float
    tasks: list[int] = field(default_factory=list)
    process: int | None = None
    blamed: bool = False


@dataclass
class Stats:
    """Counters of a pool. ``tasks`` includes repeated tasks; ``waited`` counts seconds."""

    tasks: int = 0
    retried: int = 0
    lost: int = 0
    waited: float = 0.0


class Pool:
    """Workers of one class on an executor. A worker joins when it is ready, even in the middle of a round.

    The method ``prepare`` of the class ``kind`` gets ``arguments`` and returns the process id. ``cpus`` and ``gpus``
    are those of each worker. The attribute ``user`` is the current owner of the workers, set by that owner.

    The caller keeps the list ``tasks`` of each worker, on which ``free`` depends: it appends a task when it calls
    ``submit`` and removes it when it reads the result. If ``result`` raises a LostError, the caller calls ``lose`` and
    ``fill``, and gives the task to another worker. Nothing else replaces a worker that ended after its start.
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
        self._failed_starts, self._has_warned = 0, False
        self.user: Any = None
        self.stats = Stats()
        self.fill()

    def fill(self, most: int | None = None) -> None:
        """Start the missing workers, at most ``most`` of them."""
        missing = self.size - len(self._ready) - len(self._starting)
        for _ in range(missing if most is None else min(missing, most)):
            handle = self._executor.start(self._kind, cpus=self._cpus, gpus=self._gpus)
            worker = Worker(handle, time.monotonic())
            self._starting[self._executor.submit(handle, "prepare", *self._arguments)] = worker

    def free(self, most: int = 1) -> Worker | None:
        """Return the worker with the fewest tasks, or None if every worker has at least ``most`` tasks."""
        least = min(self._ready, key=lambda worker: len(worker.tasks), default=None)
        return least if least is not None and len(least.tasks) < most else None

    def submit(self, worker: Worker, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of a worker; see ``Executor.submit``. The options are the executor's."""
        return self._executor.submit(worker.handle, method, *arguments, **options)

    def wait(self, running: Collection[Any]) -> list[Any]:
        """Wait for results of ``running``, or until a worker is ready. Raise a ClusterError if workers cannot start."""
        if not running and not self._starting:
            raise ClusterError("workers: all workers have ended; create a new engine")
        began = time.monotonic()
        seconds = None
        if self._starting and not self._has_warned:
            seconds = max(0.0, min(worker.since for worker in self._starting.values()) + PATIENCE - began)
        ready = self._executor.wait([*running, *self._starting], seconds)
        self.stats.waited += time.monotonic() - began
        if not ready:
            self._warn()
        for reference in ready:
            if reference in self._starting:
                self._join(reference)
        return [reference for reference in running if reference in ready]

    def result(self, reference: Any, others: Sequence[Any] = ()) -> Any:
        """Return the result of a call, or the first of several results; see ``Executor.result``."""
        try:
            return self._executor.result(reference)
        except Exception as error:
            for other in () if type(error) is LostError else others:
                with suppress(Exception):  # Ray would print the same error again for each unread reference.
                    self._executor.result(other)
            raise

    def drop(self, worker: Worker) -> None:
        """End a worker, unless the pool has already dropped it."""
        if worker in self._ready:
            self._ready.remove(worker)
            self._executor.kill(worker.handle)

    def lose(self, worker: Worker, error: LostError) -> None:
        """Remove a lost worker. Each of its tasks may report the loss, which is counted only once."""
        if worker in self._ready:
            self.stats.lost += 1
            LOGGER.info("lost a worker: %s", error)
            self.drop(worker)

    def complete(self) -> list[Worker]:
        """Wait until all workers are ready; return them."""
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
            self._failed_starts += 1
            if self._failed_starts == MOST_TRIES:
                self._failed_starts = 0  # A caller that continues gets the full number of tries again.
                raise ClusterError(
                    f"workers: {MOST_TRIES} workers ended while they started: {error}; check the memory of the "
                    "machines and the output of the processes"
                ) from None
            self.stats.lost += 1
            self.fill()
            return
        self._failed_starts = 0
        self._ready.append(worker)
        if not self._starting:
            self._has_warned = False

    def _warn(self) -> None:
        self._has_warned = True
        if (room := self._executor.room()) is None:
            return
        LOGGER.warning(
            "%d of %d workers have not started after %.0f s: each requests %g CPUs and %g GPUs, and the executor "
            "has %s; they will start when resources are free; to start them sooner, request less",
            len(self._starting),
            self.size,
            PATIENCE,
            self._cpus,
            self._gpus,
            room,
        )

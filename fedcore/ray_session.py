"""The connection to Ray, and what of Ray this package uses. Nobody else imports it."""

import math
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, ClassVar, Self

from fedcore.errors import ClusterError, MissingDependencyError, RangeError

_OF_RAYS_OWN = (
    (FutureWarning, "Tip: In future versions of Ray"),
    (ResourceWarning, "unclosed file <_io.* name='/dev/null'"),
    (ResourceWarning, r"subprocess \d+ is still running"),
)
"""Warnings of Ray's own code, about itself."""


SECONDS = 10.0
"""Until an address that does not answer counts as nobody's."""


class LostError(Exception):
    """A worker has ended, or what it made is lost: another one has to do the task."""


class ArgumentLostError(LostError):
    """A worker is there, but an argument of its task is lost, or was never made: whoever was to make it has ended."""


@dataclass(eq=False)
class _Connection:
    """A connection to Ray, and the sessions that share it.

    Attributes:
        identity: what tells it from one that this process has later: ``_identity``.
        made_here: whether its last session ends it.
        held: sessions that are open.
    """

    identity: tuple[str, str]
    made_here: bool
    held: int = 0


class Session:
    """A connection of this process to Ray.

    A process has one; those who ask for it while it is there share it. A context manager. Once a session is closed, or
    somebody else has ended its connection by ``ray.shutdown()``, every method but ``kill`` and ``close`` raises
    ClusterError: Ray by itself would begin another one in silence, which listens on every address of the machine.

    Args:
        address: None for the connection that this process has, or else a Ray of its own on this machine, which listens
            on the loopback interface alone; "auto", or ``HOST:PORT``, for a cluster that runs.
        cpus: cores that a Ray of its own has to offer; a cluster's are its own matter.
        own: further arguments of ``ray.init`` for a Ray of its own, such as ``object_store_memory``.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: there is no cluster at the address.
        RangeError: this process is connected to another one.
    """

    _lock: ClassVar[Lock] = Lock()
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
                    raise RangeError(
                        f"address: expected None or that of this process's own connection, {there!r}, got {address!r}"
                    )
            identity = _identity(ray)
            if is_new or Session._last is None or Session._last.identity != identity:
                Session._last = _Connection(identity, made_here=is_new)
            self._connection = Session._last
            self._connection.held += 1

    def close(self) -> None:
        """Give the connection back; the last one ends it, if it was made here, and with it a Ray of one's own."""
        with Session._lock:
            if not self._is_closed:
                self._is_closed = True
                self._connection.held -= 1
                if not self._connection.held and self._connection.made_here and self._is_connected:
                    with _without_rays_warnings():
                        self._package.shutdown()

    def require_open(self) -> None:
        """Refuse to go on without the connection: before a method of an actor is called, say.

        Raises:
            ClusterError: the session is closed, or somebody else has ended its connection.
        """
        if self._is_closed or not self._is_connected:
            how = "was closed" if self._is_closed else "ray.shutdown() has ended"
            raise ClusterError(
                f"connection to Ray: expected one that is open, got one that {how}: make another engine, placement or "
                "Session"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> str:
        """Ray's."""
        return str(self._package.__version__)

    def put(self, value: Any) -> Any:
        """A reference to a value that every machine copies at most once; its arrays are read there without a copy."""
        return self._ray.put(value)

    def pickled(self, value: Any) -> bytes:
        """A value as bytes, with the classes of a program or a notebook: for who must import something before."""
        data: bytes = self._ray.cloudpickle.dumps(value)
        return data

    def actor(self, kind: type, *, cpus: float, gpus: float = 0.0, node: str | None = None) -> Any:
        """A new process for an object of that class, which takes no arguments.

        Args:
            node: a resource that one machine alone has, "node:10.0.0.1", say: it runs there.

        Ray never starts it again by itself: a new one has to be told what the old one knew, and arguments of a
        constructor that are longer than 100 KB are gone by then (https://github.com/ray-project/ray/issues/53727).
        """
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        if node is not None:
            options["resources"] = {node: 0.001}
        return self._ray.remote(kind).options(**options).remote()

    def kill(self, actor: Any) -> None:
        """End an actor's process at once, whatever it does."""
        if self._is_connected:
            self._package.kill(actor, no_restart=True)

    def ready(self, references: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """The references that have a result, or an error: at least one, unless it takes longer than so many seconds."""
        ray = self._ray
        found, others = ray.wait(list(references), num_returns=1, timeout=seconds)
        if found and others:
            more, _ = ray.wait(others, num_returns=len(others), timeout=0)
            found += more
        return list(found)

    def result(self, reference: Any) -> Any:
        """The value that a task returned.

        Raises:
            LostError: nobody knows; its worker has ended, or its machine is gone.
            ArgumentLostError: its worker could not begin.
            Exception: what the task raised, of its own class.
        """
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

    def room(self) -> str:
        """The cores and GPUs of the machines, and what of them is free, in words."""
        ray = self._ray
        there, free = ray.cluster_resources(), ray.available_resources()
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        told = [f"{there.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
        return f"{' and '.join(told)} on {machines} machine{'s' * (machines != 1)}"

    @property
    def _is_connected(self) -> bool:
        return bool(self._package.is_initialized()) and _identity(self._package) == self._connection.identity

    @property
    def _ray(self) -> Any:
        """Ray's package, for who is going to call it.

        Raises:
            ClusterError: ``require_open``'s.
        """
        self.require_open()
        return self._package


def _package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        import ray
    except ImportError:
        raise MissingDependencyError.of("fedcore on Ray", "Ray", extra="ray") from None
    return ray


def _identity(ray: Any) -> tuple[str, str]:
    """The connection that there is: its node, and the job that the cluster has given it."""
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
                f"address: expected that of a Ray cluster that runs, got {address!r}: {error}; "
                "begin one by `ray start --head`"
            ) from None


def _require_answer(address: str) -> None:
    """Find out whether anybody is at an address: Ray itself tries for a quarter of an hour.

    Raises:
        OSError, ValueError: nobody is, or it is none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if "://" not in address:
        found = canonicalize_bootstrap_address(address)  # for localhost it is the machine's outer one
        host, separator, port = str(found).rpartition(":")
        if not separator:
            raise ValueError("it is no HOST:PORT, and not auto")
        try:
            socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"nobody answers at {found}: {error}") from None


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Have a Ray that is begun listen on the loopback interface and on no other.

    ``_node_ip_address="127.0.0.1"`` does not do that: ``ray.init`` takes the machine's outer address in its place, and
    its processes, who ask no one for a password, then listen on all of them. It does where Ray has no clusters.
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
        for category, message in _OF_RAYS_OWN:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield

"""Shards as Ray actors, each in its own process on the machine with its disk."""

import logging
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from fedcore.cluster.manifest import ShardInfo
from fedcore.cluster.placement import Answer, Lost, ShardLostError
from fedcore.cluster.shard import Raised, Reply, Returned, Shard
from fedcore.cluster.workers import ArgumentLostError, LostError, Session
from fedcore.errors import ClusterError, RangeError
from fedcore.validation import check_integer, check_number

LOGGER = logging.getLogger("fedcore.cluster")
LATE = 10.0
"""Seconds until the log names the shards without a process."""


class Actor:
    """The process of a shard."""

    def prepare(self, info: ShardInfo, threads: int) -> None:
        """Create the shard's object; it opens nothing yet."""
        self._shard = Shard(info, threads)

    def call(self, name: str, *arguments: Any) -> Reply:
        """Start a call, and wait for a question or its end. Ray has already replaced references by slices."""
        self._shard.begin(name, *arguments)
        return self._reply()

    def answer(self, value: Any) -> Reply:
        """Answer a question, and wait for the next question or the end of the call."""
        self._shard.thread.answer(value)
        return self._reply()

    def fetch(self, name: str, *arguments: Any) -> Any:
        """Return the result of a call without questions, which any process can read by reference."""
        reply = self.call(name, *arguments)
        if isinstance(reply, Raised):
            raise reply.error
        assert isinstance(reply, Returned)
        return reply.value

    def _reply(self) -> Reply:
        reply = self._shard.thread.wait()
        assert reply is not None
        return _portable(reply)


class OnRay:
    """A placement of shards on Ray. Use it as a context manager.

    Vectors go to the shards through Ray's object store, and references are passed on. If a shard's process or machine
    is lost, the shard is created again on the machine with its disk.

    Args:
        nodes: for each shard a Ray resource that only its machine has, such as "node:10.0.0.1". Default: any machine.
        cpus: the cores that each shard reserves.
        threads: the threads of each shard.
        seconds: the timeout of a call; a shard that does not answer in time is killed and counts as lost. Default:
            none.
        start_seconds: the timeout for starting the shards' processes, which may wait for resources; None for no limit.
        address, own: see ``fedcore.cluster.workers.Session``.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: no cluster runs at the address.
    """

    copies, has_references = True, True

    def __init__(
        self,
        nodes: Sequence[str] | None = None,
        *,
        cpus: float = 1.0,
        threads: int = 1,
        seconds: float | None = None,
        start_seconds: float | None = 300.0,
        address: str | None = None,
        **own: Any,
    ) -> None:
        self._nodes = None if nodes is None else list(nodes)
        self._cpus, self._threads = check_number("cpus", cpus, "[0, inf)"), check_integer("threads", threads, 1)
        self._seconds = math.inf if seconds is None else check_number("seconds", seconds, "(0, inf)")
        self._start = math.inf if start_seconds is None else check_number("start_seconds", start_seconds, "(0, inf)")
        self._session = Session(address, cpus=8 if nodes is None else max(1, len(nodes)), **own)
        self._actors: list[Any] = []
        self.waiting: dict[int, Any] = {}  # references to the shards' answers
        self._returns_values, self._until = False, math.inf

    def make(self, shards: Sequence[ShardInfo]) -> None:
        """See ``Placement``."""
        self._session.require_open()
        self.drop()
        if self._nodes is not None and len(self._nodes) != len(shards):
            raise RangeError(f"nodes: give one for each of {len(shards)} shards, not {len(self._nodes)}")
        nodes: Sequence[str | None] = self._nodes or [None] * len(shards)
        self._actors = [self._session.start(Actor, cpus=self._cpus, node=node) for node in nodes]
        self._returns_values, self._until = True, time.monotonic() + self._start
        for k, (actor, info) in enumerate(zip(self._actors, shards, strict=True)):
            self.waiting[k] = actor.prepare.remote(info, self._threads)
        late = time.monotonic() + LATE
        while self.waiting:
            now = time.monotonic()
            if now > self._until:
                raise ClusterError(
                    f"shards: the processes of shards {list(self.waiting)} did not start within {self._start:g} s, and "
                    f"Ray has {self._session.room()}; free resources, or raise start_seconds"
                )
            if now > late:
                late = math.inf
                self._warn_late()
            for answer in self._ready(max(0.0, min(late, self._until) - now)).values():
                if isinstance(answer, Lost):
                    raise ShardLostError(f"shards: a process could not start: {answer.error}")

    def begin(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """See ``Placement``."""
        self._begin(False)
        for k, (actor, own) in enumerate(zip(self._actors, arguments, strict=True)):
            self.waiting[k] = actor.call.remote(name, *own)

    def answer(self, answers: Mapping[int, Any]) -> None:
        """See ``Placement``."""
        self._begin(False)
        for k, value in answers.items():
            self.waiting[k] = self._actors[k].answer.remote(value)

    def wait(self, seconds: float) -> dict[int, Answer]:
        """See ``Placement``."""
        left = self._until - time.monotonic()
        found = self._ready(max(0.0, min(seconds, left)))
        if not found and left <= 0:
            for k in self.waiting:
                self._session.kill(self._actors[k])
                found[k] = Lost(LostError(f"no answer for {self._seconds:g} s"))
            self.waiting.clear()
        return found

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """See ``Referring``."""
        self._session.require_open()
        return [actor.fetch.remote(name, *arguments) for actor in self._actors]

    def read(self, references: Sequence[Any]) -> None:
        """See ``Referring``."""
        self._begin(True)
        self.waiting.update(enumerate(references))

    def put(self, vector: Any) -> Any:
        """See ``Placement``."""
        return self._session.put(np.ascontiguousarray(vector) if isinstance(vector, np.ndarray) else vector)

    def drop(self) -> None:
        """See ``Placement``."""
        self.waiting.clear()
        while self._actors:  # an interrupt may occur at any line
            self._session.kill(self._actors[-1])
            self._actors.pop()

    def close(self) -> None:
        """End the shards, and the connection if this object opened it."""
        self.drop()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, values: bool) -> None:
        """Prepare to wait for answers: replies, or plain values."""
        self._session.require_open()
        self._returns_values, self._until = values, time.monotonic() + self._seconds

    def _warn_late(self) -> None:
        LOGGER.warning(
            "shards %s are still waiting for a process after %.0f s: each needs %g CPUs%s, and Ray has %s",
            list(self.waiting),
            LATE,
            self._cpus,
            "" if self._nodes is None else f" on one of {self._nodes}",
            self._session.room(),
        )

    def _ready(self, seconds: float) -> dict[int, Answer]:
        """Wait for answers at most this long; return those that came."""
        ready = self._session.wait(list(self.waiting.values()), seconds)
        found = {k: self._result(one) for k, one in self.waiting.items() if one in ready}
        for k in found:
            del self.waiting[k]
        return found

    def _result(self, reference: Any) -> Answer:
        try:
            answer = self._session.result(reference)
        except ArgumentLostError as error:
            return Raised(ClusterError(f"shards: a slice was lost with its machine; open the round again: {error}"))
        except LostError as error:
            return Lost(error)
        except Exception as error:
            return Raised(error)
        return Returned(answer) if self._returns_values else answer


def _portable(reply: Reply) -> Reply:
    """Return a reply that can be pickled. Any other error becomes a ClusterError with its text."""
    if isinstance(reply, Raised):
        try:
            pickle.loads(pickle.dumps(reply.error))
        except Exception:
            return Raised(ClusterError(f"{type(reply.error).__name__}: {reply.error}"))
    return reply

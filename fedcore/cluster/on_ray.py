"""Shards as actors on Ray: each a process of its own, on the machine that has its disk."""

import logging
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from fedcore.arguments import real, whole
from fedcore.cluster.placement import Answer, Lost, ShardLostError
from fedcore.cluster.shard import Place, Shard
from fedcore.cluster.strand import Raised, Reply, Returned
from fedcore.errors import ClusterError, RangeError
from fedcore.ray_session import ArgumentLostError, LostError, Session

LOGGER = logging.getLogger("fedcore.cluster")
LATE = 10.0
"""Seconds until the log names the shards that have no process."""


class Actor:
    """The process of a shard."""

    def prepare(self, place: Place, threads: int) -> None:
        """Make the shard's object; nothing is opened yet."""
        self._shard = Shard(place, threads)

    def call(self, name: str, *arguments: Any) -> Reply:
        """Begin a call, and wait until it asks or is over. Slices that are references have come by then."""
        self._shard.begin(name, *arguments)
        return self._reply()

    def answer(self, value: Any) -> Reply:
        """Answer what it has asked, and wait for the next."""
        self._shard.answer(value)
        return self._reply()

    def fetch(self, name: str, *arguments: Any) -> Any:
        """The result of a call that asks nothing, by itself: whoever has its reference reads it where he is."""
        reply = self.call(name, *arguments)
        if isinstance(reply, Raised):
            raise reply.error
        assert isinstance(reply, Returned)
        return reply.value

    def _reply(self) -> Reply:
        reply = self._shard.wait()
        assert reply is not None
        return _portable(reply)


class OnRay:
    """The placement of shards on Ray; a context manager.

    Vectors that are put go to Ray's object store, and from there to the shards; references go as they are. A shard
    whose process or machine is lost is made anew, on the machine of its disk, before all of them go on.

    Args:
        nodes: for each shard a resource that its machine alone has, "node:10.0.0.1", say; None for wherever there is
            room, on one machine.
        cpus: cores that each shard asks for.
        threads: of each shard.
        seconds: after which a shard that has not answered a call counts as lost, and is ended; None for never.
        start_seconds: for the start of the shards' processes, which may have to wait for room; None for no limit.
        address, own: as for ``fedcore.ray_session.Session``: the loopback interface alone, unless told otherwise.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: there is no cluster at the address.
    """

    keeps, refers = True, True

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
        self._cpus, self._threads = real("cpus", cpus, "[0, inf)"), whole("threads", threads, 1)
        self._seconds = math.inf if seconds is None else real("seconds", seconds, "(0, inf)")
        self._start = math.inf if start_seconds is None else real("start_seconds", start_seconds, "(0, inf)")
        self._session = Session(address, cpus=8 if nodes is None else max(1, len(nodes)), **own)
        self._actors: list[Any] = []
        self.waiting: dict[int, Any] = {}  # the reference of each shard's answer
        self._values, self._until = False, math.inf

    def make(self, places: Sequence[Place]) -> None:
        """See ``Placement``."""
        self._session.require_open()
        self.drop()
        if self._nodes is not None and len(self._nodes) != len(places):
            raise RangeError(f"nodes: expected one for each of {len(places)} shards, got {len(self._nodes)}")
        nodes: Sequence[str | None] = self._nodes or [None] * len(places)
        self._actors = [self._session.actor(Actor, cpus=self._cpus, node=node) for node in nodes]
        self._values, self._until = True, time.monotonic() + self._start
        for k, (actor, place) in enumerate(zip(self._actors, places, strict=True)):
            self.waiting[k] = actor.prepare.remote(place, self._threads)
        late = time.monotonic() + LATE
        while self.waiting:
            now = time.monotonic()
            if now > self._until:
                raise ClusterError(
                    f"shards: expected a process for each within {self._start:g} s, got none for {list(self.waiting)}: "
                    f"Ray has {self._session.room()}; make room, or raise start_seconds"
                )
            if now > late:
                late = math.inf
                self._tell_late()
            for answer in self.wait(max(0.0, min(late, self._until) - now)).values():
                if isinstance(answer, Lost):
                    raise ShardLostError(f"shards: expected a process for each, got none for one: {answer.error}")

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
        ready = self._session.ready(list(self.waiting.values()), max(0.0, min(seconds, left)))
        found = {k: self._result(one) for k, one in self.waiting.items() if one in ready}
        if not found and left <= 0:
            for k in self.waiting:
                self._session.kill(self._actors[k])
                found[k] = Lost(LostError(f"it has not answered for {self._seconds:g} s"))
        for k in found:
            del self.waiting[k]
        return found

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """See ``Referring``."""
        self._session.require_open()
        return [actor.fetch.remote(name, *arguments) for actor in self._actors]

    def read(self, fetched: Sequence[Any]) -> None:
        """See ``Referring``."""
        self._begin(True)
        self.waiting.update(enumerate(fetched))

    def put(self, vector: Any) -> Any:
        """See ``Placement``."""
        return self._session.put(np.ascontiguousarray(vector) if isinstance(vector, np.ndarray) else vector)

    def drop(self) -> None:
        """See ``Placement``."""
        self.waiting.clear()
        while self._actors:  # an exception may come from outside at any line
            self._session.kill(self._actors[-1])
            self._actors.pop()

    def close(self) -> None:
        """End the shards, and the connection if it was made here."""
        self.drop()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, values: bool) -> None:
        """Begin to wait for answers: replies, or values as they are."""
        self._session.require_open()
        self._values, self._until = values, time.monotonic() + self._seconds

    def _tell_late(self) -> None:
        LOGGER.warning(
            "shards %s have no process after %.0f s: each asks for %g CPUs%s, and Ray has %s",
            list(self.waiting),
            LATE,
            self._cpus,
            "" if self._nodes is None else f" on one of {self._nodes}",
            self._session.room(),
        )

    def _result(self, reference: Any) -> Answer:
        try:
            answer = self._session.result(reference)
        except ArgumentLostError as error:
            return Raised(
                ClusterError(
                    "shards: expected the slices that were sent, got one whose machine is gone: "
                    f"begin the round again: {error}"
                )
            )
        except LostError as error:
            return Lost(error)
        except Exception as error:
            return Raised(error)
        return Returned(answer) if self._values else answer


def _portable(reply: Reply) -> Reply:
    """A reply that can leave the process: an error that cannot be pickled is told in words."""
    if isinstance(reply, Raised):
        try:
            pickle.loads(pickle.dumps(reply.error))
        except Exception:
            return Raised(ClusterError(f"{type(reply.error).__name__}: {reply.error}"))
    return reply

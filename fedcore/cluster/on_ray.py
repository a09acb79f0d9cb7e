"""Shards as actors on Ray: each a process of its own, on the machine that has its disk."""

import logging
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
PATIENCE = 10.0
"""Seconds until it is said that a shard has no place."""


class Actor:
    """The process of a shard."""

    def prepare(self, place: Place, threads: int) -> None:
        """Make the shard's object; nothing is opened yet."""
        self._shard = Shard(place, threads)

    def call(self, name: str, *arguments: Any) -> Reply:
        """Begin a call, and wait until it asks or is over. Slices that are references have come by then."""
        self._shard.begin(name, *arguments)
        return _portable(self._shard.wait())

    def answer(self, value: Any) -> Reply:
        """Answer what it has asked, and wait for the next."""
        self._shard.answer(value)
        return _portable(self._shard.wait())

    def fetch(self, name: str, *arguments: Any) -> Any:
        """The result of a call that asks nothing, by itself: whoever has its reference reads it where he is."""
        reply = self.call(name, *arguments)
        if isinstance(reply, Raised):
            raise reply.error
        assert isinstance(reply, Returned)
        return reply.value


class OnRay:
    """The placement of shards on Ray; a context manager.

    Vectors that are put go to Ray's object store, and from there to the shards; references go as they are. A shard
    whose process or machine is lost is made anew, on the machine of its disk, before all of them go on.

    Args:
        nodes: for each shard a resource that its machine alone has, "node:10.0.0.1", say; None for wherever there is
            room, on one machine.
        cpus: cores that each shard asks for.
        threads: of each shard.
        seconds: after which a shard that has not answered counts as lost, and is ended; None for never.
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
        address: str | None = None,
        **own: Any,
    ) -> None:
        self._nodes = None if nodes is None else list(nodes)
        self._cpus, self._threads = real("cpus", cpus, "[0, inf)"), whole("threads", threads, 1)
        self._seconds = None if seconds is None else real("seconds", seconds, "(0, inf)")
        self._session = Session(address, cpus=8 if nodes is None else max(1, len(nodes)), **own)
        self._actors: list[Any] = []

    def make(self, places: Sequence[Place]) -> None:
        """See ``Placement``."""
        self._session.require_open()
        self.drop()
        if self._nodes is not None and len(self._nodes) != len(places):
            raise RangeError(f"nodes: expected one for each of {len(places)} shards, got {len(self._nodes)}")
        nodes: Sequence[str | None] = self._nodes or [None] * len(places)
        self._actors = [self._session.actor(Actor, cpus=self._cpus, node=node) for node in nodes]
        calls = [actor.prepare.remote(place, self._threads) for actor, place in zip(self._actors, places, strict=True)]
        for answer in self._answers(dict(enumerate(calls)), places=True).values():
            if isinstance(answer, Lost):
                raise ShardLostError(f"shards: expected a process for each, got none for one: {answer.error}")

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """See ``Placement``."""
        self._session.require_open()
        calls = [actor.call.remote(name, *own) for actor, own in zip(self._actors, arguments, strict=True)]
        return list(self._answers(dict(enumerate(calls))).values())

    def answer(self, answers: Mapping[int, Any]) -> dict[int, Answer]:
        """See ``Placement``."""
        self._session.require_open()
        return self._answers({k: self._actors[k].answer.remote(value) for k, value in answers.items()})

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """See ``Placement``: references."""
        self._session.require_open()
        return [actor.fetch.remote(name, *arguments) for actor in self._actors]

    def read(self, fetched: Sequence[Any]) -> list[Answer]:
        """See ``Placement``."""
        self._session.require_open()
        return list(self._answers(dict(enumerate(fetched)), values=True).values())

    def put(self, vector: Any) -> Any:
        """See ``Placement``."""
        return self._session.put(np.ascontiguousarray(vector) if isinstance(vector, np.ndarray) else vector)

    def drop(self) -> None:
        """See ``Placement``."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._session.kill(actor)

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

    def _answers(self, calls: Mapping[int, Any], *, places: bool = False, values: bool = False) -> dict[int, Answer]:
        """The answer of each call, by its shard.

        Args:
            places: whether the shards may still wait for a place.
            values: whether the calls return values, and no replies.
        """
        waiting, begun, said = dict(calls), time.monotonic(), False
        found: dict[int, Answer] = {}
        while waiting:
            left = None if self._seconds is None else begun + self._seconds - time.monotonic()
            patience = left if said or not places else min(PATIENCE, left or PATIENCE)
            ready = self._session.ready(list(waiting.values()), None if patience is None else max(0.0, patience))
            for k, reference in list(waiting.items()):
                if reference in ready:
                    del waiting[k]
                    found[k] = self._result(reference, values)
            if ready:
                continue
            if self._seconds is not None and time.monotonic() >= begun + self._seconds:
                for k in waiting:
                    self._session.kill(self._actors[k])
                    found[k] = Lost(LostError(f"it has not answered for {self._seconds:g} s"))
                break
            if places and not said:
                said = True
                LOGGER.warning(
                    "shards %s have no process after %.0f s: each asks for %g CPUs%s, and Ray has %s",
                    list(waiting),
                    PATIENCE,
                    self._cpus,
                    "" if self._nodes is None else f" on one of {self._nodes}",
                    self._session.room(),
                )
        return {k: found[k] for k in calls}

    def _result(self, reference: Any, is_value: bool) -> Answer:
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
        return Returned(answer) if is_value else answer


def _portable(reply: Reply) -> Reply:
    """A reply that can leave the process: an error that cannot be pickled is told in words."""
    if isinstance(reply, Raised):
        try:
            pickle.loads(pickle.dumps(reply.error))
        except Exception:
            return Raised(ClusterError(f"{type(reply.error).__name__}: {reply.error}"))
    return reply

"""The placement of shards: in threads of this process, or in processes of their own."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fedcore.cluster.shard import Place, Shard
from fedcore.cluster.strand import Asks, Raised, Returned
from fedcore.errors import ClusterError


class Lost(NamedTuple):
    """The shard's process has ended."""

    error: Exception


class ShardLostError(ClusterError):
    """A shard has ended, or has not begun: who opens all of them may do it again."""


Answer: TypeAlias = Asks | Returned | Raised | Lost


ENDING = 1.0
"""Seconds that a thread has to leave its call when the shards are ended."""


class Placement(Protocol):
    """The shards, all of which are called at once. Only ``make`` and ``wait`` take time.

    Attributes:
        keeps: whether a vector that is put somewhere else stays as it is, whatever its owner does with his.
        refers: whether it is ``Referring``: it has references to results, which other processes read for themselves.
    """

    keeps: bool
    refers: bool

    @property
    def waiting(self) -> Collection[int]:
        """The numbers of the shards that have not answered yet."""
        ...

    def make(self, places: Sequence[Place]) -> None:
        """Make the shards' objects, in the place of those that there were. An exception may end it anywhere."""
        ...

    def begin(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Begin a call of a method of each ``Shard``."""
        ...

    def answer(self, answers: Mapping[int, Any]) -> None:
        """Answer those that have asked, by their numbers."""
        ...

    def wait(self, seconds: float) -> dict[int, Answer]:
        """Wait until a shard asks or is through, at most so many seconds; return the answers that have come."""
        ...

    def put(self, vector: Any) -> Any:
        """A vector, on its way to a shard."""
        ...

    def drop(self) -> None:
        """End all shards, whatever they are at; their locks are let go, now or soon."""
        ...


class Referring(Placement, Protocol):
    """A placement that ``refers``."""

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """References to the results of a method of each ``Shard`` that asks nothing."""
        ...

    def read(self, fetched: Sequence[Any]) -> None:
        """Begin to read the results of references."""
        ...


class Here:
    """Shards in threads of this process: for several disks of one machine, and for tests.

    Slices are views of the client's vector. A thread that hangs in a call cannot be ended: no shards are made until it
    is through.
    """

    keeps, refers = False, False

    def __init__(self) -> None:
        self._shards: list[Shard] = []
        self._ending: list[Shard] = []
        self.waiting: set[int] = set()

    def make(self, places: Sequence[Place]) -> None:
        """See ``Placement``."""
        self.drop()
        if self._ending:
            raise ClusterError(
                f"shards: expected threads that have left their last call, got {len(self._ending)} still in it, as "
                "where a disk hangs: end this process, and load the folder in another"
            )
        self._shards = [Shard(place) for place in places]

    def begin(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """See ``Placement``."""
        for k, (shard, some) in enumerate(zip(self._shards, arguments, strict=True)):
            self.waiting.add(k)
            shard.begin(name, *some)

    def answer(self, answers: Mapping[int, Any]) -> None:
        """See ``Placement``."""
        for k, value in answers.items():
            self.waiting.add(k)
            self._shards[k].answer(value)

    def wait(self, seconds: float) -> dict[int, Answer]:
        """See ``Placement``."""
        found: dict[int, Answer] = {}
        until = time.monotonic() + seconds
        for k in sorted(self.waiting):
            reply = self._shards[k].wait(max(0.0, until - time.monotonic()))
            if reply is not None:
                self.waiting.remove(k)
                found[k] = reply
        return found

    def put(self, vector: Any) -> Any:
        """See ``Placement``."""
        return vector

    def drop(self) -> None:
        """See ``Placement``."""
        seconds = ENDING if self.waiting or self._ending else None
        while self._shards:  # an exception may come from outside at any line
            self._ending.append(self._shards[-1])
            self._shards.pop()
        self.waiting.clear()
        self._ending = [shard for shard in self._ending if not shard.end(seconds)]

"""The placement of shards: in threads of this process, or in processes of their own."""

from collections.abc import Mapping, Sequence
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


class Placement(Protocol):
    """The shards, all of which are called at once.

    Attributes:
        keeps: whether a vector that is put somewhere else stays as it is, whatever its owner does with his.
        refers: whether ``fetch`` gives references, by which other processes read for themselves.
    """

    keeps: bool
    refers: bool

    def make(self, places: Sequence[Place]) -> None:
        """Make the shards' objects, in the place of those that there were."""
        ...

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """Call a method of each ``Shard``, and wait until each asks or is over."""
        ...

    def answer(self, answers: Mapping[int, Any]) -> dict[int, Answer]:
        """Answer those that have asked, by their numbers."""
        ...

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of each ``Shard`` that asks nothing: themselves, or references to them elsewhere."""
        ...

    def read(self, fetched: Sequence[Any]) -> list[Answer]:
        """The results that ``fetch`` gave, here."""
        ...

    def put(self, vector: Any) -> Any:
        """A vector, on its way to a shard."""
        ...

    def drop(self) -> None:
        """End all shards, whatever they are at; their locks are let go, now or soon."""
        ...


class Here:
    """Shards in threads of this process: for several disks of one machine, and for tests.

    Slices are views of the client's vector.
    """

    keeps, refers = False, False

    def __init__(self) -> None:
        self._shards: list[Shard] = []

    def make(self, places: Sequence[Place]) -> None:
        """See ``Placement``."""
        self.drop()
        self._shards = [Shard(place) for place in places]

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """See ``Placement``."""
        for shard, some in zip(self._shards, arguments, strict=True):
            shard.begin(name, *some)
        return [shard.wait() for shard in self._shards]

    def answer(self, answers: Mapping[int, Any]) -> dict[int, Answer]:
        """See ``Placement``."""
        for k, value in answers.items():
            self._shards[k].answer(value)
        return {k: self._shards[k].wait() for k in answers}

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """See ``Placement``."""
        replies = self.call(name, [arguments] * len(self._shards))
        for reply in replies:
            if isinstance(reply, Raised):
                raise reply.error
        return [reply.value for reply in replies if isinstance(reply, Returned)]

    def read(self, fetched: Sequence[Any]) -> list[Answer]:
        """See ``Placement``."""
        return [Returned(one) for one in fetched]

    def put(self, vector: Any) -> Any:
        """See ``Placement``."""
        return vector

    def drop(self) -> None:
        """See ``Placement``."""
        shards, self._shards = self._shards, []
        for shard in shards:
            shard.end()

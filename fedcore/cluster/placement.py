"""The places where shards run: threads of this process, or other processes."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fedcore.cluster.manifest import ShardInfo
from fedcore.cluster.shard import Question, Raised, Returned, Shard
from fedcore.errors import ClusterError


class Lost(NamedTuple):
    """An answer: the process of the shard has ended."""

    error: Exception


class ShardLostError(ClusterError):
    """A shard has ended or could not start; the caller may try to open all shards again."""


Answer: TypeAlias = Question | Returned | Raised | Lost


ENDING = 1.0
"""Timeout in seconds for a thread to leave its call when the shards are ended."""


class Placement(Protocol):
    """The interface for running shards, which are called together. Only ``make`` and ``wait`` may block.

    Attributes:
        copies: whether ``put`` copies a vector, so that its owner may change it afterwards.
        has_references: whether other processes can read results by reference; see ``Referring``.
    """

    copies: bool
    has_references: bool

    @property
    def waiting(self) -> Collection[int]:
        """The numbers of the shards that have not answered yet."""

    def make(self, shards: Sequence[ShardInfo]) -> None:
        """Create the shards, and replace the present ones. An exception may interrupt this at any point."""

    def begin(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Start to call a method on each ``Shard``."""

    def answer(self, answers: Mapping[int, Any]) -> None:
        """Answer the questions of shards, by number."""

    def wait(self, seconds: float) -> dict[int, Answer]:
        """Wait up to ``seconds`` until a shard asks a question or ends its call; return the answers so far."""

    def put(self, vector: Any) -> Any:
        """Prepare a vector for a shard; return the argument for the call."""

    def drop(self) -> None:
        """End all shards, even within a call. Their locks are released now or soon."""


class Referring(Placement, Protocol):
    """A placement with ``has_references``."""

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method without questions on each ``Shard``; return references to the results."""

    def read(self, references: Sequence[Any]) -> None:
        """Start to read the results that the references name."""


class LocalThreads:
    """Shards in threads of this process, for several disks of one machine and for tests.

    Slices are views of the client's vector. A thread that hangs in a call cannot be ended; until it returns, no new
    shards can be created.
    """

    copies, has_references = False, False

    def __init__(self) -> None:
        self._shards: list[Shard] = []
        self._ending: list[Shard] = []
        self.waiting: set[int] = set()

    def make(self, shards: Sequence[ShardInfo]) -> None:
        """See ``Placement``."""
        self.drop()
        if self._ending:
            raise ClusterError(
                f"shards: {len(self._ending)} threads have not returned from their last call (a slow disk?); end this "
                "process and load the folder in a new one"
            )
        self._shards = [Shard(info) for info in shards]

    def begin(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """See ``Placement``."""
        for k, (shard, own) in enumerate(zip(self._shards, arguments, strict=True)):
            self.waiting.add(k)
            shard.begin(name, *own)

    def answer(self, answers: Mapping[int, Any]) -> None:
        """See ``Placement``."""
        for k, value in answers.items():
            self.waiting.add(k)
            self._shards[k].thread.answer(value)

    def wait(self, seconds: float) -> dict[int, Answer]:
        """See ``Placement``."""
        found: dict[int, Answer] = {}
        until = time.monotonic() + seconds
        for k in sorted(self.waiting):
            reply = self._shards[k].thread.wait(max(0.0, until - time.monotonic()))
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
        while self._shards:  # an interrupt may occur at any line
            self._ending.append(self._shards[-1])
            self._shards.pop()
        self.waiting.clear()
        self._ending = [shard for shard in self._ending if not shard.end(seconds)]

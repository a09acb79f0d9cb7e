"""A Grid that returns replies one by one, so that a server can fold each in and drop it; and the pending requests."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from fedcore.arguments import bounded, reason_of
from fedcore.errors import ArrayError
from fedcore.profiling import span, timed

Request = TypeVar("Request")

UNREADABLE = -1
"""The code of the error that stands for a reply which Flower could not make a message of."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, DecodeError)
"""What Flower raises over the bytes of a reply; a connection that fails raises something else."""


class StreamingGrid(Grid):
    """Another Grid, whose ``send_and_receive`` sends each message as it is made and yields replies as they come.

    Flower's own grids hold all messages of a round, and then all replies, at once. Here one of each is alive at a time,
    except those that the caller keeps. A reply that Flower cannot read, or that answers another message than the one in
    question, comes as an error of its node's.

    Args:
        grid: the Grid that does the work.
        poll: seconds between two looks for replies.
        at_once: how many messages' replies to ask for in one call, and so to hold at once.
    """

    def __init__(self, grid: Grid, *, poll: float = 0.1, at_once: int = 1) -> None:
        self._grid, self._poll, self._at_once = grid, poll, at_once
        self._late: dict[str, None] = {}

    def await_also(self, message_ids: Iterable[str]) -> None:
        """Let the next ``send_and_receive`` yield what replies to these earlier messages have come meanwhile.

        It waits for them only if it has no messages of its own.
        """
        self._late = dict.fromkeys(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send all messages, and return an iterator over the replies that come before the timeout."""
        # In the order of sending, so that replies which are there at the same time are summed in that order.
        with span("encode"):
            own = {number: None for message in messages for number in self._grid.push_messages([message]) if number}
        late, self._late = self._late, {}
        return timed("wait", self._replies(own, late, None if timeout is None else time.monotonic() + timeout))

    def _replies(self, own: dict[str, None], late: dict[str, None], end: float | None) -> Iterator[Message]:
        wait_for_late = not own
        while own or late:
            waiting, came = [*own, *late], False
            for start in range(0, len(waiting), self._at_once):
                pulled = self._pull(waiting[start : start + self._at_once])
                while pulled:
                    came = True
                    own.pop(pulled[0].metadata.reply_to_message_id, None)
                    late.pop(pulled[0].metadata.reply_to_message_id, None)
                    yield pulled.pop(0)
            if not own and not wait_for_late:
                return
            left = float("inf") if end is None else end - time.monotonic()
            if left <= 0:
                return
            if not came:
                time.sleep(min(self._poll, left))

    def _pull(self, numbers: list[str]) -> list[Message]:
        """The replies to some messages that are there, those that cannot be read as errors."""
        try:
            pulled = list(self._grid.pull_messages(numbers))
            fitting = [reply for reply in pulled if reply.metadata.reply_to_message_id in numbers]
            if pulled and not fitting:
                raise ArrayError("reply: expected one to the message that was sent, got one that names another")
        except MALFORMED as error:
            if len(numbers) == 1:
                return [_error_of(numbers[0], error)]
            return [reply for number in numbers for reply in self._pull([number])]
        return fitting

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Do as the other Grid does."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Do as the other Grid does."""
        return self._grid.pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Do as the other Grid does."""
        return self._grid.get_node_ids()

    def set_run(self, run: Any) -> None:
        """Do as the other Grid does."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Return the other Grid's."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Do as the other Grid does."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def _error_of(number: str, error: Exception) -> Message:
    """The error that stands for the reply to a message."""
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=0,
        dst_node_id=0,
        reply_to_message_id=number,
        group_id="",
        created_at=time.time(),
        ttl=0,
        message_type="system",
    )
    return make_message(metadata, error=Error(UNREADABLE, reason_of(error)))


# The requests that were sent, and the nodes that failed.


@dataclass(frozen=True)
class Asked:
    """A message that was made for a node: its metadata (a grid fills the id in), the round's number, and the draws."""

    metadata: Any
    node: int
    round: int
    count: int

    @property
    def message_id(self) -> str:
        """The id that a reply refers to. An error may come from another than the node, so this tells replies apart."""
        return str(self.metadata.message_id)


class Failure(NamedTuple):
    """A node that answered with an error: Flower's code and reason."""

    node: int
    code: int
    reason: str


def request_of(asked: dict[str, Request], reply: Message) -> Request | None:
    """Take out what a reply answers, by the id of the message and not by what the reply says of its sender."""
    try:
        return asked.pop(reply.metadata.reply_to_message_id, None)
    except Exception:  # something that is no id
        return None


def failure_of(node: int, reply: Message) -> Failure | None:
    """Read the error that a node answered with; None where it answered with content."""
    try:
        if not reply.has_error():
            return None
        return Failure(node, reply.error.code, bounded(str(reply.error.reason or "")))
    except Exception as error:
        return Failure(node, UNREADABLE, reason_of(error))

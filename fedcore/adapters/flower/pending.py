"""The requests that were sent, and the nodes that failed."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from flwr.app import Message

from fedcore.adapters.flower.grid import UNREADABLE
from fedcore.arguments import bounded, reason_of

Request = TypeVar("Request")


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

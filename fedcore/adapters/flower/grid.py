"""A Grid that yields replies one by one, so that the server keeps few of them in memory; and pending requests."""

import time
from collections import UserList
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from fedcore.errors import ArrayError, RoundError
from fedcore.profiling import span, timed
from fedcore.validation import rejection_reason, shorten

UNREADABLE = -1
"""The code of the error that replaces a reply that Flower could not read."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, DecodeError)
"""The errors that Flower raises for malformed bytes; a failed connection raises other errors."""


class Messages(UserList[Message]):
    """A list of messages that are made, or that arrive, when it is first read.

    ``each`` yields unread messages one by one and keeps none of them. The list cannot be read after that.
    """

    def __init__(self, stream: Iterable[Message]) -> None:
        self._stream: Iterator[Message] | None = iter(stream)

    @cached_property
    def data(self) -> list[Message]:  # type: ignore[override]
        """All messages."""
        return list(self.take())

    def take(self) -> Iterator[Message]:
        """Return the unread messages, which are then read; raise RoundError if they were read before."""
        stream, self._stream = self._stream, None
        if stream is None:
            raise RoundError(
                "messages: they were handled one by one and not kept; to read them later, make a list first: "
                "replies = list(replies) before super().aggregate_train(server_round, replies)"
            )
        return stream

    def __reduce__(self) -> Any:
        return list, (self.data,)

    __copy__ = UserList.copy


def each(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages. Unread ``Messages`` are yielded as they arrive, and not kept."""
    return messages.take() if isinstance(messages, Messages) and "data" not in vars(messages) else iter(messages)


def _forwarded(name: str) -> Any:
    """Return a method that calls the method ``name`` of the wrapped Grid."""
    return lambda self, *args, **options: getattr(self._grid, name)(*args, **options)


class StreamingGrid(Grid):
    """A wrapper of a Grid whose ``send_and_receive`` sends messages one by one and yields replies as they arrive.

    Flower's own grids hold all messages of a round in memory, and later all replies. This grid holds one message or one
    reply. A reply that Flower cannot read, or that answers the wrong message, becomes an error of its node.

    Args:
        grid: the wrapped Grid.
        poll: the seconds between two checks for replies.
    """

    push_messages, pull_messages = _forwarded("push_messages"), _forwarded("pull_messages")
    get_node_ids, create_message = _forwarded("get_node_ids"), _forwarded("create_message")
    set_run, run = _forwarded("set_run"), property(lambda self: self._grid.run)

    def __init__(self, grid: Grid, *, poll: float = 0.1) -> None:
        self._grid, self._poll = grid, poll
        self._late: dict[str, None] = {}
        self.arrived = 0
        """The replies of the last ``send_and_receive`` that arrived."""
        self._may_close: Callable[[], bool] = lambda: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def await_also(self, message_ids: Iterable[str]) -> None:
        """Let the next ``send_and_receive`` also yield arrived replies to these earlier messages.

        It waits for these replies only if it sends no messages itself.
        """
        self._late = dict.fromkeys(message_ids)

    def close_when(self, may_close: Callable[[], bool]) -> None:
        """Let the next ``send_and_receive`` end as soon as ``may_close()`` is true, even if replies are missing."""
        self._may_close = may_close

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Messages:
        """Send all messages, and return the replies that arrive before the timeout."""
        # A dictionary keeps the order of sending, so that replies that arrive together are summed in that order.
        with span("encode"):
            pushed = (self._grid.push_messages([message]) for message in each(messages))
            own = {number: None for numbers in pushed for number in numbers if number}
        late, self._late, self.arrived = self._late, {}, 0
        may_close, self._may_close = self._may_close, lambda: False
        end = float("inf") if timeout is None else time.monotonic() + timeout
        return Messages(timed("wait", self._replies(own, late, end, may_close)))

    def _replies(
        self, own: dict[str, None], late: dict[str, None], end: float, may_close: Callable[[], bool]
    ) -> Iterator[Message]:
        wait_for_late = not own
        while own or late:
            arrived = False
            for number in [*own, *late]:
                if may_close():
                    return
                pulled = self._pull(number)
                while pulled:
                    arrived = True
                    own.pop(pulled[0].metadata.reply_to_message_id, None)
                    late.pop(pulled[0].metadata.reply_to_message_id, None)
                    self.arrived += 1
                    yield pulled.pop(0)
            left = end - time.monotonic()
            if left <= 0 or not (own or wait_for_late):
                return
            if not arrived:
                time.sleep(min(self._poll, left))

    def _pull(self, number: str) -> list[Message]:
        """Return the arrived replies to a message, or an error in place of an unreadable one."""
        try:
            pulled = list(self._grid.pull_messages([number]))
            fitting = [reply for reply in pulled if reply.metadata.reply_to_message_id == number]
            if pulled and not fitting:
                raise ArrayError("reply: answers a different message than the requested one")
        except MALFORMED as error:
            metadata = Metadata(0, "", 0, 0, number, "", created_at=time.time(), ttl=0, message_type="system")
            return [make_message(metadata, error=Error(UNREADABLE, rejection_reason(error)))]
        return fitting


# Requests and failures.


class Request(NamedTuple):
    """A sent message: its metadata, node and round, and how often the node was drawn.

    The metadata has no id until a grid sends the message.
    """

    metadata: Metadata
    node: int
    round: int = 0
    draws: int = 1


class Failure(NamedTuple):
    """A node that replied with an error, and Flower's code and reason."""

    node: int
    code: int
    reason: str


def by_id(requests: Iterable[Request]) -> dict[str, Request]:
    """Return the requests by message id. Replies refer to it; the sender of an error need not be the node."""
    return {str(request.metadata.message_id): request for request in requests}


def answers(
    replies: Iterable[Message], pending: dict[str, Request], round: int = 0
) -> Iterator[tuple[Request | None, Message, Failure | None]]:
    """Yield each reply with its request and failure; remove the request from ``pending``.

    A reply to an unknown message, of a node without a pending one, answers a subclass's own message of this round. Late
    replies of nodes with a pending message, and second replies to a message, have no request.
    """
    answered = set[str]()
    for reply in each(replies):
        request, failure = None, None
        with suppress(Exception):  # it may be malformed
            metadata, number = reply.metadata, reply.metadata.reply_to_message_id
            if type(number) is str and number and number not in answered:
                answered.add(number)
                own = Request(metadata, metadata.src_node_id, round)
                is_late = number not in pending and any(one.node == own.node for one in pending.values())
                request = pending.pop(number, None if is_late else own)
        if request is not None:
            try:
                if reply.has_error():
                    failure = Failure(request.node, reply.error.code, shorten(str(reply.error.reason or "")))
            except Exception as error:
                failure = Failure(request.node, UNREADABLE, rejection_reason(error))
        yield request, reply, failure
        del reply  # free it before the next reply arrives

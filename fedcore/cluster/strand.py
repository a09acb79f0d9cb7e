"""A strand: a thread that runs one call at a time, and stops where the call asks something of other shards."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias


class Asks(NamedTuple):
    """The call has come to a question, and waits."""

    what: str
    told: Any


class Returned(NamedTuple):
    """The call is over."""

    value: Any


class Raised(NamedTuple):
    """The call has failed."""

    error: BaseException


Reply: TypeAlias = Asks | Returned | Raised


class LeftAloneError(Exception):
    """Another shard has failed, so that there is no answer: the call gives up."""


class Strand:
    """See above. ``begin`` and ``answer`` return at once; ``wait`` says how far the call has come."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Begin a call; the one before is over."""
        self._calls.put(call)

    def answer(self, value: Any) -> None:
        """Answer the question at which the call waits; an error is raised there."""
        self._answers.put(value)

    def wait(self, seconds: float | None = None) -> Reply | None:
        """Wait until the call asks, or is over; return None if that takes longer than so many seconds."""
        try:
            return self._replies.get(timeout=seconds)
        except Empty:
            return None

    def ask(self, what: str, told: Any) -> Any:
        """Ask within the call; returns the answer.

        Raises:
            LeftAloneError: there is none.
        """
        self._replies.put(Asks(what, told))
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, last: Callable[[], Any], seconds: float | None = None) -> bool:
        """End the thread after one more call; return whether it has ended within so many seconds.

        A call that runs gives up where it asks.
        """
        self._answers.put(LeftAloneError("the shards are ended"))
        self._calls.put(last)
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                reply: Reply = Returned(call())
            except BaseException as error:
                reply = Raised(error)
            del call  # what it holds is let go before anybody hears
            self._replies.put(reply)

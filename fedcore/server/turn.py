"""One call at a time into an open round."""

from collections.abc import Callable
from threading import RLock
from types import TracebackType
from weakref import WeakMethod

from fedcore.errors import RoundError


class Turn:
    """A context manager around each call: threads wait for each other.

    A call from within a call of the same thread, which the handler of a signal may make, cannot wait for it. It is
    refused; ``end`` alone is remembered, and obeyed when the call is done.

    Args:
        on_end: what ``end`` comes to, a method of the turn's owner, whom a turn does not keep alive.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._lock = RLock()
        self._on_end = WeakMethod(on_end)
        self._is_taken = self._is_to_end = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._is_taken:
            self._lock.release()
            raise RoundError(
                "round: expected one call at a time, got one from within another, as a signal's handler makes it: "
                "abort() alone may be called there"
            )
        self._is_taken = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_taken = False
        try:
            if self._is_to_end:
                self._ended()
        finally:
            self._lock.release()

    def end(self, *, at_once: bool = False) -> None:
        """Do what there is to do at the end: now, or when the call is done from within which this comes.

        Args:
            at_once: there is no such call, whatever an exception from outside has left.
        """
        with self._lock:
            if self._is_taken and not at_once:
                self._is_to_end = True
            else:
                self._ended()

    def _ended(self) -> None:
        if on_end := self._on_end():
            on_end()

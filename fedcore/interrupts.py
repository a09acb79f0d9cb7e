"""Signals have to wait while a server's changes are made."""

# signal's own functions turn numbers into enums and back, which makes 60 handlers take ten times as long.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from itertools import compress
from types import FrameType, TracebackType
from typing import Any, Self

_ALL = sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Handler = Callable[[int, FrameType | None], Any]


class uninterrupted:  # noqa: N801  # it is used as contextlib's functions are
    """Hold every signal with a handler in Python back until the block is done, so that none stops it half-way.

    Ctrl-C, a timeout's SIGALRM, SIGTERM that ends in sys.exit: their handlers run in the main thread, at any line, and
    may raise there. They run when the block is done, in the order in which the signals came, each as often as it came.
    In other threads, in which Python runs no handlers, this does nothing. What ``signal.siginterrupt`` set for such a
    signal is Python's default again afterwards: to set a handler is to reset that, and Python has nothing that asks for
    it beforehand. ``pthread_sigmask``, which changes no handler, holds the signals of one thread back alone: the system
    then gives a process's signal to another thread, whose arrival Python's main thread acts upon all the same.

    Cost: 4 us.
    """

    def __enter__(self) -> Self:
        self._came: list[tuple[int, FrameType | None]] = []
        self._before: dict[int, Handler] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            # Few signals have a handler in Python: which, is asked in one go, since it is asked in every round.
            for number in compress(_ALL, map(callable, map(_signal.getsignal, _ALL))):
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    _signal.signal(number, self._hold)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            try:
                self._restore()
            finally:
                self._deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def _restore(self) -> None:
        """Give every signal its handler back, also when one that has its own again is delivered and raises."""
        waiting = list(self._before.items())
        try:
            while waiting:
                _signal.signal(*waiting[-1])
                waiting.pop()
        except BaseException:
            for number, handler in waiting:
                _signal.signal(number, handler)
            raise

    def obeyed(self) -> list[BaseException]:
        """Run the handlers of the signals that came so far, and return what they raised: for a block that waits."""
        errors = self._run()
        for number in self._before:
            handler = _signal.getsignal(number)
            if handler != self._hold:  # a handler has set another one, which is to stay
                self._before[number] = handler
                if callable(handler):
                    _signal.signal(number, self._hold)
        return errors

    def _deliver(self) -> None:
        if errors := self._run():
            raise errors[0]

    def _run(self) -> list[BaseException]:
        """Run what waited; an error of one handler does not keep the others from theirs."""
        errors: list[BaseException] = []
        while self._came:
            number, frame = self._came.pop(0)
            try:
                self._before[number](number, frame)
            except BaseException as error:
                errors.append(error)
        return errors

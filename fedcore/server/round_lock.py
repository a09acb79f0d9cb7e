"""One round of a server at a time: which one is open, and who opens the next."""

from collections.abc import Callable
from threading import Lock
from typing import TypeVar
from weakref import ref

from fedcore.errors import RoundError
from fedcore.server.round_face import RoundFace
from fedcore.server.whole_round import WholeRound

R = TypeVar("R", bound=RoundFace | WholeRound)


class RoundLock:
    """The last round that was opened, and the turn of whoever opens the next."""

    def __init__(self) -> None:
        self._opening = Lock()
        # Weak, so that a round that was dropped does not stay open for ever.
        self._last: Callable[[], RoundFace | WholeRound | None] = lambda: None  # came before the first

    def __deepcopy__(self, memo: dict[int, object]) -> "RoundLock":
        """A copy with a turn of its own, since nobody can copy a lock; the last round is the same."""
        copied = RoundLock()
        copied._last = self._last
        return copied

    @property
    def opened(self) -> RoundFace | WholeRound | None:
        """The round that is open, if there is one."""
        last = self._last()
        return last if last is not None and last.is_open else None

    def open(self, round: int, make: Callable[[], R]) -> R:
        """Make a round, which is the open one from then on.

        Args:
            round: its number on the server, for messages.

        Raises:
            RoundError: one is open already, or is just opened: by another thread, or by the call that the handler of a
                signal has come upon, which cannot wait for it.
        """
        if self._opening.locked():
            raise RoundError(f"round {round}: expected one thread to open it, got two at once")
        with self._opening:
            self.require_none(round)
            opened = make()
            self._last = ref(opened)
        return opened

    def require_none(self, round: int) -> None:
        """Refuse to go on while one is open.

        Raises:
            RoundError: one is.
        """
        if self.opened is not None:
            raise RoundError(
                f"round: expected one open at a time, found that round {round} is open already: finish or abort it"
            )

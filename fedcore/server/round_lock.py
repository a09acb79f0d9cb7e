"""One round of a server at a time: which one is open, and who opens the next."""

from collections.abc import Callable
from operator import itemgetter
from weakref import ref

from fedcore.errors import RoundError
from fedcore.server.round import Round


class RoundLock:
    """The last round that was opened, under its number among all openings."""

    def __init__(self) -> None:
        # None came before the first. Weak, so that a round that was dropped does not stay open for ever.
        self._rounds: dict[int, Callable[[], Round | None]] = {0: lambda: None}

    @property
    def opened(self) -> Round | None:
        """The round that is open, if there is one."""
        opened = max([*self._rounds.items()], key=itemgetter(0))[1]()
        return opened if opened is not None and opened.is_open else None

    def open(self, round: int, make: Callable[[], Round]) -> Round:
        """Make a round, which is the open one from then on.

        Args:
            round: its number on the server, for messages.

        Raises:
            RoundError: one is open already, or another thread opens one.
        """
        number = max([*self._rounds]) + 1  # before it is looked whether the one before is over
        self.require_none(round)
        opened = make()
        # Of several threads one is the first with this number, and whoever comes with an old one sees a later.
        if self._rounds.setdefault(number, mine := ref(opened)) is not mine or max([*self._rounds]) != number:
            raise RoundError(f"round {round}: expected one thread to open it, got two at once")
        self._rounds.pop(number - 1, None)
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

"""The rows of a file that stay in this process's memory."""

from threading import RLock

from fedcore.store.files.slot_file import SlotFile

DEFAULT_BYTES = 1 << 30


class Residency:
    """Lets the rows that were not used for longest out of memory when there are more than so many.

    They stay in the system's page cache as long as it has room, so that coming back is cheap then. Several threads may
    use rows at once.

    Args:
        slots: the file of rows.
        rows: how many stay; None for as many as 1 GiB holds.
    """

    def __init__(self, slots: SlotFile, rows: int | None) -> None:
        self._slots = slots
        self.rows = max(1, DEFAULT_BYTES // slots.stride) if rows is None else rows
        self._used: dict[int, None] = {}  # in the order of their last use
        self._turn = RLock()  # a handler of a signal may read rows in the midst of it

    def use(self, slot: int) -> None:
        """Note that a slot is used; twice as many as should stay are the most that ever do between two trims."""
        with self._turn:
            self._used.pop(slot, None)
            self._used[slot] = None
            many = len(self._used) > 2 * self.rows
        if many:
            self.trim()

    def trim(self) -> None:
        """Let go of what is too much."""
        with self._turn:
            surplus = max(0, len(self._used) - self.rows)
            oldest = [slot for slot, _ in zip(self._used, range(surplus), strict=False)]
            for slot in oldest:
                del self._used[slot]
        if oldest:
            self._slots.let_go(oldest)

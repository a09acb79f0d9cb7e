"""The clients' rows: which slot holds whose, and which slots are about to."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedcore.errors import StoreError
from fedcore.store.files.row_entries import RowEntries
from fedcore.store.slots import Slots
from fedcore.typing import I64


class Rows:
    """Entries by the client's number, in arrays that grow with the highest number of a row.

    Args:
        slots: where the rows lie.

    Attributes:
        slot: int64, the slot of a client's row, or 0.
        round: int64, the round that wrote it.
        seal: uint64, the checksum of the slot.
        trusted: bool, whether the slot was checked, or written, since the store was opened.
        staged: the slots that become rows with the next commit, by number.
        dated: the rounds of those of them that are not of the commit's round.
        sums: the checksums of the blocks of those of them that whoever wrote them knows: uint64[blocks], by number.
        written: how many clients have a row.

    Cost: 25 bytes for each number up to the highest that was used, and none before that.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.staged: dict[int, int] = {}
        self.dated: dict[int, int] = {}
        self.sums: dict[int, npt.NDArray[np.uint64]] = {}
        self.written = 0

    def slot_of(self, number: int) -> int:
        """The slot of the client's row, or 0."""
        return int(self.slot[number]) if number < len(self.slot) else 0

    def slots_of(self, numbers: I64) -> list[int]:
        """``slot_of`` many clients, in their order."""
        try:
            slots: list[int] = self.slot[numbers].tolist()
        except IndexError:  # some are past the highest number of a row
            slots = list(map(self.slot_of, numbers.tolist()))
        return slots

    def make_room(self, number: int, capacity: int) -> None:
        """Make room for a number, and where memory allows it at once for every other below ``capacity``.

        Raises:
            StoreError: there is not so much memory.
        """
        if number < len(self.slot):
            return
        try:
            self.grow(capacity)
        except MemoryError:
            try:
                self.grow(number + 1)
            except MemoryError:
                raise StoreError(
                    f"clients: the row of number {number} needs {25 * (number + 1):,} bytes of memory, 25 for each "
                    "number up to it, and there are not so many: register the clients by their ids, as they come"
                ) from None

    def grow(self, capacity: int) -> None:
        """Make room for the numbers below ``capacity``."""
        if capacity > len(self.slot):
            more = max(capacity, len(self.slot) * 5 // 4)
            if 8 * more >= 2**63:
                raise MemoryError(f"{more} numbers")
            before, after = (self.slot, self.round, self.seal, self.trusted), _zeros(more)
            for old, new in zip(before, after, strict=True):
                new[: len(old)] = old
            self.slot, self.round, self.seal, self.trusted = after

    def load(self, rows: RowEntries) -> None:
        """Take entries over from an index; nothing of before remains, except trust in slots that are the same."""
        slot, seal, trusted, known = self.slot, self.seal, self.trusted, len(self.slot)
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.grow(max(known, int(rows.numbers.max(initial=-1)) + 1))
        self.slot[rows.numbers] = rows.slots
        self.round[rows.numbers] = rows.rounds
        self.seal[rows.numbers] = rows.seals
        self.trusted[:known] = trusted & (self.slot[:known] == slot) & (self.seal[:known] == seal)
        self.written = len(rows.numbers)

    def stage(self, number: int, round: int | None = None) -> int:
        """The slot that becomes the client's row, of that round or (None) of the commit's: of unknown content."""
        self.dated.pop(number, None)
        self.sums.pop(number, None)
        if round is not None:
            self.dated[number] = round
        self.make_room(number, number + 1)
        slot = self.staged.get(number)
        if slot is None:
            slot = self.staged[number] = self.slots.take()
        return slot

    def note_sums(self, number: int, sums: npt.NDArray[np.uint64]) -> None:
        """Note the checksums of what was just written to the client's staged row."""
        if number in self.staged:
            self.sums[number] = sums

    def seals(self) -> list[int]:
        """Write the checksums of the staged rows behind them; the slots' seals, in the order of ``staged``."""
        return [self.slots.seal(slot, self.sums.get(number)) for number, slot in self.staged.items()]

    def unstage(self, number: int) -> None:
        """Forget the client's staged row, if there is one."""
        slot = self.staged.pop(number, None)
        self.dated.pop(number, None)
        self.sums.pop(number, None)
        if slot is not None:
            self.slots.give([slot])

    def discard(self) -> None:
        """Forget every staged row. Twice is as once, wherever the first was stopped: no slot is given twice."""
        staged, self.staged = self.staged, {}
        self.dated.clear()
        self.sums.clear()
        self.slots.give(staged.values())

    def proposed(self, round: int, seals: Sequence[int] | None) -> RowEntries:
        """The staged rows as entries.

        Args:
            round: that writes them, except those that are dated.
            seals: of the slots, in the order in which they were staged; None where nobody keeps checksums.
        """
        k = len(self.staged)
        return RowEntries(
            np.array([*self.staged], np.int64),
            np.array([*self.staged.values()], np.int64),
            np.array([self.dated.get(number, round) for number in self.staged], np.int64),
            np.zeros(k, np.uint64) if seals is None else np.array(seals, np.uint64),
        )

    def accept(self, entries: RowEntries, written: int, *, trusted: bool = True) -> None:
        """Make entries the clients' rows, staged no more; ``written`` clients have a row then. Twice is as once."""
        self.slot[entries.numbers] = entries.slots
        self.round[entries.numbers] = entries.rounds
        self.seal[entries.numbers] = entries.seals
        self.trusted[entries.numbers] = trusted
        self.written = written
        for number in entries.numbers.tolist():
            self.staged.pop(number, None)
            self.dated.pop(number, None)
            self.sums.pop(number, None)

    def of_round(self, round: int) -> I64:
        """The numbers of the clients whose rows are of that round."""
        return np.flatnonzero((self.round == round) & (self.slot > 0))

    def drop(self, number: int) -> int:
        """Forget the client's row, and return its slot or 0."""
        self.unstage(number)
        slot = self.slot_of(number)
        if slot:
            self.slot[number] = 0
            self.written -= 1
        return slot

    def put_back(self, number: int, slot: int) -> None:
        """Undo ``drop``, which returned this slot. Twice is as once."""
        if slot and not self.slot[number]:
            self.slot[number] = slot
            self.written += 1

    def entries(self, numbers: I64) -> RowEntries:
        """The entries of these clients, also of those without a row."""
        return RowEntries(numbers, self.slot[numbers], self.round[numbers], self.seal[numbers])


def _zeros(count: int) -> tuple[I64, I64, npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """The columns; pages of them that nobody writes to are not there."""
    return np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint64), np.zeros(count, np.bool_)

"""The clients' rows: which slot holds whose, and which slots are about to."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedcore.arrays import I64
from fedcore.errors import StoreError
from fedcore.store.files.entries import Entries, row_entries
from fedcore.store.slots import Slots, Sums


class Rows:
    """Entries by the client's number, in arrays that grow with the highest number of a row.

    Args:
        slots: of the rows.

    Attributes:
        slot: int64, the slot of a client's row, or 0.
        round: int64, the round that wrote it.
        seal: uint64, the checksum of the slot.
        trusted: bool, whether the slot was checked, or written, since the store was opened.
        staged: the slots that become rows with the next commit, by number.
        dated: the rounds of those of them that are not of the commit's round.
        sums: the known checksums of the blocks of those of them: uint64[blocks], by number.
        written: how many clients have a row.

    Cost: 25 bytes for each number up to the highest that was used, and none before that.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.staged: dict[int, int] = {}
        self.dated: dict[int, int] = {}
        self.sums: dict[int, Sums] = {}
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
        """Make room for a number, and where memory allows it at once for every other below ``capacity``."""
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

    def load(self, rows: Entries) -> None:
        """Take entries over from an index; nothing of before remains, except trust in slots that are the same."""
        slot, seal, trusted, known = self.slot, self.seal, self.trusted, len(self.slot)
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.grow(max(known, int(rows["number"].max(initial=-1)) + 1))
        self._set(rows)
        self.trusted[:known] = trusted & (self.slot[:known] == slot) & (self.seal[:known] == seal)
        self.written = len(rows)

    def stage(self, numbers: Sequence[int], round: int | None = None) -> list[int]:
        """The slots that become these clients' rows, of that round or (None) of the commit's: of unknown content.

        There is room for the numbers. After an error some are staged. Checksums that were noted of them are forgotten.
        """
        staged, dated, sums = self.staged, self.dated, self.sums
        for number in numbers:
            if dated or sums:
                dated.pop(number, None)
                sums.pop(number, None)
            if round is not None:
                dated[number] = round
            if number not in staged:
                staged[number] = self.slots.take()
        return [staged[number] for number in numbers]

    def note_sums(self, number: int, sums: Sums) -> None:
        """Note the checksums of what was just written to the client's staged row."""
        if number in self.staged:
            self.sums[number] = sums

    def proposed(self, round: int, *, sealed: bool) -> Entries:
        """The staged rows as entries of a round, except those that are dated.

        Args:
            round: that writes them.
            sealed: whether their checksums are written behind them.
        """
        staged = self.staged
        rounds = [self.dated.get(number, round) for number in staged] if self.dated else round
        seals = [self.slots.seal(slot, self.sums.get(number)) for number, slot in staged.items()] if sealed else 0
        return row_entries(list(staged), list(staged.values()), rounds, seals)

    def unstage(self, number: int) -> None:
        """Forget the client's staged row, if there is one."""
        slot = self._forget([number])[0]
        if slot is not None:
            self.slots.give([slot])

    def discard(self) -> None:
        """Forget every staged row. Twice is as once, wherever the first was stopped: no slot is given twice."""
        staged, self.staged = self.staged, {}
        self.dated.clear()
        self.sums.clear()
        self.slots.give(staged.values())

    def accept(self, entries: Entries, written: int, *, trusted: bool = True) -> None:
        """Make entries the clients' rows, staged no more; ``written`` clients have a row then. Twice is as once."""
        self._set(entries)
        self.trusted[entries["number"]] = trusted
        self.written = written
        self._forget(entries["number"].tolist())

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

    def entries(self, numbers: I64) -> Entries:
        """The entries of these clients, also of those without a row."""
        return row_entries(numbers, self.slot[numbers], self.round[numbers], self.seal[numbers])

    def _set(self, entries: Entries) -> None:
        numbers = entries["number"]
        self.slot[numbers], self.round[numbers], self.seal[numbers] = entries["slot"], entries["round"], entries["seal"]

    def _forget(self, numbers: Iterable[int]) -> list[int | None]:
        """Forget that clients have staged rows; the slots of these."""
        if self.dated or self.sums:
            for number in numbers:
                self.dated.pop(number, None)
                self.sums.pop(number, None)
        return [self.staged.pop(number, None) for number in numbers]


def _zeros(count: int) -> tuple[I64, I64, npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """The columns; pages of them that were never written to take no memory."""
    return np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint64), np.zeros(count, np.bool_)

"""Entries of rows, as the index lists them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedcore.typing import I64

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RowEntries:
    """Entries of rows by the clients' numbers, k of each; slot 0 says that there is no row."""

    numbers: I64
    slots: I64
    rounds: I64
    seals: U64

    @classmethod
    def of(cls, table: I64) -> "RowEntries":
        """The entries of a table, int64[k, 4], that lists seals as the signed numbers of the same 64 bits."""
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3].copy().view(np.uint64))

    def table(self) -> I64:
        """Their table, int64[k, 4]."""
        return np.stack([self.numbers, self.slots, self.rounds, self.seals.view(np.int64)], axis=1)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "RowEntries":
        """The chosen entries."""
        return RowEntries(self.numbers[chosen], self.slots[chosen], self.rounds[chosen], self.seals[chosen])

    def and_(self, others: "RowEntries") -> "RowEntries":
        """The entries, and others behind them."""
        return RowEntries(
            np.concatenate([self.numbers, others.numbers]),
            np.concatenate([self.slots, others.slots]),
            np.concatenate([self.rounds, others.rounds]),
            np.concatenate([self.seals, others.seals]),
        )

    @property
    def used(self) -> I64:
        """The slots of those that have one."""
        return self.slots[self.slots > 0]

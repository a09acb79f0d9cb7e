"""The directions of past rounds, each kept while a client's row still refers to it."""

from collections import Counter

import numpy as np
import numpy.typing as npt

Direction = npt.NDArray[np.float32]


class History:
    """v[t] of float32[n] by round, counted by the rows that were written in that round.

    MimiC's correction is c_i = v[t_i] - r_i, with t_i the round that wrote the row r_i. Keeping v[t] once a round
    instead of c_i once a client lets an update be folded in before its round's v is known.

    Cost: 4 n bytes for each round that some client was last heard in, at most one per client.
    """

    def __init__(self) -> None:
        self._directions: dict[int, Direction] = {}
        self._references: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many rounds are kept."""
        return len(self._directions)

    def __getitem__(self, round: int) -> Direction:
        """v[round], not to be written to."""
        return self._directions[round]

    def keep(self, round: int, v: Direction, references: int) -> None:
        """Keep v[round] for that many rows (at least one)."""
        self._directions[round] = v
        self._references[round] = references

    def release(self, round: int) -> None:
        """One row less refers to ``round``; with the last one its direction goes."""
        self._references[round] -= 1
        if self._references[round] == 0:
            del self._references[round], self._directions[round]

"""The directions of past rounds, each kept while a client's row still refers to it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Direction = npt.NDArray[np.float32]


@dataclass(frozen=True)
class History:
    """v[t] of float32[n] by round, counted by the rows that were written in that round. A round makes a new history.

    MimiC's correction is c_i = v[t_i] - r_i, with t_i the round that wrote the row r_i. Keeping v[t] once a round
    instead of c_i once a client lets an update be folded in before its round's v is known.

    Attributes:
        directions: v[t] by t.
        references: how many rows refer to each.

    Cost: 4 n bytes for each round that some client was last heard in, at most one per client.
    """

    directions: Mapping[int, Direction] = field(default_factory=dict)
    references: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many rounds are kept."""
        return len(self.directions)

    def __iter__(self) -> Iterator[int]:
        """The rounds, oldest first."""
        return iter(sorted(self.directions))

    def get(self, round: int | None) -> Direction | None:
        """v[round], not to be written to; None for a round that is not kept."""
        return None if round is None else self.directions.get(round)

    def after(self, round: int, v: Direction, rows: int, before: Iterable[int | None]) -> "History":
        """The history once ``rows`` rows refer to v[round], and no longer to the rounds ``before``."""
        references = Counter(self.references)
        if rows:
            references[round] = rows
        return self._without(references, before, {**self.directions, round: v})

    def without(self, before: Iterable[int | None]) -> "History":
        """The history once a row less refers to each of these rounds."""
        return self._without(Counter(self.references), before, self.directions)

    def _without(
        self, references: Counter[int], before: Iterable[int | None], directions: Mapping[int, Direction]
    ) -> "History":
        references.subtract(t for t in before if t is not None and t in references)
        alive = {t: count for t, count in references.items() if count > 0}
        return History({t: directions[t] for t in alive}, alive)

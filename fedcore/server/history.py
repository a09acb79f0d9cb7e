"""Directions of past rounds, each kept while a client's row refers to it; and how they are folded into those rows."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedcore.aggregation import Whole, exchange_whole
from fedcore.clients import ClientId
from fedcore.errors import DivergedError
from fedcore.kernels import ExactSum
from fedcore.store import ClientStore
from fedcore.store.rounding import rounding_keys

Direction = npt.NDArray[np.float32]


@dataclass(frozen=True)
class History:
    """v[t] of float32[n] by round, counted by the rows that were written in that round. A round makes a new history.

    MimiC's correction is c_i = v[t_i] - r_i, with t_i the round that wrote the row r_i. Keeping v[t] once a round
    instead of c_i once a client lets an update be folded in before its round's v is known.

    Attributes:
        directions: v[t] by t.
        references: how many rows refer to each.

    A direction leaves when no row refers to it; or when there are more than somebody wants to keep, and he *folds* it
    into its rows: r becomes r - v[t], so that the correction is -r, and the row refers to no round any more.

    Cost: 4 n bytes for each round that is kept.
    """

    directions: Mapping[int, Direction] = field(default_factory=dict)
    references: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of rounds that are kept."""
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

    def surplus(self, most: int) -> list[int]:
        """The rounds to fold so that at most this many are kept, except the newest, which always is.

        They are those of the fewest rows, since a fold rewrites these; of equals the oldest. Rows move on to newer
        rounds as their clients are heard, so those are the oldest rounds, and an early one that all clients still refer
        to waits until most of them have been heard again.
        """
        older = sorted(self.directions)[:-1]
        return sorted(older, key=lambda t: (self.references[t], t))[: max(0, len(self) - most)]

    def folded(self, rounds: Iterable[int]) -> "History":
        """The history once these rounds are in their rows."""
        kept = self.directions.keys() - set(rounds)
        return History({t: self.directions[t] for t in kept}, {t: self.references[t] for t in kept})

    def _without(
        self, references: Counter[int], before: Iterable[int | None], directions: Mapping[int, Direction]
    ) -> "History":
        references.subtract(t for t in before if t is not None and t in references)
        alive = {t: count for t, count in references.items() if count > 0}
        return History({t: directions[t] for t in alive}, alive)


def fold_history(
    store: ClientStore,
    history: History,
    rounds: Iterable[int],
    total: npt.NDArray[np.float64] | ExactSum,
    *,
    round: int,
    staged: Collection[ClientId],
    at_once: int,
    whole: Whole,
) -> None:
    """Stage r_i - v[t] as the row of every client last heard in one of the rounds, and let the total follow.

    A correction c_i = v[t] - r_i is then minus the row. What the row cannot hold of it leaves the total, which stays
    the sum of the corrections as stored: T' = T - sum of (r_i' - r_i + v[t]), r_i' the new row as it is read.

    Args:
        store: of the rows. The new ones keep their rounds, which tell how old they are.
        history: the directions.
        rounds: which of them are folded; the history still holds them.
        total: T, float64[n] or exact, written in place; worthless if the fold fails.
        round: the one that is open.
        staged: clients whose rows change in this round anyway.
        at_once: rows of one pass.
        whole: of which the rows that lie here are slices.

    Raises:
        DivergedError: r_i - v[t] is not finite, or past what the codec holds.
        CorruptionError: a row is not what was written.

    Cost: a row read and written for each such client, and with a codec 4 n bytes more for each row of a pass.
    """
    for t in rounds:
        v = history.get(t)
        clients = [client for client in store.clients_of(t) if client not in staged]
        for start in range(0, len(clients), at_once):
            some = clients[start : start + at_once]
            k = len(some)
            old = store.rows_of(some)
            rows = old if store.codec == "f32" else [store.read(client) for client in some]
            new = store.stage_all(some, round=t)
            # One step from r to v, of length 1: h = r - v.
            arguments = total, rows, [v] * k, np.ones(k), -np.ones(k), old, [v] * k, new
            keys = rounding_keys(store, "a history that is folded", round, some)
            squares = exchange_whole(store, some, *arguments, out=total, keys=keys, whole=whole).here
            if not np.isfinite(squares).all():
                client = some[int(np.flatnonzero(~np.isfinite(squares))[0])]
                raise DivergedError(
                    f"client {client!r}: its correction of round {t} is past what a row of {store.codec} holds; x "
                    "stays, lower the rates or let the client depart"
                )

"""What an open round remembers of the clients heard, once their updates are folded in and forgotten."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedcore.server.batch import Batch, Counters
from fedcore.store import ClientId

F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class Tally:
    """The clients heard, in the order of their updates, and numbers of theirs as float64[k] columns."""

    clients: list[ClientId] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    _batches: list[tuple[Batch, F64]] = field(default_factory=list)

    def add(self, batch: Batch, squares: F64) -> None:
        """Count replies that were folded in; the vectors that they came with are let go.

        Args:
            squares: float64[k], |h_i|^2.
        """
        batch.ys, batch.controls = [], []
        self.clients += batch.clients
        self.counters += batch.counters
        self._batches.append((batch, squares))

    def column(self, name: str) -> F64:
        """One of ``Batch``'s columns over all clients heard, float64[S]."""
        columns = [getattr(batch, name) for batch, _ in self._batches]
        return columns[0] if len(columns) == 1 else np.concatenate([np.empty(0), *columns])

    @property
    def squares(self) -> F64:
        """|h_i|^2, float64[S]."""
        columns = [squares for _, squares in self._batches]
        return columns[0] if len(columns) == 1 else np.concatenate([np.empty(0), *columns])

    def longest(self) -> str:
        """Whose update is the longest, as the end of a message; empty if none was heard."""
        if not self.clients:
            return ""
        squares = self.squares
        i = int(np.argmax(squares))
        return f"; the longest update is that of client {self.clients[i]!r}, {squares[i] ** 0.5:g}"

    @property
    def weighed(self) -> int:
        """How many of them have a weight > 0."""
        return sum(int(np.count_nonzero(batch.weights)) for batch, _ in self._batches)

"""The clients of one round, and how much of its work each of them does."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.float_mode import ieee
from fedcore.representation import Represented

Clients = npt.NDArray[np.int64]

ROUNDING = 1e-9
"""How far below a whole number of steps a share of E may fall by rounding, and still count as that number."""


@dataclass(frozen=True, eq=False, repr=False)
class Active(Represented):
    """The clients of one round.

    A share, not a number of steps: a pattern knows no data, and where E counts epochs each client has its own number
    of steps. Who does nothing is not active, so every client here does at least one step.

    Attributes:
        clients: int64[k], ascending, each once.
        shares: float64[k] in (0, 1], the part of its E local steps that each client does; None if all do all.
        counts: int64[k], >= 1, how often each was drawn, where draws are with replacement; else None.

    >>> Active(np.array([2, 5]), shares=np.array([0.5, 0.01])).steps(20)
    array([10,  1])
    """

    clients: Clients
    shares: npt.NDArray[np.float64] | None = None
    counts: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def only(self, kept: npt.NDArray[Any]) -> "Active":
        """A choice of them, with their shares and counts.

        Args:
            kept: bool[k], or int64[m] ascending places in ``clients``.
        """
        return Active(
            self.clients[kept],
            None if self.shares is None else self.shares[kept],
            None if self.counts is None else self.counts[kept],
        )

    @ieee
    def working(self, shares: npt.NDArray[np.float64]) -> "Active":
        """Each does that part of what it does now; those whose part is 0 are left out.

        Args:
            shares: float64[k] in [0, 1].
        """
        done = shares if self.shares is None else self.shares * shares
        return Active(self.clients, done, self.counts).only(done > 0)

    def steps(self, full: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """s_i, the local steps that each client does: the whole steps in its share of E, and at least one.

        Args:
            full: E, the steps of a whole round: an int >= 1 for all, or int64[k].

        Returns:
            int64[k], in 1 .. E.
        """
        everything = np.broadcast_to(np.asarray(full, np.int64), self.clients.shape)
        if self.shares is None:
            return everything.copy()
        return np.maximum(np.floor(self.shares * everything + ROUNDING), 1).astype(np.int64)

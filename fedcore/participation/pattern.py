"""What every participation pattern is: a pure function from a round to the clients that take part in it."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError

Clients = npt.NDArray[np.int64]


class Participation(ABC):
    """Who takes part in which round.

    Args:
        clients: N; the clients are 0 .. N-1.
        seed: the run's seed, 0 .. 2^64 - 1.
        first_round: "all" makes everyone active in round 0, as the MimiC paper's analysis assumes (Sec. 5).

    Raises:
        RangeError: an argument is outside its range.

    Determinism: ``active(t)`` depends on the arguments and t alone, so every algorithm of a comparison sees
    the same active sets, and a round can be repeated without those before it.
    """

    def __init__(self, clients: int, *, seed: int = 0, first_round: Literal["all"] | None = None) -> None:
        if clients < 1:
            raise RangeError(f"clients: expected an int >= 1, got {clients!r}")
        if not 0 <= seed < 2**64:
            raise RangeError(f"seed: expected an int in 0 .. 2^64 - 1, got {seed!r}")
        if first_round not in ("all", None):
            raise RangeError(f"first_round: expected 'all' or None, got {first_round!r}")
        self.clients = clients
        self.seed = seed
        self.first_round = first_round

    def active(self, round: int) -> Clients:
        """The clients that take part in a round, in ascending order.

        Args:
            round: counted from 0.

        Returns:
            int64[k] with 0 <= k <= N: nobody at all is a legal answer.

        Raises:
            RangeError: ``round`` is negative.
        """
        if round < 0:
            raise RangeError(f"round: expected an int >= 0, got {round!r}")
        if round == 0 and self.first_round == "all":
            return np.arange(self.clients)
        return self._active(round)

    @abstractmethod
    def _active(self, round: int) -> Clients:
        """The same without ``first_round``: ascending, a pure function of the arguments and ``round``."""

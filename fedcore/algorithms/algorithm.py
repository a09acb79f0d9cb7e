"""What an algorithm is: a table that the round runs. No algorithm touches rows or buffers.

With A the round's sum of what its updates add and T a running total that the method keeps, every method is

    A  = sum over the cohort of w_i (h_i | h_i - r_i | h_i - r_i + v[t_i])
    v  = from_sum A + from_total T
    T' = T + keep_sum A + keep_v v
    x' = x - gamma v

where h_i is client i's mean local gradient, r_i its row (h_i of the round t_i in which it was last heard), and v[t]
the direction of round t.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class Cohort:
    """What a round knows of its clients when it is finished: the symbols of the papers."""

    S: int
    """Clients heard."""
    N: int
    """Clients registered."""
    W: float
    """Sum of the weights of the clients heard."""
    rows: int
    """Clients that have a row, this round's counted: those heard at least once, where the method keeps rows."""


@dataclass(frozen=True)
class Step:
    """The coefficients of v and T' above."""

    from_sum: float
    from_total: float = 0.0
    keep_sum: float = 0.0
    keep_v: float = 0.0


class Algorithm(ABC):
    """A server algorithm. Subclasses set the table's entries and say how v follows from the sums."""

    adds: ClassVar[Literal["h", "h - r", "h - r + v[t]"]] = "h"
    """What one update adds to A. Without ``r`` the method keeps no rows; with it, the row becomes h."""
    keeps_total: ClassVar[bool] = False
    """Whether there is a running total T: float64[n], zero at first."""
    averages_models: ClassVar[bool] = False
    """Without a server rate: whether h is x - y and gamma 1 (averaging), instead of gamma = mean of eta_i K_i."""
    steps_without_clients: ClassVar[bool] = False
    """Whether x moves in a round that heard nobody."""
    local_rule: ClassVar[str] = "sgd"
    """What a client does, by its name in ``fedcore.local``."""
    weights: Literal["uniform", "examples"] = "uniform"
    """w_i: 1, or the client's number of examples n_i."""

    @abstractmethod
    def step(self, cohort: Cohort) -> Step:
        """How v and T' follow from A and T."""

    def moves(self, cohort: Cohort) -> bool:
        """Whether x moves in a round with this cohort."""
        return cohort.S > 0 or self.steps_without_clients

    @property
    def keeps_rows(self) -> bool:
        """Whether each client has a row."""
        return "r" in self.adds

    @property
    def keeps_history(self) -> bool:
        """Whether the directions v[t] are kept while a row refers to them."""
        return "v[t]" in self.adds

"""What an algorithm is: a table that the round runs. No algorithm touches rows or buffers.

A client steps along

    a grad(y) + b grad(x_prev) + offset + mu (y - x),   offset = from_row r_i + from_mean c + from_momentum g

and sends y, from which h_i = (x - y_i) / (eta_i K_i), the mean of its directions. With A and B the round's sums of
what its updates add, T a running total, and g the direction of the round before, every method is

    A  = sum over the cohort of w_i (h_i | h_i - r_i | h_i - r_i + v[t_i] | raw_i - r_i)
    B  = sum over the cohort of (control_i - r_i), where clients send a second vector
    v  = from_sum A + from_total T + from_momentum g
    T' = T + keep_sum A + keep_control B + keep_v v
    x' = x - gamma v

where r_i is client i's row (h_i, raw_i or control_i of the round t_i in which it was last heard), v[t] the direction
of round t, c = T / N the mean of all rows, and raw_i = (h_i - offset_i) / a the client's mean gradient before the
correction.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError, UnknownNameError

F64 = npt.NDArray[np.float64]
Added = Literal["h", "h - r", "h - r + v[t]", "raw - r"]
Placement = Literal["server", "client"]


@dataclass(frozen=True)
class Cohort:
    """What a round knows of its clients when it is finished: the symbols of the papers."""

    S: int
    """Clients heard."""
    weighed: int
    """Of those, the clients of a weight > 0 (K_t in Ruan et al., scheme A)."""
    N: int
    """Clients registered."""
    devices: int
    """Clients in the objective (N in Ruan et al.): those registered, and the departed ones whose shares it keeps."""
    W: float
    """Sum of the weights of the clients heard: of their draws, where the method has no weights of its own."""
    rows: int
    """Clients that have a row, this round's counted: those heard at least once, where the method keeps rows."""


@dataclass(frozen=True)
class Claims:
    """What the clients of a cohort say of their work, float64[k] each."""

    steps: F64
    """K_i (s_k in Ruan et al.): local steps done."""
    examples: F64
    """n_i, as the client says."""
    counts: F64
    """How many times it was drawn."""
    shares: F64 | None
    """p^k = n_k / n over ALL registered clients, as the server's ``examples`` say; None where it was told none."""
    ages: F64 | None
    """t - t0, 1 in a client's first round after its arrival; infinite for those of the start, None if all are that."""


@dataclass(frozen=True)
class Direction:
    """The coefficients of what a client steps along."""

    a: float = 1.0
    b: float = 0.0
    mu: float = 0.0
    from_row: float = 0.0
    from_mean: float = 0.0
    from_momentum: float = 0.0


@dataclass(frozen=True)
class Step:
    """The coefficients of v and T'."""

    from_sum: float
    from_total: float = 0.0
    from_momentum: float = 0.0
    keep_sum: float = 0.0
    keep_control: float = 0.0
    keep_v: float = 0.0


MEAN_GRADIENT = "mean gradient"
"""The second vector that is the mean of the client's gradients at y alone, before any correction: a row of raw_i."""
ROW_CHANGE = "change of the row"
"""The second vector that is raw_i - r_i, from a client that keeps its own row r_i and then puts raw_i in its place."""


class Algorithm(ABC):
    """A server algorithm. Subclasses set the table's entries and say how v follows from the sums.

    The options of a subclass are the arguments of its ``__init__``, each kept as an attribute of its name. Its entries
    stay as they are, and ``weigh`` and ``step`` depend on their arguments and the options alone. A table that
    contradicts itself is refused when a ``Server`` is made of it (``fedcore.algorithms.checks``).
    """

    adds: Added = "h"
    """What one update adds to A. "raw - r" makes raw_i the client's row, the others with r make h_i its row."""
    second: str | None = None
    """What clients send as a second vector, ``control``: B sums it and it becomes the row, if there are rows. None for
    no such vector, ``MEAN_GRADIENT`` or ``ROW_CHANGE``; or words of one's own for a vector that only one's own clients
    can make, which then nobody else pretends to make."""
    placement: Placement = "server"
    """Who keeps the rows. Where clients do, B sums what they send as it is."""
    keeps_total: bool = False
    """Whether there is a running total T: float64[n], zero at first."""
    averages_models: bool = False
    """Without a server rate: whether h is x - y and gamma 1 (averaging), instead of gamma = mean of eta_i K_i."""
    takes_server_rate: bool = True
    """Whether ``Server(server_lr=)`` may be given: not where h is x - y whatever the server's rate."""
    steps_without_clients: bool = False
    """Whether x moves in a round that heard nobody."""
    local_rule: str = "sgd"
    """What a client does, by its name in ``fedcore.local``."""
    direction: Direction = Direction()
    """What a client steps along."""

    needs_shares: bool = False
    """Whether ``weigh`` reads the shares, for which the server must be told its clients' numbers of examples."""

    @abstractmethod
    def step(self, cohort: Cohort) -> Step:
        """How v and T' follow from A, B, T and g."""

    def weigh(self, claims: Claims) -> F64:
        """w_i, float64[k]: by default 1, or the number of times that the client was drawn.

        A weight of zero leaves the client out of A; it was heard all the same.
        """
        return claims.counts

    def moves(self, cohort: Cohort) -> bool:
        """Whether x moves in a round with this cohort."""
        return cohort.W > 0 or self.steps_without_clients

    @property
    def keeps_rows(self) -> bool:
        """Whether the server has a row for each client."""
        return self.placement == "server" and ("r" in self.adds.split() or self.second is not None)

    @property
    def hears_once(self) -> bool:
        """Whether a client has one reply in a round, so that it cannot have been drawn twice."""
        return self.keeps_rows or self.second is not None or self.needs_shares

    @property
    def weighs_claims(self) -> bool:
        """Whether ``weigh`` may read the examples that clients claim, which the server then bounds: by what it knows,
        or by what others claim. So of each ``weigh`` of one's own that does not say otherwise."""
        return type(self).weigh is not Algorithm.weigh

    @property
    def most_steps(self) -> int | None:
        """The most local steps that it has a client do in a round; None where that is the clients' own affair."""
        return 1 if self.local_rule == "one minibatch" else None

    @property
    def needs_plain_steps(self) -> bool:
        """Whether raw_i is derived from y, which local momentum and clipping would falsify."""
        return "raw" in self.adds.split()

    @property
    def takes_warm_start(self) -> bool:
        """Whether there are rows, or a momentum at x_{t-1}, that can start from the clients' gradients."""
        return not self.keeps_history and (self.keeps_total or self.direction.b != 0)

    @property
    def uploads(self) -> int:
        """Vectors that a client sends in a round, the "model uploadings" of Sun et al. 2023: y, and a second vector."""
        return 2 if self.second else 1

    @property
    def sends_offset(self) -> bool:
        """Whether the server sends clients an offset beside x."""
        d = self.direction
        return bool(d.from_mean or d.from_momentum or (d.from_row and self.keeps_rows))

    @property
    def keeps_history(self) -> bool:
        """Whether the directions v[t] are kept while a row refers to them."""
        return "v[t]" in self.adds

    @property
    def keeps_momentum(self) -> bool:
        """Whether g, the last direction, is part of what clients step along."""
        return self.direction.from_momentum != 0


def choose(option: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a value that an option of an algorithm does not have.

    Raises:
        UnknownNameError: it is not one of those known.
    """
    if value not in known:
        raise UnknownNameError.of(option, value, known)


def within(option: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside (low, high].

    Raises:
        RangeError: it is outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise RangeError(f"{option}: expected a number in ({low:g}, {high:g}], got {value!r}")

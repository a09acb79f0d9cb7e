"""The contract of an algorithm: a table of numbers that the round runs. No algorithm touches rows or buffers.

A client steps along

    a grad(y) + b grad(x_prev) + offset + mu (y - x),   offset = from_row r_i + from_mean c + from_momentum g

and sends y, from which h_i = (x - y_i) / (eta_i K_i), the mean of its directions; or h_i = x - y_i, where models are
averaged. With r_i its row and q_i an anchor, a vector that goes with the row or that all were sent, every method is

    r_i' = row.h h_i + row.r r_i + row.q q_i
    A    = sum over the cohort of w_i (adds.h h_i + adds.r r_i + adds.q q_i + adds.row r_i')
    B    = sum over the cohort of (r_i' - r_i)
    v    = a linear form over A, B, T and g
    T'   = a linear form over A, B, T, g and v
    x'   = x - gamma v

where T is a running total, g the v of the round before, v[t] that of round t, and c = T / N. Where clients send a
second vector, ``control``, r_i' is that.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Literal, TypeAlias

from fedcore.algorithms.cohort import EXAMPLE, Claims, Cohort
from fedcore.errors import UnknownNameError
from fedcore.kernels import Linear, Terms
from fedcore.local_rules import LocalRule, Sgd
from fedcore.typing import F64

__all__ = [
    "MEAN_GRADIENT",
    "NOTHING",
    "ROW_CHANGE",
    "Algorithm",
    "Anchor",
    "Direction",
    "H",
    "Linear",
    "Placement",
    "Step",
    "Terms",
    "Unit",
    "choose",
    "is_made_here",
]

Anchor: TypeAlias = Literal["v[t]", "offset"]
Placement: TypeAlias = Literal["server", "client"]
"""The keeper of the rows."""
Unit: TypeAlias = Literal["gradient", "model"]

NOTHING, H = Terms(), Terms(h=1)
STAYS = Linear(T=1)
"""T' = T."""

MEAN_GRADIENT = "mean gradient"
"""The second vector that is the mean of the client's gradients at y alone, before any correction: its new row."""
ROW_CHANGE = "change of the row"
"""The second vector that is r_i' - r_i, from a client that keeps its own row."""


def is_made_here(second_vector: str | None) -> bool:
    """Tell whether fedcore's own loops make that second vector: there is none, or it is ``MEAN_GRADIENT``."""
    return second_vector in (None, MEAN_GRADIENT)


@dataclass(frozen=True)
class Direction:
    """The coefficients of what a client steps along."""

    a: float = 1.0
    b: float = 0.0
    mu: float = 0.0
    from_row: float = 0.0
    from_mean: float = 0.0
    from_momentum: float = 0.0


GRADIENT, SGD = Direction(), Sgd()
"""Plain steps of SGD."""


@dataclass(frozen=True)
class Step:
    """The end of a round: v and T' as linear forms over its sums."""

    v: Linear
    T: Linear = STAYS
    gamma: float | None = None
    """How far x goes along v; None for the server's rate, or what follows from the unit. A server's rate that is given
    goes before it."""
    lookahead: float = 0.0
    """Clients are sent x' + lookahead (x' - x) in the place of x'."""


class Algorithm(ABC):
    """A server algorithm. Subclasses set the table's entries and say how v follows from the sums.

    A subclass is a frozen dataclass whose fields are its options; it has a repr, equality and a form in JSON from that.
    Entries that depend on an option are properties. ``weigh`` and ``step`` depend on their arguments and the options
    alone. A table that contradicts itself is refused when a ``Server`` is made of it (``fedcore.algorithms.checks``).
    """

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name, None)!r}" for name in signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"

    @cached_property
    def row(self) -> Terms:
        """The client's new row; all zero where no row follows from what is sent as y."""
        return NOTHING

    @cached_property
    def adds(self) -> Terms:
        """The terms that one update adds to A."""
        return H

    @cached_property
    def anchor(self) -> Anchor | None:
        """The meaning of q: v[t_i] of the round in which the client was last heard; or the offset that all were sent,
        without the row's part; or nothing."""
        return None

    @cached_property
    def second_vector(self) -> str | None:
        """The vector that clients send beside y, as ``control``: it becomes the row. None for no such vector,
        ``MEAN_GRADIENT`` or ``ROW_CHANGE``; or words of one's own for a vector that only one's own clients can make."""
        return None

    @cached_property
    def placement(self) -> Placement:
        """The keeper of the rows. Where clients do, B sums what they send as it is."""
        return "server"

    @cached_property
    def direction(self) -> Direction:
        """The direction of a client's steps."""
        return GRADIENT

    @cached_property
    def local_rule(self) -> LocalRule:
        """The rule by which a client steps along its minibatches (``fedcore.local_rules``)."""
        return SGD

    @cached_property
    def unit(self) -> Unit:
        """The unit of h without a server rate: "gradient", and gamma is the mean of eta_i K_i; or "model", the
        difference x - y, and gamma is 1 (averaging)."""
        return "gradient"

    @cached_property
    def averaging_option(self) -> str | None:
        """The option with which the method averages models, so that nobody need say numbers of steps, as it is
        written; None for none."""
        return None

    @cached_property
    def takes_server_rate(self) -> bool:
        """Tell whether ``Server(server_lr=)`` may be given: not where h is x - y whatever the server's rate."""
        return True

    @cached_property
    def keeps_total(self) -> bool:
        """Tell whether there is a running total T: float64[n], zero at first."""
        return False

    @cached_property
    def sums_changes(self) -> bool:
        """Tell whether B is summed: by default where clients send second vectors.

        Cost: for others a second pass over the cohort's rows.
        """
        return self.second_vector is not None

    @cached_property
    def steps_without_clients(self) -> bool:
        """Tell whether x moves in a round that heard nobody."""
        return False

    @cached_property
    def needs_shares(self) -> bool:
        """Tell whether ``weigh`` reads the shares, for which the server must know its clients' numbers of examples."""
        return False

    @abstractmethod
    def step(self, cohort: Cohort) -> Step:
        """Say how v and T' follow from A, B, T and g."""

    def weigh(self, claims: Claims) -> F64:
        """w_i, float64[k]: by default 1, or the number of times that the client was drawn.

        A weight of zero leaves the client out of A; it was heard all the same.
        """
        return claims.counts

    def moves(self, cohort: Cohort) -> bool:
        """Tell whether x moves in a round with this cohort."""
        return cohort.W > 0 or self.steps_without_clients

    # What follows from the entries; where the inference is wrong for a method, the method says it itself.

    @cached_property
    def keeps_rows(self) -> bool:
        """Tell whether the server has a row for each client."""
        return self.placement == "server" and (self.row != NOTHING or self.second_vector is not None)

    @cached_property
    def rows_at_clients(self) -> bool:
        """Tell whether each client keeps its own row."""
        return self.placement == "client"

    @cached_property
    def sends_row_change(self) -> bool:
        """Tell whether clients keep their rows and send how these change."""
        return self.rows_at_clients and self.second_vector == ROW_CHANGE

    @cached_property
    def averages(self) -> bool:
        """Tell whether models are averaged, where no server rate is given."""
        return self.unit == "model"

    @cached_property
    def hears_once(self) -> bool:
        """Tell whether a client has one reply in a round, so that it cannot have been drawn twice."""
        return self.keeps_rows or self.second_vector is not None or self.needs_shares

    @cached_property
    def weighs_claims(self) -> bool:
        """Tell whether ``weigh`` may read the examples that clients claim, which the server then bounds: by what it
        knows, or by what others claim. So of each ``weigh`` of one's own that does not say otherwise."""
        return type(self).weigh is not Algorithm.weigh

    @cached_property
    def most_steps(self) -> int | None:
        """The most local steps that it has a client do in a round; None where that is the clients' own affair."""
        return self.local_rule.most_steps

    @cached_property
    def reads_offset(self) -> bool:
        """Tell whether the offset is part of what a row becomes or an update adds."""
        return self.anchor == "offset" and bool(self.row.q or self.adds.q)

    @cached_property
    def sums(self) -> Terms:
        """The terms of h, r and q in A, the row's form put in: sum_i w_i (sums.h h_i + sums.r r_i + sums.q q_i)."""
        adds, row = self.adds, self.row
        return Terms(h=adds.h + adds.row * row.h, r=adds.r + adds.row * row.r, q=adds.q + adds.row * row.q)

    @cached_property
    def hides_mean(self) -> bool:
        """Tell whether the cohort's mean of h does not follow from A and the offset."""
        return not self.sums.h or bool(self.sums.r) or bool(self.sums.q and self.keeps_history)

    @cached_property
    def needs_plain_steps(self) -> bool:
        """Tell whether the client's mean gradient follows from y, which local momentum and clipping would falsify."""
        return self.reads_offset

    @cached_property
    def takes_warm_start(self) -> bool:
        """Tell whether rows that are gradients, or a momentum at x_{t-1}, can start from the clients'."""
        starts = not self.keeps_history and (self.total_sums_rows or not self.keeps_rows)
        return starts and self.unit == "gradient" and (self.keeps_total or self.direction.b != 0)

    @cached_property
    def total_sums_rows(self) -> bool:
        """Tell whether T sums all rows, or all corrections v[t_i] - r_i: one who departs is taken out of it."""
        if not self.keeps_rows or not self.keeps_total:
            return False
        step, plain = self._tried, not self.weighs_claims
        if step is None:
            return False
        form = step.T
        if form == Linear(T=1, B=1):
            return True
        if self.keeps_history:
            return plain and self.adds == Terms(row=1, r=-1, q=1) and form == Linear(T=1, A=-1, v=EXAMPLE.S)
        return plain and self.adds == Terms(row=1, r=-1) and form == Linear(T=1, A=1)

    @cached_property
    def total_is_whole(self) -> bool:
        """Tell whether T' = T + a A + b B + s v with whole a, b and s, so that it can be kept as integers."""
        step = self._tried
        return step is not None and is_whole_sum(step.T)

    @cached_property
    def folds_history(self) -> bool:
        """Tell whether a row r with the anchor v[t] may become r - v[t] with none, so that few v[t] need be kept."""
        row, adds = self.row, self.adds
        return self.keeps_history and adds.q == -adds.r and row.q == -row.r and self.total_sums_rows

    @cached_property
    def says_gamma(self) -> bool:
        """Tell whether ``step`` says gamma."""
        step = self._tried
        return step is not None and step.gamma is not None

    @cached_property
    def looks_ahead(self) -> bool:
        """Tell whether clients are sent more than x."""
        step = self._tried
        return step is not None and step.lookahead != 0

    @cached_property
    def _tried(self) -> Step | None:
        """The step after a round of two clients; None of a method for which there is no such round."""
        try:
            return self.step(EXAMPLE)
        except Exception:
            return None

    @cached_property
    def uploads(self) -> int:
        """Vectors that a client sends in a round, the "model uploadings" of Sun et al. 2023: y, and a second vector."""
        return 1 if self.second_vector is None else 2

    @cached_property
    def sends_offset(self) -> bool:
        """Tell whether the server sends clients an offset beside x."""
        d = self.direction
        return bool(d.from_mean or d.from_momentum or (d.from_row and self.keeps_rows))

    @cached_property
    def keeps_history(self) -> bool:
        """Tell whether the directions v[t] are kept while a row refers to them."""
        return self.anchor == "v[t]" and bool(self.row.q or self.adds.q)

    @cached_property
    def keeps_momentum(self) -> bool:
        """Tell whether g, the last direction, is part of what clients step along, or of how a round ends."""
        step = self._tried
        return self.direction.from_momentum != 0 or step is None or bool(step.v.g or step.T.g)


def is_whole_sum(form: Linear) -> bool:
    """Tell whether a total of this form can be kept as integers: its coefficients are whole, and that of g is 0."""
    return form.g == 0 and all(float(c).is_integer() and abs(c) <= 2**31 for c in form)


def choose(option: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a value that an option of an algorithm does not have.

    Raises:
        UnknownNameError: it is not one of those known.
    """
    if value not in known:
        raise UnknownNameError.of(option, value, known)

"""The contract of an algorithm: a table of numbers that the round runs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from fedcore.arguments import due_in
from fedcore.arrays import F64
from fedcore.errors import AlgorithmError, UnknownNameError
from fedcore.kernels import Linear, Terms
from fedcore.native import core
from fedcore.simulation.local_rules import LocalRule, Sgd
from fedcore.store.registry import ClientId

# The part of a round that an algorithm sees: the clients' claims and, when it is finished, its cohort.


def _none() -> F64:
    return np.empty(0)


@dataclass(frozen=True)
class Claims:
    """The claims of a cohort's clients about their work, float64[k] each."""

    steps: F64 = field(default_factory=_none)
    """K_i (s_k in Ruan et al.): local steps done."""
    examples: F64 = field(default_factory=_none)
    """n_i, as the client says."""
    counts: F64 = field(default_factory=_none)
    """How many times it was drawn."""
    shares: F64 | None = None
    """p^k = n_k / n over ALL registered clients, None where the server has no n_k."""
    ages: F64 | None = None
    """t - t0, 1 in a client's first round after its arrival; infinite for those of the start, None if all are that."""
    clients: Sequence[ClientId] | None = None
    """Who says it."""


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The clients of a round when it is finished: the symbols of the papers."""

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
    claims: Claims = field(default_factory=Claims)
    """Of the clients heard."""
    weights: F64 = field(default_factory=_none)
    """float64[S], w_i."""
    squares: F64 = field(default_factory=_none)
    """float64[S], |h_i|^2."""
    eta_steps: F64 = field(default_factory=_none)
    """float64[S], eta_i K_i, how far a gradient of length 1 goes; of K_i no more than the server believes."""
    square_of_sum: float = math.nan
    """|A|^2, where the method ``needs_square_of_sum``."""


# The contract of an algorithm: a table of numbers that the round runs. No algorithm touches rows or buffers.
#
# A client steps along
#
#     a grad(y) + b grad(x_prev) + offset + mu (y - x),   offset = from_row r_i + from_mean c + from_momentum g
#
# and sends y, from which h_i = (x - y_i) / (eta_i K_i), the mean of its directions; or h_i = x - y_i, where models are
# averaged. With r_i its row and q_i an anchor, a vector that goes with the row or that all were sent, every method is
#
#     r_i' = row.h h_i + row.r r_i + row.q q_i
#     A    = sum over the cohort of w_i (adds.h h_i + adds.r r_i + adds.q q_i + adds.row r_i')
#     B    = sum over the cohort of (r_i' - r_i)
#     v    = a linear form over A, B, T and g
#     T'   = a linear form over A, B, T, g and v
#     x'   = x - gamma v
#
# where T is a running total, g the v of the round before, v[t] that of round t, and c = T / N. Where clients send a
# second vector, ``control``, r_i' is that.


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
    alone. A table that contradicts itself is refused when a ``Server`` is made of it (``fedcore.algorithms.base``).
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
        """The rule by which a client steps along its minibatches (``fedcore.simulation.local_rules``)."""
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
        """Whether T is the sum of all rows, or of all corrections v[t_i] - r_i, so that a client can be removed."""
        return False

    @cached_property
    def total_is_whole(self) -> bool:
        """Whether T' = T + a A + b B + s v with integers a, b and s, so that sums can be exact."""
        return False

    @cached_property
    def folds_history(self) -> bool:
        """Tell whether a row r with the anchor v[t] may become r - v[t] with none, so that few v[t] need be kept."""
        row, adds = self.row, self.adds
        return self.keeps_history and adds.q == -adds.r and row.q == -row.r and self.total_sums_rows

    @cached_property
    def most_history(self) -> int:
        """The directions v[t] that are kept where ``folds_history``; older ones are folded into their rows."""
        return 64

    @cached_property
    def says_gamma(self) -> bool:
        """Whether ``step`` returns gamma."""
        return False

    @cached_property
    def needs_square_of_sum(self) -> bool:
        """Whether ``step`` or ``moves`` reads ``Cohort.square_of_sum``.

        Cost: a pass over A in each round.
        """
        return False

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether ``step`` returns a lookahead: clients are sent more than x."""
        return False

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
        """Whether g, the last direction, is part of what clients step along, or of how a round ends."""
        return bool(self.direction.from_momentum)


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


# Checks that a method's table does not contradict itself, and that its results are those due.
#
# A table is read in several places, each of which leaves out what it does not know: a contradiction would not
# fail there, but be another method.


FLAGS = (
    *("keeps_total", "keeps_momentum", "sums_changes", "takes_server_rate", "steps_without_clients", "needs_shares"),
    *("total_sums_rows", "total_is_whole", "says_gamma", "looks_ahead", "needs_square_of_sum"),
)
CHOICES = (("anchor", get_args(Anchor)), ("placement", get_args(Placement)), ("unit", get_args(Unit)))

PLAIN = frozenset((float, int))
"""What nearly all numbers of a table are; others are looked at one by one."""

Result = TypeVar("Result")


def check_table(algorithm: Algorithm) -> None:
    """Refuse a method whose entries contradict each other, or whose options are not kept as attributes.

    What ``weigh`` and ``step`` return is checked in each round.

    Raises:
        UnknownNameError: ``anchor``, ``placement`` or ``unit`` is not one of those that there are.
        AlgorithmError: anything else is not what ``Algorithm`` says of it.
    """
    method = type(algorithm).__name__
    for entry, known in CHOICES:
        if getattr(algorithm, entry) not in (known if entry != "anchor" else (None, *known)):
            raise UnknownNameError.of(f"{method}.{entry}", getattr(algorithm, entry), known)

    def expect(right: bool, entry: str, due: str) -> None:
        if not right:
            raise AlgorithmError(f"{method}.{entry}: expected {due}, got {getattr(algorithm, entry)!r}")

    for entry in ("row", "adds"):
        form = getattr(algorithm, entry)
        expect(isinstance(form, Terms) and _are_finite(form), entry, "Terms of finite numbers")
    second, d = algorithm.second_vector, algorithm.direction
    named = second is None or (isinstance(second, str) and second != "")
    expect(named, "second_vector", "None, or what clients send beside y: 'mean gradient', or words of your own")
    expect(
        isinstance(algorithm.local_rule, LocalRule),
        "local_rule",
        "a LocalRule, as fedcore.simulation.local_rules.Sgd()",
    )
    expect(isinstance(d, Direction) and _are_finite(d), "direction", "a Direction of finite numbers")
    for flag in FLAGS:
        expect(isinstance(getattr(algorithm, flag), bool), flag, "True or False")
    row, adds = algorithm.row, algorithm.adds
    expect(not row.row, "row", "a form over h, r and q")
    expect(row == NOTHING or algorithm.placement == "server", "row", "no numbers, since clients keep their rows")
    expect(row == NOTHING or not second, "row", "no numbers, since the second vector becomes the row")
    alone = "h alone, since y makes no row: say what the row becomes"
    expect(row != NOTHING or not (adds.r or adds.q or adds.row), "adds", alone)
    expect(not algorithm.keeps_history or algorithm.keeps_total, "keeps_total", "True beside anchor = 'v[t]'")
    has_rows = algorithm.keeps_rows or algorithm.placement == "client"
    expect(not d.from_row or has_rows, "direction", "from_row = 0, since there are no rows: say row, or second_vector")
    expect(not d.from_mean or algorithm.keeps_total, "direction", "from_mean = 0, since keeps_total is False")
    expect(not algorithm.sums_changes or has_rows or bool(second), "sums_changes", "False, since there are no rows")
    for option, parameter in signature(type(algorithm)).parameters.items():
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and not hasattr(algorithm, option):
            raise AlgorithmError(
                f"{method}.{option}: expected the option as an attribute of its name, by which a saved server knows "
                f"it, got none: say self.{option} = {option}"
            )


def check_weights(algorithm: Algorithm, weights: Any, claims: Claims) -> F64:
    """The weights that ``weigh`` returned, if they are as they should be.

    Raises:
        AlgorithmError: it is not float64[k], finite and >= 0.
    """
    k = len(claims.steps)
    if isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (k,):
        together: F64 = np.ascontiguousarray(weights)  # of a caller's own it may be every other one
        least, most = core.column_range(together)
        if least >= 0 and most < math.inf:  # as a NaN is not
            return together
        got = f"{weights[~(np.isfinite(weights) & (weights >= 0))][0]:g}"
    else:
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, np.ndarray) else repr(weights)[:100]
    raise AlgorithmError(f"{type(algorithm).__name__}.weigh: expected float64[{k}], finite and >= 0, got {got}")


def check_step(algorithm: Algorithm, step: Any) -> Step:
    """The step that ``step`` returned, if it is as it should be.

    Raises:
        AlgorithmError: it is no Step of finite numbers, or has coefficients of what the method does not keep.
    """
    method = f"{type(algorithm).__name__}.step"
    if not isinstance(step, Step):
        raise AlgorithmError(f"{method}: expected a Step, got {type(step).__name__}")
    for name, form in (("v", step.v), ("T", step.T)):
        if not isinstance(form, Linear):
            raise AlgorithmError(f"{method}: expected {name} to be a Linear, got {type(form).__name__}")
    if not _are_finite((*step.v, *step.T, step.lookahead)):
        raise AlgorithmError(f"{method}: expected finite numbers, got {step}")
    if not (step.gamma is None or (_is_finite(step.gamma) and step.gamma > 0)):
        raise AlgorithmError(f"{method}: expected gamma to be None or {due_in('(0, inf)')}, got {step.gamma!r}")
    if step.v.v:
        raise AlgorithmError(f"{method}: expected v to be a form over A, B, T and g, got {step.v}")
    if not algorithm.keeps_total and (step.v.T or Linear(T=1) != step.T):
        raise AlgorithmError(
            f"{method}: expected no total, since keeps_total is False, got {step}: say keeps_total = True"
        )
    for said, entry in (
        (step.v.g or step.T.g, "keeps_momentum"),
        (step.gamma is not None, "says_gamma"),
        (step.lookahead, "looks_ahead"),
    ):
        if said and not getattr(algorithm, entry):
            raise AlgorithmError(f"{method}: got {step}, but {entry} is False: say {entry} = True")
    if not algorithm.sums_changes and (step.v.B or step.T.B):
        raise AlgorithmError(f"{method}: expected B = 0, since sums_changes is False, got {step}")
    return step


def _are_finite(numbers: Terms | Linear | Direction | tuple[float, ...]) -> bool:
    listed = numbers if isinstance(numbers, tuple) else astuple(numbers)
    if PLAIN.issuperset(map(type, listed)):
        return all(map(math.isfinite, listed))
    return all(map(_is_finite, listed))


def _is_finite(number: object) -> bool:
    known = type(number) is float or (isinstance(number, Real) and not isinstance(number, bool))
    return known and math.isfinite(number)  # type: ignore[arg-type]  # a float or a Real

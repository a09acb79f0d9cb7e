"""The interface of a server algorithm: a table of coefficients that each round evaluates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from fedcore.algorithms.local_rules import LocalRule, Sgd
from fedcore.arrays import F64, core
from fedcore.errors import AlgorithmError, UnknownNameError
from fedcore.kernels.forms import KEPT, H, Linear, Terms
from fedcore.store.registry import ClientId
from fedcore.validation import Checked, describe_interval, is_integer

# The data that a round passes to an algorithm.


def _none() -> F64:
    return np.empty(0)


@dataclass(frozen=True)
class Claims:
    """The reported and known numbers about the k clients of a cohort; each array is float64[k].

    Attributes:
        steps: K_i (s_k in Ruan et al.), the reported local steps.
        examples: n_i, the reported numbers of examples.
        counts: how many times each client was drawn.
        shares: p^k = n_k / n over ALL registered clients, or None if the server does not know n_k.
        ages: t - t0, the rounds since the client joined: 1 in its first round, infinite for clients registered at the
            start. None if no client joined later.
        clients: the clients' ids.
        intervals: the mean of the intervals between the client's appearances, 1 before the first one ended. None
            unless the method has a ``cutoff``.
        absences: t - tau_i for the last round tau_i that accepted an update of the client, or the round before its
            first one. It is at least 1. None unless the method has ``own_starts``.
        losses: F_i, the reported mean losses of x over the clients' examples, >= 0. None unless ``needs_loss``.
    """

    steps: F64 = field(default_factory=_none)
    examples: F64 = field(default_factory=_none)
    counts: F64 = field(default_factory=_none)
    shares: F64 | None = None
    ages: F64 | None = None
    clients: Sequence[ClientId] | None = None
    intervals: F64 | None = None
    losses: F64 | None = None
    absences: F64 | None = None


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The accepted clients at the end of a round, in the papers' notation.

    Attributes:
        S: the number of accepted clients.
        weighed: the number of accepted clients with a weight > 0 (K_t in Ruan et al., scheme A).
        N: the number of registered clients.
        devices: the number of clients in the objective (N in Ruan et al.): registered clients, and removed clients
            whose shares the objective keeps.
        W: the sum of the accepted clients' weights, or the number of their draws if the method has no weights.
        rows: the number of clients that have a row after this round.
        claims: the claims of the accepted clients.
        weights: float64[S], w_i.
        squares: float64[S], |h_i|^2.
        eta_steps: float64[S], eta_i K_i with capped K_i, the distance of K_i steps along a gradient of length 1.
        square_of_sum: |A|^2, if the method has ``needs_square_of_sum``.
    """

    S: int
    weighed: int
    N: int
    devices: int
    W: float
    rows: int
    claims: Claims = field(default_factory=Claims)
    weights: F64 = field(default_factory=_none)
    squares: F64 = field(default_factory=_none)
    eta_steps: F64 = field(default_factory=_none)
    square_of_sum: float = math.nan


# The interface of an algorithm: a table of coefficients that each round evaluates. Algorithms never access rows.
#
# A client steps along
#
#     a grad(y) + b grad(x_prev) + offset + mu (y - x),   offset = from_row r_i + from_mean c + from_momentum g
#
# and sends y. The server computes h_i = (x - y_i) / (eta_i K_i), the mean of the client's directions. If the method
# averages models, h_i = x - y_i. The client's row is r_i. The anchor q_i is a vector stored with the row or sent to all
# clients. A method is
#
#     r_i' = row.h h_i + row.r r_i + row.q q_i
#     A    = sum over the cohort of w_i (adds.h h_i + adds.r r_i + adds.q q_i + adds.row r_i')
#     B    = sum over the cohort of (r_i' - r_i)
#     v    = a linear form over A, B, T and g
#     T'   = a linear form over A, B, T, g and v
#     x'   = x - gamma v
#
# with a running total T, g = v of the previous round, v[t] = v of round t, and c = T / N. If clients send a second
# vector, ``control``, it becomes r_i'.


Anchor: TypeAlias = Literal["v[t]", "offset"]
Placement: TypeAlias = Literal["server", "client"]
"""Where the rows are kept."""
Unit: TypeAlias = Literal["gradient", "model"]

NOTHING = Terms()

MEAN_GRADIENT = "mean gradient"
"""The second vector is the mean of the client's uncorrected gradients at y, which becomes its row."""
ROW_CHANGE = "change of the row"
"""The second vector is r_i' - r_i; the client keeps its row."""


def is_computed_locally(second_vector: str | None) -> bool:
    """Whether fedcore's local training loops can compute this second vector (None or ``MEAN_GRADIENT``)."""
    return second_vector in (None, MEAN_GRADIENT)


@dataclass(frozen=True)
class Direction:
    """The coefficients of a client's local direction.

    A client steps along a grad(y) + b grad(x_prev) + from_row r_i + from_mean c + from_momentum g + mu (y - x).
    """

    a: float = 1.0
    b: float = 0.0
    mu: float = 0.0
    from_row: float = 0.0
    from_mean: float = 0.0
    from_momentum: float = 0.0


GRADIENT, SGD = Direction(), Sgd()
"""Plain SGD."""


@dataclass(frozen=True)
class Step:
    """The server's step: v and T' as linear forms over the round's sums.

    Attributes:
        v: the direction of the step.
        T: the next running total.
        gamma: the step length along v. The server's rate overrides it. Default: as defined by ``Algorithm.unit``.
        lookahead: the server sends x' + lookahead (x' - x) to clients instead of x'.
    """

    v: Linear
    T: Linear = KEPT
    gamma: float | None = None
    lookahead: float = 0.0


_Derived = cached_property[bool]


class Algorithm(Checked, ABC):
    """Base class of server algorithms. A subclass sets the table's entries, and its ``step`` computes v from the sums.

    A subclass is a frozen dataclass whose fields are its options; they define its repr, equality and JSON form.
    Entries that depend on an option are properties. ``weigh`` and ``step`` depend only on their arguments and the
    options. ``Server`` rejects an inconsistent table.

    Attributes:
        keeps_rows: whether the server keeps a row for each client.
        rows_at_clients: whether each client keeps its own row.
        sends_row_change: whether clients keep their rows and send the rows' changes.
        averages: whether the method averages models if there is no server rate.
        counts_appearances: whether the server stores the last round that accepted each client.
        counts_absent: whether a step depends on clients without an update: by their rows, shares or intervals, T, or N.
            With partial updates, the first update of a client then fixes its groups, and a group that no client sends
            has a round without clients; otherwise clients send any groups, and such a group has no round.
        updates_once: whether a client may be drawn, and send an update, only once in a round.
        reads_offset: whether a new row, or an update's term in A, contains the offset.
        keeps_history: whether the server keeps each direction v[t] while a row refers to it.
        needs_fresh_updates: whether a late update is rejected, since the server does not keep the control that
            its client received.
        folds_history: whether a row r with the anchor v[t] can become the row r - v[t], so that the server can
            drop old v[t].
    """

    _choices: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    """The options that are names, and their allowed values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, known in self._choices:
            if (value := getattr(self, option)) not in known:
                raise UnknownNameError.of(option, value, known)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, name, None)!r}" for name in signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"

    @cached_property
    def row(self) -> Terms:
        """The client's new row; all zeros if the server cannot compute it from y."""
        return NOTHING

    @cached_property
    def adds(self) -> Terms:
        """The terms that one update adds to A."""
        return H

    @cached_property
    def anchor(self) -> Anchor | None:
        """The meaning of q: "v[t]" for v of the round that last accepted the client; "offset" for the offset without
        the row's term; or None."""
        return None

    @cached_property
    def second_vector(self) -> str | None:
        """The vector that clients send in addition to y, as ``control``; it becomes the row.

        None, ``MEAN_GRADIENT``, ``ROW_CHANGE``, or a description of a vector that only custom clients compute.
        """
        return None

    @cached_property
    def placement(self) -> Placement:
        """Where the rows are kept. If clients keep them, B is the plain sum of the second vectors."""
        return "server"

    @cached_property
    def direction(self) -> Direction:
        """The coefficients of a client's local direction."""
        return GRADIENT

    @cached_property
    def local_rule(self) -> LocalRule:
        """The client's rule for steps and minibatches (``fedcore.algorithms.local_rules``)."""
        return SGD

    @cached_property
    def unit(self) -> Unit:
        """The unit of h if the server has no rate.

        "gradient": h is a mean gradient, and gamma is the mean of eta_i K_i. "model": h = x - y, and gamma = 1, so the
        method averages models.
        """
        return "gradient"

    @cached_property
    def averaging_option(self) -> str | None:
        """The option, as source code, that makes the method average models without numbers of steps; or None."""
        return None

    @cached_property
    def takes_server_rate(self) -> bool:
        """Whether ``Server(server_lr=)`` is allowed. It is not if h must be x - y."""
        return True

    @cached_property
    def keeps_total(self) -> bool:
        """Whether the method has a running total T, float64[n], initially zero."""
        return False

    @cached_property
    def sums_changes(self) -> bool:
        """Whether the round computes B. Default: True if clients send second vectors.

        Cost: without second vectors, one more pass over the cohort's rows.
        """
        return self.second_vector is not None

    @cached_property
    def steps_without_clients(self) -> bool:
        """Whether x moves in a round without accepted clients."""
        return False

    @cached_property
    def needs_shares(self) -> bool:
        """Whether ``weigh`` reads the shares. If so, the server must know its clients' numbers of examples."""
        return False

    @cached_property
    def own_starts(self) -> bool:
        """Whether each client starts from the model after the last round that accepted it, x_(i), instead of from x.

        h_i is then measured from x_(i), and A also has the sum over the cohort of x - x_(i). A new client starts from
        the model of its first round. The server keeps each earlier model while a client starts from it.
        """
        return False

    @cached_property
    def keeps_models(self) -> str | None:
        """Why ``Server.replace_x`` cannot replace x: later steps need earlier models. None if they do not.

        Rows that are gradients, or differences from the model with which a client started, stay valid.
        """
        return "its clients start from earlier models" if self.own_starts else None

    @cached_property
    def needs_loss(self) -> bool:
        """Whether ``weigh`` or ``step`` reads the losses. If so, clients must report them."""
        return False

    @cached_property
    def cutoff(self) -> int | None:
        """The longest interval between a client's appearances, in rounds, if ``weigh`` reads ``Claims.intervals``.

        An interval ends when the server accepts the client's update, or after this many rounds without one; the next
        interval starts with the next round. An interval that ends in a round counts from the next round on.
        """
        return None

    @abstractmethod
    def step(self, cohort: Cohort) -> Step:
        """Return v and T' as forms over A, B, T and g.

        It is not called in a round without accepted updates, unless ``steps_without_clients``. If all weights are zero,
        x stays, and only a method with rows gets a call, with A = 0 and ``cohort.W`` = 1.
        """

    def weigh(self, claims: Claims) -> F64:
        """Return w_i, float64[k]. Default: the number of times the client was drawn.

        A client with a weight of zero adds nothing to A, but it is still accepted.
        """
        return claims.counts

    def moves(self, cohort: Cohort) -> bool:
        """Whether x moves in a round with this cohort."""
        return cohort.W > 0 or self.steps_without_clients

    @cached_property
    def mixes_models(self) -> bool:
        """Whether h_i is the difference to the present x, and not to the x from which the client started (FedAsync)."""
        return False

    # These defaults follow from the entries above. A method may override them.

    keeps_rows = _Derived(lambda m: m.placement == "server" and (m.row != NOTHING or m.second_vector is not None))
    rows_at_clients = _Derived(lambda m: m.placement == "client")
    sends_row_change = _Derived(lambda m: m.rows_at_clients and m.second_vector == ROW_CHANGE)
    averages = _Derived(lambda m: m.unit == "model")
    counts_appearances = _Derived(lambda m: m.cutoff is not None or m.own_starts)
    updates_once = _Derived(
        lambda m: m.keeps_rows or m.second_vector is not None or m.needs_shares or m.counts_appearances
    )
    counts_absent = _Derived(lambda m: m.updates_once or m.rows_at_clients or m.keeps_total or m.steps_without_clients)
    reads_offset = _Derived(lambda m: m.anchor == "offset" and bool(m.row.q or m.adds.q))
    keeps_history = _Derived(lambda m: m.anchor == "v[t]" and bool(m.row.q or m.adds.q))
    needs_fresh_updates = _Derived(lambda m: bool(m.second_vector or m.direction.from_row or m.needs_plain_steps))
    folds_history = _Derived(
        lambda m: m.keeps_history and m.total_sums_rows and (m.adds.q, m.row.q) == (-m.adds.r, -m.row.r)
    )

    @cached_property
    def only_sums_updates(self) -> bool:
        """Whether an update only adds w_i h_i to A, and the change of a row that its client keeps to B."""
        more = self.sums_changes or self.second_vector is not None
        keeps = self.keeps_rows or (more and not self.sends_row_change)
        knows = self.needs_shares or self.needs_loss or self.counts_appearances
        return self.adds == H and self.row == NOTHING and not (keeps or knows)

    @cached_property
    def only_takes_mean(self) -> bool:
        """Whether an update has no effect but on A / W, with a weight of 1 if each client has one example.

        ``PrivateMean`` needs it: ``step`` and ``moves`` must read no other number of the cohort.
        """
        return False

    @cached_property
    def weighs_claims(self) -> bool:
        """Whether ``weigh`` reads the reported examples, which the server then limits. Default: True if overridden."""
        return type(self).weigh is not Algorithm.weigh

    @cached_property
    def most_steps(self) -> int | None:
        """The maximum number of a client's local steps in a round, or None if clients choose."""
        return self.local_rule.most_steps

    @cached_property
    def fewest_steps(self) -> int:
        """The number of local steps below which a client does not count."""
        return 1

    @cached_property
    def sums(self) -> Terms:
        """The coefficients of A without r_i': A = sum_i w_i (sums.h h_i + sums.r r_i + sums.q q_i)."""
        adds, row = self.adds, self.row
        return Terms(h=adds.h + adds.row * row.h, r=adds.r + adds.row * row.r, q=adds.q + adds.row * row.q)

    @cached_property
    def hides_mean(self) -> bool:
        """Whether A and the offset do not determine the cohort's mean of h."""
        hides = self.own_starts or bool(self.sums.r) or bool(self.sums.q and self.keeps_history)
        return not self.sums.h or hides

    @cached_property
    def needs_plain_steps(self) -> bool:
        """Whether the server computes mean gradients from y. Local momentum and clipping make such gradients wrong."""
        return self.reads_offset

    @cached_property
    def takes_warm_start(self) -> bool:
        """Whether ``Server.warm_start`` can set the first rows or the first momentum from the clients' gradients."""
        starts = not self.keeps_history and (self.total_sums_rows or not self.keeps_rows)
        return starts and self.unit == "gradient" and (self.keeps_total or self.direction.b != 0)

    @cached_property
    def total_sums_rows(self) -> bool:
        """Whether T is the sum of all rows or of all corrections v[t_i] - r_i. Only then can a client be removed."""
        return False

    @cached_property
    def total_is_whole(self) -> bool:
        """Whether T' = T + a A + b B + s v with integers a, b and s, as exact sums require."""
        return False

    @cached_property
    def most_history(self) -> int:
        """The number of directions v[t] to keep if ``folds_history``. The server folds older directions into rows."""
        return 64

    @cached_property
    def sets_gamma(self) -> bool:
        """Whether ``step`` returns gamma."""
        return False

    @cached_property
    def needs_square_of_sum(self) -> bool:
        """Whether ``step`` or ``moves`` reads ``Cohort.square_of_sum``. Cost: a pass over A in each round."""
        return False

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether ``step`` returns a lookahead."""
        return False

    @cached_property
    def uploads(self) -> int:
        """The number of vectors that a client sends in a round ("model uploadings" in Sun et al. 2023)."""
        return 1 if self.second_vector is None else 2

    @cached_property
    def sends_offset(self) -> bool:
        """Whether the server sends an offset in addition to x."""
        d = self.direction
        return bool(d.from_mean or d.from_momentum or (d.from_row and self.keeps_rows))

    @cached_property
    def keeps_momentum(self) -> bool:
        """Whether the local direction or ``step`` uses g, the previous v."""
        return bool(self.direction.from_momentum)


def is_whole_sum(form: Linear) -> bool:
    """Whether a total of this form can be stored as integers: all coefficients are integers, and that of g is 0."""
    return form.g == 0 and all(float(c).is_integer() and abs(c) <= 2**31 for c in form)


# Checks of a method's table and of its results. Each module that uses a table reads only some entries. So without these
# checks an inconsistent table would silently run a different method.


FLAGS = (
    *("keeps_total", "keeps_momentum", "sums_changes", "takes_server_rate", "steps_without_clients", "needs_shares"),
    *("total_sums_rows", "total_is_whole", "sets_gamma", "looks_ahead", "needs_square_of_sum", "mixes_models"),
    *("needs_loss", "own_starts", "counts_absent"),
)
CHOICES = (("anchor", get_args(Anchor)), ("placement", get_args(Placement)), ("unit", get_args(Unit)))

Result = TypeVar("Result")


def check_table(algorithm: Algorithm) -> None:
    """Raise AlgorithmError or UnknownNameError if a method's entries are invalid or an option is not an attribute."""
    method = type(algorithm).__name__
    for entry, known in CHOICES:
        if getattr(algorithm, entry) not in (known if entry != "anchor" else (None, *known)):
            raise UnknownNameError.of(f"{method}.{entry}", getattr(algorithm, entry), known)

    def expect(valid: bool, entry: str, rule: str, advice: str = "") -> None:
        if not valid:
            raise AlgorithmError(f"{method}.{entry}: must be {rule}, got {getattr(algorithm, entry)!r}{advice}")

    for entry in ("row", "adds"):
        form = getattr(algorithm, entry)
        expect(isinstance(form, Terms) and _are_finite(form), entry, "Terms of finite numbers")
    second, d = algorithm.second_vector, algorithm.direction
    named = second is None or (isinstance(second, str) and second != "")
    vectors = "None, 'mean gradient', or a description of the vector that clients send in addition to y"
    expect(named, "second_vector", vectors)
    expect(
        isinstance(algorithm.local_rule, LocalRule),
        "local_rule",
        "a LocalRule, for example fedcore.algorithms.local_rules.Sgd()",
    )
    expect(isinstance(d, Direction) and _are_finite(d), "direction", "a Direction of finite numbers")
    for flag in FLAGS:
        expect(isinstance(getattr(algorithm, flag), bool), flag, "True or False")
    is_plain = algorithm.averages and not algorithm.takes_server_rate and not d.mu
    only_plain = "False unless h is always x - y and clients have no proximal term"
    expect(not algorithm.own_starts or is_plain, "own_starts", only_plain)
    reason = algorithm.keeps_models
    expect(reason is None or (isinstance(reason, str) and reason != ""), "keeps_models", "None or a reason")
    expect(algorithm.cutoff is None or is_integer(algorithm.cutoff, 1), "cutoff", "None or an integer >= 1")
    row, adds = algorithm.row, algorithm.adds
    expect(not row.row, "row", "a form over h, r and q")
    expect(row == NOTHING or algorithm.placement == "server", "row", "Terms() because placement is 'client'")
    expect(row == NOTHING or not second, "row", "Terms() because the second vector becomes the row")
    h_only = "a form over h because the method has no row"
    expect(row != NOTHING or not (adds.r or adds.q or adds.row), "adds", h_only, "; define row")
    expect(not algorithm.keeps_history or algorithm.keeps_total, "keeps_total", "True if anchor is 'v[t]'")
    has_rows = algorithm.keeps_rows or algorithm.placement == "client"
    no_rows = "because the method has no rows"
    advice = "; define row or second_vector"
    expect(not d.from_row or has_rows, "direction", f"a Direction with from_row=0 {no_rows}", advice)
    no_mean = "a Direction with from_mean=0 because keeps_total is False"
    expect(not d.from_mean or algorithm.keeps_total, "direction", no_mean)
    expect(not algorithm.sums_changes or has_rows or bool(second), "sums_changes", f"False {no_rows}")
    for option, parameter in signature(type(algorithm)).parameters.items():
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and not hasattr(algorithm, option):
            raise AlgorithmError(
                f"{method}.{option}: a saved server reads the option from an attribute of this name; set "
                f"self.{option} = {option}"
            )


def check_weights(algorithm: Algorithm, weights: Any, claims: Claims) -> F64:
    """Return the weights as a contiguous array; raise AlgorithmError if not float64[k], finite and >= 0."""
    k = len(claims.steps)
    if isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (k,):
        contiguous: F64 = np.ascontiguousarray(weights)
        least, most = core.column_range(contiguous)
        if least >= 0 and most < math.inf:  # False for a NaN
            return contiguous
        got = f"{weights[~(np.isfinite(weights) & (weights >= 0))][0]:g}"
    else:
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, np.ndarray) else repr(weights)[:100]
    raise AlgorithmError(f"{type(algorithm).__name__}.weigh: must return float64[{k}], finite and >= 0, got {got}")


def check_step(algorithm: Algorithm, step: Any) -> Step:
    """Return the step; raise AlgorithmError for invalid numbers or a sum that the method does not declare."""
    method = f"{type(algorithm).__name__}.step"
    if not isinstance(step, Step):
        raise AlgorithmError(f"{method}: must return a Step, got {type(step).__name__}")
    for name, form in (("v", step.v), ("T", step.T)):
        if not isinstance(form, Linear):
            raise AlgorithmError(f"{method}: {name} must be a Linear, got {type(form).__name__}")
    if not _are_finite((*step.v, *step.T, step.lookahead)):
        raise AlgorithmError(f"{method}: numbers must be finite, got {step}")
    if not (step.gamma is None or (_is_finite(step.gamma) and step.gamma > 0)):
        raise AlgorithmError(f"{method}: gamma={step.gamma!r}: must be None or {describe_interval('(0, inf)')}")
    if step.v.v:
        raise AlgorithmError(f"{method}: v must be a form over A, B, T and g, got {step.v}")
    if not algorithm.keeps_total and (step.v.T or step.T != KEPT):
        raise AlgorithmError(f"{method}: uses the total, but keeps_total is False; set keeps_total = True")
    for is_used, term, entry in (
        (step.v.g or step.T.g, "g", "keeps_momentum"),
        (step.gamma is not None, "gamma", "sets_gamma"),
        (step.lookahead, "lookahead", "looks_ahead"),
        (step.v.B or step.T.B, "B", "sums_changes"),
    ):
        if is_used and not getattr(algorithm, entry):
            raise AlgorithmError(f"{method}: uses {term}, but {entry} is False; set {entry} = True")
    return step


def _are_finite(numbers: Terms | Linear | Direction | tuple[float, ...]) -> bool:
    values = numbers if isinstance(numbers, tuple) else astuple(numbers)
    return all(map(_is_finite, values))


def _is_finite(number: object) -> bool:
    known = type(number) is float or (isinstance(number, Real) and not isinstance(number, bool))
    return known and math.isfinite(number)  # type: ignore[arg-type]  # a float or a Real

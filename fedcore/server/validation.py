"""Validation of updates: what a client reports, what it sends, and how long it is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Claims, check_weights
from fedcore.algorithms.rates import Rate, rate_at, rate_of_steps
from fedcore.arguments import is_whole, real, shown, whole
from fedcore.arrays import CPU, F32, F64, Bools, Recycled, copy_into, device_of, dtype_name, freeze, to_host
from fedcore.errors import DtypeError, RangeError
from fedcore.model import Layout
from fedcore.native import core
from fedcore.options import Limits, Settings
from fedcore.rules import FEW, PARTS, CapExamples, Chain, ClaimWindow, Group, Norms, NormWindow, Weights, as_float32
from fedcore.server.aggregation import COUNTED, NO_COUNT, WEIGHTED, Counters, Lengths, UpdateBatch
from fedcore.server.update import (
    Kind,
    Update,
    as_sent,
    as_vector,
    digest_of_numbers,
    in_float32,
    read_counters,
    read_vector,
    reads_sent,
)
from fedcore.store.registry import ClientId

# The numbers that a client says of its work, held against what it was asked.


EXACT = 1e-6
"""How far a rate may be from the one that was sent, relative to it: it may have travelled as a float32."""


@reads_sent
def check_claims(update: Update, limits: Limits, rounds: range) -> Update:
    """The update with plain numbers, once its steps, examples and round can be believed.

    Args:
        rounds: those whose replies count, the open one last.

    Raises:
        RangeError: one cannot.
    """
    steps = whole("steps", update.steps, 1, limits.max_steps)
    examples = None
    if update.examples is not None:
        examples = real("examples", update.examples, f"(0, {limits.max_examples}]")
    if update.round is not None and not is_whole(update.round, rounds[0], rounds[-1]):
        earlier = f", or one since {rounds[0]}" if len(rounds) > 1 else ""
        raise RangeError(f"round: expected {rounds[-1]}, the open one{earlier}, got {shown(update.round)}")
    round = None if update.round is None else index(update.round)
    return update._replace(steps=steps, examples=examples, round=round, count=index(update.count))


class SentRates:
    """The rates that clients were sent, which their replies are held against.

    Args:
        rate: the server's.
        limits: whether clients may have their own, and up to which.
    """

    def __init__(self, rate: Rate, limits: Limits) -> None:
        self._rate, self._limits = rate, limits
        self._sums: dict[int, list[float]] = {}  # by round, of the rates of its first 0, 1, 2, ... steps

    def sent(self, round: int) -> float:
        """eta of that round, of its first step."""
        return rate_at(self._rate, round)

    @reads_sent
    def read(self, update: Update, started: int) -> float:
        """eta_i of an update whose steps are checked: the rate that was sent in the round ``started``, or its own.

        Where the rate changes from step to step, a client says the mean of its steps' rates, or that it stayed at the
        first one's.

        Raises:
            RangeError: it says another one than it was sent, and may not.

        Cost: where rates change, as many calls of the rate as the longest claim of the round has steps, once a round.
        """
        sent, said = self.sent(started), update.lr
        if said is None:
            return sent
        own = self._limits.max_client_lr
        rate = real("lr", said, "(0, inf)" if own is None else f"(0, {own!r}]")
        if own is not None:
            return rate
        if _is_near(rate, sent):
            return sent
        if _is_near(rate, mean := self._mean(started, int(update.steps))):
            return mean
        rates = " or ".join(f"{one:g}" for one in sorted({sent, mean}))
        raise RangeError(
            f"lr={shown(said)}: the client was sent {rates}; if clients choose rates, set Limits(max_client_lr=...)"
        )

    def _mean(self, round: int, steps: int) -> float:
        """The mean rate of a round's first steps."""
        of_step = rate_of_steps(self._rate, round)
        if of_step is None:
            return self.sent(round)
        sums = self._sums.setdefault(round, [0.0])
        try:
            while len(sums) <= steps:
                sums.append(sums[-1] + of_step(len(sums) - 1))
        except (LookupError, ArithmeticError, ValueError) as error:  # FedcoreErrors among them: a claim of too many
            raise RangeError(f"steps: expected as many as the rate has values for, got {steps}: {error}") from None
        return sums[steps] / steps


def _is_near(said: float, due: float) -> bool:
    return abs(said - due) <= EXACT * due


def check_distance(lr: float, steps: int, said: object) -> float:
    """eta_i K_i, of which the server takes the inverse.

    Raises:
        RangeError: it has none that is finite.
    """
    distance = lr * steps
    if not 0 < distance < math.inf or not 1 / distance < math.inf:
        raise RangeError(f"lr: expected a rate whose inverse is finite, got {shown(said)}")
    return distance


# Checks of a reply's float buffers, counters and constants, of which one lie would stay for ever.


MEDIANS = 10
"""A counter grows in a round by at most this multiple of its median growth."""

MOST_GROWTH = 2**53
"""The most that a counter grows by in a round."""

"""How far x + (y - x) may be from y, relative to x."""


def never_negative(layout: Layout, x: F32, signed: Sequence[str]) -> tuple[str, ...]:
    """The float buffers that are not negative in a first model, and that are not to become so, such as variances.

    One that is zero throughout says nothing of its sign.

    Args:
        x: float32[n].
        signed: patterns of the names of those that may.
    """
    return tuple(
        piece.name
        for piece in layout.slices
        if piece.kind == "buffer"
        and not any(fnmatch(piece.name, pattern) for pattern in signed)
        and (x[piece.start : piece.stop] >= 0).all()
        and (x[piece.start : piece.stop] > 0).any()
    )


class Buffers:
    """The float buffers of a layout that must not be negative.

    Args:
        names: of ``never_negative``.
        device: where models lie, and the replies that came from there.
    """

    def __init__(self, layout: Layout, names: Sequence[str], device: str = CPU) -> None:
        self._at = [(i, piece) for i, piece in enumerate(layout.slices) if piece.name in names]
        sizes = [piece.stop - piece.start for _, piece in self._at]
        stops = list(accumulate(sizes))
        self._side_by_side = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self._gathered = None if device == CPU else Recycled(sum(sizes), device=device)

    def check(self, y: Any, base: F32 | None) -> None:
        """Refuse a reply that makes one of them negative.

        Args:
            y: floating[n], or a list of tensors as the layout's slices.
            base: float32[n], the x that y is the difference from; None if y is a model.

        Raises:
            RangeError: it does.
        """
        if not self._at:
            return
        parts = self._on_host(y)
        starts: Sequence[F32 | None] = [None] * len(parts) if base is None else self._on_host(base)
        for (_, piece), part, start in zip(self._at, parts, starts, strict=True):
            least = np.float32(0) if start is None else np.float32(-(1 + EXACT)) * start
            if (part < least).any():
                lowest = part.min() if start is None else (part + start).min()
                raise RangeError(
                    f"{piece.name}: expected numbers >= 0, as they were from the start, got {lowest:g}: a buffer that "
                    "may become negative needs Limits(signed_buffers=...)"
                )

    def _on_host(self, y: Any) -> list[F32]:
        """Their numbers in a model, or in a difference; of what lies on a device all at once, so that one wait does."""
        parts = [y[i] if isinstance(y, list) else y[piece.start : piece.stop] for i, piece in self._at]
        if self._gathered is None or any(device_of(part) == CPU for part in parts):
            return [in_float32(part).reshape(-1) for part in parts]
        gathered: Any = self._gathered.take()
        for part, place in zip(parts, self._side_by_side, strict=True):
            if dtype_name(part) == "float32":
                gathered[place].copy_from(part)
            else:
                kernels.weighted_sum_segments([[part]], [1.0], [gathered[place]])
        here = to_host(gathered)
        return [here[place] for place in self._side_by_side]

    def allow(self, ys: Sequence[F32]) -> bool:
        """Tell whether none of some models, float32[n] each, makes one of them negative."""
        return not any((y[piece.start : piece.stop] < 0).any() for _, piece in self._at for y in ys)

    def clip(self, x: F32) -> None:
        """Put zero in the place of what rounding made negative; x is float32[n]."""
        for (_, piece), here in zip(self._at, self._on_host(x) if self._at else [], strict=True):
            if (here < 0).any():
                np.maximum(here, 0, out=here)
                copy_into(x[piece.start : piece.stop], here)  # on a device; elsewhere it is there already


def settle_counters(layout: Layout, sent: Counters, now: Counters, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    """The counters of a reply, those of a difference added to the server's; constants are only checked.

    Args:
        sent: of the reply; none of a flat vector.
        now: the server's.
        kind: what the reply is.

    Raises:
        RangeError: a constant differs from the server's, or a counter grew past every count.
    """
    for piece in layout.constants:
        if piece.name in sent and not _is_constant(sent[piece.name], now[piece.name], kind):
            raise RangeError(
                f"{piece.name}: expected the server's values, since {piece.dtype} is not averaged here, got others"
            )
    counters = {}
    for name in [piece.name for piece in layout.counters if piece.name in sent]:
        now_flat, sent_flat = (one[name].reshape(-1).astype(object) for one in (now, sent))  # Python's do not overflow
        after = now_flat + sent_flat if kind == "delta" else sent_flat
        most = np.minimum(now_flat + MOST_GROWTH, np.iinfo(now[name].dtype).max)
        if (after > most).any():
            raise RangeError(f"{name}: expected a count of at most {most.max()}, got {after.max()}")
        after = np.maximum(after, now_flat)
        counters[name] = after.astype(now[name].dtype).reshape(now[name].shape)
    return counters


def _is_constant(sent: npt.NDArray[Any], now: npt.NDArray[Any], kind: Kind) -> bool:
    """Tell whether a reply leaves a constant as it is: equal, or in a difference zero (a NaN where inf - inf is)."""
    if np.array_equal(sent, now, equal_nan=sent.dtype.kind == "f"):
        return True
    if kind != "delta":
        return False
    return not np.any(np.where(np.isfinite(now), sent, 0)) and bool(np.isnan(sent[~np.isfinite(now)]).all())


def grown(now: Counters, sent: Sequence[Counters]) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """Counters after a round, in their own integer types: each as the largest of those that were sent.

    It grows by 10 times the median of what the cohort's grew by at most (of an even number the lower of the two in the
    middle; those that did not grow say nothing), so that one that claims ever so many steps takes it nowhere.
    """
    return {name: _grown(counter, [others[name] for others in sent if name in others]) for name, counter in now.items()}


def _grown(now: npt.NDArray[np.integer[Any]], sent: Sequence[npt.NDArray[np.integer[Any]]]) -> Any:
    if not sent:
        return now
    wide = np.uint64 if now.dtype == np.uint64 else np.int64  # differences fit: see MOST_GROWTH
    before = now.astype(wide)
    by = np.sort(np.maximum(np.stack(sent).astype(wide), before) - before, axis=0)
    still = (by == 0).sum(axis=0)
    middle = np.minimum(still + (len(by) - 1 - still) // 2, len(by) - 1)
    median = np.take_along_axis(by, middle[np.newaxis], axis=0)[0]
    return np.asarray(before + np.minimum(by[-1], wide(MEDIANS) * median)).astype(now.dtype)


Vector = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]

NOT_FINITE = "update: a number is NaN or infinite, or the update is too long for float32 sums"


@dataclass(slots=True)
class Decision:
    """What becomes of k measured updates."""

    accepted: Mask
    """bool[k], those that count."""
    undecided: Mask
    """bool[k], those that wait for the next updates: always the last ones that were not rejected."""
    examples: F64
    """float64[k], the number of examples with which each counts."""
    factors: F64
    """float64[k], what each is multiplied by: 1, or less where a rule scales it."""
    rejected: dict[int, str] = field(default_factory=dict)
    """The reasons by index."""

    def reject(self, i: int, reason: str) -> None:
        """Reject an update; the first reason stays."""
        self.accepted[i] = False
        self.rejected.setdefault(i, reason)


class Validator:
    """Decides which measured updates count: finite, not longer than ``max_norm``, and as the chain's rules say.

    Updates are decided in their order, each by those accepted before it, so that the result does not depend on how many
    come at once. While fewer than 8 were ever accepted, updates wait where a rule needs a median; they are then decided
    together, at the latest when the round ends. Where examples are capped, updates wait likewise, but only from the
    first one on whose claim differs by more than the ratio, or while there is only one.

    Norms are compared as they are remembered, in float32.

    Args:
        limits, rules: the server's.
        unit: the formula of |h_i|, for messages.
        remembered: ``remembered()`` as the last round left it.
        examples: the window of claimed examples, where weights follow claims that the server cannot check.
        buffers: computes the squared length of x's float buffers, which stands for a missing median.
    """

    def __init__(
        self,
        limits: Limits,
        rules: Chain,
        unit: str,
        remembered: Mapping[str, Any],
        examples: ClaimWindow | None,
        buffers: Callable[[], float],
    ) -> None:
        self._limits, self._rules, self._unit, self._buffers = limits, rules, unit, buffers
        self._deciding = [rule for rule in rules.deciding if examples is not None or not isinstance(rule, CapExamples)]
        self._measures = limits.max_norm is not None or bool([r for r in self._deciding if type(r) is not CapExamples])
        self._examples = examples
        self._norms: dict[str, NormWindow] = {}
        if self._measures:
            self._norms = {
                name: NormWindow.unpacked(remembered[name]) if name in remembered else NormWindow()
                for name in Lengths._fields
            }

    def remembered(self) -> dict[str, Vector]:
        """The accepted norms by part, float32[WINDOW], and the claimed examples; empty where no rule needs them."""
        norms: dict[str, Vector] = {name: window.packed() for name, window in self._norms.items() if len(window)}
        return norms | ({"examples": self._examples.packed} if self._examples else {})

    def decide(self, lengths: Lengths, clients: Sequence[ClientId], claims: Claims, *, last: bool) -> Decision | None:
        """Decide on some updates; None where all of them count as they are.

        Args:
            lengths: of the updates that were undecided, and then of those that came since.
            last: whether no more will come, so that none may stay undecided.
        """
        columns, examples = [column for column in lengths if column is not None], claims.examples
        finite = all(core.column_range(column)[1] < math.inf for column in columns)  # false for a NaN too
        if finite and not self._measures and (self._examples is None or self._examples.agree(examples)):
            if self._examples is not None:
                self._examples.add(examples)
            return None
        k = len(lengths.parameters)
        decision = Decision(np.ones(k, np.bool_), np.zeros(k, np.bool_), examples.copy(), np.ones(k))
        for column in columns:
            for i in np.flatnonzero(~np.isfinite(column)).tolist():
                decision.reject(i, NOT_FINITE)
        norms: dict[str, list[float]] = {}
        if self._measures:
            norms = {name: _norms(squares) for name, squares in lengths._asdict().items() if squares is not None}
            self._require_max_norm(norms, decision)
        self._apply_rules(norms, clients, claims, decision, last=last)
        as_sent = (decision.examples == examples) & (decision.factors == 1)
        return None if (decision.accepted & as_sent).all() else decision

    def _require_max_norm(self, norms: Norms, decision: Decision) -> None:
        if (most := self._limits.max_norm) is None:
            return
        for i in np.flatnonzero(decision.accepted).tolist():
            for name, column in norms.items():
                if name != "buffers" and column[i] > as_float32(most):  # buffers have another unit
                    unit = f" {self._unit}" if name == "parameters" else ""
                    decision.reject(i, f"{PARTS[name]}{unit} = {column[i]:g} exceeds max_norm={most:g}")

    def _apply_rules(
        self, norms: Norms, clients: Sequence[ClientId], claims: Claims, decision: Decision, *, last: bool
    ) -> None:
        """Decide in groups: one update after another, or those that wait for a median together."""
        examples = claims.examples
        capped = self._examples is not None and not self._examples.agree(examples[decision.accepted])
        waiting: list[int] = []
        for i in np.flatnonzero(decision.accepted).tolist():
            waiting.append(i)
            if self._may_decide(examples[waiting] if capped else None, len(waiting)):
                self._decide_group(norms, clients, claims, waiting, decision, capped=capped)
                waiting = []
        if last:
            self._decide_group(norms, clients, claims, waiting, decision, capped=capped)
        else:
            decision.undecided[waiting], decision.accepted[waiting] = True, False
        if self._examples is not None and not capped:
            self._examples.add(examples[decision.accepted])

    def _may_decide(self, examples: F64 | None, waiting: int) -> bool:
        if self._rules.needs_medians and len(self._norms["parameters"]) + waiting < FEW:
            return False
        if self._examples is None or examples is None:
            return True
        return len(self._examples) + waiting >= FEW or self._examples.agree(examples)

    def _decide_group(
        self,
        norms: Norms,
        clients: Sequence[ClientId],
        claims: Claims,
        which: Sequence[int],
        decision: Decision,
        *,
        capped: bool,
    ) -> None:
        """Apply the rules to some updates, and remember those that stay."""
        if not which:
            return
        own = claims.examples[which]

        def most_examples(ratio: float) -> float:
            if self._examples is None or not capped:
                return math.inf
            return self._examples.most(own[:0] if len(self._examples) >= FEW else own, ratio)

        group = Group(
            clients=[clients[i] for i in which],
            steps=claims.steps[which],
            examples=own,
            norms={name: [column[i] for i in which] for name, column in norms.items()},
            medians=self._medians(norms, which) if self._rules.needs_medians else {},
            most_examples=most_examples,
            factors=np.ones(len(which)),
        )
        for rule in self._deciding:
            rule.decide(group)
        for at, i in enumerate(which):
            if at in group.rejected:
                decision.reject(i, group.rejected[at])
                continue
            decision.factors[i] = group.factors[at]
            for name, column in norms.items():
                if self._rules.needs_medians:
                    self._norms[name].add(column[i])
        if self._examples is not None and capped:
            stays = [at for at in range(len(which)) if at not in group.rejected]
            decision.examples[[which[at] for at in stays]] = group.examples[stays]
            self._examples.add(group.examples[stays])

    def _medians(self, norms: Norms, which: Sequence[int]) -> dict[str, float | None]:
        beside = () if len(self._norms["parameters"]) >= FEW else which
        medians = {name: self._norms[name].median([column[i] for i in beside]) for name, column in norms.items()}
        if "buffers" in medians and medians["buffers"] is None and (square := self._buffers()) > 0:
            medians["buffers"] = math.sqrt(square)  # no accepted update changed them: their length in x
        return medians


def _norms(squares: F64) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        norms: list[float] = np.sqrt(squares).astype(np.float32).tolist()
    return norms


# The weights of a round's replies, and the examples that they count with.


class CappedClaim(NamedTuple):
    """A client that was counted with fewer examples than it claimed."""

    client: ClientId
    claimed: int
    counted: int


class Weighing:
    """Weighs the replies of an open round by their claims, as the method says.

    Attributes:
        lowered: the clients that were counted with fewer examples than they claimed.
    """

    def __init__(self, settings: Settings, state: Any) -> None:  # a State, which imports this module
        self._algorithm, self._state = settings.algorithm, state
        self.lowered: list[CappedClaim] = []

    def close(self) -> None:
        """Let the state go: a round that is over keeps no store open."""
        del self._state

    def known_at_most(self, replies: UpdateBatch) -> F64:
        """float64[k], the replies' examples, or as many as the server was told that the clients have."""
        population, claimed = self._state.population, replies.claims.examples
        if not population.is_sized:
            return claimed
        known = population.examples(self._state.store.registry, replies.clients)
        claims_less = (replies.sources == COUNTED) & (claimed < known)
        return np.where(claims_less | (replies.sources == WEIGHTED), claimed, known)

    def count_known_examples(self, replies: UpdateBatch) -> None:
        """Count no more examples than the server was told."""
        self.count_examples(replies, self.known_at_most(replies))

    def count_examples(self, replies: UpdateBatch, examples: F64) -> None:
        """Count some replies with other examples than they claim, unless the weight is the server's own."""
        claimed = replies.claims.examples
        if examples is claimed:
            return
        examples = np.where(replies.sources == WEIGHTED, claimed, examples)
        for i in np.flatnonzero((examples < claimed) & (replies.sources == COUNTED)).tolist():
            self.lowered.append(CappedClaim(replies.clients[i], int(claimed[i]), int(examples[i])))
        replies.claims = replace(replies.claims, examples=examples)

    def weigh(self, replies: UpdateBatch) -> None:
        """Set the replies' weights by their claims, their shares and their ages."""
        number, population = self._state.snapshot.round_number, self._state.population
        registry, clients, claims = self._state.store.registry, replies.clients, replies.claims
        shares, ages = population.shares(registry, clients), population.ages(registry, clients, number)
        if claims.clients is not clients or shares is not claims.shares or ages is not claims.ages:
            replies.claims = replace(claims, shares=shares, ages=ages, clients=clients)
        weights = self._algorithm.weigh(replies.claims)
        replies.weights = check_weights(self._algorithm, weights, replies.claims)


def weight_of(weights: Weights, update: Update, client: ClientId) -> float:
    """The weight of an update whose claims were checked.

    Raises:
        RangeError: there is none for this client, or it is no finite number >= 0.
    """
    if not callable(weights):
        if client not in weights:
            raise RangeError(f"weights: client {client!r} has none; add it to the weights of Mean")
        return real("weights", weights[client], "[0, inf)")
    missing = np.nan if update.examples is None else update.examples
    steps, examples, counts = (np.array([n], np.float64) for n in (update.steps, missing, update.count))
    weight = np.asarray(weights(Claims(steps, examples, counts, clients=[client]))).item()
    if update.examples is None and weight != weight:
        raise RangeError("examples: expected a number, from which weights= makes the weight, got None")
    return real("weights", weight, "[0, inf)")


# A client's update as a round's fold takes it, or why it cannot be believed.


PlainColumns: TypeAlias = tuple[list[ClientId], list[Any], F64, F64, F64]

NO_COUNTERS: Counters = {}


class UpdateReader:
    """Reads the updates of a server's open round, without folding any of them in; weights are ``Server``'s."""

    def __init__(self, settings: Settings, state: Any) -> None:
        self._settings, self._state, self._weights = settings, state, settings.rules.weights
        self._rates = SentRates(settings.lr, settings.limits)
        self._starts: dict[int, F32] = {}
        self._lr = self._rates.sent(state.snapshot.round_number)

    def read(self, update: Update, client: ClientId) -> tuple[UpdateBatch, bool]:
        """The update as a table of one reply, and whether nobody will change its vectors.

        Raises:
            FedcoreError: what the client sent cannot be believed.
        """
        settings, number = self._settings, self._state.snapshot.round_number
        kind = update.kind
        y, fixed = self._read_vector(update)
        update = check_claims(update, settings.asked, range(min(self._state.snapshot.past, default=number), number + 1))
        if self._weights is not None and update.weight is None:
            update = update._replace(weight=weight_of(self._weights, update, client))
        started = number if update.round is None else update.round
        if started != number and (last := self._state.snapshot.starts.get(client, -1)) >= started:
            due = f"expected one after {last}, where the client's last counted reply started"
            raise RangeError(f"round: {due}, got {started}: a reply counts once")
        distance = check_distance(self._rates.read(update, started), update.steps, update.lr)
        # h in units of x where models are averaged, else in units of a gradient.
        scale = 1.0 if settings.averages_models else 1 / distance
        algorithm = settings.algorithm
        of_then = (
            algorithm.needs_plain_steps or algorithm.second_vector is not None or algorithm.direction.from_row != 0
        )
        if started != number and of_then:
            raise RangeError(f"round: expected {number}, since the controls of {started} are gone, got {started}")
        if kind != "gradient":
            self._state.buffers.check(y, self._start_of(started) if kind == "delta" else None)
        counters = settle_counters(settings.layout, self._read_counters(update), self._state.snapshot.counters, kind)
        control = self._read_control(update.control)
        if self._state.upload is not None:  # the fold comes later, when another stream may be the library's current one
            core.await_arrays([*(y if isinstance(y, list) else [y]), *([] if control is None else [control])])
        fixed = fixed or self._state.lent.lent(y)
        size, source = _size_of(update)
        reply = UpdateBatch(
            clients=[client],
            vectors=[y],
            bases=[self._start_of(started) if kind == "model" else None],
            scales=np.array([-distance * scale if kind == "gradient" else scale]),
            claims=Claims(_column(update.steps), _column(size), _column(update.count)),
            eta_steps=np.array([distance]),
            has_buffers=np.array([kind != "gradient"]),
            counters=[counters],
            controls=[control],
            sources=np.array([source], np.int8),
            starts=np.array([started]),
            digests=[digest_of_numbers(y) if settings.audit else None],
            factors=np.ones(1),
        )
        return reply, fixed and (control is None or core.are_immutable([control]))

    def read_all(self, updates: list[Update]) -> UpdateBatch | None:
        """The updates as a table, if ``read_columns`` reads them; else None."""
        settings, read = self._settings, self.read_columns(updates)
        if read is None:
            return None
        clients, ys, steps, examples, distances = read
        k, number = len(clients), self._state.snapshot.round_number
        ones, sources, has_buffers, factors, zeros = usual(k)
        if not core.column_range(examples)[0] >= 0:  # as a NaN is not, which stands for none
            missing = np.isnan(examples)
            examples, sources = np.where(missing, 1.0, examples), (~missing).astype(np.int8)
        return UpdateBatch(
            clients=clients,
            vectors=ys,
            bases=[self._start_of(number)] * k,
            scales=ones if settings.averages_models else 1 / distances,
            claims=Claims(steps, examples, ones, None, None, clients),
            eta_steps=distances,
            has_buffers=has_buffers,
            counters=[NO_COUNTERS] * k,
            controls=[None] * k,
            sources=sources,
            starts=zeros + number,
            digests=[None] * k,
            factors=factors,
        )

    def read_columns(self, updates: list[Update]) -> PlainColumns | None:
        """Read updates into columns, if all are flat float32 models of different clients; else None.

        Returns:
            The clients, their ys, steps, examples (NaN for none) and eta_i K_i.
        """
        settings, limits = self._settings, self._settings.asked
        if settings.algorithm.second_vector is not None or settings.layout.outside or not updates:
            return None
        if self._weights is not None or settings.audit:
            return None
        index, of_steps = self._state.store.registry.index, limits.max_steps
        of_lr = limits.max_client_lr is not None, limits.max_client_lr or self._lr
        read: PlainColumns | None = core.read_plain_updates(
            updates, Update, index, settings.layout.n, self._lr, of_steps, limits.max_examples, *of_lr
        )
        return None if read is None or not self._state.buffers.allow(read[1]) else read

    def _start_of(self, round: int) -> Any:
        """The model of that round as it was sent."""
        if round not in self._starts:
            now = self._state.snapshot
            start = now.sent if round == now.round_number else now.past[round]
            self._starts[round] = as_sent(self._settings.layout, start)
        return self._starts[round]

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        """The vector that the update sent, as ``read_vector`` gives it."""
        # A quantised row cannot be cut at any element, for its elements share scales.
        apart = not self._settings.algorithm.keeps_rows or self._state.store.codec == "f32"
        return read_vector(update, self._settings.layout, apart=apart, device=self._settings.device)

    def _read_counters(self, update: Update) -> Counters:
        return read_counters(update, self._settings.layout)

    def _read_control(self, control: Any) -> Any:
        if self._settings.algorithm.second_vector is None:
            return None  # what a method does not ask for is not read
        n = self._settings.layout.n_parameters
        vector = as_vector("control", control, n, device=self._settings.device)
        if vector is None:
            got = "None" if control is None else type(control).__name__
            raise DtypeError(f"control: expected float32[{n}], the client's second vector, got {got}")
        return vector


@lru_cache(maxsize=8)
def usual(k: int) -> tuple[F64, npt.NDArray[np.int8], Bools, F64, npt.NDArray[np.int64]]:
    """The counts, sources, buffers and factors of k replies that are what nearly all are, and zeros. Read-only."""
    columns = np.ones(k), np.full(k, COUNTED, np.int8), np.ones(k, np.bool_), np.ones(k), np.zeros(k, np.int64)
    for column in columns:
        freeze(column)
    return columns


def _size_of(update: Update) -> tuple[float, int]:
    """The examples that an update counts with, unless a limit lowers them, and where they are from."""
    if update.weight is not None:
        return float(update.weight), WEIGHTED
    return (1.0, NO_COUNT) if update.examples is None else (update.examples, COUNTED)


def _column(number: Any) -> npt.NDArray[np.float64]:
    return np.array([number], np.float64)

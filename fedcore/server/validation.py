"""Validation of updates: reported numbers, arrays, and norms."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import gt, index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import arrays, kernels
from fedcore.algorithms import Claims, check_weights
from fedcore.algorithms.rates import Constant, Rate, rate_at, rate_of_steps
from fedcore.arrays import CPU, F32, F64, Bools, BufferPool, copy_into, core, device_of, dtype_name, freeze, to_host
from fedcore.errors import DtypeError, RangeError
from fedcore.model import Layout, Slice
from fedcore.model.policy import INTEGERS, are_equal
from fedcore.options import Limits, Settings
from fedcore.rules import Chain, Group
from fedcore.rules.base import Weights
from fedcore.rules.windows import FEW, PARTS, ClaimWindow, NormWindow, as_float32, least_logged
from fedcore.server.aggregation import COUNTED, LONGEST, NO_COUNT, UNKNOWN, WEIGHTED, Counters, Lengths, UpdateBatch
from fedcore.server.update import (
    KINDS,
    Kind,
    Update,
    as_sent,
    as_vector,
    bytes_of,
    bytes_sent,
    digest_of_numbers,
    first_not_finite,
    in_float32,
    raises_fedcore_errors,
    read_counters,
    read_vector,
)
from fedcore.store.registry import ClientId
from fedcore.validation import check_integer, check_number, failed, frozen, is_integer, short_repr

LOGGER = logging.getLogger("fedcore.server")

# The numbers that a client reports.


SMALLEST = float(np.finfo(np.float64).smallest_subnormal)
LEAST_EXAMPLES = 1e-12
"""The least number of examples: above ``LEAST_EXACT``, so that no client ends a round whose weights are examples."""
EXACT = 1e-6
"""Relative tolerance of a reported rate, which may have been sent as float32."""


@raises_fedcore_errors
def check_claims(update: Update, limits: Limits, rounds: range) -> Update:
    """Return the update with checked plain numbers; ``rounds`` are the accepted rounds, with the open round last."""
    steps = check_integer("steps", update.steps, 1, limits.max_steps)
    examples = update.examples
    if examples is not None:
        examples = check_number("examples", examples, f"[{LEAST_EXAMPLES}, {limits.max_examples}]")
    loss = None if update.loss is None else check_number("loss", update.loss, "[0, inf)")
    if update.round is not None and not is_integer(update.round, rounds[0], rounds[-1]):
        earlier = f", or an earlier round >= {rounds[0]}" if len(rounds) > 1 else ""
        must = f"must be {rounds[-1]}, the open round{earlier}"
        raise RangeError(f"round={short_repr(update.round)}: {must}")
    round = None if update.round is None else index(update.round)
    return update._replace(steps=steps, examples=examples, round=round, count=index(update.count), loss=loss)


class SentRates:
    """The rates that the server sent, for comparison with reported rates."""

    def __init__(self, rate: Rate, limits: Limits) -> None:
        self._rate, self._limits = rate, limits
        self._sums: dict[int, list[float]] = {}  # by round, the sums of the rates of its first 0, 1, 2, ... steps

    def sent(self, round: int) -> float:
        """Return eta of the round's first step."""
        return rate_at(self._rate, round)

    def distances(self, round: int, steps: F64) -> tuple[F64, F64]:
        """Return the least and the greatest eta_i K_i, float64[k], of clients with these checked steps."""
        first = steps * self.sent(round)
        means = first
        if rate_of_steps(self._rate, round) is not None:
            means = np.array([k * self._mean(round, int(k)) for k in steps.tolist()])
        if (most := self._limits.max_client_lr) is None:
            return np.minimum(first, means), np.maximum(first, means)
        return np.full(len(steps), SMALLEST), np.maximum(first, steps * most)

    @raises_fedcore_errors
    def read(self, update: Update, started: int) -> float:
        """Return eta_i of an update with checked steps: the client's rate if it may choose, else the rate of round
        ``started``.

        If the rate changes between steps, a client reports the mean of its steps' rates, or the first rate.
        """
        sent, reported, most = self.sent(started), update.lr, self._limits.max_client_lr
        if reported is None:
            return sent
        rate = check_number("lr", reported, "(0, inf)" if most is None else f"(0, {max(most, sent)!r}]")
        if most is not None:
            return rate
        mean = sent if _is_near(rate, sent) else self._mean(started, int(update.steps))
        if _is_near(rate, mean):
            return mean
        rates = " or ".join(f"{one:g}" for one in sorted({sent, mean}))
        raise RangeError(
            f"lr={short_repr(reported)}: the client was sent {rates}; "
            "if clients choose rates, set Limits(max_client_lr=...)"
        )

    def _mean(self, round: int, steps: int) -> float:
        of_step = rate_of_steps(self._rate, round)
        if of_step is None:
            return self.sent(round)
        sums = self._sums.setdefault(round, [0.0])
        try:
            while len(sums) <= steps:
                sums.append(sums[-1] + of_step(len(sums) - 1))
        except (LookupError, ArithmeticError, ValueError) as error:  # FedcoreErrors are among them
            raise RangeError(f"steps={steps}: the learning rate has no value for so many steps: {error}") from None
        return sums[steps] / steps


def _is_near(rate: float, sent: float) -> bool:
    return abs(rate - sent) <= EXACT * sent


# The float buffers, counters and constants of an update. An invalid value would stay in the model.


MEDIANS = 10
"""The greatest growth of a counter in a round, as a multiple of the median growth."""

MOST_GROWTH = 2**53
"""The greatest growth of a counter in a round."""

LARGEST = {np.dtype(name): int(np.iinfo(name).max) for name in INTEGERS}

LONGEST_FLAG = 4096
"""The most elements of a constant that may change. Updates that differ are kept until the end of the round."""


def is_flag(piece: Slice) -> bool:
    """Whether a constant may change: it is no tensor of packed integers and no large mask."""
    size = math.prod(piece.shape)
    return size == 1 or (size <= LONGEST_FLAG and piece.dtype not in INTEGERS)


def never_negative(layout: Layout, x: F32) -> tuple[str, ...]:
    """Return the names of the float buffers, such as variances, that are non-negative and not all zero in x."""
    return tuple(
        piece.name
        for piece in layout.slices
        if piece.kind == "buffer" and ((part := to_host(x[piece.start : piece.stop])) >= 0).all() and (part > 0).any()
    )


class Buffers:
    """The float buffers ``names`` of a layout, which must not become negative; models are on ``device``."""

    def __init__(self, layout: Layout, names: Sequence[str], device: str = CPU) -> None:
        self._pieces = [(i, piece) for i, piece in enumerate(layout.slices) if piece.name in names]
        stops = list(accumulate((piece.stop - piece.start for _, piece in self._pieces), initial=0))
        self._adjacent = [slice(*ends) for ends in pairwise(stops)]
        self._gathered = None if device == CPU else BufferPool(stops[-1], device=device)
        self.ranges = [(piece.start, piece.stop) for _, piece in self._pieces]  # of the buffers in a flat model

    def check(self, y: Any, base: F32 | None) -> None:
        """Raise RangeError if a model y, or a difference y from ``base``, makes one of the buffers negative."""
        if not self._pieces or (base is None and not (np.concatenate(self._on_host(y)) < 0).any()):
            return
        parts = self._on_host(y)
        starts: Sequence[F32 | None] = [None] * len(parts) if base is None else self._on_host(base)
        for (_, piece), part, start in zip(self._pieces, parts, starts, strict=True):
            least = np.float32(0) if start is None else np.float32(-(1 + EXACT)) * start
            if (part < least).any():
                lowest = part.min() if start is None else (part + start).min()
                raise RangeError(
                    f"{piece.name}: the lowest value is {lowest:g}, but this buffer must stay >= 0; if it may become "
                    "negative, set Limits(signed_buffers=...)"
                )

    def _on_host(self, y: Any) -> list[F32]:
        """Return the buffers of a model or a difference; those on a device are gathered for a single wait."""
        parts = [y[i] if isinstance(y, list) else y[piece.start : piece.stop] for i, piece in self._pieces]
        if self._gathered is None or any(device_of(part) == CPU for part in parts):
            return [in_float32(part).reshape(-1) for part in parts]
        gathered: Any = self._gathered.get()
        for part, at in zip(parts, self._adjacent, strict=True):
            if dtype_name(part) == "float32":
                gathered[at].copy_from(part)
            else:
                kernels.weighted_sum_segments([[part]], [1.0], [gathered[at]])
        host = to_host(gathered)
        return [host[at] for at in self._adjacent]

    def clip(self, x: F32) -> None:
        """Replace buffers of x, float32[n], that rounding made negative by zeros."""
        for (_, piece), part in zip(self._pieces, self._on_host(x) if self._pieces else [], strict=True):
            if (part < 0).any():
                np.maximum(part, 0, out=part)
                copy_into(x[piece.start : piece.stop], part)  # on a CPU, part is a view of x


def settle_counters(layout: Layout, sent: Counters, now: Counters, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    """Return the counters of an update, added to the server's if they are differences, and its other flags.

    Raise RangeError if another constant differs from the server's.
    """
    # An edge does not know the server's counters, but their shape and another axis.
    counters = {name: one for name, one in sent.items() if one.shape != now[name].shape and kind != "delta"}
    for piece in [piece for piece in layout.constants if piece.name in sent]:
        new, old = sent[piece.name], now[piece.name]
        if is_flag(piece):
            if kind == "model" and not _is_constant(new, old, kind):
                if new.dtype.kind == "f" and (np.isnan(new) & ~np.isnan(old)).any():
                    raise RangeError(f"{piece.name}: has a NaN, and the server's value has none")
                counters[piece.name] = new.astype(old.dtype)  # a difference names no value
        elif not _is_constant(new, old, kind):
            raise RangeError(
                f"{piece.name}: it differs from the server's values; {piece.dtype} tensors of this size are not "
                "averaged and must be equal. If clients have their own, pass Model(personal=...); for counts such as "
                "histograms, average float64 arrays by fedcore.aggregate"
            )
    for piece in [one for one in layout.counters if one.name in sent and one.shape == now[one.name].shape]:
        name, greatest = piece.name, LARGEST[now[piece.name].dtype]
        before, given = now[name].tolist(), sent[name].tolist()  # Python's integers do not overflow
        if kind != "delta" and not piece.shape and before <= given <= min(before + MOST_GROWTH, greatest):
            counters[name] = sent[name]  # the usual case, in which a model has many of them
            continue
        before, given = now[name].reshape(-1).tolist(), sent[name].reshape(-1).tolist()
        after = [old + more for old, more in zip(before, given, strict=True)] if kind == "delta" else given
        most = [min(old + MOST_GROWTH, greatest) for old in before]
        if any(map(gt, after, most)):
            raise RangeError(f"{name}={max(after)}: must be at most {max(most)}")
        counters[name] = np.array([*map(max, after, before)], now[name].dtype).reshape(piece.shape)
    return counters


def _is_constant(sent: npt.NDArray[Any], now: npt.NDArray[Any], kind: Kind) -> bool:
    """Whether a constant equals the server's; in a difference it is zero, or NaN from inf - inf."""
    if are_equal(sent, now):
        return True
    if kind != "delta":
        return False
    return not np.any(np.where(np.isfinite(now), sent, 0)) and bool(np.isnan(sent[~np.isfinite(now)]).all())


def settled(layout: Layout, now: Counters, sent: Sequence[Counters]) -> dict[str, npt.NDArray[Any]]:
    """Return the counters and constants after a round with these updates.

    A counter becomes the largest that clients sent. It grows by at most 10 times the median growth in the cohort, so
    that one client has little effect. The median is the lower one of the growths that are not zero. A flag becomes what
    more than half of the updates sent; the others count for its present value.
    """
    flags, after = {piece.name for piece in layout.constants}, {}
    for name, before in now.items():
        values = [others[name] for others in sent if name in others]
        after[name] = agreed(before, values, len(sent)) if name in flags or not values else _grown(before, values)
    for name in flags:
        if after.get(name) is now.get(name) and 2 * sum(name in others for others in sent) > len(sent):
            LOGGER.warning("%s: keeps its value, because no value came from more than half of the updates", name)
    return after


def agreed(now: npt.NDArray[Any], sent: Sequence[npt.NDArray[Any]], k: int) -> npt.NDArray[Any]:
    """Return the value that more than half of k updates sent, or ``now``."""
    sent = [np.asarray(value + value.dtype.type(0)) for value in sent]  # so that -0.0 is 0.0
    values = {value.tobytes(): value for value in sent}
    counts = Counter(value.tobytes() for value in sent)
    return next((values[bits] for bits, count in counts.items() if 2 * count > k), now)


def _grown(now: npt.NDArray[np.integer[Any]], sent: Sequence[npt.NDArray[np.integer[Any]]]) -> Any:
    wide = np.uint64 if now.dtype == np.uint64 else np.int64  # differences fit, because of MOST_GROWTH
    before = now.reshape(-1).astype(wide)
    by = np.maximum(np.array(sent, wide).reshape(len(sent), now.size), before) - before
    by.sort(axis=0)
    still = (by == 0).sum(axis=0)
    median = by[(len(by) - 1 + still) // 2, np.arange(now.size)]
    return (before + np.minimum(by[-1], wide(MEDIANS) * median)).astype(now.dtype).reshape(now.shape)


# The norms of updates, and the chain's rules.


Vector = npt.NDArray[np.floating[Any]]

RECEIVED = "received/"
"""The start of the names of windows that rejected updates are in, too."""
NOT_FINITE = "update: a number is NaN or infinite, or the norm of the update is too large for float32 sums"


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """The decision on k measured updates."""

    accepted: Bools
    """bool[k], the updates that count."""
    undecided: Bools
    """bool[k], the updates that wait for later updates: always the last of the updates that were not rejected."""
    examples: F64
    """float64[k], the number of examples with which each update counts."""
    factors: F64
    """float64[k], the factor of each update: 1, or less if a rule scales it."""
    rejected: dict[int, str] = field(default_factory=dict)
    """The reasons by index."""

    def reject(self, i: int, reason: str) -> None:
        """Reject an update; the first reason is kept."""
        self.accepted[i] = False
        self.rejected.setdefault(i, reason)


class Validator:
    """Decides which measured updates count: finite, with norms up to ``max_norm``, and accepted by the chain's rules.

    Updates are decided in order. A rule compares each update with the updates accepted before it. The result does not
    depend on the batches in which updates arrive. If a rule needs a median, the first 8 updates wait and are decided as
    a group, at the latest at the end of the round. Before a robust rule, all updates wait for the end of the round, and
    are decided in the order of the clients' ids, in a buffer in that of arrival. If examples are capped, the first 8
    updates wait too, unless no cap can apply to them; see ``ClaimWindow.agree``. Norms are compared in float32, as the
    server stores them.

    Args:
        unit: the formula of |h_i|, for messages.
        remembered: ``remembered()`` after the last round.
        examples: the window of reported examples, if weights depend on claims that the server cannot check.
        buffers: returns the squared norm of x's float buffers, which replaces a missing median.
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
        self._max_norm, self._unit, self._examples, self._buffers = limits.max_norm, unit, examples, buffers
        self._rules, self._needs_medians = rules, "medians" in rules.needs
        self._decides_last = self._needs_medians and rules.robust is not None
        self._norms: dict[str, NormWindow] = {}
        if self._max_norm is not None or rules.decides:
            self._norms = {
                name: NormWindow.unpacked(remembered[name]) if name in remembered else NormWindow() for name in PARTS
            }
        # With RejectLong: the norms of accepted and rejected updates, where they differ from those of accepted ones.
        self._most, self._received = rules.ratio("received"), {}
        if self._most is not None:
            given = {name: remembered.get(RECEIVED + name) for name in PARTS}
            self._received = {name: NormWindow.unpacked(norms) for name, norms in given.items() if norms is not None}
        self._too_long: dict[ClientId, dict[str, float]] = {}  # the norms of the last rejected update of each client

    def remembered(self) -> dict[str, Vector]:
        """Return the accepted norms by part, float32[WINDOW], and the reported examples, if a rule needs them.

        With ``RejectLong``, also those of accepted and rejected updates, by part after ``RECEIVED``, if they differ.
        """
        if self._most is not None and (self._too_long or self._received):
            self._follow(self._most)
        norms: dict[str, Vector] = {name: window.packed() for name, window in self._norms.items() if len(window)}
        norms |= {RECEIVED + name: window.packed() for name, window in self._received.items()}
        return norms | ({"examples": self._examples.packed} if self._examples else {})

    def _follow(self, ratio: float) -> None:
        """Add the norms of rejected updates; let the medians follow if more than half of all norms are too long."""
        for name, accepted in self._norms.items():
            received = self._received.get(name) or NormWindow(accepted.norms)
            for norms in self._too_long.values():
                received.add(norms.get(name, 0.0))
            if len(received) >= FEW and (median := received.median()) is not None:
                usual = accepted.median()
                if usual is None:
                    usual = math.sqrt(self._buffers()) if name == "buffers" else math.inf
                if median > as_float32(ratio * usual):
                    self._norms[name] = received
            if received.norms == self._norms[name].norms:
                self._received.pop(name, None)
            else:
                self._received[name] = received
        self._too_long.clear()

    def decide(self, lengths: Lengths, clients: Sequence[ClientId], claims: Claims, *, last: bool) -> Decision | None:
        """Decide on the undecided and the new updates; return None if all count unchanged.

        With ``last``, the round ends, and no update stays undecided.
        """
        columns, examples, window = [one for one in lengths if one is not None], claims.examples, self._examples
        finite = all(core.column_range(column)[1] < math.inf for column in columns)  # False for a NaN too
        if finite and not self._norms and (window is None or window.agree(examples)):
            if window is not None:
                window.add(examples)
            return None
        k = len(lengths.parameters)
        decision = Decision(np.ones(k, np.bool_), np.zeros(k, np.bool_), examples.copy(), np.ones(k))
        for column in columns:
            for i in np.flatnonzero(~np.isfinite(column)).tolist():
                decision.reject(i, NOT_FINITE)
        norms: dict[str, list[float]] = {}
        if self._norms:
            norms = {name: _norms(squares) for name, squares in lengths._asdict().items() if squares is not None}
        own = norms.pop("own", None)
        if self._max_norm is not None:
            self._require_max_norm(norms, decision, self._max_norm)
        if own is not None:
            norms["parameters"] = own
        self._apply_rules(Group(clients, claims.steps, examples, norms, {}, math.inf), decision, last=last)
        unchanged = decision.accepted & (decision.examples == examples) & (decision.factors == 1)
        return None if unchanged.all() else decision

    def _require_max_norm(self, norms: Mapping[str, list[float]], decision: Decision, most: float) -> None:
        for name in [one for one in norms if one != "buffers"]:  # which have a different unit
            unit = f" {self._unit}" if name == "parameters" else ""
            for i in np.flatnonzero(decision.accepted & (np.array(norms[name]) > as_float32(most))).tolist():
                decision.reject(i, f"{PARTS[name]}{unit} = {norms[name][i]:g} exceeds max_norm={most:g}")

    def _apply_rules(self, updates: Group, decision: Decision, *, last: bool) -> None:
        """Decide in groups of one update, or of all updates that wait for a median."""
        examples, window = updates.examples, self._examples
        capping = None if window is None or window.agree(examples[decision.accepted]) else window
        waiting: list[int] = []
        which = np.flatnonzero(decision.accepted).tolist()
        if self._decides_last and not last:
            which, waiting = [], which
        for i in which:
            waiting.append(i)
            if self._needs_medians and len(self._norms["parameters"]) + len(waiting) < FEW:
                continue
            if capping is None or len(capping) + len(waiting) >= FEW or capping.agree(examples[waiting]):
                self._decide_group(updates, waiting, decision, capping)
                waiting = []
        if last and waiting:
            self._decide_group(updates, waiting, decision, capping)
        elif waiting:
            decision.undecided[waiting], decision.accepted[waiting] = True, False
        if window is not None and capping is None:
            window.add(examples[decision.accepted])

    def _decide_group(
        self, updates: Group, which: Sequence[int], decision: Decision, capping: ClaimWindow | None
    ) -> None:
        """Apply the rules; add accepted updates to the windows. ``capping``: the window if examples are capped."""
        group = updates.chosen(which)
        own, norms = updates.examples[which], group.norms
        if self._needs_medians:
            group.medians = self._medians(norms)
        if capping is not None:
            group.usual_examples = capping.most(own[:0] if len(capping) >= FEW else own, 1.0)
        rejected, factors = self._rules.decide(group)
        for at, reason in rejected.items():
            decision.reject(which[at], reason)
            self._too_long[group.clients[at]] = {name: column[at] for name, column in norms.items()}
        stay = [at for at in range(len(which)) if at not in rejected]
        accepted = [which[at] for at in stay]
        decision.factors[accepted], decision.examples[accepted] = factors[stay], group.examples[stay]
        for at in stay if self._needs_medians else ():
            self._too_long.pop(group.clients[at], None)
            for name, column in norms.items():
                self._norms[name].add(column[at])
                if name in self._received:
                    self._received[name].add(column[at])
        if capping is not None:
            capping.add(own[stay])  # as reported; by capped numbers, the cap could only fall

    def _medians(self, norms: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
        few = len(self._norms["parameters"]) < FEW
        medians = {name: self._norms[name].median(column if few else ()) for name, column in norms.items()}
        if "buffers" in medians and medians["buffers"] is None and (square := self._buffers()) > 0:
            medians["buffers"] = math.sqrt(square)  # no accepted update changed them: use their norm in x
        return medians


def _norms(squares: F64) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        norms: list[float] = np.sqrt(squares).astype(np.float32).tolist()
    return norms


# The weights of a round's updates, and the examples with which they count.


class CappedClaim(NamedTuple):
    """A client that counted with fewer examples than it reported."""

    client: ClientId
    claimed: int
    counted: int


class Weighing:
    """Computes the weights of an open round's updates from their claims, by the method.

    ``lowered`` lists the clients that counted with fewer examples than they reported, from ``least_logged`` on.
    """

    def __init__(self, settings: Settings, state: Any) -> None:  # state is a State, whose module imports this one
        self._algorithm, self._state = settings.algorithm, state
        self._counts_none = bool(settings.rules.robust or settings.rules.private)
        self._rules = settings.rules
        self.lowered: list[CappedClaim] = []

    def close(self) -> None:
        """Release the state, so that a finished round does not keep a store open."""
        del self._state

    @property
    def reads_examples(self) -> bool:
        """Whether weights depend on examples that the server cannot check, so that all updates or none report them."""
        return self._algorithm.weighs_claims and not (self._counts_none or self._state.population.sizes)

    def known_at_most(self, batch: UpdateBatch) -> F64:
        """Return the updates' examples, float64[k]; with client sizes at most n_k, which is also the default."""
        population, claimed = self._state.population, batch.claims.examples
        if not population.sizes:
            return claimed
        known = population.examples(self._state.registry, batch.clients)
        claims_less = (batch.sources == COUNTED) & (claimed < known)
        return np.where(claims_less | (batch.sources == WEIGHTED), claimed, known)

    def count_known_examples(self, batch: UpdateBatch) -> None:
        """Cap the updates' examples at the client sizes if the server has them; some rules count none."""
        if self._counts_none:
            batch.claims = replace(batch.claims, examples=np.ones(len(batch)))
        elif self._state.population.sizes:
            self.count_examples(batch, self.known_at_most(batch))

    def count_examples(self, batch: UpdateBatch, examples: F64) -> None:
        """Replace the updates' examples, except where the caller gave a weight, or all count once."""
        claimed = batch.claims.examples
        if examples is claimed or self._counts_none:
            return
        examples = np.where(batch.sources == WEIGHTED, claimed, examples)
        least = least_logged(None if self._state.population.sizes else self._rules.ratio("examples"))
        for i in np.flatnonzero((examples * (own := batch.sources == COUNTED) * least < claimed) & own).tolist():
            self.lowered.append(CappedClaim(batch.clients[i], int(claimed[i]), int(examples[i])))
        batch.claims = replace(batch.claims, examples=examples)

    def weigh(self, batch: UpdateBatch) -> None:
        """Set the updates' weights by their claims, shares and ages."""
        population, clients, claims, algorithm = self._state.population, batch.clients, batch.claims, self._algorithm
        cutoff, depends = algorithm.cutoff, population.sizes or population.arrived or algorithm.own_starts
        if claims.clients is not clients or cutoff is not None or depends:
            number, registry = self._state.snapshot.round_number, self._state.registry
            shares, ages = population.shares(registry, clients), population.ages(registry, clients, number)
            intervals = None if cutoff is None else population.intervals(registry, clients, number, cutoff)
            absences = number + 1.0 - batch.starts if algorithm.own_starts else None
            found = {"shares": shares, "ages": ages, "intervals": intervals, "absences": absences}
            claims = batch.claims = replace(claims, clients=clients, **found)
        try:
            weights = algorithm.weigh(claims)
        except Exception as error:
            failed(algorithm, "weigh", error)
        batch.weights = check_weights(algorithm, weights, claims)


def weight_of(weights: Weights, update: Update, client: ClientId) -> float:
    """Return the weight of an update with checked claims; raise RangeError if it is missing, negative or not finite."""
    if not callable(weights):
        if client not in weights:
            raise RangeError(f"weights: client {client!r} is missing; add it to the weights of Mean")
        return check_number("weights", weights[client], "[0, inf)")
    missing = np.nan if update.examples is None else update.examples
    steps, examples, counts = (np.array([n], np.float64) for n in (update.steps, missing, update.count))
    try:
        weight = np.asarray(weights(Claims(steps, examples, counts, clients=[client]))).item()
    except Exception as error:
        failed(weights, "the function weights of Mean", error)
    if update.examples is None and weight != weight:
        raise RangeError("examples=None: the weights of Mean are computed from the number of examples; report it")
    return check_number("weights", weight, "[0, inf)")


# The updates as the round sums them.


ReadUpdate: TypeAlias = tuple[UpdateBatch, bool, Update, float]
"""A batch of one update, whether its vectors are immutable, the update with plain claims, and eta_i."""

NO_COUNTERS: Counters = {}
NO_START = "round=None: an asynchronous server needs the round of the broadcast from which the client started"


@lru_cache(maxsize=8)
def usual(k: int) -> tuple[Bools, F64, npt.NDArray[np.int64]]:
    """Return ``has_buffers`` of k models, ones and zeros; all read-only."""
    columns = np.ones(k, np.bool_), np.ones(k), np.zeros(k, np.int64)
    for column in columns:
        freeze(column)
    return columns


def batch_of(clients: list[ClientId], vectors: list[Any], **columns: Any) -> UpdateBatch:
    """Return a batch with these columns; others may have their usual values."""
    k = len(clients)
    has_buffers, ones, zeros = usual(k)
    usually: dict[str, Any] = {"clients": clients, "vectors": vectors, "controls": [None] * k, "digests": [None] * k}
    usually |= {"factors": ones, "has_buffers": has_buffers, "orders": zeros, "weights": UNKNOWN, "squares": UNKNOWN}
    return frozen(UpdateBatch, usually | columns)


class UpdateReader:
    """Reads the updates of a server's open round into batches."""

    def __init__(self, settings: Settings, state: Any) -> None:
        self._settings, self._state, self._weights = settings, state, settings.rules.weights
        self._rates = SentRates(settings.lr, settings.limits)
        self._starts: dict[int, F32] = {}

    def check_claims(self, update: Update) -> Update:
        """Return an update with checked plain numbers; raise RangeError if one is invalid, or its round is missing."""
        rounds = range(self.oldest(), self._state.round_number + 1)
        update = check_claims(update, self._settings.all_limits, rounds)
        if self._settings.policy.buffer is not None and update.round is None:
            raise RangeError(NO_START)
        return update

    def read(self, update: Update, client: ClientId) -> ReadUpdate:
        """Return the update; raise if it is invalid."""
        settings, algorithm, now = self._settings, self._settings.algorithm, self._state.snapshot
        kind, number = update.kind, now.round_number
        y, fixed = self._read_vector(update)
        update = checked = self.check_claims(update)
        if self._weights is not None and update.weight is None:
            update = update._replace(weight=weight_of(self._weights, update, client))
        started = number if update.round is None else update.round
        is_late = started != number
        if is_late and (last := self.last_start(client, y)) >= started:
            raise RangeError(f"round={started}: an update of this client from round {last} was already counted")
        rate = self._rates.read(update, started)
        distance = rate * update.steps
        if not 0 < distance < math.inf or not 1 / distance < math.inf:
            raise RangeError(f"lr={short_repr(update.lr)}: 1 / (lr x steps) must be finite")
        # h has the unit of x if models are averaged, else of a gradient.
        scale = 1.0 if settings.averages_models else 1 / distance
        if is_late and algorithm.needs_fresh_updates:
            raise RangeError(f"round={started}: must be {number}, because {algorithm} does not keep earlier controls")
        if is_late and algorithm.mixes_models and kind != "model":
            raise RangeError(f"kind={kind!r}: a late update must be a model, because {algorithm} keeps no past models")
        if algorithm.own_starts:
            started = self.own_start(client, y)
        if kind != "gradient":
            self.check_buffers(y, kind, started)
        counters = settle_counters(settings.layout, read_counters(update, settings.layout), now.counters, kind)
        control = self._read_control(update.control)
        if algorithm.needs_loss and update.loss is None:
            raise RangeError(f"loss: missing, but {algorithm} weights clients by their losses at x; send it")
        if self._state.upload is not None:  # the fold may run on a different stream of the library
            core.await_arrays([one for one in (*(y if isinstance(y, list) else [y]), control) if one is not None])
        fixed = fixed or self._state.update_buffers.owns(y)
        size, source = _size_of(update)
        losses = _column(update.loss) if algorithm.needs_loss else None
        batch = batch_of(
            [client],
            [y],
            claims=Claims(_column(update.steps), _column(size), _column(update.count), losses=losses),
            eta_steps=_column(distance),
            bases=[self._base_of(started) if kind == "model" else None],
            scales=_column(-distance * scale if kind == "gradient" else scale),
            has_buffers=np.array([kind != "gradient"]),
            counters=[counters],
            controls=[control],
            sources=np.array([source], np.int8),
            starts=np.array([started]),
            digests=[digest_of_numbers(self.whole(y)) if settings.audit else None],
        )
        return batch, fixed and (control is None or self._is_immutable(control)), checked, rate

    def _is_immutable(self, vector: Any) -> bool:
        return core.are_immutable([vector])

    def require_form(self, update: Update) -> None:
        """Raise RangeError if the caller sent vectors in a form that the server does not take."""

    def bytes_of(self, update: Update, batch: UpdateBatch | None) -> int:
        """Return the bytes of an update's vectors as sent; if unknown, those of its batch, or 0 without one."""
        return bytes_sent(update, self._settings.layout.names) or (batch.bytes if batch else 0)

    def whole(self, vector: Any) -> Any:
        """Return a whole vector of a batch, or None."""
        return vector

    def batch_of_columns(self, columns: tuple[list[ClientId], list[Any], F64, npt.NDArray[np.int64]]) -> UpdateBatch:
        """Return the updates of ``core.PlainUpdates.take`` as a batch.

        ``columns``: clients, ys, (steps, examples, eta_i K_i, 1 / (eta_i K_i)), (sources, start rounds, orders, indices
        in ``KINDS``).
        """
        clients, ys, (steps, examples, distances, scales), (sources, starts, orders, forms) = columns
        k, number = len(clients), self._state.snapshot.round_number
        has_buffers, ones, _ = usual(k)
        if self._settings.policy.buffer is None:
            bases = [self.start_of(number)] * k
        else:
            bases = [self._base_of(started) for started in starts.tolist()]
        scales = ones if self._settings.averages_models else scales
        if any(forms.tolist()):  # for a few numbers, faster than NumPy's
            bases = [None if form else base for form, base in zip(forms.tolist(), bases, strict=True)]
            has_buffers = forms != KINDS.index("gradient")
            scales = np.where(has_buffers, scales, -distances * scales)
        return batch_of(
            clients,
            ys,
            claims=frozen(Claims, {"steps": steps, "examples": examples, "counts": ones, "clients": clients}),
            eta_steps=distances,
            bases=bases,
            counters=[NO_COUNTERS] * k,
            scales=scales,
            sources=sources,
            starts=starts,
            orders=orders,
            has_buffers=has_buffers,
        )

    def plain_updates(self, *, may_hold: bool, may_weigh: bool) -> Any:
        """Return a ``core.PlainUpdates`` that reads usual updates at once; None if the server needs more of an update.

        ``may_hold``: whether it may hold all vectors. ``may_weigh``: whether updates may have weights of their own.
        """
        settings, limits, layout, state = self._settings, self._settings.all_limits, self._settings.layout, self._state
        if not settings.reads_at_once:
            return None
        number = state.snapshot.round_number
        rounds, lr = (number, number, number), rate_at(settings.lr, number)
        if settings.policy.buffer is not None:
            same = isinstance(settings.lr, Constant) and not settings.algorithm.needs_fresh_updates
            rounds = self.oldest() if same else number, number, -2  # an update must name its round
        flags = settings.repeats, may_weigh and settings.algorithm.weighs_claims, layout.n == layout.n_parameters
        of_lr = limits.max_client_lr is not None, max(limits.max_client_lr or lr, lr)
        numbers = lr, limits.max_steps, limits.max_examples, *of_lr, *rounds, *flags
        copied = 4 * layout.n * (settings.copies_models and state.upload is None)
        in_parts = copied or (self._cuts and not settings.copies_models)
        form = layout.n, numbers, state.buffers.ranges, layout.parts if in_parts else []
        return core.PlainUpdates(Update, state.registry.index, *form, copied, may_hold, state.update_buffers.owns)

    def check_buffers(self, y: Any, kind: Kind, started: int) -> None:
        """Raise RangeError if a model or a difference makes a buffer negative that must not be."""
        self._state.buffers.check(y, self.start_of(started) if kind == "delta" else None)

    def last_start(self, client: ClientId, y: Any) -> int:
        """Return the round from which the client's last accepted update started; -1 if that is too long ago."""
        return int(self._state.snapshot.starts.get(client, -1))

    def own_start(self, client: ClientId, y: Any) -> int:
        """Return the round from whose model a client of a method with ``own_starts`` started."""
        return int(self._state.last_round(client))

    def oldest(self) -> int:
        """Return the oldest round of which the open round accepts updates."""
        number: int = self._state.snapshot.round_number
        if self._settings.algorithm.own_starts or not self._settings.policy.max_staleness:
            return number
        least = max(0, number - self._settings.policy.max_staleness)
        if self._settings.algorithm.mixes_models:
            return least
        past = self._state.snapshot.past
        return next((t + 1 for t in range(number - 1, least - 1, -1) if t not in past), least)

    def _base_of(self, started: int) -> Any:
        """Return the model from which an update of that round is subtracted."""
        return self.start_of(self._state.snapshot.round_number if self._settings.algorithm.mixes_models else started)

    def start_of(self, round: int) -> Any:
        """Return the model of that round as it was sent."""
        if round == self._state.snapshot.round_number:
            return self._state.start_of(round)
        if round not in self._starts:
            self._starts[round] = self._state.start_of(round)
        return self._starts[round]

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        settings = self._settings
        room = self._state.update_buffers.get if settings.copies_models else None
        apart = self._cuts and room is None
        return read_vector(update, settings.layout, apart=apart, device=settings.device, room=room)

    @property
    def _cuts(self) -> bool:
        """Whether rows may be cut at every element; in quantised ones, several elements share a scale."""
        return not self._settings.algorithm.keeps_rows or self._state.store.codec == "f32"

    def _read_control(self, control: Any) -> Any:
        if self._settings.algorithm.second_vector is None:
            return None
        return read_control(control, self._settings.layout.n_parameters, device=self._settings.device)


def read_control(control: Any, n: int, *, device: str = CPU) -> Any:
    """Return a second vector as ``as_vector`` does; raise DtypeError if it is not an array."""
    vector = as_vector("control", control, n, device=device)
    if vector is None:
        got = "None" if control is None else type(control).__name__
        raise DtypeError(f"control: expected float32[{n}], the client's second vector, got {got}")
    return np.require(vector, requirements="A") if isinstance(vector, np.ndarray) else vector


def _size_of(update: Update) -> tuple[float, int]:
    """Return the examples or the weight of an update before limits, and its source."""
    if update.weight is not None:
        return float(update.weight), WEIGHTED
    return (1.0, NO_COUNT) if update.examples is None else (update.examples, COUNTED)


def _column(number: Any) -> F64:
    return np.array([number], np.float64)


# Updates of clients that start from models of their own.


class OwnModel(NamedTuple):
    """An update that a ``ModelReader`` has read: K, eta K, the counters, and the bytes of its vector."""

    steps: int
    distance: float
    counters: dict[str, npt.NDArray[Any]]
    bytes: int


class ModelReader:
    """Reads the updates of a round whose clients start from models of their own, as the nodes of a network do.

    Args:
        layout: the layout of all models.
        limits: ``max_steps`` and ``max_client_lr`` of an update.
        rate: the rate of the steps; it must have a value for the round.
        number: the round.
    """

    def __init__(self, layout: Layout, limits: Limits, rate: Rate, number: int) -> None:
        self._layout, self._limits, self._number = layout, limits, number
        self._rates = SentRates(rate, limits)
        self._rates.sent(number)

    @arrays.ieee
    def read(self, update: Update, x: F32, now: Counters, out: F32) -> OwnModel:
        """Write the model of an update into ``out``, float32[n]; ``require_measured`` checks its numbers later.

        Args:
            x: float32[n], the model from which the client started.
            now: the counters and constants before the round.

        Raises:
            FedcoreError: the vector, or another field of the update, is invalid.
        """
        layout, number, p = self._layout, self._number, self._layout.n_parameters
        y = in_float32(read_vector(update, layout, apart=False)[0])
        update = check_claims(update, self._limits, range(number, number + 1))
        distance = self._rates.read(update, number) * update.steps
        counters = settle_counters(layout, read_counters(update, layout), now, update.kind)
        with np.errstate(over="ignore", invalid="ignore"):
            if update.kind == "model":
                np.copyto(out, y)
            elif update.kind == "delta":
                kernels.combine([as_sent(layout, x), y], [1.0, 1.0], out)
            else:
                kernels.combine([as_sent(layout, x)[:p], y], [1.0, -distance], out[:p])
                out[p:] = x[p:]
        return OwnModel(update.steps, distance, counters, bytes_of(update.value, layout.names) or y.nbytes)

    def require_measured(self, y: F32, square: float) -> None:
        """Raise RangeError if a model y, at the square distance ``square`` from x, is not finite."""
        if not math.sqrt(square) < LONGEST or not kernels.all_finite([y[self._layout.n_parameters :]])[0]:
            name = first_not_finite(y, self._layout)
            raise RangeError(f"{NOT_FINITE}, in {name}" if name else NOT_FINITE)

    def infinite_tensor(self, x: F32) -> str | None:
        """Return the name of the first tensor of a finite model that is not finite in its dtype, or None."""
        return first_not_finite(as_sent(self._layout, x), self._layout) if self._layout.narrow else None

    def settle(self, now: Counters, sent: Sequence[Counters]) -> dict[str, npt.NDArray[Any]]:
        """Return the counters and constants after a round: the largest counters, and flags as ``settled`` does."""
        after = dict(now)
        for name, before in now.items():
            values = [counters[name] for counters in sent if name in counters]
            if any(name == piece.name for piece in self._layout.counters):
                after[name] = np.asarray(np.maximum.reduce([before, *values]))
            else:
                after[name] = agreed(before, values, len(sent))
        return after

"""Rules of aggregation: a chain that rejects, caps or scales the updates of a round, and then takes their mean.

A rule is one class. It decides on updates once the server has measured them, and before any of them counts::

    Server(model, "FedAvg", lr=0.1, aggregation=[CapExamples(2), ClipToMedian(), Mean()])

A rule of your own is a frozen dataclass that derives from ``Rule`` and says ``decide``. It is passed as an object, or
found by its dotted name, ``"mypackage.rules:RejectOpposite"``.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Claims
from fedcore.arguments import real
from fedcore.arrays import F32, F64
from fedcore.errors import RangeError, UnknownNameError
from fedcore.native import core
from fedcore.registries import Registry
from fedcore.store.registry import ClientId

Weights: TypeAlias = Mapping[ClientId, float] | Callable[[Claims], F64]
"""Weights in place of the numbers of examples: by client, or computed from one client's claims."""
Norms: TypeAlias = Mapping[str, Sequence[float]]
"""Norms of the updates' parts: "parameters", "buffers" and "controls" (the second vector)."""

WINDOW = 1000
"""Accepted updates whose norms and claims are remembered for medians."""
FEW = 8
"""Updates that a median needs at least, as soon as there are so many."""


@dataclass(slots=True)
class Group:
    """Measured updates on which the rules decide together, in the order of ``add``.

    Usually a group is one update. While fewer than 8 updates were ever accepted, updates wait for each other, until
    there are 8 or the round ends.

    Attributes:
        clients: the updates' clients.
        steps: float64[k], the local steps that they report.
        examples: float64[k], the examples with which they count; rules may lower them (``cap_examples``).
        norms: the length of each update, by part: |x - y| where the server averages models, else the length of the
            mean gradient. Lengths are in float32.
        medians: the median length of the last 1,000 accepted updates, by part, those of the group included while they
            are few; None where there is none. Empty unless a rule of the chain ``needs_medians``.
        most_examples: the median number of examples times a ratio.
        factors: float64[k], what each update is multiplied by; rules may lower them (``scale``).
        rejected: reasons by the index of the update.
    """

    clients: Sequence[ClientId]
    steps: F64
    examples: F64
    norms: Norms
    medians: Mapping[str, float | None]
    most_examples: Callable[[float], float]
    factors: F64
    rejected: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clients)

    def reject(self, i: int, reason: str) -> None:
        """Reject update ``i``; the report has its first reason."""
        self.rejected.setdefault(i, reason)

    def scale(self, i: int, factor: float) -> None:
        """Multiply update ``i`` by at most ``factor``, in [0, 1]."""
        self.factors[i] = min(self.factors[i], factor)

    def cap_examples(self, most: float) -> None:
        """Count each update with at most so many examples."""
        self.examples = np.minimum(self.examples, most)


class Rule(ABC):
    """A rule of the chain. A subclass is a frozen dataclass; its fields are its options, which a server's folder keeps.

    Attributes:
        needs_medians: whether ``decide`` reads ``Group.medians``. The first 8 updates then wait for each other.
    """

    needs_medians: ClassVar[bool] = False

    @abstractmethod
    def decide(self, group: Group) -> None:
        """Reject or scale updates of the group, or cap their examples."""


@dataclass(frozen=True)
class RejectLong(Rule):
    """Reject an update that is ``ratio`` times longer than the median of the last 1,000 accepted updates.

    Parameters, float buffers and second vectors each have their own median. Zeros do not count. Where no accepted
    update changed the buffers, their length in x stands for the median.

    Args:
        ratio: at least 1.
    """

    ratio: float = 10.0
    needs_medians: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", real("ratio", self.ratio, "[1, inf)"))

    def decide(self, group: Group) -> None:
        """Compare each length with the median of its part."""
        for name, median in group.medians.items():
            if median is None:
                continue
            most = as_float32(self.ratio * median)
            for i, norm in enumerate(group.norms[name]):
                if norm > most:
                    group.reject(
                        i, f"{PARTS[name]} {norm:g} is longer than {self.ratio:g} x the median {median:g} (RejectLong)"
                    )


@dataclass(frozen=True)
class ClipToMedian(Rule):
    """Scale an update down, as a whole, until no part of it is longer than the median that ``RejectLong`` describes.

    The median remembers lengths before clipping; otherwise it could only fall.
    """

    needs_medians: ClassVar[bool] = True

    def decide(self, group: Group) -> None:
        """Scale by median / length where that is below 1."""
        for name, median in group.medians.items():
            length = median or 0.0  # no median: most updates are zero
            for i, norm in enumerate(group.norms[name]):
                if norm > as_float32(length):
                    group.scale(i, length / norm)


@dataclass(frozen=True)
class CapExamples(Rule):
    """Count a client with at most ``ratio`` times the median number of examples of the last 1,000 accepted updates.

    It applies where weights follow the examples that clients report, and the server does not know their numbers.

    Args:
        ratio: at least 1.
    """

    ratio: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", real("ratio", self.ratio, "[1, inf)"))

    def decide(self, group: Group) -> None:
        """Cap the examples."""
        group.cap_examples(group.most_examples(self.ratio))


@dataclass(frozen=True)
class CapSteps(Rule):
    """Count a client's steps in gamma up to ``ratio`` times the median steps of the last 1,000 accepted updates.

    It applies where gamma is the mean of eta_i K_i. It acts on the whole cohort, when the round is finished: the
    cohort's own median counts where it is larger and the cohort has 8 draws or more.

    Args:
        ratio: at least 1.
    """

    ratio: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", real("ratio", self.ratio, "[1, inf)"))

    def decide(self, group: Group) -> None:
        """Leave single updates as they are."""


@dataclass(frozen=True)
class Mean(Rule):
    """The method's weighted sum of the accepted updates: the end of every chain.

    Args:
        weights: numbers >= 0 in place of the numbers of examples, for methods that weigh by examples: by client, or a
            function of one client's ``fedcore.algorithms.Claims``, such as ``lambda claims: np.sqrt(claims.examples)``.
            A folder does not keep them: ``Server.load`` takes them again.
    """

    weights: Weights | None = None

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping) and hasattr(weights, "__len__"):  # a list is of the clients 0, 1, ...
            object.__setattr__(self, "weights", dict(enumerate(weights)))

    def decide(self, group: Group) -> None:
        """Leave single updates as they are."""


OPEN = (CapSteps(2.0), CapExamples(2.0), ClipToMedian(), Mean())
"""The chain "open", for a federation that strangers can join."""
NAMED: dict[str, tuple[Rule, ...]] = {"mean": (Mean(),), "open": OPEN}
"""The chains that have a name."""

REGISTRY: Registry[type[Rule]] = Registry(
    "rule",
    {rule.__name__: rule for rule in (CapExamples, CapSteps, ClipToMedian, Mean, RejectLong)},
    due="a subclass of fedcore.rules.Rule",
    fits=lambda row: isclass(row) and issubclass(row, Rule) and row is not Rule,
    group="fedcore.rules",
)

R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Chain:
    """The rules of a server, in order; the last one is a ``Mean``."""

    rules: tuple[Rule, ...] = (Mean(),)

    @classmethod
    def of(cls, aggregation: "str | Rule | Sequence[Rule | str] | Chain | None") -> "Chain":
        """The chain of ``Server``'s argument ``aggregation``; without a ``Mean`` at the end, one is added.

        Raises:
            UnknownNameError: a name is unknown.
            RangeError: a ``Mean`` stands before another rule, or a rule stands twice.
        """
        if isinstance(aggregation, Chain):
            return aggregation
        if aggregation is None:
            return PLAIN
        if isinstance(aggregation, str) and aggregation in NAMED:
            return cls(NAMED[aggregation])
        if isinstance(aggregation, str) and ":" not in aggregation and aggregation not in REGISTRY:
            raise UnknownNameError.of("aggregation", aggregation, (*NAMED, *REGISTRY))
        given = [aggregation] if isinstance(aggregation, str | Rule) else list(aggregation)
        rules = [REGISTRY.find(rule)() if isinstance(rule, str) else rule for rule in given]
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UnknownNameError.of("aggregation", rule, (*NAMED, *REGISTRY))
        if not rules or not isinstance(rules[-1], Mean):
            rules.append(Mean())
        kinds = [type(rule) for rule in rules]
        if len(set(kinds)) < len(kinds):
            raise RangeError("aggregation: a rule stands twice in the chain; give each rule once")
        if any(isinstance(rule, Mean) for rule in rules[:-1]):
            raise RangeError("aggregation: Mean() must be the last rule of the chain")
        return cls(tuple(rules))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def find(self, kind: type[R]) -> R | None:
        """The rule of that class, if it is in the chain."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    @cached_property
    def weights(self) -> Weights | None:
        """The weights of the ``Mean``."""
        mean = self.find(Mean)
        return None if mean is None else mean.weights

    def with_weights(self, weights: Weights | None) -> "Chain":
        """The chain with other weights of the ``Mean``."""
        return Chain((*self.rules[:-1], Mean(weights)))

    @cached_property
    def needs_medians(self) -> bool:
        """Whether a rule compares lengths with those of other updates."""
        return any(rule.needs_medians for rule in self.rules)

    @cached_property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules that decide on single updates; CapExamples only where weights follow claims."""
        return tuple(rule for rule in self.rules if not isinstance(rule, CapSteps | Mean))

    @cached_property
    def is_plain(self) -> bool:
        """Whether the chain is the plain mean: every valid update counts as it is."""
        return len(self.rules) == 1 and self.weights is None

    @cached_property
    def examples_ratio(self) -> float | None:
        """The ratio of ``CapExamples``."""
        rule = self.find(CapExamples)
        return None if rule is None else rule.ratio

    @cached_property
    def steps_ratio(self) -> float | None:
        """The ratio of ``CapSteps``."""
        rule = self.find(CapSteps)
        return None if rule is None else rule.ratio


PLAIN = Chain()

PARTS = {
    "parameters": "update: its length",
    "buffers": "update: the length of its float buffers",
    "controls": "control: its length",
}


def as_float32(number: float) -> float:
    """A number as norms are compared: in float32; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


class NormWindow:
    """The norms of the last ``WINDOW`` accepted updates, in order, and their median. Zeros are not remembered.

    Args:
        norms: norms > 0, the oldest first.

    Cost: a few microseconds a norm, independent of their number.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._norms = deque(norms, WINDOW)
        self._sorted = sorted(self._norms)

    def __len__(self) -> int:
        return len(self._norms)

    def add(self, norm: float) -> None:
        """Remember a norm; the oldest one is dropped if there are too many."""
        if norm <= 0:
            return
        if len(self._norms) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._norms[0])]
        self._norms.append(norm)
        insort(self._sorted, norm)

    def median(self, beside: Sequence[float] = ()) -> float | None:
        """The median; of an even number the lower middle one, so that one of two cannot vouch for itself.

        Where more than half of the first norms are zeros there is no median.

        Args:
            beside: norms that count too.
        """
        if not beside:
            norms = self._sorted
        else:
            own = [norm for norm in beside if norm > 0]
            norms = sorted([*self._sorted, *own]) if 2 * len(own) >= len(beside) or self._norms else []
        return norms[(len(norms) - 1) // 2] if norms else None

    def packed(self) -> F32:
        """The norms as float32[WINDOW], NaN behind the last: always of one size, as a store has a file for each."""
        vector = np.full(WINDOW, np.nan, np.float32)
        vector[: len(self._norms)] = self._norms
        return vector

    @classmethod
    def unpacked(cls, vector: F32) -> "NormWindow":
        """The window that ``packed`` wrote."""
        return cls(vector[~np.isnan(vector)].tolist())


_NONE = np.full(WINDOW, np.nan)
_NONE.flags.writeable = False


class ClaimWindow:
    """The last ``WINDOW`` accepted claims of examples or steps, in order.

    Args:
        ratio: a claim counts up to this multiple of their median; None for any claim.
        packed: float64[WINDOW], ``packed`` as the last round left it; None for no claims.

    Cost: some microseconds a call, independent of the number of claims in it.
    """

    def __init__(self, ratio: float | None, packed: F64 | None = None) -> None:
        self.ratio = ratio
        self.packed = _NONE if packed is None else packed
        """The claims, NaN behind the last. Never changed in place."""
        self._count = 0 if packed is None else WINDOW - int(np.isnan(packed).sum())
        self._range = core.column_range(self._claims)

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Whether no claim can exceed the ratio times a median of these and the remembered ones, whatever comes next.

        A single first claim agrees with nothing.
        """
        least, most = core.column_range(claims)
        return len(claims) + self._count > 1 and most <= self._limit * min(least, self._range[0])

    def most(self, beside: F64, ratio: float | None = None) -> float:
        """The ratio times the median.

        Args:
            beside: claims that count too.
            ratio: another ratio than the window's.
        """
        claims = np.concatenate([self._claims, beside])
        return (self._limit if ratio is None else ratio) * median(claims) if len(claims) else math.inf

    def add(self, claims: F64) -> None:
        """Remember claims; the oldest ones are dropped if there are too many."""
        if not len(claims):
            return
        if self._count == WINDOW and self._range[0] == self._range[1] and core.column_range(claims) == self._range:
            return
        kept = self.packed[max(0, self._count + len(claims) - WINDOW) : self._count]
        count = min(WINDOW, len(kept) + len(claims))
        packed = _NONE.copy()
        packed[: len(kept)], packed[len(kept) : count] = kept, claims[-WINDOW:]
        self.packed = packed
        self._count, self._range = count, core.column_range(packed[:count])

    @property
    def _limit(self) -> float:
        return math.inf if self.ratio is None else self.ratio

    @property
    def _claims(self) -> F64:
        return self.packed[: self._count]


def median(claims: F64) -> float:
    """The median of some claims; of an even number the lower middle one."""
    at = (len(claims) - 1) // 2
    return float(np.partition(claims, at)[at])


class ClaimWindows:
    """The windows of claims, rebuilt from a snapshot's vectors only when those changed."""

    def __init__(self) -> None:
        self._claimed: dict[str, ClaimWindow] = {}

    def of(self, what: str, ratio: float | None, packed: Mapping[str, npt.NDArray[Any]]) -> ClaimWindow:
        """The window of one kind of claims, up to the snapshot whose vectors ``packed`` has."""
        known, last = self._claimed.get(what), packed.get(what, _NONE)
        # An open round that was aborted may have added claims; a change of the chain may have another ratio.
        if known is None or known.packed is not last or known.ratio != ratio:
            known = self._claimed[what] = ClaimWindow(ratio, last)
        return known

"""Aggregation rules: a chain that rejects, caps or scales the updates of a round before their mean.

A rule is a class. It decides on updates after the server has measured them and before it adds them::

    Server(model, "FedAvg", lr=0.1, aggregation=[CapExamples(2), ClipToMedian(), Mean()])

To write a rule, derive a frozen dataclass from ``Rule`` and implement ``decide``. Pass an object of the class, or its
path ``"mypackage.rules:RejectOpposite"``.
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
from fedcore.arrays import F32, F64, core
from fedcore.errors import RangeError, UnknownNameError
from fedcore.store.registry import ClientId
from fedcore.validation import Registry, check_number

Weights: TypeAlias = Mapping[ClientId, float] | Callable[[Claims], F64]
"""Weights that replace the numbers of examples: by client, or computed from one client's claims."""
Norms: TypeAlias = Mapping[str, Sequence[float]]
"""Norms of the updates' parts: "parameters", "buffers" and "controls" (the second vector)."""

WINDOW = 1000
"""The number of accepted updates in the window of a median."""
FEW = 8
"""The least number of updates for a median; until then, medians include the updates to decide on."""


@dataclass(slots=True)
class Group:
    """Measured updates on which the rules decide together, in the order of ``add``.

    Usually a group is one update. Until the server has accepted 8 updates, updates wait for a group of 8 or the end of
    the round.

    Attributes:
        clients: the updates' clients.
        steps: float64[k], the reported local steps.
        examples: float64[k], the counted examples; rules may lower them (``cap_examples``).
        norms: the float32 norm of each update, by part: |x - y| where the server averages models, else that of the mean
            gradient.
        medians: the median norm of the last 1,000 accepted updates, by part, or None; until 8 were accepted, the
            group's norms are included. Empty unless a rule of the chain ``needs_medians``.
        most_examples: a function that returns the median number of examples times a ratio.
        factors: float64[k], the factor of each update; rules may lower it (``scale``).
        rejected: the reasons, by index of the update.
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
        """Reject update ``i``. Only its first reason is kept."""
        self.rejected.setdefault(i, reason)

    def scale(self, i: int, factor: float) -> None:
        """Multiply update ``i`` by ``factor``, in [0, 1], unless its factor is smaller already."""
        self.factors[i] = min(self.factors[i], factor)

    def cap_examples(self, most: float) -> None:
        """Count each update with at most ``most`` examples."""
        self.examples = np.minimum(self.examples, most)


class Rule(ABC):
    """A rule of the chain. A subclass is a frozen dataclass; its fields are options that a server's folder stores.

    Attributes:
        needs_medians: whether ``decide`` reads ``Group.medians``. The first 8 updates are then decided as a group.
    """

    needs_medians: ClassVar[bool] = False

    @abstractmethod
    def decide(self, group: Group) -> None:
        """Reject or scale updates of the group, or cap their examples."""


@dataclass(frozen=True)
class RatioRule(Rule):
    """A rule with a ratio to a median, at least 1. It does not change single updates."""

    ratio: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_number("ratio", self.ratio, "[1, inf)"))

    def decide(self, group: Group) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RejectLong(RatioRule):
    """Reject an update whose norm exceeds ``ratio`` times the median of the last 1,000 accepted updates.

    Parameters, float buffers and second vectors have separate medians, without zeros. If no accepted update changed the
    buffers, their norm in x replaces the median.
    """

    ratio: float = 10.0
    needs_medians: ClassVar[bool] = True

    def decide(self, group: Group) -> None:
        """Compare each norm with the median of its part."""
        for name, median in group.medians.items():
            if median is None:
                continue
            most = as_float32(self.ratio * median)
            for i, norm in enumerate(group.norms[name]):
                if norm > most:
                    group.reject(
                        i, f"{PARTS[name]} {norm:g} exceeds {self.ratio:g} x the median {median:g} (RejectLong)"
                    )


@dataclass(frozen=True)
class ClipToMedian(Rule):
    """Scale an update by one factor, so that no part has a norm above its median; see ``RejectLong`` for medians.

    The window stores norms before clipping; otherwise the median could only fall.
    """

    needs_medians: ClassVar[bool] = True

    def decide(self, group: Group) -> None:
        """Scale each update by the smallest ratio median / norm below 1."""
        for name, median in group.medians.items():
            length = median or 0.0  # without a median, most updates are zero
            for i, norm in enumerate(group.norms[name]):
                if norm > as_float32(length):
                    group.scale(i, length / norm)


@dataclass(frozen=True)
class CapExamples(RatioRule):
    """Count at most ``ratio`` times the median number of examples of the last 1,000 accepted updates.

    The rule applies if weights follow reported examples that the server cannot check.
    """

    def decide(self, group: Group) -> None:
        """Cap the examples."""
        group.cap_examples(group.most_examples(self.ratio))


@dataclass(frozen=True)
class CapSteps(RatioRule):
    """In gamma, count at most ``ratio`` times the median number of steps of the last 1,000 accepted updates.

    The rule applies if gamma is the mean of eta_i K_i. It acts on the whole cohort at the end of the round. A larger
    median of the cohort replaces that of the window if the cohort has at least 8 draws.
    """


@dataclass(frozen=True)
class Mean(Rule):
    """The last rule of every chain: the method's weighted sum of the accepted updates.

    Args:
        weights: numbers >= 0 that replace the numbers of examples, for methods that weight by examples: by client, or a
            function of one client's ``fedcore.algorithms.Claims``, such as ``lambda claims: np.sqrt(claims.examples)``.
            A folder does not store them; pass them to ``Server.load`` again.
    """

    weights: Weights | None = None

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping) and hasattr(weights, "__len__"):  # entry i of a list belongs to client i
            object.__setattr__(self, "weights", dict(enumerate(weights)))

    def decide(self, group: Group) -> None:
        """Do nothing."""


OPEN = (CapSteps(2.0), CapExamples(2.0), ClipToMedian(), Mean())
"""The chain "open", for a federation that anyone can join."""
NAMED: dict[str, tuple[Rule, ...]] = {"mean": (Mean(),), "open": OPEN}
"""The chains that have a name."""

REGISTRY: Registry[type[Rule]] = Registry(
    "rule",
    {rule.__name__: rule for rule in (CapExamples, CapSteps, ClipToMedian, Mean, RejectLong)},
    expected="a subclass of fedcore.rules.Rule",
    fits=lambda row: isclass(row) and issubclass(row, Rule) and row is not Rule,
    group="fedcore.rules",
)

R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Chain:
    """The rules of a server, in order; the last rule is a ``Mean``."""

    rules: tuple[Rule, ...] = (Mean(),)

    @classmethod
    def of(cls, aggregation: "str | Rule | Sequence[Rule | str] | Chain | None") -> "Chain":
        """Return the chain of ``Server``'s argument ``aggregation``; a missing ``Mean`` is added."""
        if isinstance(aggregation, Chain):
            return aggregation
        if aggregation is None:
            return PLAIN
        if isinstance(aggregation, str) and aggregation in NAMED:
            return cls(NAMED[aggregation])
        if isinstance(aggregation, str) and ":" not in aggregation and aggregation not in REGISTRY:
            raise UnknownNameError.of("aggregation", aggregation, (*NAMED, *REGISTRY))
        entries = [aggregation] if isinstance(aggregation, str | Rule) else list(aggregation)
        rules = [REGISTRY.find(entry)() if isinstance(entry, str) else entry for entry in entries]
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UnknownNameError.of("aggregation", rule, (*NAMED, *REGISTRY))
        if not rules or not isinstance(rules[-1], Mean):
            rules.append(Mean())
        kinds = [type(rule) for rule in rules]
        if len(set(kinds)) < len(kinds):
            raise RangeError("aggregation: a rule occurs twice; pass each rule once")
        if any(isinstance(rule, Mean) for rule in rules[:-1]):
            raise RangeError("aggregation: Mean() must be the last rule of the chain")
        return cls(tuple(rules))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def find(self, kind: type[R]) -> R | None:
        """Return the rule of that class, or None."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    @cached_property
    def weights(self) -> Weights | None:
        """The weights of the ``Mean``."""
        return None if (mean := self.find(Mean)) is None else mean.weights

    def with_weights(self, weights: Weights | None) -> "Chain":
        """Return the chain with different weights of the ``Mean``."""
        return Chain((*self.rules[:-1], Mean(weights)))

    @cached_property
    def needs_medians(self) -> bool:
        """Whether a rule compares norms with medians."""
        return any(rule.needs_medians for rule in self.rules)

    @cached_property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules that decide on single updates."""
        return tuple(rule for rule in self.rules if not isinstance(rule, CapSteps | Mean))

    @cached_property
    def is_plain(self) -> bool:
        """Whether the chain is the plain mean, in which every valid update counts unchanged."""
        return len(self.rules) == 1 and self.weights is None

    @cached_property
    def examples_ratio(self) -> float | None:
        """The ratio of ``CapExamples``."""
        return None if (rule := self.find(CapExamples)) is None else rule.ratio

    @cached_property
    def steps_ratio(self) -> float | None:
        """The ratio of ``CapSteps``."""
        return None if (rule := self.find(CapSteps)) is None else rule.ratio


PLAIN = Chain()

PARTS = {
    "parameters": "update: its norm",
    "buffers": "update: the norm of its float buffers",
    "controls": "control: its norm",
}


def as_float32(number: float) -> float:
    """Return a number rounded to float32, in which norms are compared; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


# Windows of accepted updates, and their medians.


class NormWindow:
    """The norms > 0 of the last ``WINDOW`` accepted updates, the oldest first, and their median.

    Cost: a few microseconds per norm, independent of the number of norms.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._norms = deque(norms, WINDOW)
        self._sorted = sorted(self._norms)

    def __len__(self) -> int:
        return len(self._norms)

    def add(self, norm: float) -> None:
        """Add a norm; a full window drops its oldest norm."""
        if norm <= 0:
            return
        if len(self._norms) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._norms[0])]
        self._norms.append(norm)
        insort(self._sorted, norm)

    def median(self, beside: Sequence[float] = ()) -> float | None:
        """Return the lower median of the stored and further norms; None if more than half of the first norms are zeros.

        With the upper median, the longer one of two updates would set its own limit.
        """
        norms = self._sorted
        if beside:
            own = [norm for norm in beside if norm > 0]
            norms = sorted([*self._sorted, *own]) if 2 * len(own) >= len(beside) or self._norms else []
        return norms[(len(norms) - 1) // 2] if norms else None

    def packed(self) -> F32:
        """Return the norms as float32[WINDOW], with NaN after the last: a folder has a file for each vector size."""
        vector = np.full(WINDOW, np.nan, np.float32)
        vector[: len(self._norms)] = self._norms
        return vector

    @classmethod
    def unpacked(cls, vector: F32) -> "NormWindow":
        """Return the window that ``packed`` described."""
        return cls(vector[~np.isnan(vector)].tolist())


_NONE = np.full(WINDOW, np.nan)
_NONE.flags.writeable = False


class ClaimWindow:
    """The last ``WINDOW`` accepted claims of examples or steps, in order.

    Args:
        ratio: the greatest multiple of the median that a claim counts. Default: no limit.
        packed: float64[WINDOW], ``packed`` after the last round. Default: no claims.

    Cost: some microseconds per call, independent of the number of claims.
    """

    def __init__(self, ratio: float | None, packed: F64 | None = None) -> None:
        self.ratio = ratio
        self.packed = _NONE if packed is None else packed
        """The claims, with NaN after the last. The array never changes in place."""
        self._count = 0 if packed is None else WINDOW - int(np.isnan(packed).sum())
        self._range = core.column_range(self.packed[: self._count])
        self._limit = math.inf if ratio is None else ratio

    def __len__(self) -> int:
        return self._count

    def agree(self, claims: F64) -> bool:
        """Whether no claim can exceed the ratio times a median of these and the stored claims, whatever claims follow.

        A single first claim does not agree.
        """
        least, most = core.column_range(claims)
        return len(claims) + self._count > 1 and most <= self._limit * min(least, self._range[0])

    def most(self, beside: F64, ratio: float | None = None) -> float:
        """Return the ratio times the median of the stored and further claims."""
        claims = np.concatenate([self.packed[: self._count], beside])
        return (self._limit if ratio is None else ratio) * median(claims) if len(claims) else math.inf

    def add(self, claims: F64) -> None:
        """Add claims; a full window drops its oldest claims."""
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


def median(claims: F64) -> float:
    """Return the lower median of claims."""
    at = (len(claims) - 1) // 2
    return float(np.partition(claims, at)[at])


class ClaimWindows:
    """The windows of claims, rebuilt from a snapshot's vectors only if those changed."""

    def __init__(self) -> None:
        self._windows: dict[str, ClaimWindow] = {}

    def of(self, what: str, ratio: float | None, packed: Mapping[str, npt.NDArray[Any]]) -> ClaimWindow:
        """Return the window of one kind of claims, as of the snapshot with the vectors ``packed``."""
        window, last = self._windows.get(what), packed.get(what, _NONE)
        # An aborted round may have added claims, and a changed chain may have a different ratio.
        if window is None or window.packed is not last or window.ratio != ratio:
            window = self._windows[what] = ClaimWindow(ratio, last)
        return window

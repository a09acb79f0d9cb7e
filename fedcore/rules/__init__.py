"""Aggregation rules: a chain that rejects, caps or scales the updates of a round, and then combines them.

A rule is a class. It decides on updates after the server has measured them and before it adds them::

    Server(model, "FedAvg", lr=0.1, aggregation=[CapExamples(2), ClipToMedian(), Mean()])

First each ``Filter`` rejects updates, then each ``Scale`` lowers the effect of others. The last rule is a ``Combine``:
``Mean``, a ``RobustRule`` such as ``Median`` that tolerates dishonest clients, or ``PrivateMean``, which adds noise for
differential privacy::

    Server(model, "FedAvg", lr=0.1, aggregation=[NearestNeighborMixing(2), TrimmedMean(2)])

To write a rule, derive a frozen dataclass from ``Filter`` (``decide``), ``Scale`` (``weights``, ``examples``) or both,
and pass an object of the class, or its path ``"mypackage.rules:RejectFewSteps"``. These rules see norms and numbers, no
vectors. A rule that compares directions is a ``RobustRule``, with ``combine``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, cached_property, partial
from inspect import isclass
from typing import Any

import numpy as np

from fedcore.arrays import F64
from fedcore.errors import RangeError, TooFewUpdatesError, UnknownNameError
from fedcore.rules.base import NEEDS, RESULTS, Combine, Filter, Group, Rule, Scale, Weights, checked, is_column
from fedcore.rules.norms import CapExamples, CapSteps, ClipToMedian, CountOnce, Mean, RejectLong
from fedcore.rules.private import Ledger, PrivateMean
from fedcore.rules.robust import (
    Bucketing,
    Bulyan,
    CentredClipping,
    ClipNorm,
    Combination,
    GeometricMedian,
    Krum,
    MeaMed,
    Median,
    MixingRule,
    MultiKrum,
    NearestNeighborMixing,
    RobustRule,
    TrimmedMean,
    is_combination,
    product,
)
from fedcore.rules.windows import ClaimWindow
from fedcore.validation import Registry

__all__ = ["NAMED", "OPEN", "PLAIN", "REGISTRY", "Bucketing", "Bulyan", "CapExamples", "CapSteps", "CentredClipping"]
__all__ += ["Chain", "ClipNorm", "ClipToMedian", "Combination", "Combine", "CountOnce", "Filter", "GeometricMedian"]
__all__ += ["Group", "Krum", "MeaMed", "Mean", "Median", "MixingRule", "MultiKrum", "NearestNeighborMixing"]
__all__ += ["PrivateMean", "RejectLong", "RobustRule", "Rule", "Scale", "TrimmedMean", "spelled"]

OPEN = (CountOnce(), CapSteps(2.0), CapExamples(1.0), ClipToMedian(), Mean())
"""The chain "open", for a federation that anyone can join."""
NAMED: dict[str, tuple[Rule, ...]] = {"mean": (Mean(),), "open": OPEN, "median": (Median(),)}
"""The chains that have a name."""

REGISTRY: Registry[type[Rule]] = Registry(
    "rule",
    {name: row for name, row in [*globals().items()] if isclass(row) and issubclass(row, Rule) and is_dataclass(row)},
    expected="a subclass of fedcore.rules.Rule",
    fits=lambda row: isclass(row) and issubclass(row, Rule) and row is not Rule,
    group="fedcore.rules",
)


def spelled(name: str) -> str:
    """Return the name of a rule's class in ``REGISTRY`` for another spelling, such as "trimmed-mean" and "krum".

    >>> spelled("trimmed-mean"), spelled("Unknown")
    ('TrimmedMean', 'Unknown')
    """
    plain = name.replace("-", "").replace("_", "").lower()
    return next((known for known in REGISTRY if known.lower() == plain), name)


@dataclass(frozen=True)
class Chain:
    """The rules of a server, in order; the last rule is a ``Combine``."""

    rules: tuple[Rule, ...] = (Mean(),)

    @classmethod
    def of(cls, aggregation: "str | Rule | Sequence[Rule | str] | Chain | None") -> "Chain":
        """Return the chain of ``Server``'s argument ``aggregation``; a missing ``Mean`` is added."""
        if aggregation is None or isinstance(aggregation, Chain):
            return aggregation or PLAIN
        if isinstance(aggregation, str) and aggregation in NAMED:
            return cls(NAMED[aggregation])
        if isinstance(aggregation, str) and ":" not in aggregation and spelled(aggregation) not in REGISTRY:
            raise UnknownNameError.of("aggregation", aggregation, (*NAMED, *REGISTRY))
        is_list = isinstance(aggregation, Iterable) and not isinstance(aggregation, str)
        entries: Any = aggregation if is_list else [aggregation]
        rules = [REGISTRY.find(spelled(entry))() if isinstance(entry, str) else entry for entry in entries]
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UnknownNameError(f"aggregation={rule!r:.200}: must be rules, such as [Median()], or their names")
            known = NEEDS.keys() - (() if isinstance(rule, RobustRule) else {"previous", "base"})
            for need in rule.needs - known:
                raise UnknownNameError.of(f"{type(rule).__name__}.needs", need, known)
            acts = isinstance(rule, Filter | Scale | Mean | RobustRule | MixingRule) or rule.needs & {"steps", "once"}
            if not acts:
                raise RangeError(f"aggregation: {type(rule).__name__} must derive from Filter, Scale or RobustRule")
        if not rules or not isinstance(rules[-1], Combine):
            rules.append(Mean())
        if len({*map(type, rules)}) < len(rules):
            raise RangeError("aggregation: a rule occurs twice; pass each rule once")
        *before, last = rules
        if isinstance(last, PrivateMean) and before:
            raise RangeError(
                f"aggregation: PrivateMean is the only rule of its chain, but {type(before[0]).__name__} is before it; "
                "a rule that compares clients would let one client change how much another one counts"
            )
        for rule in before:
            if isinstance(rule, Combine):
                raise RangeError(f"aggregation: {type(rule).__name__} must be the last rule of the chain")
            if isinstance(rule, MixingRule) and not isinstance(last, RobustRule):
                raise RangeError(f"aggregation: {type(rule).__name__} needs a robust rule at the end, such as Median()")
        return cls(tuple(rules))

    @classmethod
    def of_models(cls, rule: "str | Rule | Sequence[Rule | str] | Chain", *, has_base: bool) -> "Chain":
        """Return the chain that combines models without a server; ``has_base``: whether the model before is known.

        Raises:
            UnknownNameError: the name is unknown.
            RangeError: the chain has a rule that acts on single updates or needs more than the models.
        """
        chain = cls.of(rule)
        if chain.robust is None:
            raise RangeError(f"rule={rule!r}: must be a robust rule, such as 'median'; leave it out for the mean")
        for one in chain.rules[:-1]:
            if not isinstance(one, MixingRule):
                raise RangeError(f"rule: {type(one).__name__} acts on a server's updates; use Server(aggregation=)")
        if "previous" in chain.needs:
            raise RangeError(f"rule: {chain.robust} starts from the round before; use Server(aggregation=)")
        if "base" in chain.needs and not has_base:
            raise RangeError(f"rule: {chain.robust} needs the model before the round; pass it as base to fedcore.merge")
        return chain

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the rules need, out of ``NEEDS``."""
        return frozenset().union(*(rule.needs for rule in self.rules))

    def ratio(self, need: str) -> float | None:
        """Return the least ratio of rules that need "received", "examples" or "steps"; None without such a rule."""
        if need not in self.needs:
            return None
        return min(getattr(rule, "ratio", 1.0) for rule in self.rules if need in rule.needs)

    def window(self, need: str, norms: Mapping[str, Any]) -> ClaimWindow:
        """Return the window of "examples" or "steps" after the last round, with the ratio of their rule."""
        return ClaimWindow(self.ratio(need), norms.get(need))

    @cached_property
    def is_plain(self) -> bool:
        """Whether the chain is the plain mean, in which every valid update counts unchanged."""
        return self == PLAIN

    @cached_property
    def weights(self) -> Weights | None:
        """The weights of the ``Mean``."""
        return last.weights if isinstance(last := self.rules[-1], Mean) else None

    def with_weights(self, weights: Weights | None) -> "Chain":
        """Return the chain with different weights of the ``Mean``, if it has one."""
        *before, last = self.rules
        return Chain((*before, replace(last, weights=weights))) if isinstance(last, Mean) else self

    @cached_property
    def robust(self) -> RobustRule | None:
        """The last rule if it is robust, else None."""
        return rule if isinstance(rule := self.rules[-1], RobustRule) else None

    @cached_property
    def private(self) -> PrivateMean | None:
        """The last rule if it adds noise, else None."""
        return rule if isinstance(rule := self.rules[-1], PrivateMean) else None

    def at(self, ledger: Ledger) -> "Chain":
        """Return the chain for the next round of a private server, and itself for other servers."""
        return self if self.private is None else Chain((self.private.at(ledger),))

    @cached_property
    def _calls(self) -> list[tuple[Rule, str]]:
        """The methods that decide on single updates: those of filters first, then those of scales."""
        kinds = (Filter, "decide"), (Scale, "weights"), (Scale, "examples")
        calls = [(rule, name, kind) for kind, name in kinds for rule in self.rules if isinstance(rule, kind)]
        return [(rule, name) for rule, name, kind in calls if getattr(type(rule), name) is not getattr(kind, name)]

    @cached_property
    def decides(self) -> bool:
        """Whether the rules must see every update; ``CapExamples`` sees those that report unusual numbers."""
        return "medians" in self.needs or any(type(rule) is not CapExamples for rule, _ in self._calls)

    @cached_property
    def mixing(self) -> list[MixingRule]:
        """The rules that replace vectors before the robust rule."""
        return [rule for rule in self.rules if isinstance(rule, MixingRule)]

    def decide(self, group: Group) -> tuple[dict[int, str], F64]:
        """Return the reasons of the rejected updates by index, and the factors; lower the group's examples."""
        reasons, factors = dict[int, str](), np.ones(len(group.clients))
        for rule, name in self._calls:
            found = checked(rule, name, (group,), *RESULTS[name])
            if name == "decide":
                reasons = {**found, **reasons}
            elif name == "weights":
                factors = np.minimum(factors, found)
            else:
                group.examples = found
        return reasons, factors

    def has_enough(self, k: int) -> bool:
        """Whether the robust rule, if any, needs no more than k updates."""
        with suppress(RangeError):
            if self.robust is not None:
                self.require_enough(k)
            return True
        return False

    def require_enough(self, k: int, instead: str = "add updates, or lower f", *, of: str = "") -> None:
        """Raise TooFewUpdatesError if the robust rule needs more than k updates; ``of`` names their group."""
        rule, left = self.robust, k
        for one in self.mixing:
            left = checked(one, "size", (left,), *RESULTS["size"])
        if left < (least := checked(rule, "least", (), *RESULTS["least"])):
            got = f"got {k} updates" if left == k else f"got {left} mixed vectors of {k} updates"
            raise TooFewUpdatesError(f"aggregation: {rule} needs at least {least} updates{of}, {got}; {instead}")

    def combination(self, k: int, products: Callable[[], F64], round: int) -> Combination:
        """Return the robust combination of k updates in a round.

        Args:
            products: returns the updates' inner products, float64[k, k], in the order of the cohort; if the rule
                needs "previous", the last one is its previous result, which is not among the k.

        Raises:
            TooFewUpdatesError: the rule needs more updates.

        Cost: k^2 to k^3 operations, and one call of ``products`` at most.
        """
        self.require_enough(k)
        matrix, products = np.eye(k), cache(products)

        def mixed(matrix: F64) -> F64:
            """Return the inner products of the vectors that the matrix makes."""
            inner = products()[: matrix.shape[1], : matrix.shape[1]]
            return product(product(matrix, inner), matrix.T) if self.mixing else inner

        for one in self.mixing:
            shape, call = (one.size(len(matrix)), len(matrix)), (len(matrix), partial(mixed, matrix), round)
            fits = partial(is_column, dtype=np.float64, shape=shape)
            found = checked(one, "matrix", call, lambda made, *_, fits=fits: fits(made), f"finite float64{list(shape)}")
            matrix = product(found, matrix)
        if "previous" in self.needs:
            updates, matrix = matrix, np.zeros((len(matrix) + 1, k + 1))
            matrix[:-1, :-1], matrix[-1, -1] = updates, 1
        r, vectors = len(matrix), (len(matrix), partial(mixed, matrix))
        must = f"a Combination of {r} vectors, with finite weights, float64[{r}], or a statistic of some of them"
        combination: Combination = checked(self.robust, "combine", vectors, is_combination, must)
        return replace(combination, mixing=matrix) if self.mixing else combination


PLAIN = Chain()
"""The chain of a server without rules: the mean."""

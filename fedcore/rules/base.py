"""The interfaces of aggregation rules, and what a rule sees of a group of updates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from fedcore.algorithms import Claims
from fedcore.arrays import F64
from fedcore.errors import AlgorithmError
from fedcore.store.registry import ClientId
from fedcore.validation import Checked, failed, is_integer, name_of, short_repr

Weights: TypeAlias = Mapping[ClientId, float] | Callable[[Claims], F64]
"""Weights that replace the numbers of examples: by client, or computed from one client's claims."""
Norms: TypeAlias = Mapping[str, Sequence[float]]
"""Norms of the updates' parts: "parameters", "buffers" and "controls" (the second vector)."""


@dataclass(slots=True)
class Group:
    """Measured updates on which the rules decide together, in the order of ``add``; before a robust rule, of the ids.

    Usually a group is one update. If a rule needs "medians", the first updates wait for a group of 8 or for the end of
    the round.

    Attributes:
        clients: the updates' clients.
        steps: float64[k], the reported local steps.
        examples: float64[k], the counted examples: after the ``examples`` of the rules before.
        norms: the float32 norm of each update, by part: "parameters", and "buffers" and "controls" if there are any.
            |x - y| where the server averages models, else that of the mean gradient. If a rule needs "medians",
            "parameters" is the norm without the offset that the server sent.
        medians: the median norm of the last 1,000 accepted updates, by part, or None; until 8 were accepted, the
            group's norms are included. Empty unless a rule of the chain needs "medians".
        usual_examples: the median number of examples of the last 1,000 accepted updates; infinite if no rule of the
            chain needs "examples", or no number is far from the median.
    """

    clients: Sequence[ClientId]
    steps: F64
    examples: F64
    norms: Norms
    medians: Mapping[str, float | None]
    usual_examples: float

    def chosen(self, which: Sequence[int]) -> "Group":
        """Return the group of some of the updates."""
        norms = {name: [column[i] for i in which] for name, column in self.norms.items()}
        clients = [self.clients[i] for i in which]
        return Group(clients, self.steps[which], self.examples[which], norms, self.medians, self.usual_examples)


class Rule(Checked):
    """A rule of a chain. A subclass is a frozen dataclass; its fields are options that a server's folder stores.

    Attributes:
        needs: what the server must measure or keep for the rule, out of ``fedcore.rules.base.NEEDS``: "norms",
            "medians", "received", "examples", "steps", "once", "previous", "base".
    """

    needs: ClassVar[AbstractSet[str]] = frozenset()
    _converts = True


NEEDS = {
    "norms": "the norms of the updates, which every Filter and Scale gets",
    "medians": "the median norms of earlier updates; the first 8 updates are then decided as a group",
    "received": "norms of rejected updates too, which the medians follow if they are the majority",
    "examples": "the median number of examples of earlier updates",
    "steps": "the median number of steps of earlier updates, to cap steps in gamma",
    "once": "one update of each client in a buffer",
    "previous": "the result of the last round, or zero, as the last vector of ``combine``",
    "base": "the model before the round, from which the updates are differences",
}
"""What a rule can need."""


class Filter(Rule, ABC):
    """A rule that rejects single updates, by their norms and numbers."""

    needs = frozenset({"norms"})

    @abstractmethod
    def decide(self, group: Group) -> Mapping[int, str]:
        """Return the reason for each update to reject, by its index; the other updates are accepted."""


class Scale(Rule):
    """A rule that lowers the effect of single updates: implement ``weights``, ``examples``, or both."""

    needs = frozenset({"norms"})

    def weights(self, group: Group) -> F64:
        """Return the factor of each update, float64[k] in [0, 1]; of several rules the least counts. Default: 1."""
        return np.ones(len(group.clients))

    def examples(self, group: Group) -> F64:
        """Return the examples with which each update counts, float64[k]. Default: unchanged.

        They have an effect where the method weights by examples and the caller gave no weight.
        """
        return group.examples


class Combine(Rule):
    """The last rule of a chain: it makes one vector of the accepted updates."""


def checked(rule: object, name: str, arguments: tuple[Any, ...], fits: Callable[..., bool], must: str) -> Any:
    """Return what a method or a property of a rule or algorithm returns; raise AlgorithmError if a user's fails in it.

    ``fits`` gets the result and the arguments.
    """
    try:
        found = getattr(rule, name)
        found = found(*arguments) if arguments else found
    except Exception as error:
        failed(rule, name, error)
    if not type(rule).__module__.startswith("fedcore.rules.") and not fits(found, *arguments):
        raise AlgorithmError(f"{name_of(rule)}: {name} must return {must}, got {short_repr(found)}")
    return found


def is_column(column: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether an object is an array of finite numbers of this dtype and shape."""
    is_array = isinstance(column, np.ndarray) and column.dtype == dtype and column.shape == shape
    return is_array and bool(np.isfinite(column).all())


def are_in(column: Any, group: Group, most: float = math.inf) -> bool:
    """Whether an object is float64[k] of finite numbers in 0..most."""
    return is_column(column, np.float64, (len(group.clients),)) and bool(((column >= 0) & (column <= most)).all())


def are_reasons(reasons: Any, group: Group) -> bool:
    """Whether an object maps indexes of a group's updates to texts."""
    are_texts = isinstance(reasons, Mapping) and all(isinstance(reason, str) for reason in reasons.values())
    return are_texts and all(is_integer(i, 0, len(group.clients) - 1) for i in reasons)


RESULTS: dict[str, tuple[Callable[..., bool], str]] = {
    "decide": (are_reasons, "reasons by index of an update"),
    "weights": (partial(are_in, most=1.0), "a float64 in [0, 1] for each update"),
    "examples": (are_in, "a float64 in [0, inf) for each update"),
    **dict.fromkeys(("size", "least"), (lambda found, *_: is_integer(found, 0), "an integer >= 0")),
    "moves": (lambda found, *_: isinstance(found, bool | np.bool_), "True or False"),
}
"""What the methods of a rule, and ``Algorithm.moves``, must return."""

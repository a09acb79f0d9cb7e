"""The instructions to one client for one round: one value, for every message and every loop."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from fedcore.algorithms import MEAN_GRADIENT, is_made_here
from fedcore.arguments import is_real, is_whole
from fedcore.arrays import F32
from fedcore.errors import ArrayError, ConfigError, RangeError
from fedcore.representation import Represented
from fedcore.simulation.local_rules import LocalRule, Sgd, read, written

VECTORS = ("offset", "x_prev")
"""Fields that travel beside the numbers, each if it is not None."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Instructions(Represented):
    """K steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)), from the model x that comes with it.

    Attributes:
        round: the server's number of the round.
        lr: eta, the rate of the steps; of the first one, if they differ.
        lr_of_step: the rate of step k, counted from 0, if they differ (``rates.InverseStep``), else None. A message
            cannot carry it: ``numbers`` refuses it.
        a, b, mu: the coefficients above.
        second_vector: to send back as ``control``, or None: "mean gradient", the mean gradient at the y's before
            any correction; "change of the row", if the client keeps it; or the vector of a user's method.
        local_rule: the use of the minibatches: ``Sgd()`` for a step along each, ``FullGradient()`` for steps along
            the gradient over all examples, ``OneMinibatch()`` for one step along all that they hold, or a user's
            rule. A message carries its name and, as JSON, its options.
        keeps_row: whether the client keeps its own row, whose part is then not in the offset.
        plain: whether the steps must be plain, without local momentum or clipping, since the server derives the
            client's mean gradient from its model.
        offset: float32[n_parameters], or None for zero.
        x_prev: float32[n], the model of the round before; None if ``b`` is 0.

    Two are equal if all fields are; they can be pickled.
    """

    round: int
    lr: float
    lr_of_step: Callable[[int], float] | None = None
    a: float = 1.0
    b: float = 0.0
    mu: float = 0.0
    second_vector: str | None = None
    local_rule: LocalRule = field(default_factory=Sgd)
    keeps_row: bool = False
    plain: bool = False
    offset: F32 | None = None
    x_prev: F32 | None = None

    @property
    def second(self) -> bool:
        """Whether a second vector goes back, as ``control``."""
        return self.second_vector is not None

    def numbers(self) -> dict[str, Any]:
        """The fields that are no vectors, by name, as any message can carry them: "" stands for None.

        Raises:
            RangeError: the rate differs between the steps.
            ConfigError: JSON cannot hold an option of the local rule.
        """
        if self.lr_of_step is not None:
            raise RangeError(
                "lr: expected one rate for all steps of a round, as a message tells clients, got a rate of each step"
            )
        numbers = {name: getattr(self, name) for name in NUMBERS if name not in BESIDE_FIELDS}
        numbers |= written(self.local_rule)
        return numbers | {"second_vector": self.second_vector or "", "vectors": " ".join(self.vectors())}

    def vectors(self) -> dict[str, F32]:
        """The fields that are vectors and not None."""
        return {name: vector for name in VECTORS if (vector := getattr(self, name)) is not None}

    @classmethod
    def read(cls, numbers: Mapping[str, Any], vectors: Mapping[str, Any], **more: Any) -> Self:
        """The instructions whose ``numbers`` and ``vectors`` these are: each field, and no other.

        Args:
            more: further fields of a subclass.

        Raises:
            ConfigError: a field or vector is missing or unknown, as between two versions of fedcore.
            ArrayError: ``x_prev`` is missing, and ``b`` is not 0.
            UnknownNameError: the local rule, or an option of it, is unknown here.
        """
        missing = [name for name in NUMBERS if name not in numbers]
        unknown = [name for name in numbers if name not in NUMBERS]
        unknown += [name for name in vectors if name not in VECTORS]
        if missing or unknown:
            raise ConfigError(
                f"order: expected the fields {', '.join([*NUMBERS, *VECTORS])}, got one without {missing} and with "
                f"{unknown}: the server's fedcore and the client's must be of one version"
            )
        for name, value in numbers.items():
            fits, due = DUE[name]
            if not fits(value):
                raise ConfigError(f"{name}: expected {due}, got {value!r:.100}: the server and the client must agree")
        if numbers["b"] and vectors.get("x_prev") is None:
            raise ArrayError(f"x_prev: expected the model of the round before, since b is {numbers['b']}, got none")
        came = [name for name in VECTORS if vectors.get(name) is not None]
        if came != str(numbers["vectors"]).split():
            raise ConfigError(f"order: expected the vectors {str(numbers['vectors']).split()}, got {came}")
        told: dict[str, Any] = {name: numbers[name] for name in NUMBERS if name not in BESIDE_FIELDS}
        told |= {name: vectors.get(name) for name in VECTORS}
        told["local_rule"] = read(numbers["local_rule"], numbers["rule_options"])
        return cls(**{**told, "second_vector": numbers["second_vector"] or None, **more})

    def require_followed(self, *, plain: bool) -> None:
        """Refuse, at the client, instructions that ``fedcore.simulation.sgd`` would not follow.

        Args:
            plain: whether the client's steps are: without local momentum and clipping.

        Raises:
            RangeError: the client is to keep its own row, or to send an unknown vector, or its options falsify the
                gradient that the server derives from its model.
        """
        if self.keeps_row:
            raise RangeError(
                "keeps_row: expected false, got an order to keep one's own row, which is left to a loop of one's own"
            )
        if not is_made_here(self.second_vector):
            raise RangeError(
                f"second_vector: expected {MEAN_GRADIENT!r}, got an order to send back {self.second_vector!r}, which"
                " is left to a loop of one's own"
            )
        if self.plain and not plain:
            raise RangeError(
                "options: expected no momentum and no clip, since the server derives gradients from plain steps, got"
                " one: leave it out, or take SCAFFOLD or SCAFFOLDM with control='sent'"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Instructions):
            return NotImplemented
        names = [field.name for field in fields(Instructions)]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


BESIDE_FIELDS = ("rule_options", "vectors")
"""Fields only of a message: the local rule's options, and the names of the vectors that come with it."""
NUMBERS = (
    *(field.name for field in fields(Instructions) if field.name not in (*VECTORS, "lr_of_step")),
    *BESIDE_FIELDS,
)
"""Fields that every message carries."""
_NUMBER = (lambda value: is_real(value) and math.isfinite(value), "a finite number")
_TRUTH = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str), "a text")
DUE: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(NUMBERS, _TEXT),
    **dict.fromkeys(("lr", "a", "b", "mu"), _NUMBER),
    **dict.fromkeys(("keeps_row", "plain"), _TRUTH),
    "round": (lambda value: is_whole(value, -1), "an integer"),
}
"""The kinds of those fields, and the words for them."""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is not None and other is not None and np.array_equal(one, other)
    return bool(one == other)

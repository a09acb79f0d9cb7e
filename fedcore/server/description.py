"""Algorithms, rates and optimisers as JSON holds them: a name, and the arguments that make it."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from inspect import isroutine, signature
from typing import Any

import numpy as np

from fedcore import algorithms
from fedcore.algorithms import optimizers, rates
from fedcore.algorithms.rates import rate_at
from fedcore.errors import CheckpointError, RangeError

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "algorithm": algorithms.REGISTRY,
    "optimizer": optimizers.REGISTRY,
    "lr": rates.REGISTRY,
    "server_lr": rates.REGISTRY,
}


def describe(what: str, value: Any) -> dict[str, Any] | None:
    """The description of ``Server``'s argument ``what``; ``{"name": None}`` for what is not fedcore's own.

    Of an object of the caller's own class it has the class and the options, as far as they are attributes that JSON can
    hold; of a function nothing, but what ``repr`` says.
    """
    if value is None:
        return None
    name = type(value).__name__
    if REGISTRIES[what].get(name) is type(value):
        # As JSON gives it back, so that what is given can be compared with what was saved.
        options = {option: getattr(value, option) for option in signature(type(value)).parameters}
        return {"name": name, "options": {o: list(v) if isinstance(v, tuple) else v for o, v in options.items()}}
    own: dict[str, Any] = {"name": None, "was": repr(value)[:200]}
    if isroutine(value) or isinstance(value, partial):
        return own
    # Not the module: that of a program is called otherwise in another process.
    return own | {"class": type(value).__qualname__, "options": _options(value)}


def revive(what: str, description: Mapping[str, Any] | None, given: Any) -> Any:
    """What was described, or what is given in its place.

    Raises:
        CheckpointError: it was no name of fedcore's, and nothing is given; or something else is given than was saved.
        LookupError, TypeError, ValueError: it is the description of nothing.
    """
    if description is None:
        if given is not None:
            raise CheckpointError(f"{what}: expected nothing, since the server was saved without one, got {given!r}")
        return None
    if description["name"] is None:
        if given is None:
            raise CheckpointError(f"{what}: it was made of the caller's own code ({description['was']}): give it again")
        _compare_own(what, description, describe(what, given) or {})
        return given
    make, options = REGISTRIES[what][description["name"]], description["options"]
    for option, parameter in signature(make).parameters.items():
        if isinstance(parameter.default, bool) and type(options.get(option, False)) is not bool:
            raise RangeError(f"{what}: expected {option} to be true or false, got {options[option]!r}")
    revived = make(**options)
    if given is not None and describe(what, given) != description:
        raise CheckpointError(f"{what}: expected {description}, as it was saved, or nothing, got {given!r}")
    return revived


def next_rate(what: str, rate: Any, round: int) -> float | None:
    """What a rate of the caller's own code is in the round to come, by which it is known again; else None."""
    if rate is None or REGISTRIES[what].get(type(rate).__name__) is type(rate):
        return None
    try:
        value = float(rate(round))
    except Exception:  # it may have come to its end
        return None
    return value if math.isfinite(value) else None


def check_rate(what: str, rate: Any, saved: float | None, round: int) -> None:
    """Refuse a rate that is another one in the round to come than the rate that was saved.

    Args:
        saved: what ``next_rate`` said; None says nothing.

    Raises:
        CheckpointError: it is.
    """
    if saved is None or rate is None:
        return
    given = rate_at(rate, round)
    if given != saved:
        raise CheckpointError(f"{what}: expected {saved:g} in round {round}, as it was saved, got {given:g}")


def _compare_own(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse another class, or other options of it, than was saved; a function tells neither."""
    if "class" not in saved:  # a function, or a folder of before this was looked at
        return
    class_given = given.get("class") or given["name"] or "a function"
    if class_given != saved["class"]:
        raise CheckpointError(f"{what}: expected {saved['class']}, as it was saved, got {class_given}")
    for option, value in saved["options"].items():
        if option in given["options"] and given["options"][option] != value:
            raise CheckpointError(
                f"{what}: expected {option}={value!r} of {saved['class']}, as it was saved, got "
                f"{given['options'][option]!r}"
            )


def _options(value: Any) -> dict[str, Any]:
    """The options of an object, by the names of its class's arguments, that are attributes JSON can hold."""
    try:
        names = list(signature(type(value)).parameters)
    except (TypeError, ValueError):  # a class that tells no arguments
        return {}
    options = {}
    for name in names:
        with suppress(AttributeError, TypeError, ValueError):
            # As JSON gives it back.
            options[name] = json.loads(json.dumps(getattr(value, name), default=_number))
    return options


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError

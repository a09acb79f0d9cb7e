"""Algorithms, rates and optimisers as JSON holds them: a name, and the arguments that make it."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, isroutine, signature
from typing import Any

import numpy as np

from fedcore import algorithms, optimizers, rates
from fedcore.errors import CheckpointError, RangeError, UnknownNameError
from fedcore.rates import rate_at
from fedcore.registries import Registry

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": algorithms.REGISTRY,
    "optimizer": optimizers.REGISTRY,
    "lr": rates.REGISTRY,
    "server_lr": rates.REGISTRY,
}


BY_MODULE = ("algorithm",)
"""What is found by ``module:Name`` again, since there is a class that it must be one of. A rate is anything that can be
called, and a folder may be anybody's: it does not say what is called with what."""


def describe(what: str, value: Any) -> dict[str, Any] | None:
    """The description of ``Server``'s argument ``what``; ``{"name": None}`` for what has no name to be found by.

    An object of a class that is not fedcore's own is described by ``module:Name`` where that can be imported and its
    options are attributes of their names that JSON can hold; and in any case by its class and such options as are. Of a
    function there is nothing but what ``repr`` says.
    """
    if value is None:
        return None
    name = REGISTRIES[what].name_of(type(value))
    if name in REGISTRIES[what].own:
        # As JSON gives it back, so that what is given can be compared with what was saved.
        options = {option: getattr(value, option) for option in signature(type(value)).parameters}
        return {"name": name, "options": {o: _plain(v) for o, v in options.items()}}
    own: dict[str, Any] = {"name": None, "was": repr(value)[:200]}
    if isroutine(value) or isinstance(value, partial):
        return own
    options, whole = _options(value)
    whole = whole and name is not None and (what in BY_MODULE or ":" not in name)
    # The module is no part of the comparison: that of a program is called otherwise in another process.
    return own | {"name": name if whole else None, "class": type(value).__qualname__, "options": options}


def _plain(value: Any) -> Any:
    """An option as JSON gives it back."""
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def revive(what: str, description: Mapping[str, Any] | None, given: Any) -> Any:
    """The object that was described, or the one given in its place.

    Raises:
        CheckpointError: it cannot be found by name, or its module is not imported, and nothing is given; or something
            else is given than was saved.
        LookupError, TypeError, ValueError: it is the description of nothing.
    """
    if description is None:
        if given is not None:
            raise CheckpointError(f"{what}: expected nothing, since the server was saved without one, got {given!r}")
        return None
    name, registry = description["name"], REGISTRIES[what]
    if name is not None and ":" in name and what not in BY_MODULE:
        name = None
    if name is None and given is None:
        raise CheckpointError(f"{what}: it was made of the caller's own code ({description['was']}): give it again")
    if name is None or "class" in description:
        if given is not None:
            _compare_own(what, description, describe(what, given) or {})
            return given
        try:
            return registry.find(name, imports=False)(**description["options"])
        except UnknownNameError as error:
            raise CheckpointError(f"{error} ({what}=)") from None
    make = registry[name]
    options = {o: v for o, v in getattr(make, "before", {}).items() if o in signature(make).parameters}
    options |= description["options"]
    for option, parameter in signature(make).parameters.items():
        if isinstance(parameter.default, bool) and option in options and type(options[option]) is not bool:
            raise RangeError(f"{what}: expected {option} to be true or false, got {options[option]!r}")
    revived = make(**options)
    if given is not None and describe(what, given) != describe(what, revived):
        raise CheckpointError(f"{what}: expected {description}, as it was saved, or nothing, got {given!r}")
    return revived


def next_rate(what: str, rate: Any, round: int) -> float | None:
    """The value of a rate of the caller's own code in the round to come, by which it is known again; else None."""
    if rate is None or REGISTRIES[what].name_of(type(rate)) in REGISTRIES[what].own:
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


def is_same_rate(what: str, description: Mapping[str, Any] | None, given: Any, saved: float | None, round: int) -> bool:
    """Tell whether a rate that is given is the one that was saved, as far as that can be told.

    Args:
        saved, round: as for ``check_rate``.
    """
    is_own = description is not None and description["name"] in REGISTRIES[what].own
    if not is_own and (describe(what, given) or {})["name"] in REGISTRIES[what].own:
        return False  # a rate of fedcore's, in the place of code of the caller's own, or of none
    try:
        revive(what, description, given)
        check_rate(what, given, saved, round)
    except CheckpointError:
        return False
    return True


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


def _options(value: Any) -> tuple[dict[str, Any], bool]:
    """An object's options, by the names of its class's arguments, that are attributes JSON can hold; and if all are."""
    try:
        parameters = signature(type(value)).parameters.values()
    except (TypeError, ValueError):  # a class that tells no arguments
        return {}, False
    options = {}
    for parameter in parameters:
        with suppress(AttributeError, TypeError, ValueError):
            # As JSON gives it back.
            options[parameter.name] = json.loads(json.dumps(getattr(value, parameter.name), default=_number))
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return options, all(parameter.name in options and parameter.kind in by_name for parameter in parameters)


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError

"""Algorithms, rates and optimisers as JSON holds them: a name, and the arguments that make it."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from fedcore import algorithms
from fedcore.algorithms import optimizers, rates
from fedcore.errors import CheckpointError

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "algorithm": algorithms.REGISTRY,
    "optimizer": optimizers.REGISTRY,
    "lr": rates.REGISTRY,
    "server_lr": rates.REGISTRY,
}


def describe(what: str, value: Any) -> dict[str, Any] | None:
    """The description of ``Server``'s argument ``what``; ``{"name": None}`` for what is not fedcore's own."""
    if value is None:
        return None
    name = type(value).__name__
    if REGISTRIES[what].get(name) is not type(value):
        return {"name": None, "was": repr(value)[:200]}
    options = {option: getattr(value, option) for option in signature(type(value)).parameters}
    # As JSON gives it back, so that what is given can be compared with what was saved.
    return {"name": name, "options": {o: list(v) if isinstance(v, tuple) else v for o, v in options.items()}}


def revive(what: str, description: Mapping[str, Any] | None, given: Any) -> Any:
    """What was described, or what is given in its place.

    Raises:
        CheckpointError: it was no name of fedcore's, and nothing is given; or it was, and something else is given.
    """
    if description is None:
        return given
    if description["name"] is None:
        if given is None:
            raise CheckpointError(f"{what}: it was made of the caller's own code ({description['was']}): give it again")
        return given
    revived = REGISTRIES[what][description["name"]](**description["options"])
    if given is not None and describe(what, given) != description:
        raise CheckpointError(f"{what}: expected {description}, as it was saved, or nothing, got {given!r}")
    return revived

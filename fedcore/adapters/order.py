"""What a method orders its clients to do, as a message carries it, and what a framework's clients cannot be told."""

from collections.abc import Mapping
from typing import Any, get_args

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, Placement, named
from fedcore.algorithms.rates import Rate
from fedcore.errors import ConfigError, RangeError
from fedcore.server import Broadcast, Server
from fedcore.server.limits import is_integer

FIELDS = ("round", "lr", "a", "b", "mu", "second_vector", "local_rule", "placement", "plain")
"""The fields of a Broadcast that are no vectors, in every message that orders a client's steps."""


def fields_of(sent: Broadcast) -> dict[str, Any]:
    """The fields of an order, by name ("" for None, which not every wire has); offset and x_prev travel beside them."""
    return {name: getattr(sent, name) for name in FIELDS} | {"second_vector": sent.second_vector or ""}


def read_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a client was sent: those of ``FIELDS``, each of them and no other.

    Raises:
        ConfigError: one is missing or unknown, as between two versions of fedcore; or nobody knows such a placement.
    """
    missing = [name for name in FIELDS if name not in found]
    unknown = [name for name in found if name not in FIELDS]
    if missing or unknown:
        raise ConfigError(
            f"order: expected the fields {', '.join(FIELDS)}, got one without {missing} and with {unknown}:"
            " the server's fedcore and the client's must be of one version"
        )
    if found["placement"] not in get_args(Placement):
        raise ConfigError(f"placement: expected one of {get_args(Placement)}, got {found['placement']!r}")
    return {name: found[name] for name in FIELDS} | {"second_vector": found["second_vector"] or None}


def require_followed(fields: Mapping[str, Any], *, plain: bool) -> None:
    """Refuse, at the client, an order that ``fedcore.local`` would not follow.

    Args:
        fields: those of the order, "placement", "second_vector" and "plain" among them.
        plain: whether the client's steps are: without local momentum and clipping.

    Raises:
        RangeError: the client is to keep its own row, or its options falsify what the server derives from its model.
    """
    if fields["placement"] == "client":
        raise RangeError(
            "placement: expected 'server', got an order to keep one's own row, which is left to a loop of one's own"
        )
    if fields["second_vector"] not in (None, MEAN_GRADIENT):
        raise RangeError(
            f"second_vector: expected {MEAN_GRADIENT!r}, got an order to send back {fields['second_vector']!r}, which"
            " is left to a loop of one's own"
        )
    if fields["plain"] and not plain:
        raise RangeError(
            "options: expected no momentum and no clip, since the server derives gradients from plain steps"
            " (SCAFFOLD and SCAFFOLDM do not with control='sent')"
        )


def beyond_plain_steps(algorithm: Algorithm) -> str | None:
    """What a method's clients do beside steps y -= lr grad(y) from the model that they are sent; None for nothing."""
    if algorithm.placement == "client":
        return "whose clients keep their own rows"
    if algorithm.local_rule != "sgd":
        return f"whose clients follow the local rule {algorithm.local_rule!r}"
    if algorithm.second:
        return "whose clients send a second vector"
    if algorithm.direction == Direction(mu=algorithm.direction.mu) != Direction():
        return (
            "whose clients add a proximal term (FedAvg is the same server, and the term then the clients' own affair)"
        )
    return None if algorithm.direction == Direction() else "whose clients step along more than their gradient"


def with_plain_steps(algorithm: Algorithm | str, lr: float | Rate | None) -> Algorithm:
    """The algorithm, if its clients need nothing but the model: their steps are y -= lr grad(y).

    Raises:
        RangeError: its clients do more, of which nobody would tell them; or ``lr`` differs between a round's steps.
    """
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if more := beyond_plain_steps(method):
        raise RangeError(f"algorithm: expected one of plain local steps, got {type(method).__name__}, {more}")
    require_rate_of_rounds(lr)
    return method


def require_rate_of_rounds(lr: float | Rate | None) -> None:
    """Refuse a rate that differs between the steps of a round: a message carries one.

    Raises:
        RangeError: it does.
    """
    if hasattr(lr, "of_step"):
        raise RangeError(
            f"lr: expected one rate for all steps of a round, which is what clients are told, got {lr!r};"
            " lambda round: rate(round) is that of each round's first step"
        )


def steps_of(said: object, metrics: Mapping[str, Any], told: int | str | None, server: Server, *, by: str) -> Any:
    """K of a reply: what it says in fedcore's own words, else what its server was told, else 1 where K does not matter.

    Args:
        said: its number of steps; None if it says none.
        metrics: what else it says, by name.
        told: K of all replies that do not say it, or the metric that holds it.
        by: how a client of fedcore's says it.

    Returns:
        What stands there, which nobody has checked.

    Raises:
        RangeError: nobody says it.
    """
    if said is not None:
        return said
    due = "steps: expected the number of local steps, got a reply that does not say it"
    algorithm = server.algorithm
    if more := beyond_plain_steps(algorithm):  # whoever does not know fedcore's words has not followed the order
        raise RangeError(f"{due}: {type(algorithm).__name__} is a method {more}, and they {by}")
    if isinstance(told, str):
        value = metrics.get(told)
        if value is None:
            raise RangeError(f"{due}: no metric {told[:40]!r}")
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if told is not None:
        return told
    if server.averages_models and not algorithm.needs_shares:  # FlexibleFedAvg weighs by the steps
        return 1
    other = ', or take units="update"' if hasattr(algorithm, "units") else ""
    raise RangeError(f"{due}: {by}, or tell the strategy steps= (a number, or a metric's name){other}")


def require_steps(steps: int | str | None, algorithm: Algorithm) -> None:
    """Refuse a ``steps=`` that is no number and no name, or that a method cannot have.

    Raises:
        RangeError: it is neither; or clients that do not know fedcore's words would not follow the method's order.
    """
    if steps is None:
        return
    if not (is_integer(steps, 1, 2**53) or (isinstance(steps, str) and steps)):
        raise RangeError(f"steps: expected an integer >= 1, or a metric's name, got {steps!r}")
    if more := beyond_plain_steps(algorithm):
        raise RangeError(f"steps: expected None, since {type(algorithm).__name__} is a method {more}, got {steps!r}")

"""The limits of a framework's orders to clients, and the numbers of steps that replies say."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm, Direction, named
from fedcore.arguments import due_whole, integral, is_whole
from fedcore.errors import ArrayError, RangeError
from fedcore.local_rules import name_of
from fedcore.rates import Rate
from fedcore.server import Server


def beyond_plain_steps(algorithm: Algorithm) -> str | None:
    """The work of a method's clients beside steps y -= lr grad(y) from the model that they get; None for nothing."""
    if algorithm.rows_at_clients:
        return "whose clients keep their own rows"
    if algorithm.looks_ahead:
        return "whose clients start ahead of the model"
    if not algorithm.local_rule.ordinary:
        return f"whose clients follow the local rule {name_of(algorithm.local_rule)!r}"
    if algorithm.second_vector is not None:
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


def require_own_model(own: Sequence[npt.NDArray[Any]], given: Sequence[npt.NDArray[Any]]) -> None:
    """See that the model that a framework hands back to be sent is the server's.

    Raises:
        ArrayError: it is another one, which the server would not send and not step from: its noise would be lost.
    """
    if len(own) != len(given) or not all(map(np.array_equal, own, given)):
        raise ArrayError(
            "model: expected the one that the last round returned, got another: a wrapper changed it, such as one of "
            "differential privacy that adds noise, and clients are sent the server's own model, without that change: "
            "let clients add the noise"
        )


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
        return integral(value)
    if told is not None:
        return told
    if server.averages_models and not algorithm.needs_shares:  # FlexibleFedAvg weighs by the steps
        return 1
    other = f", or take {option}" if (option := algorithm.averaging_option) else ""
    raise RangeError(f"{due}: {by}, or tell the strategy steps= (a number, or a metric's name){other}")


def require_steps(steps: int | str | None, algorithm: Algorithm) -> None:
    """Refuse a ``steps=`` that is no number and no name, or that a method cannot have.

    Raises:
        RangeError: it is neither; or clients that do not know fedcore's words would not follow the method's order.
    """
    if steps is None:
        return
    if not (is_whole(steps, 1, 2**53) or (isinstance(steps, str) and steps)):
        raise RangeError(f"steps: expected {due_whole(1, 2**53)}, or a metric's name, got {steps!r}")
    if more := beyond_plain_steps(algorithm):
        raise RangeError(f"steps: expected None, since {type(algorithm).__name__} is a method {more}, got {steps!r}")

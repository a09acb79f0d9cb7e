"""Who takes part in which round: one pattern, one file, one row of ``REGISTRY``."""

from typing import Any

from fedcore.errors import UnknownNameError
from fedcore.participation.bernoulli import Bernoulli
from fedcore.participation.pattern import Participation
from fedcore.participation.round_robin import RoundRobin
from fedcore.participation.time_varying import TimeVarying

__all__ = ["REGISTRY", "Bernoulli", "Participation", "RoundRobin", "TimeVarying", "named"]

REGISTRY: dict[str, type[Participation]] = {
    "Bernoulli": Bernoulli,
    "RoundRobin": RoundRobin,
    "TimeVarying": TimeVarying,
}


def named(name: str, clients: int, **options: Any) -> Participation:
    """The pattern of that name, made with ``options``.

    Args:
        name: a key of ``REGISTRY``.
        clients: N.
        options: the pattern's own arguments, with ``seed`` and ``first_round``.

    Raises:
        UnknownNameError: there is no such pattern.
        RangeError: an argument is outside its range.

    >>> named("Bernoulli", 3, p=0.0).active(0)
    array([], dtype=int64)
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("participation", name, REGISTRY)
    return REGISTRY[name](clients, **options)

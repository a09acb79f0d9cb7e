"""Patterns of who takes part in which round, and of how much each does: one pattern, one file, one ``REGISTRY`` row."""

from collections.abc import Mapping
from inspect import isabstract, isclass
from typing import Any

from fedcore.errors import RangeError
from fedcore.participation.active import Active
from fedcore.participation.always import Always
from fedcore.participation.at_least import AtLeast
from fedcore.participation.bernoulli import Bernoulli
from fedcore.participation.over_selection import OverSelection
from fedcore.participation.pattern import Participation
from fedcore.participation.round_robin import RoundRobin
from fedcore.participation.schedule import Schedule
from fedcore.participation.time_varying import TimeVarying
from fedcore.participation.trace import Trace
from fedcore.participation.traces import Generated, Recorded, read_traces
from fedcore.participation.uniform import Uniform
from fedcore.participation.weighted import Weighted
from fedcore.registries import Registry

__all__ = [
    "REGISTRY",
    "Active",
    "Always",
    "AtLeast",
    "Bernoulli",
    "Generated",
    "OverSelection",
    "Participation",
    "Recorded",
    "RoundRobin",
    "Schedule",
    "TimeVarying",
    "Trace",
    "Uniform",
    "Weighted",
    "named",
    "read_traces",
]

_ROWS: dict[str, type[Participation]] = {
    "Always": Always,
    "AtLeast": AtLeast,
    "Bernoulli": Bernoulli,
    "OverSelection": OverSelection,
    "RoundRobin": RoundRobin,
    "Schedule": Schedule,
    "TimeVarying": TimeVarying,
    "Trace": Trace,
    "Uniform": Uniform,
    "Weighted": Weighted,
}
REGISTRY: Registry[type[Participation]] = Registry(
    "participation",
    _ROWS,
    due="a subclass of fedcore.participation.Participation that has a _choose",
    fits=lambda row: isclass(row) and issubclass(row, Participation) and not isabstract(row),
    group="fedcore.participation",
)
"""The patterns by name."""


def named(name: str, clients: int, **options: Any) -> Participation:
    """The pattern of that name, made with ``options``.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own.
        clients: N.
        options: the pattern's own arguments, with ``seed`` and ``first_round``. ``among`` may be a pattern, its name,
            or a mapping of its name and options; one that is made here gets the same seed and ``first_round``.

    Raises:
        UnknownNameError: there is no such pattern.
        RangeError, ...: an argument is not what the pattern takes.

    >>> named("Bernoulli", 3, p=0.0).active(0).clients
    array([], dtype=int64)
    >>> both = named("Uniform", 9, k=2, among={"name": "Schedule", "arrivals": {8: 5}})
    >>> both.active(3).clients
    array([0, 5])
    """
    pattern = REGISTRY.find(name)
    among = options.pop("among", None)
    if isinstance(among, str):
        among = {"name": among}
    if isinstance(among, Mapping):
        if "name" not in among:
            raise RangeError(f"among: expected the name of a pattern and its options, got {dict(among)!r}")
        given = {key: options[key] for key in ("seed", "first_round") if key in options}
        among = named(**{"clients": clients, **given, **among})
    return pattern(clients, **options, **({} if among is None else {"among": among}))

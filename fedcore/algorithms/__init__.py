"""The server algorithms, one file each; a new one is a file and a row in REGISTRY, or a class of one's own."""

from inspect import isclass, signature
from typing import Any

from fedcore.algorithms.averaging import FedAvg, FedExP, FedNova, FedProx, FlexibleFedAvg, LocalDescent
from fedcore.algorithms.base import (
    MEAN_GRADIENT,
    ROW_CHANGE,
    Algorithm,
    Claims,
    Cohort,
    Direction,
    Placement,
    Step,
    check_step,
    check_table,
    check_weights,
    is_made_here,
)
from fedcore.algorithms.controls import SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR, FedDyn
from fedcore.algorithms.memory import MIFA, FedStale, FedVARP, MimiC
from fedcore.algorithms.momentum import MBSTORM, FedAvgM, FedAvgMVR
from fedcore.errors import UnknownNameError
from fedcore.kernels import Linear, Terms
from fedcore.registries import Registry

_ROWS: dict[str, type[Algorithm]] = {
    "FedAvg": FedAvg,
    "FedAvgM": FedAvgM,
    "FedAvgMVR": FedAvgMVR,
    "FedDyn": FedDyn,
    "FedExP": FedExP,
    "FedNova": FedNova,
    "FedStale": FedStale,
    "FedVARP": FedVARP,
    "FedProx": FedProx,
    "FlexibleFedAvg": FlexibleFedAvg,
    "LocalDescent": LocalDescent,
    "MBSTORM": MBSTORM,
    "MIFA": MIFA,
    "MimiC": MimiC,
    "SCAFFOLD": SCAFFOLD,
    "SCAFFOLDM": SCAFFOLDM,
    "SCAFFOLDMVR": SCAFFOLDMVR,
}
REGISTRY: Registry[type[Algorithm]] = Registry(
    "algorithm",
    _ROWS,
    due="a subclass of fedcore.algorithms.Algorithm",
    fits=lambda row: isclass(row) and issubclass(row, Algorithm) and row is not Algorithm,
    group="fedcore.algorithms",
)
"""The methods by name."""


def named(name: str, **options: Any) -> Algorithm:
    """The algorithm of that name: one of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own.

    Raises:
        UnknownNameError: there is none, or it has no such option.
    """
    method = REGISTRY.find(name)
    known = signature(method).parameters
    for option in options:
        if option not in known:
            raise UnknownNameError.of(f"option of {name}", option, known)
    return method(**options)


__all__ = [
    "MBSTORM",
    "MEAN_GRADIENT",
    "MIFA",
    "REGISTRY",
    "ROW_CHANGE",
    "SCAFFOLD",
    "SCAFFOLDM",
    "SCAFFOLDMVR",
    "Algorithm",
    "Claims",
    "Cohort",
    "Direction",
    "FedAvg",
    "FedAvgM",
    "FedAvgMVR",
    "FedDyn",
    "FedExP",
    "FedNova",
    "FedProx",
    "FedStale",
    "FedVARP",
    "FlexibleFedAvg",
    "Linear",
    "LocalDescent",
    "MimiC",
    "Placement",
    "Step",
    "Terms",
    "check_step",
    "check_table",
    "check_weights",
    "is_made_here",
    "named",
]

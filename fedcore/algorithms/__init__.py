"""The server algorithms, one file each; a new one is a file and a row in REGISTRY, or a class of one's own."""

from inspect import isclass, signature
from typing import Any

from fedcore.algorithms.algorithm import (
    MEAN_GRADIENT,
    ROW_CHANGE,
    Algorithm,
    Direction,
    Placement,
    Step,
    is_made_here,
)
from fedcore.algorithms.checks import check_step, check_table, check_weights
from fedcore.algorithms.cohort import Claims, Cohort
from fedcore.algorithms.fedavg import FedAvg
from fedcore.algorithms.fedavg_m import FedAvgM, FedAvgMVR
from fedcore.algorithms.feddyn import FedDyn
from fedcore.algorithms.fedexp import FedExP
from fedcore.algorithms.fednova import FedNova
from fedcore.algorithms.fedprox import FedProx
from fedcore.algorithms.fedstale import FedStale
from fedcore.algorithms.fedvarp import FedVARP
from fedcore.algorithms.flexible import FlexibleFedAvg
from fedcore.algorithms.local_descent import LocalDescent
from fedcore.algorithms.mb_storm import MBSTORM
from fedcore.algorithms.mifa import MIFA
from fedcore.algorithms.mimic import MimiC
from fedcore.algorithms.scaffold import SCAFFOLD
from fedcore.algorithms.scaffold_m import SCAFFOLDM, SCAFFOLDMVR
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

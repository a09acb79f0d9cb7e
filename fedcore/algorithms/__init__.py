"""The server algorithms, one file each; a new one is a file and a row in REGISTRY."""

from inspect import signature
from typing import Any

from fedcore.algorithms import rates
from fedcore.algorithms.algorithm import (
    MEAN_GRADIENT,
    ROW_CHANGE,
    Algorithm,
    Claims,
    Cohort,
    Direction,
    Placement,
    Step,
)
from fedcore.algorithms.checks import check_step, check_table, check_weights
from fedcore.algorithms.fedavg import FedAvg
from fedcore.algorithms.fedavg_m import FedAvgM, FedAvgMVR
from fedcore.algorithms.fedprox import FedProx
from fedcore.algorithms.flexible import FlexibleFedAvg
from fedcore.algorithms.local_descent import LocalDescent
from fedcore.algorithms.mb_storm import MBSTORM
from fedcore.algorithms.mifa import MIFA
from fedcore.algorithms.mimic import MimiC
from fedcore.algorithms.scaffold import SCAFFOLD
from fedcore.algorithms.scaffold_m import SCAFFOLDM, SCAFFOLDMVR
from fedcore.errors import UnknownNameError

REGISTRY: dict[str, type[Algorithm]] = {
    "FedAvg": FedAvg,
    "FedAvgM": FedAvgM,
    "FedAvgMVR": FedAvgMVR,
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


def named(name: str, **options: Any) -> Algorithm:
    """The algorithm of that name.

    Raises:
        UnknownNameError: there is none, or it has no such option.
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("algorithm", name, REGISTRY)
    known = signature(REGISTRY[name]).parameters
    for option in options:
        if option not in known:
            raise UnknownNameError.of(f"option of {name}", option, known)
    return REGISTRY[name](**options)


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
    "FedProx",
    "FlexibleFedAvg",
    "LocalDescent",
    "MimiC",
    "Placement",
    "Step",
    "check_step",
    "check_table",
    "check_weights",
    "named",
    "rates",
]

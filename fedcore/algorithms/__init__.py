"""The server algorithms, one file each; a new one is a file and a row in REGISTRY."""

from inspect import signature
from typing import Any

from fedcore.algorithms import rates
from fedcore.algorithms.algorithm import Algorithm, Cohort, Step
from fedcore.algorithms.fedavg import FedAvg
from fedcore.algorithms.mifa import MIFA
from fedcore.algorithms.mimic import MimiC
from fedcore.errors import UnknownNameError

REGISTRY: dict[str, type[Algorithm]] = {"FedAvg": FedAvg, "MIFA": MIFA, "MimiC": MimiC}


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


__all__ = ["MIFA", "REGISTRY", "Algorithm", "Cohort", "FedAvg", "MimiC", "Step", "named", "rates"]

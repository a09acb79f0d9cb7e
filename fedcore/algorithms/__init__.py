"""The server algorithms and their registry. A new algorithm is a subclass of ``Algorithm``."""

from inspect import isclass, signature
from typing import Any

from fedcore.algorithms.averaging import (
    FedAsync,
    FedAU,
    FedAvg,
    FedExP,
    FedNova,
    FedProx,
    FlexibleFedAvg,
    LocalDescent,
    QFedAvg,
)
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
    is_computed_locally,
)
from fedcore.algorithms.controls import SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR, FedDyn
from fedcore.algorithms.memory import MIFA, FedAWE, FedStale, FedVARP, MimiC
from fedcore.algorithms.momentum import MBSTORM, FedACG, FedAvgM, FedAvgMVR
from fedcore.errors import UnknownNameError
from fedcore.kernels import Linear, Terms
from fedcore.validation import Registry

_METHODS: tuple[type[Algorithm], ...] = (
    *(FedACG, FedAU, FedAvg, FedAvgM, FedAvgMVR, FedDyn, FedExP, FedNova, FedStale, FedVARP, FedProx),
    *(FedAsync, FedAWE, FlexibleFedAvg, LocalDescent, QFedAvg),
    *(MBSTORM, MIFA, MimiC, SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR),
)
REGISTRY: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {method.__name__: method for method in _METHODS},
    expected="a subclass of fedcore.algorithms.Algorithm",
    fits=lambda row: isclass(row) and issubclass(row, Algorithm) and row is not Algorithm,
    group="fedcore.algorithms",
)
"""The methods by name."""
REGISTRY.composed["FedBuff"] = "FedAvg('uniform') with policy=RoundPolicy(buffer=K, max_staleness=S, discount=0.5)"
REGISTRY.composed["CA2FL"] = "FedVARP() with policy=RoundPolicy(buffer=K, max_staleness=S)"
REGISTRY.composed["DiLoCo"] = "FedAvg() with optimizer=Nesterov()"
REGISTRY.composed |= {f"Fed{one}": f"FedAvg() with optimizer={one}()" for one in ("Adagrad", "Adam", "Yogi")}


def named(name: str, **options: Any) -> Algorithm:
    """Return the algorithm with a name: a key of ``REGISTRY``, an entry point, or ``module:Name``."""
    method = REGISTRY.find(name)
    known = signature(method).parameters
    for option in options:
        if option not in known:
            raise UnknownNameError.of(f"option of {name}", option, known)
    return method(**options)


__all__ = ["MBSTORM", "MEAN_GRADIENT", "MIFA", "REGISTRY", "ROW_CHANGE", "SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR"]
__all__ += ["Algorithm", "Claims", "Cohort", "Direction", "FedACG", "FedAU", "FedAWE", "FedAsync", "FedAvg"]
__all__ += ["FedAvgM", "FedAvgMVR", "FedDyn", "FedExP", "FedNova", "FedProx", "FedStale", "FedVARP", "FlexibleFedAvg"]
__all__ += ["Linear", "LocalDescent", "MimiC", "Placement", "QFedAvg", "Step", "Terms", "check_step", "check_table"]
__all__ += ["check_weights", "is_computed_locally", "named"]

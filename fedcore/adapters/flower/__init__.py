"""fedcore's methods as strategies of Flower's Message API, and the clients' side of them. Needs flwr >= 1.41."""

from fedcore.errors import MissingDependencyError

try:
    import flwr.serverapp.strategy  # noqa: F401
except ImportError as error:
    needed = f"flwr >= 1.41 ({error})"
    raise MissingDependencyError.of("fedcore.adapters.flower", needed, extra="flower") from error

from fedcore.adapters.flower.client import Task, examples_reply
from fedcore.adapters.flower.grid import StreamingGrid
from fedcore.adapters.flower.strategy import (
    MBSTORM,
    MIFA,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedAvgMVR,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedStale,
    FedVARP,
    FedYogi,
    FlexibleFedAvg,
    LocalDescent,
    MimiC,
    ServerStrategy,
)

__all__ = [
    "MBSTORM",
    "MIFA",
    "SCAFFOLD",
    "SCAFFOLDM",
    "SCAFFOLDMVR",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgMVR",
    "FedDyn",
    "FedExP",
    "FedNova",
    "FedProx",
    "FedStale",
    "FedVARP",
    "FedYogi",
    "FlexibleFedAvg",
    "LocalDescent",
    "MimiC",
    "ServerStrategy",
    "StreamingGrid",
    "Task",
    "examples_reply",
]

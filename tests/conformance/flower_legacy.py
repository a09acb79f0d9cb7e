"""Flower's older API: ``flwr.server.strategy.FedAvg``, and fedcore's ``LegacyStrategy``."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.strategy import FedAvg, Strategy

from fedcore.adapters.flower.legacy import LegacyStrategy
from tests.conformance.cases import Case, Reply
from tests.conformance.rows import numpy_of

NAME = "Flower: `server.strategy.FedAvg`"
PACKAGE, EXTRA = "flwr", "flower"

DEVIATES = {
    "packed uint8 that differs": "kept apart",
    "a missing tensor": "kept apart",
    "a half-read reply": "kept apart",
    "a reply twice": "once",
}
WRONG = {
    "a counter in models": "The average of an integer tensor is 0: each share is cast to an integer first.",
    "a counter in differences": "The average of an integer tensor is 0: each share is cast to an integer first.",
    "packed uint8, equal at all": "The average of an integer tensor is 0: each share is cast to an integer first.",
    "a NaN in one reply": "The average is NaN.",
    "no examples at all": "The round ends in a ZeroDivisionError.",
}
CANNOT = {
    "no counts": "A result always has a count.",
    "one count is missing": "A result always has a count.",
    "bfloat16": "A result holds NumPy arrays, which have no such dtype.",
    "a sparse tensor": "A result holds dense arrays.",
    "a late reply": "A result does not say its round.",
}


def theirs(case: Case) -> Mapping[str, Any]:
    """Run a round of Flower's own strategy."""
    return _round(lambda **how: FedAvg(**how), case)


def ours(case: Case) -> Mapping[str, Any]:
    """Run a round of fedcore's strategy in its place."""
    return _round(lambda **how: LegacyStrategy("FedAvg", lr=0.1, **how), case)


def _round(strategy_of: Any, case: Case) -> Mapping[str, Any]:
    proxies = {one.client: SimpleNamespace(cid=one.client, node_id=None) for one in case.replies}
    manager, k = SimpleClientManager(), len(proxies)
    for proxy in proxies.values():
        manager.register(proxy)
    x0 = ndarrays_to_parameters([numpy_of(tensor) for tensor in case.x0.values()])
    strategy: Strategy = strategy_of(min_fit_clients=k, min_available_clients=k, initial_parameters=x0)
    strategy.configure_fit(1, strategy.initialize_parameters(manager), manager)
    results = [(proxies[one.client], _result(one, case)) for one in case.models()]
    mean, _ = strategy.aggregate_fit(1, results, [])
    return dict(zip(case.x0, parameters_to_ndarrays(mean), strict=True))


def _result(one: Reply, case: Case) -> FitRes:
    named = [numpy_of(one.tensors[name]) for name in case.x0 if name in one.tensors]
    parameters = ndarrays_to_parameters(named)
    if one.breaks:
        parameters.tensors[1] = parameters.tensors[1][:-4]
    return FitRes(Status(Code.OK, ""), parameters, one.examples, {})

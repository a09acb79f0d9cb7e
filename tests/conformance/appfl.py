"""APPFL's ``FedAvgAggregator``, and fedcore's ``Aggregator``."""

from collections.abc import Mapping
from typing import Any

from appfl.algorithm.aggregator import FedAvgAggregator
from omegaconf import DictConfig

from fedcore.adapters.appfl import Aggregator
from tests.conformance.cases import Case, Module

NAME = "APPFL: `FedAvgAggregator`"
PACKAGE, EXTRA = "appfl", "appfl"

DEVIATES = {
    "BatchNorm's statistics": "same weights",
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "packed uint8, different for one client": "rejected",
    "a sparse tensor": "rejected",
    "a reply with an unreadable tensor": "rejected",
    "all clients without examples": "zero weight",
}
WRONG = {
    "one number of examples is missing": "A client without a number of examples has the weight 1 / N and the others"
    " n_k / n, so the sum of the weights exceeds 1.",
    "a bool buffer": "The average of bools raises a RuntimeError.",
    "packed uint8, the same for all clients": "The average of small integers raises a RuntimeError.",
    "a NaN in one reply": "The average is NaN.",
    "a missing tensor": "The reply's other tensors count, and the missing one counts as no change.",
}
CANNOT = {
    "a duplicate reply": "A round has one model per client.",
    "a late reply": "A model does not contain its round.",
    "JAX arrays": "Models are torch modules.",
}


def theirs(case: Case) -> Mapping[str, Any]:
    """Average by APPFL's aggregator, weighted by sample sizes."""
    how = DictConfig({"client_weights_mode": "sample_size"})
    return _round(FedAvgAggregator(Module(case.x0), how), case)


def ours(case: Case) -> Mapping[str, Any]:
    """Average by fedcore's aggregator, which the agent makes of a file's model."""
    how = {
        "client_weights_mode": "sample_size",
        "model_path": __file__,
        "model_name": "Module",
        "model_kwargs": {"x0": case.x0},
    }
    return _round(Aggregator({**how, "algorithm": "FedAvg", "lr": 0.1}), case)


def _round(aggregator: Any, case: Case) -> Mapping[str, Any]:
    for one in case.replies:
        if one.examples is not None:
            aggregator.set_client_sample_size(one.client, one.examples)
    return aggregator.aggregate({one.client: one.sent for one in case.models()})

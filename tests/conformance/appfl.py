"""APPFL's ``FedAvgAggregator``, and fedcore's ``Aggregator``."""

from collections.abc import Mapping
from typing import Any

import torch
from appfl.algorithm.aggregator import FedAvgAggregator
from omegaconf import DictConfig

from fedcore.adapters.appfl import Aggregator
from tests.conformance.cases import Case

NAME = "APPFL: `FedAvgAggregator`"
PACKAGE, EXTRA = "appfl", "appfl"

DEVIATES = {
    "BatchNorm's statistics": "one weight",
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "packed uint8 that differs": "kept apart",
    "a sparse tensor": "kept apart",
    "a half-read reply": "kept apart",
    "no examples at all": "no work, no weight",
}
WRONG = {
    "one count is missing": "A client without a count weighs 1 / N beside the others' n_k / n: the weights add up"
    " to more than 1.",
    "a bool buffer": "The average of truth values raises a RuntimeError.",
    "packed uint8, equal at all": "The average of small integers raises a RuntimeError.",
    "a NaN in one reply": "The average is NaN.",
    "a missing tensor": "The reply's other tensors count, and the missing one counts as no change.",
}
CANNOT = {
    "a reply twice": "A round has one model of each client.",
    "a late reply": "A model does not say its round.",
    "JAX arrays": "Models are torch modules.",
}


class Module(torch.nn.Module):
    """A model of the set's tensors: finite floats are parameters, the others buffers."""

    def __init__(self, x0: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in x0.items():
            is_parameter = tensor.is_floating_point() and tensor.isfinite().all() and not name.startswith("running")
            if is_parameter:
                self.register_parameter(name, torch.nn.Parameter(tensor.clone()))
            else:
                self.register_buffer(name, tensor.clone())


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

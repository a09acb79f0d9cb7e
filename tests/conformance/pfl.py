"""pfl's FederatedAveraging on the statistics of users, summed by pfl and by fedcore's ``Method``.

A user of pfl always has a number of data points. In a set with counts both sides have pfl's ``WeightByDatapoints``
before them; without counts neither has, which is pfl's default.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pfl.aggregate.base import SumAggregator
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext, UserContext
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

from fedcore.adapters.pfl import Method
from tests.conformance.cases import OF_BUFFERS, Case, Module

NAME = "pfl: `FederatedAveraging`"
PACKAGE, EXTRA = "pfl", "pfl"

ALONE = "A user's statistics contain only the parameters."
HERE = "Users train in the server's process."
DEVIATES = {"a missing tensor": "rejected", "a duplicate reply": "no duplicates"}
WRONG = {
    "a NaN in one reply": "The average is NaN.",
    "all clients without examples": "The average raises ZeroDivisionError.",
}
CANNOT = {
    **dict.fromkeys(OF_BUFFERS, ALONE),
    "a mask of -inf": ALONE,
    **dict.fromkeys(("a late reply", "a reply with an unreadable tensor", "a sparse tensor"), HERE),
    "one number of examples is missing": "A user always has a number of data points.",
    "JAX arrays": "pfl supports models of torch and TensorFlow.",
}


def theirs(case: Case) -> Mapping[str, Any]:
    """Sum the users' statistics by pfl's ``SumAggregator``."""
    return _round(case, None)


def ours(case: Case) -> Mapping[str, Any]:
    """Sum them by fedcore's ``Method``, a postprocessor and the aggregator."""
    users = [*dict.fromkeys(one.client for one in case.replies)]
    return _round(case, Method("FedAvg", users, lr=0.1, steps=1))


class Trainable(Module):
    """The model with the methods that pfl expects."""

    def loss(self, **data: Any) -> torch.Tensor:
        raise NotImplementedError

    metrics = loss


def _round(case: Case, method: Method | None) -> Mapping[str, Any]:
    set_framework_module(pytorch_ops)
    has_counts = any(one.examples is not None for one in case.replies)
    before = [WeightByDatapoints()] if has_counts else []
    processors, total = [*before, *([] if method is None else [method])], None
    for i, one in enumerate(case.models()):
        tensors = {name: one.sent[name] - case.x0[name] for name in one.tensors}
        context = UserContext(
            num_datapoints=i + 1 if one.examples is None else one.examples, user_id=one.client, seed=0
        )
        stats: Any = MappedVectorStatistics(tensors, weight=1)
        for processor in processors:
            stats, _ = processor.postprocess_one_user(stats=stats, user_context=context)
        total = (method or SumAggregator()).accumulate(accumulated=total, user_stats=stats)
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=None)
    context = CentralContext(0, True, train, None, None, len(case.replies))
    for processor in reversed(processors):
        total, _ = processor.postprocess_server(stats=total, central_context=context, aggregate_metrics=Metrics())
    module = Trainable(case.x0)
    central = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().process_aggregated_statistics(context, Metrics(), central, total)
    return dict(module.named_parameters())

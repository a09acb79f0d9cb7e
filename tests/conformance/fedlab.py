"""FedLab's aggregation of uploads, and fedcore's ``ServerHandler``.

FedLab's ``SyncServerHandler`` takes no counts. In a set with counts ``Aggregators.fedavg_aggregate`` gets them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.utils import Aggregators, SerializationTool

from fedcore.adapters.fedlab import ServerHandler
from tests.conformance.cases import Case

NAME = "FedLab: `fedavg_aggregate`"
PACKAGE, EXTRA = "fedlab", "fedlab"

ALONE = "An upload holds the parameters alone, as one dense vector."
DEVIATES = {"one count is missing": "kept apart", "a missing tensor": "kept apart", "a reply twice": "once"}
WRONG = {
    "a NaN in one reply": "The average is NaN.",
    "no examples at all": "The average ends in an AssertionError.",
}
CANNOT = {
    **dict.fromkeys(("BatchNorm's statistics", "a counter in models", "a counter in differences"), ALONE),
    **dict.fromkeys(("a bool buffer", "packed uint8, equal at all", "packed uint8 that differs"), ALONE),
    **dict.fromkeys(("a mask of -inf", "a sparse tensor", "a half-read reply"), ALONE),
    "a late reply": "An upload does not say its round.",
    "JAX arrays": "Models are torch modules.",
}


def theirs(case: Case) -> Mapping[str, Any]:
    """Average the uploads by FedLab's own handler, or with counts by its function."""
    module = Module(case.x0)
    uploads, counts = [_flat(one.sent, case) for one in case.models()], [one.examples for one in case.replies]
    if all(count is None for count in counts):
        handler = SyncServerHandler(module, 1, 1.0)
        handler.num_clients = len(uploads)
        for upload in uploads:
            handler.load([upload])
        return dict(handler.model.named_parameters())
    SerializationTool.deserialize_model(module, Aggregators.fedavg_aggregate(uploads, counts))
    return dict(module.named_parameters())


def ours(case: Case) -> Mapping[str, Any]:
    """Load the uploads into fedcore's handler, each with its claims: client, steps, examples."""
    clients = {name: i for i, name in enumerate(dict.fromkeys(one.client for one in case.replies))}
    handler = ServerHandler(Module(case.x0), 1, 1.0, "FedAvg", lr=0.1)
    handler.num_clients = len(clients)
    handler.sample_clients()
    for one in case.models():
        claims = [] if one.examples is None else [torch.tensor([clients[one.client], 1, one.examples])]
        handler.load([_flat(one.sent, case), *claims])
    handler.global_update([])
    return dict(handler.model.named_parameters())


class Module(torch.nn.Module):
    """A model of the set's tensors."""

    def __init__(self, x0: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in x0.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.clone()))


def _flat(tensors: Mapping[str, torch.Tensor], case: Case) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in case.x0 if name in tensors])

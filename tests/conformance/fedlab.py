"""FedLab's aggregation of uploads, and fedcore's ``ServerHandler``.

FedLab's ``SyncServerHandler`` takes no counts. In a set with counts ``Aggregators.fedavg_aggregate`` gets them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.utils import Aggregators, SerializationTool

from fedcore.adapters.fedlab import ServerHandler
from tests.conformance.cases import OF_BUFFERS, Case, Module

NAME = "FedLab: `fedavg_aggregate`"
PACKAGE, EXTRA = "fedlab", "fedlab"

ALONE = "An upload contains only the parameters, as one dense vector."
DEVIATES = {
    "one number of examples is missing": "rejected",
    "a missing tensor": "rejected",
    "a duplicate reply": "no duplicates",
}
WRONG = {
    "a NaN in one reply": "The average is NaN.",
    "all clients without examples": "The average ends in an AssertionError.",
}
CANNOT = {
    **dict.fromkeys(OF_BUFFERS, ALONE),
    **dict.fromkeys(("a mask of -inf", "a sparse tensor", "a reply with an unreadable tensor"), ALONE),
    "a late reply": "An upload does not contain its round.",
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
    # By default a run of one round that accepts nothing ends with an error.
    handler = ServerHandler(Module(case.x0), 1, 1.0, "FedAvg", lr=0.1, abort_after=None)
    handler.num_clients = len(clients)
    handler.sample_clients()
    for one in case.models():
        claims = [] if one.examples is None else [torch.tensor([clients[one.client], 1, one.examples])]
        handler.load([_flat(one.sent, case), *claims])
    handler.global_update([])
    return dict(handler.model.named_parameters())


def _flat(tensors: Mapping[str, torch.Tensor], case: Case) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in case.x0 if name in tensors])

"""``fedcore.aggregate`` beside a loop in torch."""

from collections.abc import Mapping
from typing import Any

import torch

import fedcore
from fedcore.errors import FedcoreError
from tests.conformance.cases import Case

NAME = "torch loop: `aggregate`"
PACKAGE, EXTRA = "torch", "torch"
RAISES = (FedcoreError, OSError)
"""Its errors where a round would reject a client; the second one is the half-read reply's own."""

DEVIATES = {
    "one number of examples is missing": "rejected",
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "packed uint8, different for one client": "rejected",
    "a sparse tensor": "rejected",
    "a missing tensor": "rejected",
    "a reply with an unreadable tensor": "rejected",
}
WRONG = {"a NaN in one reply": "The average is NaN.", "all clients without examples": "The average is NaN."}
CANNOT = {"a duplicate reply": "A list of models has no clients.", "a late reply": "A list of models has no rounds."}


def theirs(case: Case) -> Mapping[str, Any]:
    """Sum the weighted tensors in the replies' order, and divide, as in a plain training loop."""
    weights = [1.0 if one.examples is None else one.examples for one in case.replies]
    mean = {}
    for name, before in case.x0.items():
        tensors = [torch.as_tensor(one.sent[name]).detach() for one in case.replies]
        total = sum(weight * tensor.float() for weight, tensor in zip(weights, tensors, strict=True))
        average = (total / sum(weights)).to(torch.as_tensor(before).dtype)
        mean[name] = average if case.kind == "model" else before + average
    return mean


def ours(case: Case) -> Mapping[str, Any]:
    """Call ``fedcore.aggregate``, which takes models."""
    replies = case.models()
    counts = [one.examples for one in replies]
    weights = None if all(count is None for count in counts) else counts
    mean = fedcore.aggregate([one.sent for one in replies], weights)
    return {name: mean[name] for name in case.x0}

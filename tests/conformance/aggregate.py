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
"""What it raises where a round would refuse a client; the second is the half-read reply's own."""

DEVIATES = {
    "one count is missing": "kept apart",
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "packed uint8 that differs": "kept apart",
    "a sparse tensor": "kept apart",
    "a missing tensor": "kept apart",
    "a half-read reply": "kept apart",
}
WRONG = {"a NaN in one reply": "The average is NaN.", "no examples at all": "The average is NaN."}
CANNOT = {"a reply twice": "A list of models has no clients.", "a late reply": "A list of models has no rounds."}


def theirs(case: Case) -> Mapping[str, Any]:
    """Sum the weighted tensors in the replies' order, and divide, as everybody's first server does."""
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

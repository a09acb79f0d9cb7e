"""``fedcore.Server`` beside the same loop in torch."""

from collections.abc import Mapping
from typing import Any

import fedcore
from tests.conformance import aggregate
from tests.conformance.cases import Case

NAME = "torch loop: `Server`"
PACKAGE, EXTRA = "torch", "torch"

DEVIATES = {**aggregate.DEVIATES, "a duplicate reply": "no duplicates", "a late reply": "late update"}
WRONG = aggregate.WRONG
CANNOT: dict[str, str] = {}
theirs = aggregate.theirs


def ours(case: Case) -> Mapping[str, Any]:
    """Run a round of FedAvg."""
    server = fedcore.Server(case.x0, "FedAvg", sorted({one.client for one in case.replies}), lr=0.1)
    if any(one.is_late for one in case.replies):
        with server.open_round():
            pass  # the round that the late reply answers
    with server.open_round() as opened:
        for one in case.replies:
            name = "examples" if isinstance(one.examples, int) else "weight"
            claims = {} if one.examples is None else {name: one.examples}
            started = {"round": 0} if one.is_late else {}
            kind = "model" if case.kind == "model" else "delta"
            opened.add(one.client, one.sent, steps=1, kind=kind, **claims, **started)
    return server.tensors()

"""NVFlare's workflow FedAvg with its own aggregation, and with fedcore's ``Aggregator`` in it."""

from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg

from fedcore.adapters.nvflare import Aggregator
from tests.conformance.cases import Case, Reply

NAME = "NVFlare: workflow `FedAvg`"
PACKAGE, EXTRA = "nvflare", "nvflare"

DEVIATES = {
    "a counter in models": "counters",
    "a counter in differences": "counters",
    "a bool buffer": "dtypes",
    "packed uint8, the same for all clients": "dtypes",
    "packed uint8, different for one client": "rejected",
    "a sparse tensor": "rejected",
    "one client without examples": "zero weight",
    "all clients without examples": "zero weight",
    "a duplicate reply": "no duplicates",
}
WRONG = {
    "a NaN in one reply": "The average is NaN.",
    "a missing tensor": "The reply's other tensors count, so the tensors of the model come from"
    " different sets of clients.",
    "a reply with an unreadable tensor": "The reply's first tensor stays in the sum.",
}
CANNOT = {"a late reply": "A result belongs to a task, and earlier tasks are closed."}


def theirs(case: Case) -> Mapping[str, Any]:
    """Run a round of the workflow as it is."""
    return _round(case, None)


def ours(case: Case) -> Mapping[str, Any]:
    """Run a round of the workflow with fedcore's aggregator."""
    names = [*dict.fromkeys(one.client for one in case.replies)]
    return _round(case, Aggregator("FedAvg", model=dict(case.x0), clients=names))


def _round(case: Case, aggregator: Aggregator | None) -> Mapping[str, Any]:
    workflow = Workflow(case, num_rounds=1, aggregator=aggregator)
    workflow.run()
    return workflow.saved.params


class Workflow(FedAvg):
    """NVFlare's workflow, whose transport is a call for each reply."""

    def __init__(self, case: Case, **how: Any) -> None:
        super().__init__(**how)
        self.case, self.saved = case, FLModel()
        self.fl_ctx, self.abort_signal = FLContext(), Signal()
        self.engine = SimpleNamespace()

    def load_model(self) -> FLModel:
        return FLModel(params={**self.case.x0})

    def save_model(self, model: FLModel) -> None:
        self.saved = model

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        return [one.client for one in self.case.replies]

    def send_model(self, callback: Any, **task: Any) -> None:
        for one in self.case.replies:
            with suppress(Exception):  # NVFlare logs it, and the round goes without the result
                callback(_answer(one, self.case.kind))

    def get_num_standing_tasks(self) -> int:
        return 0

    def event(self, event_type: str) -> None:
        pass

    def fire_event_with_data(self, *args: Any, **more: Any) -> None:
        pass

    def info(self, message: str) -> None:
        pass

    warning = error = info


class File:
    """NVFlare's reference to a tensor on the disk."""

    def __init__(self, tensors: Mapping[str, Any], name: str) -> None:
        self._tensors, self._name = tensors, name

    def materialize(self) -> Any:
        return self._tensors[self._name]


def _answer(one: Reply, kind: str) -> FLModel:
    params = {name: File(one.sent, name) for name in one.tensors} if one.breaks else dict(one.tensors)
    meta = {"client_name": one.client}
    if one.examples is not None:
        meta[FLMetaKey.NUM_STEPS_CURRENT_ROUND] = one.examples
    return FLModel(ParamsType.FULL if kind == "model" else ParamsType.DIFF, params, meta=meta)

"""Results that lack groups of tensors, over NVFlare's own messages: full models and differences."""

import numpy as np
import pytest
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcore.adapters.nvflare import Aggregator, reply
from tests.adapters.drivers.nvflare import LocalController, context_of, wired

X = {name: np.full(2, i, np.float32) for i, name in enumerate(["text.w", "image.w", "image.b", "body", "head"])}
PARTS = {"partial": {"text": "text.*", "image": ["image.*"]}, "personal": ["head"]}
SENT = {"site-1": (["text.w", "body"], 2.0), "site-2": (["image.w", "image.b"], 4.0), "site-3": (["image.w"], 8.0)}
DUE = {"text.w": 0 + 2, "image.w": 1 + 4, "image.b": 2 + 4, "body": 3 + 2}
COHORTS = {"text": ("site-1",), "image": ("site-2",), "rest": ("site-1",)}


def require(reports, server):
    (report,) = reports
    assert {group: one.accepted for group, one in report.groups.items()} == COHORTS
    assert [name for name, _ in report.rejected] == ["site-3"]
    assert {name: x.tolist() for name, x in server.tensors().items()} == {name: [x, x] for name, x in DUE.items()}


def test_a_controller():
    def client(names, moved):
        def train(received):
            assert received.params.keys() == DUE.keys()
            return reply({name: received.params[name] + np.float32(moved) for name in names}, steps=2)

        return train

    clients = {site: client(*sent) for site, sent in SENT.items()}
    controller = LocalController(clients, X, "FedAvg", num_rounds=1, parts=PARTS)
    controller.run()
    require(controller.reports, controller.server)


@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_an_aggregator(kind):
    aggregator = Aggregator("FedAvg", model=dict(X), clients=[*SENT], parts=PARTS)
    aggregator.reset_stats()
    for site, (names, moved) in SENT.items():
        base = {name: np.zeros(2) if kind == ParamsType.DIFF else X[name] for name in names}
        params = {name: (x + moved).astype(np.float32) for name, x in base.items()}
        model = FLModel(params=params, params_type=kind, meta={"NUM_STEPS_CURRENT_ROUND": 2})
        aggregator.accept(FLModelUtils.to_shareable(wired(model)), context_of(site))
    aggregator.aggregate_model()
    require(aggregator.reports, aggregator.server)

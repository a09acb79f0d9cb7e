"""Differences that lack groups of tensors; ``tests/adapters/test_contract.py`` has full models."""

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcore.adapters.nvflare import Aggregator
from tests.adapters.drivers.nvflare import context_of, wired
from tests.adapters.test_contract import OF_GROUPS, PARTS, X, require_groups


def test_an_aggregator():
    names = ["site-1", "site-2", "site-3"]
    aggregator = Aggregator("FedAvg", model=dict(X), clients=names, parts=PARTS)
    aggregator.reset_stats()
    for i, site in enumerate(names):
        params = {name: np.full(2, i + 2, np.float32) for name in OF_GROUPS[i]}
        model = FLModel(params=params, params_type=ParamsType.DIFF, meta={"NUM_STEPS_CURRENT_ROUND": 2})
        aggregator.accept(FLModelUtils.to_shareable(wired(model)), context_of(site))
    aggregator.aggregate_model()
    require_groups(aggregator.reports[0], aggregator.server.tensors(), names, rounds=1)

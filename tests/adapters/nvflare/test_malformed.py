"""Results that no honest site sends to ``Aggregator``: each is rejected by its site's name, and no other."""

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcore.adapters.nvflare import Aggregator, reply
from tests.adapters.drivers.nvflare import context_of
from tests.adapters.malformed import malformed

HONEST = ["site-1", "site-2", "site-3"]
LIARS = [f"liar-{i}" for i in range(300)]


def x0():
    return {"w": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def model_of(name):
    """A site's honest reply; those of all liars are the same."""
    rng = np.random.default_rng(HONEST.index(name) if name in HONEST else 9)
    params = {key: rng.normal(size=array.shape).astype(np.float32) for key, array in x0().items()}
    return reply(params, steps=5, control=np.full(10, 0.5, np.float32))


def test_a_model_that_the_workflow_made_of_a_malformed_result_is_rejected():
    aggregator = Aggregator("MIFA", model=x0(), clients=[*HONEST, *LIARS])  # which needs steps
    aggregator.reset_stats()
    for name in HONEST:
        sent = model_of(name)
        sent.meta["client_name"] = name
        assert aggregator.accept_model(sent) is True
    for name, change in zip(LIARS, malformed({"params": x0(), "meta": {"fedcore": {}}}, len(LIARS)), strict=True):
        sent = FLModel(params=x0())
        for key, value in change.items() if type(change) is dict else [("params", change)]:
            setattr(sent, str(key).encode("ascii", "replace").decode(), value)
        if type(sent.meta) is dict:
            sent.meta["client_name"] = name
        assert aggregator.accept_model(sent) is False  # for want of steps, at least
    aggregator.aggregate_model()
    assert aggregator.reports[0].accepted == tuple(HONEST)


def test_no_site_can_send_in_another_s_name():
    """The name belongs to the token that the server noted, whatever the message or the peer's context claims."""
    aggregator = Aggregator("FedAvg", model=x0(), clients=HONEST)
    aggregator.reset_stats()
    for meta, header, peer in [("site-2", "site-1", "site-2"), ("site-1", None, "site-3")]:
        sent = model_of("site-1")
        sent.meta["client_name"] = meta
        result = FLModelUtils.to_shareable(sent)
        result.set_header("client_name", "site-2")
        if header:
            result.set_header(ServerCommandKey.FL_CLIENT, Client(header, "token"))
        assert aggregator.accept(result, context_of(peer)) is True
    aggregator.aggregate_model()
    assert aggregator.reports[0].accepted == ("site-1", "site-3")


def test_an_error_of_the_job_itself_is_raised():
    aggregator = Aggregator("FedAvg", clients=HONEST)
    with pytest.raises(ValueError, match="model"):
        aggregator.accept(FLModelUtils.to_shareable(model_of("site-1")), context_of("site-1"))

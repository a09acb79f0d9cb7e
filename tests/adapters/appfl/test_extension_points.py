"""What of APPFL's extension points fedcore's aggregator refuses, and its rows beside the models."""

import numpy as np
import pytest

pytest.importorskip("appfl")

from fedcore import Server, errors
from tests.adapters.drivers import QUIET
from tests.adapters.extensions.appfl import CLIENTS, LR, STEPS, Net, agent_of, play, trained

pytestmark = QUIET


def test_rows_are_measured_from_the_model_that_an_override_returned(tmp_path):
    agent = agent_of("aggregator", "Changes", folder=str(tmp_path), algorithm="MIFA")
    play(agent)
    names = [f"client-{i}" for i in range(CLIENTS)]
    server = Server(Net().state_dict(), "MIFA", names, lr=LR)
    for _ in range(4):
        sent = {name: tensor.clone() for name, tensor in server.tensors().items()}
        with server.open_round() as opened:
            for i, name in enumerate(names):
                opened.add(name, trained(sent, i), steps=STEPS, examples=10 + i)
        server.replace_x({name: 0.5 * tensor + 0.25 for name, tensor in server.tensors().items()})
    own = agent.aggregator.server
    np.testing.assert_array_equal(own.x, server.x)
    for name in names:
        np.testing.assert_array_equal(own.store.read(name), server.store.read(name))


def test_an_asynchronous_scheduler_is_refused_in_its_first_round(tmp_path):
    agent, model = agent_of("aggregator", folder=str(tmp_path)), trained(Net().state_dict(), 0)
    with pytest.raises(errors.RangeError, match=r"^scheduler: only SyncScheduler"):
        agent.aggregator.aggregate("client-0", model, staleness=0)
    with pytest.raises(errors.RangeError, match=r"^scheduler: only SyncScheduler"):  # QueueScheduler
        agent.aggregator.aggregate(local_models={"client-0": model}, staleness={"client-0": 0})


@pytest.mark.parametrize("how", [{"train": {"send_gradient": True}}, {"use_secure_agg": True}], ids=str)
def test_replies_that_are_not_models_are_refused_when_the_agent_starts(how, tmp_path):
    with pytest.raises(errors.RangeError, match="not supported; clients send whole models"):
        agent_of("aggregator", folder=str(tmp_path), **how)

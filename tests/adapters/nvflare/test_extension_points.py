"""A user's code in NVFlare's workflows: fedcore's server beside the models, and which code fedcore refuses."""

import numpy as np
import pytest
from nvflare.app_common.workflows.fedavg import FedAvg

from fedcore import Server, Update, errors
from fedcore.adapters.nvflare import Aggregator, Controller
from tests.adapters.extensions.nvflare import NAMES, ROUNDS, ChangedModel, Federation, OwnRun, site, workflow, x0


def made(side, body=object, algorithm="FedAvg", **how):
    base = Controller if side == "controller" else FedAvg
    kind = type(body.__name__, (body, base), {}) if body is not object else base
    if side == "controller":
        return kind(algorithm, **{"num_rounds": ROUNDS, **how})
    rounds = how.pop("num_rounds", ROUNDS)
    return kind(num_clients=3, num_rounds=rounds, aggregator=Aggregator(algorithm, **how))


def server_of(flow):
    return (flow if isinstance(flow, Controller) else flow.aggregator).server


def test_a_changed_model_is_the_server_s_x_and_rows_are_measured_from_it():
    flow = made("aggregator", ChangedModel, "MIFA")
    flow.aggregator.lr = 0.1
    federation = Federation(flow)
    federation.run()
    server, sent = Server(x0(), "MIFA", NAMES, lr=0.1), x0()
    for t in range(ROUNDS):
        received = type("Received", (), {"params": sent, "current_round": t, "meta": {}})
        server.round([Update(name, site(i)(received).params, i + 1, i + 1) for i, name in enumerate(NAMES)])
        sent = {name: 0.5 * x + 0.25 for name, x in server.tensors().items()}
        server.replace_x(sent)
    own = server_of(flow)
    for name in NAMES:
        np.testing.assert_array_equal(own.store.read(name), server.store.read(name))
    np.testing.assert_array_equal(
        np.concatenate([np.ravel(x) for x in federation.persistor.saved[-1].values()]), server.x
    )


@pytest.mark.parametrize("side", ["aggregator", "controller"])
def test_an_unchanged_model_stays_as_it_is(side):
    flow = made(side)
    Federation(flow).run()
    assert not any(report.replaced for report in (flow if side == "controller" else flow.aggregator).reports)


def test_a_round_that_asks_no_site_is_an_error():
    nobody = type("Nobody", (), {"sample_clients": lambda self, num_clients=None: []})
    with pytest.raises(AssertionError, match="round 0: no site gets a task, since sample_clients returned none"):
        Federation(made("controller", nobody)).run()


@pytest.mark.parametrize("name", ["aggregate", "aggregate_fn", "should_stop"])
def test_an_override_that_is_never_called_is_refused_when_the_controller_is_made(name):
    with pytest.raises(errors.RangeError, match=f"^{name}: Controller does not call it; override update_model"):
        type("Own", (Controller,), {name: lambda self, *args: None})("FedAvg")


def test_a_run_of_its_own_that_calls_the_controller_s_sum_is_told_of_the_aggregator():
    OwnController = type("OwnController", (OwnRun, Controller), {"aggregator": None})
    with pytest.raises(AssertionError, match=r"aggregate: Controller adds the replies in its own run; .*accept_model"):
        Federation(OwnController("FedAvg")).run()


def test_a_second_job_continues_from_the_folder_s_model_or_says_why_not(tmp_path):
    Federation(workflow("aggregator")).run()
    for _ in range(2):
        federation = Federation(made("aggregator", num_rounds=2, storage=str(tmp_path / "rows")))
        federation.run()
        server_of(federation.workflow).close()
    assert server_of(federation.workflow).round_number == 4
    flow = made("aggregator", num_rounds=1, storage=str(tmp_path / "rows"))
    flow.model = x0()  # which the aggregator cannot replace
    with pytest.raises(AssertionError, match="the job's first model is not that of its folder"):
        Federation(flow).run()
    server_of(flow).close()

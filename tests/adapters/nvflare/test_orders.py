"""Every field of every method's order reaches an NVFlare client, or the method is refused by name."""

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore import errors
from fedcore.adapters.nvflare import Aggregator, Controller, Trainer, order, reply
from fedcore.adapters.nvflare.client import KEY
from fedcore.algorithms import MBSTORM, SCAFFOLD, LocalDescent, MimiC
from fedcore.simulation.sgd import LocalOptions
from tests.adapters.nvflare.local import LocalController
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN, assert_crossed

MODEL = {"weight": np.float32([[1, -2], [3, 4], [0, 1]]), "bias": np.float32([0, 1, 2])}
INPUTS, LABELS = torch.ones(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("name", ORDERS)
def test_every_field_crosses(name):
    seen = []

    def site(client):
        def work(received):
            told = order(received)
            assert_crossed(controller.server.broadcast([client], newcomers=[client]), client, told)
            seen.append(client)
            number = np.float32(client[-1])
            control = np.full(9, number, np.float32)
            steps = ORDERS[name].most_steps or 2
            return reply({key: x - number for key, x in received.params.items()}, steps=steps, control=control)

        return work

    names = ["site-1", "site-2"]
    sizes = {"site-1": 5, "site-2": 7} if ORDERS[name].needs_shares else None
    controller = LocalController(
        {client: site(client) for client in names}, MODEL, ORDERS[name], lr=0.1, num_rounds=3, client_sizes=sizes
    )
    controller.run()
    assert seen == names * 3
    assert [len(report.accepted) for report in controller.reports] == [2, 2, 2]


@pytest.mark.parametrize("name", ORDERS)
def test_the_aggregator_whose_clients_get_the_model_alone_takes_plain_steps_alone(name):
    if name in PLAIN:
        Aggregator(ORDERS[name])
    else:
        with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
            Aggregator(ORDERS[name])


@pytest.mark.parametrize("component", [Controller, Aggregator])
def test_a_rate_of_each_step_is_refused_by_name(component):
    with pytest.raises(errors.RangeError, match=r"^lr\b"):
        component("FedAvg", lr=OF_STEPS)


def received(algorithm, change=lambda told: None):
    """What a client of a first round gets."""
    seen = []
    LocalController({"a": seen.append}, MODEL, algorithm, lr=0.1, num_rounds=1).run()
    change(seen[0].meta[KEY])
    return seen[0]


def train(model, options=None, size=6):
    batches = [np.arange(start, start + size) for start in range(0, 6, size)]
    return Trainer(torch.nn.Linear(2, 3), options).train(model, INPUTS, LABELS, batches)


@pytest.mark.parametrize("options", [LocalOptions(momentum=0.9), LocalOptions(clip=1.0)], ids=["momentum", "clip"])
def test_momentum_and_clipping_are_refused_where_the_server_derives_gradients(options):
    with pytest.raises(errors.RangeError, match=r"^options\b"):
        train(received("SCAFFOLD"), options)
    train(received(SCAFFOLD(control="sent")), options)
    train(received("MIFA"), options)


@pytest.mark.parametrize(
    "algorithm", [SCAFFOLD(placement="client"), MimiC(placement="client")], ids=["SCAFFOLD", "MimiC"]
)
def test_rows_on_clients_are_refused_by_who_keeps_none(algorithm):
    with pytest.raises(errors.RangeError, match=r"^keeps_row\b"):
        train(received(algorithm))


def test_the_full_gradient_is_of_all_examples():
    with pytest.raises(errors.RangeError, match=r"^batches\b.*6.*3"):
        train(received(LocalDescent(full_gradient=True)), size=3)
    train(received(LocalDescent(full_gradient=True)), size=6)


ODD = {
    "a term too few": (lambda told: told.pop("plain"), errors.ConfigError, "'plain'"),
    "a term too many": (lambda told: told.update(clip=1.0), errors.ConfigError, "'clip'"),
    "a vector too few": (lambda told: told.pop("offset"), errors.ConfigError, "vectors"),
    "no x_prev": (lambda told: told.update(x_prev=None), errors.ArrayError, r"^x_prev\b"),
    "a rule that nobody knows": (lambda told: told.update(local_rule="sdg"), errors.UnknownNameError, "'sgd'"),
}


@pytest.mark.parametrize("why", ODD)
def test_an_order_of_another_version_is_refused_by_name(why):
    change, error, match = ODD[why]
    with pytest.raises(error, match=match):
        train(received(MBSTORM(), change))


@pytest.mark.parametrize("name", ["FedProx", "SCAFFOLD", "FedAvgM"])
def test_who_has_not_looked_at_the_terms_is_not_believed_to_have_followed_them(name):
    def stock(got):
        return FLModel(params={key: x - 1 for key, x in got.params.items()}, meta={"NUM_STEPS_CURRENT_ROUND": 3})

    def knows(got):
        return reply({key: x - 1 for key, x in got.params.items()}, steps=3)

    controller = LocalController({"knows": knows, "stock": stock}, MODEL, name, lr=0.1, num_rounds=1)
    controller.run()
    [report] = controller.reports
    assert report.accepted == ("knows",)
    [(client, reason)] = report.rejected
    assert client == "stock"
    assert reason.startswith(f"steps: expected those of fedcore's reply, since {name} is a method whose clients")

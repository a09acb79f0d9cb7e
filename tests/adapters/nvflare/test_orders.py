"""The instructions at an NVFlare client, and replies of clients that did not read them."""

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore import errors
from fedcore.adapters.nvflare import Trainer, reply
from fedcore.adapters.nvflare.client import KEY
from fedcore.algorithms import MBSTORM, SCAFFOLD, LocalDescent, MimiC
from fedcore.sim.sgd import LocalOptions
from tests.adapters.drivers.nvflare import LocalController
from tests.sim.kit import of_copies

MODEL = {"weight": np.float32([[1, -2], [3, 4], [0, 1]]), "bias": np.float32([0, 1, 2])}
INPUTS, LABELS = torch.ones(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


def received(algorithm, change=lambda terms: None):
    """The message to a client of a first round."""
    seen = []
    LocalController({"a": seen.append}, MODEL, algorithm, lr=0.1, num_rounds=1, abort_after=None).run()
    change(seen[0].meta[KEY])
    return seen[0]


def train(model, options=None, size=6, kind=np.asarray, module=None):
    batches = [kind(np.arange(start, start + size)) for start in range(0, 6, size)]
    return Trainer(module or torch.nn.Linear(2, 3), options).train(model, INPUTS, LABELS, batches)


@pytest.mark.parametrize("options", [LocalOptions(momentum=0.9), LocalOptions(clip=1.0)], ids=["momentum", "clip"])
def test_momentum_and_clipping_are_refused_where_the_server_derives_gradients(options):
    with pytest.raises(errors.RangeError, match=r"^options\b"):
        train(received("SCAFFOLD"), options)
    train(received(SCAFFOLD(control="sent")), options)
    train(received("MIFA"), options)


@pytest.mark.parametrize(
    "algorithm", [SCAFFOLD(placement="client"), MimiC(placement="client")], ids=["SCAFFOLD", "MimiC"]
)
def test_the_trainer_refuses_to_keep_rows(algorithm):
    with pytest.raises(errors.RangeError, match=r"^keeps_row\b"):
        train(received(algorithm))


@pytest.mark.parametrize("algorithm", ["FedAvg", LocalDescent(full_gradient=True), MBSTORM()], ids=str)
@pytest.mark.parametrize("kind", [torch.from_numpy, np.ndarray.tolist], ids=["tensors", "lists"])
def test_minibatches_may_be_tensors_or_lists(algorithm, kind):
    expected, found = train(received(algorithm)), train(received(algorithm), kind=kind)
    np.testing.assert_array_equal(found.params["weight"], expected.params["weight"])


@pytest.mark.parametrize("algorithm", [SCAFFOLD(control="sent"), MBSTORM()], ids=str)
def test_a_module_may_have_a_buffer_that_the_server_takes_for_a_parameter(algorithm, monkeypatch):
    (module := torch.nn.Linear(2, 3)).register_buffer("shift", torch.zeros(1))
    expected = train(received(algorithm))
    monkeypatch.setitem(MODEL, "shift", np.float32([5]))
    found = train(received(algorithm), module=module)
    for name, tensor in expected.params.items():
        np.testing.assert_allclose(found.params[name], tensor, rtol=1e-6)


def test_personal_tensors_start_from_the_module_s_values():
    (message := received("FedProx")).params.pop("bias")
    torch.nn.init.constant_((module := torch.nn.Linear(2, 3)).bias, 7)
    np.testing.assert_allclose(train(message, module=module).params["bias"], 7, atol=0.1)


def test_a_module_whose_copy_lacks_a_hook_is_refused_where_a_copy_is_needed():
    train(received("FedAvg"), module=of_copies(torch.nn.Linear(2, 3), "hook"))
    with pytest.raises(errors.RangeError, match=r"^weight: .*hook"):
        train(received(MBSTORM()), module=of_copies(torch.nn.Linear(2, 3), "hook"))


def test_the_full_gradient_is_of_all_examples():
    with pytest.raises(errors.RangeError, match=r"^batches\b.*3 of 6"):
        train(received(LocalDescent(full_gradient=True)), size=3)
    train(received(LocalDescent(full_gradient=True)), size=6)


ODD = {
    "a term too few": (lambda terms: terms.pop("plain"), errors.ConfigError, "'plain'"),
    "a term too many": (lambda terms: terms.update(clip=1.0), errors.ConfigError, "'clip'"),
    "a vector too few": (lambda terms: terms.pop("offset"), errors.ConfigError, "vectors"),
    "no x_prev": (lambda terms: terms.update(x_prev=None), errors.ArrayError, r"^x_prev\b"),
    "an unknown rule": (lambda terms: terms.update(local_rule="sdg"), errors.UnknownNameError, "'sgd'"),
}


@pytest.mark.parametrize("why", ODD)
def test_instructions_of_another_version_are_refused(why):
    change, error, match = ODD[why]
    with pytest.raises(error, match=match):
        train(received(MBSTORM(), change))


@pytest.mark.parametrize("name", ["FedProx", "SCAFFOLD", "FedAvgM"])
def test_a_reply_of_a_client_that_did_not_read_the_instructions_is_rejected(name):
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
    assert f"{name} is a method whose clients" in reason

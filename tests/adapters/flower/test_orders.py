"""Every field of every method's order reaches the ClientApp, or the method is refused by name."""

import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from fedcore.adapters import flower
from fedcore.adapters.flower import Task
from fedcore.adapters.flower.training import train
from fedcore.errors import ArrayError, ConfigError, RangeError
from fedcore.sim.sgd import LocalOptions
from tests.adapters.flower.federation import BATCH, NODES, initial_arrays, make_data, make_module, make_strategy, run
from tests.adapters.flower.local_grid import LocalGrid, trains


def one_app(work, nodes=2):
    return LocalGrid(dict.fromkeys(NODES[:nodes], trains(work)))


def training(options=None, module=make_module):
    """Nodes that train on the same examples, and these."""
    dataset, _ = make_data()
    x, y = torch.from_numpy(dataset.train_x[:20]), torch.from_numpy(dataset.train_y[:20])
    return one_app(lambda message: train(message, module(), x, y, batch=BATCH, steps=2, options=options)), x, y


@pytest.mark.parametrize("options", [LocalOptions(momentum=0.9), LocalOptions(clip=1.0)], ids=["momentum", "clip"])
@pytest.mark.parametrize(
    ("method", "how", "plain"),
    [("SCAFFOLD", {}, True), ("SCAFFOLDM", {}, True), ("SCAFFOLD", {"control": "sent"}, False), ("MIFA", {}, False)],
)
def test_momentum_and_clipping_are_refused_where_the_server_derives_gradients(method, how, plain, options):
    strategy, _ = run(method, training(options)[0], 1, **how)
    [report] = strategy.reports
    assert len(report.accepted) == (0 if plain else 2)
    assert all("options: " in failure.reason for failure in strategy.failures)
    assert len(strategy.failures) == (2 if plain else 0)


def test_a_module_whose_copy_lacks_a_hook_is_refused_where_a_copy_is_needed():
    (module := make_module())[0].weight.register_hook(lambda grad: grad)
    strategy, _ = run("MBSTORM", training(module=lambda: module)[0], 1)
    assert ["0.weight: " in failure.reason for failure in strategy.failures] == [True, True]


@pytest.mark.parametrize("method", ["SCAFFOLD", "MimiC"])
def test_rows_on_clients_are_refused_by_who_keeps_none(method):
    strategy, _ = run(method, training()[0], 1, placement="client")
    assert ["keeps_row: " in failure.reason for failure in strategy.failures] == [True, True]
    assert strategy.reports[0].accepted == ()


def test_one_s_own_loop_is_asked_for_what_its_row_adds():
    def work(message):
        task, module = Task.of(message), make_module()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ArrayError, match=r"^own\b"):
            task.correct(module)
        task.correct(module, own=(own := np.full(task.layout.n_parameters, 2, np.float32)))
        assert all((one.grad == (1 if name == "0.bias" else 3)).all() for name, one in module.named_parameters())
        with pytest.raises(ArrayError, match=r"^module: lacks the tensor '0\.weight'"):
            task.correct(module[0], own=own)
        return task.reply(module, steps=1, examples=1, control=np.zeros(task.layout.n_parameters, np.float32))

    strategy, _ = run("SCAFFOLD", one_app(work), 1, placement="client", parts={"personal": ["0.bias"]})
    assert strategy.failures == []
    assert len(strategy.reports[0].accepted) == 2


def test_losses_reach_the_server():
    grid, x, y = training()
    how = {"lr": 0.1, "fraction_evaluate": 0.0, "min_available_nodes": 1, "min_train_nodes": 1, "poll": 0.001}
    strategy = flower.QFedAvg(q=1.0, **how)
    strategy.start(grid, initial_arrays(), 1, timeout=5)
    assert strategy.failures == []
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(make_module().eval()(x), y))
    np.testing.assert_allclose(strategy.reports[0].weights, [loss, loss], rtol=1e-5)


ODD = {
    "a field too few": (lambda content: content["fedcore"].pop("plain"), ConfigError, r"missing fields \['plain'\]"),
    "a field too many": (
        lambda content: content["fedcore"].update({"clip": 1.0}),
        ConfigError,
        r"unknown fields \['clip'\]",
    ),
    "a record too many": (
        lambda content: content.update({"fedcore.mask": ConfigRecord()}),
        ConfigError,
        r"unknown fields \['mask'\]",
    ),
    "no x_prev": (lambda content: content.pop("fedcore.x_prev"), ArrayError, "^x_prev: "),
}


@pytest.mark.parametrize("why", ODD)
def test_an_order_of_another_version_is_refused_by_name(why):
    change, error, match = ODD[why]

    def work(message):
        task = Task.of(message)
        change(message.content)
        with pytest.raises(error, match=match):
            Task.of(message)
        return task.reply(task.x, steps=1, examples=1)

    strategy, _ = run("MBSTORM", one_app(work, nodes=1), 1)  # nodes of one process share the records
    assert strategy.failures == []


def test_a_client_says_that_it_took_the_one_step_of_its_rule():
    def work(message):
        task = Task.of(message)
        with pytest.raises(RangeError, match=r"^steps=4\b.*one minibatch"):
            task.reply(task.x, steps=4, examples=1)
        return task.reply(task.x, steps=1, examples=1)

    strategy, _ = run("MBSTORM", one_app(work), 1)
    assert strategy.failures == []


def test_stock_client_apps_are_not_believed_to_have_added_a_proximal_term():
    """FedProx averages models, but a client that does not know its order has trained something else."""
    grid = one_app(lambda message: Task.of(message).reply(Task.of(message).x, steps=1, examples=1))
    grid.spoil = lambda node, reply: reply.content.pop("fedcore") and None
    strategy, _ = run("FedProx", grid, 1)
    for _, reason in strategy.reports[0].rejected:
        assert re.match(r"steps\b.*\bFedProx", reason)
        assert "Task.reply" in reason
    assert strategy.reports[0].accepted == ()
    with pytest.raises(RangeError, match=r"^steps\b.*SCAFFOLD"):
        make_strategy("SCAFFOLD", steps=4)

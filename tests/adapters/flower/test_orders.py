"""Every field of every method's order reaches the ClientApp, or the method is refused by name."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from fedcore.adapters import flower
from fedcore.adapters.flower import Task
from fedcore.adapters.flower.training import train
from fedcore.errors import ArrayError, ConfigError, RangeError
from fedcore.simulation.sgd import LocalOptions
from tests.adapters.flower.federation import BATCH, NODES, make_data, make_module, make_strategy, run
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.orders import OF_STEPS, ORDERS, assert_crossed

MODEL = np.float32([1, -2, 3])


def strategy_of(name, **options):
    class Mine(getattr(flower, type(ORDERS[name]).__name__, flower.ServerStrategy)):
        method = type(ORDERS[name])

        def __init__(self, **how):
            super().__init__(**how)
            self.algorithm = ORDERS[name]

    return Mine(lr=0.1, fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1, poll=0.001, **options)


@pytest.mark.parametrize("name", ORDERS)
def test_every_field_crosses_over_messages(name):
    strategy, seen = strategy_of(name, client_sizes={1: 5, 2: 7}), []

    def app_of(node):
        app = ClientApp()

        @app.train()
        def _(message, context):
            task = Task.of(message)
            sent = strategy.server.broadcast([node], newcomers=[node])
            np.testing.assert_array_equal(task.x, sent.x)
            assert_crossed(sent, node, task)
            seen.append(node)
            steps = task.local_rule.most_steps or 2
            return task.reply(task.x - np.float32(node), steps=steps, examples=1, control=np.float32([node, 2, 1]))

        return app

    strategy.start(LocalGrid({node: (app_of(node), {}) for node in (1, 2)}), ArrayRecord([MODEL]), 3)
    assert strategy.failures == []
    assert seen == [1, 2] * 3
    assert [len(report.accepted) for report in strategy.reports] == [2, 2, 2]


def test_a_rate_of_each_step_is_refused_by_name():
    with pytest.raises(RangeError, match=r"^lr\b.*one rate for all steps of a round"):
        flower.LocalDescent(lr=OF_STEPS)


def one_app(work, nodes=2):
    app = ClientApp()
    app.train()(lambda message, context: work(message))
    return LocalGrid({node: (app, {}) for node in NODES[:nodes]})


@pytest.mark.parametrize("options", [LocalOptions(momentum=0.9), LocalOptions(clip=1.0)], ids=["momentum", "clip"])
@pytest.mark.parametrize(
    ("method", "how", "plain"),
    [("SCAFFOLD", {}, True), ("SCAFFOLDM", {}, True), ("SCAFFOLD", {"control": "sent"}, False), ("MIFA", {}, False)],
)
def test_momentum_and_clipping_are_refused_where_the_server_derives_gradients(method, how, plain, options):
    dataset, _ = make_data()
    x, y = torch.from_numpy(dataset.train_x[:20]), torch.from_numpy(dataset.train_y[:20])
    grid = one_app(lambda message: train(message, make_module(), x, y, batch=BATCH, steps=2, options=options))
    strategy, _ = run(method, grid, 1, **how)
    [report] = strategy.reports
    assert len(report.accepted) == (0 if plain else 2)
    assert all("options: expected no momentum and no clip" in failure.reason for failure in strategy.failures)
    assert len(strategy.failures) == (2 if plain else 0)


@pytest.mark.parametrize("method", ["SCAFFOLD", "MimiC"])
def test_rows_on_clients_are_refused_by_who_keeps_none(method):
    dataset, _ = make_data()
    x, y = torch.from_numpy(dataset.train_x[:20]), torch.from_numpy(dataset.train_y[:20])
    grid = one_app(lambda message: train(message, make_module(), x, y, batch=BATCH, steps=2))
    strategy, _ = run(method, grid, 1, placement="client")
    assert ["keeps_row: expected false" in failure.reason for failure in strategy.failures] == [True, True]
    assert strategy.reports[0].accepted == ()


def test_one_s_own_loop_is_asked_for_what_its_row_adds():
    def work(message):
        task, module = Task.of(message), make_module()
        module.load_state_dict(task.arrays.to_torch_state_dict())
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ArrayError, match="own: expected what the client's row adds to the offset"):
            task.correct(module)
        task.correct(module, own=np.full(task.layout.n_parameters, 2, np.float32))
        assert all((parameter.grad == 3).all() for parameter in module.parameters())
        return task.reply(module, steps=1, examples=1, control=np.zeros(task.layout.n_parameters, np.float32))

    strategy, _ = run("SCAFFOLD", one_app(work), 1, placement="client")
    assert strategy.failures == []
    assert len(strategy.reports[0].accepted) == 2


ODD = {
    "a field too few": (lambda content: content["fedcore"].pop("plain"), ConfigError, r"without \['plain'\]"),
    "a field too many": (lambda content: content["fedcore"].update({"clip": 1.0}), ConfigError, r"with \['clip'\]"),
    "a record too many": (
        lambda content: content.update({"fedcore.mask": ConfigRecord()}),
        ConfigError,
        r"with \['mask'\]",
    ),
    "no x_prev": (lambda content: content.pop("fedcore.x_prev"), ArrayError, "x_prev: expected the model of the round"),
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
        with pytest.raises(
            RangeError, match=r"steps: expected .*1\.\.1, since the local rule is 'one minibatch', got 4"
        ):
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
        assert reason.startswith("steps: expected the number of local steps, got a reply that does not say it: FedProx")
        assert reason.endswith("and they answer by Task.reply")
    assert strategy.reports[0].accepted == ()
    with pytest.raises(RangeError, match=r"^steps\b.*SCAFFOLD"):
        make_strategy("SCAFFOLD", steps=4)

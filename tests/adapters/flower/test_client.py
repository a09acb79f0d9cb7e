"""One's own torch loop with ``Task.correct`` and a plain SGD takes the very steps of ``fedcore.sim.sgd``."""

import copy

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedcore.adapters.flower import Task
from fedcore.algorithms.local_rules import minibatches
from fedcore.errors import ArrayError
from tests.adapters.flower.federation import BATCH, METHODS, NODES, SEED, STEPS, make_data, make_module, run, simulate
from tests.adapters.flower.local_grid import LocalGrid


def own_loop(client, dataset, parts):
    app = ClientApp()
    x, y = (torch.from_numpy(array[parts[client]]) for array in (dataset.train_x, dataset.train_y))

    @app.train()
    def _(message, context):
        task, module = Task.of(message), make_module()
        module.load_state_dict(task.arrays.to_torch_state_dict())
        previous = None
        if task.b:
            previous = copy.deepcopy(module)
            torch.nn.utils.vector_to_parameters(
                torch.tensor(task.x_prev[: task.layout.n_parameters]), previous.parameters()
            )
        optimizer = torch.optim.SGD(module.parameters(), lr=task.lr)
        raw = np.zeros(task.layout.n_parameters, np.float32)
        batches = minibatches(
            len(y), task.local_rule.batch(BATCH), steps=STEPS, seed=SEED, round=task.round, client=client
        )
        steps = 0
        for steps, batch in enumerate(task.local_rule.along(batches, len(y)), start=1):  # noqa: B007
            for net in filter(None, (module, previous)):
                net.zero_grad()
                cross_entropy(net(x[batch]), y[batch]).backward()
            raw += torch.nn.utils.parameters_to_vector([p.grad for p in module.parameters()]).numpy() / STEPS
            task.correct(module, previous)
            optimizer.step()
        return task.reply(module, steps=steps, examples=len(y), control=raw if task.second else None)

    return app


@pytest.mark.parametrize("method", METHODS)
def test_own_loop(method):
    dataset, parts = make_data()
    grid = LocalGrid({NODES[i]: (own_loop(i, dataset, parts), {}) for i in range(5)})
    sizes = {node: len(part) for node, part in zip(NODES, parts, strict=True)} if "Flexible" in method else None
    strategy, _ = run(method, grid, 2, client_sizes=sizes)
    order = sorted(range(5), key=lambda i: NODES[i])
    assert strategy.failures == []
    expected = simulate(method, METHODS[method], 2 * [order])
    np.testing.assert_allclose(strategy.server.x, expected.x, rtol=1e-3, atol=1e-5)
    assert np.abs(strategy.server.x - simulate("LocalDescent", {}, []).x).max() > 0.01


def test_a_message_of_another_strategy_is_an_error():
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    with pytest.raises(ArrayError, match="fedcore"):
        Task.of(Message(RecordDict({"arrays": ArrayRecord()}), 1, "train"))

"""One's own torch loop with ``Task.correct`` and a plain SGD takes the very steps of ``fedcore.sim.sgd``."""

import copy
import sys

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch.nn.functional import cross_entropy

from fedcore.adapters.flower import Task
from fedcore.algorithms.local_rules import minibatches
from fedcore.errors import ArrayError
from tests.adapters.flower import federation
from tests.adapters.flower.federation import METHODS, NODES, STEPS, make_data, make_module, run, simulate
from tests.adapters.flower.local_grid import LocalGrid, trains

usual_module = make_module


def own_loop(client, dataset, parts):
    x, y = (torch.from_numpy(array[parts[client]]) for array in (dataset.train_x, dataset.train_y))

    def work(message):
        task, module = Task.of(message), make_module()
        module.load_state_dict(task.arrays.to_torch_state_dict())
        previous = None
        if task.b:
            previous = copy.deepcopy(module)
            old = {name: torch.tensor(tensor) for name, tensor in task.layout.unflatten(task.x_prev).items()}
            previous.load_state_dict(previous.state_dict() | old)
        optimizer = torch.optim.SGD(module.parameters(), lr=task.lr)
        raw = {piece.name: np.zeros(piece.shape, np.float32) for piece in task.layout.slices}
        order = {"steps": STEPS, "seed": federation.SEED, "round": task.round, "client": client}
        batches = minibatches(len(y), task.local_rule.batch(federation.BATCH), **order)
        steps = 0
        for steps, batch in enumerate(task.local_rule.along(batches, len(y)), start=1):  # noqa: B007
            for net in filter(None, (module, previous)):
                net.zero_grad()
                cross_entropy(net(x[batch]), y[batch]).backward()
            for name, parameter in module.named_parameters(remove_duplicate=False):
                raw[name] += parameter.grad.numpy() / STEPS
            task.correct(module, previous)
            optimizer.step()
        vector = task.layout.flatten(raw | task.layout.read_counters(task.tensors))[: task.layout.n_parameters]
        return task.reply(module, steps=steps, examples=len(y), control=vector if task.second else None)

    return trains(work)


@pytest.mark.parametrize("method", METHODS)
def test_own_loop(method):
    dataset, parts = make_data()
    grid = LocalGrid({NODES[i]: own_loop(i, dataset, parts) for i in range(5)})
    sizes = {node: len(part) for node, part in zip(NODES, parts, strict=True)} if "Flexible" in method else None
    strategy, _ = run(method, grid, 2, client_sizes=sizes)
    order = sorted(range(5), key=lambda i: NODES[i])
    assert strategy.failures == []
    expected = simulate(method, METHODS[method], 2 * [order])
    np.testing.assert_allclose(strategy.server.x, expected.x, rtol=1e-3, atol=1e-5)
    assert np.abs(strategy.server.x - simulate("LocalDescent", {}, []).x).max() > 0.01


class Odd(torch.nn.Sequential):
    """It ties two weights, and has a float buffer that is no BatchNorm statistic."""

    def __init__(self):
        super().__init__(*usual_module(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        self[5].weight = self[4].weight
        self.register_buffer("shift", torch.full((12,), 0.5))

    def forward(self, x):
        return super().forward(x - self.shift)


@pytest.mark.parametrize(("method", "options"), [("SCAFFOLD", {"control": "sent"}), ("MBSTORM", {}), ("FedProx", {})])
def test_train_takes_the_steps_of_an_own_loop_with_an_odd_module(method, options, monkeypatch):
    first = ArrayRecord(dict(reversed(Odd().state_dict().items())))
    monkeypatch.setattr(federation, "initial_arrays", lambda: first)
    models = []
    for place, node in ((federation, lambda *own: (federation.make_app(*own), {})), (sys.modules[__name__], own_loop)):
        monkeypatch.setattr(place, "make_module", Odd)
        strategy, _ = run(method, LocalGrid({NODES[i]: node(i, *make_data()) for i in range(5)}), 2, **options)
        assert [len(report.accepted) for report in strategy.reports] == [5, 5]
        models.append([*strategy.server.x, *strategy.server.row(NODES[0])])
    np.testing.assert_allclose(*models, rtol=1e-3, atol=1e-5)


def test_a_message_of_another_strategy_is_an_error():
    from flwr.app import Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    with pytest.raises(ArrayError, match="fedcore"):
        Task.of(Message(RecordDict({"arrays": ArrayRecord()}), 1, "train"))

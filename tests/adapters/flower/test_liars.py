"""For every method: one liar of ten nodes, each kind of lie, within ``BOUNDS``."""

import pytest
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedcore.adapters import flower
from fedcore.adapters.flower import Task
from fedcore.adapters.flower.records import METHOD
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.liars import ROUNDS, assert_bounded, cases, options, said
from tests.server.liars import LR, METHODS, MODEL, N, made

NODES = [2**63 + 10 * i for i in range(N)]


def app_of(method, kind, client):
    app = ClientApp()

    @app.train()
    def _(message, context):
        task = Task.of(message)
        update = said(method, kind, task, task.tensors, task.offset, client)
        reply = task.reply(update.value, steps=1, examples=update.examples, control=update.control, lr=update.lr)
        reply.content[METHOD]["steps"] = update.steps  # past what ``reply`` itself refuses to say
        return reply

    return app


@pytest.mark.parametrize(("method", "kind"), cases())
def test_one_liar_of_ten_nodes_moves_the_result_by_its_bound_at_most(method, kind):
    grid = LocalGrid({node: (app_of(method, kind, i), {}) for i, node in enumerate(NODES)})
    _, sizes = made(method)
    strategy = getattr(flower, method.partition(",")[0])(
        **{name: value for name, value in METHODS[method].items() if name != "client_sizes"},
        lr=LR,
        client_sizes=sizes and dict(zip(NODES, sizes, strict=True)),
        fraction_evaluate=0.0,
        min_train_nodes=N,
        min_available_nodes=N,
        poll=0.001,
        **options(kind),
    )
    strategy.start(grid, ArrayRecord({name: Array(tensor) for name, tensor in MODEL.items()}), ROUNDS, timeout=5)
    assert strategy.failures == []
    assert_bounded(method, kind, strategy.server.tensors(), strategy.reports, NODES)

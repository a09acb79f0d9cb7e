"""For every method: one liar of ten nodes, each kind of lie, over both of Flower's APIs, within ``BOUNDS``."""

import pytest
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedcore.adapters import flower, npy
from fedcore.adapters.flower import Task
from fedcore.adapters.flower.instructions import METHOD
from fedcore.adapters.flower.legacy import LegacyStrategy
from fedcore.assignment import Assignment
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.liars import KINDS, ROUNDS, assert_bounded, cases, options, said
from tests.server.liars import LR, METHODS, MODEL, N, made

NODES = [2**63 + 10 * i for i in range(N)]


def app_of(method, kind, client):
    app = ClientApp()

    @app.train()
    def _(message, context):
        task = Task.of(message)
        update = said(method, kind, task, task.tensors, task.offset, client)
        reply = task.reply(update.model, steps=1, examples=update.examples, control=update.control, lr=update.lr)
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


SENT = ("w", "num_batches_tracked")
"""Of the model, over the older API: tensors have no names there, so that BatchNorm's statistics are parameters."""
OF_MINIBATCHES = [method for method in METHODS if made(method)[0].local_rule.ordinary]


class Proxy(ClientProxy):
    get_properties = get_parameters = evaluate = reconnect = None

    def __init__(self, cid, method, kind):
        super().__init__(cid)
        self.how = method, kind

    def fit(self, ins, timeout=None, group_id=None):
        told = {name.removeprefix("fedcore."): value for name, value in ins.config.items()}
        vectors = {name: npy.read(told.pop(name)) if name in told else None for name in ("offset", "x_prev")}
        told = Assignment.read(told, vectors)
        sent = dict(zip(SENT, parameters_to_ndarrays(ins.parameters), strict=True))
        update = said(*self.how, told, sent, vectors["offset"], int(self.cid))
        metrics = {"fedcore.steps": update.steps}
        if update.lr is not None:
            metrics["fedcore.lr"] = update.lr
        if update.control is not None:
            metrics["fedcore.control"] = npy.write(update.control)
        tensors = ndarrays_to_parameters([update.model[name] for name in SENT])
        return FitRes(Status(Code.OK, ""), tensors, update.examples, metrics)


Proxy.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(("method", "kind"), cases(OF_MINIBATCHES, [kind for kind in KINDS if kind != "variance"]))
def test_one_liar_of_ten_clients_of_the_older_api_moves_the_result_by_its_bound_at_most(method, kind):
    algorithm, sizes = made(method)
    names = [str(i) for i in range(N)]
    manager = SimpleClientManager()
    for name in names:
        manager.register(Proxy(name, method, kind))
    strategy = LegacyStrategy(
        algorithm,
        lr=LR,
        server={"client_sizes": sizes and dict(zip(names, sizes, strict=True))} | options(kind),
        initial_parameters=ndarrays_to_parameters([MODEL[name] for name in SENT]),
        min_fit_clients=N,
        min_available_clients=N,
    )
    for t in range(ROUNDS):
        asked = strategy.configure_fit(t + 1, None, manager)
        results = sorted(((proxy, proxy.fit(ins)) for proxy, ins in asked), key=lambda pair: pair[0].cid)
        strategy.aggregate_fit(t + 1, results, [])
    tensors = dict(zip(SENT, strategy.server.tensors(), strict=True))
    assert_bounded(method, kind, tensors, strategy.reports, names)

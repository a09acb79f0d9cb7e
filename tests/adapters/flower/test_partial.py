"""Replies that lack groups of arrays, over a strategy and ClientApps."""

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedcore import Model, Server
from fedcore.adapters.flower import Task
from tests.adapters.flower.federation import make_strategy
from tests.adapters.flower.local_grid import LocalGrid

X = {name: np.full(2, i, np.float32) for i, name in enumerate(["text.w", "image.w", "image.b", "body", "head", "base"])}
PARTS = {"partial": {"text": "text.*", "image": "image.*"}, "personal": "head", "frozen": ("base",)}
SENT = {11: ["text.w", "body"], 5: ["image.w", "image.b"], 8: ["image.w"]}
SEEN = []


def make_app(node):
    app = ClientApp()

    @app.train()
    def _(message, context):
        task = Task.of(message)
        SEEN.append([*task.arrays])
        y = {name: task.tensors[name] + np.float32(node) for name in SENT[node]}
        reply = task.reply(y, steps=2, examples=3)
        reply.content["arrays"]["head"] = Array(np.full(2, np.nan, np.float32))  # the node's own
        return reply

    return app


def test_replies_with_some_of_the_groups(tmp_path):
    nodes = {node: (make_app(node), {}) for node in SENT}
    for rounds in (1, 2):  # the second one resumes
        strategy = make_strategy("FedAvg", parts=PARTS, storage=tmp_path / "run")
        result = strategy.start(LocalGrid(nodes), ArrayRecord({n: Array(x) for n, x in X.items()}), rounds)
        strategy.server.close()
    assert {tuple(names) for names in SEEN} == {("text.w", "image.w", "image.b", "body")}
    (report,) = strategy.reports
    assert {group: one.accepted for group, one in report.groups.items()} == {
        "text": (11,),
        "image": (5,),
        "rest": (11,),
    }
    ((node, reason),) = report.rejected
    assert (node, "image.b" in reason) == (8, True)
    twin = Server(
        Model({name: x for name, x in X.items() if name not in ("head", "base")}, PARTS["partial"]),
        lr=0.1,
        clients=[5, 11],
    )
    for _ in range(2):
        with twin.open_round() as opened:
            for node in (11, 5):
                y = {name: twin.tensors()[name] + np.float32(node) for name in SENT[node]}
                opened.add(node, y, steps=2, examples=3)
    assert {name: array.numpy().tolist() for name, array in result.arrays.items()} == {
        name: x.tolist() for name, x in twin.tensors().items()
    }

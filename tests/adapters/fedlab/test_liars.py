"""For every method of plain steps: one liar of ten, each kind of lie that FedLab carries, within ``BOUNDS``.

Trainers say no rate there, and neither buffers nor counters travel.
"""

import pytest

pytest.importorskip("fedlab")

import torch

from fedcore.adapters.fedlab import ServerHandler
from tests.adapters.liars import PLAIN, ROUNDS, assert_bounded, options, plain, said
from tests.server.liars import LR, MODEL, N, made

KINDS = ["honest", "steps", "examples", "long"]


def net():
    """One whose parameters are the table's w."""
    linear = torch.nn.Linear(len(MODEL["w"]), 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    return linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", PLAIN)
def test_one_liar_of_ten_clients_moves_the_result_by_its_bound_at_most(method, kind):
    algorithm, sizes = made(method)
    handler = ServerHandler(net(), ROUNDS, 1.0, algorithm, lr=LR, client_sizes=sizes, **options(kind))
    handler.num_clients = N
    while not handler.if_stop:
        round, sampled = handler.round, handler.sample_clients()
        sent = MODEL | {"w": handler.downlink_package[0].numpy()}
        for i in sampled:
            update = said(method, kind, plain(round), sent, None, i)
            claims = torch.tensor([i, update.steps, update.examples])
            handler.load([torch.from_numpy(update.value["w"]), claims])
    assert_bounded(method, kind, {"w": handler.server.x}, handler.reports, range(N))

"""Uploads that no honest trainer sends: each is rejected, by its client where it has one, and no other."""

import numpy as np
import pytest

pytest.importorskip("fedlab")

import torch
from fedlab.utils import MessageCode

from fedcore import Server
from fedcore.adapters.fedlab import ServerHandler
from tests.adapters.fedlab.test_fedlab import LR, claim, managed, net, upload
from tests.adapters.malformed import OBJECTS, PLAIN, assert_only_the_valid_count, malformed

HONEST = [0, 200, 422]
LIARS = [client for client in range(423) if client not in HONEST]
ROUNDS = 5
TENSORS = [
    lambda: torch.zeros(17),
    lambda: torch.zeros(18, dtype=torch.int32),
    lambda: torch.zeros(18, dtype=torch.complex64),
    lambda: torch.full((18,), torch.nan),
    lambda: torch.zeros(18).to_sparse(),
    lambda: torch.zeros(18, device="meta"),
    lambda: torch.zeros(1).expand(18),
    lambda: torch.tensor([0.5, 1.0, 1.0]),
]
ODD = [*PLAIN, *OBJECTS, *TENSORS]


def y_of(client, x):
    generator = torch.Generator().manual_seed(client if client in HONEST else 9)
    return x + torch.randn(18, generator=generator)


def test_uploads_that_are_no_models_are_rejected_by_client_and_the_others_result_stands():
    handler = ServerHandler(net(), ROUNDS, 1.0, "MIFA", lr=LR, steps=5)
    handler.num_clients = len(HONEST) + len(LIARS)
    server = Server(handler.model_parameters.numpy(), "MIFA", handler.num_clients, lr=LR)
    for round in range(ROUNDS):
        clients = handler.sample_clients()
        x = handler.downlink_package[0].clone()
        liars = iter(malformed([y_of(LIARS[0], x)], len(LIARS), round, ODD))
        for client in clients:
            sent = next(liars) if client in LIARS else [y_of(client, x)]
            if type(sent) in (list, tuple) and len(sent) > 1:
                sent = [sent]  # else it would have claims, which say whose it is
            assert handler.load(sent) is (client == clients[-1])
        report = handler.reports[-1]
        assert_only_the_valid_count(report, HONEST, LIARS)
        with server.open_round() as opened:
            for client in report.accepted:
                opened.add(client, y_of(client, x).numpy(), steps=5)
        np.testing.assert_array_equal(handler.server.x, server.x)


def test_claims_that_are_none_answer_for_nobody(caplog):
    handler = ServerHandler(net(), 1, 1.0, "MIFA", lr=LR, steps=5)
    handler.num_clients = 3
    handler.sample_clients()
    x = handler.downlink_package[0]
    for odd in [*ODD, *(lambda made=made: [made()] for made in ODD)]:
        assert handler.load([x + 7, odd()]) is False
    for client in range(3):
        assert handler.load([x - 0.1, claim(client)]) is (client == 2)
    assert handler.reports[0].accepted == (0, 1, 2)
    assert handler.reports[0].rejected == ()


def test_a_manager_goes_on_after_messages_that_are_no_uploads(caplog):
    def liar(ids, x):
        for made in ODD:
            yield MessageCode.ParameterUpdate, [x + 7, made()]
            yield made(), None
        yield MessageCode.ParameterUpdate, [object()]
        yield from [upload(x - 0.1) for _ in ids[1:]]

    handler = managed([liar, lambda ids, x: [upload(x - 0.1) for _ in ids]])
    for report in handler.reports:
        assert set(report.accepted) == set(range(1, 10))
        assert [client for client, _ in report.rejected] == [0]

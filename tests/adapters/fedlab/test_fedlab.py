"""FedLab's real StandalonePipeline and trainer around fedcore's handler."""

import random

import numpy as np
import pytest

pytest.importorskip("fedlab")

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline

from fedcore import Server, errors
from fedcore.adapters.fedlab import ServerHandler
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN

CLIENTS, LR = 4, 0.1


class Data:
    """Each client's own labels of a linear problem, in one minibatch."""

    def get_dataloader(self, client, batch_size):
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(12, 5, generator=generator)
        return [(inputs, torch.full((12,), client % 3))]


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


class Quiet(StandalonePipeline):
    def evaluate(self):
        pass


def simulate(handler, seed=0):
    random.seed(seed)
    trainer = SGDSerialClientTrainer(net(), CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=2, batch_size=12, lr=LR)
    Quiet(handler, trainer).main()
    return handler


def test_fedavg_is_fedlab_s_own():
    ours = simulate(ServerHandler(net(), 3, 0.5, "FedAvg", lr=LR))
    theirs = simulate(SyncServerHandler(net(), 3, 0.5))
    torch.testing.assert_close(ours.model_parameters, theirs.model_parameters)
    assert [len(report.heard) for report in ours.reports] == [2, 2, 2]


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_methods_that_fedlab_has_not_equal_the_server_by_itself(name):
    handler = simulate(ServerHandler(net(), 5, 0.5, name, lr=LR, steps=2))
    trainer = SGDSerialClientTrainer(net(), CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=2, batch_size=12, lr=LR)
    server = Server(name, trainer.model_parameters.numpy(), CLIENTS, lr=LR)
    for report in handler.reports:
        trainer.local_process([torch.from_numpy(server.x.copy())], report.heard)
        with server.open_round() as opened:
            for client, [y] in zip(report.heard, trainer.uplink_package, strict=True):
                opened.add(client, y.numpy(), steps=2)
    np.testing.assert_array_equal(handler.server.x, server.x)
    np.testing.assert_array_equal(handler.model_parameters.numpy(), server.x)


def test_a_run_goes_on_where_an_earlier_one_stopped(tmp_path):
    straight = simulate(ServerHandler(net(), 4, 1.0, "MIFA", lr=LR, steps=2))
    first = simulate(ServerHandler(net(), 2, 1.0, "MIFA", lr=LR, steps=2, store=f"mmap:{tmp_path}/rows"))
    first.server.close()
    second = simulate(ServerHandler(net(), 4, 1.0, "MIFA", lr=LR, steps=2, store=f"mmap:{tmp_path}/rows"))
    assert len(second.reports) == 2
    np.testing.assert_array_equal(second.server.x, straight.server.x)
    second.server.close()


def test_lying_clients_are_refused_by_name_and_the_round_goes_on():
    handler = ServerHandler(net(), 1, 1.0, "MIFA", lr=LR)
    handler.num_clients = 8
    x = handler.model_parameters
    y = x - 0.1

    def claims(*numbers):
        return torch.tensor(numbers)

    uploads = [
        [y, claims(0, 3, 10)],
        [y, claims(1, -5, 10)],
        [y, claims(2, 3, 10**18)],
        [torch.full_like(y, float("nan")), claims(3, 3, 10)],
        [y[:-1], claims(4, 3, 10)],
        [y.double().int(), claims(5, 3, 10)],
        [y, claims(99, 3, 10)],  # nobody
        [y, claims(0, 3, 10)],  # again
    ]
    assert [handler.load(upload) for upload in uploads] == [False] * 7 + [True]
    [report] = handler.reports
    assert report.heard == (0,)
    assert {client for client, _ in report.refused} == {1, 2, 3, 4, 5}
    assert handler.if_stop


def test_methods_whose_steps_need_more_are_refused():
    with pytest.raises(errors.RangeError, match="plain local steps"):
        ServerHandler(net(), 1, 1.0, "SCAFFOLD", lr=LR)


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_has_plain_steps_or_is_refused_by_name(name):
    if name in PLAIN:
        ServerHandler(net(), 1, 1.0, ORDERS[name], lr=LR)
    else:
        with pytest.raises(errors.RangeError, match="plain local steps"):
            ServerHandler(net(), 1, 1.0, ORDERS[name], lr=LR)


def test_a_rate_of_each_step_is_refused_by_name():
    with pytest.raises(errors.RangeError, match="lr: expected one rate for all steps of a round"):
        ServerHandler(net(), 1, 1.0, "FedAvg", lr=OF_STEPS)


@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC"])
def test_a_client_that_scales_its_upload_is_refused_by_name_and_the_others_result_stands(name, caplog):
    handler = ServerHandler(net(), 3, 1.0, name, lr=LR, steps=2, max_norm_ratio=30)
    handler.num_clients = 4
    server = Server(name, handler.model_parameters.numpy(), 4, lr=LR)
    for _ in range(3):
        clients = handler.sample_clients()
        with server.open_round() as opened:
            for client in clients:
                y = handler.model_parameters - 0.1 * (client + 1) * (1000 if client == 0 else 1)
                if client != 0:
                    opened.add(client, y.numpy(), steps=2)
                handler.load([y])
    assert [[client for client, _ in report.refused] for report in handler.reports] == [[0]] * 3
    lines = [
        record.message for record in caplog.records if "refused 1 (0) and heard 3: 1 x y: expected" in record.message
    ]
    assert len(lines) == 3
    np.testing.assert_array_equal(handler.server.x, server.x)

"""A process of FedLab's own network on loopback.

Rank 0 is the server, and writes its reports. Rank 1 has two clients and lies; rank 2 has three honest ones.
"""

import json

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork

from fedcore.adapters.fedlab import ServerHandler, ServerManager

PROCESSES, ROUNDS, LR, EPOCHS = 3, 2, 0.1, 2
CLIENTS = {1: 2, 2: 3}


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


class Data:
    """Each client's own labels of a linear problem, in one minibatch, by FedLab's number of the client."""

    def __init__(self, first):
        self.first = first

    def get_dataloader(self, client, batch_size):
        generator = torch.Generator().manual_seed(self.first + client)
        return [(torch.randn(12, 5, generator=generator), torch.full((12,), (self.first + client) % 3))]


def trainer_of(first, number, kind=SGDSerialClientTrainer):
    trainer = kind(net(), number)
    trainer.setup_dataset(Data(first))
    trainer.setup_optim(epochs=EPOCHS, batch_size=12, lr=LR)
    return trainer


class Liar(SGDSerialClientTrainer):
    """Sends uploads that claim other processes' clients, and then its own."""

    @property
    def uplink_package(self):
        honest = super().uplink_package
        claims = [[honest[0][0] + 7, torch.tensor([float(client), EPOCHS, 1])] for client in (2, 3, 4, -1)]
        return [*claims, *honest]


def main(rank, port, folder):
    network = DistNetwork(("127.0.0.1", port), PROCESSES, rank)
    if rank:
        trainer = trainer_of(2 * (rank - 1), CLIENTS[rank], Liar if rank == 1 else SGDSerialClientTrainer)
        PassiveClientManager(network, trainer).run()
        return
    handler = ServerHandler(net(), ROUNDS, 1.0, "MIFA", lr=LR, steps=EPOCHS)
    ServerManager(network, handler).run()
    accepted = [sorted(map(int, report.accepted)) for report in handler.reports]
    rejected = [[reason for _, reason in report.rejected] for report in handler.reports]
    (folder / "reports.json").write_text(json.dumps({"accepted": accepted, "rejected": rejected}))
    np.save(folder / "x.npy", handler.server.x)

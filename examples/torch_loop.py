"""Your own federated loop: FedAvg in one call, then MimiC in three lines."""

import copy

import torch

import fedcore

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
data = [(torch.randn(20 + 5 * i, 5), torch.full((20 + 5 * i,), i % 3)) for i in range(6)]  # one class each


def train(state, inputs, labels, lr=0.1, steps=4):
    local = copy.deepcopy(net)
    local.load_state_dict(state)
    optimizer = torch.optim.SGD(local.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(local(inputs), labels).backward()
        optimizer.step()
    return local.state_dict()


models = [train(net.state_dict(), *part) for part in data]
net.load_state_dict(fedcore.aggregate(models, weights=[len(part[1]) for part in data]))  # FedAvg

server = fedcore.Server(net, "MimiC", clients=6, lr=0.1)  # or MIFA, FedAvg, ...
for number in range(20):
    with server.open_round() as round:
        for client in (number % 6, (number + 1) % 6):  # the others are absent
            round.add(client, train(server.tensors(), *data[client]), steps=4)
server.load_into(net)
print(round.report.accepted, round.report.rejected)

"""Federated LoRA of a small transformer: the server has only the adapters and the head."""

import copy

import torch

import fedcore


class Lora(torch.nn.Module):
    def __init__(self, weight, rank=4):
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / 4)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight):
        return weight + self.up @ self.down


def train(net, tokens, labels):
    optimizer = torch.optim.SGD([tensor for tensor in net.parameters() if tensor.requires_grad], lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(tokens), labels).backward()
        optimizer.step()
    return net


torch.manual_seed(0)
block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
base = torch.nn.Sequential(torch.nn.Embedding(10, 16), block).requires_grad_(False)
net = torch.nn.Sequential(base, torch.nn.Flatten(), torch.nn.Linear(96, 2))
for layer in (block.linear1, block.linear2):
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Lora(layer.weight))
frozen = [name for name, tensor in net.named_parameters() if not tensor.requires_grad]
server = fedcore.Server(fedcore.Model(net, frozen=frozen), "FedAvg", clients=8, lr=0.3)
tokens = torch.randint(10, (16, 60, 6))  # eight clients and a test set
labels = (tokens.sum(dim=2) > 27).long()
for number in range(12):
    with server.open_round() as round:
        for client in (number % 8, (number + 3) % 8):  # the others are absent
            round.add(client, train(copy.deepcopy(net), tokens[client], labels[client]), steps=5)
    server.load_into(net)
right = net(tokens[8:].flatten(0, 1)).argmax(dim=1) == labels[8:].flatten()
print(f"test accuracy {right.float().mean():.2f}")
print(f"the server has {server.layout.n} of {sum(p.numel() for p in net.parameters())} numbers")

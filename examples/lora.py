"""Federated LoRA of a small transformer: each client trains the adapter and the head of one task."""

import copy

import torch

import fedcore

torch.manual_seed(0)


class Lora(torch.nn.Module):
    """A frozen linear layer and an adapter of rank 4."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 16)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.requires_grad_(False)
        self.block.linear1, self.block.linear2 = Lora(self.block.linear1), Lora(self.block.linear2)
        self.heads = torch.nn.ModuleDict({"large": torch.nn.Linear(16, 2), "zero": torch.nn.Linear(16, 2)})

    def forward(self, tokens, task):
        return self.heads[task](self.block(self.embed(tokens)).mean(dim=1))


def examples(task, count):
    tokens = torch.randint(10, (count, 6))
    return tokens, ((tokens.sum(dim=1) > 27) if task == "large" else (tokens == 0).any(dim=1)).long()


def train(task, tokens, labels, steps=5, lr=0.5):
    """Return the adapter and the task's head after some steps; the server ignores the frozen tensors."""
    local = copy.deepcopy(net)
    optimizer = torch.optim.SGD([tensor for tensor in local.parameters() if tensor.requires_grad], lr)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(local(tokens, task), labels).backward()
        optimizer.step()
    other = "heads.zero" if task == "large" else "heads.large"
    return {name: tensor for name, tensor in local.state_dict().items() if not name.startswith(other)}


net = Net()
frozen = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
model = fedcore.Model(net, partial={"large": "heads.large.*", "zero": "heads.zero.*"}, frozen=frozen)
server = fedcore.Server(model, "FedAvg", clients=8, lr=0.5)
tasks = ["large", "zero"] * 4
data = [examples(task, 60) for task in tasks]
for number in range(12):
    with server.open_round() as round:
        for client in ((3 * number + i) % 8 for i in range(3)):  # the others are absent
            round.add(client, train(tasks[client], *data[client]), steps=5)
    server.load_into(net)
for task in ("large", "zero"):
    tokens, labels = examples(task, 1000)
    right = (net(tokens, task).argmax(dim=1) == labels).float().mean()
    print(f"{task}: accuracy {right:.2f}, clients {round.report.groups[task].accepted} in the last round")
print(f"the server has {server.layout.n} of {sum(p.numel() for p in net.parameters())} numbers")

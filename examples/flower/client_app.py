import torch
from flwr.clientapp import ClientApp
from model import load_data, make_module
from torch.nn.functional import cross_entropy

from fedcore.adapters.flower import Task

app = ClientApp()


@app.train()
def train(message, context):
    task, module = Task.of(message), make_module()
    module.load_state_dict(task.arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=task.lr)
    inputs, labels = load_data(context.node_config["partition-id"])
    batches = torch.arange(len(labels)).split(16)
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(module(inputs[batch]), labels[batch]).backward()
        task.correct(module)  # SCAFFOLD's offset, FedProx's proximal term, ...: whatever the server's method asks for
        optimizer.step()
    return task.reply(module, steps=len(batches), examples=len(labels))

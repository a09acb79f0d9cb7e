import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from digits_app.model import load_data, make_module
from fedcore.adapters.flower import Task

app = ClientApp()


@app.train()
def train(message, context):
    task, module = Task.of(message), make_module()
    module.load_state_dict(task.arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=task.lr)
    inputs, labels = load_data(context.node_config)
    batches = torch.arange(len(labels)).split(16)
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(module(inputs[batch]), labels[batch]).backward()
        task.correct(module)  # adds the method's terms, such as SCAFFOLD's offset or FedProx's proximal term
        optimizer.step()
    return task.reply(module, steps=len(batches), examples=len(labels))


@app.evaluate()
def evaluate(message, context):
    module = make_module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context.node_config)
    right = (module(inputs).argmax(1) == labels).float().mean().item()
    metrics = MetricRecord({"accuracy": right, "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

"""The script of an NVFlare site without fedcore: it takes plain SGD steps on a third of the digits."""

import nvflare.client as flare
import torch

from fedcore.sim.data import divide, load
from fedcore.sim.nets import build

flare.init()
number = int(flare.get_site_name().removeprefix("site-")) - 1
digits = load("digits")
mine = divide(digits, "label-k", 3, seed=0, classes_per_client=4)[number]
inputs, labels = torch.from_numpy(digits.train_x[mine]), torch.from_numpy(digits.train_y[mine])
net = build("mlp", seed=0)
while flare.is_running() and (received := flare.receive()) is not None:
    net.load_state_dict(received.params)
    accuracy = (net(inputs).argmax(dim=1) == labels).float().mean().item()  # of the global model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = torch.randperm(len(labels)).split(32)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    steps = {"NUM_STEPS_CURRENT_ROUND": len(batches)}
    flare.send(flare.FLModel(params=net.state_dict(), metrics={"accuracy": accuracy}, meta=steps))

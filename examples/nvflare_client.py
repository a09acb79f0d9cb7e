"""The script of each NVFlare site: it trains on its part of the digits as the server's method requires."""

import sys

import nvflare.client as flare
import torch

from fedcore.adapters.nvflare import Trainer
from fedcore.algorithms.local_rules import minibatches
from fedcore.sim.data import divide, load
from fedcore.sim.nets import build

flare.init()
sites = int(sys.argv[1])
number = int(flare.get_site_name().removeprefix("site-")) - 1
digits = load("digits")
mine = divide(digits, "label-k", sites, seed=0, classes_per_client=4)[number]
inputs, labels = torch.from_numpy(digits.train_x[mine]), torch.from_numpy(digits.train_y[mine])
trainer = Trainer(build("mlp", seed=0))
while flare.is_running() and (received := flare.receive()) is not None:
    batches = minibatches(len(mine), 32, epochs=1, seed=0, round=received.current_round, client=number)
    flare.send(trainer.train(received, inputs, labels, batches))

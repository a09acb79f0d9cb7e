"""The model and the data of the apps in this folder."""

import numpy as np
import torch

from fedcore.sim.data import load


def make_module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def load_data(node_config):
    """Return the digits of a node, mostly of one class."""
    number, nodes = node_config["partition-id"], node_config.get("num-partitions", 10)
    digits = load("digits")
    part = np.array_split(np.argsort(digits.train_y, kind="stable"), nodes)[number]
    part = np.random.default_rng(number).permutation(part)
    return torch.from_numpy(digits.train_x[part]), torch.from_numpy(digits.train_y[part])

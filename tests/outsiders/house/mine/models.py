"""A user's model."""

from torch import nn


def line(bias: bool = True) -> nn.Module:
    return nn.Linear(3, 2, bias)

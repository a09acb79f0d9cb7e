"""A model with something the matter."""

import os

import torch
from torch import nn

from fedcore.errors import RangeError

MARK = 7.0
"""An input that begins with it is of the client that things happen to."""


class Odd(nn.Linear):
    """A linear model that refuses the marked client, or stops there for ever.

    Args:
        place: a folder, in which it says that it has stopped; "" to refuse.
    """

    def __init__(self, place=""):
        super().__init__(64, 10)
        self.place = place

    def forward(self, inputs):
        if self.training and (inputs[:, 0] == MARK).any():
            if not self.place:
                raise RangeError("made up: expected nothing, got a marked client")
            torch.save(1, os.path.join(self.place, "stopped"))
            os.read(os.pipe()[0], 1)
        return super().forward(inputs)

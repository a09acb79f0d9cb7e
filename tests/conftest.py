"""Torch on one thread: two threads of two libraries on two cores wait for each other more than they work."""

import torch

torch.set_num_threads(1)

"""Robust rules in torch, as byzfl computes them, on rows that are stacked before."""

import numpy as np
import torch


def torch_median(rows, _):
    """Return a function that computes the median of each coordinate."""
    stacked = torch.from_numpy(np.stack(rows))
    return lambda: stacked.median(dim=0).values.numpy()


def torch_trimmed_mean(rows, _):
    """Return a function that sorts each coordinate and averages all but the ends."""
    stacked = torch.from_numpy(np.stack(rows))
    return lambda: stacked.sort(dim=0).values[1:-1].mean(dim=0).numpy()


def torch_krum(rows, _):
    """Return a function that selects the row with the closest neighbors."""
    stacked = torch.from_numpy(np.stack(rows))

    def run():
        near = torch.cdist(stacked, stacked).pow(2).sort(dim=1).values[:, 1 : len(rows) - 2]
        return stacked[near.mean(dim=1).argmin()].numpy()

    return run

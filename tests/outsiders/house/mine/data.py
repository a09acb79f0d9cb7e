"""A user's data set: two clouds of points."""

import numpy as np

from fedcore.sim.data import Dataset, Source


def load(points: int = 200) -> Dataset:
    random = np.random.default_rng(7)
    labels = np.arange(points) % 2
    inputs = (random.normal(size=(points, 3)) + 4 * labels[:, None]).astype(np.float32)
    half = points // 2
    return Dataset("clouds", inputs[:half], labels[:half], inputs[half:], labels[half:], classes=2)


clouds = Source(load, "two clouds of points", shape=(3,), classes=2)

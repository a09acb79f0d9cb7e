"""Least squares over nodes with different minimisers, full-gradient steps on it, and a network of two nodes."""

import numpy as np

from fedcore import Limits, Network, Update

HALVES = np.full((2, 2), 0.5)


def vector(*numbers):
    return np.float32(numbers)


def pair(models=None, W=((0.75, 0.25), (0.25, 0.75)), **options):
    """Two nodes; by default they give a quarter to each other, have unequal weights, and choose their rates."""
    if models is None:
        options = {"lr": 0.5, "q": [1, 3], "limits": Limits(max_client_lr=100.0)} | options
    return Network([vector(0, 0)] * 2 if models is None else models, W, **{"lr": 0.1} | options)


class LeastSquares:
    """f_j(y) = |A_j y - b_j|^2 / 2, and f is the mean over the nodes."""

    def __init__(self, nodes, n, *, seed=0):
        rng = np.random.default_rng(seed)
        factors = [np.eye(n) + 0.3 * rng.normal(size=(n, n)) for _ in range(nodes)]
        self.H = [A.T @ A for A in factors]
        self.g = [A.T @ A @ rng.normal(size=n) for A in factors]
        self.nodes, self.n = nodes, n
        self.optimum = np.linalg.solve(np.mean(self.H, axis=0), np.mean(self.g, axis=0))

    def steps(self, node, y, E, lr):
        """y after E steps, in float64."""
        y = y.astype(np.float64)
        for _ in range(E):
            y = y - lr * (self.H[node] @ y - self.g[node])
        return y

    def updates(self, models, E, lr, nodes=None):
        """Updates of nodes (default: all) that did E steps from their models."""
        for j in range(self.nodes) if nodes is None else nodes:
            yield Update(j, self.steps(j, models[j], E, lr).astype(np.float32), steps=E)

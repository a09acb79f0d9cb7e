"""Rounds in torch and NumPy with a server's checks: each model's shape, finite numbers, and its distance from x.

The same half of the clients takes part in each round. Methods with rows sum in float64, as fedcore does.
"""

import math

import numpy as np
import torch


class Rounds:
    """The state of a method, and the checks of its rounds. Calling it runs a round and returns x."""

    def __init__(self, library, ys):
        self.library, self.ys = library, ys
        self.x, self.spare, self.c = (self.zeros() for _ in range(3))
        self.total = self.zeros("float64")

    def zeros(self, dtype="float32"):
        return self.library.zeros(len(self.ys[0]), dtype=getattr(self.library, dtype))

    def norm(self, v):
        return v.norm().item() if self.library is torch else math.sqrt(v @ v)

    def distances(self):
        """Yield i and x - y of each model once it is checked, in one reused array."""
        self.norms = []
        for i, y in enumerate(self.ys):
            if y.shape != self.x.shape:
                raise ValueError(f"model {i}: must have {len(self.x)} numbers")
            self.library.subtract(self.x, y, out=self.spare)
            self.norms.append(self.norm(self.spare))
            if not math.isfinite(self.norms[-1]):
                raise ValueError(f"model {i}: must be finite")
            yield i, self.spare

    def single(self, v):
        return v.float() if self.library is torch else v.astype(np.float32, copy=False)

    def moved(self, v):
        """Return x after the step x - v."""
        if not math.isfinite(self.norm(v)):
            raise ValueError("step: must be finite")
        self.x = self.x - self.single(v)
        return self.x


class FedAvg(Rounds):
    def __call__(self):
        acc = self.zeros()
        for _, h in self.distances():
            acc += h
        acc /= len(self.ys)
        return self.moved(acc)


class WithRows(Rounds):
    def __init__(self, library, ys):
        super().__init__(library, ys)
        self.rows = [self.zeros() for _ in ys]

    def keep(self, i):
        """Make x - y the row of a client, without a copy."""
        self.rows[i], self.spare = self.spare, self.rows[i]


class MIFA(WithRows):
    def __call__(self):
        for i, h in self.distances():
            self.total += h
            self.total -= self.rows[i]
            self.keep(i)
        return self.moved(self.total / (2 * len(self.ys)))


class MimiC(WithRows):
    def __call__(self):
        acc = self.zeros("float64")
        for i, h in self.distances():
            acc += h
            acc -= self.rows[i]
            acc += self.c
            self.keep(i)
        acc /= len(self.ys)
        self.c = self.single(acc)
        return self.moved(self.c)


class SCAFFOLD(WithRows):
    def __call__(self):
        acc = self.zeros("float64")
        for i, h in self.distances():
            h -= self.c
            acc += h
            self.rows[i] += h
        v, self.total = acc / len(self.ys) + self.c, self.total + acc
        self.c = self.single(self.total / (2 * len(self.ys)))
        return self.moved(v)


class Stacked(FedAvg):
    """FedAvg in torch with all models in one array, which needs their memory twice."""

    def __call__(self):
        h = self.x - torch.stack(self.ys)
        self.norms = h.norm(dim=1).tolist()
        if not all(map(math.isfinite, self.norms)):
            raise ValueError("models: must be finite")
        return self.moved(h.mean(0))


def by_tensor(models):
    """Return FedAvg in torch on models of named tensors, tensor by tensor."""
    rounds = [FedAvg(torch, [model[name] for model in models]) for name in models[0]]
    return lambda: torch.cat([each() for each in rounds])

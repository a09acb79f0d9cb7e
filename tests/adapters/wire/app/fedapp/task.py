"""The part that server, clients and the simulation share: softmax regression on the digits, in NumPy.

Each message starts a process, in which importing torch would take seconds.
"""

from pathlib import Path

import numpy as np

CLIENTS, BATCH, STEPS, SEED, LR = 5, 16, 6, 7, 0.5


def save_data(out):
    """Write the digits, sorted by class: each client has two classes."""
    from fedcore.sim.data import load

    digits = load("digits")
    order = np.argsort(digits.train_y, kind="stable")
    np.savez(Path(out) / "digits.npz", x=digits.train_x[order].reshape(-1, 64), y=digits.train_y[order])


def load_part(out, client):
    digits = np.load(Path(out) / "digits.npz")
    return tuple(np.array_split(digits[name], CLIENTS)[client] for name in ("x", "y"))


def initial_model():
    return {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}


def train_locally(model, examples, labels, *, round, client, lr, a, offset):
    """y <- y - lr (a grad(y) + offset), STEPS times; returns the model as a vector."""
    y = np.concatenate([model["weight"].reshape(-1), model["bias"]])
    weight, bias = y[:640].reshape(64, 10), y[640:]
    random = np.random.default_rng([SEED, round, client])
    for _ in range(STEPS):
        chosen = random.integers(len(labels), size=BATCH)
        scores = examples[chosen] @ weight + bias
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(BATCH), labels[chosen]] -= 1
        grad = np.concatenate([(examples[chosen].T @ p).reshape(-1), p.sum(axis=0)]) / np.float32(BATCH)
        y -= np.float32(lr) * (np.float32(a) * grad + (0 if offset is None else offset))
    return y

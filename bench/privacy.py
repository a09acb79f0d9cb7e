"""MNIST over epsilon: the accuracy of FedAvg with ``PrivateMean``, five seeds (minutes; FEDCORE_DATA_DIR: the data).

python -m bench.privacy docs/privacy.png

1,000 clients have 60 random examples each. Each takes part in a round with probability 0.1, and trains softmax
regression for one epoch. The budget is 100 rounds with delta = 1e-5. C and the rate were chosen on seeds that the table
does not use. The noises are those of ``fedcore privacy --delta 1e-5 --rounds 100 --rate 0.1``.
"""

import sys

import numpy as np

from fedcore import Server, Update, sampling
from fedcore.rules import PrivateMean
from fedcore.sim import data

CLIENTS, RATE, ROUNDS, BATCH, LR, CLIP = 1000, 0.1, 100, 20, 0.3, 0.3
NOISE = {"1": 3.942, "2": 2.248, "4": 1.386, "8": 0.9362, "no noise": None}


def accuracies(noise, seed, mnist, lr=LR, clip=CLIP) -> list[float]:
    """Return the test accuracy in % after each tenth round."""
    x, y, test_x, test_y = mnist
    dim, classes = x.shape[1], 10
    order = np.random.default_rng(seed).permutation(len(x))[: CLIENTS * 60].reshape(CLIENTS, 60)
    rule = PrivateMean(clip, noise, CLIENTS * RATE, RATE, ROUNDS) if noise else None
    chain = None if rule is None else [rule]
    server = Server(np.zeros((dim + 1) * classes, np.float32), "FedAvg", clients=CLIENTS, lr=lr, aggregation=chain)
    found = []
    for t in range(ROUNDS):
        cohort = sampling.bernoulli(CLIENTS, RATE, seed=seed, round=t)
        models = np.tile(server.x.reshape(1, dim + 1, classes), (len(cohort), 1, 1))
        for start in range(0, 60, BATCH):
            own = order[cohort, start : start + BATCH]
            scores = x[own] @ models[:, :-1] + models[:, -1:]
            p = np.exp(scores - scores.max(axis=2, keepdims=True))
            p /= p.sum(axis=2, keepdims=True)
            np.put_along_axis(p, y[own][..., None], np.take_along_axis(p, y[own][..., None], 2) - 1, 2)
            models[:, :-1] -= lr / BATCH * (x[own].transpose(0, 2, 1) @ p)
            models[:, -1] -= lr / BATCH * p.sum(axis=1)
        server.round([Update(i, models[k].ravel(), steps=3) for k, i in enumerate(cohort.tolist())])
        if t % 10 == 9:
            weights = server.x.reshape(dim + 1, classes)
            found.append(100 * float(np.mean((test_x @ weights[:-1] + weights[-1]).argmax(1) == test_y)))
    return found


def load():
    """Return MNIST's images in [0, 1], float32[examples, 784], and labels."""
    mnist = data.load("mnist", clients=1, seed=0)
    flat = [np.asarray(one, np.float32).reshape(len(one), -1) for one in (mnist.train_x, mnist.test_x)]
    low, high = flat[0].min(), flat[0].max()
    train, test = [(one - low) / (high - low) for one in flat]
    return train, np.asarray(mnist.train_y), test, np.asarray(mnist.test_y)


if __name__ == "__main__":
    import matplotlib.pyplot as plt

    mnist, results = load(), {}
    for epsilon, noise in NOISE.items():
        results[epsilon] = np.array([accuracies(noise, seed, mnist) for seed in range(5)])
        last = results[epsilon][:, -1]
        print(f"| {epsilon} | {noise or 0} | {last.mean():.1f} ± {last.std(ddof=1):.1f} |", flush=True)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for epsilon, curves in results.items():
        rounds, mean = range(10, ROUNDS + 1, 10), curves.mean(axis=0)
        axes.plot(rounds, mean, label=epsilon if epsilon == "no noise" else f"epsilon = {epsilon}")
        axes.fill_between(rounds, curves.min(axis=0), curves.max(axis=0), alpha=0.2)
    axes.set(xlabel="round", ylabel="test accuracy (%)")
    axes.legend()
    figure.savefig(sys.argv[1], dpi=120)

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A custom method
#
# This notebook implements a method from its paper's formula and compares it with FedAvg. The method is FedVARP
# (Jhunjhunwala et al., UAI 2022). fedcore includes it too, so we can compare the bits at the end.
#
# ## The formula
#
# A client takes plain local steps. The server computes h_i = (x - y_i) / (eta_i K_i), the mean of the client's
# gradients. It stores r_i, the h_i of the last round in which the client took part. The server steps along
#
# v = (1/S) sum over the cohort of (h_i - r_i) + (1/N) sum over all clients of r_i.
#
# ## The table
#
# As a table: the new row is h (`row`). An update adds the new row minus the old row to the sum A (`adds`). The server
# keeps a total T, the sum of all rows. A round ends with v = A / S + T / N and T' = T + A.

# %%
from dataclasses import dataclass

import numpy as np

import fedcore
from fedcore.algorithms import Algorithm, Cohort, Linear, Step, Terms
from fedcore.testing import check_algorithm


@dataclass(frozen=True)
class Mine(Algorithm):
    """v = A / S + T / N, T' = T + A."""

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    total_sums_rows = True
    total_is_whole = True

    def step(self, cohort: Cohort) -> Step:
        return Step(v=Linear(A=1 / cohort.S, T=1 / cohort.N), T=Linear(T=1, A=1))


# %% [markdown]
# ## An inconsistent table
#
# fedcore rejects an inconsistent table and explains how to fix it. This table uses a total that it does not keep:


# %%
@dataclass(frozen=True)
class Inconsistent(Mine):
    keeps_total = False


try:
    check_algorithm(Inconsistent())
except fedcore.errors.AlgorithmError as error:
    print(error)

# %% [markdown]
# ## Check the method
#
# `check_algorithm` runs about fifty small rounds with generated updates. It checks that
#
# - the bits do not depend on how updates arrive,
# - an aborted round changes nothing,
# - a saved server resumes with the same bits,
# - the total matches the rows.

# %%
check_algorithm(Mine())

# %% [markdown]
# ## Compare it with the paper
#
# A direct float64 implementation of the paper does not use the table. Each of ten clients has a quadratic loss, and
# three clients take part in each round:


# %%
def reference(optima, rounds, eta, steps):
    """FedVARP as in the paper, on f_i(x) = |x - a_i|^2 / 2."""
    clients, n = optima.shape
    x, r = np.zeros(n), np.zeros((clients, n))
    for t in range(rounds):
        cohort = np.random.default_rng(t).choice(clients, 3, replace=False)
        h = {}
        for i in cohort:
            y = x.copy()
            for _ in range(steps):
                y -= eta * (y - optima[i])
            h[i] = (x - y) / (eta * steps)
        v = np.mean([h[i] - r[i] for i in cohort], axis=0) + r.mean(axis=0)
        for i in cohort:
            r[i] = h[i]
        x = x - eta * steps * v
    return x


def with_server(algorithm, optima, rounds, eta, steps):
    """The same with a server."""
    clients, n = optima.shape
    server = fedcore.Server(np.zeros(n, np.float32), algorithm, clients=clients, lr=eta)
    for t in range(rounds):
        sent = server.broadcast(np.random.default_rng(t).choice(clients, 3, replace=False))
        with server.open_round() as round:
            for i in sent.ids:
                y = sent.x.astype(np.float64)
                for _ in range(steps):
                    y -= eta * (y - optima[i])
                round.add(i, y.astype(np.float32), steps=steps)
    return server.x


optima = np.random.default_rng(7).normal(size=(10, 50))
expected, actual = reference(optima, 200, 0.05, 4), with_server(Mine(), optima, 200, 0.05, 4)
print(f"largest difference after 200 rounds: {np.abs(expected - actual).max():.0e}")
built_in = with_server("FedVARP", optima, 200, 0.05, 4)
print("same bits as the built-in method:", np.array_equal(actual, built_in))

# %% [markdown]
# ## Compare it with FedAvg
#
# To use the method in an experiment from a notebook, register a name for it. A program can use `"module:Mine"` without
# registration.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt

from fedcore.sim.experiment import load_preset, load_results, run_experiment

fedcore.algorithms.REGISTRY["Mine"] = Mine
folder = Path(mkdtemp()) / "run"
changes = ["rounds=40", "seeds=[0]", 'algorithms=["FedAvg", "Mine"]', "participation.p=0.2"]
assert not run_experiment(load_preset("quickstart", changes), folder, jobs=0)

records = load_results(folder)
figure, axes = plt.subplots(figsize=(7, 3))
for name, rows in records.groupby("algorithm"):
    axes.plot(rows["round"], 100 * rows.accuracy, label=name, linewidth=1.2)
axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(30, 100))
axes.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Next steps
#
# [A custom method](../own-method.md) describes the whole table, with momentum, anchors and second vectors. The same
# class works with Flower, NVFlare and the other adapters, with folders and with shards, without any change.

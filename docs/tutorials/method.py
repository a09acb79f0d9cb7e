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
# # A method of one's own
#
# From a paper's formula to a picture beside FedAvg. The method is FedVARP (Jhunjhunwala et al., UAI 2022), which the
# package has too, so that we can compare bits at the end.
#
# ## The formula
#
# A client does plain local steps, and the server has h_i = (x - y_i) / (eta_i K_i), the mean of its gradients. It
# keeps r_i, the h_i of when the client was last heard, and steps along
#
# v = (1/S) sum over the cohort of (h_i - r_i) + (1/N) sum over all clients of r_i.
#
# ## The table
#
# In the words of a table: the row becomes h (`row`); an update adds the new row less the old one (`adds`); a total T
# is kept, the sum of all rows; and a round ends with v = A / S + T / N and T' = T + A, where A is what the updates
# added.

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
# ## A first mistake
#
# A table that contradicts itself is refused, with the way out. Here the line that keeps the total was forgotten:


# %%
@dataclass(frozen=True)
class Forgotten(Mine):
    keeps_total = False


try:
    check_algorithm(Forgotten())
except fedcore.errors.AlgorithmError as error:
    print(error)

# %% [markdown]
# ## Its promises
#
# `check_algorithm` plays some fifty small rounds with made-up replies: the bits must not depend on how replies
# arrive, an aborted round must change nothing, a saved server must go on as one that was not, and the total must
# follow the rows.

# %%
check_algorithm(Mine())

# %% [markdown]
# ## Is it the paper's?
#
# That is for a transcription in float64, which knows nothing of tables. Ten clients on a quadratic each, three of
# them in a round:


# %%
def transcription(optima, rounds, eta, steps):
    """FedVARP as the paper has it, on f_i(x) = |x - a_i|^2 / 2."""
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


def served(algorithm, optima, rounds, eta, steps):
    """The same by a server."""
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
due, got = transcription(optima, 200, 0.05, 4), served(Mine(), optima, 200, 0.05, 4)
print(f"largest difference after 200 rounds: {np.abs(due - got).max():.0e}")
print("the package's own has the same bits:", np.array_equal(got, served("FedVARP", optima, 200, 0.05, 4)))

# %% [markdown]
# ## Beside FedAvg
#
# By its name in the registry it runs in experiments. (In a program it would be `"module:Mine"`, and nothing need be
# registered.)

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt

from fedcore.experiment import load_preset, read_records, run_experiment

fedcore.algorithms.REGISTRY["Mine"] = Mine
folder = Path(mkdtemp()) / "run"
changes = ["rounds=40", "seeds=[0]", 'algorithms=["FedAvg", "Mine"]', "participation.p=0.2"]
assert not run_experiment(load_preset("quickstart", changes), folder, jobs=0)

records = read_records(folder)
figure, axes = plt.subplots(figsize=(7, 3))
for name, rows in records.groupby("algorithm"):
    axes.plot(rows["round"], 100 * rows.accuracy, label=name, linewidth=1.2)
axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(30, 100))
axes.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## And then
#
# [A method of your own](../own-method.md) has the whole table, with momentum, anchors and second vectors. The same
# class runs under Flower, NVFlare and the others, on files, and in shards, without another line.

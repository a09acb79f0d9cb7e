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
# # Client dropouts
#
# Thirty clients hold two of the ten digits each, and a client is there in one round out of ten. This notebook looks
# at what that does to plain averaging, and at what two methods that remember do about it. It takes some seconds.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np

import fedcore
from fedcore.experiment import load_preset, read_records, run_experiment
from fedcore.simulation import participation

folder = Path(mkdtemp())

# %% [markdown]
# ## Who is there
#
# A pattern of participation is a function of the seed and the round alone, so that every method below sees the same
# clients.

# %%
pattern = participation.Bernoulli(30, 0.1, seed=0, first_round="all")
there = np.zeros((30, 60))
for t in range(60):
    there[pattern.active(t).clients, t] = 1
print("clients in rounds 1 to 10:", [len(pattern.active(t)) for t in range(1, 11)])

figure, axes = plt.subplots(figsize=(7, 2.6))
axes.imshow(there, cmap="Greys", aspect="auto", interpolation="nearest")
axes.set(xlabel="round", ylabel="client", title="Who takes part")
figure.tight_layout()
plt.show()

# %% [markdown]
# A digit is missing from a round whenever all that hold it are away, and the next round may lack another one.
#
# ## Three methods on the same clients
#
# The preset `quickstart` is this setting. `jobs=0` runs its trials in this process, one after another: for a
# notebook, whose own classes no other process knows.

# %%
experiment = load_preset("quickstart", ["rounds=40", "seeds=[0]"])
failed = run_experiment(experiment, folder / "run", jobs=0)
assert not failed
records = read_records(folder / "run")
last = records[records["round"] >= 30].groupby("algorithm").accuracy
print((100 * last.agg(["mean", "std"])).round(1))

# %%
figure, axes = plt.subplots(figsize=(7, 3.2))
for name, rows in records.groupby("algorithm"):
    axes.plot(rows["round"], 100 * rows.accuracy, label=name, linewidth=1.2)
axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(30, 100))
axes.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %% [markdown]
# FedAvg is pulled to and fro by whoever is there. MIFA averages what each client wanted when it was last heard, so
# that the absent count as they were. MimiC corrects each reply by what the client's direction lacked of the mean,
# when it was last heard.
#
# ## The same by hand
#
# Underneath is a loop that you could write around clients of your own. The engine trains; the server averages,
# remembers and corrects.

# %%
import torch

from fedcore.simulation import data
from fedcore.simulation.in_process import InProcess

torch.manual_seed(0)
digits = data.load("digits")
parts = data.divide(digits, "shards", 30, seed=0, shards_per_client=2, distinct_classes=True)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
engine = InProcess(net, digits, parts, batch=16, epochs=5, seed=0)

server = fedcore.Server(engine.initial, "MimiC", clients=30, lr=0.2)
for t in range(20):
    active = pattern.active(t)
    report = server.round(engine.updates(server.broadcast(active.clients), active))
print(report)
print(f"accuracy {engine.evaluate(server.x).accuracy:.3f}")

# %% [markdown]
# ## And then
#
# - Make the clients rarer: `load_preset("quickstart", ["participation.p=0.05"])`.
# - Take other methods: `'algorithms=["FedAvg", "FedVARP", "SCAFFOLD"]'`. [Which method](../methods.md) says which are
#   meant for what.
# - The papers' own settings: `fedcore list`, and [the papers' tables](../papers.md).

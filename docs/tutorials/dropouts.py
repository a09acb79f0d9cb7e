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
# Thirty clients hold two of the ten digits each, and each client takes part in about one round in ten. This notebook
# shows how this affects FedAvg, and how MIFA and MimiC handle it by storing each client's last update. It runs in a
# few seconds.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np

import fedcore
from fedcore.sim import participation
from fedcore.sim.experiment import load_preset, load_results, run_experiment

folder = Path(mkdtemp())

# %% [markdown]
# ## Participation
#
# A participation pattern is a pure function of the seed and the round. All methods below therefore see the same
# clients.

# %%
pattern = participation.Bernoulli(30, 0.1, seed=0, first_round="all")
present = np.zeros((30, 60))
for t in range(60):
    present[pattern.active(t).clients, t] = 1
print("clients in rounds 1 to 10:", [len(pattern.active(t)) for t in range(1, 11)])

figure, axes = plt.subplots(figsize=(7, 2.6))
axes.imshow(present, cmap="Greys", aspect="auto", interpolation="nearest")
axes.set(xlabel="round", ylabel="client", title="Participation")
figure.tight_layout()
plt.show()

# %% [markdown]
# A digit is missing from a round if all clients that hold it are absent. The next round may lack a different digit.
#
# ## Three methods on the same clients
#
# The preset `quickstart` has this setting. `jobs=0` runs its trials one after another in this process. Use it in
# notebooks, because other processes have no access to classes that a notebook defines.

# %%
experiment = load_preset("quickstart", ["rounds=40", "seeds=[0]"])
failed = run_experiment(experiment, folder / "run", jobs=0)
assert not failed
records = load_results(folder / "run")
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
# With FedAvg the model drifts towards the clients of the last round. MIFA averages the last update of every client, so
# absent clients count with their last update. MimiC corrects each update by the difference between the mean direction
# and the client's direction in the round in which the client last took part.
#
# ## The same loop by hand
#
# The experiment runs the following loop, which you could also write around your own clients. The engine trains the
# clients; the server averages and corrects their updates.

# %%
import torch

from fedcore.sim import data
from fedcore.sim.in_process import InProcess

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
# ## Next steps
#
# - Reduce participation: `load_preset("quickstart", ["participation.p=0.05"])`.
# - Try other methods: `'algorithms=["FedAvg", "FedVARP", "SCAFFOLD"]'`. [Which method](../methods.md) explains which
#   method fits which problem.
# - Run the papers' settings: see `fedcore list` and [the papers' tables](../papers.md).

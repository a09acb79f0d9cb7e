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
# # Non-IID data and client drift
#
# This notebook is for students. It explains two problems of federated learning, and how to measure them. You need
# `make quickstart`, and an idea of what gradient descent is. It runs in a few seconds. Exercises with answers are at
# the end.
#
# In federated learning, clients keep their data. In each round the server sends the model x to some clients. Each
# client trains it on its own data and returns its model y. FedAvg makes the mean of these models the new x.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedcore
from fedcore.sim import data
from fedcore.sim.experiment import load_preset, load_results, run_experiment

# %% [markdown]
# ## Non-IID data
#
# Data are IID across clients (independent and identically distributed) if each client's examples are a random sample of
# all examples. Then each client's data look like everybody's. In practice they do not: a phone has its owner's photos,
# a hospital its region's patients. Such data are non-IID.
#
# A partition divides a data set among clients. Here are three partitions of the digits among ten clients. In a
# Dirichlet partition, a small `alpha` gives each client few labels.

# %%
digits = data.load("digits")
partitions = {
    "IID": data.divide(digits, "iid", 10, seed=0),
    "Dirichlet, alpha = 1": data.divide(digits, "dirichlet", 10, seed=0, alpha=1.0),
    "Dirichlet, alpha = 0.1": data.divide(digits, "dirichlet", 10, seed=0, alpha=0.1),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True)
for panel, (name, parts) in zip(axes, partitions.items(), strict=True):
    counts = np.array([np.bincount(digits.train_y[part], minlength=10) for part in parts])
    panel.imshow(counts / counts.sum(axis=1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
    panel.set(title=name, xlabel="digit")
    labels = (counts / counts.sum(axis=1, keepdims=True) > 0.05).sum(axis=1).mean()
    print(f"{name}: {labels:.1f} digits have more than 5 % of a client's examples")
axes[0].set_ylabel("client")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Client drift
#
# A client takes several steps before it replies, because communication is slow. These steps go towards the minimum of
# the client's own loss. With non-IID data, the clients' minima differ, and the mean of their models can be far from the
# minimum of the mean loss. This is client drift.
#
# An example with one number x and two clients shows it. Client 1 has the loss x^2 / 2, with its minimum at 0. Client 2
# has 10 (x - 1)^2 / 2, with its minimum at 1. The mean loss is minimal at 10 / 11 = 0.909, because client 2's loss is
# ten times as steep.

# %%
STEEPNESS, MINIMUM = (1.0, 10.0), (0.0, 1.0)


def gradient(client, y):
    return STEEPNESS[client] * (y - MINIMUM[client])


def train(method, local_steps, rounds=400, lr=0.05):
    server = fedcore.Server(np.zeros(1, np.float32), method, clients=2, lr=lr)
    for _ in range(rounds):
        sent = server.broadcast([0, 1])
        with server.open_round() as round:
            for client in sent.ids:
                y = sent.x.copy()
                for _ in range(local_steps):
                    y -= lr * (sent.a * gradient(client, y) + sent.offset(client))
                round.add(client, y, steps=local_steps)
    return float(server.x[0])


for steps in (1, 5, 50):
    print(f"FedAvg, {steps:2} local steps: x = {train('FedAvg', steps):.3f}")

# %% [markdown]
# With one local step, FedAvg is gradient descent on the mean loss and finds 0.909. With more steps, it stops elsewhere:
# each client almost reaches its own minimum, and the mean of 0 and 1 is 0.5. More rounds do not help.
#
# SCAFFOLD estimates for each client the difference between its gradient and the mean gradient, and subtracts it in each
# local step (`sent.offset`). The steps of both clients then point to the common minimum:

# %%
print(f"SCAFFOLD, 5 local steps: x = {train('SCAFFOLD', 5):.3f}")

# %% [markdown]
# ## Both problems on the digits
#
# The preset `quickstart` trains a small network on the digits with 30 clients. Each client has two of the ten digits
# and takes part in about a tenth of the rounds. For the second run we change only the partition. All runs start from
# the same model.

# %%
folder = Path(tempfile.mkdtemp())
figure, axes = plt.subplots(figsize=(7, 3.2))
for name, partition in {
    "two digits": [],
    "IID": ['partition={name="iid", clients=30}'],
}.items():
    experiment = load_preset("quickstart", ["rounds=40", "seeds=[0]", 'algorithms=["FedAvg", "MimiC"]', *partition])
    run = folder / name.replace(" ", "")
    assert not run_experiment(experiment, run, jobs=0)
    for method, rows in load_results(run).groupby("algorithm"):
        axes.plot(rows["round"], 100 * rows.accuracy, label=f"{method}, {name}", linewidth=1.2)
        last = 100 * rows.accuracy[rows["round"] >= 30]
        print(f"{method}, {name}: {last.mean():.0f} % in the last ten rounds, standard deviation {last.std():.1f}")
axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, 100))
axes.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %% [markdown]
# With IID data, it hardly matters which clients take part. With two digits per client, FedAvg's accuracy jumps: the
# model drifts towards the digits of the last round's clients. MimiC stores a correction for each client and is
# steadier. [Client dropouts](dropouts.md) continues from here.
#
# ## Exercises
#
# 1. With K local steps of rate lr, client i moves its model towards its minimum m_i by the factor w_i = 1 - (1 - lr
#    a_i)^K, where a_i is its steepness. At which x does FedAvg stop? Compare your formula with the numbers above.
# 2. Does a smaller rate reduce the drift? Try `train("FedAvg", 50, lr=0.001)`.
# 3. Give both clients the same steepness. Does FedAvg drift? Are the data IID then?
# 4. In the last experiment, let all clients take part: add `"participation.p=1.0"`. Does MimiC still help?
# 5. How similar must the clients be for FedAvg? Try `'partition={name="dirichlet", clients=30, alpha=0.1}'`, and larger
#    values of alpha, with `seeds=[0, 1, 2]`.

# %% [markdown]
# ## Answers
#
# 1. FedAvg stops where the mean step is zero, at x = sum w_i m_i / sum w_i:

# %%
for steps in (1, 5, 50):
    weights = [1 - (1 - 0.05 * steepness) ** steps for steepness in STEEPNESS]
    print(f"{steps:2} local steps: x = {np.dot(weights, MINIMUM) / sum(weights):.3f}")

# %% [markdown]
# 2. Yes: w_i is about lr a_i K if lr is small, and the weights are then as in the mean loss. But training is slower.
# 3. It does not drift: both w_i are equal, so x = 0.5, which is also the minimum of the mean loss. The data are not
#    IID, because the clients' minima differ. Non-IID data are necessary for drift, but not sufficient.
# 4. Hardly. If no client is absent, MimiC's corrections cancel: it corrects for absent clients, not for drift. A small
#    difference remains, because FedAvg weights clients by their examples, and MimiC divides by their steps.
# 5. Compare differences between values of alpha with the spread over seeds before you name a number. `fedcore report`
#    prints paired differences with 95 % intervals.

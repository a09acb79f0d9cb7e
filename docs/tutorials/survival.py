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
# # A server that survives
#
# A server whose state is in a folder is killed in the midst of its work, goes on, refuses a liar, and takes a round
# back.

# %%
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

import fedcore
from fedcore import Storage
from fedcore.rules import RejectLong

folder = Path(mkdtemp())
state = folder / "state"

# %% [markdown]
# ## The program
#
# It makes a server, or goes on with the one that is there. Two hundred clients pull at a model of 10,000 numbers;
# each round hears twenty.

# %%
program = folder / "serve.py"
program.write_text(
    """
import sys
from pathlib import Path
import numpy as np
import fedcore
from fedcore import Storage

state, rounds = Path(sys.argv[1]), int(sys.argv[2])
if state.exists():
    server = fedcore.Server.load(state)
else:
    x0 = np.zeros(10_000, np.float32)
    server = fedcore.Server(x0, "MimiC", clients=200, lr=0.1, storage=Storage(state, keep_previous=True))
with server:
    while server.round_number < rounds:
        random = np.random.default_rng(server.round_number)
        with server.open_round() as round:
            for client in random.choice(200, 20, replace=False).tolist():
                y = server.x - np.float32(0.1) * (server.x - np.float32(client))
                round.add(client, y, steps=1)
        print("round", round.report.round, flush=True)
"""
)


def serve(rounds, place=state):
    return subprocess.Popen([sys.executable, program, place, str(rounds)], stdout=subprocess.PIPE, text=True)


# %% [markdown]
# ## Killed
#
# `kill -9` as soon as it has told of five rounds, in the midst of another one.

# %%
with serve(1000) as running:
    for _ in range(5):
        running.stdout.readline()
    running.send_signal(signal.SIGKILL)
left = fedcore.Server.load(state, storage=Storage(medium="ram"))
print("rounds are there:", left.round_number >= 5, "and clients are remembered:", len(left.store) > 20)

# %% [markdown]
# ## Going on
#
# The same command again. A run that was killed and went on has the bits of one that was not:

# %%
rounds = left.round_number + 10
for place in (state, folder / "straight"):
    with serve(rounds, place) as running:
        running.communicate()
killed, straight = (fedcore.Server.load(each, storage=Storage(medium="ram")) for each in (state, folder / "straight"))
print("the same bits:", killed.x.tobytes() == straight.x.tobytes())

# %% [markdown]
# ## A liar
#
# Numbers that are not finite are refused always, and updates that are far longer than the others where that is asked
# for.

# %%
limited = fedcore.Server(np.zeros(100, np.float32), "MIFA", clients=10, lr=0.1, aggregation=[RejectLong(10)])
with limited.open_round() as round:
    for client in range(10):
        delta = np.full(100, {3: 1e6, 4: np.nan}.get(client, 1), np.float32)
        round.add(client, value=delta, kind="delta", steps=1)
for client, reason in round.report.rejected:
    print(client, reason)

# %% [markdown]
# ## One round back
#
# What is finite and not too long is believed. If that was a mistake, the folder can take its last round back, as if
# it had never been:

# %%
with fedcore.Server.load(state) as server:
    before = server.x.copy()
    with server.open_round() as round:
        round.add(0, server.x + 50, steps=1)
    print("moved by", float(np.abs(server.x - before).max()))

undone = subprocess.run(
    [sys.executable, "-m", "fedcore", "store", "undo", state], capture_output=True, text=True, check=True
)
print(undone.stdout.strip().replace(str(folder), "..."))
print("as before:", np.array_equal(fedcore.Server.load(state, storage=Storage(medium="ram")).x, before))

# %% [markdown]
# ## And then
#
# [Operations](../operations.md) has the rest of what an operator meets: full disks, ghosts, export and backups while
# it runs.

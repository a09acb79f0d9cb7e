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
# # A server that survives a crash
#
# This notebook kills a server during a round, resumes it from its folder, rejects updates of dishonest clients, and
# rolls a round back.

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
# The program creates a server or resumes an existing one. It has two hundred clients, a model of 10,000 numbers, and
# twenty clients in each round.

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
x0 = np.zeros(10_000, np.float32)
with fedcore.Server.open(Storage(state, keep_previous=True), x0, "MimiC", clients=200, lr=0.1) as server:
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
# ## Kill it
#
# Send SIGKILL (`kill -9`) as soon as the program has reported five rounds, during another round.

# %%
with serve(1000) as running:
    for _ in range(5):
        running.stdout.readline()
    running.send_signal(signal.SIGKILL)
left = fedcore.Server.load(state, storage=Storage(medium="ram"))
print("rounds are saved:", left.round_number >= 5, "and rows are saved:", len(left.store) > 20)

# %% [markdown]
# ## Resume it
#
# Run the same command again. The resumed run has the same bits as an uninterrupted one:

# %%
rounds = left.round_number + 10
for place in (state, folder / "uninterrupted"):
    with serve(rounds, place) as running:
        running.communicate()
resumed, uninterrupted = (
    fedcore.Server.load(each, storage=Storage(medium="ram")) for each in (state, folder / "uninterrupted")
)
print("the same bits:", resumed.x.tobytes() == uninterrupted.x.tobytes())

# %% [markdown]
# ## Dishonest clients
#
# The server always rejects updates with NaN or infinite numbers. With the rule `RejectLong`, it also rejects updates
# that are much longer than the others.

# %%
limited = fedcore.Server(np.zeros(100, np.float32), "MIFA", clients=10, lr=0.1, aggregation=[RejectLong(10)])
with limited.open_round() as round:
    for client in range(10):
        delta = np.full(100, {3: 1e6, 4: np.nan}.get(client, 1), np.float32)
        round.add(client, value=delta, kind="delta", steps=1)
for client, reason in round.report.rejected:
    print(client, reason)

# %% [markdown]
# ## Roll back a round
#
# The server accepts a wrong update of normal length. `fedcore store undo` rolls the last round back:

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
# ## Next steps
#
# [Operations](../operations.md) covers full disks, inactive clients, and exports and backups of a running server.

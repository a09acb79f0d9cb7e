"""The README's example: ten clients, each with another optimum; most are absent in each round."""

import numpy as np

import fedcore

rng = np.random.default_rng(0)
optimum = rng.normal(size=(10, 1000)).astype(np.float32)

server = fedcore.Server(np.zeros(1000, np.float32), "MimiC", clients=10, lr=0.1)
for _ in range(300):
    present = np.flatnonzero(rng.random(10) < 0.3)
    sent = server.broadcast(present)
    with server.open_round() as round:
        for client in sent.ids:
            y = sent.x - sent.lr * (sent.x - optimum[client])
            round.add(client, y, steps=1)

print("distance to the mean of all clients:", np.abs(server.x - optimum.mean(axis=0)).max().round(3))

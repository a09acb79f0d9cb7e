"""Two edges and one server: each edge sums the updates of its clients and sends one partial sum to the server.

python examples/edges.py
"""

import numpy as np

import fedcore
from fedcore import Compute

N, ROUNDS, LR = 1_000, 5, 0.1
CLIENTS = {"north": range(6), "south": range(6, 10)}


def train(client, x):
    """Run some local steps of a client on its quadratic loss, in place of a framework."""
    target = np.random.default_rng(client).normal(size=N).astype(np.float32)
    for _ in range(5):
        x = x - np.float32(LR) * (x - target)
    return x


x0 = np.zeros(N, np.float32)
server = fedcore.Server(x0, "FedAvg", clients=10, lr=LR, compute=Compute(accumulator="exact"))
direct = fedcore.Server(x0, "FedAvg", clients=10, lr=LR, compute=Compute(accumulator="exact"))
server.require_partial_sums()
edges = {name: fedcore.EdgeAggregator(x0, "FedAvg", clients, lr=LR) for name, clients in CLIENTS.items()}
for t in range(ROUNDS):
    messages, sent = {}, server.broadcast(range(10)).x
    for name, edge in edges.items():
        with edge.open_round(sent, round=t) as own:  # over a network: pass the received x and t
            for client in edge.clients:
                own.add(client, train(client, sent), steps=5, examples=100 + client)
            messages[name] = own.partial_sum().to_bytes()
    with server.open_round() as round:
        for name in reversed(messages):
            round.add_partial_sum(messages[name], name, clients=CLIENTS[name])
    with direct.open_round() as round:
        for client in range(10):
            round.add(client, train(client, direct.x), steps=5, examples=100 + client)
same = "the same bits as" if server.x.tobytes() == direct.x.tobytes() else "NOT the bits of"
print(f"{ROUNDS} rounds, {len(edges)} edges: {same} one server")

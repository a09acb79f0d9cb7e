"""Ten hospitals, of which two drop out: the server learns the sum of their updates, and no single one.

python examples/private_round.py
"""

import numpy as np

import fedcore
from fedcore import Compute, Limits
from fedcore.secure import Encoding, SecureClient, SecureServer

N, ROUNDS, LR, CLIENTS = 1_000, 5, 0.1, range(10)
DROPS = {"shares": {3}, "masked": {7}}  # the phase before whose end a hospital loses its connection


def train(client, x):
    """Run some local steps of a client on its quadratic loss, in place of a framework."""
    target = np.random.default_rng(client).normal(size=N).astype(np.float32)
    for _ in range(5):
        x = x - np.float32(LR) * (x - target)
    return x


server = fedcore.Server(
    *(np.zeros(N, np.float32), "FedAvg", CLIENTS),
    lr=LR,
    limits=Limits(max_norm=100, max_examples=1_000, max_steps=10),
    compute=Compute(accumulator="exact"),
)
for t in range(ROUNDS):
    secure = SecureServer(CLIENTS, Encoding.of(server, clients=len(CLIENTS)), min_clients=7)
    hospitals = {client: SecureClient(min_clients=5) for client in CLIENTS}
    while secure.messages:
        for client, message in secure.messages.items():  # over a network: send it, and pass the answer to receive
            if client in DROPS.get(secure.phase, ()):
                continue
            own, words = hospitals[client], None
            if own.needs_words(message):
                words = own.encoding.encode(server.x, train(client, server.x), steps=5, examples=100 + client)
            secure.receive(client, own.answer(message, words))
        secure.close_phase()
    with server.open_round() as round:
        round.add_partial_sum(secure.partial_sum(server), "masked sum")
    print(f"round {t}: the sum of {len(round.report.accepted)} hospitals, {round.report.weights.sum():.0f} examples")

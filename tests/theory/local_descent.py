"""Full-gradient local descent of a few clients a round, and its gradient diversity."""

import numpy as np

import fedcore
from fedcore import algorithms
from tests.theory.quadratics import server_of

N, n, E, DRAWN = 6, 10, 2, 3
Q = np.full(N, 1 / N)


def diversity(clients, x):
    """Lambda(x, q) (eq. 7) at the gradients of all clients."""
    gradients = clients.gradient(range(N), x)
    return float(np.sum(Q[:, None] * gradients**2) / np.sum((Q @ gradients) ** 2))


def hear(server, clients, draws, steps=E, noise=None):
    """A round of the drawn clients; a client that is drawn twice works once."""
    ids, counts = np.unique(draws, return_counts=True)
    server.round(clients.updates(server.broadcast(ids), steps, noise, counts))


def descend(clients, lr, rounds, seed):
    """LFGD: f and Lambda at x_0, x_E, x_2E, ...; the clients of a round are drawn with replacement."""
    server = server_of(algorithms.LocalDescent(full_gradient=True), clients, lr)
    values, lambdas = [clients.value(server.x)], [diversity(clients, server.x)]
    for t in range(rounds):
        hear(server, clients, fedcore.sampling.with_replacement(Q, DRAWN, seed=seed, round=t))
        values.append(clients.value(server.x))
        lambdas.append(diversity(clients, server.x))
    return np.array(values), np.array(lambdas)

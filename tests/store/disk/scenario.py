"""The steps of a server on a failing disk: rounds, added and removed clients, compactions, copies and a restart."""

import hashlib

import numpy as np

from fedcore import Server, Update, algorithms
from tests.kit import with_history
from tests.server.stopping import immutable_copy

METHODS = {"MIFA": algorithms.MIFA(wait=False), "MimiC": "MimiC"}
N, CLIENTS = 2000, 5
STEPS = "rrdrcarsrCrrdSrcr"  # see ``step``


def digest(server):
    """Of all that lasts."""
    number, x, total, rows, shares = immutable_copy(server)
    ordered = sorted(rows.items(), key=lambda row: str(row[0]))
    return hashlib.blake2b(repr((number, x, total, ordered, shares)).encode(), digest_size=8).hexdigest()


def a_round(server):
    t = server.round_number
    accepted = [client for i, client in enumerate(sorted(server.clients, key=str)) if (i + t) % 3]
    return server.round([Update(c, server.x + np.float32(1 + t + i), 1) for i, c in enumerate(accepted)])


def step(server, letter, folder):
    """One step; returns the server."""
    match letter:
        case "r":
            a_round(server)
        case "d":
            server.remove_client(sorted(server.clients, key=str)[1])
        case "a":
            server.add_clients([f"client {server.round_number}", f"and {server.round_number}"])
        case "c":
            server.compact()
        case "s" | "S":
            server.save(folder / "copy")
        case "C":
            server.close()
            return Server.load(folder / "run")
    return server


def play(folder, method, acknowledge):
    """All steps; after each, ``acknowledge`` gets the digests of the server and the copy."""
    method = with_history(METHODS[method], 3)
    server = Server(np.zeros(N, np.float32), method, CLIENTS, lr=0.1, storage=folder / "run")
    a_round(server)
    copy = None
    acknowledge(digest(server), copy)
    for letter in STEPS:
        server = step(server, letter, folder)
        copy = digest(server) if letter in "sS" else copy
        acknowledge(digest(server), copy)
    server.close()

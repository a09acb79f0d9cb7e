"""Runs of a masked sum in this process, for tests."""

import json

import numpy as np

from fedcore.errors import FedcoreError
from fedcore.secure import Encoding, SecureClient, SecureServer, identity_of
from fedcore.secure import messages as wire
from fedcore.secure.primitives import digest_of

PHASES = ("keys", "shares", "masked", "opened")
PLAIN = dict(weights="examples", eta=None, max_norm=100.0, max_examples=1000, max_steps=10)


def encoding_of(clients, n=5):
    model = digest_of(np.zeros(n, np.float32))
    return Encoding(clients=clients, n=n, parameters=n, model=model, **PLAIN)


def random_words(encoding, count, seed=0):
    """Return int64[count, words] of encoded updates."""
    rng = np.random.default_rng(seed)
    x = np.zeros(encoding.n, np.float32)
    ys = (rng.normal(size=(count, encoding.n)) * 10 / encoding.n**0.5).astype(np.float32)
    numbers = rng.integers(1, [11, 1001], (count, 2)).tolist()
    words = [encoding.encode(x, y, steps=k, examples=n) for y, (k, n) in zip(ys, numbers, strict=True)]
    return np.array(words).view(np.int64)


def spoiled_words(message):
    """Return random masked words."""
    return message[: wire.HEADER.size] + np.random.default_rng(7).bytes(len(message) - wire.HEADER.size)


def spoiled_digest(message):
    """Return shares with a wrong digest of the seed."""
    return message[: wire.HEADER.size] + bytes(wire.HASH) + message[wire.HEADER.size + wire.HASH :]


def spoiled_shares(message):
    """Return shares that no holder can decrypt."""
    digest, shares = wire.read_shares(memoryview(message)[wire.HEADER.size :])
    shares = {i: one._replace(sealed=bytes(len(one.sealed))) for i, one in shares.items()}
    return wire.write(wire.SHARES, message[16:32], shares, digest)


LIES = [(wire.MASKED, spoiled_words), (wire.SHARES, spoiled_digest), (wire.SHARES, spoiled_shares)]
"""Lies of a client: the kind of its message, and the change. The server can name the sender of all but the first."""


class Lie:
    """A client that changes its first message of a kind."""

    def __init__(self, lie):
        self.kind, self.change = lie

    def __call__(self, message):
        if message[32] != self.kind:
            return message
        self.kind = None
        return self.change(message)


class Session:
    """A server and its clients, with the words of each."""

    def __init__(self, count, *, n=5, seed=0, min_clients=2, group=None, client_min=2, is_signed=False):
        self.encoding = encoding_of(count, n)
        self.words = random_words(self.encoding, count, seed)
        secrets = {i: bytes([i + 1] * 32) for i in range(count)} if is_signed else {}
        self.identities = {i: identity_of(secret) for i, secret in secrets.items()}
        options = {"identities": self.identities} if is_signed else {"group": group}
        self.server = SecureServer(range(count), self.encoding, min_clients=min_clients, **options)
        peers = set(self.identities.values())
        self.clients = {
            i: SecureClient(min_clients=client_min, identity=secrets.get(i), peers=peers) for i in range(count)
        }

    def answer(self, i):
        message = self.server.messages[i]
        words = self.words[i].view(np.uint64) if SecureClient.needs_words(message) else None
        return self.clients[i].answer(message, words)

    def phase(self, absent=()):
        """Run one phase without the clients ``absent``."""
        for i in [i for i in self.server.messages if i not in absent]:
            assert self.server.receive(i, self.answer(i)), self.server.rejected
        self.server.close_phase()

    def until(self, phase):
        while self.server.phase != phase:
            self.phase()
        return self

    def stored(self):
        """Replace each client by a copy of its state, as if its process had ended."""
        for i, client in self.clients.items():
            self.clients[i] = SecureClient.from_state(json.loads(json.dumps(client.to_state())))

    def sum_of(self, clients):
        return self.words[sorted(clients)].sum(axis=0)


def outcome(call):
    """Return "valid" or the class of the FedcoreError that a call raises; other errors pass."""
    try:
        call()
    except FedcoreError as error:
        return type(error).__name__
    return "valid"

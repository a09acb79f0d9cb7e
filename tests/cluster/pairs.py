"""A server of one piece and one in shards, which do the same and are compared."""

import json
from dataclasses import replace

import numpy as np

from fedcore import Server
from fedcore.algorithms import rates
from fedcore.cluster import LocalThreads
from fedcore.errors import FedcoreError
from tests.kit import flat
from tests.server import rounds
from tests.server.rounds import algorithm_of

METHODS = rounds.METHODS
N, n = 6, 16_384 * 7 + 1_000
SIZES = {client: client + 1 for client in range(N)}


def made(method, x0, clients=N, *, shards=None, executor=None, path=None, folders=None, **options):
    """A server of a method by its name in ``METHODS``: in shards, or, without a number, of one piece."""
    options = dict(lr=rates.Exponential(0.1, 0.9), path=path, folders=folders) | options
    if shards is not None:
        options |= dict(shards=shards, executor=executor or LocalThreads())
    return Server(x0, algorithm_of(method), clients, **flat(**options))


def same(one, many, clients=None, *, opened_again=False):
    """Everything that a server knows is the same, to the last bit: but v, which not every method keeps on the disk."""
    clients = list(one.clients) if clients is None else clients
    assert list(many.clients) == clients
    assert (many.round_number, many.transactions) == (one.round_number, one.transactions)
    assert many.x.tobytes() == one.x.tobytes()
    assert opened_again or many.v.tobytes() == one.v.tobytes()
    before, after = ({k: np.array(t).tobytes() for k, t in s.tensors(library="numpy").items()} for s in (one, many))
    assert before == after
    if one.total() is not None:
        assert many.total().tobytes() == one.total().tobytes()
    for client in clients if one.algorithm.keeps_rows else ():
        assert many.row(client).tobytes() == one.row(client).tobytes()
        assert many.correction(client).tobytes() == one.correction(client).tobytes()
    np.testing.assert_array_equal(many.client_sizes, one.client_sizes)


def audited(server):
    """The documents without the time, and without the digests and signatures that depend on it."""
    varying = ("finished", "previous", "signature")
    return [{k: value for k, value in document.items() if k not in varying} for document in server.audit_log()]


def told(report):
    """A report, but how long it took, and in which tensor a number is not finite: shards do not tell."""
    rejected = tuple((client, reason.partition(", in ")[0]) for client, reason in report.rejected)
    fields = vars(replace(report, seconds=0.0, rejected=rejected))
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def alike(first, second):
    assert told(first) == told(second)


def nearly_alike(first, second):
    """But for the last bits of lengths."""
    for name in ("norms", "diversity", "correction_norm"):
        one, two = (np.array(getattr(report, name), np.float64) for report in (first, second))  # None becomes NaN
        np.testing.assert_allclose(one, two, rtol=1e-6)
    blank = dict(norms=np.zeros(0), diversity=None, correction_norm=None)
    alike(replace(first, **blank), replace(second, **blank))


def done(server, act):
    """The result of an act on a server, or its error."""
    try:
        return act(server)
    except FedcoreError as error:
        return type(error), str(error)


def both(one, many, act, compare=alike):
    """Do the same to both, and compare the results."""
    first, second = done(one, act), done(many, act)
    if isinstance(first, tuple):
        assert second == first
    elif first is not None:
        compare(first, second)
    return first


def cohort(server, t, most=N):
    clients = list(server.clients)
    return [clients[i] for i in np.flatnonzero(np.random.default_rng([9, t]).random(len(clients)) < 0.6)][:most]


def one_round(server, change=lambda t, i, update: update, **options):
    """A round whose updates depend only on the server's state and the round."""
    t = server.round_number
    broadcast = server.broadcast(cohort(server, t))
    with server.open_round(**options) as opened:
        for i, client in enumerate(broadcast.ids):
            rng = np.random.default_rng([t, i])
            y = broadcast.start(client) * np.float32(0.9) + rng.normal(size=len(broadcast.x)).astype(np.float32)
            y[: server.layout.n_parameters] -= broadcast.offset(client)
            if broadcast.x_prev is not None:
                y -= np.float32(0.1) * broadcast.x_prev
            control = rng.normal(size=server.layout.n_parameters).astype(np.float32) if broadcast.second else None
            steps = min(1 + i % 3, server.algorithm.most_steps or 3)
            output = dict(client=client, value=y, steps=steps, examples=i + 1, control=control)
            opened.add(**change(t, i, output))
    return opened.report


def shown(server):
    return json.dumps(repr(server))

"""One dishonest client of ten: its false update, and how far x may move because of it.

``LIES`` change an honest ``Update`` of a server's broadcast. ``BOUNDS`` limit the distance of the model after
``ROUNDS`` rounds from that of an honest federation, as a share of the way that the honest one has moved. The honest
clients have quadratics, |y - optimum_i|^2 / 2, with BatchNorm's statistics.
"""

from functools import cache

import numpy as np

from fedcore import Server, Update, algorithms
from fedcore.rules import CapExamples, CapSteps, RejectLong

N, n, STEPS, LR, ROUNDS, LIAR = 10, 20, 5, 0.05, 20, 9
SIZES = [100 + 10 * i for i in range(N)]
OPTIMA = np.random.default_rng(0).normal(size=(N, n)).astype(np.float32) + np.float32(3)
MODEL = {
    "w": np.zeros(n, np.float32),
    "running_mean": np.zeros(3, np.float32),
    "running_var": np.ones(3, np.float32),
    "num_batches_tracked": np.array(0),
}
# FedExP steps the further, the less its clients agree, so that one of them decides how far.
# FedAWE's clients start from different models, which adapters cannot send.
METHODS = {name: {} for name in algorithms.REGISTRY if name not in ("FedAWE", "FedExP")} | {
    "FlexibleFedAvg": {"local_steps": STEPS},
    "FedAvg, by examples known": {"client_sizes": SIZES},
    "SCAFFOLD, two vectors": {"control": "sent"},
    "MimiC, update units": {"units": "update"},
    "MIFA, at once": {"wait": False},
}


def with_(model, **changes):
    return {name: np.array(changes.get(name, tensor)) for name, tensor in model.items()}


def long(update, sent):
    y = with_(update.value, w=sent["w"] + np.float32(1000) * (update.value["w"] - sent["w"]))
    return update._replace(value=y, control=None if update.control is None else 1000 * update.control)


def heavy(update, sent):
    """The model as it was sent, with the weight of 10^9 examples."""
    return update._replace(value=with_(update.value, w=sent["w"]), examples=10**9)


LIES = {
    "rate": lambda update, sent: update._replace(lr=100.0),
    "tiny rate": lambda update, sent: update._replace(lr=1e-37),
    "steps": lambda update, sent: update._replace(steps=10**6),
    "examples": heavy,
    "long": long,
    "variance": lambda update, sent: update._replace(
        value=with_(update.value, running_var=np.full(3, -1e6, np.float32))
    ),
    "steps and counter": lambda update, sent: update._replace(
        steps=10**6, value=with_(update.value, num_batches_tracked=sent["num_batches_tracked"] + 10**6)
    ),
    "counter": lambda update, sent: update._replace(value=with_(update.value, num_batches_tracked=2**63 - 1)),
}
REFUSED = ("rate", "tiny rate", "long", "variance", "counter")
"""Lies for which the reply does not count; the others count within their bounds."""
BOUNDS = {
    # The mean is that of nine clients of ten, or has the dishonest client's row of its only honest round.
    **dict.fromkeys(REFUSED, 0.15),
    # gamma is at most doubled: what has not converged after 20 rounds is then where 40 lead.
    **dict.fromkeys(["steps", "steps and counter"], 0.8),
    # Weights of 10 medians at most: a step goes half as far. With the weight that was claimed it would go nowhere.
    "examples": 0.15,
}
RESTS = {"MBSTORM": 0.35, "SCAFFOLD": 0.35, "SCAFFOLDM": 0.9}
"""How far a client that stays where it is holds the others back where its examples are no weight: one of ten does by a
tenth, and most where its standing still is remembered as a correction, and that in a momentum."""
OPTIONS = {
    "long": {"aggregation": [RejectLong(10.0)]},
    "examples": {"aggregation": [CapExamples(10)]},
    "steps": {"aggregation": [CapSteps(10)]},
    "steps and counter": {"aggregation": [CapSteps(10)]},
}


def made(method):
    """The method, and n_k of the clients or None, by its name in ``METHODS``."""
    arguments = dict(METHODS[method])
    sizes = arguments.pop("client_sizes", None)
    algorithm = algorithms.named(method.partition(",")[0], **arguments)
    return algorithm, SIZES if algorithm.needs_shares else sizes


def is_refused(method, kind):
    """Whether updates of this kind are rejected; those of steps only where the method fixes their number."""
    return kind in REFUSED or (kind.startswith("steps") and made(method)[0].most_steps is not None)


def bound(method, kind):
    """The largest distance of a federation with this kind of update from the honest one."""
    if kind == "examples" and not made(method)[0].weighs_claims:
        return RESTS.get(method.partition(",")[0], 0.25)
    return BOUNDS["long" if is_refused(method, kind) else kind]


def most_counted(kind):
    """The largest ratio of the counter to the honest one."""
    return 10 if kind == "steps and counter" else 1


def server_of(method, **options):
    algorithm, sizes = made(method)
    return Server(MODEL, algorithm, N if sizes is None else dict(enumerate(sizes)), lr=LR, **options)


def honest(given, sent, offset, client):
    """A client's update after its steps on its quadratic, along the method's direction.

    Args:
        given: the instructions: a ``Broadcast``, or what an adapter's client gets of one.
        sent: the model by name, as sent.
        offset: of the client, or None.
    """
    x = sent["w"]
    y, gradients = x.copy(), []
    steps = given.local_rule.most_steps or STEPS
    for _ in range(steps):
        gradients.append(y - OPTIMA[client])
        d = given.a * gradients[-1] + (0 if offset is None else offset) + given.mu * (y - x)
        if given.b:
            d += given.b * (given.x_prev[: len(x)] - OPTIMA[client])
        y = (y - np.float32(given.lr) * d).astype(np.float32)
    control = np.mean(gradients, 0).astype(np.float32) if given.second else None
    model = {
        "w": y,
        "running_mean": OPTIMA[client, :3],
        "running_var": np.full(3, 1 + client / 10, np.float32),
        "num_batches_tracked": sent["num_batches_tracked"] + steps,
    }
    return Update(client, model, steps, examples=SIZES[client], control=control)


def said(given, sent, offset, client, lie=None, since=0):
    """A client's update: false for the dishonest client from a round on, else honest."""
    update = honest(given, sent, offset, client)
    return lie(update, sent) if lie is not None and client == LIAR and given.round >= since else update


def federation(server, lie=None, rounds=ROUNDS, since=0):
    """The reports of some rounds; one client is dishonest from one of them on."""
    reports = []
    for _ in range(rounds):
        given, sent = server.broadcast(range(N)), server.tensors(sent=True)
        reports.append(server.round([said(given, sent, given.offset(i), i, lie, since) for i in range(N)]))
    return reports


@cache
def honest_result(method, rounds=ROUNDS):
    """The model of a server with honest clients only."""
    server = server_of(method)
    federation(server, rounds=rounds)
    return server.tensors()


def distance(x, due, start):
    """The distance of x from the expected one, as a share of the way from the start."""
    return float(np.linalg.norm(x - due) / np.linalg.norm(due - start))

"""The table of ``tests/server/liars.py`` over a framework: ten clients as functions, one of which lies.

A framework's test drives the adapter with ``said``'s answers and hands what came of it to ``assert_bounded``. What a
wire cannot say, a client cannot lie about there; such lies are missing in its test, which says why.
"""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from fedcore.adapters.session import beyond_plain_steps
from fedcore.simulation.local_rules import Sgd
from tests.server import liars
from tests.server.liars import LIAR, LIES, LR, METHODS, MODEL, OPTIONS, N, bound, distance, is_refused, made

ROUNDS = 3
KINDS = ["honest", *LIES]
OF_THREE_ROUNDS = {"examples": 0.6}
"""Bounds that are others after three rounds: steps that go half as far have more of the way before them; those that
went nowhere, as with the weight that was claimed, would have all of it."""
PLAIN = [name for name in METHODS if beyond_plain_steps(made(name)[0]) is None]
"""The methods of plain local steps, which a wire may carry that has the model alone."""


def cases(methods=METHODS, kinds=KINDS):
    """Each method with honest clients and with every third lie; ``tests/server`` has every lie, and endurance here."""
    short = {(m, k) for i, m in enumerate(methods) for j, k in enumerate(kinds) if k == "honest" or (i + j) % 3 == 0}
    return [
        pytest.param(*case, marks=[] if case in short else pytest.mark.endurance) for case in product(methods, kinds)
    ]


def since(method):
    """The first round in which the liar lies: MIFA waits for a client whose every reply is refused."""
    return 1 if method == "MIFA" else 0


def said(method, kind, told, sent, offset, client):
    """What a client of that federation says: see ``tests.server.liars.said``."""
    return liars.said(told, sent, offset, client, LIES.get(kind), since(method))


def plain(round):
    """What a client of plain steps knows without being told."""
    return SimpleNamespace(round=round, lr=LR, a=1.0, b=0.0, mu=0.0, second=False, local_rule=Sgd())


def options(kind):
    """What the server is told against a kind of lie."""
    return OPTIONS.get(kind, {})


def assert_bounded(method, kind, x, reports, names):
    """Hold an adapter's run against the honest one.

    Args:
        x: the model by name, or its parameters alone, as far as the wire carries it.
        reports: of its rounds.
        names: of the clients, as the framework calls them.
    """
    assert len(reports) == ROUNDS
    due = liars.honest_result(method, ROUNDS)
    for report in reports[since(method) :]:
        assert {*report.accepted} | {names[LIAR]} == {*names}
        assert len(report.accepted) + len(report.rejected) == N
        assert [client for client, _ in report.rejected] == ([names[LIAR]] if is_refused(method, kind) else [])
    # What differs without a lie is the rounding alone: of sums, and of shares.
    most = 1e-6 if kind == "honest" else max(bound(method, kind), OF_THREE_ROUNDS.get(kind, 0))
    assert distance(x["w"], due["w"], MODEL["w"]) <= most
    if "running_var" in x:
        assert np.all((x["running_var"] > 1) & (x["running_var"] < 2))
    if "num_batches_tracked" in x:
        assert 0 < x["num_batches_tracked"] <= liars.most_counted(kind) * due["num_batches_tracked"]

"""The table of ``tests/server/liars.py`` over a framework: ten clients as functions, one of which lies."""

import numpy as np

from tests.server import liars
from tests.server.liars import LIAR, LIES, MODEL, OPTIONS, N, bound, distance, is_refused

ROUNDS = 3
KINDS = ["honest", *LIES]
OF_THREE_ROUNDS = {"examples": 0.6}
"""Other bounds after three rounds: steps of half the length have more of the way left."""


def since(method):
    """The first round with a lie: MIFA would wait for a client whose every reply is rejected."""
    return 1 if method == "MIFA" else 0


def answer(method, kind, task, sent, offset, client):
    """A client's update: see ``tests.server.liars.said``."""
    return liars.said(task, sent, offset, client, LIES.get(kind), since(method))


def options(kind):
    """The server's options against a kind of lie."""
    return OPTIONS.get(kind, {})


def assert_bounded(method, kind, x, reports, names):
    """Compare an adapter's run with the honest one.

    Args:
        x: the model by name; buffers may be missing.
        reports: of its rounds.
        names: the ids of the clients.
    """
    assert len(reports) == ROUNDS
    due = liars.honest_result(method, ROUNDS)
    for report in reports[since(method) :]:
        assert {*report.accepted} | {names[LIAR]} == {*names}
        assert len(report.accepted) + len(report.rejected) == N
        assert [client for client, _ in report.rejected] == ([names[LIAR]] if is_refused(method, kind) else [])
    # Without a lie only the rounding of sums and shares differs.
    most = 1e-6 if kind == "honest" else max(bound(method, kind), OF_THREE_ROUNDS.get(kind, 0))
    assert distance(x["w"], due["w"], MODEL["w"]) <= most
    if "running_var" in x:
        assert np.all((x["running_var"] > 1) & (x["running_var"] < 2))
    if "num_batches_tracked" in x:
        assert 0 < x["num_batches_tracked"] <= liars.most_counted(kind) * due["num_batches_tracked"]

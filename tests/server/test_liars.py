"""For every method: one liar of ten, each kind of lie, and the others' result within the bound that liars.py states."""

import numpy as np
import pytest

from tests.server.liars import (
    LIAR,
    LIES,
    METHODS,
    MODEL,
    OPTIONS,
    REFUSED,
    ROUNDS,
    bound,
    distance,
    federation,
    honest_result,
    is_refused,
    most_counted,
    server_of,
)


@pytest.mark.parametrize("kind", LIES)
@pytest.mark.parametrize("method", METHODS)
def test_one_liar_of_ten_moves_the_result_by_its_bound_at_most(method, kind):
    server = server_of(method, **OPTIONS.get(kind, {}))
    since = 1 if method == "MIFA" else 0  # which waits for a client whose every reply is refused, and says so
    reports = federation(server, LIES[kind], since=since)
    for report in reports[since:]:
        assert set(report.heard) | {LIAR} == set(range(10))
        assert [client for client, _ in report.refused] == ([LIAR] if is_refused(method, kind) else [])
    x, due = server.tensors(), honest_result(method)
    assert distance(x["w"], due["w"], MODEL["w"]) <= bound(method, kind)
    assert np.all((x["running_var"] > 1) & (x["running_var"] < 2))
    assert x["num_batches_tracked"] <= most_counted(kind) * due["num_batches_tracked"]
    assert len(reports) == ROUNDS


@pytest.mark.parametrize("method", ["FedAvg", "FedProx"])
def test_a_claim_of_examples_that_nobody_bounds_decides_for_all(method):
    server = server_of(method, max_examples_ratio=None)
    federation(server, LIES["examples"])
    assert distance(server.tensors()["w"], honest_result(method)["w"], MODEL["w"]) > 0.99


@pytest.mark.parametrize("kind", REFUSED)
def test_mifa_says_that_it_waits_for_a_liar_that_is_refused_from_the_first_round_on(kind):
    server = server_of("MIFA", **OPTIONS.get(kind, {}))
    assert [report.awaited for report in federation(server, LIES[kind], rounds=4)] == [1] * 4
    server.depart(LIAR)
    assert not server.tensors()["w"].any()

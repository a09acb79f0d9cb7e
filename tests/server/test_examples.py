"""Reported examples count up to the known size, or up to 10 times the median of the reports."""

import logging
import re

import numpy as np
import pytest

from fedcore import Compute, Server, Update, algorithms
from fedcore.algorithms import Algorithm, Linear, Step
from fedcore.rules import CapExamples
from fedcore.rules.windows import WINDOW, ClaimWindow
from tests.kit import flat

n, N = 70, 12


class ByRoot(Algorithm):
    """A custom method, which weighs by the root of the examples."""

    unit = "model"

    def weigh(self, claims):
        return np.sqrt(claims.examples) * claims.counts

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.W))


METHODS = {"FedAvg": algorithms.FedAvg, "FedProx": algorithms.FedProx, "one's own": ByRoot}


def server_of(method="FedAvg", clients=N, **options):
    return Server(
        np.zeros(n, np.float32), METHODS[method](), clients, lr=0.1, **flat(**dict(cap_examples=10) | options)
    )


def replies(server, claims, t=0):
    rng = np.random.default_rng(t)
    return [Update(i, server.x + rng.normal(size=n).astype(np.float32), 1, examples=c) for i, c in enumerate(claims)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("of", [2, 3, 10])
@pytest.mark.sample(1)
def test_examples_count_up_to_10_medians_in_any_order(method, of):
    for at in range(of):
        server, bounded = server_of(method), server_of(method)
        for t in range(4):
            honest = [30 + i for i in range(of)]
            updates = replies(server, [10**9 if i == at else c for i, c in enumerate(honest)], t)
            assert len(server.round(updates).accepted) == of
            # never more than if it had claimed 11 times the greatest that the others say
            due = replies(bounded, [10 * (30 + of) if i == at else c for i, c in enumerate(honest)], t)
            bounded.round(due)
            assert np.abs(server.x - bounded.x).max() < 0.02


def test_a_rejected_update_leaves_no_claim():
    server, without = server_of(), server_of()
    for t in range(3):
        updates = replies(server, [10] * 4, t)
        server.round([updates[0]._replace(value=np.full(n, np.nan, np.float32), examples=10**6), *updates[1:]])
        without.round(updates[1:])
        assert server.x.tobytes() == without.x.tobytes()
        assert (
            server._backend.snapshot.norms["examples"].tobytes()
            == without._backend.snapshot.norms["examples"].tobytes()
        )


def test_claims_within_a_factor_of_10_change_no_bits():
    claims = [1, 10, 5, 7]
    server = server_of()
    updates = replies(server, claims)
    due = sum(c * update.value.astype(np.float64) for c, update in zip(claims, updates, strict=True)) / sum(claims)
    server.round(updates)
    np.testing.assert_allclose(server.x, due, rtol=1e-5, atol=1e-6)


def test_only_the_first_of_similar_claims_waits():
    server = server_of()
    with server.open_round() as round:
        for update in replies(server, [5, 50]):
            round.add_batch([update])
        assert not round._undecided
    server = server_of()
    with server.open_round() as round:
        for update in replies(server, [5, 6, 7]):
            round.add_batch([update])
            assert bool(round._undecided) == (update.client == 0)
    with server.open_round() as round:
        for update in replies(server, [5, 6, 7]):
            round.add_batch([update])
            assert not round._undecided
        round.add(3, server.x, steps=1, examples=61)
        assert len(round._undecided) == 1
        round.add(4, server.x, steps=1, examples=5)
        assert not round._undecided  # they are eight


def test_after_eight_updates_a_claim_is_compared_with_the_earlier_ones_only(caplog):
    server = server_of()
    server.round(replies(server, [10] * 4 + [20] * 4))
    server.round(replies(server, [101, 100]))
    [record] = caplog.records
    assert "round 1 counted fewer examples than clients reported: 100 of 101 from client 0;" in record.message


@pytest.mark.parametrize(
    ("ratio", "listed"), [(1, ["10 of 101 from client 11"]), (2, ["20 of 101 from client 11"]), (20, [])]
)
def test_only_claims_far_above_the_median_are_logged(ratio, listed, caplog):
    server = server_of(cap_examples=ratio)
    report = server.round(replies(server, [10] * 9 + [25, 100, 101]))
    assert report.weights.tolist() == [10] * 9 + [min(claim, 10 * ratio) for claim in (25, 100, 101)]
    assert re.findall("reported: (.+?);", caplog.text) == listed


def test_claims_of_the_same_range_change_a_full_window():
    window = ClaimWindow(1.0)
    for claims in (np.repeat([1.0, 100.0], [600, 400]), np.repeat([1.0, 100.0], [1, 500])):
        window.add(claims)
    assert window.most(np.empty(0)) == 100


def test_equal_claims_change_no_window():
    server = server_of()
    for t in range(100):
        server.round(replies(server, [1] * N, t))
    assert server._backend.snapshot.norms["examples"] is not None
    before = server._backend.snapshot.norms["examples"]
    server.round(replies(server, [1] * N))
    assert server._backend.snapshot.norms["examples"] is before


def test_examples_count_up_to_the_known_size(caplog):
    sizes = {i: 10 * (i + 1) for i in range(N)}
    server, honest = server_of(clients=sizes), server_of(clients=sizes)
    server.round(replies(server, [10**9, 5, 30]))
    honest.round(replies(honest, [10, 5, 30]))
    assert server.x.tobytes() == honest.x.tobytes()
    assert "examples" not in server._backend.snapshot.norms
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fedcore.server", logging.WARNING)
    assert "round 0 counted fewer examples than clients reported: 10 of 1000000000 from client 0;" in record.message


@pytest.mark.parametrize("method", ["MIFA", "FedAvgM"])
def test_methods_without_weights_by_examples_keep_no_claims(method):
    server = Server(np.zeros(n, np.float32), method, N, lr=0.1, aggregation=[CapExamples(10)])
    with server.open_round() as round:
        for update in replies(server, [1, 10**9]):
            round.add_batch([update])
            assert not round._undecided
    assert "examples" not in server._backend.snapshot.norms


def test_the_oldest_claims_are_dropped():
    examples = ClaimWindow(10)
    assert not examples.agree(np.array([5.0]))
    examples.add(np.full(WINDOW, 5.0))
    packed = examples.packed
    examples.add(np.array([5.0]))
    assert examples.packed is packed
    examples.add(np.full(WINDOW // 2 + 1, 7.0))
    assert examples.most(np.empty(0)) == 70
    assert len(examples) == WINDOW
    assert ClaimWindow(10, examples.packed).most(np.empty(0)) == 70


@pytest.mark.parametrize("before", [(), (3,)])
@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_an_invalid_update_with_examples_rejects_no_others(keep, shards, before):
    """In each form of an update, also where the round has become empty again."""
    x0 = np.zeros(40_000, np.float32)
    server = Server(x0, "FedAvg", clients=4, lr=0.1, compute=Compute(shards=shards))
    with server.open_round() as opened:
        assert all(opened.add(client, x0 + 1, steps=1) for client in before)
        held = opened.add(0, np.append(x0[1:], np.float32(np.nan)), steps=1, examples=5, keep=keep)
        assert bool(held) is (keep and not before)
        assert opened.add(1, x0 + 1, steps=1)
        assert opened.add(2, (x0 + 1).astype(np.float64), steps=1)
    assert opened.report.accepted == (*before, 1, 2)
    assert (server.x == 1).all()
    server.close()

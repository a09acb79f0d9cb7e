"""A claim of examples counts up to what the server knows, or up to 10 times the median of what clients claim."""

import logging

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.algorithms import Algorithm, Linear, Step
from fedcore.rules import WINDOW, CapExamples, ClaimWindow
from tests.kit import flat
from tests.server.test_norm_limits import WAYS

n, N = 70, 12


class ByRoot(Algorithm):
    """A method of one's own, which weighs by the root of the examples."""

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


@pytest.mark.parametrize("deliver", WAYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("of", [2, 3, 10])
def test_a_claim_counts_up_to_10_times_the_median_whenever_it_comes(method, of, deliver):
    for at in range(of):
        server, bounded = server_of(method), server_of(method)
        for t in range(4):
            honest = [30 + i for i in range(of)]
            median = sorted(honest[:at] + honest[at + 1 :])[(of - 1) // 2 if of > 2 else 0]
            updates = replies(server, [10**9 if i == at else c for i, c in enumerate(honest)], t)
            assert len(deliver(server, updates).accepted) == of
            # never more than if it had claimed 11 times the greatest that the others say
            due = replies(bounded, [10 * (30 + of) if i == at else c for i, c in enumerate(honest)], t)
            deliver(bounded, due)
            assert median <= 30 + of
            assert np.abs(server.x - bounded.x).max() < 0.02


@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_delivery_gives_the_same_bits(method):
    def run(deliver, **options):
        server, seen = server_of(method, **options), []
        rng = np.random.default_rng(1)
        for t in range(8):
            claims = [10**9 if lie < 0.2 else int(rng.integers(1, 300)) for lie in rng.random(rng.integers(1, N + 1))]
            updates = replies(server, claims, t)
            if t % 3 == 1:
                updates[0] = updates[0]._replace(value=np.full(n, np.nan, np.float32))
            report = deliver(server, updates)
            seen.append((server.x.tobytes(), report.accepted, server._backend.snapshot.norms["examples"].tobytes()))
        return seen

    for options in ({}, {"reject_long": 10.0}):
        due = run(WAYS[0], **options)
        for deliver in WAYS[1:]:
            for fold in (1, 3, 8):
                assert run(deliver, batch_size=fold, **options) == due


def test_a_refused_reply_leaves_no_claim_behind():
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


@pytest.mark.parametrize("deliver", WAYS)
def test_claims_within_a_factor_of_10_change_no_bits(deliver):
    claims = [1, 10, 5, 7]
    server = server_of()
    updates = replies(server, claims)
    due = sum(c * update.value.astype(np.float64) for c, update in zip(claims, updates, strict=True)) / sum(claims)
    deliver(server, updates)
    np.testing.assert_allclose(server.x, due, rtol=1e-5, atol=1e-6)


def test_claims_that_agree_wait_for_nobody_but_the_first():
    server = server_of()
    with server.open_round() as round:
        for update in replies(server, [5, 6, 7]):
            round.add_batch([update])
            assert (round._undecided is not None) == (update.client == 0)
    with server.open_round() as round:
        for update in replies(server, [5, 6, 7]):
            round.add_batch([update])
            assert round._undecided is None
        round.add(3, server.x, steps=1, examples=61)
        assert len(round._undecided) == 1
        round.add(4, server.x, steps=1, examples=5)
        assert round._undecided is None  # they are eight


def test_once_eight_were_heard_a_claim_has_no_part_in_the_median_that_it_is_held_against(caplog):
    server = server_of()
    server.round(replies(server, [10] * 4 + [20] * 4))
    server.round(replies(server, [101, 100]))
    [record] = caplog.records
    assert "round 1 counted fewer examples than were claimed: client 0 100 of 101; at most" in record.message


def test_claims_that_an_aborted_round_heard_are_forgotten():
    server, without = server_of(), server_of()
    for t in range(2):
        opened = server.open_round()
        for update in replies(server, [1000] * 9, t):
            opened.add_batch([update])
        opened.abort()
        for one in (server, without):
            one.round(replies(one, [10, 11, 12], t))
        assert (
            server._backend.snapshot.norms["examples"].tobytes()
            == without._backend.snapshot.norms["examples"].tobytes()
        )


def test_equal_claims_are_remembered_once():
    server = server_of()
    for t in range(100):
        server.round(replies(server, [1] * N, t))
    assert server._backend.snapshot.norms["examples"] is not None
    before = server._backend.snapshot.norms["examples"]
    server.round(replies(server, [1] * N))
    assert server._backend.snapshot.norms["examples"] is before


@pytest.mark.parametrize("deliver", WAYS)
def test_a_claim_counts_up_to_what_the_server_knows(deliver, caplog):
    sizes = {i: 10 * (i + 1) for i in range(N)}
    server, honest = server_of(clients=sizes), server_of(clients=sizes)
    deliver(server, replies(server, [10**9, 5, 30]))
    deliver(honest, replies(honest, [10, 5, 30]))
    assert server.x.tobytes() == honest.x.tobytes()
    assert "examples" not in server._backend.snapshot.norms
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fedcore.server", logging.WARNING)
    assert "round 0 counted fewer examples than were claimed: client 0 10 of 1000000000; at most" in record.message


@pytest.mark.parametrize("method", ["MIFA", "FedAvgM"])
def test_where_weights_do_not_follow_claims_nothing_waits_or_is_remembered(method):
    server = Server(np.zeros(n, np.float32), method, N, lr=0.1, aggregation=[CapExamples(10)])
    with server.open_round() as round:
        for update in replies(server, [1, 10**9]):
            round.add_batch([update])
            assert round._undecided is None
    assert "examples" not in server._backend.snapshot.norms


def test_what_was_claimed_is_saved(tmp_path):
    def go_on(server, rounds):
        for _ in range(rounds):
            server.round(replies(server, [3, 10**6, 4], server.round_number))
        return server

    straight = go_on(server_of(), 6)
    server = go_on(server_of(path=tmp_path / "rows"), 2)
    for rounds in (1, 3):
        server.close()
        server = go_on(Server.load(tmp_path / "rows"), rounds)
    assert server.x.tobytes() == straight.x.tobytes()
    server.close()


def test_the_oldest_claims_are_forgotten():
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

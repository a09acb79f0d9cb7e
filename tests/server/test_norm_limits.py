"""Limits of the length of an update, by a number or by the median of accepted ones, for any delivery."""

import re

import numpy as np
import pytest

from fedcore import Limits, RoundPolicy, Server, Update, algorithms, errors
from fedcore.rules import RejectLong
from fedcore.rules.windows import FEW, WINDOW, NormWindow, as_float32
from fedcore.server.validation import RECEIVED
from tests.kit import flat
from tests.rejections import rejected_arguments
from tests.server.deliveries import as_list, outcome
from tests.server.rounds import METHODS, everything, made, n, steps_of
from tests.server.test_open_limits import WAYS, cohort_of

N = 12


def server_of(method, **options):
    return made(method, **dict(clients={i: 1 + i for i in range(N)}, reject_long=10) | options)


def honest(server, cohort, rng):
    """Updates of similar length, each in its own memory."""
    broadcast, updates = server.broadcast(cohort), []
    for i in cohort:
        y = server.x * np.float32(0.9) + rng.normal(size=n).astype(np.float32)
        control = rng.normal(size=n).astype(np.float32) if broadcast.second else None
        updates.append(Update(i, y, steps=steps_of(server, 1 + i % 3), examples=i + 1, control=control))
    return updates


def lying(server, update, times=1000):
    y = server.x + np.float32(times) * (update.value - server.x)
    control = None if update.control is None else np.float32(times) * update.control
    return update._replace(value=y, control=control)


@pytest.mark.parametrize("of", [4, 10])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_one_long_update_is_rejected_and_changes_no_bits(method, of):
    for at in range(of):
        server, without = server_of(method), server_of(method)
        for t in range(4):  # without and with a median
            updates = honest(server, range(t, t + of) if t + of <= N else range(N - of, N), np.random.default_rng(t))
            liar = updates[at]
            report = server.round([lying(server, u) if u is liar else u for u in updates])
            assert report.accepted == tuple(u.client for u in updates if u is not liar)
            [(client, why)] = report.rejected
            assert client == liar.client
            assert re.match(r"(update|control): .* exceeds 10 x .* \(RejectLong\)", why), why
            assert without.round([u for u in updates if u is not liar]).accepted == report.accepted
            assert counted(server) == counted(without)


def counted(server):
    """``everything`` that has an effect while long updates are the minority."""
    vectors, *others = everything(server, range(N))
    return {name: vector for name, vector in vectors.items() if RECEIVED not in name}, others


def add_two(server, first, second, *, kind="model", **more):
    with server.open_round() as round:
        for client, y in enumerate((first, second)):
            round.add(client, np.float32(y), kind=kind, **dict(steps=1) | more)
    return round.report


def test_max_norm_limits_models_where_models_are_averaged():
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.1, limits=Limits(max_norm=5))
    report = add_two(server, [3, 4], [3, 4.001], steps=1000)  # as long as is allowed, whatever the steps; and longer
    assert report.accepted == (0,)
    assert rejected_arguments(report) == [(1, "update")]
    np.testing.assert_array_equal(server.x, [3, 4])
    report = add_two(server, [0, 0.5], [0, 0.51], kind="gradient", steps=100)  # eta K = 10
    assert report.accepted == (0,)
    np.testing.assert_array_equal(server.x, [3, -1])


def test_max_norm_limits_mean_gradients_in_other_methods():
    for server in (
        Server(np.zeros(2, np.float32), "MIFA", clients=2, lr=0.5, limits=Limits(max_norm=5)),
        Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.5, server_lr=1, limits=Limits(max_norm=5)),
    ):
        report = add_two(server, [3, 4], [6.01, 8], steps=2)
        assert report.accepted == (0,)
        [(client, why)] = report.rejected
        assert client == 1
        assert re.match(r"update\b.*\|x - y\| / \(eta K\) = 10.006 .*max_norm=5\b", why)
        assert add_two(server, [3, 4], [3, 4.01], kind="gradient").accepted == (0,)
        assert add_two(server, [1.5, 2], [1.5, 2.01], kind="delta").accepted == (0,)


def test_each_update_is_compared_with_the_lower_median_of_earlier_ones():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=20, lr=1, aggregation=[RejectLong(3)])
    sent = [5, 1, 3, 2, 100, 4, 6, 7]  # the first eight by the lower of 4 and 5, the two in the middle
    later = [14, 12, 15.01, 12, 12, 15, 1, 0]
    # 14 > 3 x 4; 12 = 3 x 4; then 1..7 and 12, 12, 12: the lower median of 8 is 4, of 9 is 5, of 10 is 5
    report = server.round([Update(i, np.float32([y]), steps=1) for i, y in enumerate(sent + later)])
    rejected = {client: (sent + later)[client] for client, _ in report.rejected}
    assert rejected == {4: 100, 8: 14, 10: 15.01}
    for (_, why), length in zip(sorted(report.rejected), ("100", "14", "15.01"), strict=True):
        assert re.match(rf"update\b.* {length} .*\b3 x .*median 4 \(RejectLong\)", why)
    # of those 13 numbers the zero is none: 1 1 2 3 4 5 6 7 12 12 12 15, the lower median is 5
    report = server.round([Update(i, server.x + np.float32(y), steps=1) for i, y in enumerate((15.01, 15))])
    assert report.accepted == (1,)
    assert "3 x the median 5" in report.rejected[0][1]


def test_the_first_eight_updates_are_compared_with_each_other():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=9, lr=1, aggregation=[RejectLong(5)])

    def round_of(*lengths):
        return server.round([Update(i, server.x + np.float32(y), steps=1) for i, y in enumerate(lengths)]).accepted

    assert round_of(1000) == (0,)  # a single update is its own median
    assert round_of(1, 1) == (0, 1)
    assert round_of(6, 1, 4) == (1, 2)  # the median is 1 of 1000 1 1 6 1 4
    assert server.round([]).accepted == ()
    assert round_of(1, 1, 5.1, 5, 5.1) == (0, 1, 3)  # three waited till the eighth, the others knew
    assert round_of(6) == ()


@pytest.mark.parametrize("length", [1000, 0.001])
def test_four_liars_of_eight_lower_the_first_median_and_five_raise_it(length):
    for liars in range(2, 7):
        server = Server(np.zeros(1, np.float32), "FedAvg", clients=8, lr=1, aggregation=[RejectLong(10)])
        lengths = [length] * liars + [1] * (8 - liars)
        report = server.round([Update(i, np.float32([y]), steps=1) for i, y in enumerate(lengths)])
        assert (7 in report.accepted) == (liars < 4 if length < 1 else True)  # an honest client
        assert (0 in report.accepted) == (liars > 4 or length < 1)


def test_a_long_update_of_two_is_rejected():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=2, lr=1, aggregation=[RejectLong()])
    assert add_two(server, [10.5], [1]).accepted == (1,)  # the lower median is 1, and 10 the default


def test_infinite_and_zero_lengths_do_not_count_in_the_median():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=30, lr=1, aggregation=[RejectLong(10)])
    nans = [np.nan] * FEW
    lengths = [*nans, 1000, np.inf, 1, 0, 0, 0, 1, 1, 1, *nans, 1000]
    report = server.round([Update(i, np.float32([y]), steps=1) for i, y in enumerate(lengths)])
    assert [lengths[i] for i in report.accepted] == [1, 0, 0, 0, 1, 1, 1]
    assert sum("NaN or infinite" in why for _, why in report.rejected) == 2 * FEW + 1


@pytest.mark.parametrize("limit", [dict(max_norm=0.5), dict(max_norm=0.5, reject_long=10)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_a_round_of_long_updates_equals_an_empty_one(method, limit):
    server, empty = server_of(method, **dict(reject_long=None) | limit), server_of(method)
    report = server.round(honest(server, range(10), np.random.default_rng(0)))
    assert report.accepted == ()
    assert len(report.rejected) == 10
    empty.round([])
    assert everything(server, range(N)) == everything(empty, range(N))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in ("FedAvg", "MIFA", "MimiC", "SCAFFOLD, two vectors")),
        *(("MIFA", {"reject_long": None, "cap_steps": 10}), ("FedAvg", {"reject_long": None, "cap_examples": 10})),
    ],
)
def test_norms_and_claims_of_an_aborted_round_are_discarded(method, options):
    server, untouched = server_of(method, **options), server_of(method, **options)
    for waits in (3, 11):
        round = server.open_round()
        for update in honest(server, range(waits), np.random.default_rng(1)):
            round.add_batch([lying(server, update)._replace(steps=1000, examples=1000)])
        round.abort()
    for one in (server, untouched):
        for t in range(3):
            report = one.round(honest(one, range(t, t + 5), np.random.default_rng(2)))
            assert report.rejected == ()
    assert everything(server, range(N)) == everything(untouched, range(N))


@pytest.mark.parametrize("bad", [np.nan, 1000])
def test_a_rejected_client_may_try_again_and_an_undecided_one_may_not(bad):
    server = Server(np.zeros(2, np.float32), "MIFA", clients=20, lr=1, aggregation=[RejectLong(10)])
    good = np.ones(2, np.float32)
    with server.open_round() as round:
        round.add(0, bad * good, steps=1)
        if bad == 1000:
            assert not round.add(0, good, steps=1)
        for client in range(1, 9):
            round.add(client, good, steps=1)
        round.add(0, good, steps=1)
    assert round.report.accepted == (*range(1, 9), 0)
    assert [client for client, _ in round.report.rejected] == ([0, 0] if bad == 1000 else [0])


def test_late_updates_are_measured_from_their_start():
    late = RoundPolicy(max_staleness=2)
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=10, lr=1, policy=late, limits=Limits(max_norm=2))
    server.round([Update(0, np.float32([2]), 1)])
    server.round([Update(0, np.float32([4]), 1)])
    report = server.round([Update(1, np.float32([2]), 1, round=0), Update(2, np.float32([1.9]), 1)])
    assert report.accepted == (1,)
    assert report.rejected[0][1].endswith("= 2.1 exceeds max_norm=2")


def test_a_client_that_was_drawn_twice_has_one_length():
    server = Server(
        np.zeros(1, np.float32), "FedAvg", clients=20, lr=1, aggregation=[RejectLong(1)], limits=Limits(max_norm=1)
    )
    report = server.round([Update(i, np.float32([1]), 1, count=5) for i in range(10)])
    assert len(report.accepted) == 10
    assert len(NormWindow.unpacked(server._backend.snapshot.norms["parameters"])) == 10


def test_second_vectors_are_measured_too():
    for placement in ("server", "client"):
        algorithm = algorithms.SCAFFOLD("sent", placement)
        server = Server(np.zeros(1, np.float32), algorithm, clients=3, lr=1, limits=Limits(max_norm=4))
        controls = [[4], [-4.5], [2]]
        report = server.round(
            [Update(i, np.float32([1]), 1, control=np.float32(control)) for i, control in enumerate(controls)]
        )
        assert report.accepted == (0, 2)
        assert rejected_arguments(report) == [(1, "control")]
        # By the median each has its own: controls of 100 are usual where all have them.
        server = Server(np.zeros(1, np.float32), algorithm, clients=3, lr=1, aggregation=[RejectLong(2)])
        controls = [[100], [-200], [150]]
        report = server.round(
            [Update(i, np.float32([1]), 1, control=np.float32(control)) for i, control in enumerate(controls)]
        )
        assert report.accepted == (0, 1, 2)
        moved = server.x + 1 - server.broadcast([0]).offset(0)
        report = server.round([Update(0, moved, 1, control=np.float32([301]))])
        assert re.match(r"control\b.*\b150\b", report.rejected[0][1])


def test_float_buffers_are_measured_by_their_own_median():
    model = {"w": np.zeros(2, np.float32), "running_var": np.ones(2, np.float32)}
    server = Server(model, "FedAvg", clients=9, lr=0.1, aggregation=[RejectLong(10)], limits=Limits(max_norm=3))

    def sent(w, var):
        return {"w": np.full(2, w, np.float32), "running_var": np.full(2, 1 + var, np.float32)}

    updates = [Update(i, sent(1, 20 + i), steps=1) for i in range(8)]  # far longer than the parameters may be
    updates[3] = Update(3, sent(1, 1e6), steps=1)
    updates.append(Update(8, value=np.float32([0.5, 0.5]), kind="gradient", steps=1))  # has none
    report = server.round(updates)
    assert [client for client, _ in report.rejected] == [3]
    assert re.match(r"update\b.*float buffers .*\b10 x", report.rejected[0][1])


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC"])
def test_named_tensors_one_by_one_and_in_a_batch_are_rejected_alike(method):
    model = {"a": np.zeros((30, 40), np.float32), "b": np.zeros(777, np.float32)}

    def run(deliver):
        server, reports = Server(model, method, clients=12, lr=0.1, aggregation=[RejectLong(1.02)]), []
        for t in range(3):
            rng = np.random.default_rng(t)
            ys = [server.layout.unflatten(rng.normal(size=1977).astype(np.float32)) for _ in range(12)]
            reports.append(outcome(deliver(server, [Update(i, y, steps=1) for i, y in enumerate(ys)])))
        return everything(server, range(12)), reports

    def one_by_one(server, updates):
        with server.open_round() as round:
            for update in updates:
                round.add_batch([update])
                for tensor in update.value.values():
                    tensor[:] = np.nan
        return round.report

    due = run(as_list)
    assert run(one_by_one) == due
    assert due[1][0][1]


def test_the_oldest_norms_are_dropped():
    norms = NormWindow()
    for norm in range(1, 2 * WINDOW + 1):
        norms.add(norm)
        norms.add(0)
    assert len(norms) == WINDOW
    assert norms.median() == WINDOW + WINDOW // 2
    again = NormWindow.unpacked(norms.packed())
    for one in (norms, again):
        one.add(5.0)
    assert again.median() == norms.median()
    assert again.packed().tobytes() == norms.packed().tobytes()


def test_norms_are_kept_only_for_rules():
    server = server_of("MIFA", reject_long=None, max_norm=1e9)
    server.round(honest(server, range(3), np.random.default_rng(0)))
    assert not server._backend.snapshot.norms


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(max_norm=0), r"^max_norm\b"),
        (dict(max_norm=float("nan")), r"^max_norm\b"),
        (dict(max_norm=True), r"^max_norm\b"),
        (dict(max_norm=10**400), r"^max_norm\b"),
        (dict(max_norm="5"), r"^max_norm\b"),
        (dict(reject_long=0.99), r"^ratio\b"),
        (dict(reject_long=float("inf")), r"^ratio\b"),
    ],
)
def test_invalid_limits(change, message):
    with pytest.raises(errors.RangeError, match=message):
        Server(np.zeros(1, np.float32), "FedAvg", clients=1, lr=1, **flat(**change))


def test_without_a_median_no_update_is_too_long():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=9, lr=1, aggregation=[RejectLong(2)])
    report = server.round([Update(i, np.float32([9 * (i == 0)]), 1) for i in range(9)])
    assert report.accepted == tuple(range(9))


def test_the_median_is_that_of_the_last_1000_norms():
    window, norms = NormWindow(), np.random.default_rng(0).exponential(size=1300).tolist()
    for i, norm in enumerate(norms):
        window.add(norm)
        if i > WINDOW:
            assert window.median() == sorted(norms[i + 1 - WINDOW : i + 1])[(WINDOW - 1) // 2]


@pytest.mark.filterwarnings("error")
def test_a_limit_beyond_float32_is_infinite():
    assert as_float32(1e300) == np.inf


S = 12


@pytest.mark.parametrize("way", WAYS)
def test_medians_follow_norms_that_rise_at_once(way, tmp_path):
    """Norms are 1 by night and 100 by day, 50 rounds each: long updates count after 501 / S rounds at the latest."""
    run = cohort_of(way, "FedAvg", tmp_path / "s", aggregation=[RejectLong(10)])
    accepted = [
        len(run([(i, 1 if t % 100 < 50 else 100, {"steps": 1}) for i in range(S)]).accepted) for t in range(110)
    ]
    assert accepted[:50] + accepted[100:] == [S] * 60
    assert (accepted[50], accepted[50 - -501 // S]) == (0, S)


def test_a_minority_of_long_updates_never_counts(tmp_path):
    """Neither five of twelve clients in each round, nor one client with a thousand updates in a round."""
    run = cohort_of("list", "FedAvg", None, aggregation=[RejectLong(10)])
    for _ in range(100):
        report = run([(i, 1000 if i % 2 and i < 11 else 1, {"steps": 1}) for i in range(S)])
        assert [client for client, _ in report.rejected] == [1, 3, 5, 7, 9]
    server = Server(np.zeros(1, np.float32), "FedAvg", S, lr=0.1, aggregation=[RejectLong(10)])
    server.round([Update(i, np.float32([1]), 1) for i in range(S)])
    for _ in range(2):
        with server.open_round() as round:
            assert not any(round.add(0, server.x + 1000, steps=1) for _ in range(1000))

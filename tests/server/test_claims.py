"""Reports of clients: their rate must be the one that was sent, and their steps bound gamma."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore import Limits, Network, Server, Update, algorithms, errors
from fedcore.algorithms import rates
from fedcore.options import LARGEST, limits_from_state, limits_to_state
from fedcore.rules import CapSteps, Chain
from tests.kit import flat
from tests.rejections import rejected_arguments

n = 4
GRADIENT_UNITS = ["MIFA", "MimiC", "FedAvgM", "FedAvgMVR", "SCAFFOLD"]


def server_of(method="MIFA", clients=10, *, cap_steps=10, **options):
    algorithm = algorithms.MIFA(wait=False) if method == "MIFA" else method
    return Server(np.zeros(n, np.float32), algorithm, clients, **dict(lr=0.1) | flat(cap_steps=cap_steps, **options))


def step(server, client, **more):
    y = server.x - np.float32([1, 2, 3, 4]) * np.float32((client + 1) / 10)
    return Update(client, y, **dict(steps=5) | more)


@pytest.mark.parametrize("method", ["FedAvg", *GRADIENT_UNITS])
@pytest.mark.parametrize("lr", [100.0, 1e-37, 0.1 * (1 + 2e-6), 1, np.float32(0.2)])
def test_a_rate_that_was_not_sent_is_rejected(method, lr):
    server, without = server_of(method), server_of(method)
    report = server.round([step(server, 0), step(server, 1, lr=lr)])
    without.round([step(without, 0)])
    [(client, why)] = report.rejected
    assert client == 1
    assert why.startswith("lr")
    assert "max_client_lr" in why
    assert server.x.tobytes() == without.x.tobytes()


@pytest.mark.parametrize("lr", [0.1, np.float32(0.1), 0.1 * (1 + 5e-7), np.float64(0.1)])
def test_a_rate_may_be_rounded_on_its_way(lr):
    server, silent = server_of(), server_of()
    assert server.round([step(server, i, lr=lr) for i in range(3)]).rejected == ()
    silent.round([step(silent, i) for i in range(3)])
    assert server.x.tobytes() == silent.x.tobytes()


def test_a_server_may_accept_client_rates():
    server = server_of(max_client_lr=np.float64(100))
    report = server.round([step(server, 0, lr=0.3), step(server, 1, lr=101.0)])
    assert report.accepted == (0,)
    assert report.gamma == pytest.approx(0.3 * 5)
    assert rejected_arguments(report) == [(1, "lr")]


def test_a_client_may_use_a_sent_rate_above_the_largest_of_its_own(tmp_path):
    server = server_of(max_client_lr=0.05, path=tmp_path / "s", journal=True)
    sent = [step(server, i, lr=lr) for i, lr in enumerate([None, 0.1, 0.05, 0.1001])]
    assert list(map(bool, server.open_round().add_batch(sent))) == [True, True, True, False]
    server.close()
    assert Server.load(tmp_path / "s").open_round().finish().accepted == (0, 1, 2)
    extreme = server_of("FedAvgM", lr=1e9, max_client_lr=1e-3, max_steps=1)
    long = Update(0, np.full(n, 5e29, np.float32), 1, kind="gradient")
    assert extreme.round([long]).accepted == ()  # a step of 5e38 would end the round


def test_a_late_update_is_compared_with_the_rate_of_its_round():
    server = server_of(lr=rates.Exponential(0.1, 0.5), max_staleness=1)
    server.round([step(server, 0)])
    report = server.round([step(server, 1, lr=0.1, round=0), step(server, 2, lr=0.1), step(server, 3, lr=0.05)])
    assert report.accepted == (1, 3)
    assert [client for client, _ in report.rejected] == [2]


class Halving:
    """A rate that changes from step to step, with three steps."""

    def __call__(self, round):
        return 0.8

    def of_step(self, round, step):
        return [0.8, 0.4, 0.2][step]


def test_a_client_reports_the_mean_or_the_first_rate_of_its_steps():
    server = server_of(lr=Halving())
    updates = [
        step(server, 0, steps=2, lr=0.6),
        step(server, 1, steps=3, lr=1.4 / 3),
        step(server, 2, steps=3, lr=0.8),
        step(server, 3, steps=3),
        step(server, 4, steps=3, lr=0.6),
        step(server, 5, steps=4, lr=0.5),
    ]
    report = server.round(updates)
    assert report.accepted == (0, 1, 2, 3)
    (first, why_first), (second, why_second) = report.rejected
    assert (first, second) == (4, 5)
    assert why_first.startswith("lr")
    assert why_second.startswith("steps")


@pytest.mark.parametrize("method", GRADIENT_UNITS)
def test_one_false_step_count_of_ten_at_most_doubles_gamma(method):
    server, honest = server_of(method), server_of(method)
    cohort = range(10)
    due = honest.round([step(honest, i) for i in cohort]).gamma
    assert due == pytest.approx(0.5)
    report = server.round([step(server, i, steps=10**6 if i == 9 else 5) for i in cohort])
    assert len(report.accepted) == 10
    assert due < report.gamma <= 2 * due


def test_step_counts_within_ten_medians_are_averaged():
    server = server_of()
    steps = [1, 2, 4, 3, 5, 25, 30, 1, 2, 6]
    report = server.round([step(server, i, steps=K) for i, K in enumerate(steps)])
    assert report.gamma == float((np.array(steps) * 0.1).sum() / 10)


def test_a_node_uses_the_rate_of_its_network():
    models = [np.zeros(n, np.float32)] * 2
    for own in (False, True):
        network = Network(
            models, [[0.75, 0.25], [0.25, 0.75]], lr=0.1, limits=Limits(max_client_lr=100.0 if own else None)
        )
        report = network.round([Update(0, np.ones(n, np.float32), 1), Update(1, np.ones(n, np.float32), 1, lr=0.2)])
        assert report.accepted == ((0, 1) if own else (0,))


@pytest.mark.parametrize(
    ("algorithm", "most"),
    [
        (algorithms.MBSTORM(), 1),
        (algorithms.FlexibleFedAvg("A", local_steps=5), 5),
        (algorithms.FlexibleFedAvg("C", local_steps=5), 5),
    ],
)
def test_step_counts_above_those_of_the_method_are_rejected(algorithm, most, tmp_path):
    made = server_of(algorithm, dict.fromkeys(range(10), 10), max_steps=10**3)
    made.save(tmp_path / "copy")
    for server in (made, type(made).load(tmp_path / "copy")):
        report = server.round([step(server, 0, steps=most), step(server, 1, steps=most + 1)])
        assert report.accepted == (0,)
        assert rejected_arguments(report) == [(1, "steps")]


def test_step_counts_above_max_steps_are_rejected():
    for algorithm in ("MIFA", algorithms.FlexibleFedAvg("B")):
        server = server_of(algorithm, dict.fromkeys(range(10), 10), max_steps=7)
        report = server.round([step(server, 0, steps=7), step(server, 1, steps=8)])
        assert rejected_arguments(report) == [(1, "steps")]


@pytest.mark.parametrize("S", [1, 2, 3])
def test_a_small_cohort_is_compared_with_earlier_updates(S, caplog):
    """A cohort of one has no median; ten earlier rounds have one, also after a change of the rate."""
    server = Server(
        np.zeros(3, np.float32), "MimiC", 10, lr=lambda t: 0.1 if t < 10 else 5.0, aggregation=[CapSteps(10)]
    )
    for _ in range(10):
        server.round([Update(i, server.x + 1, 5) for i in range(S)])
    assert not caplog.records
    report = server.round([Update(0, server.x + 1, 10**6), *(Update(i, server.x + 1, 5) for i in range(1, S))])
    assert report.gamma == pytest.approx(5.0 * (10 * 5 + 5 * (S - 1)) / S)
    [record] = caplog.records
    assert "round 10: gamma counts at most 50 steps per client" in record.message


def test_a_large_cohort_may_do_more_steps_than_earlier_ones(caplog):
    server = Server(np.zeros(3, np.float32), "MimiC", 10, lr=0.1, aggregation=[CapSteps(10)])
    for _ in range(100):
        server.round([Update(i, server.x + 1, 1) for i in range(10)])
    report = server.round([Update(i, server.x + 1, 50 if i else 10**6) for i in range(10)])
    assert report.gamma == pytest.approx(0.1 * (9 * 50 + 500) / 10)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("fewer", "more", "median"), [(4, 4, 1), (4, 5, 2), (5, 4, 1)])
def test_a_single_client_is_compared_with_the_lower_median_of_earlier_updates(fewer, more, median):
    server = Server(np.zeros(3, np.float32), "MimiC", 10, lr=0.1, aggregation=[CapSteps(10)])
    for steps in [1] * fewer + [2] * more:
        server.round([Update(0, server.x + 1, steps)])
    assert server.round([Update(0, server.x + 1, 1000)]).gamma == pytest.approx(0.1 * 10 * median)


def test_growing_client_rates_are_not_mistaken_for_steps(caplog):
    server = Server(
        np.zeros(3, np.float32), "MimiC", 10, lr=1.0, aggregation=[CapSteps(10)], limits=Limits(max_client_lr=100.0)
    )
    for t in range(30):
        lr = 1e-7 * 2.0**t
        assert server.round([Update(i, server.x + 1, 5, lr=lr) for i in range(4)]).gamma == pytest.approx(5 * lr)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("max_steps", 1, 2**53),
        ("max_examples", 1, 2**53),
        ("batch_size", 1, 2**53),
        ("max_staleness", 0, 2**31),
        ("history", 1, 2**31),
    ],
)
def test_bounds_of_counts(name, least, most):
    def made(count):
        if name == "history":
            return Server(np.zeros(n, np.float32), algorithms.MimiC(history=count), 2, lr=0.1)
        return Server(np.zeros(n, np.float32), "FedAvg", 2, lr=0.1, **flat(**{name: count}))

    for count in (least, most):
        server = made(count)
        assert server.round([step(server, 0, steps=1)]).accepted == (0,)
    for count in (least - 1, most + 1, least + 0.5, True):
        with pytest.raises(errors.RangeError, match=rf"^{name}\b"):
            made(count)


def test_bounds_of_draws():
    server = Server(np.zeros(n, np.float32), "FedAvg", 2, lr=0.1)
    for count in (1, 2**31):
        assert server.round([step(server, 0, steps=1, count=count)]).accepted == (0,)
    for count in (0, 2**31 + 1, 1.5):
        with pytest.raises(errors.RangeError, match=r"^count\b"):
            server.round([step(server, 0, steps=1, count=count)])


@pytest.mark.parametrize("algorithm", ["FlexibleFedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def test_methods_that_take_a_client_once_reject_draws(algorithm):
    server = Server(np.zeros(n, np.float32), algorithm, clients={0: 1, 1: 1}, lr=0.1)
    with pytest.raises(errors.RangeError, match=r"^count\b"):
        server.round([step(server, 0, steps=1, count=2)])


def test_client_rates_are_saved(tmp_path):
    for own in (False, True):
        server_of(max_client_lr=100.0 if own else None).save(tmp_path / str(own))
        server = Server.load(tmp_path / str(own))
        assert bool(server.round([step(server, 0, lr=0.3)]).accepted) == own


def test_steps_below_those_that_count_are_refused(tmp_path):
    for scheme, most in (("A", 10), ("C", 9), ("B", 1)):
        server_of(algorithms.FlexibleFedAvg(scheme, 10), dict.fromkeys(range(10), 10), max_steps=most)
    with pytest.raises(errors.RangeError, match="max_steps=9: must be at least 10"):
        server_of(algorithms.FlexibleFedAvg("A", 10), dict.fromkeys(range(10), 10), max_steps=9)
    server = server_of(algorithms.FlexibleFedAvg("A", 10), dict.fromkeys(range(10), 10), max_steps=10)
    with pytest.raises(errors.RangeError, match="max_steps=9"):
        server.change(limits=Limits(max_steps=9))
    server._backend.settings = replace(server.settings, limits=Limits(max_steps=9))  # as an older version allowed
    server.save(tmp_path / "s")
    assert Server.load(tmp_path / "s").settings.limits.max_steps == 9


def test_the_cap_of_steps_counts_draws():
    server = Server(np.zeros(3, np.float32), "FedAvgM", 10, lr=0.1, aggregation=[CapSteps(10)])
    draws = [Update(0, server.x + 1, 5, count=8), *(Update(i, server.x + 1, 10**6) for i in (1, 2))]
    assert server.round(draws).gamma == pytest.approx(0.1 * (8 * 5 + 2 * 50) / 10)


def test_the_largest_rate_is_in_the_range_of_rates_and_older_folders_still_open():
    with pytest.raises(errors.RangeError, match=r"^max_client_lr\b"):
        Limits(max_client_lr=1e39)
    older = {"limits": limits_to_state(Limits(max_client_lr=3), Chain()) | {"lr": 1e300}}
    assert limits_from_state(older)[0] == Limits(max_client_lr=LARGEST)

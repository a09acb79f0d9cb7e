"""Clients that arrive in an objective and depart from it (Ruan et al. 2021, Sec. 4.2 and 4.3)."""

import numpy as np
import pytest

from fedcore.errors import RangeError
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import build, run_trial
from tests.sim.experiment.kit import assert_resumes

CHANGES = ["rounds=6", "seeds=[0]", "data.largest=40", "data.smallest=40", "partition.clients=5"]


def arriving(*changes):
    return load_preset("flexible/table4-synthetic-t10", [*CHANGES, "participation.arrivals={0=3}", *changes])


def departing(*changes):
    return load_preset("flexible/table5-1-t10", [*CHANGES, "participation.departures={0=3}", *changes])


def test_newcomer_counts_from_its_arrival_on():
    parts = build(Trial(arriving(), 0, 0))
    for rounds, clients in (((), [1, 2, 3, 4]), (range(3), [1, 2, 3, 4]), ([3], [0, 1, 2, 3, 4])):
        for round in rounds:
            parts.begin(round)
        assert sorted(parts.server.clients) == clients
        assert parts.server._backend.population.total == len(clients) * 40


def test_on_a_clock_a_newcomer_counts_from_the_period_of_its_arrival_on(tmp_path):
    """Client 0 arrives in period 3; rounds take two periods, so that is round 2."""
    (tmp_path / "two.csv").write_text("client,seconds\n" + "".join(f"{client},2\n" for client in range(5)))
    parts = build(Trial(arriving("participation.among='Always'", f"clock={{trace='{tmp_path}/two.csv'}}"), 0, 0))
    assert [parts.pattern.inner_round(round) for round in range(4)] == [0, 2, 4, 6]
    for round, clients in enumerate(([1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4])):
        parts.begin(round)
        assert sorted(parts.server.clients) == sorted(parts.changing.counted_in(round)) == clients
        assert parts.pattern.active(round).clients.tolist() == clients


@pytest.mark.parametrize(
    ("make", "order", "rates"),
    [(arriving, 0, [1, 2, 3, 1, 2, 3]), (departing, 0, [1, 2, 3, 4, 5, 6]), (departing, 1, [1, 2, 3, 1, 2, 3])],
    ids=["arrival", "include", "exclude"],
)
def test_rate_restarts_only_when_the_objective_changes(tmp_path, make, order, rates):
    lines = []
    run_trial(Trial(make(), order, 0), tmp_path, lines.append)
    assert [round(1 / line.lr) for line in lines] == rates


@pytest.mark.parametrize(("order", "total"), [(0, 5), (1, 4)], ids=["include", "exclude"])
def test_weight_of_a_departed_client(order, total):
    parts = build(Trial(departing(), order, 0))
    for round in range(4):
        parts.begin(round)
    assert parts.server._backend.population.total == total * 40
    assert 0 not in parts.pattern.active(3).clients


def test_test_set_has_the_clients_that_count():
    changing = build(Trial(arriving(), 0, 0)).changing
    assert [sorted(changing.counted_in(round)) for round in (2, 3)] == [[1, 2, 3, 4], [0, 1, 2, 3, 4]]
    method = "{name='FlexibleFedAvg', scheme='C', local_steps=5, objective={departures='include', test='present'}}"
    for changes, counts in (([], [5, 5]), ([f"algorithms=[{method}]"], [5, 4])):
        changing = build(Trial(departing(*changes), 0, 0)).changing
        assert [len(changing.counted_in(round)) for round in (2, 3)] == counts


def test_test_examples_are_the_clients_own_or_those_of_their_classes():
    parts = build(Trial(arriving(), 0, 0))
    before, after = parts.evaluate(0, parts.server.x), parts.evaluate(3, parts.server.x)
    examples = [len(part) for part in parts.changing.dataset.test_parts]
    assert examples[0] == 4
    assert 0 <= round(after.accuracy * sum(examples) - before.accuracy * sum(examples[1:])) <= 4
    digits = load_preset(
        "quickstart", ["partition={name='one-label', clients=10, smallest=5, balanced=true}", "objective={}"]
    )
    parts = build(Trial(digits.model_copy(update={"participation": arriving().participation}), 0, 0))
    parts.evaluate(0, parts.server.x)
    (engine,) = parts.changing.engines.values()
    assert sorted(np.unique(engine._test[1])) == list(range(1, 10))


def test_an_objective_without_clients_is_rejected():
    changes = [f"participation.{kind}={{0=2, 1=2, 2=2, 3=2, 4=2}}" for kind in ("arrivals", "departures")]
    for experiment, order, round in ((arriving(changes[0]), 0, 0), (departing(changes[1]), 1, 2)):
        with pytest.raises(RangeError, match=f"^objective: no client counts in round {round}"):
            build(Trial(experiment, order, 0))
    build(Trial(departing(changes[1]), 0, 0))  # they stay in the objective


@pytest.mark.parametrize(("make", "order"), [(arriving, 0), (departing, 0), (departing, 1)])
def test_interrupted_trial_resumes_over_a_change(tmp_path, make, order):
    assert_resumes(Trial(make(), order, 0), tmp_path, (2, 3, 4))

"""Clients that come into an objective and leave it (Ruan et al. 2021, Sec. 4.2 and 4.3)."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore.experiment import load_preset
from fedcore.experiment.results import read
from fedcore.experiment.schema import Trial
from fedcore.experiment.trial import build, run_trial

CHANGES = ["rounds=6", "seeds=[0]", "data.largest=40", "data.smallest=40", "partition.clients=5"]


def arriving(*changes):
    return load_preset("flexible/table4-synthetic-t10", [*CHANGES, "participation.arrivals={0=3}", *changes])


def departing(*changes):
    return load_preset("flexible/table5-1-t10", [*CHANGES, "participation.departures={0=3}", *changes])


def test_a_newcomer_counts_from_its_arrival_on():
    parts = build(Trial(arriving(), 0, 0))
    clients = lambda: sorted(parts.server.clients)  # noqa: E731
    assert clients() == [1, 2, 3, 4]
    for round in range(3):
        parts.begin(round)
    assert clients() == [1, 2, 3, 4]
    assert parts.server._backend.population.total == 4 * 40
    parts.begin(3)
    assert clients() == [0, 1, 2, 3, 4]
    assert parts.server._backend.population.total == 5 * 40


def test_the_rate_begins_anew_where_the_objective_changes_and_nowhere_else(tmp_path):
    def rates(experiment, order):
        lines = []
        run_trial(Trial(experiment, order, 0), tmp_path / f"{experiment.name}{order}", lines.append)
        return [round(1 / line.lr) for line in lines]

    assert rates(arriving(), 0) == [1, 2, 3, 1, 2, 3]
    include, exclude = 0, 1
    assert rates(departing(), include) == [1, 2, 3, 4, 5, 6]
    assert rates(departing(), exclude) == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("order", "total"), [(0, 5), (1, 4)], ids=["include", "exclude"])
def test_a_departed_client_keeps_its_share_or_does_not(order, total):
    parts = build(Trial(departing(), order, 0))
    for round in range(4):
        parts.begin(round)
    assert parts.server._backend.population.total == total * 40
    assert 0 not in parts.pattern.active(3).clients


def test_the_model_is_judged_on_those_who_count():
    changing = build(Trial(arriving(), 0, 0)).changing
    assert [sorted(changing.counted_in(round)) for round in (2, 3)] == [[1, 2, 3, 4], [0, 1, 2, 3, 4]]
    kept = build(Trial(departing(), 0, 0)).changing
    assert [len(kept.counted_in(round)) for round in (2, 3)] == [5, 5]  # those in the objective
    method = "{name='FlexibleFedAvg', scheme='C', local_steps=5, objective={departures='include', test='present'}}"
    included = build(Trial(departing(f"algorithms=[{method}]"), 0, 0)).changing
    assert [len(included.counted_in(round)) for round in (2, 3)] == [5, 4]  # those present


def test_the_test_examples_are_the_clients_own_and_else_those_of_their_classes():
    parts = build(Trial(arriving(), 0, 0))
    before, after = parts.evaluate(0, parts.server.x), parts.evaluate(3, parts.server.x)
    dataset = parts.test_sets._dataset
    own = dataset.test_parts[0]
    assert len(own) == 4
    right = lambda found, clients: found.accuracy * sum(len(dataset.test_parts[c]) for c in clients)  # noqa: E731
    difference = right(after, range(5)) - right(before, range(1, 5))
    assert 0 <= round(difference) <= 4
    digits = load_preset(
        "quickstart", ["partition={name='one-label', clients=10, smallest=5, balanced=true}", "objective={}"]
    )
    parts = build(Trial(digits.model_copy(update={"participation": arriving().participation}), 0, 0))
    parts.evaluate(0, parts.server.x)
    (judge,) = parts.test_sets._engines.values()
    assert sorted(np.unique(judge._test[1])) == list(range(1, 10))


def test_a_stopped_trial_goes_on_over_a_shift_bit_for_bit(tmp_path):
    def stop(line):
        if line.round == stop.at:
            raise KeyboardInterrupt

    for experiment, order in ((arriving(), 0), (departing(), 0), (departing(), 1)):
        trial = Trial(experiment, order, 0)
        straight, stopped = (tmp_path / f"{experiment.name}{order}{name}" for name in ("straight", "stopped"))
        run_trial(trial, straight)
        for stop.at in (2, 3, 4):
            with pytest.raises(KeyboardInterrupt):
                run_trial(trial, stopped, stop, checkpoint_seconds=0)
        run_trial(trial, stopped, checkpoint_seconds=0)
        a, b = (read(folder / "records" / trial.file_name) for folder in (straight, stopped))
        assert [replace(line, seconds={}) for line in a.rounds] == [replace(line, seconds={}) for line in b.rounds]

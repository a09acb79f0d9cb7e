"""The rounds of one trial."""

import numpy as np
import pytest

from fedcore.experiment import load_preset
from fedcore.experiment.results import read
from fedcore.experiment.schema import Trial, trials
from fedcore.experiment.trial import build, run_trial
from fedcore.simulation.engines import Evaluation
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.participation import Schedule, Trace, Uniform
from tests.experiment.kit import records_in, rounds_of, timeless


def run(tmp_path, *overrides):
    trial = Trial(load_preset("quickstart", [*overrides]), 0, 0)
    run_trial(trial, tmp_path)
    return rounds_of(trial, tmp_path)


def test_equal_trials_differ_only_in_seconds_and_other_seeds_in_more(tmp_path, small):
    for folder in ("one", "two"):
        for trial in trials(small):
            run_trial(trial, tmp_path / folder)
    assert records_in(tmp_path / "one") == records_in(tmp_path / "two")
    zero, one = (rounds_of(Trial(small, 0, seed), tmp_path / "one") for seed in (0, 1))
    assert timeless(zero) != timeless(one)


def test_long_label(tmp_path):
    assert len(run(tmp_path, "rounds=1", f"algorithms=[{{name='FedAvg', label='{'a' * 300}'}}]")) == 1


def test_trials_of_a_comparison_differ_only_in_the_algorithm(small):
    first, *others = [build(Trial(small, order, 1)) for order in range(len(small.algorithms))]
    np.testing.assert_array_equal(first.server.x, first.engine.initial)
    for parts in others:
        np.testing.assert_array_equal(parts.server.x, first.server.x)
        np.testing.assert_array_equal(parts.pattern.active(7).clients, first.pattern.active(7).clients)
        updates = [next(iter(one.engine.updates(one.server.broadcast([3])))) for one in (parts, first)]
        np.testing.assert_array_equal(*(np.asarray(update.value) for update in updates))


def test_record_of_a_trial(tmp_path):
    changes = [
        *("rounds=5", "evaluate.every=2", 'rate.lr={name="Exponential", initial=0.2, decay=0.5}'),
        'participation={name="TimeVarying", share=0.1}',
    ]
    seen = []
    run_trial(Trial(load_preset("quickstart", changes), 2, 0), tmp_path, seen.append)
    record = read(tmp_path / "records" / "2-mimic-seed0.jsonl")
    assert (record.header.algorithm, record.header.rounds, record.torn) == ("MimiC", 5, False)
    assert record.rounds == seen
    assert [line.accuracy is not None for line in record.rounds] == [False, True, False, True, True]
    assert [line.uploads for line in record.rounds] == [3, 6, 9, 12, 15]
    assert [line.heard for line in record.rounds] == [len(line.active) for line in record.rounds]
    assert [line.lr / record.rounds[0].lr for line in record.rounds] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert all(line.seconds.keys() == {"broadcast", "local", "aggregate", "evaluate"} for line in record.rounds)


def test_infinite_loss_is_recorded_as_none(tmp_path, monkeypatch):
    """The model itself is finite, so the trial continues; JSON has no infinity."""
    monkeypatch.setattr(InProcess, "evaluate", lambda *_: Evaluation(0.1, float("inf")))
    first, second = run(tmp_path, "rounds=2")
    assert (first.accuracy, first.loss, second.loss) == (0.1, None, None)
    assert first.norm > 0


def test_round_without_clients(tmp_path):
    first, second = run(tmp_path, "rounds=2", "algorithms=['FedAvg']", 'participation={name="Bernoulli", p=0.0}')
    assert (first.active, first.heard, first.steps, first.norm, first.uploads) == ([], 0, 0, None, 0)
    assert first.accuracy == second.accuracy


def test_clients_do_the_share_of_the_steps_that_the_pattern_asks_for(tmp_path):
    table = "{name='Schedule', arrivals={3=1}, among={name='Trace', first=8, among={name='Uniform', k=10}}}"
    lines = run(tmp_path, "rounds=3", "local.steps=20", "local.epochs=none", f"participation={table}")
    pattern = Schedule(30, arrivals={3: 1}, among=Trace(30, first=8, among=Uniform(30, 10)))
    for line in lines:
        active = pattern.active(line.round)
        assert line.active == active.clients.tolist()
        assert line.steps == active.steps(20).sum()
        assert line.steps < 20 * len(active)


def test_clients_drawn_twice_count_twice(tmp_path):
    table = f"{{name='Weighted', k=9, weights={[1.0] * 30}, replacement=true}}"
    method = "algorithms=[{name='FedAvg', weights='uniform'}]"
    lines = run(tmp_path, "rounds=6", method, "local.steps=2", "local.epochs=none", f"participation={table}")
    assert all(line.steps == 18 for line in lines)  # the steps of each draw count
    assert any(line.heard < 9 for line in lines)


def test_server_rate_follows_the_cohort(tmp_path):
    rate = "rate.server_lr={name='PerCohort', c=0.1, beta=2}"
    lines = run(tmp_path, "rounds=4", "algorithms=['MimiC']", rate, "participation={name='Bernoulli', p=0.2}")
    assert len({len(line.active) for line in lines}) > 1
    for line in lines:
        assert line.gamma == pytest.approx(0.1 * len(line.active) / (line.round + 2))


def test_client_rate_restarts(tmp_path):
    lines = run(tmp_path, "rounds=4", "rate.lr={name='Staircase', initial=0.2, restarts=[2]}")
    assert [line.lr for line in lines] == [0.2, 0.1, 0.2, 0.1]

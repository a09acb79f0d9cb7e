from dataclasses import replace

import numpy as np
import pytest

from fedcore.experiment import load_preset
from fedcore.experiment.results import read
from fedcore.experiment.schema import Trial, trials
from fedcore.experiment.trial import build, run_trial
from fedcore.simulation.engines import Evaluation
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.participation import Schedule, Trace, Uniform


def timeless(record):
    return [replace(line, seconds={}) for line in record.rounds]


def test_two_runs_are_equal_but_for_seconds(tmp_path, small):
    for trial in trials(small):
        records = []
        for folder in (tmp_path / "one", tmp_path / "two"):
            run_trial(trial, folder)
            records.append(read(folder / "records" / trial.file_name))
        assert timeless(records[0]) == timeless(records[1])


def test_a_long_label_has_a_record_too(tmp_path):
    experiment = load_preset("quickstart", ["rounds=1", f"algorithms=[{{name='FedAvg', label='{'a' * 300}'}}]"])
    trial = Trial(experiment, 0, 0)
    run_trial(trial, tmp_path)
    assert len(read(tmp_path / "records" / trial.file_name).rounds) == 1


def test_another_seed_gives_another_run(tmp_path, small):
    for seed in (0, 1):
        run_trial(Trial(small, 0, seed), tmp_path)
    zero, one = (read(tmp_path / "records" / Trial(small, 0, seed).file_name) for seed in (0, 1))
    assert timeless(zero) != timeless(one)


def test_what_is_compared_differs_in_the_algorithm_alone(small):
    built = [build(Trial(small, order, 1)) for order in range(len(small.algorithms))]
    parts = [(each.server, each.engine, each.pattern) for each in built]
    for server, engine, pattern in parts[1:]:
        first_server, first_engine, first_pattern = parts[0]
        np.testing.assert_array_equal(server.x, first_server.x)
        np.testing.assert_array_equal(pattern.active(7).clients, first_pattern.active(7).clients)
        ours, theirs = (
            next(iter(clients.updates(source.broadcast([3]))))
            for clients, source in ((engine, server), (first_engine, first_server))
        )
        np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))


def test_a_record_says_what_happened(tmp_path):
    experiment = load_preset(
        "quickstart",
        [
            "rounds=5",
            "evaluate.every=2",
            'rate.lr={name="Exponential", initial=0.2, decay=0.5}',
            'participation={name="TimeVarying", share=0.1}',
        ],
    )
    seen = []
    run_trial(Trial(experiment, 2, 0), tmp_path, seen.append)
    record = read(tmp_path / "records" / "2-mimic-seed0.jsonl")
    assert (record.header.algorithm, record.header.rounds, record.torn) == ("MimiC", 5, False)
    assert record.rounds == seen
    assert [line.accuracy is not None for line in record.rounds] == [False, True, False, True, True]
    assert [line.uploads for line in record.rounds] == [3, 6, 9, 12, 15]
    assert [line.heard for line in record.rounds] == [len(line.active) for line in record.rounds]
    assert [line.lr / record.rounds[0].lr for line in record.rounds] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert all(line.seconds.keys() == {"broadcast", "local", "aggregate", "evaluate"} for line in record.rounds)


def test_a_model_without_a_finite_loss_is_recorded(tmp_path, monkeypatch):
    """It is finite itself, so the trial goes on; JSON has no infinity."""
    monkeypatch.setattr(InProcess, "evaluate", lambda *_: Evaluation(0.1, float("inf")))
    first, second = run(tmp_path, "rounds=2")
    assert (first.accuracy, first.loss, second.loss) == (0.1, None, None)
    assert first.norm > 0


def test_a_round_without_clients_is_a_round(tmp_path):
    experiment = load_preset(
        "quickstart", ["rounds=2", "algorithms=['FedAvg']", 'participation={name="Bernoulli", p=0.0}']
    )
    run_trial(Trial(experiment, 0, 0), tmp_path)
    first, second = read(tmp_path / "records" / "0-fedavg-seed0.jsonl").rounds
    assert (first.active, first.heard, first.steps, first.norm, first.uploads) == ([], 0, 0, None, 0)
    assert first.accuracy == second.accuracy


def run(tmp_path, *overrides):
    run_trial(Trial(load_preset("quickstart", [*overrides]), 0, 0), tmp_path)
    return read(next((tmp_path / "records").iterdir())).rounds


def test_shares_of_the_steps_reach_the_clients(tmp_path):
    """A schedule over a trace over a draw: as many clients, and as many of their steps, as the pattern says."""
    table = "{name='Schedule', arrivals={3=1}, among={name='Trace', first=8, among={name='Uniform', k=10}}}"
    changes = ["rounds=3", "local.steps=20", "local.epochs=none"]
    lines = run(tmp_path, *changes, f"participation={table}")
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
    assert all(line.steps == 18 for line in lines)  # each draw's steps are counted
    assert any(line.heard < 9 for line in lines)


def test_the_servers_rate_may_follow_the_cohort(tmp_path):
    rate = "rate.server_lr={name='PerCohort', c=0.1, beta=2}"
    lines = run(tmp_path, "rounds=4", "algorithms=['MimiC']", rate, "participation={name='Bernoulli', p=0.2}")
    assert len({len(line.active) for line in lines}) > 1
    for line in lines:
        assert line.gamma == pytest.approx(0.1 * len(line.active) / (line.round + 2))


def test_the_clients_rate_may_begin_anew(tmp_path):
    lines = run(tmp_path, "rounds=4", "rate.lr={name='Staircase', initial=0.2, restarts=[2]}")
    assert [line.lr for line in lines] == [0.2, 0.1, 0.2, 0.1]

"""The rounds of one trial."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore.errors import ConfigError, RangeError
from fedcore.sim.data import REGISTRY, Source, from_arrays, load
from fedcore.sim.engines import Evaluation
from fedcore.sim.experiment import Experiment, load_preset
from fedcore.sim.experiment.config import data_hash, load_and_partition, load_once
from fedcore.sim.experiment.results import read
from fedcore.sim.experiment.schema import Trial, trials
from fedcore.sim.experiment.trial import TrialParts, build, run_trial
from fedcore.sim.in_process import InProcess
from fedcore.sim.participation import Schedule, Trace, Uniform, class_chances
from fedcore.sim.reports.statistics import summarise
from tests.sim.experiment.kit import interrupt, records_in, rounds_of, timeless, write_times

NAMES = ["best", *(f"round{round}" for round in range(5))]
"""The models of a trial that stops after five rounds."""


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


def test_an_algorithm_has_its_own_rate_local_work_limits_and_rules(tmp_path):
    shared = ("rounds=2", "local.epochs=1")
    own = "label='a', rate={lr=0.2, optimizer='Adam'}, local={steps=3, clip=0.5}, aggregation=['ClipToMedian']"
    one = run(tmp_path / "one", *shared, f"algorithms=[{{name='FedAvg', {own}, limits={{max_norm=0.29}}}}]")
    keys = ["rate.lr=0.2", "rate.optimizer='Adam'", "local.epochs=none", "local.steps=3", "local.clip=0.5"]
    keys += ["aggregation=['ClipToMedian']", "limits={max_norm=0.29}", "algorithms=[{name='FedAvg', label='a'}]"]
    same = run(tmp_path / "same", *shared, *keys)
    assert timeless(one) == timeless(same)
    assert sum(line.rejected for line in one) > 0
    assert sum(line.accepted for line in one) > 0
    alias = "algorithms=[{name='FedAdam', eta=0.1, label='a', rate={lr=0.2}}]"
    keys = ["rate.lr=0.2", "rate.optimizer={name='Adam', eta=0.1}", "algorithms=[{name='FedAvg', label='a'}]"]
    assert timeless(run(tmp_path / "alias", *shared, alias)) == timeless(run(tmp_path / "table", *shared, *keys))


def test_a_virtual_clock_drops_late_clients_and_survives_an_interruption(tmp_path):
    shared = ["rounds=3", "local.epochs=1", "algorithms=['FedAvg']", "participation={name='Uniform', k=8}"]
    plain = run(tmp_path / "plain", *shared)
    slow = run(tmp_path / "slow", *shared, "clock={median=10}")
    assert replace(timeless(slow)[0], clock=None) == timeless(plain)[0]  # later rounds begin in later periods
    assert plain[0].clock is None
    trial = Trial(load_preset("quickstart", [*shared, "clock={median=10, policy={deadline=10}}"]), 0, 0)
    interrupt(trial, tmp_path / "late", 1)
    run_trial(trial, tmp_path / "late")
    late, clock = rounds_of(trial, tmp_path / "late"), build(trial).pattern
    assert all(0 < line.accepted < 8 for line in late)
    assert [line.active for line in late] == [clock.active(t).clients.tolist() for t in range(3)]
    assert [line.clock for line in late] == np.cumsum([clock.closing(t)[1] for t in range(3)]).tolist()
    assert late[-1].clock < slow[-1].clock


def test_probabilities_follow_from_the_clients_classes():
    pattern = "participation={name='Uniform', k=3, among={name='Bernoulli', p={popularity='halves'}}}"
    trial = Trial(load_preset("quickstart", [pattern]), 0, 1)
    dataset, parts = load_and_partition(trial.experiment, 1)
    expected = class_chances([dataset.train_y[part] for part in parts], seed=1)
    np.testing.assert_array_equal(build(trial).pattern.among.p, expected)
    assert len(set(expected)) > 5
    with pytest.raises(ConfigError, match=r"participation: .*did you mean 'halves'"):
        load_preset("quickstart", [pattern.replace("halves", "halfs")])


def test_a_clock_that_does_not_fit_is_rejected():
    for clock, message in (
        ("{cohort=31}", r"clock: cohort=31"),
        ("{policy={dead_line=1}}", r"clock: policy: .*did you mean 'deadline'"),
        ("{median=0}", r"clock\.median"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_preset("quickstart", [f"clock={clock}"])


def test_best_model_and_early_stop(tmp_path, monkeypatch):
    curve = [0.1, 0.5, 0.4, 0.5, 0.3, 0.9, 0.9]  # no improvement in rounds 2, 3 and 4
    monkeypatch.setattr(TrialParts, "evaluate", lambda parts, round, x: Evaluation(curve[round], 1 - curve[round]))
    changes = ["rounds=7", "local.epochs=1", "algorithms=['FedAvg']"]
    for metric in ("accuracy", "loss"):
        evaluate = f"evaluate={{patience=3, best=true, keep=1, metric='{metric}'}}"
        trial = Trial(load_preset("quickstart", [*changes, evaluate]), 0, 0)
        folder = tmp_path / metric
        interrupt(trial, folder, 2)
        run_trial(trial, folder)
        record = read(folder / "records" / trial.file_name)
        assert [line.stopped for line in record.rounds] == [None] * 4 + [True]
        assert record.is_complete
        best, *kept = (torch.load(folder / "models" / trial.file_name[:-6] / f"{name}.pt") for name in NAMES)
        same = [all(torch.equal(best[key], one[key]) for key in best) for one in kept]
        assert same == [False, True, False, False, False]
    times = write_times(folder)
    run_trial(trial, folder)
    assert write_times(folder) == times
    assert summarise([record]).notes[0] == "FedAvg, seed 0: stopped early after 5 of 7 rounds (evaluate.patience)"
    longer = Trial(load_preset("quickstart", [*changes, evaluate, "rounds=9"]), 0, 0)
    run_trial(longer, folder)  # repeats the trial, which stops after the same round
    extended = read(folder / "records" / trial.file_name)
    assert extended.header.rounds == 9
    assert timeless(extended.rounds) == timeless(record.rounds)
    curve[:] = [0.1, 0.1, 0.1, 0.5, 0.4, 0.4, 0.3]  # the model does not move in rounds 1, 2 and 5
    assert len(run(tmp_path / "still", *changes, "evaluate={patience=2}")) == 7
    curve[:] = [0.1, 0.5, 0.5]
    least = "evaluate={patience=1, min_delta=0.5}"  # 0.1 to 0.5 is no improvement
    assert len(run(tmp_path / "least", *changes, least)) == 2


def test_record_has_hashes_of_data_and_traces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_text("round,client\n0,3\n1,4\n2,5\n")
    pattern = "participation={name='Bernoulli', p=1.0, among={name='Trace', traces='log.csv'}}"
    experiment = load_preset("quickstart", ["rounds=3", "local.epochs=1", "algorithms=['FedAvg']", pattern])
    trial = Trial(Experiment.model_validate_json(experiment.model_dump_json()), 0, 0)
    monkeypatch.chdir("/")  # the configuration has the absolute path
    interrupt(trial, tmp_path / "run", 1)
    header = read(tmp_path / "run" / "records" / trial.file_name).header
    assert header.traces == [hashlib.blake2b((tmp_path / "log.csv").read_bytes(), digest_size=16).hexdigest()]
    assert header.data == data_hash(load("digits"))
    (tmp_path / "log.csv").write_text("round,client\n0,3\n1,4\n2,6\n")
    with pytest.raises(ConfigError, match=r"traces: changed since .* was begun"):
        run_trial(trial, tmp_path / "run")
    (tmp_path / "log.csv").write_text("round,client\n0,3\n1,4\n2,5\n")
    with monkeypatch.context() as patched:
        patched.setattr("fedcore.sim.experiment.config.data_hash", lambda dataset: "0" * 32)
        load_once.cache_clear()
        with pytest.raises(ConfigError, match=r"data: changed since .* was begun"):
            run_trial(trial, tmp_path / "run")
    load_once.cache_clear()
    run_trial(trial, tmp_path / "run")
    assert [line.active for line in rounds_of(trial, tmp_path / "run")] == [[3], [4], [5]]


def test_clients_of_a_log_have_the_names_of_the_data(tmp_path, monkeypatch):
    x, y, names = np.ones((6, 2), np.float32), np.zeros(6, int), ["site 2", "site 10", "site 1"]

    def trace(log, clients):
        mine = from_arrays(x, y, x, y, classes=2, clients=clients)
        monkeypatch.setitem(REGISTRY, "mine", Source(lambda: mine, "mine", (2,), 2))
        (tmp_path / "log.csv").write_text("round,client\n" + log)
        pattern = f"participation={{name='Bernoulli', p=1.0, among={{name='Trace', traces='{tmp_path}/log.csv'}}}}"
        model = "model={name='logistic', inputs=2, classes=2}"
        keys = ["data={name='mine'}", "partition={name='natural', clients=3}", model, pattern]
        return build(Trial(load_preset("quickstart", keys), 0, 0)).pattern.active(0).clients.tolist()

    assert trace("0,site 1\n1,site 10\n2,site 2\n", names * 2) == [0]
    assert trace("0,0\n1,2\n", names * 2) == [0]  # numbers
    assert trace("0,10\n0,02\n1,1\n", [2, 10, 1] * 2) == [1, 2]
    for log, clients, message in (
        ("0,site 01\n1,site 02\n1,site 10\n", names * 2, "client 0 is 'site 1' in the data and 'site 01' in the log"),
        ("0,1\n1,2\n", [1, 2, 3] * 2, "client 0 is '1' in the data and '0' in the log"),
        ("0,1\n0,2\n1,10\n", ["1", "2", "10"] * 2, "client 1 is '10' in the data and '2' in the log"),
    ):
        with pytest.raises(RangeError, match=message):
            trace(log, clients)


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
    assert [line.accepted for line in record.rounds] == [len(line.active) for line in record.rounds]
    assert [line.lr / record.rounds[0].lr for line in record.rounds] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert all(line.seconds.keys() == {"broadcast", "local", "aggregate", "evaluate"} for line in record.rounds)


def test_infinite_loss_is_recorded_as_none(tmp_path, monkeypatch):
    """The model itself is finite, so the trial continues; JSON has no infinity."""
    monkeypatch.setattr(InProcess, "evaluate", lambda *_: Evaluation(0.1, float("inf")))
    first, second = run(tmp_path, "rounds=2")
    assert (first.accuracy, first.loss, second.loss) == (0.1, None, None)
    assert first.norm > 0


def test_round_without_clients_and_a_long_label(tmp_path):
    method = f"algorithms=[{{name='FedAvg', label='{'a' * 300}'}}]"
    first, second = run(tmp_path, "rounds=2", method, 'participation={name="Bernoulli", p=0.0}')
    assert (first.active, first.accepted, first.steps, first.norm, first.uploads) == ([], 0, 0, None, 0)
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
    assert any(line.accepted < 9 for line in lines)


def test_server_rate_follows_the_cohort_and_client_rate_restarts(tmp_path):
    rate = "rate={lr={name='Staircase', initial=0.2, restarts=[2]}, server_lr={name='PerCohort', c=0.1, beta=2}}"
    lines = run(tmp_path, "rounds=4", "algorithms=['MimiC']", rate, "participation={name='Bernoulli', p=0.2}")
    assert len({len(line.active) for line in lines}) > 1
    for line in lines:
        assert line.gamma == pytest.approx(0.1 * len(line.active) / (line.round + 2))
    assert [line.lr for line in lines] == [0.2, 0.1, 0.2, 0.1]

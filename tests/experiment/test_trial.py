from dataclasses import replace

import numpy as np

from fedcore.experiment import load_preset
from fedcore.experiment.build import build
from fedcore.experiment.records import read
from fedcore.experiment.trial import Trial, run_trial, trials


def timeless(record):
    return [replace(line, seconds={}) for line in record.rounds]


def test_two_runs_are_equal_but_for_seconds(tmp_path, small):
    for trial in trials(small):
        records = []
        for folder in (tmp_path / "one", tmp_path / "two"):
            folder.mkdir(exist_ok=True)
            run_trial(trial, folder)
            records.append(read(folder / trial.file_name))
        assert timeless(records[0]) == timeless(records[1])


def test_another_seed_gives_another_run(tmp_path, small):
    for seed in (0, 1):
        run_trial(Trial(small, 0, seed), tmp_path)
    zero, one = (read(tmp_path / Trial(small, 0, seed).file_name) for seed in (0, 1))
    assert timeless(zero) != timeless(one)


def test_what_is_compared_differs_in_the_algorithm_alone(small):
    parts = [build(Trial(small, order, 1)) for order in range(len(small.algorithms))]
    for server, engine, pattern in parts[1:]:
        first_server, first_engine, first_pattern = parts[0]
        np.testing.assert_array_equal(server.x, first_server.x)
        np.testing.assert_array_equal(pattern.active(7), first_pattern.active(7))
        ours, theirs = (
            next(iter(clients.updates(source.broadcast([3]))))
            for clients, source in ((engine, server), (first_engine, first_server))
        )
        np.testing.assert_array_equal(np.asarray(ours.y), np.asarray(theirs.y))


def test_a_record_says_what_happened(tmp_path):
    experiment = load_preset(
        "quickstart",
        ["rounds=5", "evaluate.every=2", "rate.decay=0.5", 'participation={name="TimeVarying", share=0.1}'],
    )
    seen = []
    run_trial(Trial(experiment, 2, 0), tmp_path, seen.append)
    record = read(tmp_path / "2-mimic-seed0.jsonl")
    assert (record.header.algorithm, record.header.rounds, record.torn) == ("MimiC", 5, False)
    assert record.rounds == seen
    assert [line.accuracy is not None for line in record.rounds] == [False, True, False, True, True]
    assert [line.uploads for line in record.rounds] == [3, 6, 9, 12, 15]
    assert [line.heard for line in record.rounds] == [len(line.active) for line in record.rounds]
    assert [line.lr / record.rounds[0].lr for line in record.rounds] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert all(line.seconds.keys() == {"train", "server", "evaluate"} for line in record.rounds)


def test_a_round_without_clients_is_a_round(tmp_path):
    experiment = load_preset(
        "quickstart", ["rounds=2", "algorithms=['FedAvg']", 'participation={name="Bernoulli", p=0.0}']
    )
    run_trial(Trial(experiment, 0, 0), tmp_path)
    first, second = read(tmp_path / "0-fedavg-seed0.jsonl").rounds
    assert (first.active, first.heard, first.steps, first.norm, first.uploads) == ([], 0, 0, None, 0)
    assert first.accuracy == second.accuracy

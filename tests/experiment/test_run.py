import json
import multiprocessing
import os
import signal

import pytest

from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.records import read_folder
from fedcore.experiment.trial import trials


def test_all_trials_run_and_the_folder_can_be_run_again(tmp_path, small):
    events = []
    assert run_experiment(small, tmp_path / "run", jobs=2, on_event=events.append) == []
    records = read_folder(tmp_path / "run")
    assert [(record.header.algorithm, record.header.seed) for record in records] == [
        (method.label, seed) for method in small.algorithms for seed in small.seeds
    ]
    assert all(len(record.rounds) == 2 for record in records)
    assert sum(event.round is not None for event in events) == 12
    assert sum(event.over for event in events) == 6
    assert load_preset(tmp_path / "run" / "config.json") == small
    assert {"fedcore", "torch", "numpy", "isa"} <= json.loads((tmp_path / "run" / "build.json").read_text()).keys()


def test_a_folder_that_holds_files_is_refused(tmp_path, small):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        run_experiment(small, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_trial_that_fails_does_not_lose_the_others(tmp_path, small):
    spoiled, *others = trials(small)[1:]

    def put_a_folder_in_its_way(event):
        (tmp_path / "records" / spoiled.file_name).mkdir(exist_ok=True)

    failed = run_experiment(small, tmp_path, jobs=1, on_event=put_a_folder_in_its_way)
    assert [event.trial for event in failed] == [spoiled]
    assert failed[0].error is not None
    assert failed[0].error.startswith("IsADirectoryError")
    (tmp_path / "records" / spoiled.file_name).rmdir()
    assert len(read_folder(tmp_path)) == 1 + len(others)
    (log,) = (tmp_path / "records").glob("*.traceback.txt")
    assert log.read_text().startswith("Traceback")
    assert str(log) in failed[0].error


def test_a_process_that_is_killed_costs_its_own_trial_only(tmp_path, small):
    killed = []

    def kill_the_first(event):
        if event.round is None and not event.over and not killed:
            (child,) = multiprocessing.active_children()
            killed.append(event.trial)
            os.kill(child.pid, signal.SIGKILL)

    failed = run_experiment(small, tmp_path / "run", jobs=1, on_event=kill_the_first)
    assert [event.trial for event in failed] == killed
    assert failed[0].error == "its process ended with exit status -9"
    whole = [record for record in read_folder(tmp_path / "run") if len(record.rounds) == 2]
    assert len(whole) == len(trials(small)) - 1
